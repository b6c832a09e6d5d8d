//! The second half of [`EngineTuner`]: measures a change and ends it.
//!
//! A change ends in one of four ways. It is promoted. It fails, which counts towards freezing: an
//! engine did not start, left rotation, failed requests or was slower. It is taken back without
//! counting: a tie, too few requests, or the error budget is used up. Or it is dropped, because
//! something else changed.

use std::time::Duration;

use crate::engines::change::{EngineChange, Stage};
use crate::engines::forecast::Realised;
use crate::engines::look::{EngineState, Look, Order};
use crate::engines::proof::Load;
use crate::engines::saved::Closed;
use crate::engines::{
    ABSENT, BATCHES, CLOSED, CLOSED_MAX, COMPARED, CONFIDENCE, COPIES, COPIES_FAILED, COPIES_SERVED, COPIES_SOON,
    EngineTuner, FAILURES, GAIN, GAIN_MIN, PROMISING, RECOVERY, REST, SETTLE, SURGE, State, WATCHED,
};
use crate::event::{Event, EventKind};
use crate::observe::arms::ArmDifference;
use sluice_gateway::pool::TrialBound;

/// A canary that has served no copy for this long may hang.
const SILENT: Duration = Duration::from_secs(15);
/// A canary that has served a copy within this time serves.
const FRESH: Duration = Duration::from_secs(2);
/// A comparison ends after requests have waited this long because the canary may not be loaded
/// more.
const HELD_UP: Duration = Duration::from_secs(30);
/// How often a canary may get copies.
const COPIED: u32 = 3;
/// In recovery and promotion, changed engines may be loaded more each time that requests have
/// waited this long.
const RAMP: Duration = Duration::from_secs(5);
/// The difference that is found soonest, as a share of the control's loss.
const SOONEST: f64 = 0.3;

/// Period of the error budget, in seconds.
const BUDGET_SECONDS: f64 = 30.0 * 24.0 * 3_600.0;

impl EngineTuner {
    /// Bounds of requests on these engines; `None`: the engine's limits alone.
    pub fn trials(&self, engines: &[EngineState]) -> Vec<Option<TrialBound>> {
        let trial = |load: Load| TrialBound { slots: load.sequences, tokens: load.tokens };
        engines.iter().map(|engine| self.bound(engine, engines).map(trial)).collect()
    }

    /// How much requests may load an engine; `None`: the limits alone bound it.
    pub(crate) fn bound(&self, engine: &EngineState, engines: &[EngineState]) -> Option<Load> {
        let change = self.change.as_ref().filter(|change| change.pool == engine.pool)?;
        let bound = change.bound(&engine.backend)?;
        // If no unchanged engine serves, a returning one may.
        let serves =
            |other: &EngineState| other.pool == change.pool && other.serves && !change.changed.contains(&other.backend);
        let is_last = change.stage == Stage::Return && !engines.iter().any(serves);
        (!is_last).then_some(bound)
    }

    pub(crate) fn measure(
        &mut self,
        look: &Look<'_>,
        since: Duration,
        absent: Option<Duration>,
        orders: &mut Vec<Order>,
    ) {
        let Some(change) = self.change.clone() else { return };
        let serves = |backend: &String| {
            look.engines.iter().any(|engine| engine.pool == change.pool && engine.backend == *backend && engine.serves)
        };
        let gone = change.backends.iter().find(|backend| !serves(backend));
        let absent = gone.map(|_| absent.unwrap_or(look.now));
        self.state = State::Measuring { since, absent };
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
        if change.stage == Stage::Compared && self.is_held_up(look, &change) {
            return self.copy_again(look, orders);
        }
        match change.stage {
            Stage::Copies => self.look_at_copies(look, since, orders),
            Stage::Recovery => self.recover(look, &change, since, orders),
            Stage::Compared => self.compare(look, &change, since, orders),
            _ if look.now >= since + WATCHED => self.restart_next(look.now),
            _ => {}
        }
    }

    /// The experiment was stopped by a guardrail or an operator: the change has failed.
    pub fn experiment_stopped(&mut self, why: &str, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        let is_measured =
            self.change.as_ref().is_some_and(|change| matches!(change.stage, Stage::Copies | Stage::Compared));
        if is_measured && matches!(self.state, State::Measuring { .. }) {
            self.fail(now, why, None, &mut orders);
        }
        orders
    }

    fn look_at_copies(&mut self, look: &Look<'_>, since: Duration, orders: &mut Vec<Order>) {
        let [_, canary] = look.arms.counts();
        if canary.failed >= COPIES_FAILED && look.arms.surge() > SURGE {
            let why = format!("{} of {} copies of requests failed on it", canary.failed, canary.requests);
            return self.fail(look.now, &why, None, orders);
        }
        let Some(change) = &mut self.change else { return };
        let is_canary = |engine: &&EngineState| engine.pool == change.pool && engine.backend == change.canary();
        let copies = look.engines.iter().find(is_canary).map(|engine| engine.copies).unwrap_or_default();
        self.proof.look(look.now, copies, &canary);
        change.proved = self.proof.proved();
        let lasted = look.now.saturating_sub(since);
        let served = canary.requests - canary.failed;
        let (many, soon) = COPIES_SOON;
        let enough = served >= COPIES_SERVED && lasted >= COPIES.0 || served >= many && lasted >= soon;
        let serves = |within: Duration| canary.served.is_some_and(|at| look.now <= at + within);
        // Without copies in flight, requests are few and the engine is not silent.
        let is_idle = copies == Load::default() && canary.failed == 0;
        if lasted >= COPIES.1 && change.proved.sequences == 0 && is_idle {
            let few = if canary.requests == 0 { "no request" } else { "too few requests" };
            return self.give_up(look.now, &format!("{few} could be copied to try it"), orders);
        }
        if lasted >= COPIES.1 && !is_idle && (!serves(SILENT) || change.proved.sequences == 0) {
            return self.fail(look.now, "it stopped serving copies of requests", None, orders);
        }
        if lasted >= COPIES.1 || (enough && change.proved.sequences > 0 && serves(FRESH)) {
            change.stage = Stage::Recovery;
            let Load { sequences, tokens } = change.proved;
            let shown = format!("{served} copies of requests were served, {sequences} of {tokens} tokens at once");
            self.note(look.now, EventKind::Compared, shown);
            self.state = State::Measuring { since: look.now, absent: None };
            orders.push(Order::Configure);
        }
    }

    /// Whether requests have waited for a while because changed engines may not be loaded more.
    fn is_held_up(&mut self, look: &Look<'_>, change: &EngineChange) -> bool {
        let own = || look.engines.iter().filter(|engine| engine.pool == change.pool && engine.serves);
        let mut changed = own().filter(|engine| change.changed.contains(&engine.backend)).peekable();
        let is_full = changed.peek().is_some() && changed.all(|engine| engine.used.reaches(change.proved));
        // A long request may wait although there is some room.
        let is_full = is_full || change.stage == Stage::Recovery;
        let waits = own().any(|engine| engine.waiting > self.waited.max(change.backends.len()));
        let since = self.held_up.get_or_insert(look.now);
        let is_long = look.now >= *since + if change.stage == Stage::Compared { HELD_UP } else { RAMP };
        if !(is_full && waits) || is_long {
            self.held_up = None;
        }
        is_full && waits && is_long
    }

    /// While requests wait for changed engines in promotion or recovery, raises the bound step by
    /// step: narrow engines serve too few requests for their copies to show the capacity of a wide
    /// one.
    pub(crate) fn raise_bound(&mut self, look: &Look<'_>) {
        let open = self.change.clone().filter(|change| matches!(change.stage, Stage::Recovery | Stage::Promotion));
        if open.is_some_and(|change| self.is_held_up(look, &change))
            && let Some(change) = &mut self.change
        {
            change.proved = change.proved.more();
        }
    }

    /// Sends copies again: the load has outgrown the canary's proof.
    fn copy_again(&mut self, look: &Look<'_>, orders: &mut Vec<Order>) {
        self.copied += 1;
        if self.copied >= COPIED {
            return self.give_up(look.now, "requests wait for it, because it was not tried under so much load", orders);
        }
        if let Some(change) = &mut self.change {
            change.stage = Stage::Copies;
        }
        self.state = State::Measuring { since: look.now, absent: None };
        orders.push(Order::Configure);
    }

    fn recover(&mut self, look: &Look<'_>, change: &EngineChange, since: Duration, orders: &mut Vec<Order>) {
        let own = || look.engines.iter().filter(|engine| engine.pool == change.pool);
        // Where clients send as much as the engines can serve, the queue is never empty.
        let usual = self.waited.max(change.backends.len());
        let is_short = own().all(|engine| engine.waiting <= usual);
        // Where unchanged engines cannot keep up, the queue stays. It affects both arms alike.
        if is_short || look.now >= since + RECOVERY {
            if let Some(change) = &mut self.change {
                change.stage = Stage::Compared;
            }
            self.state = State::Measuring { since: look.now + SETTLE, absent: None };
            orders.push(Order::Configure);
        }
    }

    fn compare(&mut self, look: &Look<'_>, change: &EngineChange, since: Duration, orders: &mut Vec<Order>) {
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
        let Some(found) = look.arms.difference(until, SOONEST, CONFIDENCE) else {
            if look.now >= since + COMPARED.0 {
                self.give_up(look.now, "too few requests to compare", orders);
            }
            return;
        };
        let margin = (GAIN * found.control).max(GAIN_MIN);
        // Overloaded engines fare alike for minutes, so even a gain as large as the forecast takes
        // long to become certain.
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
            if let Some(change) = &mut self.change {
                change.stage = Stage::Promotion;
            }
            orders.push(Order::Configure);
            self.restart_next(look.now);
        } else if is_late || (found.batches >= BATCHES && found.change.low > -margin) {
            self.realised(change, &found, "rolled_back");
            self.close(look.now);
            self.note(look.now, EventKind::Undone, format!("not better: {shown}"));
            self.take_back(look.now, orders);
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

    /// Takes a failed change back.
    pub(crate) fn fail(&mut self, now: Duration, why: &str, found: Option<&ArmDifference>, orders: &mut Vec<Order>) {
        if let Some((change, found)) = self.change.clone().zip(found) {
            self.realised(&change, found, "rolled_back");
        }
        self.failures += 1;
        self.close(now);
        self.note(now, EventKind::Undone, why.to_owned());
        self.take_back(now, orders);
    }

    /// Takes a change back without counting a failure.
    pub(crate) fn give_up(&mut self, now: Duration, why: &str, orders: &mut Vec<Order>) {
        self.close(now);
        self.note(now, EventKind::Undone, why.to_owned());
        self.take_back(now, orders);
    }

    /// The gateway does not run this engine yet (a pod that is not found), or no longer (the
    /// configuration changed).
    pub(crate) fn wait_for(
        &mut self,
        backend: &String,
        is_long: bool,
        returns: bool,
        now: Duration,
        orders: &mut Vec<Order>,
    ) {
        self.belief = format!("{backend} is not there");
        match &mut self.change {
            Some(change) if is_long && returns => {
                change.changed.retain(|other| other != backend);
                self.restart_next(now);
            }
            _ if is_long => self.give_up(now, &format!("{backend} is not there"), orders),
            _ => {}
        }
    }

    pub(crate) fn take_back(&mut self, now: Duration, orders: &mut Vec<Order>) {
        if let Some(change) = &mut self.change {
            change.stage = Stage::Return;
        }
        orders.push(Order::Configure);
        self.restart_next(now);
    }

    /// Closes the value for a while.
    fn close(&mut self, now: Duration) {
        let Some(EngineChange { pool, flag, to, .. }) = self.change.clone() else { return };
        let known = self.closed.iter_mut().find(|one| one.pool == pool && one.flag == flag && one.to == to);
        match known {
            Some(one) => {
                one.failures += 1;
                one.until = now + CLOSED.saturating_mul(1 << one.failures.min(10)).min(CLOSED_MAX);
            }
            None => self.closed.push(Closed { pool, flag, to, until: now + CLOSED, failures: 0 }),
        }
    }

    /// Whether changes have caused more misses than they may.
    pub(crate) fn overspent(&self, look: &Look<'_>) -> bool {
        let (rate, target) = look
            .needs
            .iter()
            .map(|need| (need.score.rate, need.target))
            .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, f64::max(sum.1, one.1)));
        let allowed = self.rules.error_budget * (1.0 - target) * rate * BUDGET_SECONDS;
        let current = if self.change.is_some() { self.spent_by_change(look) } else { 0.0 };
        rate > 0.0 && self.spent + current > allowed
    }

    pub(crate) fn spent_by_change(&self, look: &Look<'_>) -> f64 {
        let own = self.change.as_ref().and_then(|change| look.need_of(&change.pool));
        let Some((own, (requests, missed))) = own.map(|need| need.totals).zip(self.before) else { return 0.0 };
        (own.1 - missed - self.missed_before * (own.0 - requests)).max(0.0)
    }

    /// Lets caused misses decay: after thirty days 37 % still count.
    pub(crate) fn forget_misses(&mut self, look: &Look<'_>) {
        let since = look.now.saturating_sub(self.spent_at).as_secs_f64();
        (self.spent, self.spent_at) = (self.spent * (-since / BUDGET_SECONDS).exp(), look.now);
        let own = self.change.as_ref().and_then(|change| look.need_of(&change.pool));
        self.before = self.before.or(own.map(|need| need.totals));
    }

    pub(crate) fn returned(&mut self, look: &Look<'_>) {
        self.spent += self.spent_by_change(look);
        self.change = None;
        self.state = State::Watching(look.now + self.rules.cool_down);
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

    pub(crate) fn promoted(&mut self, look: &Look<'_>) {
        self.spent += self.spent_by_change(look);
        self.note(look.now, EventKind::Kept, "all engines of the pool have it".to_owned());
        self.failures = 0;
        let change = self.change.take();
        self.adopted = change.and_then(|change| Some((change.pool, change.limits?)));
        self.state = State::Watching(look.now + REST);
    }

    pub(crate) fn note(&mut self, now: Duration, kind: EventKind, why: String) {
        let Some(change) = &self.change else { return };
        let (from, to) = (change.flag.show(change.from), change.flag.show(change.to));
        let values = if matches!(kind, EventKind::Undone | EventKind::StoodBack) { (to, from) } else { (from, to) };
        self.events.push(Event { at: now.as_secs_f64(), kind, key: change.key(), values, why });
    }
}
