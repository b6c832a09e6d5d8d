//! Intervals that hold at every moment at once: an experiment may be watched all the time and stopped at any time, without more
//! mistakes than promised.
//!
//! An ordinary 95 % interval that is looked at after every request excludes the truth sooner or later. A *confidence sequence*
//! contains the truth at all times together with 95 %. Two kinds:
//!
//! - [`around`] an estimate whose variance is estimated too. As requests come in, the estimate times its information 1/V
//!   behaves like a Brownian motion with the true effect as drift; mixing the likelihood ratio over effects from N(0, s^2) gives
//!   (Robbins 1970; Johari, Pekelis, Walsh 2015; asymptotic: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas 2021)
//!
//!   ```text
//!   |estimate - truth| < sqrt(V (V + s^2) / s^2 (2 ln(1/a) + ln((V + s^2) / V)))
//!   ```
//!
//!   for every V, with the probability 1 - a. s is the size of effect that is found soonest. An estimated variance with few
//!   degrees of freedom n widens it as Student's t does, by 1 + (z^2 + 1) / 2n (Cornish and Fisher).
//! - [`share`] of events of one kind, exact for any number of them: with k of n and the mixture of all shares from 0 to 1,
//!   B(k + 1, n - k + 1) / (p^k (1 - p)^(n - k)) exceeds 1/a with a probability of at most a, if p is the truth (Ville 1939;
//!   Robbins 1970). [`excess`] is the same against "at most p". From it follows [`quantile_ranks`], since the share of values
//!   below the true quantile is known.
//!
//! n and k may be real: the number of events over their design effect, where events come in clusters.

use statrs::function::beta::{beta_reg, ln_beta};

use super::Estimate;

/// An estimate with the variance `variance`, which was estimated with `freedom` degrees of freedom, at all times with
/// `confidence`. `effect` above 0 is the size of effect that is found soonest. Unbounded without a variance.
pub fn around(value: f64, variance: f64, freedom: f64, effect: f64, confidence: f64) -> Estimate {
    let reach = reach(variance, freedom, effect, confidence);
    Estimate { value, low: value - reach, high: value + reach }
}

fn reach(variance: f64, freedom: f64, effect: f64, confidence: f64) -> f64 {
    if !(variance > 0.0 && variance.is_finite() && freedom >= 1.0) {
        return f64::INFINITY;
    }
    let prior = effect * effect;
    let squared = |variance: f64| {
        let whole = variance + prior;
        variance * whole / prior * ((whole / variance).ln() - 2.0 * (1.0 - confidence).ln())
    };
    let z2 = squared(variance) / variance;
    squared(variance * (1.0 + (z2 + 1.0) / (2.0 * freedom))).sqrt()
}

/// The variance at which [`around`] reaches as far as `reach`: how much information a test of that size needs. For a variance
/// that shrinks with the number of requests, variance / this is how many times as many are needed.
pub fn variance_for(wanted: f64, freedom: f64, effect: f64, confidence: f64) -> f64 {
    let (mut low, mut high) = (0.0, wanted * wanted);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if reach(middle, freedom, effect, confidence) < wanted { low = middle } else { high = middle }
    }
    low
}

/// The share behind `hits` of `count` independent events, at all times with `confidence`.
pub fn share(hits: f64, count: f64, confidence: f64) -> Estimate {
    if count <= 0.0 {
        return Estimate { value: 0.5, low: 0.0, high: 1.0 };
    }
    let value = (hits / count).clamp(0.0, 1.0);
    let limit = -(1.0 - confidence).ln();
    let inside = |p: f64| evidence(hits, count, p) < limit;
    let bisect = |mut outside: f64, mut within: f64| {
        for _ in 0..60 {
            let middle = (outside + within) / 2.0;
            if inside(middle) { within = middle } else { outside = middle }
        }
        within
    };
    let low = if hits > 0.0 { bisect(0.0, value) } else { 0.0 };
    let high = if hits < count { bisect(1.0, value) } else { 1.0 };
    Estimate { value, low, high }
}

/// ln of the evidence against a share of `p`.
fn evidence(hits: f64, count: f64, p: f64) -> f64 {
    let term = |count: f64, p: f64| if count > 0.0 { count * p.ln() } else { 0.0 };
    ln_beta(hits + 1.0, count - hits + 1.0) - term(hits, p) - term(count - hits, 1.0 - p)
}

/// ln of the evidence that `hits` of `count` independent events are more than a share of `most`: above ln(1/a) with a
/// probability of at most a, whenever it is looked at, if the true share is `most` or less. Mixes shares from `from`, which
/// is `most` or more, to 1: a share above `from` is found soonest.
pub fn excess(hits: f64, count: f64, most: f64, from: f64) -> f64 {
    if count <= 0.0 || !(0.0..1.0).contains(&most) || !(most..1.0).contains(&from) {
        return 0.0;
    }
    let above = 1.0 - beta_reg(hits + 1.0, count - hits + 1.0, from);
    evidence(hits, count, most) + above.max(f64::MIN_POSITIVE).ln() - (1.0 - from).ln()
}

/// The ranks, as shares of `count` values in order, between which the true quantile `q` is, at all times with `confidence`.
pub fn quantile_ranks(q: f64, count: f64, confidence: f64) -> (f64, f64) {
    if count <= 0.0 {
        return (0.0, 1.0);
    }
    let limit = -(1.0 - confidence).ln();
    let bisect = |outside: f64| {
        let (mut outside, mut within) = (outside, q);
        if evidence(outside * count, count, q) < limit {
            return outside;
        }
        for _ in 0..60 {
            let middle = (outside + within) / 2.0;
            if evidence(middle * count, count, q) < limit { within = middle } else { outside = middle }
        }
        within
    };
    (bisect(0.0), bisect(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rng;

    #[test]
    fn a_share_is_covered_at_all_times_together() {
        let mut missed = [0; 3];
        for seed in 0..400u64 {
            for (index, truth) in [0.01, 0.3, 0.5].into_iter().enumerate() {
                let mut rng = Rng::new(Rng::new(seed * 3 + index as u64).next_u64());
                let mut hits = 0.0;
                let always = (1..=1_000).all(|count| {
                    hits += f64::from(u8::from(rng.unit() < truth));
                    count % 5 > 0 || share(hits, f64::from(count), 0.9).contains(truth)
                });
                missed[index] += i32::from(!always);
            }
        }
        // At most 40 are promised; the interval is conservative over a finite time. Without any misses it would be useless.
        assert!(missed.iter().all(|missed| (2..=40).contains(missed)), "{missed:?} of 400");
    }

    #[test]
    fn an_excess_is_seldom_found_where_there_is_none_and_soon_where_there_is() {
        let found = |seed: u64, truth: f64, from: f64| {
            let mut rng = Rng::new(Rng::new(seed).next_u64());
            let mut hits = 0.0;
            (1..=400).find(|count| {
                hits += f64::from(u8::from(rng.unit() < truth));
                excess(hits, f64::from(*count), 0.5, from) > f64::ln(20.0)
            })
        };
        let medians = [0.5, 0.8].map(|from| {
            let wrong = (0..1_000).filter(|seed| found(*seed, 0.5, from).is_some()).count();
            assert!((5..=50).contains(&wrong), "{wrong} of 1000");
            let below = (0..1_000).filter(|seed| found(*seed, 0.4, from).is_some()).count();
            assert!(below < wrong / 2, "{below} of 1000 below the share");
            let mut counts: Vec<i32> = (0..1_000).map(|seed| found(seed, 0.85, from).unwrap_or(i32::MAX)).collect();
            counts.sort_unstable();
            assert!(counts[500] < 30 && counts[990] < 100, "median {}, P99 {}", counts[500], counts[990]);
            counts[500]
        });
        assert!(medians[1] < medians[0], "a large share is found sooner where it is looked for: {medians:?}");
    }

    #[test]
    fn an_estimate_is_covered_at_all_times_together() {
        let missed = (0..400u64).filter(|seed| {
            let mut rng = Rng::new(Rng::new(*seed).next_u64());
            let (mut sum, mut squares) = (0.0, 0.0);
            !(1..=2_000).all(|count| {
                let value = rng.exponential();
                (sum, squares) = (sum + value, squares + value * value);
                let n = f64::from(count);
                let (mean, variance) = (sum / n, (squares / n - (sum / n) * (sum / n)) / (n - 1.0));
                count < 50 || around(mean, variance, n - 1.0, 0.2, 0.9).contains(1.0)
            })
        });
        let missed = missed.count();
        assert!((2..=40).contains(&missed), "{missed} of 400");
        assert!(!around(1.0, 0.0, 9.0, 0.1, 0.95).is_bounded());
        let (few, many) = (around(0.0, 0.01, 5.0, 0.1, 0.95), around(0.0, 0.01, 5_000.0, 0.1, 0.95));
        assert!(few.high > 1.3 * many.high, "few degrees of freedom widen it");
    }

    #[test]
    fn a_quantile_is_covered_at_all_times_together() {
        let missed = (0..400u64).filter(|seed| {
            let mut rng = Rng::new(Rng::new(*seed).next_u64());
            let mut below = 0.0;
            !(1..=1_000).all(|count| {
                below += f64::from(u8::from(rng.unit() < 0.95));
                let (low, high) = quantile_ranks(0.95, f64::from(count), 0.9);
                count % 5 > 0 || (low..=high).contains(&(below / f64::from(count)))
            })
        });
        let missed = missed.count();
        assert!((2..=40).contains(&missed), "{missed} of 400");
    }

    #[test]
    fn the_variance_for_a_reach_gives_that_reach() {
        for wanted in [0.02, 0.05, 0.5] {
            let variance = variance_for(wanted, 63.0, 0.1, 0.99);
            assert!((around(0.0, variance, 63.0, 0.1, 0.99).high - wanted).abs() < 1e-9);
        }
    }
}
