//! The copies of requests that run on one backend; `copies.rs` has the rules.
//!
//! A copy that leaves this list is cut: its token is cancelled, so that its connection closes and the engine aborts it.

use tokio_util::sync::{CancellationToken, DropGuard};

use super::capacity::{BackendLimits, CapacityUsage, Fit, Need};

/// One copy.
#[derive(Debug)]
struct RunningCopy {
    /// Different from that of every other copy.
    serial: u64,
    need: Need,
    /// Its first token was seen: it no longer takes a prefill share.
    decodes: bool,
    _cut: DropGuard,
}

/// The copies on one backend, the oldest first.
#[derive(Debug, Default)]
pub(super) struct RunningCopies(Vec<RunningCopy>);

impl RunningCopies {
    /// How many there are.
    pub(super) fn len(&self) -> u32 {
        self.0.len() as u32
    }

    /// Their sequences.
    pub(super) fn sequences(&self) -> u32 {
        self.0.iter().map(|copy| copy.need.slots).sum()
    }

    /// Their prompt and output tokens.
    pub(super) fn tokens(&self) -> u64 {
        self.0.iter().map(|copy| copy.need.tokens()).sum()
    }

    /// Whether one more fits under `limits`, on top of the others and of what requests use.
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

    /// Adds a copy, until `cut` is cancelled.
    pub(super) fn add(&mut self, serial: u64, need: Need, cut: CancellationToken) {
        self.0.push(RunningCopy { serial, need, decodes: false, _cut: cut.drop_guard() });
    }

    /// The first token of the copy with this serial was seen.
    pub(super) fn end_prefill(&mut self, serial: u64) {
        self.0.iter_mut().filter(|copy| copy.serial == serial).for_each(|copy| copy.decodes = true);
    }

    /// Cuts the latest copies until a request has room beside the others.
    pub(super) fn make_room(&mut self, used: &CapacityUsage, limits: &BackendLimits, need: &Need) {
        while !self.0.is_empty() && !self.fit(used, limits, need) {
            self.0.pop();
        }
    }

    /// Removes the copy with this serial, if it is there.
    pub(super) fn remove(&mut self, serial: u64) {
        self.0.retain(|copy| copy.serial != serial);
    }

    /// Cuts all of them.
    pub(super) fn cut(&mut self) {
        self.0.clear();
    }
}
