//! An index of the backends of one pool: which may have room, and the data by which a choice
//! compares them.
//!
//! With it, a choice takes about as long among 256 backends as among two. A position in the pool is
//! *open* unless the backend has no room for any request, and has a *permit* unless all permits are
//! taken. The [`Candidate`] decides whether a given request fits. `AdmissionState::backend_mut`,
//! the only way to change a backend, notes each backend that may have changed; the index is updated
//! before each use.
//!
//! With few open backends a choice compares all ([`policy::compared`](super::policy::compared)).
//! With more it compares the engines that have most of the prompt cached, the last runner-up, and
//! the first few of a random walk ([`Positions::walk`]); if none has room, the walk continues. On
//! 32 engines of two kinds, comparing six with a runner-up is as good as comparing sixteen;
//! comparing six without a runner-up is 30 % worse.

use smallvec::SmallVec;

use super::policy::Candidate;
use sluice_core::base::Rng;

/// A set of positions in a pool, as a bitmap. Positions below 256 need no allocation.
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

    fn contains(&self, position: usize) -> bool {
        self.0.get(position / 64).is_some_and(|word| word >> (position % 64) & 1 == 1)
    }

    /// The position after the last one.
    fn end(&self) -> usize {
        let last = self.0.iter().rposition(|word| *word != 0);
        last.map_or(0, |index| index * 64 + (u64::BITS - self.0[index].leading_zeros()) as usize)
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(index * 64 + bit)
            })
        })
    }

    /// All positions once, in a random order: steps of a random odd width, modulo a power of two,
    /// reach every position.
    ///
    /// The best of a few random backends is nearly as good as the best of all (Mitzenmacher, "The
    /// power of two choices in randomized load balancing", 2001), above all if a good one is
    /// remembered (Mitzenmacher, Prabhakar and Shah, "Load balancing with memory", 2002). Positions
    /// at one random distance are as good as independent ones (Mitzenmacher, "Balanced allocations
    /// and double hashing", 2014).
    pub(super) fn walk(&self, rng: &mut Rng) -> impl Iterator<Item = usize> + '_ {
        let circle = self.end().next_power_of_two();
        let random = rng.next_u64() as usize;
        let (mut at, width) = (random >> 32, random | 1);
        (0..circle).filter_map(move |_| {
            at = at.wrapping_add(width) & (circle - 1);
            self.contains(at).then_some(at)
        })
    }

    /// Removes a position. Returns whether it was there.
    pub(super) fn take(&mut self, position: usize) -> bool {
        let present = self.contains(position);
        if present {
            self.put(position, false);
        }
        present
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rooms {
    open: Positions,
    permits: Positions,
    candidates: Vec<Candidate>,
    runner_up: Option<usize>,
}

impl Rooms {
    /// The index of a pool with this many backends, none of which is noted yet.
    pub(super) fn new(backends: usize) -> Self {
        Self { candidates: Vec::with_capacity(backends), ..Self::default() }
    }

    /// Notes the state of the backend at a position.
    pub(super) fn judge(&mut self, position: usize, candidate: Candidate, open: bool, permit: bool) {
        if self.candidates.len() <= position {
            // Positions in between get a copy as a filler, and are not open until they are noted
            // themselves.
            self.candidates.resize(position + 1, candidate);
        }
        self.candidates[position] = candidate;
        self.open.put(position, open);
        self.permits.put(position, permit);
    }

    /// Whether the index has exactly this state for a position (for the invariants that tests
    /// check).
    pub(super) fn agree(&self, position: usize, candidate: &Candidate, open: bool, permit: bool) -> bool {
        let known = self.candidates.get(position) == Some(candidate);
        known && self.open.contains(position) == open && self.permits.contains(position) == permit
    }

    /// The positions at which a request may find room. `long`: the request needs a permit.
    pub(super) fn open(&self, long: bool) -> Positions {
        if long { self.open.both(&self.permits) } else { self.open.clone() }
    }

    pub(super) fn runner_up(&self) -> Option<usize> {
        self.runner_up
    }

    pub(super) fn set_runner_up(&mut self, position: Option<usize>) {
        self.runner_up = position;
    }

    pub(super) fn candidate(&self, position: usize) -> &Candidate {
        &self.candidates[position]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions(present: impl IntoIterator<Item = usize>) -> Positions {
        let mut all = Positions::default();
        present.into_iter().for_each(|position| all.put(position, true));
        all
    }

    #[test]
    fn a_walk_meets_every_position_once_and_begins_with_each_as_often() {
        for size in [1, 17, 64, 200, 256] {
            let (all, mut rng, mut met) = (positions(0..size), Rng::new(1), vec![0; size]);
            let walks = 2_000;
            for _ in 0..walks {
                let mut walk: Vec<usize> = all.walk(&mut rng).collect();
                walk.iter().take(16).for_each(|position| met[*position] += 1);
                walk.sort_unstable();
                assert!(walk.into_iter().eq(0..size));
            }
            let mean = walks * size.min(16) / size;
            assert!(met.iter().all(|count| (mean * 7 / 10..=mean * 13 / 10).contains(count)), "{size}: {met:?}");
        }
    }

    #[test]
    fn positions_are_found_in_every_word() {
        let mut some = positions([3, 64, 191]);
        assert_eq!((some.iter().collect::<Vec<_>>(), some.count()), (vec![3, 64, 191], 3));
        assert!(some.take(64) && !some.take(64) && !some.take(65) && !some.take(1_000));
        assert_eq!(some.iter().collect::<Vec<_>>(), [3, 191]);
        assert_eq!(Positions::default().walk(&mut Rng::new(1)).count() + Positions::default().iter().count(), 0);
    }
}
