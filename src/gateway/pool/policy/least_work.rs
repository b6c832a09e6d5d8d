//! Least work: where the request is predicted to get its first token soonest and to delay others least.
//!
//! ```text
//! cost = (wait + own prefill + CROWD x output tokens x SEQUENCE x sequences) / weight + output tokens x STEP
//!
//! wait of a large prompt = backlog of large prompts + prefill of as many tokens as are outstanding
//! wait of a small prompt = min(backlog, 2 x interference) + recent + WAITING x small prompts before their first token
//! ```
//!
//! Own prefill is what the engine is not expected to have in its prefix cache (`prefix.rs`), and a prompt is small or large by
//! that: a conversation goes where it was, unless the wait there is longer than to compute it again elsewhere.
//!
//! Everything is in seconds at the engine's own pace, the lowest cost wins, and of equal ones the least recently used.
//! Each term answers a measured fault of simpler rules (`config/lab/placement`):
//!
//! - An engine computes prompts in their order or in pieces, as its flags say. In order, a small prompt waits for the rest of
//!   a large one; in pieces it waits a step or two. `interference` is the mean of what it waited, as observed. A prefill is met
//!   in its middle on average, so no more than twice that is predicted.
//! - Prompts that meet in one step delay each other, and such a step is often above the largest CUDA graph. Those that came
//!   within their own prefill time (`recent`), and those not yet answered, keep the next one away. Where all requests are
//!   alike, this is as good as round robin.
//! - Each large prefill delays all decodes beside it. Outstanding tokens keep the next large prompt away from engines that
//!   had one not long ago, so that it is not always the same requests that are delayed.
//! - More sequences make every step longer, by little: a second of decoding counts a tenth of a second of waiting.

use super::candidate::Candidate;
use super::cost::{PROMPT_TOKEN, SEQUENCE, STEP};
use super::pace::fastest;
use crate::pool::capacity::{LARGE_PROMPT, Need};
use sluice_core::base::BackendId;
use tokio::time::Instant;

/// The weight of delaying decodes, beside that of waiting for the first token.
const CROWD: f64 = 0.1;
/// The share of small prompts without a first token that still are to be computed: the tokens of the others are on their way.
const WAITING: f64 = 0.3;

/// What all candidates are compared with.
#[derive(Clone, Copy, Debug)]
struct Common {
    decode: f64,
    prefill: f64,
    /// Mean over the candidates: engines of a pool have the same flags, and the noise of each would be a preference.
    interference: f64,
}

pub(super) fn pick(candidates: &[Candidate], need: &Need, now: Instant) -> Option<BackendId> {
    let common = Common {
        decode: fastest(candidates.iter().map(|c| &c.decode)),
        prefill: fastest(candidates.iter().map(|c| &c.prefill)),
        interference: candidates.iter().map(|c| c.interference).sum::<f64>() / candidates.len().max(1) as f64,
    };
    candidates
        .iter()
        .map(|candidate| (cost(candidate, need, &common, now), candidate))
        .min_by(|(a, ca), (b, cb)| a.total_cmp(b).then(ca.granted.cmp(&cb.granted)))
        .map(|(_, candidate)| candidate.id)
}

/// What the request costs here, seconds.
fn cost(candidate: &Candidate, need: &Need, common: &Common, now: Instant) -> f64 {
    let prompt_token = PROMPT_TOKEN * candidate.prefill.factor(common.prefill, now);
    let output = need.output_tokens as f64 * candidate.decode.factor(common.decode, now);
    let computed = need.prompt_tokens - candidate.cached.min(need.prompt_tokens);
    let wait = if computed >= LARGE_PROMPT {
        candidate.backlog + candidate.tokens as f64 * prompt_token
    } else {
        candidate.backlog.min(2.0 * common.interference)
            + candidate.recent
            + WAITING * candidate.small_tokens as f64 * prompt_token
    };
    let own = computed as f64 * prompt_token;
    let sequences = f64::from(candidate.sequences) + f64::from(need.slots);
    (wait + own + CROWD * output * SEQUENCE * sequences) / candidate.weight + output * STEP
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::pace::Pace;
    use super::*;

    fn candidate(position: usize) -> Candidate {
        Candidate {
            id: BackendId::new(position),
            weight: 1.0,
            requests: 0,
            sequences: 0,
            tokens: 0,
            backlog: 0.0,
            recent: 0.0,
            cached: 0,
            small_tokens: 0,
            interference: 0.1,
            decode: Pace::default(),
            prefill: Pace::default(),
            granted: 0,
        }
    }

    const SMALL: Need = Need { slots: 1, prompt_tokens: 200, output_tokens: 128 };
    const LARGE: Need = Need { slots: 1, prompt_tokens: 16_000, output_tokens: 64 };

    fn chosen(candidates: &[Candidate], need: &Need, now: Instant) -> usize {
        pick(candidates, need, now).expect("there are candidates").index()
    }

    fn paced(ratio: f64, now: Instant) -> Pace {
        let mut pace = Pace::default();
        (0..100).for_each(|_| pace.observe(ratio, 1.0, now));
        pace
    }

    #[test]
    fn of_equal_ones_the_least_recently_used_takes_the_request() {
        let used = |position, granted| Candidate { granted, ..candidate(position) };
        assert_eq!(chosen(&[used(0, 7), used(1, 5), used(2, 6)], &SMALL, Instant::now()), 1);
    }

    #[test]
    fn a_small_prompt_avoids_a_prefill_as_far_as_it_was_seen_to_wait_for_one() {
        let now = Instant::now();
        let engines = |interference, sequences| {
            let both = |position| Candidate { interference, ..candidate(position) };
            [Candidate { backlog: 0.5, ..both(0) }, Candidate { sequences, ..both(1) }]
        };
        assert_eq!(chosen(&engines(0.25, 60), &SMALL, now), 1, "it would wait for half a second");
        assert_eq!(chosen(&engines(0.005, 60), &SMALL, now), 0, "it would wait for a step");
    }

    #[test]
    fn small_prompts_that_came_a_moment_ago_keep_the_next_one_away() {
        let now = Instant::now();
        let busy = Candidate { sequences: 9, ..candidate(0) };
        assert_eq!(chosen(&[busy, Candidate { recent: 0.006, ..candidate(1) }], &SMALL, now), 0);
        assert_eq!(chosen(&[busy, Candidate { small_tokens: 600, ..candidate(1) }], &SMALL, now), 0);
        assert_eq!(chosen(&[busy, candidate(1)], &SMALL, now), 1);
    }

    #[test]
    fn a_large_prompt_goes_where_the_last_one_is_longest_ago() {
        let now = Instant::now();
        let decoding = Candidate { tokens: 16_064, sequences: 3, ..candidate(0) };
        let busy = Candidate { tokens: 4_000, sequences: 12, ..candidate(1) };
        assert_eq!(chosen(&[decoding, busy], &LARGE, now), 1);
        assert_eq!(chosen(&[decoding, Candidate { backlog: 0.5, ..busy }], &LARGE, now), 0);
    }

    #[test]
    fn a_prompt_goes_where_its_beginning_is_unless_the_wait_there_is_longer_than_to_compute_it() {
        let now = Instant::now();
        let owner = Candidate { cached: 150, sequences: 10, ..candidate(0) };
        assert_eq!(chosen(&[owner, candidate(1)], &SMALL, now), 0);
        assert_eq!(chosen(&[Candidate { recent: 0.01, ..owner }, candidate(1)], &SMALL, now), 1);
        let owner = Candidate { cached: 15_900, backlog: 0.4, tokens: 40_000, ..candidate(0) };
        assert_eq!(chosen(&[owner, candidate(1)], &LARGE, now), 0, "what is left is a small prompt");
        let in_order = |engine| Candidate { interference: 0.4, ..engine };
        let behind = Candidate { backlog: 0.8, ..owner };
        assert_eq!(chosen(&[in_order(behind), in_order(candidate(1))], &LARGE, now), 1);
    }

    #[test]
    fn a_slow_engine_is_used_when_the_fast_one_is_behind() {
        let now = Instant::now();
        let slow = Candidate { prefill: paced(3.0, now), decode: paced(3.0, now), ..candidate(0) };
        let fast = Candidate { prefill: paced(1.0, now), decode: paced(1.0, now), ..candidate(1) };
        assert_eq!(chosen(&[slow, Candidate { sequences: 40, ..fast }], &SMALL, now), 1);
        let behind = Candidate { tokens: 100_000, backlog: 3.0, ..fast };
        assert_eq!(chosen(&[slow, behind], &LARGE, now), 0);
        assert_eq!(chosen(&[slow, fast], &SMALL, now + Duration::from_secs(60)), 0, "as good as unmeasured: in turn");
    }

    #[test]
    fn twice_the_weight_carries_twice_the_work() {
        let now = Instant::now();
        let mut engines = [Candidate { weight: 2.0, ..candidate(0) }, candidate(1)];
        let mut counts = [0_u64; 2];
        for turn in 1..=300 {
            let at = chosen(&engines, &LARGE, now);
            counts[at] += 1;
            engines[at].tokens += LARGE.tokens();
            engines[at].granted = turn;
        }
        assert!((195..=205).contains(&counts[0]), "{counts:?}");
    }

    fn any_candidate() -> impl Strategy<Value = Candidate> {
        let loads = (0..300u32, 0..1_000_000u64, 0.0..30.0f64, 0.0..1.0f64, 0..50_000u64);
        (loads, 0.0..2.0f64, 0.1..10.0f64, 0.01..50.0f64, 0.01..50.0f64, 0..9u64).prop_map(
            |((sequences, tokens, backlog, recent, small_tokens), interference, weight, decode, prefill, granted)| {
                let now = Instant::now();
                let load = Candidate { sequences, tokens, backlog, recent, small_tokens, ..candidate(0) };
                Candidate {
                    interference,
                    weight,
                    granted,
                    decode: paced(decode, now),
                    prefill: paced(prefill, now),
                    ..load
                }
            },
        )
    }

    proptest! {
        /// More load on a backend never attracts a request that it did not get before.
        #[test]
        fn load_repels(
            mut engines in proptest::collection::vec(any_candidate(), 2..6),
            more in (0..50u32, 0..100_000u64, 0.0..2.0f64, 0.0..0.1f64, 0..2_000u64),
            need in (1..5u32, 1..40_000u64, 0..2_000u64),
            which in any::<proptest::sample::Index>(),
        ) {
            engines.iter_mut().enumerate().for_each(|(at, engine)| engine.id = BackendId::new(at));
            let need = Need { slots: need.0, prompt_tokens: need.1, output_tokens: need.2 };
            let (now, loaded) = (Instant::now(), which.index(engines.len()));
            let before = chosen(&engines, &need, now);
            let engine = &mut engines[loaded];
            engine.sequences += more.0;
            engine.tokens += more.1;
            engine.backlog += more.2;
            engine.recent += more.3;
            engine.small_tokens += more.4;
            let after = chosen(&engines, &need, now);
            prop_assert!(after == before || before == loaded, "{before} {after} {loaded}");
        }
    }
}
