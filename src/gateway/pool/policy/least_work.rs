//! Least work: the backend that would finish its work soonest.
//!
//! Score = `(outstanding tokens + this request's tokens) x seconds per token / weight`, lowest wins; seconds per token
//! is the decayed mean of the TPOT seen on that backend. More load raises the TPOT and with it the score; on a slower
//! GPU it is always higher. So unequal backends get work in proportion to their speed. A backend not yet measured
//! counts as the fastest measured one, so that it gets work and is measured. Observations are clamped and age (see
//! `Speed`), and no backend is scored more than [`SPREAD_MAX`] times slower than the fastest, so neither one odd sample
//! nor a slow past takes a backend out of use. Ties are broken by the fewest requests, then at random.

use super::candidate::Candidate;
use sluice_core::base::{BackendId, Rng};
use tokio::time::Instant;

/// A backend is never scored as more than this many times slower than the fastest.
const SPREAD_MAX: f64 = 8.0;

pub(super) fn pick(candidates: &[Candidate], need_tokens: u64, now: Instant, rng: &mut Rng) -> Option<BackendId> {
    let fastest = fastest(candidates);
    let offset = rng.below(candidates.len());
    let rotated = candidates[offset..].iter().chain(&candidates[..offset]);
    rotated
        .map(|c| (score(c, need_tokens, fastest, now), c))
        .min_by(|(a, ca), (b, cb)| a.total_cmp(b).then(ca.requests.cmp(&cb.requests)))
        .map(|(_, c)| c.id)
}

fn fastest(candidates: &[Candidate]) -> f64 {
    let best = candidates.iter().filter_map(|c| c.speed.seconds_per_token()).fold(f64::INFINITY, f64::min);
    if best.is_finite() { best } else { 1.0 }
}

fn score(candidate: &Candidate, need_tokens: u64, fastest: f64, now: Instant) -> f64 {
    let pace = candidate.speed.pace(fastest, SPREAD_MAX, now);
    candidate.tokens.saturating_add(need_tokens) as f64 * pace / candidate.weight
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Speed;
    use super::*;

    fn candidate(position: usize, tokens: u64, tpot_ms: Option<u64>) -> Candidate {
        let mut speed = Speed::default();
        if let Some(ms) = tpot_ms {
            speed.observe(Duration::from_millis(ms), Instant::now());
        }
        Candidate { id: BackendId::new(position), weight: 1.0, tokens, requests: 0, speed }
    }

    fn chosen(candidates: &[Candidate]) -> usize {
        chosen_at(candidates, Instant::now())
    }

    fn chosen_at(candidates: &[Candidate], now: Instant) -> usize {
        pick(candidates, 100, now, &mut Rng::new(3)).expect("there are candidates").index()
    }

    #[test]
    fn equal_speed_means_fewest_tokens() {
        assert_eq!(chosen(&[candidate(0, 900, Some(5)), candidate(1, 800, Some(5))]), 1);
    }

    #[test]
    fn a_gpu_twice_as_fast_carries_twice_as_much() {
        assert_eq!(chosen(&[candidate(0, 1_000, Some(5)), candidate(1, 700, Some(10))]), 0);
        assert_eq!(chosen(&[candidate(0, 1_000, Some(5)), candidate(1, 400, Some(10))]), 1);
    }

    #[test]
    fn an_unmeasured_backend_is_given_a_chance() {
        assert_eq!(chosen(&[candidate(0, 10, Some(50)), candidate(1, 0, None)]), 1);
    }

    #[test]
    fn a_backend_that_was_slow_once_is_tried_again() {
        let slow_once = [candidate(0, 400, Some(5)), candidate(1, 0, Some(50))];
        assert_eq!(chosen(&slow_once), 0, "eight times slower, with a fifth of the work");
        let at = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert_eq!(chosen_at(&slow_once, at(20)), 1, "less than three times slower");
        let idle = [candidate(0, 0, Some(5)), candidate(1, 0, Some(50))];
        assert_eq!(chosen_at(&idle, at(55)), 0);
        let mut rng = Rng::new(3);
        let mut again = (0..100).filter(|_| pick(&idle, 100, at(60), &mut rng).unwrap().index() == 1);
        assert!(again.next().is_some(), "as good as unmeasured");
    }

    #[test]
    fn one_odd_sample_cannot_exile_a_backend() {
        assert_eq!(chosen(&[candidate(0, 10_000, Some(5)), candidate(1, 0, Some(2_000))]), 1);
    }
}
