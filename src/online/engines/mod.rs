//! The slow layer: changes flags by restarting engines one by one, where limits no longer help.
//!
//! ```text
//!   watching -- misses, limits do not help --> simulating -- gain that pays --> change
//!      ^                                            |                             |
//!      `----------------- cool-down <---------------+-----------------------------'
//! ```
//!
//! A change ([`EngineChange`]) begins if the certain gain ([`Trust`]) is at least [`GAIN`] of the
//! loss and, over the time for which the load should last, more than [`PAYS`] times the cost of the
//! restarts. A load should last as long again as it has lasted (Lindy's law), within [`DWELL`]. The
//! change is promoted if the canary loses less than the control by at least that share with
//! [`CONFIDENCE`]; ties restore the old value. Two failures without a promotion freeze the tuner.
//! Pure: the caller simulates, restarts and reports the results.

pub mod flags;
pub mod forecast;
pub mod proof;
pub mod change;
pub mod look;
pub mod advice;
mod pooled;
pub mod saved;
mod decide;
mod verdict;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::engines::change::{EngineChange, Stage};
use crate::engines::forecast::{Question, Trust};
use crate::engines::look::{EngineRules, EngineState, Look, Order, Restarted};
use crate::engines::pooled::Pooled;
use crate::engines::proof::Proof;
use crate::engines::saved::{Closed, SavedEngines};
use crate::event::{Acting, Event, EventKind, Proposal};
use crate::limits::PoolLimits;
use crate::tuner::report::{EngineTuningReport, ProposalReport};

/// Time between simulations: at least, and at most for a load that has lasted long.
pub(crate) const ASK_INTERVAL: Duration = Duration::from_secs(300);
pub(crate) const ASK_INTERVAL_MAX: Duration = Duration::from_secs(900);
/// A simulation without an answer after this time has failed, and no later answer is taken.
pub(crate) const SIMULATED: Duration = Duration::from_secs(3_600);
/// A gain must be this share of the loss, ..
pub(crate) const GAIN: f64 = 0.05;
/// .. and at least this.
pub(crate) const GAIN_MIN: f64 = 0.005;
/// A change must gain this multiple of its cost over the expected time.
pub(crate) const PAYS: f64 = 3.0;
/// The shortest and longest time for which a load is expected to last.
pub(crate) const DWELL: (Duration, Duration) = (Duration::from_secs(7_200), Duration::from_secs(24 * 3_600));
/// Confidence of the verdict on a canary, at all times together.
pub(crate) const CONFIDENCE: f64 = 0.99;
/// Certain gain as a share of the loss where nothing can be simulated.
pub(crate) const ASSUMED: f64 = 0.25;
/// Assumed duration of a restart until a restart or a start of these engines was seen.
pub(crate) const RESTART: Duration = Duration::from_secs(120);
/// How long the canary gets copies: at least (unless [`COPIES_SOON`] is reached) and at most.
pub(crate) const COPIES: (Duration, Duration) = (Duration::from_secs(90), Duration::from_secs(300));
/// Copies that the canary must serve.
pub(crate) const COPIES_SERVED: u64 = 30;
/// Served copies that suffice after this time. The cost of a change is computed with [`COPIES`].
pub(crate) const COPIES_SOON: (u64, Duration) = (1_000, Duration::from_secs(45));
/// Failed copies after which the change may be taken back.
pub(crate) const COPIES_FAILED: u64 = 3;
/// How long a comparison waits until the queue is as short as before the restart.
pub(crate) const RECOVERY: Duration = Duration::from_secs(300);
/// Requests that arrive this soon after a comparison has begun do not count.
pub(crate) const SETTLE: Duration = Duration::from_secs(60);
/// When a comparison without a winner ends: the later time if it shows [`PROMISING`] of the gain.
pub(crate) const COMPARED: (Duration, Duration) = (Duration::from_secs(2_700), Duration::from_secs(3 * 3_600));
pub(crate) const PROMISING: f64 = 1.0 / 3.0;
/// Batches after which a comparison without a gain that matters ends.
pub(crate) const BATCHES: usize = 12;
/// ln of the evidence that the canary fails more often: by chance 1 in 100, at all times.
pub(crate) const SURGE: f64 = 4.6;
/// How long an engine may be out of rotation.
pub(crate) const ABSENT: Duration = Duration::from_secs(10);
/// How long an engine is watched after a restart in promotion.
pub(crate) const WATCHED: Duration = Duration::from_secs(60);
/// After this time without a look, the gateway stood still and does not know the events in between.
pub(crate) const GAP: Duration = Duration::from_secs(60);
/// How long a restart may be blocked.
pub(crate) const BLOCKED: Duration = Duration::from_secs(900);
/// Time between two attempts at a blocked restart.
const RETRY: Duration = Duration::from_secs(10);
/// Rest after a change that helped.
pub(crate) const REST: Duration = Duration::from_secs(300);
/// A value that failed is closed for this time, doubled by each failure up to [`CLOSED_MAX`].
pub(crate) const CLOSED: Duration = Duration::from_secs(6 * 3_600);
pub(crate) const CLOSED_MAX: Duration = Duration::from_secs(7 * 24 * 3_600);
/// Failures that freeze the tuner.
pub(crate) const FAILURES: u32 = 2;
const HOUR: Duration = Duration::from_secs(3_600);
/// Attempts to restart an engine with the old value.
const ATTEMPTS: u32 = 3;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum State {
    /// Nothing is asked before this moment.
    Watching(Duration),
    Simulating(Duration),
    /// Since when a restart waits; if one was ordered, the backend and the time.
    Restarting {
        since: Duration,
        ordered: Option<(String, Duration)>,
        retry: Duration,
        failed: u32,
    },
    /// Copies, recovery, comparison or watch. `absent`: since when an engine is out of rotation.
    Measuring {
        since: Duration,
        absent: Option<Duration>,
    },
}

/// Changes flags of engines, one change at a time.
#[derive(Debug)]
pub struct EngineTuner {
    pub(crate) rules: EngineRules,
    pub(crate) state: State,
    pub(crate) change: Option<EngineChange>,
    pub(crate) proposal: Option<(Proposal, EngineChange)>,
    pub(crate) approved: Option<u64>,
    pub(crate) asked: Option<Question>,
    pub(crate) trust: Trust,
    pub(crate) numbers: u64,
    pub(crate) closed: Vec<Closed>,
    restarts: VecDeque<Duration>,
    pub(crate) failures: u32,
    pub(crate) frozen: Option<String>,
    /// Duration of the last restart.
    pub(crate) lasts: Option<Duration>,
    /// Results of simulations, by pool.
    pub(crate) pooled: BTreeMap<String, Pooled>,
    pub(crate) asked_last: Option<String>,
    /// Misses caused by changes so far.
    pub(crate) spent: f64,
    /// When `spent` last decayed.
    pub(crate) spent_at: Duration,
    /// Requests and misses when the change began, or when they were first known.
    pub(crate) before: Option<(f64, f64)>,
    /// Share of requests that missed before the change.
    pub(crate) missed_before: f64,
    /// Requests in the pool's queue when the change began.
    pub(crate) waited: usize,
    pub(crate) proof: Proof,
    /// Since when requests wait because changed engines may not be loaded more.
    pub(crate) held_up: Option<Duration>,
    /// How often the canary got copies again.
    pub(crate) copied: u32,
    looked: Option<Duration>,
    /// A pool, and the limits that a promoted change brought.
    pub(crate) adopted: Option<(String, PoolLimits)>,
    /// A pool, limits that are better without a change by simulation, and why.
    pub(crate) suggested: Option<(String, PoolLimits, String)>,
    /// Suggestions, and until when they are not repeated.
    pub(crate) suggestions: Vec<(String, PoolLimits, Duration)>,
    pub(crate) belief: String,
    pub(crate) events: Vec<Event>,
}

impl EngineTuner {
    /// A tuner that watches.
    pub fn new(rules: EngineRules) -> Self {
        Self {
            rules,
            state: State::Watching(Duration::ZERO),
            change: None,
            proposal: None,
            approved: None,
            asked: None,
            trust: Trust::default(),
            numbers: 0,
            closed: Vec::new(),
            restarts: VecDeque::new(),
            failures: 0,
            frozen: None,
            lasts: None,
            pooled: BTreeMap::new(),
            asked_last: None,
            spent: 0.0,
            spent_at: Duration::ZERO,
            before: None,
            missed_before: 0.0,
            waited: 0,
            proof: Proof::default(),
            held_up: None,
            copied: 0,
            looked: None,
            adopted: None,
            suggested: None,
            suggestions: Vec::new(),
            belief: "nothing was observed yet".to_owned(),
            events: Vec::new(),
        }
    }

    /// Sets new rules.
    pub fn set_rules(&mut self, rules: EngineRules) {
        self.rules = rules;
    }

    /// The change under way.
    pub fn change(&self) -> Option<&EngineChange> {
        self.change.as_ref()
    }

    /// Why the tuner froze itself.
    pub fn frozen(&self) -> Option<&str> {
        self.frozen.as_deref()
    }

    /// Resumes after [`frozen`](Self::frozen).
    pub fn thaw(&mut self) {
        (self.frozen, self.failures) = (None, 0);
    }

    /// The proposed change.
    pub fn proposal(&self) -> Option<&Proposal> {
        self.proposal.as_ref().map(|(proposal, _)| proposal)
    }

    /// Approves a proposal. Returns whether it is the present one.
    pub fn approve(&mut self, id: u64) -> bool {
        let known = self.proposal().is_some_and(|proposal| proposal.id == id);
        self.approved = if known { Some(id) } else { self.approved };
        known
    }

    /// The events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// The state for a later gateway.
    pub fn saved(&self, now: Duration) -> SavedEngines {
        let left = |closed: &Closed| (closed.clone(), closed.until.saturating_sub(now).as_secs());
        SavedEngines {
            change: self.change.clone(),
            trust: self.trust.clone(),
            numbers: self.numbers,
            failures: self.failures,
            lasts: self.lasts.unwrap_or_default().as_secs(),
            closed: self.closed.iter().map(left).collect(),
            frozen: self.frozen.clone(),
            spent: self.spent,
            missed_before: self.missed_before,
            restarts: self.restarts.iter().map(|at| now.saturating_sub(*at).as_secs()).collect(),
        }
    }

    /// Continues from an earlier gateway: a promotion goes on, any other change is taken back.
    /// `is_same`: pools and limits have not changed.
    pub fn restore(&mut self, saved: SavedEngines, is_same: bool, now: Duration) {
        self.trust = saved.trust;
        (self.numbers, self.failures) = (saved.numbers, saved.failures);
        (self.frozen, self.spent, self.spent_at) = (saved.frozen, saved.spent, now);
        // The misses of a change that goes on count from now.
        (self.before, self.missed_before) = (None, saved.missed_before);
        let since = |ago: u64| now.checked_sub(Duration::from_secs(ago));
        // Restarts before this gateway's clock began count at time 0.
        self.restarts = saved.restarts.into_iter().map(|ago| since(ago).unwrap_or_default()).collect();
        self.lasts = Some(Duration::from_secs(saved.lasts)).filter(|lasts| !lasts.is_zero());
        let until = |(closed, left): (Closed, u64)| Closed { until: now + Duration::from_secs(left), ..closed };
        self.closed = saved.closed.into_iter().map(until).collect();
        self.change = saved.change;
        if let Some(change) = self.change.as_mut().filter(|_| !is_same) {
            change.limits = None;
        }
        if let Some(change) = self.change.as_mut().filter(|change| change.stage != Stage::Promotion) {
            change.stage = Stage::Return;
            self.note(now, EventKind::StoodBack, "the gateway was restarted while it was tried".to_owned());
        }
        match self.change {
            Some(_) => self.restart_next(now),
            // Another gateway may have finished this one's change.
            None => self.state = State::Watching(now),
        }
    }

    /// The present activity and the reasons.
    pub fn report(&self) -> EngineTuningReport {
        let doing = match (&self.change, &self.state) {
            (Some(change), _) => {
                let what = match change.stage {
                    Stage::Canary => format!("{} restarts with it", change.canary()),
                    Stage::Copies => format!("{} gets copies of requests", change.canary()),
                    Stage::Recovery => "requests that waited meanwhile are served".to_owned(),
                    Stage::Compared => format!("{} is compared with {}", change.canary(), change.control()),
                    Stage::Promotion => {
                        format!("{} of {} engines have it", change.changed.len(), change.backends.len())
                    }
                    Stage::Return => "taken back".to_owned(),
                };
                let (from, to) = (change.flag.show(change.from), change.flag.show(change.to));
                format!("{} = {to} (was {from}): {what}", change.key())
            }
            (None, State::Simulating(_)) => "simulates what may help".to_owned(),
            (None, _) => "watching".to_owned(),
        };
        let shown = |own: &Proposal| ProposalReport::new(format!("e{}", own.id), own, self.approved == Some(own.id));
        let proposal = self.proposal().map(shown);
        EngineTuningReport { doing, why: self.belief.clone(), proposal, changes: self.trust.all().to_vec() }
    }

    /// Looks, about once a second.
    pub fn step(&mut self, look: &Look<'_>) -> Vec<Order> {
        let mut orders = Vec::new();
        let now = look.now;
        let looked = self.looked.replace(now).unwrap_or(now);
        let jumped = (now < looked).then(|| "the clock went backwards".to_owned());
        let gap =
            (now > looked + GAP).then(|| format!("the gateway stood still for {:.0} s", (now - looked).as_secs_f64()));
        let interference = self.interference(look);
        if let Some(why) = interference.or_else(|| jumped.or(gap).filter(|_| self.is_changing())) {
            self.note(now, EventKind::StoodBack, why);
            self.take_back(now, &mut orders);
        }
        self.forget_misses(look);
        self.raise_bound(look);
        match self.state.clone() {
            State::Watching(from) if now >= from => self.watch(look, &mut orders),
            State::Simulating(since) if now >= since + SIMULATED => self.state = State::Watching(now),
            State::Watching(_) | State::Simulating(_) => {}
            State::Restarting { .. } => self.restart(look, &mut orders),
            State::Measuring { since, absent } => self.measure(look, since, absent, &mut orders),
        }
        orders
    }

    /// Drops questions, proposals and limits of another configuration.
    pub(crate) fn forget(&mut self) {
        (self.asked, self.proposal, self.approved, self.suggested) = (None, None, None, None);
        self.suggestions.clear();
        self.pooled.clear();
        // While engines return, the limits of the configuration are in force.
        self.change.iter_mut().for_each(|change| change.limits = None);
    }

    /// The pool and limits of a change, if they are in force now.
    pub(crate) fn limits_in_force(&self) -> Option<(String, PoolLimits)> {
        self.change.as_ref().and_then(|change| Some((change.pool.clone(), change.limits_in_force()?)))
    }

    /// Takes the change under way back, because something else changed.
    pub fn stand_back(&mut self, why: &str, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        if self.is_changing() {
            self.note(now, EventKind::StoodBack, why.to_owned());
            self.take_back(now, &mut orders);
        }
        orders
    }

    fn is_changing(&self) -> bool {
        self.change.as_ref().is_some_and(|change| change.stage != Stage::Return)
    }

    /// Why the change under way must be dropped: it may no longer act, or another hand changed an
    /// engine.
    fn interference(&mut self, look: &Look<'_>) -> Option<String> {
        let change = self.change.as_mut().filter(|change| change.stage != Stage::Return)?;
        if look.acting == Acting::Proposes {
            return Some("the tuner may no longer make changes".to_owned());
        }
        if let Some(why) = look.stands_back {
            return Some(why.to_owned());
        }
        if !matches!(self.state, State::Measuring { .. }) {
            return None;
        }
        let engine = |backend: &String| look.engines.iter().find(|e| e.pool == change.pool && e.backend == *backend);
        let is_other = |backend: &&String| {
            let wanted = if change.changed.contains(*backend) { change.to } else { change.from };
            engine(backend).and_then(|engine| engine.flags.as_ref()).and_then(|flags| flags.get(&change.flag))
                != Some(&wanted)
        };
        let other = change.backends.iter().find(is_other)?.clone();
        // The tuner leaves an engine alone that another hand changed.
        change.changed.retain(|backend| *backend != other);
        Some(format!("{other} runs with other flags than the tuner gave it"))
    }

    pub(crate) fn restarts_left(&mut self, now: Duration) -> u32 {
        while self.restarts.front().is_some_and(|at| *at + HOUR <= now) {
            self.restarts.pop_front();
        }
        self.rules.restarts_per_hour.saturating_sub(u32::try_from(self.restarts.len()).unwrap_or(u32::MAX))
    }

    pub(crate) fn begin(&mut self, look: &Look<'_>, change: EngineChange) {
        let own = look.need_of(&change.pool);
        self.before = own.map(|need| need.totals);
        self.missed_before = own.map_or(0.0, |need| 1.0 - need.score.attainment);
        let own = look.engines.iter().filter(|engine| engine.pool == change.pool);
        self.waited = own.map(|engine| engine.waiting).max().unwrap_or_default();
        (self.proposal, self.approved) = (None, None);
        (self.proof, self.held_up, self.copied, self.pooled) = Default::default();
        self.change = Some(change);
        self.note(look.now, EventKind::Tried, self.belief.clone());
        self.restart_next(look.now);
    }

    pub(crate) fn restart_next(&mut self, now: Duration) {
        self.state = State::Restarting { since: now, ordered: None, retry: now, failed: 0 };
    }

    fn restart(&mut self, look: &Look<'_>, orders: &mut Vec<Order>) {
        let State::Restarting { since, ordered: None, retry, failed } = self.state.clone() else { return };
        let Some(change) = self.change.clone() else { return };
        let Some(backend) = change.next().cloned() else {
            return if change.stage == Stage::Return { self.returned(look) } else { self.promoted(look) };
        };
        if look.now < retry {
            return;
        }
        let returns = change.stage == Stage::Return;
        let is_there =
            |engine: &EngineState| engine.pool == change.pool && engine.backend == backend && engine.flags.is_some();
        if !look.engines.iter().any(is_there) {
            return self.wait_for(&backend, look.now >= since + BLOCKED, returns, look.now, orders);
        }
        let runs_as_before = |engine: &EngineState| {
            let is_it = engine.pool == change.pool && engine.backend == backend && engine.serves;
            is_it && engine.flags.as_ref().and_then(|flags| flags.get(&change.flag)) == Some(&change.from)
        };
        if returns && look.engines.iter().any(runs_as_before) {
            // The engine has returned by itself.
            if let Some(change) = &mut self.change {
                change.changed.retain(|other| *other != backend);
            }
            return self.restart_next(look.now);
        }
        let waits = look.waits.is_some() || self.restarts_left(look.now) == 0;
        if waits && !returns {
            // A promotion may wait for the permitted hour, a canary that has not begun may not.
            if change.stage == Stage::Canary && look.now >= since + BLOCKED {
                self.give_up(look.now, "its restart had to wait too long", orders);
            } else if change.stage != Stage::Canary {
                // The time for a blocked restart begins when it may begin.
                self.state = State::Restarting { since: look.now, ordered: None, retry, failed };
            }
            return;
        }
        let value = if returns { change.from } else { change.to };
        let crowded = change.crowded || (returns && look.now >= since + BLOCKED);
        let engine = format!("{}/{backend}", change.pool);
        orders.push(Order::Restart { engine, flag: change.flag, value, crowded });
        self.restarts.push_back(look.now);
        self.state = State::Restarting { since, ordered: Some((backend.clone(), look.now)), retry, failed };
        // Saved before the restart, so that a later gateway takes it back.
        if let Some(change) = self.change.as_mut().filter(|_| !returns) {
            change.changed.push(backend);
        }
    }

    /// Takes the result of a restart.
    pub fn restarted(&mut self, outcome: Restarted, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        let State::Restarting { since, ordered: Some((backend, ordered)), failed, .. } = self.state.clone() else {
            return orders;
        };
        let Some(change) = &mut self.change else { return orders };
        let returns = change.stage == Stage::Return;
        let again = |failed| State::Restarting { since, ordered: None, retry: now + RETRY, failed };
        match outcome {
            Restarted::Done => {
                self.lasts = Some(now.saturating_sub(ordered).max(Duration::from_secs(1)));
                if returns {
                    change.changed.retain(|other| *other != backend);
                    self.restart_next(now);
                } else {
                    if change.stage == Stage::Canary {
                        change.stage = Stage::Copies;
                        orders.push(Order::Configure);
                    }
                    self.state = State::Measuring { since: now, absent: None };
                }
            }
            Restarted::Failed(why) if returns => {
                if failed + 1 < ATTEMPTS {
                    self.state = again(failed + 1);
                } else {
                    change.changed.retain(|other| *other != backend);
                    self.frozen = Some(format!("frozen: {backend} could not be restarted as it was: {why}"));
                    self.restart_next(now);
                }
            }
            Restarted::Failed(why) => {
                // The engine has returned to the last good flags by itself.
                change.changed.retain(|other| *other != backend);
                self.fail(now, &format!("{backend} did not start with it: {why}"), None, &mut orders);
            }
            Restarted::Blocked(why) => {
                self.belief = format!("{backend} is not restarted yet: {why}");
                self.restarts.pop_back();
                if !returns {
                    change.changed.retain(|other| *other != backend);
                }
                if !returns && now >= since + BLOCKED {
                    self.give_up(now, &why, &mut orders);
                } else {
                    self.state = again(failed);
                }
            }
        }
        orders
    }
}
