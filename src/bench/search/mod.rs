//! The search for the highest rate at which the objectives hold.
//!
//! `find_rate` is the algorithm and `trial` its types. `judge` decides one trial, `bracket` finds a rate that holds and a
//! slightly higher one that fails, and `curve` estimates the boundary between them from all trials. `validate`
//! proves a rate again with other loads. There are no sockets
//! and no clock here; the caller provides the [`SystemUnderTest`] (`system`).

mod trial;
mod judge;
mod system;
mod bracket;
mod curve;
mod find_rate;
mod validate;
#[cfg(test)]
mod tests;

pub use find_rate::find_rate;
pub use judge::Judge;
pub use system::SystemUnderTest;
pub use trial::{
    DELIVERED, ProvenRate, SearchEnd, SearchGoal, SearchResult, Trial, TrialKind, TrialLoad, TrialReport, TrialRule,
    TrialStats, TrialVerdict, throughput,
};
pub use validate::{ValidatedRate, validate};
