//! Why a run of the laboratory cannot begin.
//!
//! Everything is checked before virtual time starts; a run that has begun always ends with a result. Every text says what
//! to change.

use sluice_bench::BenchError;
use sluice_core::vllm::args::ArgsError;
use sluice_sim::{ProfileError, Refusal};

/// Why a run cannot begin.
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
    /// A factor that is not above 0.
    #[error("the engine of \"{0}\" cannot be slower by {1}; give a number above 0, 1 for its usual speed")]
    BadFactor(String, f64),
    /// A file cannot be read or understood.
    #[error("{path}: {reason}")]
    File {
        /// Which file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The gateway's configuration is not valid.
    #[error("{0}")]
    Config(String),
    /// Two sources of a configuration.
    #[error("give the gateway's configuration as a file (config) or as a text (gateway), not both")]
    TwoConfigurations,
    /// Too few or too many engines.
    #[error("{0} engines; give between 1 and {1}")]
    EngineCount(usize, usize),
    /// The number of engines of a configuration of several pools.
    #[error("the configuration has {0} pools; the number of engines can be varied only where there is one")]
    PoolCount(usize),
    /// A change that says nothing, or several things.
    #[error("a change of the engine of \"{0}\" needs exactly one of slower = FACTOR, stop = true and start = true")]
    BadChange(String),
    /// A table of traffic, or its trace.
    #[error("{0}")]
    Traffic(String),
    /// Something to vary.
    #[error("{0}")]
    Sweep(String),
    /// A plan without a goal.
    #[error("{0}")]
    Plan(String),
    /// A name of a measure.
    #[error(transparent)]
    Measure(#[from] BadMeasure),
    /// A measure of a class that the traffic does not have.
    #[error("the measure '{0}' is of a class that the traffic does not have; its classes are {1}")]
    NoClass(String, String),
    /// There is no traffic.
    #[error("there is no traffic; give at least one kind of it")]
    NoTraffic,
    /// A limit of the load generator that has no meaning here.
    #[error("a limit on requests in flight at the client is not simulated; use a closed loop")]
    Concurrency,
    /// The workload.
    #[error(transparent)]
    Workload(#[from] BenchError),
    /// The flags of an engine cannot be read.
    #[error("the engine of \"{backend}\": {source}")]
    Flags {
        /// Its backend.
        backend: String,
        /// The cause.
        source: ArgsError,
    },
    /// vLLM would refuse to start.
    #[error("the engine of \"{backend}\" would not start: {source}")]
    Engine {
        /// Its backend.
        backend: String,
        /// What vLLM says.
        source: Box<Refusal>,
    },
    /// The GPU or the model is not known.
    #[error("the engine of \"{backend}\": {source}")]
    Profile {
        /// Its backend.
        backend: String,
        /// The cause.
        source: ProfileError,
    },
    /// The runtime could not be built.
    #[error("no runtime: {0}")]
    Runtime(#[from] std::io::Error),
}

/// A text that names no measure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a measure; write CLASS.ttft.p99 (or tpot, itl, e2el, queue with mean, max or a percentile), CLASS.attainment, CLASS.failed, CLASS.rate, CLASS.tokens, hit_rate, busy, imbalance or preemptions; the class 'all' is every request"
)]
pub struct BadMeasure(pub(crate) String);
