//! Which backends of a pool may have room: an index, so that a choice takes as long among 256 backends as among two.
//!
//! A position of a pool is *open* unless its backend has no room for any request, and has a *permit* unless all of them are
//! taken. Whether a given request fits is decided on the backend itself. The index is brought up to date before each use:
//! `AdmissionState::backend_mut`, the only way to change a backend that is in use, notes which ones may have changed.
//!
//! A request is compared on all open backends of a pool of up to [`COMPARED`], and on that many random ones of a larger pool:
//! the best of so many is nearly as good as the best of all (Mitzenmacher, "The power of two choices in randomized load
//! balancing", 2001), and where fewer fit, the search goes on until the open ones are used up.

use smallvec::SmallVec;

use sluice_core::base::Rng;

/// Backends of a larger pool on which one request is compared.
pub(super) const COMPARED: usize = 16;

/// A set of positions in a pool. Up to 256 take no allocation.
#[derive(Clone, Debug, Default)]
pub(super) struct Positions(SmallVec<[u64; 4]>);

impl Positions {
    fn put(&mut self, position: usize, present: bool) {
        let (word, bit) = (position / 64, 1 << (position % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        if present {
            self.0[word] |= bit;
        } else {
            self.0[word] &= !bit;
        }
    }

    fn both(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(one, other)| one & other).collect())
    }

    /// The first position from `start` on.
    fn next(&self, start: usize) -> Option<usize> {
        let mut words = self.0.iter().enumerate().skip(start / 64);
        let (first, word) = words.next()?;
        let ahead = word & (u64::MAX << (start % 64));
        let rest = std::iter::once((first, ahead)).chain(words.map(|(index, word)| (index, *word)));
        rest.into_iter().find(|(_, word)| *word != 0).map(|(index, word)| index * 64 + word.trailing_zeros() as usize)
    }

    /// Takes out the first position from a random one on, of `len`.
    pub(super) fn draw(&mut self, len: usize, rng: &mut Rng) -> Option<usize> {
        let position = self.next(rng.below(len)).or_else(|| self.next(0))?;
        self.put(position, false);
        Some(position)
    }

    /// Takes out a position; whether it was there.
    pub(super) fn take(&mut self, position: usize) -> bool {
        let present = self.next(position) == Some(position);
        if present {
            self.put(position, false);
        }
        present
    }

    /// Takes out the first position.
    pub(super) fn first(&mut self) -> Option<usize> {
        let position = self.next(0)?;
        self.put(position, false);
        Some(position)
    }
}

/// The index of one pool.
#[derive(Clone, Debug, Default)]
pub(super) struct Rooms {
    open: Positions,
    permits: Positions,
}

impl Rooms {
    /// Notes what the backend at a position has.
    pub(super) fn judge(&mut self, position: usize, open: bool, permit: bool) {
        self.open.put(position, open);
        self.permits.put(position, permit);
    }

    /// Whether that is what it says of a position (for tests).
    pub(super) fn agree(&self, position: usize, open: bool, permit: bool) -> bool {
        let same = |set: &Positions, present| (set.next(position) == Some(position)) == present;
        same(&self.open, open) && same(&self.permits, permit)
    }

    /// The positions at which a request may find room; `long`: it needs a permit.
    pub(super) fn open(&self, long: bool) -> Positions {
        if long { self.open.both(&self.permits) } else { self.open.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_is_drawn_once_and_each_as_often_as_the_others() {
        let mut all = Positions::default();
        (0..200).for_each(|position| all.put(position, true));
        let (mut rng, mut first) = (Rng::new(1), [0; 200]);
        for _ in 0..20_000 {
            first[all.clone().draw(200, &mut rng).unwrap()] += 1;
        }
        assert!(first.iter().all(|count| (50..150).contains(count)), "{first:?}");
        let mut drawn: Vec<usize> = std::iter::from_fn(|| all.draw(200, &mut rng)).collect();
        drawn.sort_unstable();
        assert_eq!(drawn, (0..200).collect::<Vec<_>>());
        assert_eq!((all.draw(200, &mut rng), all.first(), Positions::default().first()), (None, None, None));
    }

    #[test]
    fn the_next_position_may_be_in_another_word() {
        let mut some = Positions::default();
        [3, 64, 191].iter().for_each(|position| some.put(*position, true));
        let next = [0, 3, 4, 64, 65, 128, 191, 192, 1_000].map(|start| some.next(start));
        let expected = [Some(3), Some(3), Some(64), Some(64), Some(191), Some(191), Some(191), None, None];
        assert_eq!(next, expected);
    }
}
