//! Doubly linked lists with links in the entries, so that an entry can be removed from the middle
//! at once.
//!
//! Each entry is in two such lists. Bound: two links for each holding and list.

const NONE: u32 = u32::MAX;

pub(super) const OWN: usize = 0;
pub(super) const ALL: usize = 1;

#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    before: u32,
    after: u32,
}

impl Links {
    pub(super) const NONE: Self = Self { before: NONE, after: NONE };
}

pub(super) trait Linked {
    fn links_mut(&mut self) -> &mut [Links; 2];
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    first: u32,
    last: u32,
}

impl Ends {
    pub(super) const NONE: Self = Self { first: NONE, last: NONE };

    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    pub(super) fn last(&self) -> Option<u32> {
        (self.last != NONE).then_some(self.last)
    }

    pub(super) fn push<const LIST: usize, E: Linked>(&mut self, entries: &mut [E], id: u32) {
        entries[id as usize].links_mut()[LIST] = Links { before: self.last, after: NONE };
        match self.last {
            NONE => self.first = id,
            last => entries[last as usize].links_mut()[LIST].after = id,
        }
        self.last = id;
    }

    pub(super) fn remove<const LIST: usize, E: Linked>(&mut self, entries: &mut [E], id: u32) {
        let own = &mut entries[id as usize].links_mut()[LIST];
        let Links { before, after } = std::mem::replace(own, Links::NONE);
        match before {
            NONE => self.first = after,
            before => entries[before as usize].links_mut()[LIST].after = after,
        }
        match after {
            NONE => self.last = before,
            after => entries[after as usize].links_mut()[LIST].before = before,
        }
    }

    #[cfg(test)]
    pub(super) fn count<const LIST: usize>(&self, links: impl Fn(u32) -> [Links; 2]) -> usize {
        let after = |id: &u32| Some(links(*id)[LIST].after).filter(|id| *id != NONE);
        std::iter::successors(self.first(), after).count()
    }
}
