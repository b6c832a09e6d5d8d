//! Facts about the owners of a pool: for views, for other gateways, and for tests.
//!
//! Views are bounded: owners with waiters come first, then owners with the most work.

use super::{Level, OwnerView, Owners};

impl Owners {
    /// Up to `most` owners: owners with waiters first, then the most work first.
    pub(in crate::pool) fn view(&self, most: usize) -> Vec<OwnerView> {
        let shown =
            (1..).zip(self.all.iter().skip(1)).filter(|(_, owner)| owner.in_use).map(|(index, owner)| OwnerView {
                id: owner.id,
                weight: self.weight(index),
                work: owner.work,
                waiting: owner.queue.len(),
                running: owner.running,
            });
        let mut all: Vec<OwnerView> = shown.collect();
        all.sort_by_key(|owner| std::cmp::Reverse((owner.waiting > 0, Level(owner.work))));
        all.truncate(most);
        all
    }

    /// Checks that sums and orders agree with the owners (for tests).
    pub(in crate::pool) fn check(&self) -> Result<(), String> {
        let queued: usize = self.all.iter().map(|owner| owner.queue.len()).sum();
        let listed = self.all.iter().filter(|owner| owner.listed.is_some()).count();
        let busy = self.all.iter().filter(|owner| !owner.queue.is_empty()).count();
        let running: u32 = self.all.iter().map(|owner| owner.running).sum();
        let single = self.all.iter().filter(|owner| owner.present && owner.group.is_none()).map(|owner| owner.weight);
        let shared = self.groups.values().filter(|group| group.present > 0).map(|group| group.weight);
        let weights: f64 = single.chain(shared).sum();
        let absent = self.all.iter().any(|owner| !owner.present && (owner.running > 0 || !owner.queue.is_empty()));
        let used = self.all.iter().skip(1).filter(|owner| owner.in_use).count();
        if queued != self.waiting || listed != self.order.len() || busy != listed || running != self.running {
            return Err(format!("{queued} queued, {} waiting; {listed} listed, {busy} busy", self.waiting));
        }
        if absent || (weights - self.weights).abs() > 1e-6 * weights.max(1.0) {
            return Err(format!("weights {weights} and {}, or an absent owner has requests", self.weights));
        }
        if used != self.by_id.len() || used + self.free.len() + 1 != self.all.len() {
            return Err(format!("{used} owners, {} ids, {} free", self.by_id.len(), self.free.len()));
        }
        if running == 0 && self.all.iter().any(|owner| !owner.prefill.is_empty()) {
            return Err("a prefill is left".to_owned());
        }
        Ok(())
    }

    #[cfg(test)]
    pub(in crate::pool) fn level_of(&self, id: u64) -> Option<f64> {
        self.by_id.get(&id).map(|owner| self.at(*owner).level.0)
    }

    /// Seconds of engine time charged to owners since they entered the table, largest first, for
    /// other gateways.
    pub(in crate::pool) fn attained(&self, most: usize) -> Vec<(u64, f64)> {
        let named = self.all.iter().skip(1).filter(|owner| owner.in_use && owner.work > 0.0);
        let mut all: Vec<(u64, f64)> = named.map(|owner| (owner.id, owner.work)).collect();
        all.sort_by_key(|(_, work)| std::cmp::Reverse(Level(*work)));
        all.truncate(most);
        all
    }
}
