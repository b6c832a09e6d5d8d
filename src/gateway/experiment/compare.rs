//! Compares two arms: how many times as slow and as often failing the second is, and whether the
//! mix is right.
//!
//! All intervals are valid at every moment ([`always_valid`]), on one assumption: arms are drawn
//! independently for each unit. If the arms do not differ, the labels say nothing about the
//! measurements, however heavy the tails are and however correlated concurrent requests are. Only
//! requests of one unit share a label, so the variance is taken between groups of whole units.
//!
//! - [`Pair::ratio`]: the difference of the means of logarithms, by class and length
//!   (post-stratification).
//! - [`Pair::failures`]: if the arms do not differ, an arm has the same share of failures as of
//!   requests. This is exact for rare events. Failures of the same unit count less, by the design
//!   effect, which is the variance between groups over the variance of independent failures.
//! - [`Pair::mix`]: the share of requests in each arm (sample ratio mismatch), by the same test.

use sluice_core::stats::{Estimate, always_valid};

use super::counts::Counts;
use super::ledger::{ArmLedger, ByStratum, Quantity, STRATA};
use super::quality::Quality;
use super::unit::GROUPS;

/// Groups with values that an arm must have before it is judged.
const GROUPS_MIN: usize = 12;
/// Values that an arm must have before it is judged, because the mean of that many logarithms is
/// nearly normal.
const VALUES_MIN: f64 = 100.0;
/// The failure ratio that [`Pair::surge`] detects soonest.
const SEVERAL: f64 = 4.0;

/// The second arm over the first, minus 1, with the variance of the ratio's logarithm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// The change; unbounded while there are too few values.
    pub change: Estimate,
    /// Variance of the logarithm of the ratio.
    pub variance: f64,
    /// Degrees of freedom of the variance.
    pub freedom: f64,
}

/// Two arms, and how to compare them.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// The control.
    pub control: &'a ArmLedger,
    /// The other arm.
    pub arm: &'a ArmLedger,
    /// Whether a unit may have several requests, which may be correlated.
    pub clustered: bool,
    /// Confidence of each single interval, at all times.
    pub confidence: f64,
    /// The configured share of the second arm in the units of both arms; `None`: every request is a
    /// unit, or units are in both arms.
    pub share: Option<f64>,
}

impl Pair<'_> {
    /// The ratio of a quantity. `effect`: the change that is detected soonest. Within each stratum,
    /// takes the difference of the means of logarithms; averages the strata, weighted by the
    /// requests of both arms, so that unequal mixes do not decide. The variance comes from the
    /// spread of the groups' contributions to that average (linearization). It is scaled up for the
    /// degrees of freedom that the means of the strata take, since a stratum of one request has no
    /// variance.
    pub fn ratio(&self, quantity: Quantity, effect: f64) -> Ratio {
        let [control, arm] = [self.control, self.arm].map(|ledger| &ledger.quantities[quantity as usize]);
        ratio(control, arm, effect, self.confidence)
    }

    /// The failure rates of both arms.
    pub fn failures(&self) -> Rates {
        self.rates((&self.control.failed, &self.control.ended), (&self.arm.failed, &self.arm.ended))
    }

    /// ln of the evidence that the arm fails more often than the control. Where a unit has several
    /// requests, units with a failure are counted, because the configured share is the probability
    /// that such a unit is in the arm, however correlated its requests are.
    pub fn surge(&self) -> f64 {
        let (arm, both, expected) = match self.share {
            Some(share) => {
                let [control, arm] = [self.control, self.arm].map(|ledger| ledger.failed_units.count());
                (arm, control + arm, share)
            }
            // For copies, each unit is in both arms.
            None if self.clustered => return self.failures().evidence,
            None => {
                let [control, arm] =
                    [self.control, self.arm].map(|ledger| (ledger.failed.total(), ledger.ended.total()));
                (arm.0, control.0 + arm.0, arm.1 / (control.1 + arm.1))
            }
        };
        always_valid::excess(arm, both, expected, SEVERAL * expected / (SEVERAL * expected + 1.0 - expected))
    }

    /// The rates of missed objectives in both arms.
    pub fn misses(&self) -> Rates {
        self.rates((&self.control.missed, &self.control.judged), (&self.arm.missed, &self.arm.judged))
    }

    /// The rates of answers that are cut off, refused, and rated as bad.
    pub fn quality(&self) -> [Rates; 3] {
        type Events = fn(&Quality) -> (&Counts, &Counts);
        let events: [Events; 3] = [
            |quality| (&quality.truncated, &quality.answers),
            |quality| (&quality.refused, &quality.answers),
            |quality| (&quality.bad, &quality.rated),
        ];
        events.map(|of| self.rates(of(&self.control.quality), of(&self.arm.quality)))
    }

    /// The share of the arm in the assigned requests of both arms; finished requests would
    /// underrepresent the slower arm.
    pub fn mix(&self) -> Estimate {
        let (control, arm) = (&self.control.assigned, &self.arm.assigned);
        let (one, other) = (control.total(), arm.total());
        let share = other / (one + other);
        let effect = if self.clustered { of_units(control, arm, share) } else { 1.0 };
        always_valid::share(other / effect, (one + other) / effect, self.confidence)
    }

    /// The rates of an event. Each side has the events, and all requests that could have the event.
    fn rates(&self, control: (&Counts, &Counts), arm: (&Counts, &Counts)) -> Rates {
        let [(events, all), (arm_events, arm_all)] = [control, arm].map(|(events, all)| (events.total(), all.total()));
        let expected = arm_all / (all + arm_all);
        let effect = if self.clustered { together([control, arm]) } else { 1.0 };
        let (hits, count) = (arm_events / effect, (events + arm_events) / effect);
        // Only units with events show whether events come in clusters.
        let is_early = self.clustered && control.0.groups_with(arm.0) < GROUPS_MIN;
        let share = always_valid::share(hits, count, self.confidence);
        // If both arms had the same number of requests, an arm with the share s of all events would
        // have s / (1 - s) times the events of the control.
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

fn ratio(control: &ByStratum, arm: &ByStratum, effect: f64, confidence: f64) -> Ratio {
    let weights = weights(control, arm);
    let (mut log, mut variance, mut freedom) = (0.0, 0.0, f64::INFINITY);
    let mut enough = true;
    for (side, sign) in [(control, -1.0), (arm, 1.0)] {
        let (mean, own, groups) = weighted_mean(side, &weights);
        log += sign * mean;
        let (count, strata) = (side.count(), weights.iter().filter(|weight| **weight > 0.0).count() as f64);
        variance += own * count / (count - strata);
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

/// The weight of each stratum that both arms have: the share of both arms' requests that are in it.
fn weights(control: &ByStratum, arm: &ByStratum) -> [f64; STRATA] {
    let mut counts = [0.0; STRATA];
    for (stratum, sums) in control.all() {
        let other = arm.all().find(|(other, _)| *other == stratum).map_or(0.0, |(_, other)| other.total.0);
        if other > 0.0 {
            counts[stratum] = sums.total.0 + other;
        }
    }
    let all: f64 = counts.iter().sum();
    counts.map(|count| if all > 0.0 { count / all } else { 0.0 })
}

/// The weighted mean of logarithms over strata, its variance, and the number of groups with values.
fn weighted_mean(side: &ByStratum, weights: &[f64; STRATA]) -> (f64, f64, usize) {
    let mut whole = 0.0;
    let mut parts = [0.0; GROUPS];
    let mut used = [false; GROUPS];
    for (stratum, sums) in side.all().filter(|(stratum, _)| weights[*stratum] > 0.0) {
        let weight = weights[stratum];
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

/// The rates of an event in two arms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Share of the control's requests that have the event.
    pub control: f64,
    /// Share of the arm's requests that have the event.
    pub arm: f64,
    /// The arm's rate over the control's, with an interval that is valid at all times.
    pub times: Estimate,
    /// ln of the evidence that the arm's rate is higher.
    pub evidence: f64,
}

/// How many events are worth one independent event, because a unit may have several. It is the
/// variance between groups of the events beyond rate times requests, over the variance of
/// independent events (index of dispersion), at least 1. Both arms get one number, because by
/// chance one of them may have only small units. Each side has the events and all requests.
fn together(sides: [(&Counts, &Counts); 2]) -> f64 {
    let (mut variance, mut independent) = (0.0, 0.0);
    for (events, all) in sides {
        let (count, rate) = (events.total(), events.total() / all.total());
        if count <= 0.0 {
            continue;
        }
        let groups = all.groups() as f64;
        let spread: f64 = events.0.iter().zip(&all.0).map(|(one, all)| (one - rate * all).powi(2)).sum();
        // A single group shows nothing, so all events are taken to be of one unit.
        variance += if groups > 1.0 { spread * groups / (groups - 1.0) } else { count * count };
        independent += count;
    }
    if independent > 0.0 { (variance / independent).max(1.0) } else { 1.0 }
}

/// How many requests are worth one independent request, because all requests of a unit are in one
/// arm. It is the variance between groups of the arm's requests beyond its share, over the variance
/// of independent requests, at least 1.
fn of_units(control: &Counts, arm: &Counts, share: f64) -> f64 {
    if !(share > 0.0 && share < 1.0) {
        // The groups of the other arm show whether requests come in clusters.
        return dispersion(if share > 0.0 { arm } else { control });
    }
    let events = control.total() + arm.total();
    let spread: f64 = control.0.iter().zip(&arm.0).map(|(one, other)| (other - share * (one + other)).powi(2)).sum();
    (spread / (share * (1.0 - share) * events)).max(1.0)
}

/// The variance of the counts of groups over their mean, and at least 1, which is the value for
/// independent events.
fn dispersion(counts: &Counts) -> f64 {
    let mean = counts.total() / GROUPS as f64;
    let spread: f64 = counts.0.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / (GROUPS - 1) as f64;
    if mean > 0.0 { (spread / mean).max(1.0) } else { 1.0 }
}

/// The quantile `q` of a quantity, to 5 %, with an interval that is valid at all times with
/// `confidence`, and unbounded where values are too few.
pub fn quantile(ledger: &ArmLedger, quantity: Quantity, q: f64, clustered: bool, confidence: f64) -> Option<Estimate> {
    let values = &ledger.quantities[quantity as usize];
    let value = values.value_at(q)?;
    let count = values.count() / if clustered { clustering(values) } else { 1.0 };
    let (low, high) = always_valid::quantile_ranks(q, count, confidence);
    let low = if low <= 0.0 { Some(0.0) } else { values.value_at(low) };
    let high = if high >= 1.0 { None } else { values.value_at(high) };
    Some(Estimate { value, low: low.unwrap_or(0.0).min(value), high: high.unwrap_or(f64::INFINITY).max(value) })
}

/// How many values are worth one independent value, because values of one unit are correlated; at
/// least 1.
fn clustering(values: &ByStratum) -> f64 {
    let weights = weights(values, values);
    let (_, variance, groups) = weighted_mean(values, &weights);
    let independent: f64 = values
        .all()
        .map(|(stratum, sums)| {
            let weight = weights[stratum];
            let (count, sum) = sums.cells.iter().fold((0.0, 0.0), |(count, sum), cell| (count + cell.0, sum + cell.1));
            weight * weight * (sums.squares / count - (sum / count).powi(2)).max(0.0) / count
        })
        .sum();
    let effect = variance / independent;
    if groups > 1 && effect.is_finite() { effect.max(1.0) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::ledger::{Ending, Observation, stratum};
    use crate::origin::Origin;
    use sluice_core::base::Rng;
    use sluice_core::openai::Answer;

    /// A ledger of 1,000 requests, of which this many are long and a hundred times as slow.
    fn ledger(seed: u64, long: usize, by_class: bool) -> ArmLedger {
        let (mut ledger, mut rng) = (ArmLedger::default(), Rng::new(seed));
        for request in 0..1_000_usize {
            let is_long = request < long;
            let time = rng.exponential() * if is_long { 1.0 } else { 0.01 };
            ledger.add(&Observation {
                origin: Origin::default(),
                blamed: true,
                // Short and long prompts are in one range of lengths, so only the class separates
                // them.
                stratum: stratum(usize::from(is_long && by_class), 3_000),
                cell: rng.below(64) as u16,
                values: [Some(time); Quantity::ALL.len()],
                ending: Ending::Completed,
                missed: None,
                fell_back: false,
                cached: None,
                answer: Answer::default(),
            });
        }
        ledger
    }

    fn change(by_class: bool) -> Estimate {
        let (control, arm) = (ledger(1, 100, by_class), ledger(2, 500, by_class));
        let pair = Pair { control: &control, arm: &arm, clustered: false, confidence: 0.95, share: None };
        pair.ratio(Quantity::Ttft, 0.1).change
    }

    #[test]
    fn arms_with_unequal_mixes_of_classes_are_compared_within_each_class() {
        let (mixed, within) = (change(false), change(true));
        assert!(mixed.low > 1.0, "the mix alone makes the arm slower: {mixed:?}");
        assert!(within.contains(0.0) && within.high < 0.5, "{within:?}");
    }
}
