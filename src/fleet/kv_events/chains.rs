//! The blocks in one engine's prefix cache, as events name them, and the beginnings of prompts
//! that the blocks hold.
//!
//! A block follows another one, so the blocks of a sequence are a chain. An event names the request
//! that wrote the blocks. When the request has ended, the number of its prompt tokens is known, and
//! with it the block in which each beginning of the prompt ends: a beginning of `e` of the `b`
//! bytes of a prompt ends after `e / b` of the tokens, rounded down to whole blocks. Such a
//! beginning is linked to the block, and is gone with the block.
//!
//! vLLM may hold a block several times; it stores and removes each copy. vLLM removes the end of a
//! chain before the beginning. Pure. Bounds: [`BLOCKS_MAX`] blocks, [`LINKS_MAX`] links,
//! the latest [`SESSIONS_MAX`] requests. Blocks and links beyond a bound are not followed.

use std::collections::{HashMap, VecDeque};

use sluice_core::vllm::kv_events::{KvEvent, Stored};
use sluice_gateway::pool::{CacheNews, ServedPrompt};

/// About 26 MB; 4 million tokens in blocks of 16.
const BLOCKS_MAX: usize = 1 << 18;
/// As many beginnings as a pool remembers.
const LINKS_MAX: usize = 1 << 17;
const SESSIONS_MAX: usize = 1 << 14;

#[derive(Debug)]
struct Block {
    /// The block before; `None`: the sequence begins here.
    parent: Option<u64>,
    /// How often the engine holds the block.
    copies: u32,
    /// The beginnings that end in the block.
    links: Vec<u64>,
}

/// The blocks that a request has written: the first one and the last one.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: u64,
    last: u64,
}

/// The chains of one engine.
#[derive(Debug, Default)]
pub(super) struct Chains {
    blocks: HashMap<u64, Block>,
    /// The block of each linked beginning.
    links: HashMap<u64, u64>,
    runs: HashMap<u64, Run>,
    /// The requests in `runs` and ended ones, oldest first.
    order: VecDeque<u64>,
    block_size: u64,
    /// The group of layers that is followed: the first one that keeps whole sequences.
    group: Option<u64>,
}

impl Chains {
    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn apply(&mut self, event: KvEvent, news: &mut CacheNews) {
        match event {
            KvEvent::Stored(stored) => self.store(stored, news),
            KvEvent::Removed { hashes, group } => {
                if group == self.group || group.is_none() {
                    hashes.into_iter().for_each(|hash| self.remove(hash, news));
                }
            }
            KvEvent::Cleared => {
                *self = Self { block_size: self.block_size, group: self.group, ..Self::default() };
                *news = CacheNews { cleared: true, view: news.view, ..CacheNews::default() };
            }
        }
    }

    fn store(&mut self, stored: Stored, news: &mut CacheNews) {
        if stored.is_partial || stored.block_size == 0 {
            return;
        }
        if self.block_size == 0 {
            (self.block_size, self.group) = (stored.block_size, stored.group);
        }
        if stored.group != self.group || stored.block_size != self.block_size {
            return;
        }
        news.written_tokens = news.written_tokens.saturating_add(stored.block_size * stored.hashes.len() as u64);
        let mut parent = stored.parent;
        for hash in &stored.hashes {
            if let Some(block) = self.blocks.get_mut(hash) {
                block.copies = block.copies.saturating_add(1);
            } else if self.blocks.len() < BLOCKS_MAX {
                self.blocks.insert(*hash, Block { parent, copies: 1, links: Vec::new() });
            }
            parent = Some(*hash);
        }
        if let (Some(session), Some(first), Some(last)) = (stored.session, stored.hashes.first(), stored.hashes.last())
        {
            if let Some(run) = self.runs.get_mut(&session) {
                run.last = *last;
            } else {
                self.runs.insert(session, Run { first: *first, last: *last });
                self.order.push_back(session);
                if self.order.len() > SESSIONS_MAX {
                    self.order.pop_front().and_then(|oldest| self.runs.remove(&oldest));
                }
            }
        }
    }

    fn remove(&mut self, hash: u64, news: &mut CacheNews) {
        let Some(block) = self.blocks.get_mut(&hash) else { return };
        block.copies -= 1;
        if block.copies == 0 {
            let links = self.blocks.remove(&hash).map(|block| block.links).unwrap_or_default();
            for beginning in links {
                self.links.remove(&beginning);
                news.gone.push(beginning);
            }
        }
    }

    /// Links the beginnings of a finished request. Returns whether the blocks are known.
    pub(super) fn link(&mut self, served: &ServedPrompt, news: &mut CacheNews) -> bool {
        let run = self.runs.remove(&served.session);
        let Some((chain, depth)) = run.and_then(|run| self.chain(run, served)).or_else(|| self.linked(served)) else {
            return false;
        };
        for beginning in &served.prefix.beginnings {
            // A beginning of less than a block cannot be found in the cache.
            let Some(above) =
                self.depth_of(served, beginning.end).filter(|own| *own > 0).and_then(|own| depth.checked_sub(own))
            else {
                continue;
            };
            if let Some(block) = chain.get(above) {
                self.put_link(beginning.hash, *block, news);
            }
        }
        true
    }

    /// Whole blocks up to a byte of a prompt.
    fn depth_of(&self, served: &ServedPrompt, end: u32) -> Option<usize> {
        let tokens = u128::from(end) * u128::from(served.prompt_tokens);
        let blocks = tokens.checked_div(served.prefix.bytes as u128)?.checked_div(u128::from(self.block_size))?;
        usize::try_from(blocks).ok()
    }

    /// The known blocks from the last one of a run back, and the depth of the last one: how many
    /// blocks its sequence has up to there.
    fn chain(&self, run: Run, served: &ServedPrompt) -> Option<(Vec<u64>, usize)> {
        let (mut chain, mut at) = (Vec::new(), Some(run.last));
        while let Some((hash, block)) = at.and_then(|hash| Some((hash, self.blocks.get(&hash)?)))
            && chain.len() < BLOCKS_MAX
        {
            chain.push(hash);
            at = block.parent;
        }
        let depth = if at.is_none() {
            chain.len()
        } else {
            // The blocks before the run came before the events: the engine found them in the cache.
            let found = usize::try_from(served.cached?.checked_div(self.block_size)?).ok()?;
            found + 1 + chain.iter().position(|hash| *hash == run.first)?
        };
        Some((chain, depth))
    }

    /// The block of the longest linked beginning of a prompt, for a prompt of which the engine
    /// wrote no block.
    fn linked(&self, served: &ServedPrompt) -> Option<(Vec<u64>, usize)> {
        let mut longest = served.prefix.beginnings.iter().rev();
        let (end, block) = longest.find_map(|beginning| Some((beginning.end, *self.links.get(&beginning.hash)?)))?;
        Some((vec![block], self.depth_of(served, end)?))
    }

    fn put_link(&mut self, beginning: u64, block: u64, news: &mut CacheNews) {
        let before = self.links.get(&beginning).copied();
        if before != Some(block) {
            if before.is_none() && self.links.len() >= LINKS_MAX {
                return;
            }
            let Some(found) = self.blocks.get_mut(&block) else { return };
            found.links.push(beginning);
            self.links.insert(beginning, block);
            if let Some(left) = before.and_then(|block| self.blocks.get_mut(&block)) {
                left.links.retain(|own| *own != beginning);
            }
        }
        news.linked.push(beginning);
    }

    /// Forgets all blocks, because events were lost and the remaining blocks are unknown.
    pub(super) fn reset(&mut self, news: &mut CacheNews) {
        news.unlinked.extend(self.links.keys());
        *self = Self { block_size: self.block_size, group: self.group, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use sluice_core::openai::{Beginning, PromptPrefix};

    fn stored(session: u64, parent: Option<u64>, hashes: &[u64]) -> KvEvent {
        let session = Some(session);
        KvEvent::Stored(Stored { hashes: hashes.to_vec(), parent, block_size: 16, session, ..Stored::default() })
    }

    fn removed(hashes: &[u64]) -> KvEvent {
        KvEvent::Removed { hashes: hashes.to_vec(), group: None }
    }

    /// A prompt of 4,096 bytes with a beginning at each quarter; the hashes are `own + 1..=4`.
    fn served(session: u64, own: u64, prompt_tokens: u64, cached: Option<u64>) -> ServedPrompt {
        let beginnings = (1..=4).map(|part| Beginning { hash: own + part, end: part as u32 * 1_024 }).collect();
        ServedPrompt { session, prefix: Arc::new(PromptPrefix { beginnings, bytes: 4_096 }), prompt_tokens, cached }
    }

    fn apply(chains: &mut Chains, events: impl IntoIterator<Item = KvEvent>) -> CacheNews {
        let mut news = CacheNews::default();
        events.into_iter().for_each(|event| chains.apply(event, &mut news));
        news
    }

    fn link(chains: &mut Chains, served: &ServedPrompt) -> Option<Vec<u64>> {
        let mut news = CacheNews::default();
        chains.link(served, &mut news).then_some(news.linked)
    }

    #[test]
    fn beginnings_go_with_the_blocks_in_which_they_end() {
        let mut chains = Chains::default();
        let first = [stored(1, None, &[10, 11]), stored(1, Some(11), &[12, 13, 14])];
        assert_eq!(apply(&mut chains, first).written_tokens, 80);
        // 64 tokens are four blocks; the fifth block is output.
        assert_eq!(link(&mut chains, &served(1, 100, 64, None)), Some(vec![101, 102, 103, 104]));
        assert!(apply(&mut chains, [removed(&[14])]).gone.is_empty());
        assert_eq!(apply(&mut chains, [removed(&[13, 12])]).gone, [104, 103]);
        assert!(apply(&mut chains, [removed(&[12, 99])]).gone.is_empty(), "not there any more, and never there");
        assert_eq!(chains.blocks(), 2);
    }

    #[test]
    fn a_block_is_there_until_its_last_copy_is_removed() {
        let mut chains = Chains::default();
        apply(&mut chains, [stored(1, None, &[10]), stored(2, None, &[10])]);
        assert_eq!(link(&mut chains, &served(1, 100, 16, None)), Some(vec![104]), "shorter beginnings have no block");
        assert!(apply(&mut chains, [removed(&[10])]).gone.is_empty());
        assert_eq!(apply(&mut chains, [removed(&[10])]).gone, [104]);
    }

    #[test]
    fn a_later_turn_links_what_the_turn_before_it_shares() {
        let mut chains = Chains::default();
        apply(&mut chains, [stored(1, None, &[10, 11]), stored(2, Some(11), &[12, 13])]);
        assert_eq!(link(&mut chains, &served(2, 200, 64, Some(32))), Some(vec![201, 202, 203, 204]));
        assert_eq!(apply(&mut chains, [removed(&[11])]).gone, [202]);
        assert_eq!(link(&mut chains, &served(3, 100, 64, None)), None, "the events named no such request");
        assert_eq!(link(&mut chains, &served(4, 200, 64, None)), Some(vec![204]), "all of it was cached");
    }

    #[test]
    fn blocks_before_the_events_count_as_the_engine_reports() {
        let mut chains = Chains::default();
        apply(&mut chains, [stored(1, Some(7), &[12, 13])]);
        assert_eq!(link(&mut chains, &served(1, 100, 64, None)), None, "how long the prompt was before is not known");
        apply(&mut chains, [stored(2, Some(7), &[22, 23])]);
        assert_eq!(link(&mut chains, &served(2, 100, 64, Some(32))), Some(vec![103, 104]));
        assert_eq!(apply(&mut chains, [removed(&[23])]).gone, [104]);
    }

    #[test]
    fn other_groups_and_windows_are_not_followed() {
        let mut chains = Chains::default();
        let of = |group, is_partial, hash| {
            KvEvent::Stored(Stored {
                hashes: vec![hash],
                block_size: 16,
                group: Some(group),
                is_partial,
                ..Stored::default()
            })
        };
        let news = apply(&mut chains, [of(0, true, 1), of(1, false, 2), of(2, false, 3)]);
        assert_eq!((chains.blocks(), news.written_tokens), (1, 16));
        apply(&mut chains, [KvEvent::Removed { hashes: vec![2], group: Some(2) }]);
        assert_eq!(chains.blocks(), 1);
        apply(&mut chains, [KvEvent::Removed { hashes: vec![2], group: Some(1) }]);
        assert_eq!(chains.blocks(), 0);
    }

    #[test]
    fn an_emptied_cache_is_news_and_lost_events_unlink() {
        let mut chains = Chains::default();
        apply(&mut chains, [stored(1, None, &[10, 11, 12, 13])]);
        link(&mut chains, &served(1, 100, 64, None));
        let mut lost = CacheNews::default();
        chains.reset(&mut lost);
        lost.unlinked.sort_unstable();
        assert_eq!((lost.unlinked, chains.blocks()), (vec![101, 102, 103, 104], 0));
        let news = apply(&mut chains, [stored(2, None, &[10]), KvEvent::Cleared, stored(3, None, &[20])]);
        assert!(news.cleared && news.written_tokens == 16 && chains.blocks() == 1);
    }

    #[test]
    fn an_engine_that_stores_without_end_fills_no_memory() {
        let mut chains = Chains::default();
        let mut news = CacheNews::default();
        for number in 0..(BLOCKS_MAX as u64 + 1_000) {
            chains.apply(stored(number, None, &[number]), &mut news);
        }
        assert_eq!((chains.blocks(), chains.order.len(), chains.runs.len()), (BLOCKS_MAX, SESSIONS_MAX, SESSIONS_MAX));
        let prompt = |number: u64| {
            let beginnings = [Beginning { hash: number << 32, end: 1_024 }].into_iter().collect();
            let prefix = Arc::new(PromptPrefix { beginnings, bytes: 1_024 });
            ServedPrompt { session: number, prefix, prompt_tokens: 16, cached: None }
        };
        for number in 0..(LINKS_MAX as u64 + 1_000) {
            chains.apply(stored(number, None, &[number]), &mut news);
            chains.link(&prompt(number), &mut CacheNews::default());
        }
        assert_eq!(chains.links.len(), LINKS_MAX);
    }
}
