//! The comparison of canary and control, and the end of a change.
//!
//! A change ends in one of four ways. *Promoted*: the canary loses less than the control by at
//! least [`ENGINE_GAIN`] of the loss, with [`CANARY_CONFIDENCE`]. *Failed*, which counts towards
//! freezing: an engine did not start, left rotation, failed requests or was slower. *Taken back*
//! without counting: a tie, too few requests, or the error budget is used up. *Dropped*: something
//! else changed.

use std::time::Duration;

use super::EngineTuner;
use super::change::EngineChange;
use super::forecast::Realised;
use super::look::{EngineLook, TunerOrder};
use super::phase::{EngineTrial, Phase, Restart, Step};
use crate::event::{Event, EventKind};
use crate::observe::arms::ArmDifference;

/// Least gain as a share of the loss.
pub(super) const ENGINE_GAIN: f64 = 0.05;
/// Least gain as a difference of losses.
pub(super) const ENGINE_GAIN_MIN: f64 = 0.005;
/// Confidence of the verdict on a canary, at all times together.
const CANARY_CONFIDENCE: f64 = 0.99;
/// When a comparison without a winner ends: usually, and if the gain so far is at least
/// [`PROMISING`] of the forecast.
pub(super) const COMPARED: (Duration, Duration) = (Duration::from_secs(2_700), Duration::from_secs(3 * 3_600));
const PROMISING: f64 = 1.0 / 3.0;
/// Batches after which a gain that is surely too small ends the comparison.
const BATCHES: usize = 12;
/// ln of the evidence that the canary fails more often. Chance reaches it in at most 1 of 100
/// comparisons, however often they are looked at.
pub(super) const SURGE: f64 = 4.6;
/// The difference for which a comparison is quickest, as a share of the control's loss.
const SOONEST: f64 = 0.3;
const REST: Duration = Duration::from_secs(300);
const FAILURES: u32 = 2;
const BUDGET_SECONDS: f64 = 30.0 * 24.0 * 3_600.0;

impl EngineTuner {
    pub(super) fn compare(
        &mut self,
        look: &EngineLook<'_>,
        change: &EngineChange,
        since: Duration,
        orders: &mut Vec<TunerOrder>,
    ) {
        let [control, canary] = look.arms.counts();
        if look.arms.surge() > SURGE {
            let why = format!(
                "{} of {} requests failed on {}, {} of {} on {}",
                canary.failed,
                canary.requests,
                change.canary(),
                control.failed,
                control.requests,
                change.control()
            );
            return self.fail(look.now, &why, None, orders);
        }
        let until = look.now.saturating_sub(look.horizon);
        let Some(found) = look.arms.difference(until, SOONEST, CANARY_CONFIDENCE) else {
            if look.now >= since + COMPARED.0 {
                self.give_up(look.now, "too few requests to compare", orders);
            }
            return;
        };
        let margin = (ENGINE_GAIN * found.control).max(ENGINE_GAIN_MIN);
        // On overloaded engines, requests of the same minutes fare alike, so even a large gain
        // takes long to become certain.
        let is_promising = change.forecast.is_some_and(|gain| gain > 0.0 && -found.change.value >= PROMISING * gain);
        let is_late = look.now >= since + if is_promising { COMPARED.1 } else { COMPARED.0 };
        let shown = format!(
            "loss {:.3} on {}, {:+.3} on {} ({:+.3} to {:+.3}), {} and {} requests",
            found.control,
            change.control(),
            found.change.value,
            change.canary(),
            found.change.low,
            found.change.high,
            control.requests,
            canary.requests
        );
        self.belief = format!("so far: {shown}");
        if found.change.low > 0.0 {
            self.fail(look.now, &shown, Some(&found), orders);
        } else if found.change.high < -margin && !change.improves(found.control + found.change.value) {
            if look.now >= since + COMPARED.0 {
                let why = format!("with its limits not better than before ({:.3}): {shown}", change.loss_before);
                self.realised(change, &found, "rolled_back");
                self.give_up(look.now, &why, orders);
            }
        } else if found.change.high < -margin {
            self.realised(change, &found, "promoted");
            self.note(look.now, EventKind::Promoted, shown);
            if let Some(trial) = self.trial_mut() {
                trial.enter(Step::Promotion(Restart::at(look.now)));
            }
            orders.push(TunerOrder::Configure);
        } else if is_late || (found.batches >= BATCHES && found.change.low > -margin) {
            self.realised(change, &found, "rolled_back");
            self.give_up(look.now, &format!("not better: {shown}"), orders);
        }
    }

    fn realised(&mut self, change: &EngineChange, found: &ArmDifference, verdict: &str) {
        self.trust.add(Realised {
            pool: change.pool.clone(),
            flag: change.flag,
            values: (change.from, change.to),
            forecast: change.forecast,
            realised: -found.change.value,
            range: (-found.change.high, -found.change.low),
            verdict: verdict.to_owned(),
        });
    }

    pub(super) fn fail(
        &mut self,
        now: Duration,
        why: &str,
        found: Option<&ArmDifference>,
        orders: &mut Vec<TunerOrder>,
    ) {
        if let Some((change, found)) = self.change().cloned().zip(found) {
            self.realised(&change, found, "rolled_back");
        }
        self.failures += 1;
        self.give_up(now, why, orders);
    }

    /// Takes a change back without a failure, and closes the value for a while.
    pub(super) fn give_up(&mut self, now: Duration, why: &str, orders: &mut Vec<TunerOrder>) {
        let value = self.change().map(|change| (change.pool.clone(), change.flag, change.to));
        value.into_iter().for_each(|value| self.closed.close(value, (), now));
        self.note(now, EventKind::Undone, why.to_owned());
        self.take_back(now, orders);
    }

    /// A guardrail or an operator stopped the experiment: the change has failed.
    pub fn experiment_stopped(&mut self, why: &str, now: Duration) -> Vec<TunerOrder> {
        let mut orders = Vec::new();
        if self.trial().is_some_and(|trial| matches!(trial.step(), Step::Copies(_) | Step::Compared(_))) {
            self.fail(now, why, None, &mut orders);
        }
        orders
    }

    pub(super) fn overspent(&self, look: &EngineLook<'_>) -> bool {
        let (rate, target) = look
            .needs
            .iter()
            .map(|need| (need.score.rate, need.target))
            .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, f64::max(sum.1, one.1)));
        let allowed = self.rules.error_budget * (1.0 - target) * rate * BUDGET_SECONDS;
        let current = self.trial().map_or(0.0, |trial| trial.spent(look));
        rate > 0.0 && self.spent + current > allowed
    }

    /// Lets the misses that changes caused decay: after thirty days 37 % still count.
    pub(super) fn forget_misses(&mut self, look: &EngineLook<'_>) {
        let since = look.now.saturating_sub(self.spent_at).as_secs_f64();
        (self.spent, self.spent_at) = (self.spent * (-since / BUDGET_SECONDS).exp(), look.now);
        if let Some(trial) = self.trial_mut() {
            trial.before = trial.before.or(look.need_of(&trial.change.pool).map(|need| need.totals));
        }
    }

    pub(super) fn returned(&mut self, look: &EngineLook<'_>) {
        self.spent += self.trial().map_or(0.0, |trial| trial.spent(look));
        self.phase.enter(Phase::Watching { from: look.now + self.rules.cool_down });
        if self.failures >= FAILURES && self.frozen.is_none() {
            let why = format!(
                "frozen after {} changes of engines that failed in a row; sluice tuner resume goes on",
                self.failures
            );
            self.events.push(Event {
                at: look.now.as_secs_f64(),
                kind: EventKind::Frozen,
                key: "engines".to_owned(),
                values: (String::new(), String::new()),
                why: why.clone(),
            });
            self.frozen = Some(why);
        }
    }

    pub(super) fn promoted(&mut self, look: &EngineLook<'_>) {
        self.spent += self.trial().map_or(0.0, |trial| trial.spent(look));
        self.note(look.now, EventKind::Kept, "all engines of the pool have it".to_owned());
        self.failures = 0;
        self.adopted = self.change().and_then(|change| Some((change.pool.clone(), change.limits?)));
        self.phase.enter(Phase::Watching { from: look.now + REST });
    }
}

impl EngineTrial {
    fn spent(&self, look: &EngineLook<'_>) -> f64 {
        let own = look.need_of(&self.change.pool).map(|need| need.totals);
        let Some((own, (requests, missed))) = own.zip(self.before) else { return 0.0 };
        (own.1 - missed - self.missed_before * (own.0 - requests)).max(0.0)
    }
}
