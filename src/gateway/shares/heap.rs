//! A binary heap of owners by units, largest first.
//!
//! The heap knows the index of each owner, so a change takes O(log n). Bound: one entry for each
//! owner.

const NONE: u32 = u32::MAX;

#[derive(Debug, Default)]
pub(super) struct Heap {
    /// Key and owner of each element. No element has a larger key than its parent.
    tree: Vec<(u64, u32)>,
    /// The index in the tree, by owner.
    places: Vec<u32>,
}

impl Heap {
    pub(super) fn first(&self) -> Option<u32> {
        self.tree.first().map(|(_, owner)| *owner)
    }

    /// Sets the key of an owner. `None` removes the owner.
    pub(super) fn set(&mut self, owner: u32, key: Option<u64>) {
        if self.places.len() <= owner as usize {
            if key.is_none() {
                return;
            }
            self.places.resize(owner as usize + 1, NONE);
        }
        let place = self.places[owner as usize];
        match (place, key) {
            (NONE, None) => {}
            (NONE, Some(key)) => {
                self.places[owner as usize] = self.tree.len() as u32;
                self.tree.push((key, owner));
                self.rise(self.tree.len() - 1);
            }
            (place, Some(key)) => {
                self.tree[place as usize].0 = key;
                self.settle(place as usize);
            }
            (place, None) => {
                self.places[owner as usize] = NONE;
                self.tree.swap_remove(place as usize);
                if let Some((_, moved)) = self.tree.get(place as usize) {
                    self.places[*moved as usize] = place;
                    self.settle(place as usize);
                }
            }
        }
    }

    fn settle(&mut self, at: usize) {
        let at = self.rise(at);
        self.sink(at);
    }

    fn rise(&mut self, mut at: usize) -> usize {
        while at > 0 && self.tree[at].0 > self.tree[(at - 1) / 2].0 {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
        at
    }

    fn sink(&mut self, mut at: usize) {
        loop {
            let children = [2 * at + 1, 2 * at + 2].into_iter().filter(|child| *child < self.tree.len());
            let Some(largest) = children.max_by_key(|child| self.tree[*child].0) else { return };
            if self.tree[largest].0 <= self.tree[at].0 {
                return;
            }
            self.swap(at, largest);
            at = largest;
        }
    }

    fn swap(&mut self, one: usize, two: usize) {
        self.tree.swap(one, two);
        self.places[self.tree[one].1 as usize] = one as u32;
        self.places[self.tree[two].1 as usize] = two as u32;
    }

    #[cfg(test)]
    pub(super) fn key(&self, owner: u32) -> Option<u64> {
        let place = self.places.get(owner as usize).filter(|place| **place != NONE)?;
        Some(self.tree[*place as usize].0)
    }

    #[cfg(test)]
    pub(super) fn check(&self, length: usize) {
        assert_eq!(self.tree.len(), length);
        for (at, (key, owner)) in self.tree.iter().enumerate() {
            assert!(self.places[*owner as usize] == at as u32 && (at == 0 || self.tree[(at - 1) / 2].0 >= *key));
        }
    }
}
