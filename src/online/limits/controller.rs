//! Tries one change of the limits at a time and keeps the changes that help.
//!
//! ```text
//!   watching -- made --> settling -- the queue is short --> measuring -- better: kept --> watching
//!                           ^------ not better: undone and closed -------'
//! ```
//!
//! A change stays if the mean loss of later arrivals falls by more than chance and by
//! [`least_gain`]. It is undone at once if the loss is clearly higher, otherwise after
//! [`MEASURED_MAX`]. Where objectives are met, nothing is tried. A trial is undone without a
//! verdict when the permission to act ends ([`Acting`]), a backend enters or leaves rotation, the
//! engines change, or the clock goes backwards.

use std::time::Duration;

use super::moves::{Direction, Move, Steps};
use super::{Knob, LimitRange, Limits, PoolLimits};
use crate::event::{Acting, Event, EventKind};
use crate::gate::{Closings, Proposals};
use crate::observe::diagnosis::Experience;
use crate::observe::lengths::Lengths;
use crate::observe::window::{PoolWindow, Score, Window};

/// Requests that a verdict needs.
pub(crate) const REQUESTS: f64 = 200.0;
/// Below this loss, misses are rare and come in clusters, so a window is judged only after
/// [`MEASURED_MAX`].
const SMALL_LOSS: f64 = 0.2;
/// Requests for a first look. It ends a clearly harmful trial, and begins a trial if the loss is at
/// least [`FIRST_LOOK_LOSS`].
const REQUESTS_SOON: f64 = 40.0;
/// The shortest time for a verdict.
pub(crate) const MEASURED: Duration = Duration::from_secs(30);
/// The shortest time for a first look.
const MEASURED_SOON: Duration = Duration::from_secs(10);
/// The time after which [`REQUESTS_SOON`] requests suffice for a verdict.
pub(super) const MEASURED_MAX: Duration = Duration::from_secs(120);
/// Time after which a window with too few requests ends.
pub(super) const QUIET: Duration = Duration::from_secs(1_200);
/// Loss at which a first look suffices to try a change.
const FIRST_LOOK_LOSS: f64 = 0.5;
/// Least gain as a share of the loss.
const LIMITS_GAIN: f64 = 0.03;
/// A gain that always suffices. If all requests are late, 7 % shorter times bring this gain.
const GAIN_ENOUGH: f64 = 0.02;
/// Standard errors by which the loss must fall before [`MEASURED_MAX`].
const ERRORS: f64 = 2.5;
/// Standard errors of the fall at [`MEASURED_MAX`]: few, because a change was proposed for a reason
/// and can be undone. A change to fewer prefill permits needs only [`least_gain`].
const ERRORS_AT_END: f64 = 0.7;
/// Standard errors of a rise at a first look: many, because the look is repeated.
const ERRORS_SOON: f64 = 3.0;
/// Ratio of losses above which a trial is harmful at a first look.
const WORSE: f64 = 1.3;
/// A trial ends at once at a loss above this offset plus this factor times the loss of the worst
/// ten seconds before the trial.
const HARM: (f64, f64) = (0.1, 1.3);
/// Bounds of the time after a change in which requests do not count.
pub(super) const LIMITS_SETTLE: (Duration, Duration) = (Duration::from_secs(3), Duration::from_secs(30));
/// The longest pause after a change that did not help.
pub(super) const COOL_DOWN_MAX: Duration = Duration::from_secs(120);
/// Arrival rates that differ by a larger factor are two loads.
const OTHER_RATE: f64 = 2.0;
/// The same for the Hellinger distance of the prompt lengths.
const OTHER_LENGTHS: f64 = 0.35;
/// How long a failed change stays closed: the first time, and at most. The bound matters when a
/// change of load goes unnoticed.
const CLOSED: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(24 * 3_600));
/// Weight of a new window in the remembered load.
pub(super) const LOAD_WEIGHT: f64 = 0.3;

/// How far a loss must fall for a change to stay.
pub(crate) fn least_gain(loss: f64) -> f64 {
    (LIMITS_GAIN * loss).min(GAIN_ENOUGH)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClosedBy {
    /// A change was tried and did not help.
    Failure,
    OppositeHelped,
    /// A simulation promised no gain.
    Simulation,
}

#[derive(Clone, Debug)]
pub(crate) struct LimitsTrial {
    pub(crate) step: Move,
    pub(crate) before: Limits,
    pub(super) score: Score,
    pub(super) since: Duration,
}

#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) since: Duration,
    pub(crate) window: Duration,
    pub(crate) moves: Vec<Move>,
    pub(crate) score: Score,
    pub(crate) is_ordered: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum State {
    Watching,
    /// The earliest end, the latest end if requests wait, and the change on trial.
    Settling(Duration, Duration, Option<Box<LimitsTrial>>),
    Measuring(Box<LimitsTrial>),
    Asking(Box<Asked>),
}

/// An order to the caller.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing.
    Wait,
    /// Begin a window of observations.
    Begin,
    /// Begin a window, because the present one is long enough.
    Renew,
    /// Put [`Controller::limits`] in force, and begin a window.
    Apply,
}

/// The controller of pools that serve the same traffic.
#[derive(Debug)]
pub struct Controller {
    pub(crate) names: Vec<String>,
    pub(crate) acting: Acting,
    /// The proposed change, and the score behind it.
    pub(crate) proposals: Proposals<(Move, Score)>,
    pub(super) proposed: u64,
    /// Score and conclusion of the last judged window.
    pub(crate) belief: (Score, String),
    /// Score of the last window under the limits in force. The window may be too short to be
    /// judged.
    pub(crate) latest_score: Score,
    pub(crate) experience: Experience,
    /// Loss of each pool in the last judged window.
    pub(crate) losses: Vec<f64>,
    pub(crate) lengths: Vec<Lengths>,
    pub(crate) lost_by_request: Vec<f64>,
    pub(crate) bounds: LimitRange,
    pub(crate) target: f64,
    pub(crate) horizon: Duration,
    pub(crate) limits: Limits,
    pub(crate) suggested: Option<(usize, PoolLimits, String)>,
    pub(crate) simulates: bool,
    pub(crate) state: State,
    pub(crate) steps: Steps,
    pub(super) closed: Closings<Direction, ClosedBy>,
    pub(crate) load: Option<(f64, Lengths)>,
    /// Start of the latest window, and the load that was remembered before that window.
    load_before: (Option<Duration>, Option<(f64, Lengths)>),
    pub(crate) load_since: Duration,
    /// When the engines last changed, as far as the controller knows.
    pub(crate) engines_since: Duration,
    pub(crate) stuck_since: Option<Duration>,
    pub(crate) in_rotation: Option<Vec<usize>>,
    pub(crate) latest: Duration,
    pub(crate) events: Vec<Event>,
}

impl Controller {
    /// A controller of these pools. `target`: share of requests that should meet their objectives.
    /// `horizon`: time after arrival from which a request counts, because by then it has met or
    /// missed the objectives.
    pub fn new(names: Vec<String>, limits: Limits, target: f64, horizon: Duration, acting: Acting) -> Self {
        Self {
            losses: vec![0.0; names.len()],
            lengths: vec![Lengths::default(); names.len()],
            lost_by_request: vec![0.0; names.len()],
            names,
            acting,
            proposals: Proposals::NONE,
            proposed: 0,
            belief: (Score::default(), "no requests were observed yet".to_owned()),
            latest_score: Score::default(),
            experience: Experience::default(),
            bounds: LimitRange::default(),
            target,
            horizon,
            limits,
            suggested: None,
            simulates: false,
            state: State::Watching,
            steps: Steps::default(),
            closed: Closings::new(CLOSED),
            load: None,
            load_before: (None, None),
            load_since: Duration::ZERO,
            engines_since: Duration::ZERO,
            stuck_since: None,
            in_rotation: None,
            latest: Duration::ZERO,
            events: Vec::new(),
        }
    }

    /// The limits without a change on trial.
    pub fn kept_limits(&self) -> &Limits {
        match &self.state {
            State::Measuring(trial) | State::Settling(_, _, Some(trial)) => &trial.before,
            _ => &self.limits,
        }
    }

    /// Takes over limits that came with a change of engines.
    pub fn adopt(&mut self, pool: usize, limits: PoolLimits, now: Duration) -> Action {
        // The boundary belongs to both neighbours.
        self.limits.0[pool] = PoolLimits { range: self.limits.0[pool].range, ..limits };
        self.proposals.withdraw();
        self.pause(now);
        Action::Begin
    }

    /// Makes limits that a simulation found better the next change to try.
    pub fn suggest(&mut self, pool: usize, limits: PoolLimits, why: &str) {
        self.suggested = Some((pool, limits, why.to_owned()));
    }

    /// Puts limits in force that an earlier controller kept.
    pub fn restore(&mut self, limits: Limits, now: Duration) {
        self.limits = limits;
        self.proposals.withdraw();
        self.pause(now);
    }

    /// Drops a suggestion, and waits as after a change of the engines. End a trial first
    /// ([`stand_back`](Self::stand_back)).
    pub fn pause(&mut self, now: Duration) {
        self.suggested = None;
        (self.latest, self.engines_since) = (now, now);
        self.state = State::Settling(now + LIMITS_SETTLE.0, now + LIMITS_SETTLE.1, None);
    }

    /// Sets whether changes may be made. If not, a change on trial is undone.
    pub fn set_acting(&mut self, acting: Acting, now: Duration) -> Action {
        if std::mem::replace(&mut self.acting, acting) == acting {
            return Action::Wait;
        }
        self.proposals.withdraw();
        if acting == Acting::Acts { Action::Wait } else { self.stand_back(now, "the tuner may no longer make changes") }
    }

    /// Opens all closed changes, because with other engines a change that failed may help.
    pub fn forget_failures(&mut self) {
        self.closed.clear();
        self.steps.reset();
        self.stuck_since = None;
    }

    /// One decision, about once a second. `window`: observations since the last action other than
    /// [`Action::Wait`].
    pub fn step(&mut self, now: Duration, window: &Window) -> Action {
        let rotation: Vec<usize> = window.pools.iter().map(|pool| pool.usage.in_rotation).collect();
        let sampled = window.pools.iter().all(|pool| pool.usage.moments > 0);
        let moved = sampled && self.in_rotation.replace(rotation.clone()).is_some_and(|known| known != rotation);
        let back = now < self.latest;
        self.latest = now;
        if moved || back {
            self.engines_since = now;
            let why = if back { "the clock went backwards" } else { "a backend entered or left rotation" };
            return self.stand_back(now, why);
        }
        match std::mem::replace(&mut self.state, State::Watching) {
            State::Watching => self.watch(now, window),
            State::Settling(least, most, trial) => self.settle(now, window, (least, most), trial),
            State::Measuring(trial) => self.measure(now, window, trial),
            State::Asking(asked) => self.await_answer(now, asked),
        }
    }

    pub(crate) fn stand_back(&mut self, now: Duration, why: &str) -> Action {
        let trial = match std::mem::replace(
            &mut self.state,
            State::Settling(now + LIMITS_SETTLE.0, now + LIMITS_SETTLE.1, None),
        ) {
            State::Measuring(trial) | State::Settling(_, _, Some(trial)) => trial,
            _ => return Action::Begin,
        };
        self.note(now, EventKind::StoodBack, &trial, why.to_owned());
        self.limits = trial.before;
        Action::Apply
    }

    fn score(&self, now: Duration, window: &Window) -> (Score, Duration) {
        let until = now.saturating_sub(self.horizon);
        (window.score(until), until.saturating_sub(window.from))
    }

    fn watch(&mut self, now: Duration, window: &Window) -> Action {
        if let Some((step, score)) = self.proposals.take_approved() {
            self.make(now, step, score);
            return Action::Apply;
        }
        let (score, measured) = self.score(now, window);
        let is_known = score.requests >= REQUESTS && measured >= MEASURED;
        let enough = is_known && score.loss >= SMALL_LOSS;
        let late = score.requests >= REQUESTS_SOON && measured >= MEASURED_MAX;
        let gross = score.requests >= REQUESTS_SOON && measured >= MEASURED_SOON && score.loss >= FIRST_LOOK_LOSS;
        if is_known || late || gross {
            self.latest_score = score;
        }
        if !(enough || late || gross) {
            score.describe_before_verdict(&mut self.belief);
            // A quiet time says nothing about later requests, so the window ends.
            if measured < QUIET {
                return Action::Wait;
            }
            // The loss before the quiet time is over, too.
            (self.stuck_since, self.latest_score) = (None, Score::default());
            return Action::Begin;
        }
        self.compare_load(&score, window);
        // A shortfall within the standard error may be chance.
        let is_met = score.attainment + score.attainment_error >= self.target;
        let attained = 100.0 * score.attainment;
        let (requests, seconds) = (score.requests, measured.as_secs_f64());
        self.belief =
            (score, format!("in {seconds:.0} s, {attained:.1} % of {requests:.0} requests met their objectives"));
        self.experience = Experience { misses: !is_met, lost: window.lost(), tpot_missed: window.tpot_missed() };
        self.losses = window.pools.iter().map(PoolWindow::loss).collect();
        self.lost_by_request = window.pools.iter().map(PoolWindow::loss_per_request).collect();
        self.lengths = window.pools.iter().map(|pool| pool.lengths.clone()).collect();
        // An operator may be reading the proposal, so it stays for a while.
        let waits = self.acting != Acting::Acts && self.proposals.change().is_some() && measured < MEASURED_MAX;
        if is_met {
            self.proposals.withdraw();
            (self.suggested, self.stuck_since) = (None, None);
        } else if !waits && self.try_next(now, window, score) {
            return Action::Apply;
        }
        if measured >= MEASURED_MAX { Action::Renew } else { Action::Wait }
    }

    pub(crate) fn make(&mut self, now: Duration, step: Move, score: Score) {
        let before = std::mem::replace(&mut self.limits, step.to.clone());
        let trial = Box::new(LimitsTrial { step, before, score, since: now });
        let missed = 100.0 * (1.0 - score.attainment);
        let why = format!("{missed:.1} % of {:.0} requests missed an objective; {}", score.requests, trial.step.why);
        self.note(now, EventKind::Tried, &trial, why);
        self.state = State::Settling(now + LIMITS_SETTLE.0, now + LIMITS_SETTLE.1, Some(trial));
    }

    fn settle(
        &mut self,
        now: Duration,
        window: &Window,
        (least, most): (Duration, Duration),
        trial: Option<Box<LimitsTrial>>,
    ) -> Action {
        let is_quiet = window.pools.iter().all(|pool| pool.usage.queue <= pool.usage.in_rotation);
        if now < least || (!is_quiet && now < most) {
            self.state = State::Settling(least, most, trial);
            return Action::Wait;
        }
        self.state = trial.map_or(State::Watching, State::Measuring);
        Action::Begin
    }

    pub(super) fn measure(&mut self, now: Duration, window: &Window, trial: Box<LimitsTrial>) -> Action {
        let (score, measured) = self.score(now, window);
        let before = trial.score;
        let error = before.error.hypot(score.error);
        let change = score.loss - before.loss;
        let soon = score.requests >= REQUESTS_SOON && measured >= MEASURED_SOON;
        // A queue from before the change does not count, because it delays the first requests
        // anyway. A queue that grows is an effect of the change.
        let grows = window.pools.iter().any(PoolWindow::backlog_grows);
        let so_far = if grows { window.score(now) } else { window.score_of_ended(now) };
        let does_harm = Self::does_harm(&so_far, &before);
        let is_worse = does_harm || soon && change > ERRORS_SOON * error && score.loss > before.loss * WORSE;
        let enough = score.requests >= REQUESTS && measured >= MEASURED;
        let direction = trial.step.direction;
        let errors = match measured >= MEASURED_MAX {
            true if direction.knob == Knob::Permits && !direction.up => 0.0,
            true => ERRORS_AT_END,
            false => ERRORS,
        };
        let is_better = score.requests >= REQUESTS_SOON && -change > (errors * error).max(least_gain(before.loss));
        let is_decided = is_worse || (enough && is_better);
        if !is_decided && measured < MEASURED_MAX {
            self.state = State::Measuring(trial);
            return Action::Wait;
        }
        let decisive = if does_harm { &so_far } else { &score };
        let result = format!(
            "loss {:.3} after {:.3}, attainment {:.1} % after {:.1} %, {:.0} requests",
            decisive.loss,
            before.loss,
            100.0 * decisive.attainment,
            100.0 * before.attainment,
            decisive.requests
        );
        if is_better {
            self.note(now, EventKind::Kept, &trial, result);
            self.closed.reopen(&direction, now);
            self.closed.close(Direction { up: !direction.up, ..direction }, ClosedBy::OppositeHelped, now);
            // The arrivals of this window, under limits that stay, can judge the next change.
            self.state = State::Watching;
            return self.watch(now, window);
        }
        self.note(now, EventKind::Undone, &trial, result);
        self.stuck_since.get_or_insert(now);
        self.closed.close(direction, ClosedBy::Failure, now);
        self.steps.refine(direction.pool, direction.knob);
        self.limits = trial.before;
        // Effects on the engines may last as long as the trial.
        let recovered = now + now.saturating_sub(trial.since).clamp(LIMITS_SETTLE.0, COOL_DOWN_MAX);
        // A queue that the trial left says nothing about the limits in force.
        self.state = State::Settling(recovered, now + COOL_DOWN_MAX, None);
        Action::Apply
    }

    /// Whether the ended requests lost clearly more than the worst ten seconds before the trial.
    fn does_harm(so_far: &Score, before: &Score) -> bool {
        so_far.requests >= REQUESTS_SOON && so_far.loss > before.peak * HARM.1 + HARM.0
    }

    pub(super) fn compare_load(&mut self, score: &Score, window: &Window) {
        // This runs every second, but a window counts once, with the latest counts.
        if self.load_before.0 != Some(window.from) {
            self.load_before = (Some(window.from), self.load.clone());
        }
        if self.load.is_none() {
            self.load_since = self.latest;
        }
        let lengths = window.lengths();
        let Some((rate, known)) = &self.load_before.1 else {
            self.load = Some((score.rate, lengths));
            return;
        };
        let ratio = score.rate / rate.max(1e-9);
        if !(OTHER_RATE.recip()..=OTHER_RATE).contains(&ratio) || lengths.distance(known) > OTHER_LENGTHS {
            self.closed.clear();
            self.steps.reset();
            self.load = Some((score.rate, lengths));
            self.load_before.1 = None;
            (self.load_since, self.stuck_since) = (self.latest, None);
        } else {
            let mut merged = known.clone();
            merged.merge(&lengths);
            self.load = Some((rate + LOAD_WEIGHT * (score.rate - rate), merged));
        }
    }

    fn note(&mut self, now: Duration, kind: EventKind, trial: &LimitsTrial, why: String) {
        let Direction { pool, knob, .. } = trial.step.direction;
        let show = |limits: &Limits| limits.0[pool].show(knob);
        let (old, new) = (show(&trial.before), show(&trial.step.to));
        let values = if matches!(kind, EventKind::Undone | EventKind::StoodBack) { (new, old) } else { (old, new) };
        let key = self.key(trial.step.direction);
        self.events.push(Event { at: now.as_secs_f64(), kind, key, values, why });
    }
}
