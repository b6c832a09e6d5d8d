//! Intervals that hold at all moments together. So an operator may watch an experiment all the time
//! and stop it at any time, without more errors than the confidence allows.
//!
//! An ordinary 95 % interval that is looked at after every request excludes the truth sooner or
//! later. A *confidence sequence* contains the truth at all times together with 95 %:
//!
//! - [`around`]: the interval for an estimate whose variance is estimated too;
//! - [`share`]: the interval for a share of events, exact for any number of events. [`excess`] is
//!   the one-sided form, against "at most p". [`quantile_ranks`] follows from it, because the share
//!   of values below the true quantile is known.
//!
//! Counts may be real numbers. If events come in clusters, the count is the number of events
//! divided by their design effect.

use statrs::function::beta::{beta_reg, ln_beta};

use super::Estimate;

/// An estimate with variance V = `variance`, itself estimated with n = `freedom` degrees of
/// freedom, at all times with `confidence` 1 - a. s = `effect`, above 0, is the size of effect that
/// is found soonest. Unbounded without a variance.
///
/// As requests come in, the estimate times its information 1/V behaves like a Brownian motion whose
/// drift is the true effect. Mixing the likelihood ratio over effects from N(0, s^2) gives, for
/// every V with probability 1 - a,
///
/// ```text
/// |estimate - truth| < sqrt(V (V + s^2) / s^2 (2 ln(1/a) + ln((V + s^2) / V)))
/// ```
///
/// (Robbins 1970; Johari, Pekelis, Walsh 2015; asymptotic: Waudby-Smith, Arbour, Sinha, Kennedy,
/// Ramdas 2021). For a small n, V is widened as Student's t widens an interval, by 1 + (z^2 + 1) /
/// 2n (Cornish and Fisher).
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

/// The variance at which the half-width of [`around`] is `wanted`. If the variance is inverse to
/// the number of requests, the number must grow by the current variance divided by this one.
pub fn variance_for(wanted: f64, freedom: f64, effect: f64, confidence: f64) -> f64 {
    let (mut low, mut high) = (0.0, wanted * wanted);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if reach(middle, freedom, effect, confidence) < wanted { low = middle } else { high = middle }
    }
    low
}

/// The interval for the true share of hits, given `hits` of `count` independent events, at all
/// times with `confidence`. With k hits of n and a mixture of all shares from 0 to 1, B(k + 1, n -
/// k + 1) / (p^k (1 - p)^(n - k)) exceeds 1/a with a probability of at most a if p is the truth
/// (Ville 1939; Robbins 1970).
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

/// ln of the evidence against a true share of `p`.
fn evidence(hits: f64, count: f64, p: f64) -> f64 {
    let term = |count: f64, p: f64| if count > 0.0 { count * p.ln() } else { 0.0 };
    ln_beta(hits + 1.0, count - hits + 1.0) - term(hits, p) - term(count - hits, 1.0 - p)
}

/// ln of the evidence that the true share is above `most`, given `hits` of `count` independent
/// events. If the true share is `most` or less, this exceeds ln(1/a) with a probability of at most
/// a, over all looks together. The mixture has the shares from `from` (`most` or more) to 1, so a
/// share above `from` is found soonest.
pub fn excess(hits: f64, count: f64, most: f64, from: f64) -> f64 {
    if count <= 0.0 || !(0.0..1.0).contains(&most) || !(most..1.0).contains(&from) {
        return 0.0;
    }
    let above = 1.0 - beta_reg(hits + 1.0, count - hits + 1.0, from);
    evidence(hits, count, most) + above.max(f64::MIN_POSITIVE).ln() - (1.0 - from).ln()
}

/// The ranks, as fractions of `count` sorted values, between which the true quantile `q` lies, at
/// all times with `confidence`.
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
        // The method promises at most 40 misses on average. An interval that never misses would be
        // too wide to be useful.
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
