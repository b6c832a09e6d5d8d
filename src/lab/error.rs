//! Why a simulation cannot start.
//!
//! Everything is checked before virtual time starts; a run that has started always ends with a
//! result. Every message says how to mend the input.

use sluice_bench::BenchError;
use sluice_core::vllm::args::ArgsError;
use sluice_sim::{ProfileError, Refusal};

/// Why a simulation cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A backend of the configuration has no engine.
    #[error("backend \"{0}\" has no simulated engine; describe one for every backend of the configuration")]
    NoEngine(String),
    /// An engine belongs to no backend.
    #[error("the engine \"{0}\" belongs to no backend of the configuration; use the name of a backend")]
    NoBackend(String),
    /// Two engines for one backend.
    #[error("backend \"{0}\" has two engines; describe one for each backend")]
    TwoEngines(String),
    /// Several `[[engine]]` tables that each apply to all other backends.
    #[error(
        "{0} [[engine]] tables have no key 'backend', so each is for all backends that no other table names; give all but one of them backend = [\"NAME\"]"
    )]
    TwoDefaults(usize),
    /// The number of engines is given, but the backends of the configuration determine it.
    #[error(
        "count = {0} in [[engine]] is for files without a configuration of the gateway; remove it, or add backends to the configuration"
    )]
    CountWithConfiguration(u32),
    /// A slowdown that is not above 0.
    #[error("the engine of \"{0}\": slower = {1} is not above 0; 2 doubles all times, 1 is the usual speed")]
    BadFactor(String, f64),
    /// A file cannot be read or parsed.
    #[error("{path}: {reason}")]
    File {
        /// The path of the file.
        path: String,
        /// The error.
        reason: String,
    },
    /// The gateway's configuration is not valid.
    #[error("{0}")]
    Config(String),
    /// The file has both `config` and `gateway`.
    #[error("give the gateway's configuration as the path of a file (config) or inline (gateway), not both")]
    TwoConfigurations,
    /// Too few or too many engines.
    #[error("{0} engines; give between 1 and {1}")]
    EngineCount(usize, usize),
    /// A pool has no listed backends but only pods, which only a running gateway finds.
    #[error("pool '{0}' has no listed backends, only pods; list backends for a simulation")]
    OnlyPods(String),
    /// The number of engines is varied, but there are several pools to which engines could be
    /// added.
    #[error("the configuration has {0} pools; the number of engines can be varied only with one pool")]
    PoolCount(usize),
    /// `[autoscale]` with more or fewer than one pool, with contradictory bounds, or with a target
    /// or a rate out of range.
    #[error(
        "autoscale needs one pool, 0 < target (with busy also target <= 1), min <= max and min <= start <= max, at most the engines of the file: {0}"
    )]
    Autoscale(String),
    /// A `change` without an action, or with several.
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
    /// No run of a plan has a request that can be judged for this class.
    #[error("class '{0}' had no requests to judge; give a longer duration, more seeds or a higher rate")]
    Unjudged(String),
    /// The name of a measure is not valid.
    #[error(transparent)]
    Measure(#[from] BadMeasure),
    /// A measure of a class that the traffic does not have.
    #[error("the measure '{0}' names a class that the traffic does not have; its classes are {1}")]
    NoClass(String, String),
    /// There is no traffic.
    #[error("there is no traffic; add a [[traffic]] table")]
    NoTraffic,
    /// The traffic sets the load generator's limit on requests in flight.
    #[error("a limit on requests in flight at the client is not simulated; use concurrency")]
    Concurrency,
    /// The workload is not valid.
    #[error(transparent)]
    Workload(#[from] BenchError),
    /// The flags of an engine cannot be parsed.
    #[error("the engine of \"{backend}\": {source}")]
    Flags {
        /// Name of the backend.
        backend: String,
        /// The cause.
        source: ArgsError,
    },
    /// vLLM would refuse to start.
    #[error("the engine of \"{backend}\" would not start: {source}")]
    Engine {
        /// Name of the backend.
        backend: String,
        /// vLLM's error.
        source: Box<Refusal>,
    },
    /// The GPU or the model is not known.
    #[error("the engine of \"{backend}\": {source}")]
    Profile {
        /// Name of the backend.
        backend: String,
        /// The cause.
        source: ProfileError,
    },
    /// The runtime could not be built.
    #[error("cannot build the async runtime: {0}")]
    Runtime(#[from] std::io::Error),
}

/// A text that is not the name of a measure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a measure; write CLASS.ttft.p99 (or tpot, itl, e2el, queue with mean, max or a percentile), CLASS.attainment, CLASS.failed, CLASS.rate, CLASS.tokens, hit_rate, busy, imbalance, engine_hours, engines or preemptions; the class 'all' means all requests"
)]
pub struct BadMeasure(pub(crate) String);
