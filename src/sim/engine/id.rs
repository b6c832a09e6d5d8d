//! Ids of sequences, and a fast hash for maps that are keyed by them.
//!
//! Clients do not choose the ids, so the hash needs no protection against chosen collisions.

use std::hash::Hasher;

/// Id of one sequence in the engine. The caller chooses it and must not reuse it while the sequence
/// exists.
pub type SequenceId = u64;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // The golden ratio in 64 bits. The map uses bits from both ends of the hash.
        self.0 = (self.0 ^ id).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}
