//! Two choices: draw two different backends, keep the one with less work.
//!
//! Nearly as even as comparing all of them, and without herding when the figures are stale
//! (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).

use super::candidate::Candidate;
use super::least_work;
use crate::pool::capacity::Need;
use sluice_core::base::{BackendId, Rng};
use tokio::time::Instant;

pub(super) fn pick(candidates: &[Candidate], need: &Need, now: Instant, rng: &mut Rng) -> Option<BackendId> {
    let count = candidates.len();
    if count < 2 {
        return candidates.first().map(|c| c.id);
    }
    let first = rng.below(count);
    let second = (first + 1 + rng.below(count - 1)) % count;
    let pair = [candidates[first], candidates[second]];
    least_work::pick(&pair, need, now)
}

#[cfg(test)]
mod tests {
    use super::super::Pace;
    use super::*;

    #[test]
    fn the_busiest_of_three_is_never_chosen() {
        let sequences = [5, 10, 1_000];
        let candidates: Vec<_> = (0..3)
            .map(|i| Candidate {
                id: BackendId::new(i),
                weight: 1.0,
                requests: 0,
                sequences: sequences[i],
                tokens: 0,
                backlog: 0.0,
                recent: 0.0,
                cached: 0,
                small_tokens: 0,
                interference: 0.0,
                decode: Pace::default(),
                prefill: Pace::default(),
                granted: 0,
            })
            .collect();
        let need = Need { slots: 1, prompt_tokens: 100, output_tokens: 100 };
        let mut rng = Rng::new(7);
        let mut counts = [0; 3];
        for _ in 0..300 {
            counts[pick(&candidates, &need, Instant::now(), &mut rng).expect("there are candidates").index()] += 1;
        }
        assert_eq!(counts[2], 0);
        assert!(counts[1] > 50, "both of the others are drawn: {counts:?}");
    }
}
