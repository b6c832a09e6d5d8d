//! The tables that exist once: `[server]`, `[timeouts]`, `[retry]`, `[slo]`, `[health]`,
//! `[access_log]`, `[log]`.
//!
//! The sentence above a key is also the documentation for operators: the reference file is
//! generated from it. It gives the effect of the value, the direction in which to change it, and
//! the reason for the default.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::auth::PriorityRange;
use super::certificates::ServerTls;
use super::continuation::Continue;
use super::cors::Cors;
use super::file::Entry;
use super::limits;
use super::problem::Situation;
use super::proxies::AddressRange;
use super::report::{Names, Report};
use super::setting::Scalar;
use super::table::table;
use super::value::words;
use sluice_core::base::ByteSize;
use sluice_core::meter::slo::Objectives;

/// Address of metrics, dashboard and admin API, unless configured otherwise.
pub const DEFAULT_ADMIN: &str = "127.0.0.1:8081";

table! {
    /// Sockets, threads and limits of the client side.
    pub struct Server {
        /// Address on which the gateway serves clients. The default is reachable from this machine
        /// only; ":8080" and "0.0.0.0:8080" listen on all IPv4 addresses, "[::]:8080" also on IPv6.
        /// `/health` answers 200 while the gateway runs, `/ready` while a pool has a backend that
        /// takes requests.
        pub listen: SocketAddr = default("127.0.0.1:8080").needs_restart();
        /// Address of metrics, dashboard and admin API. It must not overlap with `listen`, so that
        /// clients cannot reach it. An address that other machines reach needs `auth.admin_token`.
        pub admin: SocketAddr = default(DEFAULT_ADMIN).needs_restart();
        /// Largest request body; a larger one gets 413. The gateway holds a body in memory until it
        /// has sent it. One million tokens of text are about 4 MB; the rest is room for images.
        pub max_body: ByteSize = default("32MiB").within("1", "1GiB");
        /// Time for which a shutdown still serves new requests while `/ready` already answers 503.
        /// So load balancers and Kubernetes stop sending before connections are refused. Set it
        /// longer than they take to notice, such as "10s".
        pub lame_duck: Duration = duration_or_zero("0s");
        /// Longest time that a shutdown waits for running requests, after `lame_duck`.
        pub drain_timeout: Duration = duration("5m");
        /// Threads that serve requests.
        pub threads: usize = of_machine(OfMachine::Cores).within("1", "1024").example("8").needs_restart();
        /// Time within which all headers of a request must arrive.
        pub header_timeout: Duration = duration("10s");
        /// Period in which at least body_timeout * body_min_rate bytes of a request body must
        /// arrive, unless the body ends; otherwise the client gets 408. So no client can pause for
        /// longer than one period.
        pub body_timeout: Duration = duration("30s");
        /// Lowest rate in bytes per second at which a client may send a request body, on average
        /// over `body_timeout`. Lower it for clients on very slow networks.
        pub body_min_rate: ByteSize = default("8KiB").within("1", "1GiB");
        /// Memory for all request bodies together. A body counts from its first byte until the
        /// gateway no longer needs it. When the memory is used up, requests get 503. Bodies over 1
        /// MiB can use only seven eighths of it, so that small requests are still served. One API
        /// key (without keys: one address) may use all of it while no other sends bodies. When
        /// others want their share, the newest unfinished uploads of the key or address that uses
        /// most get 503.
        pub max_body_memory: ByteSize = of_machine(OfMachine::BodyMemory).within("1", "16384GiB").example("4GiB");
        /// Memory for all responses that wait because their clients read slower than engines send.
        /// Each response may use 1 MiB of it. When several clients (keys or networks) want memory,
        /// each may use a share. A response at either limit makes the gateway stop reading from the
        /// engine until the client reads.
        pub max_response_memory: ByteSize =
            of_machine(OfMachine::BodyMemory).within("1MiB", "16384GiB").example("4GiB");
        /// Client connections at once. The next connection gets 503 to its first request and is
        /// closed. A request on a connection with HTTP/2 counts as a connection, too; one above the
        /// limit is refused in a way that is safe to retry. One address may have all connections
        /// while no other address connects. When others connect, the gateway closes the oldest
        /// connections of that address that have no request.
        pub max_connections: usize =
            of_machine(OfMachine::Connections).within("1", limits::MAX_CONNECTIONS).example("65536");
        /// Client connections at once from one IP address (with IPv6, from one /64 network), even
        /// if more are free. A load balancer in front counts as one address, unless
        /// `trusted_proxies` contains it and it names its clients.
        pub max_connections_per_address: Option<usize> =
            optional("none, but only three quarters of max_connections may have requests of one address")
                .within("1", limits::MAX_CONNECTIONS)
                .example("1000");
        /// Proxies and load balancers that the gateway believes when they name their client:
        /// addresses such as "10.1.2.3" and ranges such as "10.0.0.0/8". If the peer is one of
        /// them, the client is the last address in `X-Forwarded-For` that is not a trusted proxy.
        /// That address counts for the client's share of connections and memory, and appears in
        /// logs and records. From other peers the header is ignored. List only machines that append
        /// to the header: behind a machine that forwards the header unchanged, a client could take
        /// any address.
        pub trusted_proxies: Vec<AddressRange> = default("[]").at_most(limits::MAX_TRUSTED_PROXIES);
        /// Whether connections from `trusted_proxies` begin with a PROXY header, version 1 or 2
        /// (HAProxy: `send-proxy-v2`, nginx: `proxy_protocol on`, AWS: proxy protocol v2), before
        /// TLS and HTTP. A connection from a trusted proxy without this header is closed. From any
        /// other address, a connection with such a header is closed, and one without it is served
        /// as usual.
        pub proxy_protocol: bool = default("false");
        /// Time after which an idle client connection is closed. Keep it above the idle timeout of
        /// your load balancer (often 60s), which must close first.
        pub keepalive: Duration = duration("75s");
        /// Origins whose pages may use `listen` from a browser, written as browsers send them; "*"
        /// allows every page, [] none. The list replaces the policy of the engines. Pages send keys
        /// in headers, so cookies are never allowed. The admin port serves only the gateway's own
        /// page.
        pub cors: Option<Cors> = optional("the origins that the engines allow (vLLM: --allowed-origins)")
            .example("[\"https://chat.example.com\"]");
        /// The lowest priority that a request may ask for if no keys are configured; a lower number
        /// is served earlier. A number below this one counts as this one, and a request that asks
        /// for none has 0. So by default a request may step back, but cannot precede others.
        pub priority_min: i32 = default("0").within("-2147483648", "0");
        /// The highest priority that a request may ask for if no keys are configured.
        pub priority_max: i32 = default("2147483647").within("0", "2147483647");
        /// TLS on `listen`, with HTTP/2 and HTTP/1.1. A reload reads the files again; open
        /// connections stay.
        pub tls: Option<ServerTls> = optional("none: requests and keys cross the network in plain text");
    }
}

impl Server {
    /// The priorities of requests without keys.
    pub fn priorities(&self) -> PriorityRange {
        PriorityRange { default: 0, min: self.priority_min, max: self.priority_max }
    }

    /// Number of connections that only networks within their share may use for requests, so that
    /// one network cannot lock out the others. It is a quarter, or fewer if
    /// `max_connections_per_address` leaves fewer.
    pub fn connections_for_others(&self) -> usize {
        let left = self.max_connections_per_address.map_or(usize::MAX, |max| self.max_connections.saturating_sub(max));
        left.min(self.max_connections / 4)
    }

    /// Whether the gateway believes a peer at this address when the peer names its client.
    pub fn is_trusted_proxy(&self, address: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|range| range.contains(address))
    }
}

table! {
    /// Limits on the stages of a request. The whole length of a stream has no limit.
    pub struct Timeouts {
        /// Longest time to connect to a backend: to resolve the name, try all addresses in turn,
        /// and set up TLS. The default leaves room for one lost SYN, which the kernel repeats after
        /// 1 s.
        pub connect: Duration = duration("1500ms");
        /// Longest pause in which a backend takes no byte of a request, or a client no byte of a
        /// response (nginx: `proxy_send_timeout`, `send_timeout`). A client that takes less than 16
        /// KiB in this time may be cut, too.
        pub send: Duration = duration("60s");
        /// Longest time without a token in a stream, and longest silence in another response that
        /// has begun. Comments, pings and empty events are not tokens.
        pub idle: Duration = duration("60s");
        /// Longest time without a token in a stream whose engine provably works, for example while
        /// a tool parser holds back the arguments of a call. An engine provably works if its
        /// counters grow by more tokens than all streams receive.
        pub silent: Duration = duration("10m");
        /// Longest wait for a response that is not streamed. The engine sends it only when all of
        /// it is generated.
        pub response: Duration = duration("10m");
        /// Longest time without a byte in either direction of a WebSocket (/v1/realtime).
        pub realtime_idle: Duration = duration("5m");
        /// Longest time that a WebSocket is open. It holds a slot all the time.
        pub realtime: Duration = duration("1h");
        /// Longest wait for the first token of a stream: base + per_1k_prompt_tokens for each 1,000
        /// prompt tokens.
        pub first_byte: FirstByte = table();
    }
}

table! {
    /// The first-byte timeout, which grows with the prompt:
    /// `base + per_1k_prompt_tokens * tokens / 1000`.
    pub struct FirstByte {
        /// Longest wait if the prompt is empty. It includes the queue of the engine. Lower it to
        /// give up on a stuck engine sooner.
        pub base: Duration = duration("60s");
        /// Time added for each 1,000 prompt tokens. Raise it for slow GPUs.
        pub per_1k_prompt_tokens: Duration = duration_or_zero("1s");
    }
}

table! {
    /// Retries of requests.
    pub struct Retry {
        /// Attempts per request, the first included; 1 means no retry. A retry happens only before
        /// the first token of a stream, or before the first byte of another response. It goes to
        /// another backend if there is one, but to the same backend if that backend had only closed
        /// an idle connection.
        pub attempts: u32 = default("2").within("1", "8");
        /// Whether a stream goes on after tokens were sent: another engine of the pool gets the
        /// request with the text so far, and the client sees one answer. A request is continued at
        /// most twice. Tools, schemas, seeds and log probabilities are among the reasons not to
        /// try; then the stream ends with an error event. A client declines with the header
        /// `x-sluice-no-continue`.
        pub on_failure as "continue": Continue = default("failures");
    }
}

table! {
    /// Objectives for goodput, the tuner and experiments. No request is judged by a target that is
    /// absent.
    pub struct Slo {
        /// Largest time to first token.
        pub ttft: Option<Duration> = optional_duration("no target").example("2s");
        /// Time added to ttft for each 1,000 prompt tokens, because a prefill takes time in
        /// proportion to the prompt's length. Set it where one pool serves short and long prompts.
        pub ttft_per_1k_prompt_tokens: Duration = duration_or_zero("0s");
        /// Largest time per output token.
        pub tpot: Option<Duration> = optional_duration("no target").example("50ms");
        /// Largest end-to-end latency.
        pub e2el: Option<Duration> = optional_duration("no target").example("13s");
        /// Share of requests that should meet all targets.
        pub attainment: f64 = default("0.99").within("0.01", "1");
    }
}

impl Slo {
    /// No target.
    pub(super) const NONE: Self =
        Self { ttft: None, ttft_per_1k_prompt_tokens: Duration::ZERO, tpot: None, e2el: None, attainment: 0.99 };

    /// The targets in the form by which finished requests are judged.
    pub fn objectives(&self) -> Objectives {
        let Self { ttft, ttft_per_1k_prompt_tokens: ttft_per_1k, tpot, e2el, attainment: _ } = *self;
        Objectives { ttft, ttft_per_1k, tpot, e2el }
    }

    /// Replaces the value of `key` by the value in `general`.
    pub(super) fn inherit(&mut self, key: &str, general: &Self) {
        match key {
            "ttft" => self.ttft = general.ttft,
            "ttft_per_1k_prompt_tokens" => self.ttft_per_1k_prompt_tokens = general.ttft_per_1k_prompt_tokens,
            "tpot" => self.tpot = general.tpot,
            "e2el" => self.e2el = general.e2el,
            _ => self.attainment = general.attainment,
        }
    }
}

table! {
    /// How backends leave and re-enter rotation.
    pub struct Health {
        /// Time between two probes of a backend. The death of an idle backend is noticed within
        /// about two probes.
        pub probe_interval: Duration = duration("2s");
        /// Longest time that a probe may take.
        pub probe_timeout: Duration = duration("2s");
        /// Failures in a row (probes or requests) after which a backend is ejected. Failure of half
        /// of the last 32 requests ejects it, too. The only ready backend of a pool is ejected if
        /// it refuses connections or hangs, but not for failed responses or timeouts, which would
        /// turn some failures into an outage; it is shown as failing instead. Nor is a backend
        /// ejected for failed responses or timeouts of one client (key, or without keys network)
        /// while it serves other clients.
        pub failures: u32 = default("3").within("1", "1000");
        /// Time out of rotation after the first ejection; doubles with each ejection in a row.
        pub ejection_base: Duration = duration("5s");
        /// Longest time out of rotation.
        pub ejection_max: Duration = duration("60s");
        /// Largest share of a pool that may be out of rotation for failed responses or timeouts,
        /// rounded down. Above 0, the limit is at least one backend, but never all. Backends that
        /// are down, dead or hung count, but leave the rotation however many are out. 0 ejects only
        /// backends that refuse connections, hang, or refuse the gateway's credentials.
        pub max_ejected: f64 = default("0.5").within("0", "1");
        /// Time without a token after which the gateway doubts a backend with running requests,
        /// even if probes succeed. The backend is then treated as hung if the engine's counters
        /// stand still for a third of this time, too. Heads, pings and empty events of streams are
        /// not tokens.
        pub stall: Duration = duration("30s");
    }
}

table! {
    /// The access log, one line per request.
    pub struct AccessLog {
        /// A file in a folder that exists, or "-" for stderr. To rotate the file, rename it and
        /// send SIGUSR1. Without the signal, the gateway notices the rename within a second, when
        /// there are lines to write.
        pub path: LogTarget = required("write a file, or \"-\" for stderr").example("-");
        /// Share of requests that get a line.
        pub sample: f64 = default("1.0").within("0", "1");
        /// Whether lines have the address of the client, as `client`. The address is personal data
        /// in many places. Behind a proxy it is the proxy's address, unless
        /// `server.trusted_proxies` contains the proxy.
        pub client_address: bool = default("false");
    }
}

/// A destination for lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard error; written `"-"`.
    Stderr,
    /// A file to whose end the lines are written.
    File(PathBuf),
}

impl Scalar for LogTarget {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let stderr = String::parse(written, report)? == "-";
        if stderr { Ok(Self::Stderr) } else { PathBuf::parse(written, report).map(Self::File) }
    }

    fn text(&self, names: &Names) -> String {
        match self {
            Self::Stderr => "-".to_owned(),
            Self::File(path) => path.text(names),
        }
    }

    fn placeholder() -> Option<Self> {
        Some(Self::Stderr)
    }
}

table! {
    /// The gateway's own log, on stderr.
    pub struct Log {
        /// The least important level that is written.
        pub level: LogLevel = default("info");
        /// Lines of text, or one JSON object per line.
        pub format: LogFormat = default("text");
    }
}

words! {
    /// Importance of a log line, most important first.
    #[derive(PartialOrd, Ord)]
    pub enum LogLevel {
        /// A failure that needs attention.
        Error = "error",
        /// A fault that the gateway handles itself.
        Warn = "warn",
        /// Starts, stops, reloads, ejections.
        Info = "info",
        /// One line per decision.
        Debug = "debug",
        /// Everything.
        Trace = "trace",
    }
}

words! {
    /// Shape of a log line.
    pub enum LogFormat {
        /// For people.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}
