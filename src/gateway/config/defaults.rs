//! Every default and every bound of the gateway, once: value, unit, reason.
//!
//! The first half are defaults: what a key means when nobody wrote it. The second half are bounds:
//! what no configuration can exceed. No other module defines a default for a configuration key, and
//! command line flags carry none of their own, so there are never two answers to "what is it when I
//! say nothing?".
//!
//! The bounds of the request path that no key controls (sizes of maps, buffers, label sets) are here
//! as well, because "what is the most memory this can take?" should be answerable from one page.

use std::time::Duration;

use super::{LogFormat, LogLevel, OnExit, OnStart, Order, Policy, UsageInjection};
use sluice_core::base::{ByteSize, Tokens};

// ---- [server] -----------------------------------------------------------------------------------

/// Client address: loopback, so that an open gateway is never exposed by accident.
pub const LISTEN: &str = "127.0.0.1:8080";
/// Admin address: always its own socket, since its routes must never be reachable by clients.
pub const ADMIN: &str = "127.0.0.1:8081";
/// Largest request body: 1M tokens of text are about 4 MB; the rest is room for images in base64.
pub const MAX_BODY: ByteSize = ByteSize(32 << 20);
/// How long a shutdown waits for running requests: longer than nearly every completion.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);
/// From a connection's first byte of a request to the end of its headers.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest pause while a request body arrives; slower senders hold memory for nothing.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle time of a client connection: above the 60 s of common load balancers, which must close first.
pub const KEEPALIVE: Duration = Duration::from_secs(75);

// ---- [timeouts] and [retry] ---------------------------------------------------------------------

/// TCP connect to a backend: in one network it takes about a millisecond, and the kernel repeats a lost SYN after 1 s,
/// which happens when a burst overflows the engine's listen queue: that one repetition gets its chance.
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// First byte of a response, before the part that grows with the prompt: covers the engine's own queue.
pub const FIRST_BYTE_BASE: Duration = Duration::from_secs(60);
/// Added per 1,000 prompt tokens: a slow GPU prefills 1,000 tokens of a large model well within 1 s.
pub const FIRST_BYTE_PER_1K: Duration = Duration::from_secs(1);
/// Longest silence inside a stream: far above any gap that a preempted sequence sees.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Whole wait for a response that is not streamed: its first byte comes only when all is generated.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(600);
/// Attempts per request in all, the first included: one other backend gets a chance, no storm follows.
pub const RETRY_ATTEMPTS: u32 = 2;

// ---- [[model]] ----------------------------------------------------------------------------------

/// Prompt tokens assumed per image, audio or video part: between a small image (256) and a large one (1,600).
pub const MEDIA_PART_TOKENS: Tokens = Tokens(1_000);

// ---- [[pool]] -----------------------------------------------------------------------------------

/// Picks by outstanding work: prompts differ a hundredfold in cost, so counting requests misleads.
pub const POLICY: Policy = Policy::LeastWork;
/// Requests in flight per backend: `vllm serve`'s own default for `--max-num-seqs` on a large GPU is
/// 1,024 and on a small one 256; up to this many nothing waits inside the engine.
pub const SLOTS: u32 = 256;
/// Short prompts first, aged: they are the ones whose wait shows, and a long one loses little by it.
pub const QUEUE_ORDER: Order = Order::ShortestFirst;
/// Usage is requested once, at the end: exact totals without editing every event.
pub const USAGE: UsageInjection = UsageInjection::Final;
/// Waiting requests per pool: two full backends' worth; beyond that an early 503 is kinder than a late one.
pub const QUEUE_LENGTH: usize = 512;
/// Longest wait in the queue: people give up on a chat that has not begun after about this time.
pub const QUEUE_TIMEOUT: Duration = Duration::from_secs(20);
/// With `shortest_first`, each 1,000 prompt tokens count as this much later an arrival. About what a
/// prefill costs, with a margin; bounds how often a long prompt can be overtaken.
pub const QUEUE_AGING_PER_1K: Duration = Duration::from_millis(500);
/// Share of new work relative to the other backends of a pool.
pub const WEIGHT: f64 = 1.0;

// ---- [slo] --------------------------------------------------------------------------------------

/// Share of requests that should meet their objectives.
pub const ATTAINMENT: f64 = 0.99;

// ---- [health] -----------------------------------------------------------------------------------

/// Between two probes of one backend: a dead idle backend is noticed within about two of them.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// Answer time of a probe: the engine answers `/health` from its front process even under load.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Failures in a row until a backend is ejected: one or two can be chance, three are a state.
pub const EJECT_FAILURES: u32 = 3;
/// First time out of rotation; doubles each time until `EJECTION_MAX`.
pub const EJECTION_BASE: Duration = Duration::from_secs(5);
/// Longest time out of rotation: a repaired backend is back within a minute.
pub const EJECTION_MAX: Duration = Duration::from_secs(60);
/// No progress on any stream of a busy backend for this long: it is stuck, whatever `/health` says.
pub const STALL: Duration = Duration::from_secs(30);

// ---- [fleet] ------------------------------------------------------------------------------------

/// Folder of the journal, beside the configuration: it belongs to this gateway and to no other.
pub const FLEET_STATE: &str = ".sluice";
/// Above the ports that people give to engines by hand, below those that the system gives to connections.
pub const FLEET_PORTS: std::ops::RangeInclusive<u16> = 8100..=8999;
/// An engine that outlived the gateway goes on: a crash of ours should not cost minutes of loading.
pub const FLEET_ON_START: OnStart = OnStart::Adopt;
/// Who stops the gateway wants its GPUs back.
pub const FLEET_ON_EXIT: OnExit = OnExit::Stop;
/// A drain waits as long as a shutdown does: longer than nearly every completion.
pub const FLEET_DRAIN: Duration = Duration::from_secs(300);
/// A command that starts or stops an engine elsewhere; container images may have to be fetched.
pub const CONTROL_TIMEOUT: Duration = Duration::from_secs(120);
/// An idle vLLM ends within a few seconds of SIGTERM.
pub const FLEET_GRACE: Duration = Duration::from_secs(10);
/// Each phase of a start may go without progress for several times the longest that is known of it.
pub const FLEET_START_TIMEOUT_SCALE: f64 = 1.0;
/// The first generations of a fresh engine are slow; five bring it to its pace.
pub const FLEET_WARM_UP: u32 = 5;
/// Slots come back over this time: caches are cold and a full load at once would show in the tail.
pub const FLEET_RAMP: Duration = Duration::from_secs(10);
/// Out of memory under load shows within minutes, if at all.
pub const FLEET_SETTLE: Duration = Duration::from_secs(600);
/// One crash is chance; five in ten minutes are a state that restarting does not change.
pub const FLEET_RESTARTS: u32 = 5;
/// See [`FLEET_RESTARTS`].
pub const FLEET_RESTART_WINDOW: Duration = Duration::from_secs(600);
/// The first wait before an unplanned restart: memory and ports of the one before come free.
pub const FLEET_BACKOFF: Duration = Duration::from_secs(1);
/// The longest: a cause that has gone away is noticed within a minute.
pub const FLEET_BACKOFF_MAX: Duration = Duration::from_secs(60);
/// The others should not be more than this full after one has been taken out: bursts need the rest.
pub const FLEET_HEADROOM: f64 = 0.8;

// ---- [access_log] -------------------------------------------------------------------------------

/// Share of requests written to the access log, when there is one.
pub const ACCESS_LOG_SAMPLE: f64 = 1.0;

// ---- [log] --------------------------------------------------------------------------------------

/// Starts, stops, reloads and ejections; silent while all is well.
pub const LOG_LEVEL: LogLevel = LogLevel::Info;
/// For people: who collects logs by machine says so.
pub const LOG_FORMAT: LogFormat = LogFormat::Text;

// ---- `sluice serve --backend URL ...` without a file ----------------------------------------------

/// Prompt length that separates the short from the long pool: the contract's sample.
pub const FLAG_THRESHOLD: Tokens = Tokens(5_000);
/// Long prompts in prefill at once on a backend of the short pool: one, so that short ones keep moving.
pub const FLAG_SHORT_LONG_SLOTS: u32 = 1;
/// Long prompts in prefill at once on a backend of the long pool.
pub const FLAG_LONG_LONG_SLOTS: u32 = 2;

// ---- Bounds of what a configuration may ask for ---------------------------------------------------

/// Pools: each has its own queue and metric labels.
pub const MAX_POOLS: usize = 64;
/// Backends over all pools: the number of label values of the per-backend metrics.
pub const MAX_BACKENDS: usize = 1_024;
/// Model names (aliases not counted): label values, and one token estimator each.
pub const MAX_MODELS: usize = 512;
/// Aliases over all models: they only cost a map entry.
pub const MAX_ALIASES: usize = 4_096;
/// API keys: one lookup per request, one small counter block each.
pub const MAX_KEYS: usize = 10_000;
/// Requests waiting in one pool: at 100,000 each further one would wait for minutes anyway.
pub const MAX_QUEUE_LENGTH: usize = 100_000;
/// Requests in flight on one backend: no engine runs more sequences than this.
pub const MAX_SLOTS: u32 = 65_536;
/// Threads of the data plane.
pub const MAX_THREADS: usize = 1_024;
/// Largest `server.max_body` that may be configured: bodies are held in memory until they are sent.
pub const MAX_MAX_BODY: ByteSize = ByteSize(1 << 30);
/// Attempts per request that may be configured: more only multiplies load when everything is down.
pub const MAX_RETRY_ATTEMPTS: u32 = 8;
/// Generations of a warm-up: beyond it nothing gets warmer.
pub const MAX_FLEET_WARM_UP: u32 = 1_000;
/// Unplanned restarts within a window.
pub const MAX_FLEET_RESTARTS: u32 = 1_000;
/// Golden prompts of one model: each delays every restart.
pub const MAX_GOLDEN: usize = 64;
/// Failures until ejection that may be configured: beyond it nothing would ever be ejected.
pub const MAX_EJECT_FAILURES: u32 = 1_000;
/// Longest duration that any key takes (30 days): keeps arithmetic on instants far from overflow.
pub const MAX_PERIOD: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Largest number of tokens that any key takes: keeps sums of them far from overflow.
pub const MAX_TOKENS: Tokens = Tokens(1_000_000_000_000);
/// Bytes of a name (pool, backend, key): they become metric labels and response headers.
pub const MAX_NAME_BYTES: usize = 64;
/// Bytes of a model name: repository paths are longer than other names.
pub const MAX_MODEL_NAME_BYTES: usize = 256;
/// Bytes of a configuration file, and of a file that a `file:` reference names.
pub const MAX_FILE_BYTES: u64 = 4 << 20;
/// Problems listed in one report: beyond that the rest is only counted.
pub const MAX_PROBLEMS: usize = 200;

// ---- Bounds of the request path that no key controls ----------------------------------------------

/// Bytes of a request's headers together: 431 above it.
pub const MAX_HEADER_BYTES: usize = 64 << 10;
/// Number of request headers: 431 above it.
pub const MAX_HEADERS: usize = 128;
/// Bytes of a client's `x-request-id` that are accepted; longer ones are replaced.
pub const MAX_REQUEST_ID_BYTES: usize = 128;
/// Longest reuse of an idle upstream connection: the engine closes its side at 5 s, and a request sent
/// into that close would fail.
pub const UPSTREAM_IDLE: Duration = Duration::from_secs(4);
/// `Retry-After` is never shorter: HTTP counts in seconds.
pub const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// `Retry-After` is never longer: a client told to wait for minutes has been told to go away.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_addresses_are_addresses() {
        let addresses: Vec<std::net::SocketAddr> = [LISTEN, ADMIN].iter().map(|text| text.parse().unwrap()).collect();
        assert_ne!(addresses[0], addresses[1]);
    }

    #[test]
    fn defaults_are_within_their_bounds() {
        assert!(MAX_BODY <= MAX_MAX_BODY && SLOTS <= MAX_SLOTS && QUEUE_LENGTH <= MAX_QUEUE_LENGTH);
        assert!(RETRY_ATTEMPTS <= MAX_RETRY_ATTEMPTS && EJECTION_BASE <= EJECTION_MAX && MAX_PERIOD > RESPONSE_TIMEOUT);
        assert!(UPSTREAM_IDLE < Duration::from_secs(5), "the engine closes idle connections at 5 s");
    }
}
