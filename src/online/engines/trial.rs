//! The stages of a change other than the comparison: restarts, copies, recovery and promotion.
//!
//! The tuner waits at most [`BLOCKED`] for an engine that is missing or whose restart is blocked.
//! The canary gets copies until it has served enough of them ([`COPIES_SERVED`], [`COPIES_SOON`]).
//! Then all engines serve the backlog for at most [`RECOVERY`]. The load of changed engines is
//! limited to the load that their copies proved. In recovery and promotion, it rises a little each
//! time that requests have waited for [`RAMP`].

use std::time::Duration;

use super::EngineTuner;
use super::change::{EngineChange, Stage};
use super::look::{EngineLook, EngineState, Restarted, TunerOrder};
use super::phase::{EngineTrial, Measure, Restart, Step};
use super::proof::Load;
use super::verdict::SURGE;
use crate::event::EventKind;
use sluice_gateway::pool::TrialBound;

/// How long the canary gets copies: at least (unless [`COPIES_SOON`] is reached), and at most.
pub(super) const COPIES: (Duration, Duration) = (Duration::from_secs(90), Duration::from_secs(300));
const COPIES_SERVED: u64 = 30;
/// Served copies that suffice, after this time. The cost of a change is computed with [`COPIES`]
/// all the same.
pub(super) const COPIES_SOON: (u64, Duration) = (1_000, Duration::from_secs(45));
const COPIES_FAILED: u64 = 3;
/// Silence after which a canary is taken to hang.
const SILENT: Duration = Duration::from_secs(15);
/// A served copy this recent shows that the canary serves.
const FRESH: Duration = Duration::from_secs(2);
/// How many times a canary may get copies in one change.
const COPIED: u32 = 3;
/// Longest wait until the queue is as short as before the restart.
pub(super) const RECOVERY: Duration = Duration::from_secs(300);
/// Arrivals this soon after the start of a comparison do not count.
const COMPARISON_SETTLE: Duration = Duration::from_secs(60);
/// A comparison ends once requests waited this long for the canary.
const HELD_UP: Duration = Duration::from_secs(30);
/// In recovery and promotion, bounds rise once requests waited this long.
const RAMP: Duration = Duration::from_secs(5);
/// How long an engine may be out of rotation.
pub(super) const ABSENT: Duration = Duration::from_secs(10);
/// How long an engine is watched after the restart in promotion.
const WATCHED: Duration = Duration::from_secs(60);
/// How long a restart may be blocked.
pub(super) const BLOCKED: Duration = Duration::from_secs(900);
/// Time between two attempts at a blocked restart.
const RETRY: Duration = Duration::from_secs(10);
/// Attempts to restart an engine with the old value.
const ATTEMPTS: u32 = 3;

impl EngineTuner {
    /// For each engine, the bound on the load of requests; `None`: only the engine's limits.
    pub fn trials(&self, engines: &[EngineState]) -> Vec<Option<TrialBound>> {
        let trial = |load: Load| TrialBound { slots: load.sequences, tokens: load.tokens };
        engines.iter().map(|engine| self.bound(engine, engines).map(trial)).collect()
    }

    pub(super) fn bound(&self, engine: &EngineState, engines: &[EngineState]) -> Option<Load> {
        let trial = self.trial().filter(|trial| trial.change.pool == engine.pool)?;
        let (change, stage) = (&trial.change, trial.stage());
        let bound = change.bound(stage, &engine.backend)?;
        // If no unchanged engine serves, changed engines have no bound during a return.
        let serves =
            |other: &EngineState| other.pool == change.pool && other.serves && !change.changed.contains(&other.backend);
        let is_last = stage == Stage::Return && !engines.iter().any(serves);
        (!is_last).then_some(bound)
    }

    /// The moment from which arrivals count in a comparison that begins now; `None`: no arms are
    /// compared.
    pub(crate) fn compares_from(&self, now: Duration) -> Option<Duration> {
        match self.stage()? {
            Stage::Copies => Some(now),
            Stage::Compared => Some(now + COMPARISON_SETTLE),
            _ => None,
        }
    }

    pub(super) fn restart(&mut self, look: &EngineLook<'_>, restart: Restart, orders: &mut Vec<TunerOrder>) {
        let Restart { since, retry, ordered: None, .. } = restart else { return };
        let Some((change, stage)) = self.trial().map(|trial| (trial.change.clone(), trial.stage())) else { return };
        let returns = stage == Stage::Return;
        let Some(backend) = change.next(stage).cloned() else {
            return if returns { self.returned(look) } else { self.promoted(look) };
        };
        if look.now < retry {
            return;
        }
        let is_late = look.now >= since + BLOCKED;
        let Some(engine) = look.engine(&change.pool, &backend).filter(|engine| engine.flags.is_some()) else {
            return self.wait_for(&backend, is_late, look.now, orders);
        };
        if returns && engine.serves && engine.flag(change.flag) == Some(change.from) {
            return self.trial_mut().into_iter().for_each(|trial| trial.return_next(&backend, look.now));
        }
        if !returns && (look.waits.is_some() || self.restarts_left(look.now) == 0) {
            // A promotion waits until restarts are permitted; a canary that has not begun waits
            // only for a while.
            if stage == Stage::Promotion {
                // The bounded wait begins with the permission.
                self.with_restart(|own| own.since = look.now);
            } else if is_late {
                self.give_up(look.now, "its restart had to wait too long", orders);
            }
            return;
        }
        let value = if returns { change.from } else { change.to };
        let crowded = change.crowded || (returns && is_late);
        let engine = format!("{}/{backend}", change.pool);
        orders.push(TunerOrder::Restart { engine, flag: change.flag, value, crowded });
        self.restarts.push_back(look.now);
        self.with_restart(|own| own.ordered = Some((backend.clone(), look.now)));
        // Saved before the restart, so that a later gateway takes the change back.
        if let Some(trial) = self.trial_mut().filter(|_| !returns) {
            trial.change.changed.push(backend);
        }
    }

    fn with_restart(&mut self, change: impl Fn(&mut Restart)) {
        self.trial_mut().and_then(EngineTrial::restart).into_iter().for_each(change);
    }

    /// Waits for an engine that the gateway does not run yet (the pod is not found), or no longer
    /// (the configuration changed).
    fn wait_for(&mut self, backend: &str, is_late: bool, now: Duration, orders: &mut Vec<TunerOrder>) {
        self.belief = format!("{backend} is not there");
        match self.trial_mut().filter(|_| is_late) {
            Some(trial) if trial.stage() == Stage::Return => trial.return_next(backend, now),
            Some(_) => self.give_up(now, &format!("{backend} is not there"), orders),
            None => {}
        }
    }

    /// Takes the result of a restart.
    pub fn restarted(&mut self, outcome: Restarted, now: Duration) -> Vec<TunerOrder> {
        let mut orders = Vec::new();
        let Some(trial) = self.trial_mut() else { return orders };
        let stage = trial.stage();
        let Some(Restart { since, ordered: Some((backend, begun)), failed, .. }) = trial.restart().cloned() else {
            return orders;
        };
        let returns = stage == Stage::Return;
        if !returns && outcome != Restarted::Done {
            // The engine has returned to the old flags by itself.
            trial.change.leave_out(&backend);
        }
        let again = |failed| Restart { since, ordered: None, retry: now + RETRY, failed };
        match outcome {
            Restarted::Done => {
                match stage {
                    Stage::Return => trial.return_next(&backend, now),
                    Stage::Canary => {
                        trial.enter(Step::Copies(Measure::at(now)));
                        orders.push(TunerOrder::Configure);
                    }
                    _ => trial.enter(Step::Watched(Measure::at(now))),
                }
                self.lasts = Some(now.saturating_sub(begun).max(Duration::from_secs(1)));
            }
            Restarted::Failed(_) if returns && failed + 1 < ATTEMPTS => {
                self.with_restart(|own| *own = again(failed + 1))
            }
            Restarted::Failed(why) if returns => {
                trial.return_next(&backend, now);
                self.frozen = Some(format!("frozen: {backend} could not be restarted as it was: {why}"));
            }
            Restarted::Failed(why) => {
                self.fail(now, &format!("{backend} did not start with it: {why}"), None, &mut orders);
            }
            Restarted::Blocked(why) => {
                self.belief = format!("{backend} is not restarted yet: {why}");
                self.restarts.pop_back();
                if !returns && now >= since + BLOCKED {
                    self.give_up(now, &why, &mut orders);
                } else {
                    self.with_restart(|own| *own = again(failed));
                }
            }
        }
        orders
    }

    pub(super) fn measure(&mut self, look: &EngineLook<'_>, measure: Measure, orders: &mut Vec<TunerOrder>) {
        let Some(trial) = self.trial_mut() else { return };
        let (change, stage) = (trial.change.clone(), trial.stage());
        let serves = |backend: &String| look.engine(&change.pool, backend).is_some_and(|engine| engine.serves);
        let gone = change.backends.iter().find(|backend| !serves(backend));
        let (since, absent) = (measure.since, gone.map(|_| measure.absent.unwrap_or(look.now)));
        trial.measure().into_iter().for_each(|own| own.absent = absent);
        if let Some(backend) = gone.filter(|_| absent.is_some_and(|at| look.now >= at + ABSENT)) {
            if change.changed.contains(backend) {
                return self.fail(look.now, &format!("{backend} left rotation with it"), None, orders);
            }
            self.note(look.now, EventKind::StoodBack, format!("{backend} left rotation, which was not changed"));
            return self.take_back(look.now, orders);
        }
        if self.overspent(look) {
            return self.give_up(look.now, "changes have used up their part of the error budget", orders);
        }
        match stage {
            Stage::Copies => self.look_at_copies(look, since, orders),
            Stage::Recovery => self.recover(look, since, orders),
            Stage::Compared if self.trial_mut().is_some_and(|trial| trial.is_held_up(look)) => {
                self.copy_again(look, orders);
            }
            Stage::Compared => self.compare(look, &change, since, orders),
            _ if look.now < since + WATCHED => {}
            _ => self.trial_mut().into_iter().for_each(|trial| trial.enter(Step::Promotion(Restart::at(look.now)))),
        }
    }

    fn look_at_copies(&mut self, look: &EngineLook<'_>, since: Duration, orders: &mut Vec<TunerOrder>) {
        let [_, canary] = look.arms.counts();
        if canary.failed >= COPIES_FAILED && look.arms.surge() > SURGE {
            let why = format!("{} of {} copies of requests failed on it", canary.failed, canary.requests);
            return self.fail(look.now, &why, None, orders);
        }
        let Some(trial) = self.trial_mut() else { return };
        let copies = look.engine(&trial.change.pool, trial.change.canary()).map(|engine| engine.copies);
        let copies = copies.unwrap_or_default();
        trial.proof.look(look.now, copies, &canary);
        let proved = trial.proof.proved();
        trial.change.proved = proved;
        let lasted = look.now.saturating_sub(since);
        let served = canary.requests - canary.failed;
        let (many, soon) = COPIES_SOON;
        let enough = served >= COPIES_SERVED && lasted >= COPIES.0 || served >= many && lasted >= soon;
        let serves = |within: Duration| canary.served.is_some_and(|at| look.now <= at + within);
        // Without copies in flight, requests are few.
        let is_idle = copies == Load::default() && canary.failed == 0;
        if lasted >= COPIES.1 && proved.sequences == 0 && is_idle {
            let few = if canary.requests == 0 { "no request" } else { "too few requests" };
            return self.give_up(look.now, &format!("{few} could be copied to try it"), orders);
        }
        if lasted >= COPIES.1 && !is_idle && (!serves(SILENT) || proved.sequences == 0) {
            return self.fail(look.now, "it stopped serving copies of requests", None, orders);
        }
        if lasted >= COPIES.1 || (enough && proved.sequences > 0 && serves(FRESH)) {
            trial.enter(Step::Recovery(Measure::at(look.now)));
            let Load { sequences, tokens } = proved;
            let shown = format!("{served} copies of requests were served, {sequences} of {tokens} tokens at once");
            self.note(look.now, EventKind::Compared, shown);
            orders.push(TunerOrder::Configure);
        }
    }

    /// Raises the bound while requests wait in promotion or recovery. Engines with few sequences
    /// serve too few copies to prove the capacity of an engine with many.
    pub(super) fn raise_bound(&mut self, look: &EngineLook<'_>) {
        let open = self.trial_mut().filter(|trial| matches!(trial.stage(), Stage::Recovery | Stage::Promotion));
        if let Some(trial) = open
            && trial.is_held_up(look)
        {
            trial.change.proved = trial.change.proved.more();
        }
    }

    /// Sends copies again, because the load has outgrown the load that copies proved.
    fn copy_again(&mut self, look: &EngineLook<'_>, orders: &mut Vec<TunerOrder>) {
        let Some(trial) = self.trial_mut() else { return };
        trial.copied += 1;
        if trial.copied >= COPIED {
            return self.give_up(look.now, "requests wait for it, because it was not tried under so much load", orders);
        }
        trial.enter(Step::Copies(Measure::at(look.now)));
        orders.push(TunerOrder::Configure);
    }

    fn recover(&mut self, look: &EngineLook<'_>, since: Duration, orders: &mut Vec<TunerOrder>) {
        let Some(trial) = self.trial_mut() else { return };
        // Where unchanged engines cannot keep up either, the queue stays, for both arms alike.
        if look.now >= since + RECOVERY || !trial.is_longer(look.engines_of(&trial.change.pool)) {
            trial.enter(Step::Compared(Measure::at(look.now + COMPARISON_SETTLE)));
            orders.push(TunerOrder::Configure);
        }
    }
}

impl EngineTrial {
    /// Removes this engine from the change, and returns the next one.
    fn return_next(&mut self, backend: &str, now: Duration) {
        self.change.leave_out(backend);
        self.enter(Step::Return(Restart::at(now)));
    }

    /// Whether the queue is longer than before the change. Under overload it is never empty.
    fn is_longer<'a>(&self, mut engines: impl Iterator<Item = &'a EngineState>) -> bool {
        engines.any(|engine| engine.waiting > self.waited.max(self.change.backends.len()))
    }

    /// Whether bounds on changed engines have kept requests waiting for a while.
    fn is_held_up(&mut self, look: &EngineLook<'_>) -> bool {
        let (change, stage): (&EngineChange, Stage) = (&self.change, self.stage());
        let own = || look.engines_of(&change.pool).filter(|engine| engine.serves);
        let mut changed = own().filter(|engine| change.changed.contains(&engine.backend)).peekable();
        let is_full = changed.peek().is_some() && changed.all(|engine| engine.used.reaches(change.proved));
        // A long request may wait although there is some room.
        let is_held_up = (is_full || stage == Stage::Recovery) && self.is_longer(own());
        let since = self.held_up.get_or_insert(look.now);
        let is_long = look.now >= *since + if stage == Stage::Compared { HELD_UP } else { RAMP };
        if !is_held_up || is_long {
            self.held_up = None;
        }
        is_held_up && is_long
    }
}
