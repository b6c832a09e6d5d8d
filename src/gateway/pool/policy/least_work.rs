//! Least work: where the request is predicted to get the first token soonest and to delay others
//! least.
//!
//! ```text
//! cost = (wait + adapter + own prefill + CROWD x output tokens x SEQUENCE x sequences) / weight
//!      + output tokens x STEP
//!
//! wait of a large prompt = backlog of large prompts + prefill of as many tokens as are outstanding
//! wait of a small prompt = min(backlog, 2 x interference) + recent
//!                        + WAITING x max(lately, small prompts without a first token)
//! ```
//!
//! The lowest cost wins. Among backends that differ only in load, and by less than a prediction can
//! tell ([`TIE`]), the least recently used wins. Everything is in seconds at the engine's own pace.
//!
//! Own prefill is the time to compute the prompt tokens that are not expected in the engine's
//! prefix cache (`prefix.rs`). Their number also decides whether the prompt is small or large. So
//! the next turn of a conversation goes to the same engine, unless waiting there takes longer than
//! computing the whole prompt elsewhere. `cost` has the reasons for the other terms; each corrects
//! a measured fault of simpler rules (`config/lab/placement`).

use smallvec::SmallVec;

use super::candidate::{COMPARED, Offer, larger, smaller};
use super::cost::{PROMPT_TOKEN, SEQUENCE, STEP};
use super::pace::Fastest;
use crate::pool::adapters::AdapterPlace;
use crate::pool::capacity::{LARGE_PROMPT, Need};
use sluice_core::base::BackendId;

/// The cost of a second by which decoding gets longer, relative to a second of waiting for the
/// first token.
const CROWD: f64 = 0.1;
/// The share of small prompts without a first token that the engine still has to compute. The other
/// prompts are computed, and their first tokens are on the way to the gateway.
const WAITING: f64 = 0.3;
/// Costs that differ by less, in seconds, count as equal: half a step, about the difference between
/// a token that has left the engine and one that is about to. In bursts of equal requests, smaller
/// differences are noise and taking turns is best: without turns the P99 of the time to first token
/// is 8 % higher.
const TIE: f64 = 3e-3;

/// How long it takes to copy an adapter into a free slot, seconds: 40 to 170 MB, from host memory
/// or from a disk.
const ADAPTER_LOAD: f64 = 0.05;
/// The cost of an engine that does not serve the adapter, seconds: more than any wait.
const ADAPTER_MISSING: f64 = 1e6;

/// The inputs that are the same for all backends of one choice.
#[derive(Clone, Copy, Debug)]
struct Common {
    prompt_tokens: f64,
    output_tokens: f64,
    /// Sequences of the request.
    slots: f64,
    decode: f64,
    prefill: f64,
    /// The longest predicted wait of a small prompt for large ones: twice the mean over the
    /// backends. The engines of a pool have the same flags, so differences are noise and must not
    /// decide.
    interference: f64,
    now: f64,
}

/// The best backend, and the one with the lowest cost among the others.
pub(super) fn pick(offers: &[Offer<'_>], need: &Need, now: f64) -> (Option<BackendId>, Option<BackendId>) {
    if offers.len() < 2 {
        return (offers.first().map(|only| only.candidate.id), None);
    }
    let common = Common::of(offers, need, now);
    let costs: SmallVec<[f64; COMPARED]> = offers.iter().map(|offer| cost(offer, &common)).collect();
    let (mut best, mut second) = ((0, f64::INFINITY), (0, f64::INFINITY));
    for (at, &cost) in costs.iter().enumerate() {
        if cost < best.1 {
            (best, second) = ((at, cost), best);
        } else if cost < second.1 {
            second = (at, cost);
        }
    }
    let mut chosen = best.0;
    for (at, &cost) in costs.iter().enumerate() {
        let in_turn = || offers[at].candidate.granted < offers[chosen].candidate.granted;
        if cost <= best.1 + TIE && in_turn() && differ_in_load_only(&offers[at], &offers[chosen]) {
            chosen = at;
        }
    }
    let runner_up = if chosen == best.0 { second.0 } else { best.0 };
    (Some(offers[chosen].candidate.id), Some(offers[runner_up].candidate.id))
}

impl Common {
    fn of(offers: &[Offer<'_>], need: &Need, now: f64) -> Self {
        let (mut decode, mut prefill, mut interference) = (Fastest::default(), Fastest::default(), 0.0);
        for Offer { candidate, .. } in offers {
            decode.add(candidate.decode);
            prefill.add(candidate.prefill);
            interference += candidate.interference;
        }
        Self {
            prompt_tokens: need.prompt_tokens as f64,
            output_tokens: need.output_tokens as f64,
            slots: f64::from(need.slots),
            decode: decode.ratio(),
            prefill: prefill.ratio(),
            interference: 2.0 * interference / offers.len() as f64,
            now,
        }
    }
}

/// Whether two backends have the same weight, cached prefix and adapter. If they differ in these,
/// the difference is certain, and taking turns would undo it.
fn differ_in_load_only(one: &Offer<'_>, other: &Offer<'_>) -> bool {
    one.candidate.weight == other.candidate.weight && one.cached == other.cached && one.adapter == other.adapter
}

/// The cost of the request on one backend, seconds.
///
/// - `interference`: the observed mean time that small prompts wait for a large one. Depending on
///   flags, an engine computes prompts one after another, or large ones in chunks, so this is the
///   rest of a prefill, or a step or two. A small prompt arrives on average in the middle of that
///   prefill or step, so the longest wait is twice the mean.
/// - `backlog.small` (recent): prompts in one step delay each other, and such a step often exceeds
///   the largest CUDA graph. If all requests are alike, this is as good as round robin.
/// - `backlog.lately`: an engine sends first tokens in groups, one for each step. If only prompts
///   without a first token counted, an engine that has just ended a step would look empty, and
///   would get all requests until another engine ends a step. Where more prompts wait, for example
///   for an adapter, these count instead.
/// - `candidate.tokens`: a large prefill delays all decodes on the engine. An engine that had a
///   large prompt lately still has many outstanding tokens, so the next one goes elsewhere and the
///   delays do not always hit the same requests.
/// - `CROWD`: more sequences make every step a little longer.
/// - The adapter (`adapters.rs`): a moment if a slot is free; otherwise the time until an adapter
///   ahead has no requests left. Each of these requests is assumed to decode as long as this one.
///   An engine that lacks the adapter is chosen only if all do.
#[inline]
fn cost(offer: &Offer<'_>, common: &Common) -> f64 {
    let Offer { candidate, cached, adapter } = offer;
    let (backlog, now) = (&candidate.backlog, common.now);
    let prompt_token = PROMPT_TOKEN * candidate.prefill.factor(common.prefill, now);
    let output = common.output_tokens * candidate.decode.factor(common.decode, now);
    let computed = larger(common.prompt_tokens - cached, 0.0);
    let wait = if computed >= LARGE_PROMPT as f64 {
        backlog.large(now) + candidate.tokens * prompt_token
    } else {
        let waiting = candidate.small_tokens * prompt_token;
        let behind = smaller(backlog.large(now), common.interference);
        behind + backlog.small(now) + WAITING * larger(waiting, backlog.lately(now))
    };
    let adapter = match adapter {
        AdapterPlace::Ready => 0.0,
        AdapterPlace::Load => ADAPTER_LOAD,
        AdapterPlace::Wait(requests) => ADAPTER_LOAD + f64::from(*requests) * output * STEP,
        AdapterPlace::Missing => ADAPTER_MISSING,
    };
    let own = adapter + computed * prompt_token;
    let sequences = f64::from(candidate.sequences) + common.slots;
    (wait + own + CROWD * output * SEQUENCE * sequences) / candidate.weight + output * STEP
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::time::Instant;

    use super::super::{Backlog, Candidate, Pace, SeenPace};
    use super::*;

    /// The time of a choice.
    const NOW: f64 = 100.0;

    fn candidate(position: usize) -> Candidate {
        Candidate::idle(position)
    }

    /// Seconds of work of large and of small prompts.
    fn work(large: f64, small: f64) -> Backlog {
        Backlog { large_until: NOW + large, large_waiting: large, small_until: NOW + small, lately: small, at: NOW }
    }

    const SMALL: Need = Need { slots: 1, prompt_tokens: 200, output_tokens: 128 };
    const LARGE: Need = Need { slots: 1, prompt_tokens: 16_000, output_tokens: 64 };

    /// The backend that is chosen at `now`. Each candidate comes with the expected cached prompt
    /// tokens.
    fn chosen_at(candidates: &[(Candidate, u64)], need: &Need, now: f64) -> usize {
        let offers: Vec<Offer<'_>> = candidates
            .iter()
            .map(|(candidate, cached)| Offer { candidate, cached: *cached as f64, adapter: AdapterPlace::Ready })
            .collect();
        pick(&offers, need, now).0.expect("there are candidates").index()
    }

    fn chosen(candidates: &[Candidate], need: &Need) -> usize {
        let uncached: Vec<_> = candidates.iter().map(|candidate| (*candidate, 0)).collect();
        chosen_at(&uncached, need, NOW)
    }

    /// The pace of an engine that was observed, until [`NOW`], to take `ratio` times as long as the
    /// reference.
    fn paced(ratio: f64) -> SeenPace {
        let (epoch, mut pace) = (Instant::now(), Pace::default());
        let now = epoch + std::time::Duration::from_secs_f64(NOW);
        (0..100).for_each(|_| pace.observe(ratio, 1.0, now));
        pace.seen(epoch)
    }

    #[test]
    fn of_equal_ones_the_least_recently_used_takes_the_request() {
        let used = |position, granted| Candidate { granted, ..candidate(position) };
        assert_eq!(chosen(&[used(0, 7), used(1, 5), used(2, 6)], &SMALL), 1);
    }

    /// Differences that are smaller than a prediction can tell do not break the turns of equal
    /// engines.
    #[test]
    fn a_difference_of_two_milliseconds_does_not_decide() {
        let used = |position, granted, small| Candidate { granted, backlog: work(0.0, small), ..candidate(position) };
        assert_eq!(chosen(&[used(0, 7, 0.0), used(1, 5, 0.002)], &SMALL), 1, "its turn");
        assert_eq!(chosen(&[used(0, 7, 0.0), used(1, 5, 0.004)], &SMALL), 0);
        assert_eq!(
            chosen_at(&[(used(0, 7, 0.0), 20), (used(1, 5, 0.0), 0)], &SMALL, NOW),
            0,
            "not where caches differ"
        );
        let heavy = Candidate { weight: 1.1, ..used(0, 7, 0.0) };
        assert_eq!(chosen(&[heavy, used(1, 5, 0.0)], &SMALL), 0, "not where weights differ");
    }

    #[test]
    fn a_small_prompt_avoids_a_prefill_as_far_as_it_was_seen_to_wait_for_one() {
        let engines = |interference, sequences| {
            let both = |position| Candidate { interference, ..candidate(position) };
            [Candidate { backlog: work(0.5, 0.0), ..both(0) }, Candidate { sequences, ..both(1) }]
        };
        assert_eq!(chosen(&engines(0.25, 60), &SMALL), 1, "it would wait for half a second");
        assert_eq!(chosen(&engines(0.005, 60), &SMALL), 0, "it would wait for a step");
    }

    #[test]
    fn small_prompts_that_came_a_moment_ago_keep_the_next_one_away() {
        let busy = Candidate { sequences: 9, ..candidate(0) };
        assert_eq!(chosen(&[busy, Candidate { backlog: work(0.0, 0.006), ..candidate(1) }], &SMALL), 0);
        assert_eq!(chosen(&[busy, Candidate { small_tokens: 600.0, ..candidate(1) }], &SMALL), 0);
        assert_eq!(chosen(&[busy, candidate(1)], &SMALL), 1);
    }

    /// An engine that has just sent the first tokens of a step is not emptier than one whose step
    /// is still running.
    #[test]
    fn the_end_of_a_step_attracts_nothing_and_a_queue_repels() {
        let lately = Backlog { lately: 0.02, at: NOW, ..Backlog::default() };
        let ended = Candidate { backlog: lately, granted: 2, ..candidate(0) };
        let running = Candidate { small_tokens: 600.0, granted: 1, ..ended };
        assert_eq!(chosen(&[ended, Candidate { id: BackendId::new(1), ..running }], &SMALL), 1, "in turn");
        let queued = Candidate { id: BackendId::new(1), small_tokens: 3_000.0, granted: 1, ..ended };
        assert_eq!(chosen(&[ended, queued], &SMALL), 0);
    }

    #[test]
    fn a_request_goes_where_its_adapter_has_a_slot_unless_that_engine_is_much_busier() {
        let first_with = |sequences, places: [AdapterPlace; 2]| {
            let engines = [Candidate { sequences, ..candidate(0) }, candidate(1)];
            let offers = [0, 1].map(|at| Offer { candidate: &engines[at], cached: 0.0, adapter: places[at] });
            pick(&offers, &SMALL, NOW).0.unwrap().index() == 0
        };
        use AdapterPlace::{Load, Missing, Ready, Wait};
        assert!(first_with(0, [Wait(1), Wait(2)]) && !first_with(0, [Wait(2), Wait(1)]));
        assert!(
            first_with(10, [Ready, Load]) && first_with(10, [Load, Wait(1)]) && first_with(10_000, [Wait(9), Missing])
        );
        assert!(!first_with(10, [Ready, Ready]) && !first_with(2_000, [Ready, Load]));
    }

    #[test]
    fn a_large_prompt_goes_where_the_last_one_is_longest_ago() {
        let decoding = Candidate { tokens: 16_064.0, sequences: 3, ..candidate(0) };
        let busy = Candidate { tokens: 4_000.0, sequences: 12, ..candidate(1) };
        assert_eq!(chosen(&[decoding, busy], &LARGE), 1);
        assert_eq!(chosen(&[decoding, Candidate { backlog: work(0.5, 0.0), ..busy }], &LARGE), 0);
    }

    #[test]
    fn a_prompt_goes_where_its_beginning_is_unless_the_wait_there_is_longer_than_to_compute_it() {
        let owner = Candidate { sequences: 10, ..candidate(0) };
        let other = (candidate(1), 0);
        assert_eq!(chosen_at(&[(owner, 150), other], &SMALL, NOW), 0);
        assert_eq!(chosen_at(&[(Candidate { backlog: work(0.0, 0.01), ..owner }, 150), other], &SMALL, NOW), 1);
        let owner = Candidate { backlog: work(0.4, 0.0), tokens: 40_000.0, ..candidate(0) };
        assert_eq!(chosen_at(&[(owner, 15_900), other], &LARGE, NOW), 0, "what is left is a small prompt");
        let in_order = |engine| Candidate { interference: 0.4, ..engine };
        let behind = Candidate { backlog: work(0.8, 0.0), ..owner };
        assert_eq!(chosen_at(&[(in_order(behind), 15_900), (in_order(other.0), 0)], &LARGE, NOW), 1);
    }

    #[test]
    fn a_slow_engine_is_used_when_the_fast_one_is_behind() {
        let slow = Candidate { prefill: paced(3.0), decode: paced(3.0), ..candidate(0) };
        let fast = Candidate { prefill: paced(1.0), decode: paced(1.0), ..candidate(1) };
        assert_eq!(chosen(&[slow, Candidate { sequences: 40, ..fast }], &SMALL), 1);
        let behind = Candidate { tokens: 100_000.0, backlog: work(3.0, 0.0), ..fast };
        assert_eq!(chosen(&[slow, behind], &LARGE), 0);
        let later = chosen_at(&[(slow, 0), (fast, 0)], &SMALL, NOW + 60.0);
        assert_eq!(later, 0, "as good as unmeasured: in turn");
    }

    #[test]
    fn twice_the_weight_carries_twice_the_work() {
        let mut engines = [Candidate { weight: 2.0, ..candidate(0) }, candidate(1)];
        let mut counts = [0_u64; 2];
        for turn in 1..=300 {
            let at = chosen(&engines, &LARGE);
            counts[at] += 1;
            engines[at].tokens += LARGE.tokens() as f64;
            engines[at].granted = turn;
        }
        assert!((195..=205).contains(&counts[0]), "{counts:?}");
    }

    fn any_candidate() -> impl Strategy<Value = Candidate> {
        let loads = (0..300u32, 0..1_000_000u64, 0.0..30.0f64, 0.0..1.0f64, 0..50_000u64);
        (loads, 0.0..2.0f64, 0.1..10.0f64, 0.01..50.0f64, 0.01..50.0f64, 0..9u64).prop_map(
            |((sequences, tokens, large, small, small_tokens), interference, weight, decode, prefill, granted)| {
                let backlog = work(large, small);
                let (tokens, small_tokens) = (tokens as f64, small_tokens as f64);
                let load = Candidate { sequences, tokens, backlog, small_tokens, ..candidate(0) };
                Candidate { interference, weight, granted, decode: paced(decode), prefill: paced(prefill), ..load }
            },
        )
    }

    proptest! {
        /// More load on a backend never attracts a request that went elsewhere before.
        #[test]
        fn load_repels(
            mut engines in proptest::collection::vec(any_candidate(), 2..6),
            more in (0..50u32, 0..100_000u64, 0.0..2.0f64, 0.0..0.1f64, 0..2_000u64),
            need in (1..5u32, 1..40_000u64, 0..2_000u64),
            which in any::<proptest::sample::Index>(),
        ) {
            engines.iter_mut().enumerate().for_each(|(at, engine)| engine.id = BackendId::new(at));
            let need = Need { slots: need.0, prompt_tokens: need.1, output_tokens: need.2 };
            let loaded = which.index(engines.len());
            let before = chosen(&engines, &need);
            let engine = &mut engines[loaded];
            engine.sequences += more.0;
            engine.tokens += more.1 as f64;
            engine.backlog.large_until += more.2;
            engine.backlog.large_waiting += more.2;
            engine.backlog.small_until += more.3;
            engine.backlog.lately += more.3;
            engine.small_tokens += more.4 as f64;
            let after = chosen(&engines, &need);
            prop_assert!(after != loaded || before == loaded, "{before} {after} {loaded}");
        }
    }
}
