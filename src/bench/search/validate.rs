//! Proves a rate with several loads of its own, and lowers it until it holds.
//!
//! One proof near the boundary is a matter of chance: at the boundary itself half of them fail. So the requests of several proofs, each
//! with other arrivals and prompts, are counted together, group by group. The rate holds when the share of hits of every group
//! reaches the target, its long-run share is above the target less the slack with 97.5 %, and latencies grow in no proof. If
//! only the second is missing, there are more proofs, at most [`MORE`] times as many. Otherwise the rate is lowered and all proofs are
//! repeated; that happens as soon as there are more misses than the proofs that were asked for allow together. It is lowered by
//! [`STEP_DOWN`], and by more where there are several times the allowed misses ([`STEEP`]). Bounds: [`MAX_STEPS`] rates.

use sluice_core::stats::{Estimate, proportion};

use super::judge::Judge;
use super::system::SystemUnderTest;
use super::trial::{SearchGoal, Trial, TrialKind, TrialLoad, TrialRule, TrialVerdict};

/// A rate that does not hold is lowered to this share, or to less.
const STEP_DOWN: f64 = 0.985;
/// But to no less than this share.
const MOST_DOWN: f64 = 0.94;
/// It is assumed that misses grow as this power of the rate, which is steep: the step is rather too small.
const STEEP: f64 = 40.0;
/// The most rates that are tried.
const MAX_STEPS: usize = 20;
/// At most so many times the proofs that were asked for, at one rate.
const MORE: usize = 4;
/// Confidence of the attainment's interval.
const CONFIDENCE: f64 = 0.95;

/// A rate that several proofs support.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValidatedRate {
    /// Requests per second.
    pub rate: f64,
    /// Attainment of the worst group over all proofs.
    pub attainment: Estimate,
    /// The group.
    pub group: usize,
    /// Requests that counted.
    pub requests: usize,
    /// Proofs that were run, at all rates.
    pub proofs: usize,
    /// Requests sent in them.
    pub sent: usize,
    /// What they took, seconds.
    pub seconds: f64,
}

/// Proves `rate` with `repeats` loads from the seed of the goal on; `None` if none of [`MAX_STEPS`] rates holds.
///
/// # Errors
/// Those of the system.
pub async fn validate<S: SystemUnderTest>(
    system: &mut S,
    goal: &SearchGoal,
    mut rate: f64,
    repeats: usize,
) -> Result<Option<ValidatedRate>, S::Error> {
    let (mut proofs, mut sent, mut seconds) = (0, 0, 0.0);
    for _ in 0..MAX_STEPS {
        let mut pooled = Pooled::default();
        let (mut own, mut misses) = (0, 1.0);
        while own < repeats.max(1) * MORE {
            // A sample counts every miss, where a proof ends at the first that is too many for it alone.
            let rule = TrialRule { kind: TrialKind::Sample, ..goal.rule(rate, TrialKind::Proof) };
            let mut judge = Judge::new(rule);
            let seed = goal.seed.wrapping_add(proofs as u64);
            let trial =
                Trial { load: TrialLoad::Rate(rate), requests: judge.max_requests(), warmup: rule.warmup, seed };
            seconds += system.run(&trial, &mut judge).await?.seconds;
            (proofs, own) = (proofs + 1, own + 1);
            let ended_early = judge.close() == TrialVerdict::Fails && judge.hits().len() < rule.length;
            sent += rule.warmup + judge.hits().len();
            let is_growing = judge.is_growing();
            pooled.add(&judge);
            let allowed = 1.0 - goal.attainment;
            let worst = pooled.worst();
            misses = worst.map_or(1.0, |(_, attainment)| (1.0 - attainment.value) / allowed);
            // Even without any further miss the proofs together would have too many.
            if ended_early || is_growing || misses * own as f64 > repeats.max(own) as f64 + 1e-6 {
                break;
            }
            let Some((group, attainment)) = worst.filter(|_| own >= repeats) else { continue };
            if attainment.value < goal.attainment {
                break;
            }
            if attainment.low >= goal.attainment - goal.slack {
                let requests = pooled.count();
                return Ok(Some(ValidatedRate { rate, attainment, group, requests, proofs, sent, seconds }));
            }
        }
        rate *= misses.max(1e-9).powf(-1.0 / STEEP).clamp(MOST_DOWN, STEP_DOWN);
    }
    Ok(None)
}

/// The requests of several proofs, by group: whether each was a hit, and its SLO ratio.
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

    /// The group with the lowest attainment.
    fn worst(&self) -> Option<(usize, Estimate)> {
        let counted = self.0.iter().enumerate().filter(|(_, (hits, _))| !hits.is_empty());
        let shares =
            counted.map(|(group, (hits, ratios))| (group, proportion::of_series_with(hits, ratios, CONFIDENCE)));
        shares.min_by(|one, other| one.1.value.total_cmp(&other.1.value))
    }
}
