//! The load of copies that a changed engine has sustained. Clients' requests stay within it, so a
//! larger load can only harm copies.
//!
//! A load counts if a look saw it, and a copy that began later was served before any copy failed.
//! An engine that hangs under the load serves no such copy. Sequences and tokens count separately,
//! because different faults depend on them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::observe::arms::ArmCounts;

/// Load on one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Sequences.
    pub sequences: u32,
    /// Prompt and output tokens of the sequences.
    pub tokens: u64,
}

impl Load {
    /// The load of leases or copies.
    pub fn new(sequences: u32, tokens: u64) -> Self {
        Self { sequences, tokens }
    }

    fn each(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        let sequences = of(self.sequences.into(), other.sequences.into());
        Self { sequences: u32::try_from(sequences).unwrap_or(u32::MAX), tokens: of(self.tokens, other.tokens) }
    }

    /// Whether the sequences or the tokens reach `bound`.
    pub(crate) fn reaches(self, bound: Self) -> bool {
        self.sequences >= bound.sequences || self.tokens >= bound.tokens
    }

    pub(crate) fn more(self) -> Self {
        self.each(self, |one, _| one.saturating_add(one.div_ceil(8)))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Proof {
    /// A load that a look saw, and when; no later copy was served yet.
    waits: Option<(Load, Duration)>,
    /// A larger load that a later look saw.
    next: Option<(Load, Duration)>,
    proved: Load,
    failed: u64,
}

impl Proof {
    /// `copies`: the load of running copies. `ended`: counts of ended copies.
    pub(crate) fn look(&mut self, now: Duration, copies: Load, ended: &ArmCounts) {
        if std::mem::replace(&mut self.failed, ended.failed) < ended.failed {
            // After a failure, a load counts only if it is seen again.
            *self = Self { proved: self.proved, failed: self.failed, ..Self::default() };
        }
        let begun = ended.begun;
        if let Some((load, _)) = self.waits.take_if(|(_, since)| begun.is_some_and(|begun| begun > *since)) {
            self.proved = self.proved.each(load, u64::max);
            self.waits = self.next.take();
        }
        let slot = if self.waits.is_none() { &mut self.waits } else { &mut self.next };
        let known = slot.map_or(self.proved, |(load, _)| load);
        let larger = known.each(copies, u64::max);
        if larger != known {
            *slot = Some((larger, now));
        }
    }

    pub(crate) fn proved(&self) -> Load {
        self.proved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(sequences: u32) -> Load {
        Load { sequences, tokens: u64::from(sequences) * 100 }
    }

    fn served(begun: u64) -> ArmCounts {
        ArmCounts { begun: Some(Duration::from_secs(begun)), ..ArmCounts::default() }
    }

    #[test]
    fn a_load_is_proved_when_a_copy_that_began_under_it_was_served() {
        let (mut proof, second) = (Proof::default(), Duration::from_secs);
        proof.look(second(1), load(9), &ArmCounts::default());
        proof.look(second(2), load(5), &ArmCounts::default());
        assert_eq!(proof.proved(), Load::default(), "nothing was served");
        proof.look(second(3), load(7), &served(1));
        assert_eq!(proof.proved(), Load::default(), "it began before");
        proof.look(second(4), load(7), &served(2));
        assert_eq!(proof.proved(), load(9));
        // The engine hangs: it serves no copy.
        for at in 5..60 {
            proof.look(second(at), load(7 + at as u32), &served(3));
        }
        assert_eq!(proof.proved(), load(9));
        (60..63).for_each(|at| proof.look(second(at), load(0), &served(60)));
        assert_eq!(proof.proved(), load(66), "the largest of them in the end");
    }

    #[test]
    fn a_load_beside_which_a_copy_failed_is_not_proved() {
        let (mut proof, second) = (Proof::default(), Duration::from_secs);
        for at in 1..5 {
            proof.look(second(at), load(3), &served(at - 1));
        }
        proof.look(second(5), load(9), &served(4));
        proof.look(second(6), load(9), &served(4));
        for at in 7..20 {
            proof.look(second(at), load(2), &ArmCounts { failed: 1, ..served(at - 1) });
        }
        assert_eq!(proof.proved(), load(3));
    }

    #[test]
    fn sequences_and_tokens_are_proved_apart() {
        let (mut proof, second) = (Proof::default(), Duration::from_secs);
        for (at, copies) in [(1, (9, 10)), (2, (9, 10)), (3, (2, 500)), (4, (2, 500)), (5, (0, 0)), (6, (0, 0))] {
            let (sequences, tokens) = copies;
            proof.look(second(at), Load { sequences, tokens }, &served(at));
        }
        let proved = proof.proved();
        assert_eq!((proved.sequences, proved.tokens), (9, 500));
        assert!(Load { sequences: 9, tokens: 0 }.reaches(proved) && Load { sequences: 0, tokens: 500 }.reaches(proved));
        assert!(!Load { sequences: 8, tokens: 499 }.reaches(proved));
        assert_eq!(proved.more(), Load { sequences: 11, tokens: 563 });
    }
}
