//! The regular tick of a gateway with a ledger, which also detects pauses of this process.
//!
//! A process that was stopped, or got no processor, sees the ends of requests late. For a while it
//! then does not know which requests the engines still have ([`Pulse::is_blind`]).

use std::sync::Arc;

use parking_lot::Mutex;
use sluice_cluster::{END_AGE, PAUSE};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::pool::Admission;
use crate::pool::divided::TICK;

/// Shared by the task that ticks and the task that renews.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    /// Until when ends may be seen late.
    blind_until: Mutex<Option<Instant>>,
    /// Notified when requests wait.
    pub(super) demand: Notify,
}

impl Pulse {
    /// Ticks for ever.
    pub(super) async fn keep(self: Arc<Self>, admission: Arc<Admission>) {
        let mut last = Instant::now();
        loop {
            sleep(TICK).await;
            let now = Instant::now();
            self.note(last, now);
            last = now;
            if admission.tick() {
                self.demand.notify_one();
            }
        }
    }

    /// A tick came at `now`, and the one before at `last`.
    fn note(&self, last: Instant, now: Instant) {
        if now.saturating_duration_since(last) > PAUSE {
            *self.blind_until.lock() = Some(now + END_AGE);
        }
    }

    /// Whether ends may have been seen late at any time from `since` on.
    pub(super) fn is_blind(&self, since: Instant) -> bool {
        self.blind_until.lock().is_some_and(|until| until >= since)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn after_a_pause_ends_may_be_seen_late_for_half_a_second() {
        let (pulse, begun) = (Pulse::default(), Instant::now());
        let at = |ms| begun + Duration::from_millis(ms);
        pulse.note(at(0), at(150));
        assert!(!pulse.is_blind(at(0)));
        pulse.note(at(150), at(400));
        assert!(pulse.is_blind(at(0)) && pulse.is_blind(at(900)), "in every window that has a part of it");
        assert!(!pulse.is_blind(at(901)));
    }
}
