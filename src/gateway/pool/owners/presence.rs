//! Which owners are present, which are forgotten, and which prompts an owner may send to an engine.
//!
//! An owner is present from the first request until each engine of the pool has done
//! [`PRESENT_FOR`] seconds of work after the last one. Only present owners count in the shares of a
//! pool. The clock is work, so it needs no timer, and stands still while nothing is done. An owner
//! that has left is forgotten once V has reached its level, because a newcomer starts at V anyway.

use super::{BackendId, Level, Owners};
use crate::pool::fair_owner::EVERYONE;
use crate::pool::queue::OwnerIndex;
use crate::pool::share_of_prefill::Allowance;

/// Seconds of work of each engine after which an owner without requests is no longer present.
const PRESENT_FOR: f64 = 2.0;

impl Owners {
    pub(in crate::pool) fn come(&mut self, owner: OwnerIndex) {
        let found = self.at_mut(owner);
        if !std::mem::replace(&mut found.present, true) {
            let (level, mut added) = (found.level, found.weight);
            if let Some(group) = found.group.and_then(|group| self.groups.get_mut(&group)) {
                group.present += 1;
                added = if group.present == 1 { group.weight } else { 0.0 };
            }
            self.indebted.remove(&(level, owner));
            self.present += 1;
            self.weights += added;
        }
    }

    /// A request of the owner no longer waits or runs. If none is left, the owner may leave.
    pub(in crate::pool) fn rest(&mut self, owner: OwnerIndex) {
        let clock = self.clock;
        let found = self.at_mut(owner);
        if found.running == 0 && found.queue.is_empty() {
            found.idle_since = clock;
            if !std::mem::replace(&mut found.leaving, true) {
                self.leaving.push_back(owner);
            }
        }
    }

    /// Lets owners leave that have had no request for a while, in a pool of this many engines.
    pub(in crate::pool) fn expire(&mut self, engines: usize) {
        let due = self.clock - PRESENT_FOR * engines.max(1) as f64;
        let alone = self.running == 0 && self.waiting == 0;
        for _ in 0..self.leaving.len() {
            let Some(owner) = self.leaving.front().copied() else { break };
            let found = self.at(owner);
            let (busy, since) = (found.running > 0 || !found.queue.is_empty(), found.idle_since);
            if !busy && since > due && !alone {
                break;
            }
            self.leaving.pop_front();
            self.at_mut(owner).leaving = false;
            if !busy {
                self.leave(owner);
            }
        }
        let v = Level(self.virtual_time());
        while let Some((_, owner)) = self.indebted.first().copied().filter(|(level, _)| *level <= v) {
            self.indebted.pop_first();
            self.forget(owner);
        }
    }

    fn leave(&mut self, owner: OwnerIndex) {
        let found = self.at_mut(owner);
        if std::mem::replace(&mut found.present, false) {
            let (level, mut gone) = (found.level, found.weight);
            if let Some(group) = found.group.and_then(|group| self.groups.get_mut(&group)) {
                group.present -= 1;
                gone = if group.present == 0 { group.weight } else { 0.0 };
            }
            self.present -= 1;
            // Resets the sum, because additions and subtractions make it drift.
            self.weights = if self.present == 0 { 0.0 } else { self.weights - gone };
            self.loosened = true;
            if owner != EVERYONE {
                self.indebted.insert((level, owner));
            }
        }
    }

    pub(in crate::pool) fn forget(&mut self, owner: OwnerIndex) {
        let found = std::mem::take(self.at_mut(owner));
        if let Some(group) = found.group
            && let Some(left) = self.groups.get_mut(&group)
        {
            left.owners -= 1;
            if left.owners == 0 {
                self.groups.remove(&group);
            }
        }
        self.by_id.remove(&found.id);
        self.free.push(owner);
    }

    /// A prompt with this many tokens to compute goes to an engine.
    pub(in crate::pool) fn begin_prefill(&mut self, owner: OwnerIndex, backend: BackendId, computed: u64) {
        self.at_mut(owner).prefill.begin(backend, computed);
        self.prefill.begin(backend, computed);
    }

    /// The first token of such a prompt was seen, or the request has ended.
    pub(in crate::pool) fn end_prefill(&mut self, owner: OwnerIndex, backend: BackendId, computed: u64) {
        self.at_mut(owner).prefill.end(backend, computed);
        self.prefill.end(backend, computed);
        self.loosened |= self.waiting > 0;
    }

    /// The prompts that an owner may send to `backend` now, in a pool of `engines`.
    pub(in crate::pool) fn allowance(&self, owner: OwnerIndex, backend: BackendId, engines: usize) -> Allowance {
        let found = self.at(owner);
        let others = self.present - usize::from(found.present);
        if others == 0 {
            return Allowance::ALL;
        }
        let weight = self.weight(owner);
        let of_all = if found.present { self.weights } else { self.weights + weight };
        let share = weight / of_all.max(weight);
        if self.prefill.is_queue_full(backend) && f64::from(found.running) >= share * f64::from(self.running) {
            return Allowance::NONE;
        }
        found.prefill.allowance(backend, share, engines)
    }

    /// Whether an owner may be held back, because several owners are present.
    pub(in crate::pool) fn is_shared(&self) -> bool {
        self.present > 1
    }

    pub(in crate::pool) fn hold(&mut self) {
        self.held = true;
    }

    /// Whether waiters that were held may have room now. Resets the answer.
    pub(in crate::pool) fn take_loosened(&mut self) -> bool {
        let loosened = std::mem::take(&mut self.loosened) && self.held && self.waiting > 0;
        if loosened {
            self.held = false;
        }
        loosened
    }
}
