//! The load generator: sends requests on a schedule and measures what a client sees.
//!
//! It exists because the product's claims are about tails, and a tail is only as honest as the
//! clock that measured it. So it is a witness: it shares no code with the gateway's request path,
//! reads the bytes of the answers itself, and decides when a request *should* have been sent before
//! the run begins. A request that leaves late, for whatever reason on our side, is measured from
//! the moment it was due; a slow server cannot make itself look better by slowing us down.
//!
//! | file | question |
//! |---|---|
//! | `workload` | what is asked: classes, lengths, prompts |
//! | `arrival` | when: Poisson, constant, bursts, or a closed loop |
//! | `client` | how it is sent: HTTP/1.1, keep-alive, one task for each stream |
//! | `events` | what an answer's bytes mean, and when they meant it |
//! | `run` | the three together, until everything has ended |
//! | `result` | what a run leaves behind: one record for each request |
//! | `metrics` | the statistics of `vllm bench serve` from records |
//! | `file` | results on disk, with the keys of the original |
//! | `tally` | numbers: counts, failures by reason, exact percentiles |
//! | `report` | the numbers as a table and as JSON |
//!
//! Definitions are those of `vllm bench serve`, with two differences, both on the side of truth: an
//! error inside a stream and a stream that stops before its end are failures, not short successes.
//!
//! Everything random follows from one seed, so two runs with the same plan send the same bytes at
//! the same times. Not here: TLS, recorded traces, sweeps.

pub mod arrival;
pub mod client;
pub mod events;
pub mod file;
pub mod metrics;
pub mod report;
pub mod result;
pub mod run;
pub mod tally;
pub mod workload;

#[cfg(test)]
pub(crate) mod mock;

pub use arrival::{Arrival, Extent};
pub use client::{Client, Failure, Timing};
pub use run::{Plan, Progress, Run, Sample, run};
pub use tally::{ClassTally, Summary, Tally};
pub use workload::{Api, Class, Length, Workload};

use crate::base::Rng;

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
    /// No address to send to.
    #[error("there is no target; give at least one url such as http://127.0.0.1:8080")]
    NoTarget,
    /// An address that cannot be used.
    #[error("'{0}' is not an address to send to; write it like http://127.0.0.1:8080")]
    BadUrl(String),
}

/// What a random stream is for: each purpose has its own, so that changing how many numbers one of
/// them draws leaves the others as they were.
#[derive(Clone, Copy)]
enum Purpose {
    Arrival = 1,
    Class = 2,
    Prompt = 3,
}

/// The random stream for `purpose` and the `ordinal`-th thing of its kind.
///
/// Seeds that differ by one give neighbouring SplitMix64 states, so each step of the derivation goes
/// through one output of the generator, which mixes all 64 bits.
fn stream(seed: u64, purpose: Purpose, ordinal: u64) -> Rng {
    let for_purpose = Rng::new(seed.wrapping_add(purpose as u64)).next_u64();
    Rng::new(Rng::new(for_purpose ^ ordinal).next_u64())
}
