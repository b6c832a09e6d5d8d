//! A sequence inside the engine, and the queue in which it waits.
//!
//! Sequences live in numbered places ([`Slot`]) that are reused, so that a step walks over an array and looks nothing up.
//! The queue is one ordered map for both policies: first come first served is a rank that only counts up, and down for
//! what was preempted and goes to the front. Bounds: the caller bounds the number of sequences.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use super::blocks::BlockId;
use super::content::Chain;
use super::id::SequenceId;
use super::request::{Policy, Request};

/// Place of a sequence in the engine.
pub(super) type Slot = u32;

/// Order in the queue; lower goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    priority: i64,
    arrived: Duration,
    id: SequenceId,
    /// Turn, under first come first served; there the other fields are 0.
    turn: i64,
}

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Arrived while the step that runs now was under way.
    Arriving,
    /// Arrived one step before that: it is in the next plan.
    Staged,
    /// In the queue.
    Waiting,
    /// In the running list.
    Running,
}

/// Why a sequence that is still in the running list is over. The plan of the step after its last one was made before
/// that was known, so it keeps its place and its blocks until that plan has been carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It reached its limit, which was foreseen: nothing more is computed.
    AtLimit,
    /// It sampled a stop token: one more token is computed in vain.
    Stopped,
    /// The client went away: what was planned is computed in vain.
    Aborted,
}

/// A sequence inside the engine.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    pub(super) request: Request,
    pub(super) rank: Rank,
    pub(super) place: Option<Place>,
    pub(super) ending: Option<Ending>,
    /// Tokens whose keys and values are in the cache.
    pub(super) computed: u32,
    /// Tokens sampled.
    pub(super) generated: u32,
    /// Tokens scheduled in the step that runs now.
    pub(super) chunk: u32,
    /// Its last scheduled step did not catch up with its tokens.
    pub(super) prefilling: bool,
    /// It sampled a token in the step before, which asynchronous scheduling does not know yet.
    pub(super) sampled: bool,
    /// Admission passed it over because of its adapter.
    pub(super) deferred: bool,
    /// It was preempted before.
    pub(super) preempted: bool,
    pub(super) blocks: Vec<BlockId>,
    /// Hashes of the blocks published so far.
    pub(super) chain: Chain,
}

impl Sequence {
    /// Tokens that exist: prompt and generated.
    pub(super) fn tokens(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }

    /// The chain with the next block published, and that block's hash.
    pub(super) fn next_hash(&self) -> (Chain, u64) {
        self.chain.next(&self.request.content, self.request.id)
    }

    /// The chain of its block hashes before the first.
    pub(super) fn root(&self) -> Chain {
        Chain::new(self.request.salt, self.request.adapter)
    }
}

/// The waiting queue.
#[derive(Debug)]
pub(super) struct Queue {
    policy: Policy,
    waiting: BTreeMap<Rank, Slot>,
    /// Turns given at the back and at the front.
    back: i64,
    front: i64,
}

impl Queue {
    pub(super) fn new(policy: Policy) -> Self {
        Self { policy, waiting: BTreeMap::new(), back: 0, front: 0 }
    }

    /// Queues a sequence, at the front when it was preempted; the policy may know better.
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

    /// The first sequence behind `rank`, or the first of all.
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
