//! Experiments: which arm serves a request.
//!
//! ```text
//!   request --> assign: unit, plan, state --> arm
//!   finished request --> ledger --> compare --> verdict
//! ```
//!
//! The request path asks for the arm once ([`ExperimentSet::assign`]), after the class is known and
//! before admission. The arm travels with the request's record, so that metrics and measurements
//! concern the same requests.
//!
//! [`plan`]: a configured experiment. [`unit`]: the arm of a unit. [`ledger`], [`quality`]: records
//! of finished requests. [`compare`], [`verdict`]: conclusions. [`diagnosis`]: why an adapter is
//! slow. [`shadow`]: the budget of copies. [`state`]: survives reloads. [`report`]: for operators.
//! Pure: no clock, no sockets, no metrics library.
//!
//! `online/arms.rs` is the other comparison of arms. The samples differ: here units, each in one
//! arm; there batches of time, because concurrent requests on one engine are alike.

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
