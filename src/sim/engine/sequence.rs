//! A sequence inside the engine, and the queue in which it waits.
//!
//! Sequences are kept in reusable slots ([`Slot`]), so a step iterates over an array. The queue is
//! one ordered map: under first come first served, ranks count up at the back and down at the
//! front, where preempted sequences go. The caller bounds the sequences.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use super::blocks::BlockId;
use super::content::Chain;
use super::id::SequenceId;
use super::request::{Policy, Request};

pub(super) type Slot = u32;

/// Order in the queue; lower goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    priority: i64,
    arrived: Duration,
    id: SequenceId,
    /// Position under first come first served; the other fields are 0 then.
    turn: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Arrived while the current step was under way.
    Arriving,
    /// Arrived during the step before: the next plan considers it.
    Staged,
    Waiting,
    Running,
}

/// How a running sequence has ended. It keeps its place in the running list and its KV blocks until
/// the next step, which is already planned, has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It reached the token limit. The planner foresees that, so nothing more is computed.
    AtLimit,
    /// It sampled a stop token. One more token is computed and discarded.
    Stopped,
    /// It was aborted. The tokens that were planned are computed and discarded.
    Aborted,
}

#[derive(Debug, Default)]
pub(super) struct Sequence {
    pub(super) request: Request,
    pub(super) rank: Rank,
    pub(super) place: Option<Place>,
    pub(super) ending: Option<Ending>,
    /// Tokens whose keys and values are in the cache.
    pub(super) computed: u32,
    pub(super) generated: u32,
    pub(super) chunk: u32,
    /// Drafts that the next step verifies.
    pub(super) drafts: u32,
    /// Whether it has sampled no token since it was admitted.
    pub(super) prefilling: bool,
    /// Whether it sampled a token in the previous step. Asynchronous scheduling does not know this
    /// token yet.
    pub(super) sampled: bool,
    /// Whether admission skipped it because of its adapter.
    pub(super) deferred: bool,
    pub(super) preempted: bool,
    pub(super) blocks: Vec<BlockId>,
    pub(super) chain: Chain,
}

impl Sequence {
    /// Tokens that exist: prompt and generated.
    pub(super) fn tokens(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }

    /// Drafts among the next `chunk` tokens: the tokens beyond the existing ones.
    pub(super) fn drafts_in(&self, chunk: u32) -> u32 {
        (self.computed + chunk).saturating_sub(self.tokens())
    }

    /// The chain with the next block, and the hash of that block.
    pub(super) fn next_hash(&self) -> (Chain, u64) {
        self.chain.next(&self.request.content, self.request.id)
    }

    /// The chain of its block hashes before the first block.
    pub(super) fn root(&self) -> Chain {
        Chain::new(self.request.salt, self.request.adapter)
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    policy: Policy,
    waiting: BTreeMap<Rank, Slot>,
    /// The last rank given at the back.
    back: i64,
    /// The last rank given at the front.
    front: i64,
}

impl Queue {
    pub(super) fn new(policy: Policy) -> Self {
        Self { policy, waiting: BTreeMap::new(), back: 0, front: 0 }
    }

    /// Queues a sequence: at the front if `in_front` is set and the policy is first come first
    /// served.
    pub(super) fn push(&mut self, slot: Slot, sequence: &mut Sequence, in_front: bool) {
        let request = &sequence.request;
        sequence.rank = match (self.policy, in_front) {
            (Policy::Priority, _) => {
                Rank { priority: request.priority, arrived: request.arrived, id: request.id, turn: 0 }
            }
            (Policy::Fcfs, false) => {
                self.back += 1;
                Rank { turn: self.back, ..Rank::default() }
            }
            (Policy::Fcfs, true) => {
                self.front -= 1;
                Rank { turn: self.front, ..Rank::default() }
            }
        };
        sequence.place = Some(Place::Waiting);
        self.waiting.insert(sequence.rank, slot);
    }

    /// The first sequence after `rank`; without a rank, the first of the queue.
    pub(super) fn after(&self, rank: Option<Rank>) -> Option<(Rank, Slot)> {
        let from = rank.map_or(Bound::Unbounded, Bound::Excluded);
        self.waiting.range((from, Bound::Unbounded)).next().map(|(rank, slot)| (*rank, *slot))
    }

    pub(super) fn remove(&mut self, rank: Rank) {
        self.waiting.remove(&rank);
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.waiting.values().copied()
    }
}
