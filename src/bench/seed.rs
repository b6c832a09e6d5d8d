//! Random number generators for each purpose, all derived from the seed of a run.
//!
//! Each purpose has a generator of its own, so drawing more numbers for one purpose changes no other: two runs stay
//! comparable. The numbers are not cryptographic.

use sluice_core::base::Rng;

/// What random numbers are for.
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
}

/// The generator for `purpose` and request (or other item) number `ordinal`.
///
/// Seeds that differ by one give neighbouring SplitMix64 states. One output of the generator mixes all 64 bits, so each step
/// of the derivation uses an output instead of the seed itself.
pub(crate) fn rng_for(seed: u64, purpose: Purpose, ordinal: u64) -> Rng {
    let for_purpose = Rng::new(seed.wrapping_add(purpose as u64)).next_u64();
    Rng::new(Rng::new(for_purpose ^ ordinal).next_u64())
}
