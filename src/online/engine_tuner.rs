//! The slow layer: changes flags of engines, by restarting one after the other, where the limits of the gateway no longer help.
//!
//! ```text
//!   watching -- misses for a while, limits do not help --> simulating -- a gain that pays --> a change ([`EngineChange`])
//!      ^                                                        |                                   |
//!      `--------------- cool-down <-----------------------------+-----------------------------------'
//! ```
//!
//! A change begins if the gain that is certain ([`Trust`]) is at least [`GAIN`] of the loss and, over the time for which the load
//! is expected to stay as it is, more than [`PAYS`] times what the restarts cost. That time is as long as the load has been as it
//! is (Lindy's law: without knowledge, half of a lifetime is over), within [`DWELL`]. It is promoted if the canary's loss is
//! lower by at least that much with [`CONFIDENCE`]; a tie keeps what was. Two failures in a row freeze the tuner. How much
//! requests may load an engine with a change: [`EngineTuner::trials`].
//!
//! Pure: the caller simulates, restarts, and reports what came of it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::change::{EngineChange, Stage};
use crate::engine_look::{EngineRules, EngineState, Look, Order, Restarted};
use crate::engine_saved::{Closed, SavedEngines};
use crate::event::{Acting, Event, EventKind, Proposal};
use crate::forecast::{Question, Trust};
use crate::limits::PoolLimits;
use crate::pooled::Pooled;
use crate::proof::Proof;
use crate::report::{EngineTuningReport, ProposalReport};

/// Between two simulations, at least, and at most once the load has lasted for long.
pub(crate) const ASK_INTERVAL: Duration = Duration::from_secs(300);
pub(crate) const ASK_INTERVAL_MAX: Duration = Duration::from_secs(900);
/// A simulation without an answer for so long has failed. A later answer would be taken for one of the next question.
pub(crate) const SIMULATED: Duration = Duration::from_secs(3_600);
/// A gain must be this share of the loss ..
pub(crate) const GAIN: f64 = 0.05;
/// .. and at least this.
pub(crate) const GAIN_MIN: f64 = 0.005;
/// What a change must gain in the time expected, as a multiple of what it costs.
pub(crate) const PAYS: f64 = 3.0;
/// The shortest and the longest time for which a load is expected to stay.
pub(crate) const DWELL: (Duration, Duration) = (Duration::from_secs(7_200), Duration::from_secs(24 * 3_600));
/// Of the verdict on a canary, at all times together.
pub(crate) const CONFIDENCE: f64 = 0.99;
/// The share of the loss that a change is assumed to gain for certain where nothing can be simulated.
pub(crate) const ASSUMED: f64 = 0.25;
/// What a restart is assumed to take until one was seen, or a start of these engines.
pub(crate) const RESTART: Duration = Duration::from_secs(120);
/// How long the canary gets copies: at least, unless [`COPIES_SOON`] is reached, and at most.
pub(crate) const COPIES: (Duration, Duration) = (Duration::from_secs(90), Duration::from_secs(300));
/// Copies that it must serve.
pub(crate) const COPIES_SERVED: u64 = 30;
/// So many copies that it has served are enough after this time: meanwhile the other engines serve its share of the requests. What a
/// change costs is weighed with [`COPIES`].
pub(crate) const COPIES_SOON: (u64, Duration) = (1_000, Duration::from_secs(45));
/// Copies that fail before it is taken back.
pub(crate) const COPIES_FAILED: u64 = 3;
/// For how long a comparison waits for the queue to become as short as before the restart.
pub(crate) const RECOVERY: Duration = Duration::from_secs(300);
/// When a comparison begins, requests do not count for this long.
pub(crate) const SETTLE: Duration = Duration::from_secs(60);
/// When a comparison ends without a winner, and when it does if it shows [`PROMISING`] of the gain that was forecast.
pub(crate) const COMPARED: (Duration, Duration) = (Duration::from_secs(2_700), Duration::from_secs(3 * 3_600));
pub(crate) const PROMISING: f64 = 1.0 / 3.0;
/// Batches before a comparison is given up as without a gain that matters.
pub(crate) const BATCHES: usize = 12;
/// Evidence that the canary fails more often: 1 in 100 by chance, at all times.
pub(crate) const SURGE: f64 = 4.6;
/// How long an engine may be out of rotation.
pub(crate) const ABSENT: Duration = Duration::from_secs(10);
/// How long each engine is watched after its restart with a promoted change.
pub(crate) const WATCHED: Duration = Duration::from_secs(60);
/// Without a look for so long, the gateway stood still: what happened meanwhile is not known.
pub(crate) const GAP: Duration = Duration::from_secs(60);
/// How long a restart may wait for its turn.
pub(crate) const BLOCKED: Duration = Duration::from_secs(900);
/// Between two attempts at a restart that waits.
const RETRY: Duration = Duration::from_secs(10);
/// After a change that helped.
pub(crate) const REST: Duration = Duration::from_secs(300);
/// A value that failed is not tried again for this long, twice as long with each failure, up to [`CLOSED_MAX`].
pub(crate) const CLOSED: Duration = Duration::from_secs(6 * 3_600);
pub(crate) const CLOSED_MAX: Duration = Duration::from_secs(7 * 24 * 3_600);
/// Failures in a row that freeze the tuner.
pub(crate) const FAILURES: u32 = 2;
/// For the restarts of an hour.
const HOUR: Duration = Duration::from_secs(3_600);
/// How often an engine is restarted as it was, if that fails.
const ATTEMPTS: u32 = 3;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum State {
    /// Nothing before this moment.
    Watching(Duration),
    /// Since when.
    Simulating(Duration),
    /// A restart waits since then, or was ordered of this backend.
    Restarting { since: Duration, ordered: Option<(String, Duration)>, retry: Duration, failed: u32 },
    /// Copies, comparison, or a look at engines after a restart. `absent`: since when one of them is out of rotation.
    Measuring { since: Duration, absent: Option<Duration> },
}

/// See the header of this file.
#[derive(Debug)]
pub struct EngineTuner {
    pub(crate) rules: EngineRules,
    pub(crate) state: State,
    pub(crate) change: Option<EngineChange>,
    pub(crate) proposal: Option<(Proposal, EngineChange)>,
    /// The proposal that an operator has approved.
    pub(crate) approved: Option<u64>,
    pub(crate) asked: Option<Question>,
    pub(crate) trust: Trust,
    pub(crate) numbers: u64,
    pub(crate) closed: Vec<Closed>,
    restarts: VecDeque<Duration>,
    pub(crate) failures: u32,
    pub(crate) frozen: Option<String>,
    /// How long a restart took.
    pub(crate) lasts: Option<Duration>,
    /// What simulations have said, of each pool.
    pub(crate) pooled: BTreeMap<String, Pooled>,
    /// The pool of the last question.
    pub(crate) asked_last: Option<String>,
    /// Misses that changes have caused so far.
    pub(crate) spent: f64,
    /// When some of that was last forgotten.
    pub(crate) spent_at: Duration,
    /// Totals when the change began, or since when they are known.
    pub(crate) before: Option<(f64, f64)>,
    /// The share of requests that missed before the change.
    pub(crate) missed_before: f64,
    /// Requests that waited in the queue of its pool when the change began.
    pub(crate) waited: usize,
    /// What copies have shown that the canary sustains.
    pub(crate) proof: Proof,
    /// Since when requests wait because engines of the change may not be loaded more.
    pub(crate) held_up: Option<Duration>,
    /// How often the canary has got copies again.
    pub(crate) copied: u32,
    /// When it looked last.
    looked: Option<Duration>,
    /// A pool, and limits that have become its own with a change that was promoted.
    pub(crate) adopted: Option<(String, PoolLimits)>,
    /// A pool, limits that a simulation has shown to be better without a change, and why.
    pub(crate) suggested: Option<(String, PoolLimits, String)>,
    /// Those that were suggested, and until when they are not suggested again.
    pub(crate) suggestions: Vec<(String, PoolLimits, Duration)>,
    pub(crate) belief: String,
    pub(crate) events: Vec<Event>,
}

impl EngineTuner {
    /// One that watches.
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

    /// Other rules from now on.
    pub fn set_rules(&mut self, rules: EngineRules) {
        self.rules = rules;
    }

    /// The change under way.
    pub fn change(&self) -> Option<&EngineChange> {
        self.change.as_ref()
    }

    /// Why it froze by itself.
    pub fn frozen(&self) -> Option<&str> {
        self.frozen.as_deref()
    }

    /// Goes on after it froze by itself.
    pub fn thaw(&mut self) {
        (self.frozen, self.failures) = (None, 0);
    }

    /// The change that it would make.
    pub fn proposal(&self) -> Option<&Proposal> {
        self.proposal.as_ref().map(|(proposal, _)| proposal)
    }

    /// Approves the proposal of that number. Returns whether it is the present one.
    pub fn approve(&mut self, id: u64) -> bool {
        let known = self.proposal().is_some_and(|proposal| proposal.id == id);
        self.approved = if known { Some(id) } else { self.approved };
        known
    }

    /// What it did since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// What a later gateway goes on from.
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

    /// Goes on where an earlier gateway ended: a change that was promoted is finished, any other is taken back.
    /// `is_same`: pools and limits are those of then.
    pub fn restore(&mut self, saved: SavedEngines, is_same: bool, now: Duration) {
        self.trust = saved.trust;
        (self.numbers, self.failures) = (saved.numbers, saved.failures);
        (self.frozen, self.spent, self.spent_at) = (saved.frozen, saved.spent, now);
        // The misses of a change that goes on count from now.
        (self.before, self.missed_before) = (None, saved.missed_before);
        let since = |ago: u64| now.checked_sub(Duration::from_secs(ago));
        // Those before the start of this gateway's clock count as at its start.
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
            // Another gateway may have finished what this one had begun.
            None => self.state = State::Watching(now),
        }
    }

    /// What it does and believes.
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

    /// What was asked, answered and proposed concerns another configuration.
    pub(crate) fn forget(&mut self) {
        (self.asked, self.proposal, self.approved, self.suggested) = (None, None, None, None);
        self.suggestions.clear();
        self.pooled.clear();
        // Those of the configuration are in force while engines return.
        self.change.iter_mut().for_each(|change| change.limits = None);
    }

    /// The limits that a change has brought, and their pool, where they are in force now.
    pub(crate) fn limits_in_force(&self) -> Option<(String, PoolLimits)> {
        self.change.as_ref().and_then(|change| Some((change.pool.clone(), change.limits_in_force()?)))
    }

    /// Drops the change under way, because something else changed.
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

    /// Why the change under way must be dropped: another hand changed an engine, or it may no longer act.
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
        // What runs there now is not the tuner's.
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
            // It has returned by itself.
            if let Some(change) = &mut self.change {
                change.changed.retain(|other| *other != backend);
            }
            return self.restart_next(look.now);
        }
        let waits = look.waits.is_some() || self.restarts_left(look.now) == 0;
        if waits && !returns {
            // A promotion may wait for its hour; a canary that has not begun need not.
            if change.stage == Stage::Canary && look.now >= since + BLOCKED {
                self.give_up(look.now, "its restart had to wait too long", orders);
            } else if change.stage != Stage::Canary {
                // What is in its way once it may begin has time from then on.
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
        // Written down before it happens: a gateway that ends meanwhile takes it back.
        if let Some(change) = self.change.as_mut().filter(|_| !returns) {
            change.changed.push(backend);
        }
    }

    /// What came of a restart.
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
                // It has returned to its last good flags by itself.
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
