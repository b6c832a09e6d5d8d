//! The plan of one step: made by [`schedule`](super::schedule), carried out by
//! [`step`](super::step).
//!
//! The number of tokens by which a sequence advances is kept in the sequence, so a plan is small.

use super::outcome::Admitted;

#[derive(Debug, Default)]
pub(super) struct StepPlan {
    pub(super) tokens: u32,
    pub(super) admitted: Vec<Admitted>,
    pub(super) preempted: u32,
}
