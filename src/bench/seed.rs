//! Independent random streams that all follow from the one seed of a run.
//!
//! Each purpose has a stream of its own. A part that draws more numbers than before does not change what the other
//! parts draw, so two runs stay comparable. The numbers are not cryptographic.

use sluice_core::base::Rng;

/// What a random stream is for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Arrival = 1,
    Class = 2,
    Prompt = 3,
    Adapter = 4,
    /// Which prefix a request has, and how much of it.
    Prefix = 5,
    /// The tokens of shared parts.
    Common = 6,
    Leave = 7,
    Session = 8,
    Think = 9,
    Shuffle = 10,
}

/// The random stream for `purpose` and the item number `ordinal`.
///
/// Seeds that differ by one give neighbouring SplitMix64 states, so each step of the derivation goes
/// through one output of the generator, which mixes all 64 bits.
pub(crate) fn stream(seed: u64, purpose: Purpose, ordinal: u64) -> Rng {
    let for_purpose = Rng::new(seed.wrapping_add(purpose as u64)).next_u64();
    Rng::new(Rng::new(for_purpose ^ ordinal).next_u64())
}
