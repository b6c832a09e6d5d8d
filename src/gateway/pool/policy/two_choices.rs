//! Two choices: of two random backends the one with fewer requests in flight, as nginx's
//! `random two least_conn`.
//!
//! Backends are drawn by weight, and requests count relative to weight. This is nearly as even as
//! comparing all backends, without herding on stale figures (Mitzenmacher, "The power of two
//! choices in randomized load balancing", 2001). On a tie, the backend that was drawn first wins.

use super::candidate::Offer;
use super::fewest_requests::share;
use sluice_core::base::{BackendId, Rng};

pub(super) fn pick(offers: &[Offer<'_>], rng: &mut Rng) -> Option<BackendId> {
    let first = draw(offers, None, rng)?;
    let second = draw(offers, Some(first), rng).unwrap_or(first);
    let [first, second] = [first, second].map(|drawn| offers[drawn].candidate);
    Some(if share(second) < share(first) { second.id } else { first.id })
}

/// The position of a random backend other than `drawn`.
fn draw(offers: &[Offer<'_>], drawn: Option<usize>, rng: &mut Rng) -> Option<usize> {
    let others = || offers.iter().enumerate().filter(|(position, _)| Some(*position) != drawn);
    let mut left = rng.unit() * others().map(|(_, offer)| offer.candidate.weight).sum::<f64>();
    let mut last = None;
    for (position, offer) in others() {
        last = Some(position);
        left -= offer.candidate.weight;
        if left < 0.0 {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::super::Candidate;
    use super::*;
    use crate::pool::adapters::AdapterPlace;

    /// How often each backend, given by weight and requests in flight, is chosen in 3,000 choices.
    fn chosen<const N: usize>(backends: [(f64, u32); N]) -> [u32; N] {
        let candidate =
            |at: usize| Candidate { weight: backends[at].0, requests: backends[at].1, ..Candidate::idle(at) };
        let candidates: Vec<Candidate> = (0..N).map(candidate).collect();
        let offers: Vec<Offer<'_>> =
            candidates.iter().map(|candidate| Offer { candidate, cached: 0.0, adapter: AdapterPlace::Ready }).collect();
        let (mut rng, mut counts) = (Rng::new(7), [0; N]);
        for _ in 0..3_000 {
            counts[pick(&offers, &mut rng).expect("there are candidates").index()] += 1;
        }
        counts
    }

    #[test]
    fn of_two_random_ones_the_one_with_fewer_requests_is_chosen() {
        let [few, more, most] = chosen([(1.0, 5), (1.0, 10), (1.0, 1_000)]);
        assert_eq!(most, 0);
        assert!((900..1_100).contains(&more) && few + more == 3_000, "one draw in three leaves out the best: {more}");
        assert_eq!(chosen([(1.0, 9)]), [3_000], "the only one");
    }

    #[test]
    fn equal_ones_are_drawn_by_weight_and_requests_count_in_relation_to_it() {
        let [heavy, light] = chosen([(3.0, 0), (1.0, 0)]);
        assert!((2_150..2_350).contains(&heavy), "{heavy} {light}");
        assert_eq!(chosen([(3.0, 5), (1.0, 2)]), [3_000, 0]);
    }
}
