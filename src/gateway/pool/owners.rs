//! Fair queues: the owners of the requests of one pool, the engine time that each has had, and
//! which owner is next.
//!
//! An *owner* is an API key, an end user within it, or a header's value (`queue.fair`). Where a
//! pool is not fair, all requests have one owner, [`EVERYONE`], and nothing is charged. Start-time
//! fair queueing (Goyal, Vin, Cheng 1996) over measured work, as VTC does over tokens ("Fairness in
//! Serving Large Language Models", OSDI 2024):
//!
//! ```text
//! level(owner) += work of a granted request / weight  (`bill.rs`; corrected by usage at the end)
//! level(owner)  = max(level(owner), V)   when it asks and none of its requests waits
//! V = (highest level at which a request was granted
//!      + highest level at which an ended one had been granted) / 2
//! ```
//!
//! - Of the owners with waiters, first by priority, the one with the lowest level is served; within
//!   it the order of `queue.rs`.
//! - The level includes running requests, so a slot, token or permit that becomes free goes to the
//!   owner that has least of the engines.
//! - A newcomer starts at V: between the level of requests that start now and the level of requests
//!   that end now, since half of the running work is done on average. So it takes over its share of
//!   the running work, and gets nothing for the time before. No one keeps credit for being idle. An
//!   owner whose requests fit nowhere is at most [`LAG_MAX`] behind V.
//! - Deficit round robin would need a quantum above the largest request, and visits owners that
//!   wait for their turn; a tree of levels finds the next in O(log n).
//!
//! Bounds. Two owners that both wait, for room that either could use: levels differ by one request
//! of either. An owner at V is overtaken by one request of each other owner, and by none of the
//! same. [`OWNERS_MAX`] owners; beyond, newcomers are one owner.

mod presence;
mod view;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Bound::{Excluded, Included, Unbounded};

use super::bill::{Bill, Price};
use super::fair_owner::{EVERYONE, FairOwner, Level, OwnerView};
use super::queue::{Lane, OwnerIndex, QueuePosition, Skip, WaitQueue, WaiterId};
use super::share_of_prefill::PrefillUse;
use sluice_core::base::{BackendId, PoolId};

/// Owners of one pool.
pub(super) const OWNERS_MAX: usize = 4_096;
/// How far, in seconds of an engine at weight 1, an owner may be behind the others because its
/// requests fit nowhere.
const LAG_MAX: f64 = 10.0;

/// The place of an owner with waiters in the order in which owners are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    priority: i32,
    level: Level,
    pub(super) owner: OwnerIndex,
}

/// How far one look for a waiter has come in the queue of an owner.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    /// Which look; a cursor of another one is at the beginning.
    look: u64,
    /// The serial of the last waiter at the overtaking limit.
    pub(super) at_limit: u64,
    /// The last waiter in queue order.
    pub(super) after: Option<QueuePosition>,
    pub(super) skip: Skip,
    /// Waiters that were looked at.
    pub(super) looked: usize,
}

impl Cursor {
    /// Past a waiter at the overtaking limit.
    pub(super) fn at_limit(self, serial: u64) -> Self {
        Self { at_limit: serial, looked: self.looked + 1, ..self }
    }

    /// Past a waiter in queue order.
    pub(super) fn after(self, key: QueuePosition) -> Self {
        Self { after: Some(key), looked: self.looked + 1, ..self }
    }
}

/// One owner.
#[derive(Debug, Default)]
struct Owner {
    id: u64,
    /// Of one without a group.
    weight: f64,
    group: Option<u64>,
    level: Level,
    queue: WaitQueue,
    /// The priority by which it is in the order.
    listed: Option<i32>,
    /// Requests that hold room.
    running: u32,
    /// Seconds of engines that it has been charged here since it is in the table.
    work: f64,
    /// Output tokens of its requests divided by their estimates, a decayed mean.
    output_ratio: f64,
    /// It counts as present.
    present: bool,
    /// It is in the line of owners that may have left, and the clock when it last had a request.
    leaving: bool,
    idle_since: f64,
    prefill: PrefillUse,
    cursor: Cursor,
    in_use: bool,
}

/// Owners that divide one weight.
#[derive(Clone, Copy, Debug)]
struct Group {
    weight: f64,
    /// How many of them count as present.
    present: u32,
    /// How many of them are in the table.
    owners: u32,
}

/// The owners of one pool with their waiters.
#[derive(Debug)]
pub(super) struct Owners {
    all: Vec<Owner>,
    free: Vec<OwnerIndex>,
    by_id: HashMap<u64, OwnerIndex>,
    groups: HashMap<u64, Group>,
    /// The owners with waiters.
    order: BTreeSet<Turn>,
    /// Requests that wait.
    waiting: usize,
    /// Grants to requests of other pools that waiters of this one may count as overtaking.
    grants_of_others: u64,
    /// The two levels of V.
    granted: f64,
    ended: f64,
    /// The highest level of any owner.
    highest: f64,
    /// Requests that hold room, of owners that are charged.
    running: u32,
    /// Seconds of engines charged so far: a clock.
    clock: f64,
    /// Owners that count as present, and the sum of their weights.
    present: usize,
    weights: f64,
    /// Owners without requests, in the order in which they became so.
    leaving: VecDeque<OwnerIndex>,
    /// The ones that have left but have a level above V.
    indebted: BTreeSet<(Level, OwnerIndex)>,
    /// Sequences next to which requests were granted, a decayed mean.
    crowd: f64,
    /// Output tokens divided by their estimates, of all owners.
    output_ratio: f64,
    /// A waiter was held although there is room, because its owner has its share; and an event that
    /// may end that has happened.
    held: bool,
    loosened: bool,
}

/// Weight of one grant in the mean of sequences.
const CROWD_WEIGHT: f64 = 0.05;
/// Weight of one request in the ratios of output to estimate: of its owner, and of the pool.
const RATIO_WEIGHTS: (f64, f64) = (0.1, 0.02);
/// The highest such ratio that is learned from.
const RATIO_MAX: f64 = 4.0;

impl Default for Owners {
    fn default() -> Self {
        let everyone = Owner { weight: 1.0, output_ratio: 1.0, in_use: true, ..Owner::default() };
        Self {
            all: vec![everyone],
            free: Vec::new(),
            by_id: HashMap::new(),
            groups: HashMap::new(),
            order: BTreeSet::new(),
            waiting: 0,
            grants_of_others: 0,
            granted: 0.0,
            ended: 0.0,
            highest: 0.0,
            running: 0,
            clock: 0.0,
            present: 0,
            weights: 0.0,
            leaving: VecDeque::new(),
            indebted: BTreeSet::new(),
            crowd: 1.0,
            output_ratio: 1.0,
            held: false,
            loosened: false,
        }
    }
}

impl Owners {
    /// Requests that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// Whether no request waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Every waiter, in no particular order.
    pub(super) fn ids(&self) -> impl Iterator<Item = WaiterId> + '_ {
        self.order.iter().flat_map(|turn| self.at(turn.owner).queue.ids())
    }

    /// Whether requests are charged.
    pub(super) fn is_fair(&self) -> bool {
        self.all.len() > 1
    }

    fn at(&self, owner: OwnerIndex) -> &Owner {
        &self.all[owner as usize]
    }

    fn at_mut(&mut self, owner: OwnerIndex) -> &mut Owner {
        &mut self.all[owner as usize]
    }

    fn virtual_time(&self) -> f64 {
        (self.granted + self.ended) / 2.0
    }

    /// Looks up the owner of a request that enters, or makes a place for it.
    pub(super) fn enter(&mut self, fair: &FairOwner) -> OwnerIndex {
        let owner = match self.by_id.get(&fair.id) {
            Some(owner) => *owner,
            None => self.add(fair),
        };
        if owner != EVERYONE {
            self.set_weight(owner, fair.weight);
        }
        owner
    }

    fn add(&mut self, &FairOwner { id, weight, group, .. }: &FairOwner) -> OwnerIndex {
        let output_ratio = self.output_ratio;
        let owner = Owner { id, weight, group, output_ratio, in_use: true, ..Owner::default() };
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.all.len() <= OWNERS_MAX => {
                self.all.push(Owner::default());
                (self.all.len() - 1) as OwnerIndex
            }
            // One that left with a debt gives way; where all are present, newcomers are one owner.
            None => match self.indebted.pop_first() {
                Some((_, index)) => {
                    self.forget(index);
                    self.free.pop().unwrap_or(index)
                }
                None => return EVERYONE,
            },
        };
        if let Some(group) = group {
            self.groups.entry(group).or_insert(Group { weight, present: 0, owners: 0 }).owners += 1;
        }
        self.all[index as usize] = owner;
        self.by_id.insert(id, index);
        index
    }

    /// Changes a weight: the level stays, and later work counts by the new weight.
    fn set_weight(&mut self, owner: OwnerIndex, weight: f64) {
        let Owner { group, present, .. } = *self.at(owner);
        let (before, present) = match group.and_then(|group| self.groups.get_mut(&group)) {
            Some(group) => (std::mem::replace(&mut group.weight, weight), group.present > 0),
            None => (std::mem::replace(&mut self.at_mut(owner).weight, weight), present),
        };
        if present && before != weight {
            self.weights += weight - before;
            self.loosened = true;
        }
    }

    /// Its share relative to other owners, as things are.
    fn weight(&self, owner: OwnerIndex) -> f64 {
        let found = self.at(owner);
        match found.group.and_then(|group| self.groups.get(&group)) {
            Some(group) => group.weight / f64::from(group.present.max(1)),
            None => found.weight,
        }
    }

    /// Adds a waiter. Returns the grants that may count as overtaking it later.
    pub(super) fn insert(&mut self, owner: OwnerIndex, lane: Lane, key: QueuePosition, id: WaiterId) -> u64 {
        self.come(owner);
        let (found, v) = (self.at(owner), self.virtual_time());
        let least = if found.queue.is_empty() { v } else { v - LAG_MAX };
        if self.is_fair() && found.level.0 < least {
            self.set_level(owner, least);
        }
        self.at_mut(owner).queue.insert(lane, key, id);
        self.waiting += 1;
        self.list(owner);
        self.grants(owner)
    }

    /// Removes a waiter.
    pub(super) fn remove(&mut self, owner: OwnerIndex, lane: Lane, key: &QueuePosition) {
        if self.at_mut(owner).queue.remove(lane, key) {
            self.waiting -= 1;
            self.list(owner);
            self.rest(owner);
        }
    }

    /// Moves a waiter to another lane.
    pub(super) fn relane(&mut self, owner: OwnerIndex, (from, to): (Lane, Lane), key: QueuePosition, id: WaiterId) {
        let queue = &mut self.at_mut(owner).queue;
        if queue.remove(from, &key) {
            queue.insert(to, key, id);
        }
    }

    /// Puts an owner into the order where its level and its first waiter say, or takes it out.
    fn list(&mut self, owner: OwnerIndex) {
        let first = self.at(owner).queue.next_after(None, Skip::default()).map(|(key, _)| key.priority());
        self.list_by(owner, first);
    }

    fn list_by(&mut self, owner: OwnerIndex, priority: Option<i32>) {
        let Owner { level, listed, .. } = *self.at(owner);
        if let Some(listed) = listed.filter(|listed| Some(*listed) != priority) {
            self.order.remove(&Turn { priority: listed, level, owner });
        }
        if let Some(priority) = priority.filter(|_| listed != priority) {
            self.order.insert(Turn { priority, level, owner });
        }
        self.at_mut(owner).listed = priority;
    }

    /// Changes the level of an owner.
    fn set_level(&mut self, owner: OwnerIndex, level: f64) {
        let (before, level) = (self.at(owner).level, Level(level.max(0.0)));
        self.highest = self.highest.max(level.0);
        if let Some(priority) = self.at(owner).listed {
            self.order.remove(&Turn { priority, level: before, owner });
            self.order.insert(Turn { priority, level, owner });
        }
        if self.indebted.remove(&(before, owner)) {
            self.indebted.insert((level, owner));
        }
        self.at_mut(owner).level = level;
    }

    /// Charges the owner of a request that is granted room next to this many sequences, for
    /// `computed` and `output` tokens.
    pub(super) fn charge(
        &mut self,
        (pool, owner): (PoolId, OwnerIndex),
        (computed, output): (u64, u64),
        price: impl FnOnce(f64) -> Price,
        sequences: u32,
    ) -> Bill {
        self.crowd += CROWD_WEIGHT * (f64::from(sequences.max(1)) - self.crowd);
        let price = price(self.crowd.max(1.0));
        let v = self.virtual_time();
        self.come(owner);
        let found = self.at_mut(owner);
        found.running += 1;
        // Estimates reserve room for long outputs. Charged like that, an owner would get much back
        // at each end, and with it turns.
        let (estimate, output) = (output, (output as f64 * found.output_ratio).ceil() as u64);
        let start = if found.queue.is_empty() { found.level.0.max(v) } else { found.level.0 };
        let work = price.of(computed, output);
        found.work += work;
        let id = found.id;
        self.set_level(owner, start + work / self.weight(owner));
        self.running += 1;
        self.granted = self.granted.max(start);
        self.clock += work;
        Bill { pool, owner, id, start: start.to_bits(), computed, output, estimate, cached: 0, price }
    }

    /// A charged request has ended.
    pub(super) fn end(&mut self, bill: &Bill) {
        self.ended = self.ended.max(bill.start());
        self.running = self.running.saturating_sub(1);
        let found = self.at_mut(bill.owner);
        found.running = found.running.saturating_sub(1);
        self.rest(bill.owner);
        if self.running == 0 && self.waiting == 0 {
            // Nothing runs and nothing waits: earlier work does not count against any owner.
            (self.granted, self.ended) = (self.highest, self.highest);
        }
    }

    /// A request has taken this many tokens. The correction outlives the request, and perhaps its
    /// owner's place.
    pub(super) fn settle(&mut self, bill: &mut Bill, computed: u64, output: u64) {
        let owner = bill.owner;
        let ratio = (bill.estimate > 0).then(|| (output as f64 / bill.estimate as f64).min(RATIO_MAX));
        let more = bill.correct(computed, output);
        if self.all.get(owner as usize).is_none_or(|found| !found.in_use || found.id != bill.id) {
            return;
        }
        if let Some(ratio) = ratio {
            self.output_ratio += RATIO_WEIGHTS.1 * (ratio - self.output_ratio);
            let own = &mut self.at_mut(owner).output_ratio;
            *own += RATIO_WEIGHTS.0 * (ratio - *own);
        }
        let found = self.at_mut(owner);
        found.work = (found.work + more).max(0.0);
        let level = self.at(owner).level.0 + more / self.weight(owner);
        self.set_level(owner, level);
    }

    /// An owner has attained this many seconds at other gateways since that was counted last.
    pub(super) fn attained_elsewhere(&mut self, id: u64, seconds: f64) {
        if let Some(owner) = self.by_id.get(&id).copied().filter(|_| seconds.is_finite() && seconds > 0.0) {
            let level = self.at(owner).level.0 + seconds / self.weight(owner);
            self.set_level(owner, level);
        }
    }

    /// Whether several owners have waiters.
    pub(super) fn is_contended(&self) -> bool {
        self.order.len() > 1
    }

    /// The owner whose turn it is, at or after `turn`.
    pub(super) fn turn(&self, turn: Option<Turn>) -> Option<Turn> {
        match turn {
            None => self.order.first().copied(),
            Some(turn) => self.order.range((Included(turn), Unbounded)).next().copied(),
        }
    }

    /// The owner after `turn`.
    pub(super) fn turn_after(&self, turn: Turn) -> Option<Turn> {
        self.order.range((Excluded(turn), Unbounded)).next().copied()
    }

    /// How far a look has come with an owner.
    pub(super) fn cursor(&self, owner: OwnerIndex, look: u64) -> Cursor {
        let cursor = self.at(owner).cursor;
        if cursor.look == look { cursor } else { Cursor { look, ..Cursor::default() } }
    }

    pub(super) fn set_cursor(&mut self, owner: OwnerIndex, cursor: Cursor) {
        self.at_mut(owner).cursor = cursor;
    }

    /// The waiters of an owner.
    pub(super) fn queue(&self, owner: OwnerIndex) -> &WaitQueue {
        &self.at(owner).queue
    }

    /// Owners that wait behind others only for their priority.
    pub(super) fn behind(&self) -> impl Iterator<Item = OwnerIndex> + '_ {
        let best = self.order.first().map(|turn| turn.priority);
        let from = best.and_then(|best| best.checked_add(1));
        let least = |priority| Turn { priority, level: Level(f64::NEG_INFINITY), owner: 0 };
        let behind = from.map(|priority| self.order.range(least(priority)..));
        behind.into_iter().flatten().map(|turn| turn.owner)
    }

    /// Serves an owner as if its first waiter had the best priority.
    pub(super) fn promote(&mut self, owner: OwnerIndex) {
        let best = self.order.first().map(|turn| turn.priority);
        if best.is_some() && self.at(owner).listed.is_some() {
            self.list_by(owner, best);
        }
    }

    /// Whether the owner `one` has attained no more than `other`.
    pub(super) fn is_before(&self, one: OwnerIndex, other: OwnerIndex) -> bool {
        self.at(one).level <= self.at(other).level
    }

    /// Grants that may have overtaken a waiter of this owner.
    pub(super) fn grants(&self, owner: OwnerIndex) -> u64 {
        self.at(owner).queue.grants() + self.grants_of_others
    }

    /// A waiter of this pool and owner was granted room that the owner's other waiters may use.
    pub(super) fn count_grant(&mut self, owner: OwnerIndex) {
        self.at_mut(owner).queue.count_grant();
    }

    /// A waiter of another pool was granted room that waiters of this one may use.
    pub(super) fn count_grant_of_others(&mut self) {
        self.grants_of_others += 1;
    }

    /// The last waiter of the owner that has most of the queue in relation to its weight, if that
    /// is more than `owner` has.
    pub(super) fn displaced_by(&self, owner: OwnerIndex) -> Option<WaiterId> {
        let places = |owner: OwnerIndex| Level(self.at(owner).queue.len() as f64 / self.weight(owner));
        let most = self.order.iter().map(|turn| turn.owner).max_by_key(|owner| places(*owner))?;
        let more = most != owner && places(most) > places(owner);
        more.then(|| self.at(most).queue.last()).flatten().map(|(_, id)| id)
    }
}
