//! The conclusions about an experiment so far, in words and numbers.
//!
//! Each arm is compared with the control in TTFT, TPOT, E2EL, failures and missed objectives. Each
//! comparison may be wrong with a part of 1 - confidence (Bonferroni), at any time. So arms that do
//! not differ are called "better" or "worse" with a probability of at most 1 - confidence, however
//! often the verdict is read.
//!
//! | verdict | when |
//! |---|---|
//! | worse | a latency is certainly worse, beyond the minimum effect; or more failures or misses |
//! | better | otherwise, a latency is certainly better |
//! | no difference within x % | otherwise, every latency is certainly within the minimum effect |
//! | not yet | anything else |
//!
//! A guardrail stops an arm when harm is certain, and has a separate 1 - confidence. Most of this
//! is for a surge of failures, the rest for a smaller rise of failures and for missed objectives. A
//! stop is no verdict. Quality (answers cut off, refused or rated as bad) is no part of the
//! verdict, but an arm with certainly worse answers is not promoted. A wrong mix ([`MISMATCH`])
//! means that no measurement can be trusted.

use serde::{Deserialize, Serialize};

use super::compare::{Pair, Rates, Ratio};
use super::ledger::{Measured, Quantity};
use super::plan::ExperimentPlan;
use sluice_config::Sticky;
use sluice_core::stats::compare::each_of;
use sluice_core::stats::{Change, Estimate, Sense, Verdict, always_valid};

/// The part of 1 - confidence for failures. It is large, because few requests must suffice to find
/// a failing arm.
const FAILURES_PART: f64 = 0.4;
/// The part for each other comparison.
const OTHERS_PART: f64 = (1.0 - FAILURES_PART) / (Quantity::JUDGED.len() + 1) as f64;
/// The guardrail's part for [`Pair::surge`].
const SURGE_PART: f64 = 0.75;
/// The guardrail's part for a smaller rise of failures, and again for missed objectives.
const GUARD_PART: f64 = (1.0 - SURGE_PART) / 2.0;
/// Confidence that the mix is wrong. It is high, because every experiment is checked, and a false
/// alarm costs trust.
const MISMATCH: f64 = 0.999;
/// The names of the rates in [`Comparison::quality`].
pub const QUALITY: [&str; 3] = ["answers cut off at their token limit", "refusals", "bad ratings"];
/// The effect that is detected soonest, as a multiple of the minimum effect.
const SOONEST: f64 = 2.0;

/// The conclusion about an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conclusion {
    /// Better than the control.
    Better,
    /// Worse than the control.
    Worse,
    /// No difference that matters.
    NoDifference,
    /// More requests are needed.
    NotYet,
}

impl Conclusion {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Better, Self::Worse, Self::NoDifference, Self::NotYet];

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::NoDifference => "no difference",
            Self::NotYet => "not yet",
        }
    }
}

/// One quantity of an arm, compared with the control.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The quantity.
    pub quantity: Quantity,
    /// The arm over the control, minus 1.
    pub ratio: Ratio,
    /// The conclusion, unless the quantity is only shown.
    pub conclusion: Option<Conclusion>,
    /// Values so far, in the arm that has fewer.
    pub used: u64,
    /// Estimate of the values that are needed to detect a change of the minimum effect.
    pub planned: Option<u64>,
}

/// One arm, compared with the control.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Position of the arm.
    pub arm: usize,
    /// The conclusion about the arm.
    pub conclusion: Conclusion,
    /// Every quantity, in the order of [`Quantity::ALL`].
    pub findings: Vec<Finding>,
    /// Failures, and whether they are certainly more than the control's.
    pub failures: (Rates, bool),
    /// Missed objectives, and whether they are certainly more than the control's.
    pub misses: (Rates, bool),
    /// The rates of [`QUALITY`], each with whether it is certainly higher than the control's. Each
    /// is judged separately, with [`Pair::confidence`].
    pub quality: [(Rates, bool); 3],
    /// The arm's share of the requests of both arms, if it is not as configured.
    pub mismatch: Option<Estimate>,
    /// The guardrail that the arm has broken.
    pub broken: Option<&'static str>,
}

/// Compares every arm with the control.
pub fn compare(plan: &ExperimentPlan, measured: Measured<'_>) -> Vec<Comparison> {
    let others = 1..measured.arms.len().min(plan.arms.len());
    others.map(|arm| of_arm(plan, measured, arm)).collect()
}

fn of_arm(plan: &ExperimentPlan, measured: Measured<'_>, arm: usize) -> Comparison {
    let pair = pair(plan, measured, arm, OTHERS_PART);
    let findings: Vec<Finding> = Quantity::ALL.iter().map(|quantity| finding(plan, &pair, *quantity)).collect();
    let sure = |pair: &Pair<'_>, rates: Rates| (rates, is_sure(pair, &rates));
    let of_failures = self::pair(plan, measured, arm, FAILURES_PART);
    let (failures, misses) = (sure(&of_failures, of_failures.failures()), sure(&pair, pair.misses()));
    let judged = || findings.iter().filter_map(|finding| finding.conclusion);
    let conclusion = match () {
        () if failures.1 || misses.1 || judged().any(|one| one == Conclusion::Worse) => Conclusion::Worse,
        () if judged().any(|one| one == Conclusion::Better) => Conclusion::Better,
        () if judged().all(|one| one == Conclusion::NoDifference) => Conclusion::NoDifference,
        () => Conclusion::NotYet,
    };
    let expected = share(plan, arm);
    let mix = Pair { confidence: MISMATCH, ..pair }.mix();
    Comparison {
        arm,
        conclusion,
        findings,
        failures,
        misses,
        quality: pair.quality().map(|rates| (rates, is_sure(&pair, &rates))),
        // A shadow arm has no mix: its copies depend on free room.
        mismatch: (plan.arms[arm].shadow.is_none() && !mix.contains(expected)).then_some(mix),
        broken: guard(plan, measured, arm),
    }
}

/// An arm's configured share in the units of the arm and the control.
fn share(plan: &ExperimentPlan, arm: usize) -> f64 {
    plan.arms[arm].share / (plan.arms[0].share + plan.arms[arm].share)
}

/// A comparison that may be wrong with this part of 1 - confidence.
fn pair<'a>(plan: &ExperimentPlan, measured: Measured<'a>, arm: usize, part: f64) -> Pair<'a> {
    let confidence = 1.0 - part * (1.0 - each_of(plan.arms.len() - 1, plan.rules.confidence));
    let clustered = plan.sticky != Sticky::Request;
    let share = (clustered && plan.arms[arm].shadow.is_none()).then(|| share(plan, arm));
    Pair { control: measured.control_of(arm), arm: &measured.arms[arm], clustered, confidence, share }
}

/// The guardrail that an arm has broken. It must be cheap, because it is called after every request
/// that failed or missed an objective.
pub fn guard(plan: &ExperimentPlan, measured: Measured<'_>, arm: usize) -> Option<&'static str> {
    let guardrail = &plan.rules.guardrail;
    let [surge, other] = [SURGE_PART, GUARD_PART].map(|part| pair(plan, measured, arm, part));
    let (failures, misses) = (other.failures(), other.misses());
    let by = |rates: &Rates, most: f64| rates.arm - rates.control > most;
    match () {
        () if by(&failures, guardrail.errors) && (is_certain(&surge, surge.surge()) || is_sure(&other, &failures)) => {
            Some("errors")
        }
        () if by(&misses, guardrail.slo_misses) && is_sure(&other, &misses) => Some("slo_misses"),
        () => None,
    }
}

fn is_sure(pair: &Pair<'_>, rates: &Rates) -> bool {
    is_certain(pair, rates.evidence)
}

fn is_certain(pair: &Pair<'_>, evidence: f64) -> bool {
    evidence > -(1.0 - pair.confidence).ln()
}

fn finding(plan: &ExperimentPlan, pair: &Pair<'_>, quantity: Quantity) -> Finding {
    let (margin, effect) = (plan.rules.min_effect, SOONEST * plan.rules.min_effect);
    let ratio = pair.ratio(quantity, effect);
    let conclusion = Quantity::JUDGED.contains(&quantity).then(|| {
        match Change(ratio.change).verdict(Sense::LowerIsBetter, margin) {
            Verdict::Better => Conclusion::Better,
            Verdict::Worse => Conclusion::Worse,
            Verdict::NoDifference => Conclusion::NoDifference,
            Verdict::Undecided => Conclusion::NotYet,
        }
    });
    let used = pair.control.count(quantity).min(pair.arm.count(quantity));
    let needed = always_valid::variance_for(margin, ratio.freedom, effect, pair.confidence);
    let planned = used as f64 * ratio.variance / needed;
    Finding {
        quantity,
        ratio,
        conclusion,
        used,
        planned: (ratio.freedom >= 1.0 && planned.is_finite()).then_some(planned as u64),
    }
}

impl Comparison {
    /// The conclusion in one sentence, with the answers that are certainly worse.
    pub fn sentence(&self, plan: &ExperimentPlan) -> String {
        let worse = QUALITY.iter().zip(&self.quality).filter(|(_, (_, worse))| *worse);
        let worse: Vec<String> = worse
            .map(|(what, (rates, _))| format!("{what} {} instead of {}", percent(rates.arm), percent(rates.control)))
            .collect();
        let speed = self.sentence_on_speed(plan);
        if worse.is_empty() { speed } else { format!("{speed}; but its answers are worse: {}", worse.join(", ")) }
    }

    fn sentence_on_speed(&self, plan: &ExperimentPlan) -> String {
        let (control, arm) = (&plan.arms[0].name, &plan.arms[self.arm].name);
        let with = |wanted: Conclusion| {
            let is = move |finding: &&Finding| finding.conclusion == Some(wanted);
            self.findings.iter().filter(is).map(|finding| change(finding.quantity.label(), &finding.ratio.change))
        };
        let rates = [("errors", self.failures), ("missed objectives", self.misses)];
        let rates = rates
            .iter()
            .filter(|(_, (_, sure))| *sure)
            .map(|(what, (rates, _))| format!("{what} {} instead of {}", percent(rates.arm), percent(rates.control)));
        let list = |parts: Vec<String>| parts.join(", ");
        match self.conclusion {
            Conclusion::Worse => {
                let mut text =
                    format!("{arm} is worse than {control}: {}", list(with(Conclusion::Worse).chain(rates).collect()));
                let better: Vec<String> = with(Conclusion::Better).collect();
                if !better.is_empty() {
                    text += &format!("; but {}", list(better));
                }
                text
            }
            Conclusion::Better => {
                format!("{arm} is better than {control}: {}", list(with(Conclusion::Better).collect()))
            }
            Conclusion::NoDifference => {
                format!("no difference between {arm} and {control} within {}", percent(plan.rules.min_effect))
            }
            Conclusion::NotYet => {
                let open = self.findings.iter().filter(|finding| finding.conclusion == Some(Conclusion::NotYet));
                if self.findings.iter().all(|finding| finding.used == 0) {
                    return format!("not yet known whether {arm} differs from {control}: no requests took part yet");
                }
                let parts: Vec<String> = open.map(Finding::progress).collect();
                format!("not yet known whether {arm} differs from {control}: {}", list(parts))
            }
        }
    }
}

impl Finding {
    fn progress(&self) -> String {
        let change = change(self.quantity.label(), &self.ratio.change);
        match self.planned {
            Some(planned) if planned > self.used => format!("{change}, {} of about {planned} requests", self.used),
            _ => format!("{change}, {} requests", self.used),
        }
    }
}

/// `TTFT +5.0 % (+3.0 % to +7.1 %)`.
pub(super) fn change(what: &str, change: &Estimate) -> String {
    if !change.value.is_finite() {
        return format!("{what} unknown");
    }
    let signed = |share: f64| format!("{:+.1} %", share * 100.0);
    let range = if change.high.is_finite() {
        format!("{} to {}", signed(change.low), signed(change.high))
    } else {
        "too few requests".to_owned()
    };
    format!("{what} {} ({range})", signed(change.value))
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
