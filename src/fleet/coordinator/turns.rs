//! Which of the engines that share a device is awake: a state machine without clock and I/O.
//!
//! | situation | decision |
//! |---|---|
//! | no engine holds the device | wake the engine with the oldest waiting request |
//! | one is awake, requests wait for another | it rests once it was awake for `stay`
//! ([`Turn::decide`]) |
//! | one starts, wakes or falls asleep | wait |
//! | one is drained | wait; it serves on if no request waits for another one any more |
//! | one waits for a restart after a failure, requests wait for another | it rests at once |
//! | several hold the device, after a reload | all but one rest |
//!
//! No request starves: the engine that had the last turn gets the next one only if no requests wait
//! for another engine, however long its own queue is. Among the others the oldest request decides.
//! A drain has no time limit, but a draining engine takes no new request. So a waiting request
//! waits for the longest running request of that engine, not for later ones. Time is a parameter.
//! Bound: one engine and one moment for each shared device.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The turns, by the name of the share.
pub(super) type Turns = BTreeMap<String, Turn<Arc<str>>>;

/// Whether an engine holds the device, and whether it may leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Hold {
    /// It holds nothing, and can be woken.
    Asleep,
    /// It starts or wakes.
    Coming,
    /// It serves.
    Awake,
    /// It takes no requests, and waits for the running ones to end.
    Draining,
    /// It falls asleep or is stopped.
    Leaving,
    /// It waits for the next start after a failure.
    Failing,
    /// It holds nothing, and waits for an operator.
    Away,
    /// It may hold the device, and waits for an operator.
    Stuck,
}

impl Hold {
    fn is_held(self) -> bool {
        !matches!(self, Self::Asleep | Self::Away)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Sharer<K> {
    pub(super) name: K,
    pub(super) hold: Hold,
    /// When the oldest request arrived that waits for this engine.
    pub(super) waits_since: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order<K> {
    Wake(K),
    Rest(K),
}

/// The turn of the engines that share one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Turn<K> {
    /// The engine that has the device, or had it last.
    holder: Option<K>,
    /// Since when the holder has been awake.
    since: Duration,
}

impl<K> Default for Turn<K> {
    fn default() -> Self {
        Self { holder: None, since: Duration::ZERO }
    }
}

impl<K: Clone + PartialEq> Turn<K> {
    /// The next order at the time `now`. `stay`: how long an engine is awake at least. If the order
    /// is refused, the next call gives it again.
    pub(super) fn decide(&mut self, sharers: &[Sharer<K>], now: Duration, stay: Duration) -> Option<Order<K>> {
        let holders: Vec<&Sharer<K>> = sharers.iter().filter(|sharer| sharer.hold.is_held()).collect();
        let [holder] = holders[..] else {
            return match holders.is_empty() {
                true => self.successor(sharers).map(|next| Order::Wake(next.name.clone())),
                false => self.surplus(&holders).map(Order::Rest),
            };
        };
        // An engine that could not leave begins a new turn, because its requests waited while it
        // tried to leave.
        let begins = matches!(holder.hold, Hold::Coming | Hold::Draining | Hold::Leaving);
        if self.holder.as_ref() != Some(&holder.name) || begins {
            (self.holder, self.since) = (Some(holder.name.clone()), now);
        }
        let may_rest = match holder.hold {
            Hold::Awake => now.saturating_sub(self.since) >= stay,
            Hold::Failing => true,
            _ => false,
        };
        let is_wanted = |sharer: &Sharer<K>| sharer.hold == Hold::Asleep && sharer.waits_since.is_some();
        match sharers.iter().any(is_wanted) {
            true => may_rest.then(|| Order::Rest(holder.name.clone())),
            false => (holder.hold == Hold::Draining).then(|| Order::Wake(holder.name.clone())),
        }
    }

    /// The sleeping engine to wake: the one with the oldest waiting request. The last holder comes
    /// after the others.
    fn successor<'s>(&self, sharers: &'s [Sharer<K>]) -> Option<&'s Sharer<K>> {
        let waiting = sharers.iter().filter(|sharer| sharer.hold == Hold::Asleep && sharer.waits_since.is_some());
        waiting.min_by_key(|sharer| (self.holder.as_ref() == Some(&sharer.name), sharer.waits_since))
    }

    /// Of several engines that hold the device, one that must rest. The holder stays, or else the
    /// first engine that serves.
    fn surplus(&self, holders: &[&Sharer<K>]) -> Option<K> {
        let stays = |sharer: &&&Sharer<K>| {
            let rank = [Hold::Awake, Hold::Coming].iter().position(|hold| *hold == sharer.hold);
            (self.holder.as_ref() != Some(&sharer.name), rank.unwrap_or(2))
        };
        let kept = holders.iter().min_by_key(stays)?.name.clone();
        let may_rest = |sharer: &&&Sharer<K>| matches!(sharer.hold, Hold::Awake | Hold::Coming | Hold::Failing);
        holders.iter().filter(may_rest).map(|sharer| &sharer.name).find(|name| **name != kept).cloned()
    }
}

#[cfg(test)]
mod tests;
