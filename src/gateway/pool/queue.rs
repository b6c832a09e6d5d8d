//! The waiters of one owner in one pool, in two orders that never change.
//!
//! - Configured order: `fifo` by arrival; `shortest_first` by `arrival + aging x prompt tokens`, a
//!   virtual deadline. Both terms are fixed at arrival, so a sorted map suffices. The priority
//!   comes first (lower is earlier, as in vLLM).
//! - Order of entry: for requests that have reached the overtaking limit (`dispatch.rs`), whatever
//!   their priority and length.
//!
//! Three lanes: prompts that need a permit in this pool, large prompts of requests with an owner,
//! and the rest. When a backend has no permit left, or an owner's prefill share there is used up, a
//! whole lane is skipped. Without fair queues all requests have one owner (`owners.rs`).

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

/// The id of a waiter: an index into the admission's table of waiters.
pub type WaiterId = u32;
/// The place of an owner in the table of the pool (`owners.rs`).
pub(super) type OwnerIndex = u32;

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
    /// Breaks ties by the order of entry.
    serial: u64,
}

impl QueuePosition {
    /// The number of the request in the order of entry, over all queues.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// The priority of the request; lower goes first.
    pub fn priority(&self) -> i32 {
        self.priority
    }
}

/// The lane of a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The prompt needs a prefill permit in the home pool.
    Long,
    /// The request needs no permit, has an owner, and has a large prompt to compute.
    Large,
    /// All others.
    Rest,
}

impl Lane {
    const ALL: [Self; 3] = [Self::Long, Self::Large, Self::Rest];
}

/// Lanes that are skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skip([bool; 3]);

impl Skip {
    /// Skips a lane from now on.
    pub fn add(&mut self, lane: Lane) {
        self.0[lane as usize] = true;
    }

    /// The lanes that either skips.
    pub fn or(self, other: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane] || other.0[lane]))
    }

    fn has(self, lane: Lane) -> bool {
        self.0[lane as usize]
    }
}

/// The waiters of one lane, in both orders.
#[derive(Debug, Default)]
struct Waiters {
    in_order: BTreeMap<QueuePosition, WaiterId>,
    by_entry: BTreeMap<u64, WaiterId>,
}

impl Waiters {
    fn next_in_order(&self, after: Option<QueuePosition>) -> Option<(QueuePosition, WaiterId)> {
        let found = match after {
            None => self.in_order.first_key_value(),
            Some(key) => self.in_order.range((Bound::Excluded(key), Bound::Unbounded)).next(),
        };
        found.map(|(key, id)| (*key, *id))
    }

    fn next_by_entry(&self, after: u64) -> Option<(u64, WaiterId)> {
        self.by_entry.range((Bound::Excluded(after), Bound::Unbounded)).next().map(|(serial, id)| (*serial, *id))
    }
}

/// The waiters of one owner.
#[derive(Debug, Default)]
pub struct WaitQueue {
    lanes: [Waiters; 3],
    grants: u64,
}

impl WaitQueue {
    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.lanes.iter().map(|lane| lane.in_order.len()).sum()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.in_order.is_empty())
    }

    /// Adds a waiter.
    pub fn insert(&mut self, lane: Lane, key: QueuePosition, id: WaiterId) {
        let waiters = &mut self.lanes[lane as usize];
        let displaced = waiters.in_order.insert(key, id).or(waiters.by_entry.insert(key.serial, id));
        debug_assert!(displaced.is_none(), "serial numbers make keys unique");
    }

    /// Removes a waiter. Returns whether it was there.
    pub fn remove(&mut self, lane: Lane, key: &QueuePosition) -> bool {
        let waiters = &mut self.lanes[lane as usize];
        waiters.by_entry.remove(&key.serial);
        waiters.in_order.remove(key).is_some()
    }

    /// The first waiter strictly after `after` in queue order, outside the skipped lanes.
    pub fn next_after(&self, after: Option<QueuePosition>, skip: Skip) -> Option<(QueuePosition, WaiterId)> {
        self.open_lanes(skip).filter_map(|lane| lane.next_in_order(after)).min()
    }

    /// The first waiter that entered after the serial `after` (0: the very first), outside the
    /// skipped lanes.
    pub fn entered_after(&self, after: u64, skip: Skip) -> Option<(u64, WaiterId)> {
        self.open_lanes(skip).filter_map(|lane| lane.next_by_entry(after)).min()
    }

    /// The last waiter in queue order.
    pub fn last(&self) -> Option<(QueuePosition, WaiterId)> {
        self.lanes.iter().filter_map(|lane| lane.in_order.last_key_value()).map(|(key, id)| (*key, *id)).max()
    }

    /// A waiter was granted room that waiters of this queue may use.
    pub fn count_grant(&mut self) {
        self.grants += 1;
    }

    /// Grants counted so far.
    pub fn grants(&self) -> u64 {
        self.grants
    }

    /// Every waiter, in no particular order.
    pub fn ids(&self) -> impl Iterator<Item = WaiterId> + '_ {
        self.lanes.iter().flat_map(|lane| lane.by_entry.values().copied())
    }

    fn open_lanes(&self, skip: Skip) -> impl Iterator<Item = &Waiters> {
        Lane::ALL.into_iter().filter(move |lane| !skip.has(*lane)).map(|lane| &self.lanes[lane as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Skip = Skip([false; 3]);
    const LONG: Skip = Skip([true, false, false]);

    fn order(queue: &WaitQueue, skip: Skip) -> Vec<WaiterId> {
        let mut out = Vec::new();
        let mut after = None;
        while let Some((key, id)) = queue.next_after(after, skip) {
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
        assert_eq!(order(&queue, NONE), [0, 1, 2]);
        assert_eq!(order(&queue, LONG), [0, 2]);
        assert_eq!((queue.entered_after(0, NONE), queue.entered_after(0, LONG)), (Some((1, 1)), Some((2, 2))));
    }

    #[test]
    fn a_short_prompt_overtakes_a_long_one_only_within_its_age() {
        let order = QueueOrder { aging_per_token: Duration::from_micros(250) };
        let long = order.key(0, Duration::ZERO, 16_000, 0); // sorts like an arrival at 4 s
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
