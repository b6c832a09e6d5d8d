//! Proves a rate with several new loads, and lowers the rate until it holds.
//!
//! At the boundary, half of all proofs fail by chance. So several proofs with other arrivals and
//! prompts are counted together, group by group. The rate holds if in every group the share of hits
//! reaches the target and the long-run share is above the target less the slack (97.5 %
//! confidence), and if latencies grow in no proof. If only the long-run share is too uncertain,
//! more proofs follow. Otherwise the proofs are repeated at [`STEP_DOWN`] of the rate. Bounds:
//! [`MORE`], [`MAX_STEPS`].

use sluice_core::stats::{Estimate, proportion};

use super::judge::Judge;
use super::system::SystemUnderTest;
use super::trial::{SearchGoal, Trial, TrialKind, TrialLoad, TrialRule, TrialVerdict};
use crate::seed::nth_seed;

const STEP_DOWN: f64 = 0.985;
const MAX_STEPS: usize = 20;
/// Most proofs at one rate, in multiples of `repeats`.
const MORE: usize = 4;
const CONFIDENCE: f64 = 0.95;

/// A rate that several proofs support.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValidatedRate {
    /// Requests per second.
    pub rate: f64,
    /// Attainment of the worst group over all proofs.
    pub attainment: Estimate,
    /// The worst group.
    pub group: usize,
    /// Requests that counted.
    pub requests: usize,
    /// Proofs that were run, at all rates.
    pub proofs: usize,
}

/// Proves `rate` with `repeats` loads, whose seeds begin with the goal's seed. `None` if no rate
/// holds.
pub async fn validate<S: SystemUnderTest>(
    system: &mut S,
    goal: &SearchGoal,
    mut rate: f64,
    repeats: usize,
) -> Result<Option<ValidatedRate>, S::Error> {
    let mut proofs = 0;
    for _ in 0..MAX_STEPS {
        let mut pooled = Pooled::default();
        let mut own = 0;
        while own < repeats.max(1) * MORE {
            // The trials run as samples, because a proof would end once it alone has too many
            // misses.
            let rule = TrialRule { kind: TrialKind::Sample, ..goal.rule(rate, TrialKind::Proof) };
            let mut judge = Judge::new(rule);
            let seed = nth_seed(goal.seed, proofs as u64);
            let trial =
                Trial { load: TrialLoad::Rate(rate), requests: judge.max_requests(), warmup: rule.warmup, seed };
            system.run(&trial, &mut judge).await?;
            (proofs, own) = (proofs + 1, own + 1);
            let ended_early = judge.close() == TrialVerdict::Fails && judge.hits().len() < rule.length;
            if ended_early || judge.is_growing() {
                break;
            }
            pooled.add(&judge);
            let Some((group, attainment)) = pooled.worst().filter(|_| own >= repeats) else { continue };
            if attainment.value < goal.attainment {
                break;
            }
            if attainment.low >= goal.attainment - goal.slack {
                return Ok(Some(ValidatedRate { rate, attainment, group, requests: pooled.count(), proofs }));
            }
        }
        rate *= STEP_DOWN;
    }
    Ok(None)
}

/// The requests of several proofs, by group: hits and SLO ratios.
#[derive(Default)]
struct Pooled(Vec<(Vec<bool>, Vec<f64>)>);

impl Pooled {
    fn add(&mut self, judge: &Judge) {
        self.0.resize(self.0.len().max(judge.groups()), Default::default());
        for (group, (hits, ratios)) in self.0.iter_mut().enumerate() {
            hits.extend(judge.hits_of(group));
            ratios.extend(judge.ratios_of(group));
        }
    }

    fn count(&self) -> usize {
        self.0.iter().map(|(hits, _)| hits.len()).sum()
    }

    fn worst(&self) -> Option<(usize, Estimate)> {
        let counted = self.0.iter().enumerate().filter(|(_, (hits, _))| !hits.is_empty());
        let shares =
            counted.map(|(group, (hits, ratios))| (group, proportion::of_series_with(hits, ratios, CONFIDENCE)));
        shares.min_by(|one, other| one.1.value.total_cmp(&other.1.value))
    }
}
