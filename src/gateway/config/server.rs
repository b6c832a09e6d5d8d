//! The sections that exist once: `[server]`, `[timeouts]`, `[retry]`, `[slo]`, `[health]`,
//! `[access_log]` and `[log]`, in the form the gateway works with.
//!
//! All durations are positive and at most `defaults::MAX_PERIOD`; all shares are finite and within
//! their stated range. Defaults, with their reasons, are in `defaults.rs`; the keys are described for
//! operators in `config/sluice.toml`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use sluice_core::base::ByteSize;

/// Sockets, threads and limits of the client side.
#[derive(Clone, Debug, PartialEq)]
pub struct Server {
    /// Where clients connect. Changing it needs a restart.
    pub listen: SocketAddr,
    /// Where metrics, dashboard and admin API are served. Never equal to `listen`; changing it needs a restart.
    pub admin: SocketAddr,
    /// Largest request body; 413 above it.
    pub max_body: ByteSize,
    /// How long a shutdown waits for running requests.
    pub drain_timeout: Duration,
    /// Threads that serve requests, at least 1. Changing it needs a restart.
    pub threads: usize,
    /// Longest time for a request's headers to arrive.
    pub header_timeout: Duration,
    /// Longest pause while a request's body arrives; 408 after it.
    pub body_timeout: Duration,
    /// How long an idle client connection is kept open.
    pub keepalive: Duration,
}

/// How long each stage of a request may take. A stream has no limit on its whole length.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeouts {
    /// TCP connect to a backend.
    pub connect: Duration,
    /// From the request sent to the first byte of the response, for streams.
    pub first_byte: FirstByte,
    /// Longest silence inside a response that has begun.
    pub idle: Duration,
    /// From the request sent to the first byte of a response that is not streamed (the engine answers
    /// those only when everything has been generated).
    pub response: Duration,
}

/// The first-byte timeout, which grows with the prompt: `base + per_1k_prompt_tokens * tokens / 1000`.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstByte {
    /// For an empty prompt.
    pub base: Duration,
    /// Added for each 1,000 prompt tokens; may be zero.
    pub per_1k_prompt_tokens: Duration,
}

/// How often a request may be tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Retry {
    /// Attempts in all, the first included; 1 means no retry.
    pub attempts: u32,
}

/// Objectives, for goodput, the tuner and experiments. An absent target is not part of the judgement.
#[derive(Clone, Debug, PartialEq)]
pub struct Slo {
    /// Largest time to first token.
    pub ttft: Option<Duration>,
    /// Largest time per output token.
    pub tpot: Option<Duration>,
    /// Largest end-to-end latency.
    pub e2el: Option<Duration>,
    /// Share of requests that should meet all targets, in `(0, 1]`.
    pub attainment: f64,
}

/// How backends leave and re-enter rotation.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    /// Between two probes of one backend.
    pub probe_interval: Duration,
    /// How long a probe may take.
    pub probe_timeout: Duration,
    /// Failures in a row (probes or requests) until a backend is ejected, at least 1.
    pub failures: u32,
    /// Time out of rotation after the first ejection; doubles with each further one.
    pub ejection_base: Duration,
    /// Longest time out of rotation, at least `ejection_base`.
    pub ejection_max: Duration,
    /// A backend with running requests that has sent no byte for this long is taken for stuck.
    pub stall: Duration,
}

/// Where one line per request goes.
#[derive(Clone, Debug, PartialEq)]
pub struct AccessLog {
    /// The destination.
    pub path: LogTarget,
    /// Share of requests that are written, in `[0, 1]`.
    pub sample: f64,
}

/// A destination for lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard error; written `"-"`.
    Stderr,
    /// A file that is appended to.
    File(PathBuf),
}

/// The gateway's own log, on stderr.
#[derive(Clone, Debug, PartialEq)]
pub struct Log {
    /// The least important level that is written.
    pub level: LogLevel,
    /// Shape of a line.
    pub format: LogFormat,
}

/// Importance of a log line, most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Something failed that somebody should look at.
    Error,
    /// Something is off but the gateway goes on by itself.
    Warn,
    /// Starts, stops, reloads, ejections.
    Info,
    /// One line per decision.
    Debug,
    /// Everything.
    Trace,
}

/// Shape of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line, for machines.
    Json,
}
