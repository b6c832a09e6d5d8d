//! A hash of numbers, for content that is described by numbers instead of bytes.
//!
//! The simulator's prefix cache and the laboratory's prompts compare such content block by block.
//! The hash is the same on every machine.

/// Hashes two numbers into one: a multiply-add, then the finalizer of MurmurHash3. If one bit of an
/// argument changes, each bit of the result changes with probability about 1/2. Not for secrets:
/// the arguments can be computed from the result.
#[inline]
pub fn hash_two(one: u64, two: u64) -> u64 {
    let mut mixed = one.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(two).wrapping_add(0x5851_F42D_4C95_7F2D);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    mixed ^ (mixed >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_every_bit_of_both_numbers_count() {
        let base = hash_two(7, 9);
        assert_ne!(base, hash_two(9, 7));
        for bit in 0..64 {
            for other in [hash_two(7 ^ (1 << bit), 9), hash_two(7, 9 ^ (1 << bit))] {
                let changed = (base ^ other).count_ones();
                assert!((12..=52).contains(&changed), "bit {bit} changed {changed} of 64 bits");
            }
        }
    }
}
