//! Recounts the sums of a ledger.
//!
//! For tests only.

use super::*;

impl<O: Clone + Eq + Hash, T> Ledger<O, T> {
    pub(in super::super) fn of(&self, name: &O) -> u64 {
        self.by_name.get(name).map_or(0, |index| self.owners[*index as usize].units)
    }

    /// The holdings that gave way and were not returned.
    pub(in super::super) fn given(&self) -> impl Iterator<Item = HoldingId> {
        let gone = self.entries.iter().enumerate().filter(|(_, entry)| entry.state == State::GaveWay);
        gone.map(|(index, _)| HoldingId(index as u32)).filter(|id| !self.free_entries.contains(&id.0))
    }

    /// Asserts that all sums agree with the holdings.
    pub(in super::super) fn check(&self) {
        let free: std::collections::HashSet<u32> = self.free_entries.iter().copied().collect();
        let live = || self.entries.iter().enumerate().filter(|(index, _)| !free.contains(&(*index as u32)));
        let sum = |state: State| live().filter(move |(_, entry)| entry.state == state).map(|(_, entry)| entry.units);
        let (kept, offered) = (sum(State::Kept).sum::<u64>(), sum(State::MayGiveWay).sum::<u64>());
        assert_eq!((self.kept, self.used), (kept, kept + offered));
        assert_eq!(self.leaving, sum(State::GaveWay).sum::<u64>());
        let links = |id: u32| self.entries[id as usize].links;
        assert_eq!(self.all.count::<ALL>(links), sum(State::MayGiveWay).count());
        assert_eq!(self.by_name.len() + self.free_owners.len(), self.owners.len());
        let mut offering = 0;
        for (name, index) in &self.by_name {
            let owner = &self.owners[*index as usize];
            let held = live().map(|(_, entry)| entry).filter(|entry| entry.state != State::GaveWay);
            let own: Vec<_> = held.filter(|entry| entry.owner == *index).collect();
            assert!(owner.name.as_ref() == Some(name) && owner.holdings == own.len() && owner.holdings > 0);
            assert_eq!(owner.units, own.iter().map(|entry| entry.units).sum::<u64>());
            let may = own.iter().filter(|entry| entry.state == State::MayGiveWay);
            assert_eq!(owner.list.count::<OWN>(links), may.clone().count());
            assert_eq!(self.largest.key(*index), may.clone().next().map(|_| owner.units));
            offering += usize::from(may.count() > 0);
        }
        self.largest.check(offering);
    }
}
