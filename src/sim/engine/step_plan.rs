//! The plan of one step: made by [`schedule`](super::schedule), carried out by [`step`](super::step).
//!
//! The number of tokens that each sequence advances by is kept in the sequence itself, so a plan is small.

use super::outcome::Admitted;

/// What a step will do.
#[derive(Debug, Default)]
pub(super) struct StepPlan {
    /// Tokens scheduled.
    pub(super) tokens: u32,
    /// Sequences admitted from the queue.
    pub(super) admitted: Vec<Admitted>,
    /// Sequences preempted to free blocks.
    pub(super) preempted: u32,
}
