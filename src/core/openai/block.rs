//! Processes text in blocks of 64 bytes with bit masks: bit n of a mask is for byte n of the block.
//!
//! A vector comparison gives a mask, for example of all quotes, and one instruction combines two
//! masks. So the speed does not depend on the content: none of 200,000 escapes in a body takes a
//! branch. The widest vectors of the processor are chosen at run time (`fearless_simd`).

/// Bytes of a block.
pub(super) const BLOCK: usize = 64;
/// Fills the last block: a UTF-8 continuation byte, which is never searched for or counted.
const FILLER: u8 = 0x80;

/// Splits a text into blocks; the last one is filled up with [`FILLER`].
pub(super) struct Blocks<'a> {
    rest: &'a [u8],
    last: [u8; BLOCK],
}

impl<'a> Blocks<'a> {
    #[inline(always)]
    pub(super) const fn of(text: &'a [u8]) -> Self {
        Self { rest: text, last: [FILLER; BLOCK] }
    }

    /// The next block. Not an `Iterator`, because its items would have to be copies.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<&[u8; BLOCK]> {
        if let Some((block, rest)) = self.rest.split_first_chunk() {
            self.rest = rest;
            return Some(block);
        }
        if self.rest.is_empty() {
            return None;
        }
        self.last[..self.rest.len()].copy_from_slice(self.rest);
        self.rest = &[];
        Some(&self.last)
    }
}

/// Number of bits at the end of a block that [`behind`] may need for the next block.
const TAIL: usize = 6;

/// The last [`TAIL`] bits of a mask.
#[inline(always)]
pub(super) const fn tail(set: u64) -> u64 {
    set >> (BLOCK - TAIL)
}

/// Shifts a mask by `bytes` (0 to 6) towards the end of the text. `before`: the [`tail`] of the
/// mask of the previous block.
#[inline(always)]
pub(super) const fn behind(set: u64, before: u64, bytes: usize) -> u64 {
    // If `before` were the whole mask, the compiler would use a double shift, which is seven times
    // as slow on AMD processors.
    set << bytes | before >> (TAIL - bytes)
}

/// Finds the escaped bytes of a JSON string, block by block.
#[derive(Default)]
pub(super) struct Escapes {
    /// 1 if the last block ended with a backslash that is not escaped itself.
    open: u64,
}

impl Escapes {
    /// The mask of bytes that follow a backslash which is not escaped itself. `backslashes`: all
    /// backslashes.
    #[inline(always)]
    pub(super) fn escaped(&mut self, backslashes: u64) -> u64 {
        const ODD: u64 = 0xAAAA_AAAA_AAAA_AAAA;
        if self.open | backslashes >> (BLOCK - 1) | backslashes & backslashes << 1 == 0 {
            // No two backslashes are adjacent, in this block or across its ends. This path has no
            // dependency between blocks.
            return backslashes << 1;
        }
        // In a run of backslashes, the first, third, ... escape the next byte. The subtraction
        // borrows through the run, so that the end shows whether the run began at an odd bit
        // (method of simdjson's `json_escape_scanner`).
        let free = backslashes & !self.open;
        let ends = (free << 1 | ODD).wrapping_sub(free) ^ ODD;
        let escaped = ends ^ (backslashes | self.open);
        self.open = (ends & backslashes) >> (BLOCK - 1);
        escaped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_other_backslash_of_a_run_escapes(text in "([\\\\]{0,140}[a-z]{0,70}){0,5}") {
            let (mut escapes, mut got) = (Escapes::default(), Vec::new());
            let mut blocks = Blocks::of(text.as_bytes());
            while let Some(block) = blocks.next() {
                let set = (0..BLOCK).filter(|&n| block[n] == b'\\').fold(0, |set, n| set | 1 << n);
                let escaped = escapes.escaped(set);
                got.extend((0..BLOCK).map(|n| escaped >> n & 1 == 1));
            }
            let mut escaping = false;
            for (byte, got) in text.bytes().zip(got) {
                prop_assert_eq!(escaping, got, "{}", text);
                escaping = byte == b'\\' && !escaping;
            }
        }
    }

    #[test]
    fn places_cross_blocks() {
        assert_eq!(behind(0b1001, tail(1 << 63), 0), 0b1001);
        assert_eq!(behind(0b1001, tail(1 << 63), 1), 0b1_0011);
        assert_eq!(behind(1 << 63, tail(1 << 62 | 1 << 58 | 1 << 57), 6), 0b01_0001);
    }
}
