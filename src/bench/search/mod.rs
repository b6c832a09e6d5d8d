//! The search for the highest rate at which the objectives hold.
//!
//! `find_rate` is the algorithm: `judge` decides one trial, `bracket` finds a rate that holds and a
//! slightly higher one that fails, `curve` estimates the boundary from all trials, and `validate`
//! proves a rate again with other loads. The caller provides the [`SystemUnderTest`], so there are
//! no sockets and no clock; `live` runs trials against real servers.

mod trial;
mod judge;
mod system;
mod groups;
mod live;
mod bracket;
mod curve;
mod find_rate;
mod validate;
#[cfg(test)]
mod tests;

pub use curve::RatePoint;
pub use find_rate::{TrialRecord, find_rate, resume_rate};
pub use groups::{Groups, RARE};
pub use judge::Judge;
pub use live::LiveTrial;
pub use system::SystemUnderTest;
pub use trial::{
    DELIVERED, ProvenRate, SearchEnd, SearchGoal, SearchResult, Trial, TrialKind, TrialLoad, TrialReport, TrialRule,
    TrialStats, TrialVerdict, throughput,
};
pub use validate::{ValidatedRate, validate};
