//! An experiment as the admin API shows it: plain numbers and texts, which the command line reads
//! back.
//!
//! Latencies are in seconds, tokens in thousands; changes and shares are fractions. Unknown and
//! unbounded values are absent.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::assign::Experiment;
use super::compare::{Rates, quantile};
use super::diagnosis::{Diagnosis, diagnose};
use super::ledger::{ArmLedger, Quantity};
use super::plan::{ArmPlan, ExperimentPlan};
use super::shadow::CopyOutcome;
use super::state::{Decision, Moment, Phase};
use super::verdict::{Comparison, Conclusion, compare};
use sluice_config::Sticky;
use sluice_core::openai::FinishReason;
use sluice_core::stats::Estimate;
use sluice_core::stats::compare::each_of;

/// The phase of an experiment that was saved and does not fit the configuration.
pub const NOT_ACTIVE: &str = "not_active";

/// A value and the range that contains the true one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Range {
    /// The measured value.
    pub value: f64,
    /// Lower end.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
}

/// One experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExperimentReport {
    /// The name.
    pub name: String,
    /// `running`, `stopped`, `promoted`, or [`NOT_ACTIVE`], which has only a name and a reason.
    pub phase: String,
    /// The arm that was promoted.
    pub promoted: Option<String>,
    /// Why the experiment is in this phase, unless an operator put it there.
    pub why: Option<String>,
    /// The kind of unit that stays in one arm.
    pub sticky: String,
    /// Share of the units that take part now.
    pub exposure: f64,
    /// When it was first started, RFC 3339.
    pub since: Option<String>,
    /// Confidence of all verdicts together.
    pub confidence: f64,
    /// Changes up to this share are too small to matter.
    pub min_effect: f64,
    /// The arms; the first is the control.
    pub arms: Vec<ArmReport>,
    /// The other arms, compared with the control.
    pub comparisons: Vec<ComparisonReport>,
    /// The confidence sequences over time.
    pub history: Vec<Moment>,
}

/// One arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmReport {
    /// The name.
    pub name: String,
    /// Share of the units that take part.
    pub share: f64,
    /// The copies of a shadow arm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<CopiesReport>,
    /// The model name that is sent upstream.
    pub model: Option<String>,
    /// Why the arm was stopped.
    pub stopped: Option<String>,
    /// The condition that the arm waits for before requests take part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
    /// Requests that were assigned to the arm and have ended.
    pub requests: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that missed an objective, and requests that had one.
    pub missed: (u64, u64),
    /// Requests served without the arm, because it could not serve them.
    pub fell_back: u64,
    /// Completed requests by class, without classes that have none.
    #[serde(default)]
    pub classes: Vec<(String, u64)>,
    /// How answers ended and were rated.
    #[serde(default)]
    pub quality: QualityReport,
    /// The measured quantities.
    pub quantities: Vec<QuantityReport>,
}

/// How the answers of an arm ended and were rated.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QualityReport {
    /// How many answers ended for each reason, if the engine names reasons.
    pub finish: Vec<(FinishReason, u64)>,
    /// How many answers are marked as refusals.
    pub refused: u64,
    /// How many answers users rated as bad, and how many they rated.
    pub bad_ratings: (u64, u64),
}

/// The copies of a shadow arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopiesReport {
    /// Of the requests that take part, the share that is copied to the arm.
    pub share: f64,
    /// Copies in flight now.
    pub in_flight: u32,
    /// How many ended with each outcome since the gateway started.
    pub ended: Vec<(CopyOutcome, u64)>,
}

/// One quantity of one arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantityReport {
    /// The quantity.
    pub quantity: Quantity,
    /// Values.
    pub count: u64,
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: Range,
    /// The 95th percentile.
    pub p95: Range,
}

/// An arm compared with the control.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ComparisonReport {
    /// The arm.
    pub arm: String,
    /// The conclusion now.
    pub conclusion: Conclusion,
    /// The conclusion as a sentence for the operator.
    pub sentence: String,
    /// The first conclusion, which stands.
    pub decided: Option<Decision>,
    /// Quantities.
    pub changes: Vec<ChangeReport>,
    /// Failures.
    pub failures: RateReport,
    /// Missed objectives.
    pub misses: RateReport,
    /// Answers that were cut off at their token limit, refusals, and bad ratings among all ratings.
    #[serde(default)]
    pub quality: Vec<RateReport>,
    /// The arm's share of the requests of both arms, if this is certainly not the configured share.
    pub mismatch: Option<Range>,
    /// Why an arm with another model is slow: known causes for adapters.
    #[serde(default)]
    pub diagnosis: Vec<Diagnosis>,
}

/// A quantity in an arm over the same in the control, minus 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangeReport {
    /// The quantity.
    pub quantity: Quantity,
    /// The change of the geometric mean at equal prompt lengths.
    pub change: Option<Range>,
    /// The conclusion about the quantity, if it is judged.
    pub conclusion: Option<Conclusion>,
    /// Values so far, in the arm that has fewer.
    pub used: u64,
    /// Estimate of the values that are needed to detect a change of `min_effect`.
    pub planned: Option<u64>,
}

/// The rate of an event in both arms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateReport {
    /// Share in the control.
    pub control: f64,
    /// Share in the arm.
    pub arm: f64,
    /// The arm's rate over the control's.
    pub times: Option<Range>,
    /// Whether the arm's rate is certainly higher.
    pub worse: bool,
}

impl Range {
    /// `None` where the value is not finite.
    fn of(estimate: Estimate) -> Option<Self> {
        let finite = |value: f64| value.is_finite().then_some(value);
        Some(Self { value: finite(estimate.value)?, low: finite(estimate.low), high: finite(estimate.high) })
    }
}

impl ExperimentReport {
    /// The experiment now. `short`: without the parts that take long to read and compute.
    pub fn new(experiment: &Experiment, short: bool) -> Self {
        let Experiment { plan, state } = experiment;
        let progress = state.progress();
        let phase = state.phase();
        let comparisons = compare(plan, progress.measured());
        let report = |comparison: &Comparison| ComparisonReport {
            arm: plan.arms[comparison.arm].name.to_string(),
            conclusion: comparison.conclusion,
            sentence: comparison.sentence(plan),
            decided: progress.decisions[comparison.arm].clone(),
            changes: comparison.findings.iter().map(ChangeReport::new).collect(),
            failures: RateReport::new(comparison.failures),
            misses: RateReport::new(comparison.misses),
            quality: comparison.quality.into_iter().map(RateReport::new).collect(),
            mismatch: comparison.mismatch.and_then(Range::of),
            diagnosis: diagnose(plan, &progress.arms, &progress.engines[comparison.arm], comparison),
        };
        let (clustered, confidence) = (plan.sticky != Sticky::Request, each_of(plan.arms.len(), plan.rules.confidence));
        let arms = plan.arms.iter().enumerate().zip(&progress.arms).zip(&progress.stops).map(
            |(((number, arm), ledger), stopped)| ArmReport {
                name: arm.name.to_string(),
                share: arm.share,
                copies: arm.shadow.map(|shadow| CopiesReport {
                    share: shadow.share,
                    in_flight: state.copies(number).in_flight(),
                    ended: state.copies(number).ended().to_vec(),
                }),
                model: arm.model.as_ref().map(|(name, _)| name.to_string()),
                stopped: stopped.clone(),
                waiting: waiting(experiment, number),
                requests: ledger.requests(),
                failed: ledger.failed(),
                missed: ledger.missed(),
                fell_back: ledger.fell_back(),
                classes: by_class(plan, ledger),
                quality: QualityReport {
                    finish: ledger.quality().finish(),
                    refused: ledger.quality().refused(),
                    bad_ratings: ledger.quality().ratings(),
                },
                quantities: if short { Vec::new() } else { quantities(ledger, clustered, confidence) },
            },
        );
        Self {
            name: plan.name.to_string(),
            phase: phase.label().to_owned(),
            promoted: match phase {
                Phase::Promoted(arm) => plan.arms.get(arm).map(|arm| arm.name.to_string()),
                Phase::Running | Phase::Stopped => None,
            },
            why: progress.why.clone(),
            sticky: plan.sticky.word().to_owned(),
            exposure: state.exposure(),
            since: progress
                .since
                .and_then(|since| Timestamp::from_millisecond(since).ok())
                .map(|since| format!("{since:.0}")),
            confidence: plan.rules.confidence,
            min_effect: plan.rules.min_effect,
            arms: arms.collect(),
            comparisons: comparisons.iter().map(report).collect(),
            history: if short { Vec::new() } else { progress.history.clone() },
        }
    }
}

fn waiting(Experiment { plan, state }: &Experiment, arm: usize) -> Option<String> {
    let ArmPlan { name, model, shadow, .. } = &plan.arms[arm];
    let (model, _) = model.as_ref().filter(|_| state.is_waiting(arm) && state.phase() != Phase::Stopped)?;
    let what = if shadow.is_some() { "it gets no copies" } else { "no request takes part" };
    Some(format!("the arm {name} waits: no ready backend serves the model {model}; {what} until one does"))
}

fn by_class(plan: &ExperimentPlan, ledger: &ArmLedger) -> Vec<(String, u64)> {
    let count = |class| ledger.count_in_class(Quantity::E2el, class);
    let each = plan.classes.iter().enumerate().map(|(class, name)| (name.clone(), count(class)));
    each.filter(|(_, count)| *count > 0).collect()
}

fn quantities(ledger: &ArmLedger, clustered: bool, confidence: f64) -> Vec<QuantityReport> {
    let of = |quantity: Quantity| {
        let range = |q: f64| Range::of(quantile(ledger, quantity, q, clustered, confidence)?);
        Some(QuantityReport {
            quantity,
            count: ledger.count(quantity),
            mean: ledger.mean(quantity)?,
            p50: range(0.5)?,
            p95: range(0.95)?,
        })
    };
    Quantity::ALL.into_iter().filter_map(of).collect()
}

impl ChangeReport {
    fn new(finding: &super::verdict::Finding) -> Self {
        Self {
            quantity: finding.quantity,
            change: Range::of(finding.ratio.change),
            conclusion: finding.conclusion,
            used: finding.used,
            planned: finding.planned,
        }
    }
}

impl RateReport {
    fn new((rates, worse): (Rates, bool)) -> Self {
        Self { control: rates.control, arm: rates.arm, times: Range::of(rates.times), worse }
    }
}
