//! Fair queues: the owners of the requests of one pool, their engine time, and which owner is next.
//!
//! An *owner* is an API key, an end user within it, or a header's value (`queue.fair`). Where a
//! pool is not fair, all requests belong to [`EVERYONE`] and nothing is charged. The method is
//! start-time fair queueing (Goyal, Vin, Cheng 1996) over measured work, as VTC does over tokens
//! ("Fairness in Serving Large Language Models", OSDI 2024):
//!
//! ```text
//! level(owner) += work of a granted request / weight  (`bill.rs`; corrected by usage at the end)
//! level(owner)  = max(level(owner), V)   when it asks and none of its requests waits
//! V = (highest level at which a request was granted
//!      + highest level at which an ended one had been granted) / 2
//! ```
//!
//! Owners whose first waiter has the best priority go first, and among them the owner with the
//! lowest level. `queue.rs` orders the requests of an owner. A level includes running requests, so
//! freed room goes to the owner with the smallest part of the engines. Idle time earns no credit:
//! see [`Owners::insert`].
//!
//! Bounds. While two owners both wait for room that either could use, their engine time differs by
//! at most one request of either. Each other owner overtakes an owner at V with at most one
//! request. There are at most [`OWNERS_MAX`] owners; further ones count as one. An ordered set
//! finds the next owner in O(log n).

mod presence;
mod view;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Bound::{Excluded, Included, Unbounded};

use super::bill::{Bill, Price};
use super::fair_owner::{EVERYONE, FairOwner, Level, OwnerView};
use super::queue::{Lane, OwnerIndex, QueuePosition, Skip, WaitQueue, WaiterId};
use super::share_of_prefill::PrefillUse;
use sluice_core::base::{BackendId, PoolId};

pub(super) const OWNERS_MAX: usize = 4_096;
/// How far an owner whose requests fit nowhere may fall behind V, in seconds at weight 1.
const LAG_MAX: f64 = 10.0;

/// The place of an owner with waiters in the order in which owners are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    priority: i32,
    level: Level,
    pub(super) owner: OwnerIndex,
}

/// How far one dispatch has come in the queue of an owner.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    /// The number of the dispatch; a cursor of another dispatch is at the beginning.
    look: u64,
    /// The serial of the last waiter at the overtaking limit that the dispatch looked at.
    pub(super) at_limit: u64,
    /// The last waiter in queue order that the dispatch looked at.
    pub(super) after: Option<QueuePosition>,
    pub(super) skip: Skip,
    pub(super) looked: usize,
}

impl Cursor {
    /// The cursor after a waiter at the overtaking limit.
    pub(super) fn at_limit(self, serial: u64) -> Self {
        Self { at_limit: serial, looked: self.looked + 1, ..self }
    }

    /// The cursor after a waiter in queue order.
    pub(super) fn after(self, key: QueuePosition) -> Self {
        Self { after: Some(key), looked: self.looked + 1, ..self }
    }
}

#[derive(Debug, Default)]
struct Owner {
    id: u64,
    /// The weight of an owner without a group.
    weight: f64,
    group: Option<u64>,
    level: Level,
    queue: WaitQueue,
    /// The priority under which the owner is in the order.
    listed: Option<i32>,
    running: u32,
    /// Seconds of engine time charged here since the owner entered the table.
    work: f64,
    /// Output tokens divided by estimates: a decayed mean over the owner's requests.
    output_ratio: f64,
    present: bool,
    /// The owner is in the line of owners that may have left.
    leaving: bool,
    /// The clock when the owner's last request ended.
    idle_since: f64,
    prefill: PrefillUse,
    cursor: Cursor,
    in_use: bool,
}

/// Owners that divide one weight.
#[derive(Clone, Copy, Debug)]
struct Group {
    weight: f64,
    present: u32,
    owners: u32,
}

#[derive(Debug)]
pub(super) struct Owners {
    all: Vec<Owner>,
    free: Vec<OwnerIndex>,
    by_id: HashMap<u64, OwnerIndex>,
    groups: HashMap<u64, Group>,
    order: BTreeSet<Turn>,
    waiting: usize,
    /// Grants to requests of other pools that waiters of this pool may count as overtaking.
    grants_of_others: u64,
    /// The highest level at which a request was granted.
    granted: f64,
    /// The highest level at which an ended request had been granted.
    ended: f64,
    /// The highest level that any owner has had.
    highest: f64,
    /// Requests that hold room, of all owners.
    running: u32,
    /// Seconds of engine time charged so far: a clock.
    clock: f64,
    /// Owners that count as present.
    present: usize,
    /// The sum of the weights of present owners; a group counts once.
    weights: f64,
    /// Owners without requests, in the order in which they became idle.
    leaving: VecDeque<OwnerIndex>,
    /// Owners that have left but have a level above V.
    indebted: BTreeSet<(Level, OwnerIndex)>,
    /// Number of sequences on the engine when requests were granted: a decayed mean.
    crowd: f64,
    /// Prompts in prefill, of all owners.
    prefill: PrefillUse,
    /// Output tokens divided by estimates, of all owners: a decayed mean.
    output_ratio: f64,
    /// A waiter was held although there is room, because the owner's prefill share is used up.
    held: bool,
    /// An event has happened after which a held waiter may have room.
    loosened: bool,
}

/// Weight of one grant in the mean number of sequences.
const CROWD_WEIGHT: f64 = 0.05;
/// Weights of one request in the ratios of output to estimate: of the owner, and of the pool.
const RATIO_WEIGHTS: (f64, f64) = (0.1, 0.02);
/// The highest ratio of output to estimate that counts.
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
            prefill: PrefillUse::default(),
            output_ratio: 1.0,
            held: false,
            loosened: false,
        }
    }
}

impl Owners {
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

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

    /// Looks up the owner of a request that enters, or adds it to the table.
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
            // An owner that left with a level above V gives way. If there is none, the newcomer
            // counts as [`EVERYONE`].
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

    /// Changes a weight. The level stays; later work counts by the new weight.
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

    /// The share relative to other owners, given the present members of the group.
    fn weight(&self, owner: OwnerIndex) -> f64 {
        let found = self.at(owner);
        match found.group.and_then(|group| self.groups.get(&group)) {
            Some(group) => group.weight / f64::from(group.present.max(1)),
            None => found.weight,
        }
    }

    /// Adds a waiter. Returns the grants so far, from which overtakers are counted.
    ///
    /// An owner without waiters starts at V or above. V lies between the level of requests that
    /// start now and the level of requests that end now, because running work is half done on
    /// average. So the owner takes over a fair share of the running work, and nothing for the time
    /// before. An owner whose requests fit nowhere is at most [`LAG_MAX`] behind V.
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

    pub(super) fn remove(&mut self, owner: OwnerIndex, lane: Lane, key: &QueuePosition) {
        if self.at_mut(owner).queue.remove(lane, key) {
            self.waiting -= 1;
            self.list(owner);
            self.rest(owner);
        }
    }

    pub(super) fn relane(&mut self, owner: OwnerIndex, (from, to): (Lane, Lane), key: QueuePosition, id: WaiterId) {
        let queue = &mut self.at_mut(owner).queue;
        if queue.remove(from, &key) {
            queue.insert(to, key, id);
        }
    }

    /// Puts an owner into the order by level and first waiter, or takes it out.
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

    /// Charges the owner of a request that is granted room next to this many sequences.
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
        // Estimates reserve room for long outputs. If they were charged in full, the end of each
        // request would give much back to the owner, and with it more turns.
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

    /// A request has taken this many tokens. The correction may come after the owner has lost the
    /// place in the table.
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

    /// An owner has attained this many further seconds at other gateways.
    pub(super) fn attained_elsewhere(&mut self, id: u64, seconds: f64) {
        if let Some(owner) = self.by_id.get(&id).copied().filter(|_| seconds.is_finite() && seconds > 0.0) {
            let level = self.at(owner).level.0 + seconds / self.weight(owner);
            self.set_level(owner, level);
        }
    }

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

    pub(super) fn turn_after(&self, turn: Turn) -> Option<Turn> {
        self.order.range((Excluded(turn), Unbounded)).next().copied()
    }

    /// How far the dispatch with the number `look` has come in the owner's queue.
    pub(super) fn cursor(&self, owner: OwnerIndex, look: u64) -> Cursor {
        let cursor = self.at(owner).cursor;
        if cursor.look == look { cursor } else { Cursor { look, ..Cursor::default() } }
    }

    pub(super) fn set_cursor(&mut self, owner: OwnerIndex, cursor: Cursor) {
        self.at_mut(owner).cursor = cursor;
    }

    pub(super) fn queue(&self, owner: OwnerIndex) -> &WaitQueue {
        &self.at(owner).queue
    }

    /// Owners that wait behind others only because of their priority.
    pub(super) fn behind(&self) -> impl Iterator<Item = OwnerIndex> + '_ {
        let best = self.order.first().map(|turn| turn.priority);
        let from = best.and_then(|best| best.checked_add(1));
        let least = |priority| Turn { priority, level: Level(f64::NEG_INFINITY), owner: 0 };
        let behind = from.map(|priority| self.order.range(least(priority)..));
        behind.into_iter().flatten().map(|turn| turn.owner)
    }

    /// Serves an owner as if the first waiter had the best priority.
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

    /// A waiter of this owner was granted room that the owner's other waiters may use.
    pub(super) fn count_grant(&mut self, owner: OwnerIndex) {
        self.at_mut(owner).queue.count_grant();
    }

    /// A waiter of another pool was granted room that waiters of this one may use.
    pub(super) fn count_grant_of_others(&mut self) {
        self.grants_of_others += 1;
    }

    /// The last waiter of the owner with most of the queue by weight, if that owner has more than
    /// `owner`.
    pub(super) fn displaced_by(&self, owner: OwnerIndex) -> Option<WaiterId> {
        let places = |owner: OwnerIndex| Level(self.at(owner).queue.len() as f64 / self.weight(owner));
        let most = self.order.iter().map(|turn| turn.owner).max_by_key(|owner| places(*owner))?;
        let more = most != owner && places(most) > places(owner);
        more.then(|| self.at(most).queue.last()).flatten().map(|(_, id)| id)
    }
}
