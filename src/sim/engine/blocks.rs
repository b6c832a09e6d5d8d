//! The KV blocks of one engine: held, free, and findable by their content.
//!
//! A block holds [`BLOCK_TOKENS`] tokens; one of `total` blocks is the null block, as in vLLM. A
//! full block may be *published* under the hash of all tokens up to its end. Later requests with
//! the same prefix share it. A published block without owners is free, but is found by its hash
//! until it is allocated again.
//!
//! Order of reuse (vLLM 0.32, `BlockPool`): blocks are allocated from the front of the free list.
//! Blocks without a hash return to the front (last in, first out). Published blocks return to the
//! end, the last block of a sequence first, so that the oldest and least shared blocks are
//! overwritten first. Several blocks may be published under one hash. The first of them is found.
//!
//! Invariants: `owners` is the number of sequences that hold the block; exactly the blocks without
//! owners are in the free list; free + held = usable. Memory: 32 bytes per block and one map entry
//! per published hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::id::SequenceId;

/// Tokens in one block.
pub const BLOCK_TOKENS: u32 = 16;

/// Index of a block. Block 0, the null block, also closes the free list into a ring.
pub(super) type BlockId = u32;
const NULL: BlockId = 0;

/// Hasher for keys that are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// The hash under which the block is published; 0 if it is not published.
    hash: u64,
    owners: u32,
    /// Neighbours in the free list, if the block is free.
    next: BlockId,
    previous: BlockId,
    /// Neighbours in the ring of blocks with the same hash, in order of publication.
    next_twin: BlockId,
    previous_twin: BlockId,
}

/// A change of the published blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockChange {
    /// A sequence has published these blocks, which follow the block `parent`.
    Stored {
        /// The sequence.
        id: SequenceId,
        /// The hash of the block before; `None`: the sequence begins here.
        parent: Option<u64>,
        /// The hashes of the blocks.
        hashes: Vec<u64>,
    },
    /// A block was overwritten.
    Removed(u64),
    /// No block is published any more.
    Cleared,
}

/// The pool of KV blocks of one engine.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// The changes since they were last taken, if they are recorded.
    changes: Option<Vec<BlockChange>>,
    blocks: Vec<Block>,
    free: u32,
    published: HashMap<u64, BlockId, BuildHasherDefault<AsIs>>,
}

impl Blocks {
    /// A pool of `total` blocks, of which one is the null block.
    pub fn new(total: u32) -> Self {
        let total = total.max(1);
        let ring = |id: u32| Block { next: (id + 1) % total, previous: (id + total - 1) % total, ..Block::default() };
        let (blocks, free) = ((0..total).map(ring).collect(), total - 1);
        Self { blocks, free, published: HashMap::default(), changes: None }
    }

    /// Records changes from now on. The caller takes them after each step.
    pub(super) fn record_changes(&mut self) {
        self.changes = Some(Vec::new());
    }

    pub(super) fn take_changes(&mut self) -> Vec<BlockChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn record(&mut self, change: BlockChange) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }

    /// Number of blocks that `tokens` tokens need.
    pub fn needed(tokens: u32) -> u32 {
        tokens.div_ceil(BLOCK_TOKENS)
    }

    /// Takes `count` blocks from the front of the free list and appends them to `into`. If fewer
    /// are free, takes none and returns `false`.
    pub(super) fn allocate(&mut self, count: u32, into: &mut Vec<BlockId>) -> bool {
        if count > self.free {
            return false;
        }
        for _ in 0..count {
            let id = self.blocks[NULL as usize].next;
            self.unlink(id);
            self.forget(id);
            self.blocks[id as usize].owners = 1;
            into.push(id);
        }
        true
    }

    pub(super) fn share(&mut self, id: BlockId) {
        if self.is_free(id) {
            self.unlink(id);
        }
        self.blocks[id as usize].owners += 1;
    }

    /// Releases all blocks of a sequence (listed from first to last) and empties the list.
    pub(super) fn release(&mut self, held: &mut Vec<BlockId>) {
        // Blocks without a hash go to the front in reverse order.
        let mut after = NULL;
        for id in held.drain(..).rev() {
            let block = &mut self.blocks[id as usize];
            debug_assert!(block.owners > 0, "block {id} was released by a sequence that did not hold it");
            block.owners -= 1;
            if block.owners > 0 {
                continue;
            }
            if block.hash == 0 {
                self.link_after(after, id);
                after = id;
            } else {
                self.link_after(self.blocks[NULL as usize].previous, id);
            }
        }
    }

    pub(super) fn find(&self, hash: u64) -> Option<BlockId> {
        self.published.get(&hash).copied()
    }

    /// Makes a full block findable under `hash` (not 0), unless it is published already.
    pub(super) fn publish(&mut self, id: BlockId, hash: u64) {
        debug_assert!(hash != 0 && self.blocks[id as usize].owners > 0);
        if self.blocks[id as usize].hash != 0 {
            return;
        }
        self.blocks[id as usize].hash = hash;
        let first = *self.published.entry(hash).or_insert(id);
        let last = if first == id { id } else { self.blocks[first as usize].previous_twin };
        self.blocks[id as usize].next_twin = first;
        self.blocks[id as usize].previous_twin = last;
        self.blocks[last as usize].next_twin = id;
        self.blocks[first as usize].previous_twin = id;
    }

    fn forget(&mut self, id: BlockId) {
        let Block { hash, next_twin, previous_twin, .. } = self.blocks[id as usize];
        if hash == 0 {
            return;
        }
        self.blocks[id as usize].hash = 0;
        self.record(BlockChange::Removed(hash));
        if next_twin == id {
            self.published.remove(&hash);
            return;
        }
        self.blocks[previous_twin as usize].next_twin = next_twin;
        self.blocks[next_twin as usize].previous_twin = previous_twin;
        if let Some(first) = self.published.get_mut(&hash)
            && *first == id
        {
            *first = next_twin;
        }
    }

    /// Removes all hashes. Refused, as in vLLM, while any block is held; returns whether it was
    /// done.
    pub(super) fn forget_all(&mut self) -> bool {
        if self.free != self.usable() {
            return false;
        }
        self.published.clear();
        self.record(BlockChange::Cleared);
        self.blocks.iter_mut().for_each(|block| block.hash = 0);
        true
    }

    pub(super) fn is_free(&self, id: BlockId) -> bool {
        self.blocks[id as usize].owners == 0
    }

    fn link_after(&mut self, place: BlockId, id: BlockId) {
        let next = self.blocks[place as usize].next;
        self.blocks[id as usize].next = next;
        self.blocks[id as usize].previous = place;
        self.blocks[place as usize].next = id;
        self.blocks[next as usize].previous = id;
        self.free += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { next, previous, .. } = self.blocks[id as usize];
        self.blocks[previous as usize].next = next;
        self.blocks[next as usize].previous = previous;
        self.free -= 1;
    }

    /// Free blocks, published ones included.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Number of blocks without the null block.
    pub fn usable(&self) -> u32 {
        self.blocks.len() as u32 - 1
    }

    /// Share of the usable blocks that are held, 0 to 1, as vLLM's `kv_cache_usage_perc`.
    pub fn usage(&self) -> f64 {
        match self.usable() {
            0 => 0.0,
            usable => 1.0 - f64::from(self.free) / f64::from(usable),
        }
    }

    /// Number of published hashes.
    pub fn published(&self) -> usize {
        self.published.len()
    }

    /// Checks the invariants of the pool. `owners` lists every block once per owner.
    #[cfg(test)]
    pub(super) fn check(&self, owners: impl Iterator<Item = BlockId>) -> Result<(), String> {
        let mut held = vec![0; self.blocks.len()];
        owners.for_each(|id| held[id as usize] += 1);
        let mut listed = vec![false; self.blocks.len()];
        let (mut at, mut count) = (self.blocks[NULL as usize].next, 0);
        while at != NULL {
            if std::mem::replace(&mut listed[at as usize], true) {
                return Err(format!("block {at} is twice in the free list"));
            }
            if self.blocks[self.blocks[at as usize].previous as usize].next != at {
                return Err(format!("block {at} is linked one way only"));
            }
            count += 1;
            at = self.blocks[at as usize].next;
        }
        if count != self.free {
            return Err(format!("{} blocks are counted as free and {count} are listed", self.free));
        }
        for (id, block) in self.blocks.iter().enumerate().skip(1) {
            if block.owners != held[id] {
                return Err(format!("block {id} counts {} owners and has {}", block.owners, held[id]));
            }
            if listed[id] == (block.owners > 0) {
                return Err(format!("block {id} with {} owners, in the free list: {}", block.owners, listed[id]));
            }
        }
        let hashed = self.blocks.iter().filter(|block| block.hash != 0).count();
        let mut reachable = 0;
        for (hash, first) in &self.published {
            let mut at = *first;
            loop {
                if self.blocks[at as usize].hash != *hash {
                    return Err(format!("block {at} is published under a hash that it does not have"));
                }
                reachable += 1;
                at = self.blocks[at as usize].next_twin;
                if at == *first || reachable > hashed {
                    break;
                }
            }
        }
        if reachable != hashed {
            Err(format!("{hashed} blocks have a hash, {reachable} are reachable"))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take(blocks: &mut Blocks, count: u32) -> Vec<BlockId> {
        let mut taken = Vec::new();
        assert!(blocks.allocate(count, &mut taken));
        taken
    }

    #[test]
    fn one_block_is_reserved_and_nothing_is_taken_that_does_not_fit() {
        let mut blocks = Blocks::new(5);
        let mut held = Vec::new();
        assert!(!blocks.allocate(5, &mut held) && held.is_empty());
        assert!(blocks.allocate(4, &mut held));
        assert_eq!(blocks.usage(), 1.0);
        blocks.release(&mut held);
        assert_eq!((blocks.free(), blocks.usage()), (4, 0.0));
        assert_eq!((Blocks::needed(16), Blocks::needed(17)), (1, 2));
    }

    #[test]
    fn blocks_without_a_hash_are_reused_first_and_the_tail_of_the_last_one_back_before_all() {
        let mut blocks = Blocks::new(7);
        let (mut one, mut two) = (take(&mut blocks, 2), take(&mut blocks, 2));
        assert_eq!((one.as_slice(), two.as_slice()), ([1, 2].as_slice(), [3, 4].as_slice()));
        blocks.release(&mut one);
        blocks.release(&mut two);
        assert_eq!(take(&mut blocks, 6), [4, 3, 2, 1, 5, 6]);
    }

    #[test]
    fn published_blocks_are_overwritten_oldest_first_and_tails_before_heads() {
        let mut blocks = Blocks::new(7);
        let (mut one, mut two) = (take(&mut blocks, 3), take(&mut blocks, 2));
        one.iter().chain(&two).for_each(|id| blocks.publish(*id, u64::from(*id) + 100));
        blocks.release(&mut one);
        blocks.release(&mut two);
        assert_eq!(blocks.usage(), 0.0, "findable and free");
        assert_eq!(take(&mut blocks, 1), [6], "never used");
        assert_eq!(take(&mut blocks, 2), [3, 2]);
        assert_eq!((blocks.find(101), blocks.find(102), blocks.find(105)), (Some(1), None, Some(5)));
        blocks.share(1);
        assert_eq!(take(&mut blocks, 2), [5, 4], "what was found is no longer there to take");
    }

    #[test]
    fn of_two_blocks_with_one_hash_the_first_is_found_until_it_is_overwritten() {
        let mut blocks = Blocks::new(4);
        let mut held = take(&mut blocks, 3);
        held.iter().for_each(|id| blocks.publish(*id, 7));
        assert_eq!((blocks.find(7), blocks.published()), (Some(1), 1));
        let mut first = vec![held.remove(0)];
        blocks.release(&mut first);
        assert_eq!(take(&mut blocks, 1), [1]);
        assert_eq!(blocks.find(7), Some(2));
        blocks.check([1, 2, 3].into_iter()).unwrap();
    }

    #[test]
    fn everything_is_forgotten_only_when_nothing_is_held() {
        let mut blocks = Blocks::new(4);
        let mut held = take(&mut blocks, 1);
        blocks.publish(held[0], 7);
        assert!(!blocks.forget_all() && blocks.find(7).is_some());
        blocks.release(&mut held);
        assert!(blocks.forget_all() && blocks.find(7).is_none());
    }

    proptest! {
        #[test]
        fn references_are_owners_whatever_is_taken_shared_published_and_given(
            acts in proptest::collection::vec((0u8..4, 0usize..8, 1u64..6), 1..120),
        ) {
            let mut blocks = Blocks::new(12);
            let mut holders: Vec<Vec<BlockId>> = vec![Vec::new(); 8];
            for (act, who, value) in acts {
                match act {
                    0 => { let _ = blocks.allocate(value as u32, &mut holders[who]); }
                    1 => if let Some(id) = blocks.find(value) {
                        blocks.share(id);
                        holders[who].push(id);
                    },
                    2 => if let Some(id) = holders[who].last() { blocks.publish(*id, value); },
                    _ => { let mut held = std::mem::take(&mut holders[who]); blocks.release(&mut held); }
                }
                prop_assert_eq!(blocks.check(holders.iter().flatten().copied()), Ok(()));
            }
        }
    }
}
