//! The pace of an engine: the time that the work took, divided by the time that the reference
//! expects for this work. Both are sums in which older observations weigh less.
//!
//! The reference accounts for the load (`cost.rs`), so equal engines have about the same pace
//! however busy they are. Differences up to [`NOISE`] count as none, so work goes to the emptier of
//! two equal engines, not to the luckier.
//!
//! A pace ages, because a backend that was once slow gets few requests and so few observations.
//! Without observations, the difference from the fastest falls to half after [`HALF_LIFE`], and
//! past observations weigh less in the next one. After [`FORGOTTEN`] the engine counts as
//! unmeasured. An unmeasured engine counts as the fastest, so it gets a request and is measured
//! again.

use std::time::Duration;

use tokio::time::Instant;

/// Weight that earlier observations keep at each new one: about the last twenty count.
const KEEP: f64 = 0.95;
/// One observation counts as at most this factor above or below the known pace, so that a single
/// outlier cannot starve an engine.
const ODD: f64 = 8.0;
/// No backend counts as slower than the fastest by more than this factor.
const SPREAD_MAX: f64 = 8.0;
/// Differences below this factor are noise.
const NOISE: f64 = 1.25;
/// The time after which an unobserved engine's difference from the fastest counts half.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// The time after which an unobserved engine counts as unmeasured.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// The pace of one engine at one kind of work; 2 is twice as long as the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    observed: f64,
    expected: f64,
    /// Ratio of the two sums; 0 before the first observation.
    ratio: f64,
    at: Option<Instant>,
}

impl Pace {
    /// Records that work for which the reference needs `expected` seconds took `observed` seconds.
    /// Ignored unless both are finite and above 0.
    pub fn observe(&mut self, observed: f64, expected: f64, now: Instant) {
        if !(observed.is_finite() && expected.is_finite() && observed > 0.0 && expected > 0.0) {
            return;
        }
        let age = self.at.map_or(FORGOTTEN, |at| now.saturating_duration_since(at));
        if age >= FORGOTTEN {
            *self = Self::default();
        }
        // Old observations weigh less. Otherwise the one request that an engine gets after the pace
        // has aged would make all of them count again.
        let keep = KEEP * 0.5_f64.powf(age.as_secs_f64() / HALF_LIFE.as_secs_f64());
        let known = self.ratio().unwrap_or(observed / expected);
        let likely = (expected * known / ODD, expected * known * ODD);
        self.observed = keep * self.observed + observed.clamp(likely.0, likely.1);
        self.expected = keep * self.expected + expected;
        self.ratio = self.observed / self.expected;
        self.at = Some(now);
    }

    /// Observed time divided by expected time; `None` before the first observation.
    pub fn ratio(&self) -> Option<f64> {
        (self.ratio > 0.0).then_some(self.ratio)
    }

    /// Like [`Pace::ratio`] at the time `now`: `None` also if the last observation is
    /// [`FORGOTTEN`].
    pub fn ratio_at(&self, now: Instant) -> Option<f64> {
        self.ratio().filter(|_| self.at.is_some_and(|at| now.saturating_duration_since(at) < FORGOTTEN))
    }

    /// The pace as policies see it, with times in seconds since `epoch`.
    pub fn seen(&self, epoch: Instant) -> SeenPace {
        let at = self.at.map_or(0.0, |at| at.saturating_duration_since(epoch).as_secs_f64());
        SeenPace { ratio: self.ratio().unwrap_or(f64::INFINITY), at }
    }
}

/// The pace of one engine at one kind of work, as of the last observation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeenPace {
    /// Infinite without an observation.
    ratio: f64,
    /// When the pace was last observed, seconds.
    at: f64,
}

impl Default for SeenPace {
    fn default() -> Self {
        Self { ratio: f64::INFINITY, at: 0.0 }
    }
}

impl SeenPace {
    /// The pace that counts at `now`. `fastest` is the pace of the fastest engine.
    #[inline]
    pub(super) fn factor(self, fastest: f64, now: f64) -> f64 {
        // The usual case: engines of a pool are alike.
        if self.ratio < fastest * NOISE { fastest } else { self.slower(fastest, now) }
    }

    #[cold]
    fn slower(self, fastest: f64, now: f64) -> f64 {
        let age = (now - self.at).max(0.0);
        if self.ratio.is_infinite() || age >= FORGOTTEN.as_secs_f64() {
            return fastest;
        }
        let slower = self.ratio.min(fastest * SPREAD_MAX) - fastest;
        let aged = fastest + slower / (1.0 + age / HALF_LIFE.as_secs_f64());
        if aged < fastest * NOISE { fastest } else { aged }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Fastest(f64);

impl Default for Fastest {
    fn default() -> Self {
        Self(f64::INFINITY)
    }
}

impl Fastest {
    pub(super) fn add(&mut self, pace: SeenPace) {
        if pace.ratio < self.0 {
            self.0 = pace.ratio;
        }
    }

    /// The smallest pace; 1 if none was measured.
    pub(super) fn ratio(self) -> f64 {
        if self.0 < f64::INFINITY { self.0 } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paced(ratio: f64, now: Instant) -> Pace {
        let mut pace = Pace::default();
        (0..100).for_each(|_| pace.observe(ratio, 1.0, now));
        pace
    }

    /// The pace that counts at `now`, next to an engine with the pace `fastest`.
    fn factor(pace: &Pace, fastest: f64, now: Instant) -> f64 {
        let epoch = now - Duration::from_secs(3_600);
        pace.seen(epoch).factor(fastest, (now - epoch).as_secs_f64())
    }

    #[test]
    fn equal_engines_count_as_equal_and_slower_ones_as_slower() {
        let now = Instant::now();
        assert_eq!(factor(&paced(1.2, now), 1.0, now), 1.0, "noise");
        assert!((factor(&paced(3.0, now), 1.0, now) - 3.0).abs() < 1e-9);
        assert_eq!(factor(&paced(100.0, now), 1.0, now), SPREAD_MAX);
        assert_eq!(factor(&Pace::default(), 2.0, now), 2.0, "unmeasured: as the fastest");
        let paces = [Pace::default(), paced(3.0, now), paced(2.0, now)].map(|pace| pace.seen(now));
        let mut fastest = Fastest::default();
        fastest.add(paces[0]);
        assert_eq!(fastest.ratio(), 1.0, "none is measured");
        paces.into_iter().for_each(|pace| fastest.add(pace));
        assert!((fastest.ratio() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_not_observed_is_forgotten() {
        let now = Instant::now();
        let slow = paced(5.0, now);
        assert!((factor(&slow, 1.0, now + HALF_LIFE) - 3.0).abs() < 1e-9);
        assert_eq!(factor(&slow, 1.0, now + FORGOTTEN), 1.0);
        let mut again = slow;
        again.observe(1.0, 1.0, now + FORGOTTEN);
        assert_eq!(again.ratio(), Some(1.0), "after a pause the past says little");
    }

    /// A backend that was slow for a while gets a request now and then. It must not need twenty
    /// requests to be known as fast again.
    #[test]
    fn a_slow_past_counts_less_the_older_it_is() {
        let now = Instant::now();
        let mut pace = paced(5.0, now);
        for request in 1..=4 {
            pace.observe(1.0, 1.0, now + request * 2 * HALF_LIFE);
        }
        assert!(pace.ratio().unwrap() < NOISE, "{pace:?}");
        assert_eq!(pace.ratio_at(now + 9 * HALF_LIFE), pace.ratio());
        assert_eq!(pace.ratio_at(now + 8 * HALF_LIFE + FORGOTTEN), None);
    }

    #[test]
    fn one_odd_observation_counts_little_and_an_impossible_one_not_at_all() {
        let now = Instant::now();
        let mut pace = paced(1.0, now);
        pace.observe(1e9, 1.0, now);
        assert!(pace.ratio().unwrap() < 1.5, "{pace:?}");
        let before = pace;
        for (observed, expected) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (f64::INFINITY, 1.0), (-1.0, 1.0)] {
            pace.observe(observed, expected, now);
        }
        assert_eq!(pace, before);
    }

    #[test]
    fn an_engine_that_becomes_three_times_slower_is_known_within_twenty_requests() {
        let now = Instant::now();
        let mut pace = paced(1.0, now);
        (0..20).for_each(|_| pace.observe(3.0, 1.0, now));
        assert!(factor(&pace, 1.0, now) > 2.0, "{pace:?}");
    }
}
