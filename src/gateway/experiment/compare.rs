//! Two arms beside each other: how many times as slow, how many times as many failures, and whether the mix is right.
//!
//! Everything here is valid at every moment (see [`always_valid`]). The assumption is that arms are drawn independently for each
//! unit. Then, if the arms do not differ, the labels say nothing about what was measured, however heavy the tails are and
//! however much requests that run at the same time have in common: a wave of load reaches all arms, and which requests it
//! hits is chance. Only requests of one unit share their label, so the spread is taken between groups of units, each of
//! which is in one piece.
//!
//! - *How many times as slow*: within each length class the difference of the means of logarithms, averaged over the classes
//!   with the share of both arms' requests in each (post-stratification), so that unequal mixes do not decide. Its variance is
//!   that of the sum over groups of their parts in it (linearization).
//! - *How many times as many*: if the arms do not differ, the second arm has the same share of the failures as of the
//!   requests. Exact for rare events, and without a model of how often they happen. If failures of one unit come
//!   together, they count less, by the design effect: the variance between groups over that of independent failures.
//! - *The mix*: the share of requests in each arm against the configured share (sample ratio mismatch), by the same test.

use sluice_core::stats::{Estimate, always_valid};

use super::counts::Counts;
use super::ledger::{ArmLedger, ByClass, CLASSES, Quantity};
use super::quality::Quality;
use super::unit::GROUPS;

/// Groups with values that an arm must have before anything is said.
const GROUPS_MIN: usize = 12;
/// Values that an arm must have before anything is said: the logarithms of that many are normal enough on average.
const VALUES_MIN: f64 = 100.0;
/// How many times as often as in the control is found soonest by [`Pair::surge`]: an arm that is broken fails that often.
const SEVERAL: f64 = 4.0;

/// The second arm over the first, minus 1, with the variance of its logarithm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// The change. Unbounded while there are too few values.
    pub change: Estimate,
    /// Variance of the logarithm of the ratio.
    pub variance: f64,
    /// Degrees of freedom of the variance.
    pub freedom: f64,
}

/// Two arms, and how they are compared.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// The control.
    pub control: &'a ArmLedger,
    /// The other arm.
    pub arm: &'a ArmLedger,
    /// Whether a unit may have several requests, which may have something in common.
    pub clustered: bool,
    /// Confidence of each single interval, at all times.
    pub confidence: f64,
    /// The second arm's share of the units of both, as configured; `None`: every request is a unit, or units are in both arms.
    pub share: Option<f64>,
}

impl Pair<'_> {
    /// The ratio of a quantity. `effect`: the size that is found soonest.
    pub fn ratio(&self, quantity: Quantity, effect: f64) -> Ratio {
        let [control, arm] = [self.control, self.arm].map(|ledger| &ledger.quantities[quantity as usize]);
        ratio(control, arm, effect, self.confidence)
    }

    /// How often requests fail.
    pub fn failures(&self) -> Rates {
        self.rates((&self.control.failed, &self.control.ended), (&self.arm.failed, &self.arm.ended))
    }

    /// ln of the evidence that requests fail more often than in the control, where [`SEVERAL`] times as often is found soonest.
    /// Where a unit has several requests, units with a failure are counted: each is in the arm with its configured share,
    /// whatever its requests have in common.
    pub fn surge(&self) -> f64 {
        let (arm, both, expected) = match self.share {
            Some(share) => {
                let [control, arm] = [self.control, self.arm].map(|ledger| ledger.failed_units.count());
                (arm, control + arm, share)
            }
            // Copies are in both arms.
            None if self.clustered => return self.failures().evidence,
            None => {
                let [control, arm] =
                    [self.control, self.arm].map(|ledger| (ledger.failed.total(), ledger.ended.total()));
                (arm.0, control.0 + arm.0, arm.1 / (control.1 + arm.1))
            }
        };
        always_valid::excess(arm, both, expected, SEVERAL * expected / (SEVERAL * expected + 1.0 - expected))
    }

    /// How often requests miss their objectives.
    pub fn misses(&self) -> Rates {
        self.rates((&self.control.missed, &self.control.judged), (&self.arm.missed, &self.arm.judged))
    }

    /// How often answers are cut off, refused, and rated as bad.
    pub fn quality(&self) -> [Rates; 3] {
        type Events = fn(&Quality) -> (&Counts, &Counts);
        let events: [Events; 3] = [
            |quality| (&quality.truncated, &quality.answers),
            |quality| (&quality.refused, &quality.answers),
            |quality| (&quality.bad, &quality.rated),
        ];
        events.map(|of| self.rates(of(&self.control.quality), of(&self.arm.quality)))
    }

    /// The share of both arms' requests that is in the second, of all that were assigned: those that have ended would have fewer
    /// of the arm that takes longer.
    pub fn mix(&self) -> Estimate {
        let (control, arm) = (&self.control.assigned, &self.arm.assigned);
        let (one, other) = (control.total(), arm.total());
        let share = other / (one + other);
        let effect = if self.clustered { of_units(control, arm, share) } else { 1.0 };
        always_valid::share(other / effect, (one + other) / effect, self.confidence)
    }

    /// How often an event happens. For control and arm: requests with the event, and all that could have it.
    fn rates(&self, control: (&Counts, &Counts), arm: (&Counts, &Counts)) -> Rates {
        let [(events, all), (arm_events, arm_all)] = [control, arm].map(|(events, all)| (events.total(), all.total()));
        let expected = arm_all / (all + arm_all);
        let effect = if self.clustered { together([control, arm]) } else { 1.0 };
        let (hits, count) = (arm_events / effect, (events + arm_events) / effect);
        // Whether events of a unit come together is known from units that have some.
        let is_early = self.clustered && control.0.groups_with(arm.0) < GROUPS_MIN;
        let share = always_valid::share(hits, count, self.confidence);
        // A share s of the events in the arm: s / (1 - s) times as many, for as many requests in both.
        let times = |share: f64| share / (1.0 - share) * (1.0 - expected) / expected;
        let rate = |events: f64, all: f64| if all > 0.0 { events / all } else { 0.0 };
        Rates {
            control: rate(events, all),
            arm: rate(arm_events, arm_all),
            times: Estimate { value: times(share.value), low: times(share.low), high: times(share.high) },
            evidence: if is_early { 0.0 } else { always_valid::excess(hits, count, expected, expected) },
        }
    }
}

fn ratio(control: &ByClass, arm: &ByClass, effect: f64, confidence: f64) -> Ratio {
    let weights = weights(control, arm);
    let (mut log, mut variance, mut freedom) = (0.0, 0.0, f64::INFINITY);
    let mut enough = true;
    for (side, sign) in [(control, -1.0), (arm, 1.0)] {
        let (mean, own, groups) = weighted_mean(side, &weights);
        log += sign * mean;
        variance += own;
        freedom = freedom.min(groups as f64 - 1.0);
        enough &= groups >= GROUPS_MIN && side.count() >= VALUES_MIN;
    }
    let Estimate { value, low, high } = if enough {
        always_valid::around(log, variance, freedom, effect, confidence)
    } else {
        Estimate { value: log, low: f64::NEG_INFINITY, high: f64::INFINITY }
    };
    let change = Estimate { value: value.exp_m1(), low: low.exp_m1(), high: high.exp_m1() };
    Ratio { change, variance, freedom }
}

/// The weight of each length class: its share of the requests of both arms, among classes that both have.
fn weights(control: &ByClass, arm: &ByClass) -> [f64; CLASSES] {
    let counts: [f64; CLASSES] = std::array::from_fn(|class| {
        let (one, other) = (control.0[class].total.0, arm.0[class].total.0);
        if one > 0.0 && other > 0.0 { one + other } else { 0.0 }
    });
    let all: f64 = counts.iter().sum();
    counts.map(|count| if all > 0.0 { count / all } else { 0.0 })
}

/// The mean of logarithms with these weights of the classes, its variance, and the number of groups with values.
fn weighted_mean(side: &ByClass, weights: &[f64; CLASSES]) -> (f64, f64, usize) {
    let mut whole = 0.0;
    let mut parts = [0.0; GROUPS];
    let mut used = [false; GROUPS];
    for (sums, weight) in side.0.iter().zip(weights).filter(|(_, weight)| **weight > 0.0) {
        let (count, sum) = sums.cells.iter().fold((0.0, 0.0), |(count, sum), cell| (count + cell.0, sum + cell.1));
        let mean = sum / count;
        whole += weight * mean;
        for (group, cell) in sums.cells.iter().enumerate() {
            parts[group] += weight / count * (cell.1 - mean * cell.0);
            used[group] |= cell.0 > 0.0;
        }
    }
    let groups = used.iter().filter(|used| **used).count();
    let spread: f64 = parts.iter().map(|part| part * part).sum();
    let variance = if groups > 1 { spread * groups as f64 / (groups - 1) as f64 } else { f64::NAN };
    (whole, variance, groups)
}

/// How often something happens in two arms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Share of the control's requests.
    pub control: f64,
    /// Share of the arm's requests.
    pub arm: f64,
    /// How many times as often as in the control, at all times.
    pub times: Estimate,
    /// ln of the evidence that it is more often than in the control.
    pub evidence: f64,
}

/// How many events are worth one independent event, since those of one unit may come together: the variance, between groups, of
/// what they have beyond the rate times their requests, over that of independent events (index of dispersion). 1 or more. One
/// number for both arms: by chance one of them may have small units only. Each side: the events and all requests.
fn together(sides: [(&Counts, &Counts); 2]) -> f64 {
    let (mut variance, mut independent) = (0.0, 0.0);
    for (events, all) in sides {
        let (count, rate) = (events.total(), events.total() / all.total());
        if count <= 0.0 {
            continue;
        }
        let groups = all.groups() as f64;
        let spread: f64 = events.0.iter().zip(&all.0).map(|(one, all)| (one - rate * all).powi(2)).sum();
        // A single group shows nothing: as if all were of one unit.
        variance += if groups > 1.0 { spread * groups / (groups - 1.0) } else { count * count };
        independent += count;
    }
    if independent > 0.0 { (variance / independent).max(1.0) } else { 1.0 }
}

/// How many requests are worth one independent request, since those of one unit are in one arm: the variance, between
/// groups, of the arm's requests beyond its share, over what independent requests would have. 1 or more.
fn of_units(control: &Counts, arm: &Counts, share: f64) -> f64 {
    if !(share > 0.0 && share < 1.0) {
        // One arm has none: the groups of the other show whether its events come together.
        return dispersion(if share > 0.0 { arm } else { control });
    }
    let events = control.total() + arm.total();
    let spread: f64 = control.0.iter().zip(&arm.0).map(|(one, other)| (other - share * (one + other)).powi(2)).sum();
    (spread / (share * (1.0 - share) * events)).max(1.0)
}

/// Variance over mean of the counts of groups, which is 1 for independent events. 1 or more.
fn dispersion(counts: &Counts) -> f64 {
    let mean = counts.total() / GROUPS as f64;
    let spread: f64 = counts.0.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / (GROUPS - 1) as f64;
    if mean > 0.0 { (spread / mean).max(1.0) } else { 1.0 }
}

/// The quantile `q` of a quantity, to 5 %, at all times with `confidence`. Unbounded where there is too little.
pub fn quantile(ledger: &ArmLedger, quantity: Quantity, q: f64, clustered: bool, confidence: f64) -> Option<Estimate> {
    let values = &ledger.quantities[quantity as usize];
    let value = values.value_at(q)?;
    let count = values.count() / if clustered { clustering(values) } else { 1.0 };
    let (low, high) = always_valid::quantile_ranks(q, count, confidence);
    let low = if low <= 0.0 { Some(0.0) } else { values.value_at(low) };
    let high = if high >= 1.0 { None } else { values.value_at(high) };
    Some(Estimate { value, low: low.unwrap_or(0.0).min(value), high: high.unwrap_or(f64::INFINITY).max(value) })
}

/// How many values are worth one independent value, because values of one unit have something in common. 1 or more.
fn clustering(values: &ByClass) -> f64 {
    let weights = weights(values, values);
    let (_, variance, groups) = weighted_mean(values, &weights);
    let independent: f64 = values
        .0
        .iter()
        .zip(weights)
        .filter(|(_, weight)| *weight > 0.0)
        .map(|(sums, weight)| {
            let (count, sum) = sums.cells.iter().fold((0.0, 0.0), |(count, sum), cell| (count + cell.0, sum + cell.1));
            weight * weight * (sums.squares / count - (sum / count).powi(2)).max(0.0) / count
        })
        .sum();
    let effect = variance / independent;
    if groups > 1 && effect.is_finite() { effect.max(1.0) } else { 1.0 }
}
