//! The rule of shares: who may take how much of a bounded resource, and who gives way.
//!
//! A resource has `total` units. Each *holding* belongs to an *owner*. `owners` is the number of
//! owners that hold units, including the owner that asks.
//!
//! 1. The fair share is `total / owners`, at least one unit.
//! 2. Free room goes to any owner that asks, so an owner that is alone may have everything.
//! 3. Without free room, an owner within its fair share takes room from the largest owner above the
//!    fair share. The owner's newest or oldest holding that may give way does so ([`GivesWay`]).
//! 4. An owner above its fair share takes nothing from others. With `Oldest` it may replace its own
//!    oldest holding.
//! 5. With `Oldest`, if no other owner is above the fair share, an owner that stays within its fair
//!    share takes room from the oldest holding of all.
//! 6. A *kept* holding does not give way. The last `reserve` units can be kept only by owners
//!    within the fair share for `owners + 1` owners, so that a newcomer finds room.

use std::collections::HashMap;
use std::hash::Hash;

use foldhash::quality::RandomState;

use super::demand::Demand;
use super::heap::Heap;
use super::links::{ALL, Ends, Linked, Links, OWN};

/// The units of a holding that gave way are free at once, and count as `leaving` until the holder
/// returns them. At most this fraction (1/8) of `total`, or one holding, may be `leaving`.
const LEAVING_PART: u64 = 8;

/// Which holding of the largest owner gives way first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivesWay {
    /// The newest, because older ones have cost the owner more and will end sooner (uploads).
    Newest,
    /// The oldest, because the newest is just being served (handshakes, idle connections,
    /// refusals).
    Oldest,
}

/// A holding. The number is reused after [`Ledger::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HoldingId(u32);

/// Whether a holding may give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    MayGiveWay,
    Kept,
    /// The holding gave way. The units are free, and the owner is no longer known.
    GaveWay,
}

#[derive(Debug)]
struct Entry<T> {
    owner: u32,
    units: u64,
    state: State,
    links: [Links; 2],
    tag: T,
}

impl<T> Linked for Entry<T> {
    fn links_mut(&mut self) -> &mut [Links; 2] {
        &mut self.links
    }
}

#[derive(Debug)]
struct Owner<O> {
    name: Option<O>,
    units: u64,
    kept: u64,
    holdings: usize,
    /// The holdings that may give way, oldest first.
    list: Ends,
}

/// The holdings of one resource. `T`: the value that is returned when a holding gives way.
/// Operations take constant time, or O(log owners).
#[derive(Debug)]
pub struct Ledger<O, T> {
    gives_way: GivesWay,
    total: u64,
    reserve: u64,
    used: u64,
    kept: u64,
    leaving: u64,
    gave_way: u64,
    /// Owners by name, hashed with a secret of the process, so that no client can choose colliding
    /// names.
    by_name: HashMap<O, u32, RandomState>,
    owners: Vec<Owner<O>>,
    free_owners: Vec<u32>,
    entries: Vec<Entry<T>>,
    free_entries: Vec<u32>,
    /// Every holding that may give way, oldest first.
    all: Ends,
    /// Owners with a holding that may give way, by their units.
    largest: Heap,
}

impl<O: Clone + Eq + Hash, T: Default> Ledger<O, T> {
    /// An empty ledger of `total` units, `reserve` of them for newcomers.
    pub fn new(gives_way: GivesWay, total: u64, reserve: u64) -> Self {
        Self {
            gives_way,
            total,
            reserve,
            used: 0,
            kept: 0,
            leaving: 0,
            gave_way: 0,
            by_name: HashMap::default(),
            owners: Vec::new(),
            free_owners: Vec::new(),
            entries: Vec::new(),
            free_entries: Vec::new(),
            all: Ends::NONE,
            largest: Heap::default(),
        }
    }

    /// Changes the size. Holdings stay, even above the new total.
    pub fn resize(&mut self, total: u64, reserve: u64) {
        (self.total, self.reserve) = (total, reserve);
    }

    /// Units in all.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Units that are held.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Owners that hold units.
    pub fn owners(&self) -> usize {
        self.by_name.len()
    }

    /// Holdings that gave way so far.
    pub fn gave_way(&self) -> u64 {
        self.gave_way
    }

    fn fair(&self, owners: usize) -> u64 {
        (self.total / (owners as u64).max(1)).max(1)
    }

    /// Begins a holding, which may give way. Appends the tags of the holdings that gave way for it
    /// to `out`. `None`: there is no room.
    pub fn enter(&mut self, name: O, demand: Demand, tag: T, out: &mut Vec<T>) -> Option<HoldingId> {
        let owner = self.owner(name)?;
        // The new holding is counted first, so that the owner stays if its only other holding gives
        // way.
        self.owners[owner as usize].holdings += 1;
        let has_room = self.make_room(owner, demand, out);
        let Some(id) = has_room.then(|| self.vacant(owner, tag)).flatten() else {
            self.owners[owner as usize].holdings -= 1;
            self.forget_if_empty(owner);
            return None;
        };
        self.list(id);
        self.add(id, demand.units);
        Some(HoldingId(id))
    }

    /// Gives a holding more units; `false`: there is no room, or it gave way.
    pub fn grow(&mut self, id: HoldingId, demand: Demand, out: &mut Vec<T>) -> bool {
        let Entry { owner, state, .. } = self.entries[id.0 as usize];
        let refused = match state {
            State::GaveWay => true,
            State::Kept => !self.may_keep(owner, demand.units),
            State::MayGiveWay => false,
        };
        if refused || !self.make_room(owner, demand, out) || self.has_given_way(id) {
            return false;
        }
        self.add(id.0, demand.units);
        true
    }

    /// Whether a demand would be met now.
    pub fn could(&self, name: &O, demand: Demand) -> bool {
        let owner = self.by_name.get(name).map(|index| &self.owners[*index as usize]);
        let owners = self.owners() + usize::from(owner.is_none());
        let (held, kept) = owner.map_or((0, 0), |owner| (owner.units, owner.kept));
        let (wanted, free) = (demand.units.saturating_add(demand.spare), self.total.saturating_sub(self.used));
        let after = held.saturating_add(demand.units);
        if after > demand.most {
            return false;
        }
        let of_others = (self.used - self.kept).saturating_sub(held - kept);
        wanted <= free || after <= self.fair(owners) && wanted <= free.saturating_add(of_others)
    }

    /// Keeps the holding; `false`: it may not be kept, or it gave way.
    pub fn keep(&mut self, id: HoldingId) -> bool {
        let Entry { owner, units, state, .. } = self.entries[id.0 as usize];
        match state {
            State::Kept => true,
            State::GaveWay => false,
            State::MayGiveWay => self.may_keep(owner, units) && self.set_kept(id.0),
        }
    }

    /// [`Ledger::keep`] that moves the holding to the owner `name`, which may hold at most `most`
    /// units.
    pub fn keep_as(&mut self, id: HoldingId, name: O, most: u64) -> bool {
        let Entry { owner: from, units, state, .. } = self.entries[id.0 as usize];
        if state == State::GaveWay {
            return false;
        }
        let Some(to) = self.owner(name) else { return false };
        if to == from {
            return self.keep(id);
        }
        let fits = self.owners[to as usize].units.saturating_add(units) <= most;
        if !fits || !self.may_keep(to, units) {
            self.forget_if_empty(to);
            return false;
        }
        if state == State::Kept {
            self.set_may_give_way(id.0);
        }
        self.transfer(id.0, to);
        self.set_kept(id.0)
    }

    /// Lets a kept holding give way again, as the newest holding of `name`.
    pub fn offer(&mut self, id: HoldingId, name: &O) {
        if self.entries[id.0 as usize].state != State::Kept {
            return;
        }
        self.set_may_give_way(id.0);
        let from = self.entries[id.0 as usize].owner;
        if self.owners[from as usize].name.as_ref() != Some(name)
            && let Some(to) = self.owner(name.clone())
        {
            self.transfer(id.0, to);
        }
    }

    /// Whether the holding gave way.
    pub fn has_given_way(&self, id: HoldingId) -> bool {
        self.entries[id.0 as usize].state == State::GaveWay
    }

    /// The tag of a holding.
    pub fn tag(&mut self, id: HoldingId) -> &mut T {
        &mut self.entries[id.0 as usize].tag
    }

    /// The tag of the oldest holding that may give way.
    pub fn oldest(&self) -> Option<&T> {
        self.all.first().map(|id| &self.entries[id as usize].tag)
    }

    /// Lets one holding of the largest owner give way, because a resource behind this one is
    /// exhausted. Returns the tag.
    pub fn yield_one(&mut self) -> Option<T> {
        let id = match self.largest.first() {
            Some(owner) => self.of_owner(owner),
            None => None,
        }?;
        self.has_room_to_leave(id).then(|| self.revoke(id))
    }

    /// Ends a holding and returns the tag.
    pub fn leave(&mut self, id: HoldingId) -> T {
        let Entry { owner, units, state, .. } = self.entries[id.0 as usize];
        match state {
            State::GaveWay => self.leaving -= units,
            State::MayGiveWay | State::Kept => {
                self.detach(id.0);
                self.forget_if_empty(owner);
            }
        }
        self.free_entries.push(id.0);
        std::mem::take(&mut self.entries[id.0 as usize].tag)
    }

    /// Makes room for a demand of `owner`. With `Newest`, holdings give way only if there will be
    /// enough.
    fn make_room(&mut self, owner: u32, demand: Demand, out: &mut Vec<T>) -> bool {
        let wanted = demand.units.saturating_add(demand.spare);
        if self.owners[owner as usize].units.saturating_add(demand.units) > demand.most || wanted > self.total {
            return false;
        }
        while self.total.saturating_sub(self.used) < wanted {
            let Some(id) = self.next_to_give_way(owner, demand) else { return false };
            out.push(self.revoke(id));
        }
        true
    }

    /// The holding that gives way to a demand of `owner`, by rules 3 to 5.
    fn next_to_give_way(&self, owner: u32, demand: Demand) -> Option<u32> {
        let asking = &self.owners[owner as usize];
        let fair = self.fair(self.owners());
        let within_share = asking.units.saturating_add(demand.units) <= fair;
        let above = self.largest.first().filter(|top| self.owners[*top as usize].units > fair && *top != owner);
        let oldest = self.gives_way == GivesWay::Oldest;
        let found = match above {
            Some(top) if within_share => self.of_owner(top),
            _ if oldest && within_share => self.all.first(),
            _ if oldest => asking.list.first(),
            _ => None,
        };
        let enough = || {
            let of_others = (self.used - self.kept).saturating_sub(asking.units - asking.kept);
            let room = self.total.saturating_sub(self.used).saturating_add(of_others);
            oldest || demand.units.saturating_add(demand.spare) <= room
        };
        found.filter(|id| enough() && self.has_room_to_leave(*id))
    }

    fn of_owner(&self, owner: u32) -> Option<u32> {
        let list = &self.owners[owner as usize].list;
        match self.gives_way {
            GivesWay::Newest => list.last(),
            GivesWay::Oldest => list.first(),
        }
    }

    fn has_room_to_leave(&self, id: u32) -> bool {
        let units = self.entries[id as usize].units;
        self.leaving == 0 || self.leaving.saturating_add(units) <= self.total / LEAVING_PART
    }

    fn revoke(&mut self, id: u32) -> T {
        let Entry { owner, units, .. } = self.entries[id as usize];
        self.detach(id);
        self.forget_if_empty(owner);
        self.entries[id as usize].state = State::GaveWay;
        self.leaving += units;
        self.gave_way += 1;
        std::mem::take(&mut self.entries[id as usize].tag)
    }

    /// Rule 6.
    fn may_keep(&self, owner: u32, units: u64) -> bool {
        let kept = self.kept.saturating_add(units);
        let of_owner = self.owners[owner as usize].kept.saturating_add(units);
        kept.saturating_add(self.reserve) <= self.total
            || kept <= self.total && of_owner <= self.fair(self.owners() + 1)
    }

    fn set_kept(&mut self, id: u32) -> bool {
        let Entry { owner, units, .. } = self.entries[id as usize];
        self.unlist(id);
        self.entries[id as usize].state = State::Kept;
        self.owners[owner as usize].kept += units;
        self.kept += units;
        self.rank(owner);
        true
    }

    fn set_may_give_way(&mut self, id: u32) {
        let Entry { owner, units, .. } = self.entries[id as usize];
        self.entries[id as usize].state = State::MayGiveWay;
        self.owners[owner as usize].kept -= units;
        self.kept -= units;
        self.list(id);
        self.rank(owner);
    }

    fn transfer(&mut self, id: u32, to: u32) {
        let Entry { owner: from, units, .. } = self.entries[id as usize];
        if from == to {
            return;
        }
        self.detach(id);
        self.forget_if_empty(from);
        self.entries[id as usize].owner = to;
        self.entries[id as usize].units = 0;
        self.owners[to as usize].holdings += 1;
        self.list(id);
        self.add(id, units);
    }

    fn add(&mut self, id: u32, units: u64) {
        let entry = &mut self.entries[id as usize];
        entry.units += units;
        let (owner, is_kept) = (entry.owner, entry.state == State::Kept);
        self.owners[owner as usize].units += units;
        self.used += units;
        if is_kept {
            self.owners[owner as usize].kept += units;
            self.kept += units;
        }
        self.rank(owner);
    }

    /// Takes a holding out of its owner's sums and out of the lists.
    fn detach(&mut self, id: u32) {
        let Entry { owner, units, state, .. } = self.entries[id as usize];
        if state == State::MayGiveWay {
            self.unlist(id);
        }
        let of = &mut self.owners[owner as usize];
        of.units -= units;
        of.holdings -= 1;
        self.used -= units;
        if state == State::Kept {
            of.kept -= units;
            self.kept -= units;
        }
        self.rank(owner);
    }

    fn list(&mut self, id: u32) {
        let owner = self.entries[id as usize].owner as usize;
        self.owners[owner].list.push::<OWN, _>(&mut self.entries, id);
        self.all.push::<ALL, _>(&mut self.entries, id);
    }

    fn unlist(&mut self, id: u32) {
        let owner = self.entries[id as usize].owner as usize;
        self.owners[owner].list.remove::<OWN, _>(&mut self.entries, id);
        self.all.remove::<ALL, _>(&mut self.entries, id);
    }

    fn rank(&mut self, owner: u32) {
        let Owner { units, list, .. } = &self.owners[owner as usize];
        self.largest.set(owner, list.first().map(|_| *units));
    }

    /// The index of an owner; a new one has no holding yet. `None`: there are too many.
    fn owner(&mut self, name: O) -> Option<u32> {
        if let Some(index) = self.by_name.get(&name) {
            return Some(*index);
        }
        let owner = Owner { name: Some(name.clone()), units: 0, kept: 0, holdings: 0, list: Ends::NONE };
        let index = match self.free_owners.pop() {
            Some(index) => {
                self.owners[index as usize] = owner;
                index
            }
            None => {
                let index = index_of(self.owners.len())?;
                self.owners.push(owner);
                index
            }
        };
        self.by_name.insert(name, index);
        Some(index)
    }

    fn forget_if_empty(&mut self, index: u32) {
        let owner = &mut self.owners[index as usize];
        if owner.holdings == 0
            && let Some(name) = owner.name.take()
        {
            self.by_name.remove(&name);
            self.free_owners.push(index);
        }
    }

    fn vacant(&mut self, owner: u32, tag: T) -> Option<u32> {
        let entry = Entry { owner, units: 0, state: State::MayGiveWay, links: [Links::NONE; 2], tag };
        if let Some(index) = self.free_entries.pop() {
            self.entries[index as usize] = entry;
            return Some(index);
        }
        let index = index_of(self.entries.len())?;
        self.entries.push(entry);
        Some(index)
    }
}

/// `None` for the largest number, which means "none" in lists.
fn index_of(length: usize) -> Option<u32> {
    u32::try_from(length).ok().filter(|index| *index != u32::MAX)
}

#[cfg(test)]
mod check;
