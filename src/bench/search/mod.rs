//! The search for the highest rate at which the objectives hold.
//!
//! `find_rate` is the algorithm, `trial` its terms, `system` what it puts under load. `judge` decides one trial,
//! `bracket` finds two neighbouring rates, and `curve` estimates the boundary between them from all trials. There are
//! no sockets and no clock here; the caller provides the [`SystemUnderTest`].

mod trial;
mod judge;
mod system;
mod bracket;
mod curve;
mod find_rate;
#[cfg(test)]
mod tests;

pub use find_rate::find_rate;
pub use judge::Judge;
pub use system::SystemUnderTest;
pub use trial::{
    DELIVERED, ProvenRate, SearchEnd, SearchGoal, SearchResult, Trial, TrialKind, TrialLoad, TrialReport, TrialRule,
    TrialStats, TrialVerdict, throughput,
};
