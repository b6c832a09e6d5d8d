//! Random number generators, one for each purpose, all derived from the seed of a run.
//!
//! More numbers for one purpose do not change the numbers for another, so runs stay comparable.

use sluice_core::base::Rng;

/// Distance between the seeds of several runs: more than the number of purposes.
const STRIDE: u64 = 16;

/// The seed of run number `nth` (from 0) of several runs; `first` is the seed of run 0.
///
/// The number of the purpose is added to the seed. So runs with adjacent seeds would share random
/// numbers and not be independent, as intervals over runs assume.
pub const fn nth_seed(first: u64, nth: u64) -> u64 {
    first.wrapping_add(nth.wrapping_mul(STRIDE))
}

/// A use of random numbers, below [`STRIDE`].
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Arrival = 1,
    Class = 2,
    Prompt = 3,
    Adapter = 4,
    /// Which prefix a request has, and how much of it.
    Prefix = 5,
    /// The tokens of shared prefixes.
    Common = 6,
    Leave = 7,
    Session = 8,
    Think = 9,
    Shuffle = 10,
    User = 11,
}

/// The generator for `purpose` and request (or other item) number `ordinal`. Adjacent seeds give
/// neighbouring SplitMix64 states, but an output mixes all 64 bits. So each step of the derivation
/// uses an output instead of the seed.
pub(crate) fn rng_for(seed: u64, purpose: Purpose, ordinal: u64) -> Rng {
    let for_purpose = Rng::new(seed.wrapping_add(purpose as u64)).next_u64();
    Rng::new(Rng::new(for_purpose ^ ordinal).next_u64())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Purpose, nth_seed, rng_for};

    #[test]
    fn the_seeds_of_several_runs_share_no_numbers() {
        use Purpose::{Adapter, Arrival, Class, Common, Leave, Prefix, Prompt, Session, Shuffle, Think};
        let purposes = [Arrival, Class, Prompt, Adapter, Prefix, Common, Leave, Session, Think, Shuffle];
        let first = |seed| purposes.map(|purpose| rng_for(seed, purpose, 0).next_u64());
        let seen: BTreeSet<u64> = (0..20).flat_map(|run| first(nth_seed(1, run))).collect();
        assert_eq!(seen.len(), 20 * purposes.len());
    }
}
