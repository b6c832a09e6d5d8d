//! Why a simulation cannot start.
//!
//! Everything is checked before virtual time starts, so a run that has started always ends with a
//! result. Every message says how to mend the input.

use sluice_bench::BenchError;
use sluice_core::vllm::args::ArgsError;
use sluice_sim::{ProfileError, Refusal};

/// Why a simulation cannot start.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    #[error("backend \"{0}\" has no simulated engine; describe one for every backend of the configuration")]
    NoEngine(String),
    #[error("the engine \"{0}\" belongs to no backend of the configuration; use the name of a backend")]
    NoBackend(String),
    #[error("backend \"{0}\" has two engines; describe one for each backend")]
    TwoEngines(String),
    #[error(
        "backends named \"{0}\" have different addresses, and a simulated engine is found by the backend's name; give each address a name of its own"
    )]
    OneName(String),
    #[error(
        "{0} [[engine]] tables have no key 'backend', so each is for all backends that no other table names; give all but one of them backend = [\"NAME\"]"
    )]
    TwoDefaults(usize),
    #[error(
        "count = {0} in [[engine]] is for files without a configuration of the gateway; remove it, or add backends to the configuration"
    )]
    CountWithConfiguration(u32),
    #[error("the engine of \"{0}\": slower = {1} is not above 0; 2 doubles all times, 1 is the usual speed")]
    BadFactor(String, f64),
    #[error("{path}: {reason}")]
    File { path: String, reason: String },
    /// The gateway's configuration is not valid.
    #[error("{0}")]
    Config(String),
    #[error("give the gateway's configuration as the path of a file (config) or inline (gateway), not both")]
    TwoConfigurations,
    #[error("{0} engines; give between 1 and {1}")]
    EngineCount(usize, usize),
    #[error("pool '{0}' has no listed backends, only pods; list backends for a simulation")]
    OnlyPods(String),
    #[error("the configuration has {0} pools; the number of engines can be varied only with one pool")]
    PoolCount(usize),
    #[error(
        "autoscale needs one pool, 0 < target (with busy also target <= 1), min <= max and min <= start <= max, at most the engines of the file: {0}"
    )]
    Autoscale(String),
    #[error(
        "a change of the engine of \"{0}\" needs exactly one of slower = FACTOR, stall = \"300ms\" and stop, start, hang or resume = true"
    )]
    BadChange(String),
    /// A `[[traffic]]` table or its trace is not valid.
    #[error("{0}")]
    Traffic(String),
    /// A sweep, or the name of a variant, is not valid.
    #[error("{0}")]
    Sweep(String),
    /// `plan` or `rate` has no objectives to search for, or invalid bounds.
    #[error("{0}")]
    Plan(String),
    #[error("class '{0}' had no requests to judge; give a longer duration, more seeds or a higher rate")]
    Unjudged(String),
    #[error(transparent)]
    Measure(#[from] BadMeasure),
    #[error(
        "the measure '{0}' names a class that the traffic does not have; its classes are {1}, and the classes of the \
         gateway are {2}"
    )]
    NoClass(String, String, String),
    #[error("there is no traffic; add a [[traffic]] table")]
    NoTraffic,
    #[error("a limit on requests in flight at the client is not simulated; use concurrency")]
    Concurrency,
    #[error(transparent)]
    Workload(#[from] BenchError),
    #[error("the engine of \"{backend}\": {source}")]
    Flags { backend: String, source: ArgsError },
    #[error("the engine of \"{backend}\" would not start: {source}")]
    Engine { backend: String, source: Box<Refusal> },
    #[error("the engine of \"{backend}\": {reason}")]
    Acceptance { backend: String, reason: String },
    #[error("the engine of \"{backend}\": {source}")]
    Profile { backend: String, source: ProfileError },
    #[error("cannot build the async runtime: {0}")]
    Runtime(#[from] std::io::Error),
}

/// A text that is not the name of a measure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a measure; write CLASS.ttft.p99 (or tpot, itl, e2el, queue with mean, max or a percentile), CLASS.attainment, CLASS.failed, CLASS.rate, CLASS.tokens, hit_rate, busy, imbalance, engine_hours, engines or preemptions; the class 'all' means all requests"
)]
pub struct BadMeasure(pub(crate) String);
