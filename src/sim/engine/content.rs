//! The content of a sequence as the prefix cache sees it: one number per block of 16 tokens.
//!
//! vLLM hashes the token ids of a block together with the hash of the previous block, so a hash
//! identifies the whole prefix. Here the caller computes one 64-bit number per block (from token
//! ids, from text, or from a rule), which is hashed with the previous hash in the same way. Salt
//! and adapter are part of the first hash. Generated tokens have content too, because the next turn
//! of a chat repeats them. Probability of a false hit: about n^2 / 2^65 for n distinct blocks.

use std::sync::Arc;

use super::blocks::BLOCK_TOKENS;
use super::id::SequenceId;
use sluice_core::base::hash_two;

/// The content of a sequence, prompt and generated tokens, block by block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// Content that no sequence with another id has.
    #[default]
    Own,
    /// The first `tokens` tokens come from text number `head`, the rest from text number `tail`. A
    /// block across the border belongs to the tail. Requests with the same head share these blocks.
    /// A chat in which each turn repeats all earlier turns is a head without an end
    /// (`tokens: u32::MAX`).
    Text {
        /// Number of the first text.
        head: u64,
        /// Length of the first text, tokens.
        tokens: u32,
        /// Number of the text after it; must differ between requests that share nothing else.
        tail: u64,
    },
    /// Computed from the actual tokens.
    Blocks {
        /// Content of each whole block, in order. May extend beyond the prompt if the generated
        /// tokens are known.
        blocks: Arc<[u64]>,
        /// Number of the text after these blocks, including generated tokens.
        tail: u64,
    },
}

impl Content {
    /// A prefix of `tokens` tokens that all requests with the same `head` share, followed by text
    /// number `tail`.
    pub fn shared(head: u64, tokens: u32, tail: u64) -> Self {
        Self::Text { head, tokens, tail }
    }

    /// The content of block `index` (0 is the first) of the sequence `id`.
    fn block(&self, index: u32, id: SequenceId) -> u64 {
        // The first number keeps ids, heads and tails apart, because they are numbered
        // independently.
        let of = |kind: u64, text: u64| hash_two(hash_two(kind, text), u64::from(index));
        match self {
            Self::Own => of(1, id),
            Self::Text { head, tokens, tail } => {
                let whole = (u64::from(index) + 1) * u64::from(BLOCK_TOKENS) <= u64::from(*tokens);
                if whole { of(2, *head) } else { of(3, *tail) }
            }
            Self::Blocks { blocks, tail } => blocks.get(index as usize).copied().unwrap_or_else(|| of(3, *tail)),
        }
    }
}

/// The hash of the last hashed block, from which the next one is computed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chain {
    /// Hash of the last block; before the first block, the hash of salt and adapter.
    hash: u64,
    blocks: u32,
}

impl Chain {
    /// The chain before the first block. Salt and adapter are part of every later hash.
    pub(super) fn new(salt: u64, adapter: Option<u16>) -> Self {
        let adapter = adapter.map_or(0, |id| u64::from(id) + 1);
        Self { hash: hash_two(salt, adapter), blocks: 0 }
    }

    /// The hash of the last hashed block; `None`: there is none.
    pub(super) fn last(&self) -> Option<u64> {
        (self.blocks > 0).then_some(self.hash)
    }

    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The chain with one more block, and the hash of that block (never 0).
    pub(super) fn next(self, content: &Content, id: SequenceId) -> (Self, u64) {
        let hash = hash_two(self.hash, content.block(self.blocks, id)).max(1);
        (Self { hash, blocks: self.blocks + 1 }, hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(content: &Content, salt: u64, adapter: Option<u16>) -> Vec<u64> {
        let mut chain = Chain::new(salt, adapter);
        let mut next = || {
            let (longer, hash) = chain.next(content, 7);
            chain = longer;
            hash
        };
        (0..8).map(|_| next()).collect()
    }

    fn common(one: &[u64], two: &[u64]) -> usize {
        one.iter().zip(two).take_while(|(one, two)| one == two).count()
    }

    #[test]
    fn a_head_is_shared_in_whole_blocks_and_what_follows_is_not() {
        let one = hashes(&Content::shared(5, 50, 1), 0, None);
        let two = hashes(&Content::shared(5, 50, 2), 0, None);
        assert_eq!(common(&one, &two), 3);
        assert!(one.iter().skip(3).all(|hash| !two.contains(hash)), "one difference changes all that follows");
        assert_eq!(common(&one, &hashes(&Content::shared(5, 64, 2), 0, None)), 3);
    }

    #[test]
    fn salt_and_adapter_are_part_of_every_hash() {
        let content = Content::Own;
        let plain = hashes(&content, 0, None);
        for other in [hashes(&content, 1, None), hashes(&content, 0, Some(0)), hashes(&content, 0, Some(1))] {
            assert!(plain.iter().all(|hash| !other.contains(hash)));
        }
    }

    #[test]
    fn given_blocks_count_and_the_tail_goes_on_behind_them() {
        let content = |blocks: &[u64], tail| Content::Blocks { blocks: blocks.into(), tail };
        let one = hashes(&content(&[1, 2, 3], 7), 0, None);
        assert_eq!(common(&one, &hashes(&content(&[1, 2, 4], 7), 0, None)), 2);
        assert_eq!(common(&one, &hashes(&content(&[1, 2, 3], 8), 0, None)), 3);
        assert_eq!(common(&one, &hashes(&content(&[1, 2, 3], 7), 0, None)), 8);
    }
}
