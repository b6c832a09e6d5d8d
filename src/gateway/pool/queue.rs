//! The queue of one pool: bounded, ordered by a key that never changes.
//!
//! `fifo` orders by arrival. `shortest_first` orders by `arrival + aging x prompt tokens`: a
//! virtual deadline. A prompt of P tokens can be overtaken only by requests that arrive within
//! `aging x P` after it, so nothing starves, and because both terms are fixed at arrival the order
//! among waiters never changes and a sorted map is enough: no re-sorting as time passes.
//! A key's priority comes first (lower is earlier, as in vLLM).
//!
//! Two lanes: prompts that need a permit in this pool, and the rest. When a backend has no permit left, the long lane is
//! skipped as a whole instead of waiter by waiter.

use std::collections::BTreeMap;
use std::time::Duration;

/// A waiter's identity: an index into the admission's table of tickets.
pub type WaiterId = u32;

/// The order of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOrder {
    /// Delay added per prompt token; zero is first in, first out.
    pub aging_per_token: Duration,
}

impl QueueOrder {
    /// First in, first out.
    pub const FIFO: Self = Self { aging_per_token: Duration::ZERO };

    /// The position of a request that arrived `arrived` after the admission's epoch.
    pub fn key(&self, priority: i32, arrived: Duration, prompt_tokens: u64, serial: u64) -> QueuePosition {
        let aging = self.aging_per_token.as_micros().saturating_mul(u128::from(prompt_tokens));
        let due_us = u64::try_from(arrived.as_micros().saturating_add(aging)).unwrap_or(u64::MAX);
        QueuePosition { priority, due_us, serial }
    }
}

/// A fixed position in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePosition {
    priority: i32,
    due_us: u64,
    /// Ties are broken by arrival order.
    serial: u64,
}

/// The lane of a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Needs a prefill permit in its home pool.
    Long,
    /// Does not.
    Rest,
}

/// The waiters of one pool.
#[derive(Debug, Default)]
pub struct WaitQueue {
    long: BTreeMap<QueuePosition, WaiterId>,
    rest: BTreeMap<QueuePosition, WaiterId>,
}

impl WaitQueue {
    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.long.len() + self.rest.len()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.long.is_empty() && self.rest.is_empty()
    }

    /// Adds a waiter.
    pub fn insert(&mut self, lane: Lane, key: QueuePosition, id: WaiterId) {
        let displaced = self.lane_mut(lane).insert(key, id);
        debug_assert!(displaced.is_none(), "serial numbers make keys unique");
    }

    /// Removes a waiter; whether it was there.
    pub fn remove(&mut self, lane: Lane, key: &QueuePosition) -> bool {
        self.lane_mut(lane).remove(key).is_some()
    }

    /// The first waiter strictly after `after` in queue order; `skip_long` leaves the long lane out.
    pub fn next_after(&self, after: Option<QueuePosition>, skip_long: bool) -> Option<(Lane, QueuePosition, WaiterId)> {
        let first = |lane: &BTreeMap<QueuePosition, WaiterId>| {
            let found = match after {
                None => lane.first_key_value(),
                Some(key) => lane.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded)).next(),
            };
            found.map(|(key, id)| (*key, *id))
        };
        let rest = first(&self.rest);
        let long = if skip_long { None } else { first(&self.long) };
        match (long, rest) {
            (Some((lk, lid)), Some((rk, _))) if lk < rk => Some((Lane::Long, lk, lid)),
            (_, Some((key, id))) => Some((Lane::Rest, key, id)),
            (Some((key, id)), None) => Some((Lane::Long, key, id)),
            (None, None) => None,
        }
    }

    /// Every waiter, in no particular order.
    pub fn ids(&self) -> impl Iterator<Item = WaiterId> + '_ {
        self.long.values().chain(self.rest.values()).copied()
    }

    fn lane_mut(&mut self, lane: Lane) -> &mut BTreeMap<QueuePosition, WaiterId> {
        match lane {
            Lane::Long => &mut self.long,
            Lane::Rest => &mut self.rest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(queue: &WaitQueue, skip_long: bool) -> Vec<WaiterId> {
        let mut out = Vec::new();
        let mut after = None;
        while let Some((_, key, id)) = queue.next_after(after, skip_long) {
            out.push(id);
            after = Some(key);
        }
        out
    }

    #[test]
    fn fifo_keeps_the_order_of_arrival_across_both_lanes() {
        let mut queue = WaitQueue::default();
        for (serial, lane) in [Lane::Rest, Lane::Long, Lane::Rest].into_iter().enumerate() {
            let serial = serial as u64;
            queue.insert(lane, QueueOrder::FIFO.key(0, Duration::from_millis(serial), 9, serial), serial as u32);
        }
        assert_eq!(line(&queue, false), [0, 1, 2]);
        assert_eq!(line(&queue, true), [0, 2]);
    }

    #[test]
    fn a_short_prompt_overtakes_a_long_one_only_within_its_age() {
        let order = QueueOrder { aging_per_token: Duration::from_micros(250) };
        let long = order.key(0, Duration::ZERO, 16_000, 0); // due at 4 s
        let soon = order.key(0, Duration::from_secs(3), 200, 1);
        let late = order.key(0, Duration::from_secs(4), 200, 2);
        assert!(soon < long);
        assert!(long < late);
    }

    #[test]
    fn a_lower_priority_number_goes_first() {
        assert!(QueueOrder::FIFO.key(-1, Duration::from_secs(9), 0, 9) < QueueOrder::FIFO.key(0, Duration::ZERO, 0, 0));
    }
}
