//! The copies of requests that run on one backend; `copies.rs` has the rules.
//!
//! A copy that leaves this list is cut: the token is cancelled, which closes the connection, so the
//! engine aborts it.

use tokio_util::sync::{CancellationToken, DropGuard};

use super::capacity::{BackendLimits, CapacityUsage, Fit, Need};

#[derive(Debug)]
struct RunningCopy {
    /// Different for every copy.
    serial: u64,
    need: Need,
    /// The first token was seen: the copy no longer takes a prefill share.
    decodes: bool,
    _cut: DropGuard,
}

/// The copies on one backend, oldest first.
#[derive(Debug, Default)]
pub(super) struct RunningCopies(Vec<RunningCopy>);

impl RunningCopies {
    pub(super) fn len(&self) -> u32 {
        self.0.len() as u32
    }

    pub(super) fn sequences(&self) -> u32 {
        self.0.iter().map(|copy| copy.need.slots).sum()
    }

    pub(super) fn tokens(&self) -> u64 {
        self.0.iter().map(|copy| copy.need.tokens()).sum()
    }

    /// Whether one more copy fits under `limits`, on top of the other copies and of requests.
    pub(super) fn fit(&self, used: &CapacityUsage, limits: &BackendLimits, need: &Need) -> bool {
        let mut all = *used;
        for copy in &self.0 {
            let mut taken = all.take(limits, &copy.need);
            if copy.decodes {
                all.end_prefill(&mut taken);
            }
        }
        all.fit(limits, need) == Fit::Room
    }

    /// Adds a copy. Removal cancels `cut`.
    pub(super) fn add(&mut self, serial: u64, need: Need, cut: CancellationToken) {
        self.0.push(RunningCopy { serial, need, decodes: false, _cut: cut.drop_guard() });
    }

    pub(super) fn end_prefill(&mut self, serial: u64) {
        self.0.iter_mut().filter(|copy| copy.serial == serial).for_each(|copy| copy.decodes = true);
    }

    /// Cuts the latest copies until a request has room next to the remaining copies.
    pub(super) fn make_room(&mut self, used: &CapacityUsage, limits: &BackendLimits, need: &Need) {
        while !self.0.is_empty() && !self.fit(used, limits, need) {
            self.0.pop();
        }
    }

    pub(super) fn remove(&mut self, serial: u64) {
        self.0.retain(|copy| copy.serial != serial);
    }

    pub(super) fn cut(&mut self) {
        self.0.clear();
    }
}
