//! The load generator: sends requests on a schedule and measures what a client sees.
//!
//! It exists because the product's claims are about tails, and a tail is only as honest as the
//! clock that measured it. So it is a witness: it shares no code with the gateway's request path,
//! reads the bytes of the answers itself, and decides when a request *should* have been sent before
//! the run begins. What is late by our own fault is in the result, and so is the load that was really delivered.
//!
//! | file | question |
//! |---|---|
//! | `workload`, `length`, `body`, `adapters` | what is asked: classes, lengths, prompts, LoRA mixes |
//! | `dataset` | the same, read from files: conversations, traces, the gateway's access log |
//! | `session` | conversations of several turns |
//! | `arrival` | when: Poisson, gamma, constant, bursts, ramps, steps, recorded, or a closed loop |
//! | `client`, `target` | how it is sent: HTTP/1.1, keep-alive, one task for each stream |
//! | `events` | what an answer's bytes mean, and when they meant it |
//! | `run`, `progress` | all of it together, until everything has ended or it is told to stop |
//! | `scrape`, `lag` | what the servers say of themselves, and how well we kept up |
//! | `result`, `file`, `csv` | what a run leaves behind: one record for each request; on disk |
//! | `metrics`, `steady`, `slices` | the statistics of `vllm bench serve`; the steady window; by class, adapter, pool |
//! | `believe` | whether a run can be believed |
//! | `table`, `report`, `knee` | the numbers for people: in the terminal, as HTML with plots |
//! | `compare` | two results: what changed, how sure that is, whether it matters |
//! | `search` | the highest rate at which the objectives hold |
//!
//! Definitions are those of `vllm bench serve`, with two differences, both on the side of truth: an
//! error inside a stream and a stream that stops before its end are failures, not short successes.
//!
//! Everything random follows from one seed, so two runs with the same plan send the same bytes at
//! the same times. Not here: TLS, HTTP/2.

pub mod adapters;
pub mod arrival;
pub mod believe;
pub mod body;
pub mod client;
pub mod compare;
pub mod csv;
pub mod dataset;
pub mod events;
pub mod file;
pub mod lag;
pub mod knee;
pub mod length;
pub mod metrics;
pub mod progress;
pub mod report;
pub mod result;
pub mod run;
pub mod scrape;
pub mod search;
pub mod session;
pub mod slices;
pub mod steady;
pub mod table;
mod target;
pub mod workload;

#[cfg(any(test, feature = "testing"))]
pub mod mock;

pub use adapters::{Adapters, Choice};
pub use arrival::{Arrival, Extent, MAX_SECONDS};
pub use body::{Api, Fields, Tokens};
pub use client::{Client, Failure, Timing};
pub use length::Length;
pub use metrics::{Distribution, Metrics};
pub use progress::Progress;
pub use result::{Outcome, Record, RunConfig, RunResult, Slo};
pub use run::{Plan, run};
pub use session::Sessions;
pub use workload::{Class, Prefix, PrefixKind, Source, Workload};

use sluice_core::base::Rng;

/// Why a load cannot be generated as asked. All of them are mistakes of the caller, found before
/// anything is sent.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BenchError {
    /// A workload without classes.
    #[error("the workload has no classes; give at least one")]
    NoClasses,
    /// A class whose weight is not a positive number.
    #[error("class '{0}' has the weight {1}; give a number above 0")]
    BadWeight(String, f64),
    /// A length of 0, or a range that runs backwards.
    #[error("class '{0}' has an impossible {1} length; give 1 or more, the smaller bound first")]
    BadLength(String, &'static str),
    /// A vocabulary with nothing in it.
    #[error("the vocabulary {0}..{1} is empty; give the first token id and the one after the last")]
    EmptyVocabulary(u32, u32),
    /// A rate, stream count or burst size that sends nothing.
    #[error("an arrival needs {0} above 0")]
    BadArrival(&'static str),
    /// More requests than one run may hold.
    #[error("this would be {0} requests, above the bound of {1}; shorten the run or lower the rate")]
    TooManyRequests(u64, u64),
    /// A request that would be sent in years, seconds from the start.
    #[error(
        "a request would be sent {0:.3e} s after the start, beyond the bound of {1:.0e} s; raise the rate or the trace's speed"
    )]
    TooLong(f64, f64),
    /// No address to send to.
    #[error("there is no target; give at least one url such as http://127.0.0.1:8080")]
    NoTarget,
    /// An address that cannot be used.
    #[error(
        "'{0}' is not an address to send to; write it like http://127.0.0.1:8080 (https is not supported: send to the server itself, or to what ends TLS before it)"
    )]
    BadUrl(String),
    /// A path that cannot be used.
    #[error("'{0}' is not a path; write it like /v1/completions")]
    BadPath(String),
    /// Token ids as the content of a chat message.
    #[error("a chat message is text and cannot be made of token ids; use the completions backend, or text")]
    IdsInChat,
    /// A field that the load generator itself must decide.
    #[error("the extra body may not set `{0}`: that is decided here")]
    BadExtra(&'static str),
    /// A mix of adapters that makes no sense.
    #[error("the adapters make no sense: {0}")]
    BadAdapters(String),
    /// A share outside 0 to 1.
    #[error("the share of {0} cannot be {1}; give a number from 0 to 1")]
    BadShare(&'static str, f64),
    /// Conversations that make no sense.
    #[error("a conversation needs {0}")]
    BadSessions(&'static str),
}

/// What a random stream is for: each purpose has its own, so that changing how many numbers one of
/// them draws leaves the others as they were.
#[derive(Clone, Copy)]
enum Purpose {
    Arrival = 1,
    Class = 2,
    Prompt = 3,
    Adapter = 4,
    /// Which prefix a request has, and how much of it.
    Prefix = 5,
    /// The tokens of shared parts.
    Common = 6,
    Leave = 7,
    Session = 8,
    Think = 9,
    Shuffle = 10,
}

/// The random stream for `purpose` and the `ordinal`-th thing of its kind.
///
/// Seeds that differ by one give neighbouring SplitMix64 states, so each step of the derivation goes
/// through one output of the generator, which mixes all 64 bits.
fn stream(seed: u64, purpose: Purpose, ordinal: u64) -> Rng {
    let for_purpose = Rng::new(seed.wrapping_add(purpose as u64)).next_u64();
    Rng::new(Rng::new(for_purpose ^ ordinal).next_u64())
}
