//! Which of several backends with room takes a request: a closed set, chosen per pool.
//!
//! A policy sees only candidates that fit (admission has checked), and returns one of them. It is
//! a pure function of what it is shown, a cursor and a coin.
//! `prefix_affinity` has its seat in the configuration and falls to its owner when it comes; it is
//! refused there until then, so no policy here silently stands in for another.

mod least_work;
mod two_choices;

use crate::base::{BackendId, Rng};

pub use least_work::Speed;

/// How a pool picks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The least outstanding tokens over observed speed.
    LeastWork,
    /// The better of two random backends, by the same measure.
    TwoChoices,
    /// Each in turn.
    RoundRobin,
}

/// A backend that could take the request now.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Who.
    pub id: BackendId,
    /// Its position in the pool.
    pub position: usize,
    /// Outstanding tokens.
    pub tokens: u64,
    /// Requests in flight.
    pub requests: u32,
    /// Observed speed of decoding.
    pub speed: Speed,
}

impl Policy {
    /// Picks one of `candidates` (none when empty). `cursor` is the pool's round robin position.
    pub fn pick(
        self,
        candidates: &[Candidate],
        need_tokens: u64,
        cursor: &mut usize,
        rng: &mut Rng,
    ) -> Option<BackendId> {
        match self {
            Self::LeastWork => least_work::pick(candidates, need_tokens, rng),
            Self::TwoChoices => two_choices::pick(candidates, need_tokens, rng),
            Self::RoundRobin => round_robin(candidates, cursor),
        }
    }
}

/// The first candidate at or after the cursor, by position in the pool, so that a backend which
/// had no room is skipped without the others losing their turn.
fn round_robin(candidates: &[Candidate], cursor: &mut usize) -> Option<BackendId> {
    let chosen = candidates.iter().find(|c| c.position >= *cursor).or(candidates.first())?;
    *cursor = chosen.position + 1;
    Some(chosen.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(position: usize, tokens: u64) -> Candidate {
        Candidate { id: BackendId::new(position), position, tokens, requests: 0, speed: Speed::default() }
    }

    #[test]
    fn round_robin_gives_each_its_turn_and_steps_over_the_full() {
        let (mut cursor, mut rng) = (0, Rng::new(1));
        let all = [candidate(0, 0), candidate(1, 0), candidate(2, 0)];
        let without_one = [all[0], all[2]];
        let mut turn = |c: &[Candidate]| Policy::RoundRobin.pick(c, 1, &mut cursor, &mut rng).map(BackendId::index);
        assert_eq!(turn(&all), Some(0));
        assert_eq!(turn(&without_one), Some(2));
        assert_eq!(turn(&all), Some(0));
        assert_eq!(turn(&all), Some(1));
        assert_eq!(turn(&[]), None);
    }
}
