//! The tick of a gateway with a ledger, which also detects pauses of this process.
//!
//! A process that was stopped, or got no processor, sees the ends of requests late, so it does not
//! know which requests the engines still have ([`Pulse::is_blind`]).

use std::sync::Arc;

use parking_lot::Mutex;
use sluice_cluster::{END_AGE, PAUSE};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use sluice_gateway::pool::Admission;
use sluice_gateway::pool::divided::TICK;

/// Shared by the task that ticks and the task that renews.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    ticks: Mutex<Ticks>,
    /// Notified when requests wait.
    pub(super) demand: Notify,
}

#[derive(Debug, Default)]
struct Ticks {
    last: Option<Instant>,
    /// Until this moment, ends of requests may be seen late.
    blind_until: Option<Instant>,
}

impl Ticks {
    fn runs(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) > PAUSE) {
            self.blind_until = Some(now + END_AGE);
        }
    }
}

impl Pulse {
    pub(super) async fn keep(self: Arc<Self>, admission: Arc<Admission>) {
        loop {
            self.note(Instant::now());
            sleep(TICK).await;
            if admission.tick() {
                self.demand.notify_one();
            }
        }
    }

    fn note(&self, now: Instant) {
        let mut ticks = self.ticks.lock();
        ticks.runs(now);
        ticks.last = Some(now);
    }

    /// Whether ends of requests may have been seen late between `since` and `now`. Looks for a
    /// pause too, because this call may come before the tick that ends the pause.
    pub(super) fn is_blind(&self, since: Instant, now: Instant) -> bool {
        let mut ticks = self.ticks.lock();
        ticks.runs(now);
        ticks.blind_until.is_some_and(|until| until >= since)
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
        pulse.note(at(0));
        pulse.note(at(150));
        assert!(!pulse.is_blind(at(0), at(350)));
        pulse.note(at(400));
        let is_blind = |since| pulse.is_blind(at(since), at(400));
        assert!(is_blind(0) && is_blind(900), "in every window that has a part of it");
        assert!(!is_blind(901));
    }

    #[test]
    fn a_pause_is_noticed_before_the_tick_that_ends_it() {
        let (pulse, begun) = (Pulse::default(), Instant::now());
        let at = |ms| begun + Duration::from_millis(ms);
        assert!(!pulse.is_blind(at(0), at(9_000)), "nothing has ticked");
        pulse.note(at(0));
        assert!(pulse.is_blind(at(0), at(5_000)));
        pulse.note(at(5_010));
        assert!(pulse.is_blind(at(5_100), at(5_100)));
    }
}
