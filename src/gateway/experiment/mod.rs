//! Experiments: which arm serves a request.
//!
//! The path of a request asks here once ([`ExperimentSet::assign`]), after its class is known and before it is admitted. What
//! was assigned travels with the request's record, so that metrics and measurements are of the same requests.
//!
//! ```text
//!   request --> assign: unit, plan, state --> arm          finished request --> ledger --> compare --> verdict
//! ```
//!
//! [`plan`] is an experiment as configured, [`unit`] says how a unit finds its arm, [`ledger`] and [`quality`] what is kept of
//! finished requests, [`compare`] and [`verdict`] what follows from it, [`diagnosis`] why an adapter is slow, [`shadow`] how many copies
//! there may be, [`state`] what outlives a reload, [`report`] what an operator sees. Pure: no clock, no sockets, no metrics library.

pub mod unit;
pub mod plan;
pub mod counts;
pub mod quality;
pub mod ledger;
mod origins;
pub mod compare;
pub mod verdict;
pub mod diagnosis;
pub mod shadow;
pub mod state;
pub mod assign;
pub mod report;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod evidence;

pub use assign::{Assigned, Experiment, ExperimentSet, Experiments, Saved, Subject};
pub use diagnosis::{Cause, Diagnosis, EngineAdapters};
pub use ledger::{ArmLedger, Ending, Observation, Quantity};
pub use origins::OriginShares;
pub use plan::{ArmPlan, ExperimentPlan};
pub use quality::RATEABLE;
pub use report::ExperimentReport;
pub use shadow::{CopyInFlight, CopyOutcome};
pub use state::{Decision, ExperimentState, Moment, Phase, Progress};
pub use unit::{Unit, UnitHash};
pub use verdict::{Comparison, Conclusion, Finding};
