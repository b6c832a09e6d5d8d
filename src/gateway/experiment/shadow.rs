//! Copies of requests for shadow arms: how many may run at once, and how they ended.
//!
//! The budget of an arm is [`Shadow`]: copies in flight, and copies per second, evenly spaced. A
//! copy above the budget is counted and not sent. The counts start from zero with the gateway; the
//! measurements of copies are in the arm's ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use sluice_config::Shadow;

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyOutcome {
    /// The response was complete.
    Completed,
    /// The arm failed: an error or a timeout.
    Failed,
    /// The engine refused the copy, or it could not be prepared.
    Refused,
    /// Not sent: no backend had free room.
    NoRoom,
    /// Ended early: a request needed the room, the gateway or the engine stopped, or the original
    /// was not served.
    Cut,
    /// Not sent: the budget of the arm was used up.
    OverBudget,
}

impl CopyOutcome {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Completed, Self::Failed, Self::Refused, Self::NoRoom, Self::Cut, Self::OverBudget];

    /// The label used in metrics and the access log.
    pub fn label(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::NoRoom => "no_room",
            Self::Cut => "cut",
            Self::OverBudget => "over_budget",
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct ArmCopies {
    in_flight: AtomicU32,
    due: Mutex<Option<Instant>>,
    /// Ended copies by outcome, in the order of [`CopyOutcome::ALL`].
    ended: [AtomicU64; CopyOutcome::ALL.len()],
}

impl ArmCopies {
    fn count(&self, outcome: CopyOutcome) {
        self.ended[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Takes a copy out of the budget. Returns whether the budget allows it.
    fn begin(&self, budget: &Shadow, now: Instant) -> bool {
        let mut due = self.due.lock();
        let is_free = self.in_flight.load(Ordering::Acquire) < budget.in_flight;
        if !is_free || due.is_some_and(|due| now < due) {
            return false;
        }
        *due = Some(now + Duration::from_secs_f64(1.0 / budget.per_second));
        // The lock is held, so no other copy begins in between.
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        true
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Acquire)
    }

    pub(super) fn ended(&self) -> [(CopyOutcome, u64); CopyOutcome::ALL.len()] {
        CopyOutcome::ALL.map(|outcome| (outcome, self.ended[outcome as usize].load(Ordering::Relaxed)))
    }
}

/// A copy that counts against the budget of the arm until it is dropped.
#[derive(Debug)]
pub struct CopyInFlight {
    copies: Arc<ArmCopies>,
    /// How the copy ended; [`CopyOutcome::Cut`] until set.
    pub outcome: CopyOutcome,
}

impl CopyInFlight {
    /// A copy for an arm; `None` if the budget does not allow one now, which is counted.
    pub(super) fn begin(copies: &Arc<ArmCopies>, budget: &Shadow, now: Instant) -> Option<Self> {
        if !copies.begin(budget, now) {
            copies.count(CopyOutcome::OverBudget);
            return None;
        }
        Some(Self { copies: Arc::clone(copies), outcome: CopyOutcome::Cut })
    }
}

impl Drop for CopyInFlight {
    fn drop(&mut self) {
        self.copies.count(self.outcome);
        self.copies.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}
