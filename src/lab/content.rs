//! The numbers of a request's blocks, by which the prefix cache finds shared prefixes.
//!
//! There are no token ids. A prompt is a list of shared segments, each an id with a number of
//! tokens, followed by tokens that only this request has. The number of a block follows from the
//! segments in it. The prefix cache chains the numbers to hashes, so two prompts share a block
//! exactly if they agree up to the end of it. The response is a segment too, because the next turn
//! of a conversation repeats it.

use std::sync::Arc;

use sluice_core::base::hash_two;
use sluice_sim::Content;
use sluice_sim::engine::BLOCK_TOKENS;

/// The content of a request. The prompt has `prompt` tokens: the segments `shared`, then tokens
/// that only the request `own` has. `response`: the segment of the response.
pub(crate) fn content(shared: &[(u64, u32)], prompt: u32, own: u64, response: Option<(u64, u32)>) -> Content {
    let begins: u32 = shared.iter().map(|(_, tokens)| *tokens).sum();
    let rest = (own_segment(own), prompt.saturating_sub(begins));
    if begins == 0 && response.is_none() {
        return Content::shared(0, 0, own);
    }
    let segments = shared.iter().copied().chain([rest]).chain(response).filter(|(_, tokens)| *tokens > 0);
    let (mut blocks, mut block, mut filled) = (Vec::new(), 0, 0);
    for (segment, tokens) in segments {
        let mut at = 0;
        while at < tokens {
            let taken = (tokens - at).min(BLOCK_TOKENS - filled);
            block = hash_two(hash_two(hash_two(block, segment), u64::from(at)), u64::from(taken));
            (at, filled) = (at + taken, filled + taken);
            if filled == BLOCK_TOKENS {
                blocks.push(block);
                (block, filled) = (0, 0);
            }
        }
    }
    Content::Blocks { blocks: Arc::from(blocks), tail: own_segment(own) }
}

/// The segment of a request's own tokens. The number is hashed, so that it differs from the ids of
/// shared segments.
fn own_segment(own: u64) -> u64 {
    hash_two(0x0E17, own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(content: Content) -> Vec<u64> {
        match content {
            Content::Blocks { blocks, .. } => blocks.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_later_turn_begins_with_the_blocks_of_the_one_before_it_and_of_its_response() {
        let (system, user, response, more) = ((1, 40), (2, 30), (3, 26), (4, 30));
        let first = blocks(content(&[system, user], 70, 7, Some(response)));
        let second = blocks(content(&[system, user, response, more], 126, 8, None));
        assert_eq!((first.len(), second.len()), (6, 7));
        assert_eq!(first[..], second[..6]);
        let other = blocks(content(&[system, (5, 30)], 70, 9, None));
        let same = first.iter().zip(&other).take_while(|(one, two)| one == two).count();
        assert_eq!(same, 2, "40 shared tokens are two whole blocks");
    }

    #[test]
    fn own_prompts_share_nothing() {
        assert_ne!(content(&[], 100, 1, None), content(&[], 100, 2, None));
        let (one, two) = (blocks(content(&[(1, 16)], 48, 1, None)), blocks(content(&[(1, 16)], 48, 2, None)));
        assert_eq!(one[0], two[0]);
        assert_ne!(one[1], two[1]);
    }
}
