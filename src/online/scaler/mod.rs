//! How many engines a pool needs: the demand that is expected when an engine that is started now is ready, over what one engine holds.
//!
//! ```text
//!  finished requests --> Tally --.                 .--> Demand: work per second, minute by minute; forecast, upper bound --.
//!  queue, in flight, engines ----+--> each minute -+                                                                        +--> engines
//!  (once a second)                                 '--> Capacity: work per second of an engine within the objectives ------'
//! ```
//!
//! A request is counted when it arrives: those that ended, and by how much more are in flight. Its work is that of its tokens
//! ([`tally`]). Nothing depends on the hardware, the model or the flags: what an engine holds is learned from requests that met
//! their objectives and from those that did not ([`capacity`]), or begins with a rate that the operator states.
//!
//! | rule | why |
//! |---|---|
//! | up: at once, by as many as are missing | an engine takes minutes to start; what was not asked for now is missing then |
//! | the demand is the upper bound of its forecast ([`demand`]), at its highest until an engine started now is ready | one minute in twenty is above it |
//! | a queue that does not empty while objectives are missed asks for one engine more than serve | the capacity that was learned may be wrong |
//! | down: one engine, after one less has sufficed for [`ScalerRules::down_after`] without a break, also for the forecast that far | an engine that is missed comes back after minutes |
//! | down only if one less holds [`MARGIN`] more than that, and what a minute has more by chance | demand that stays the same hardly moves it |
//! | never fewer than the requests in flight need slots | those would wait |
//! | to none, if allowed: after `idle_after` without a request, unless the day before had some by then | requests wait in the queue while an engine starts |
//! | in the first minute as many as are found | after a restart of the gateway, engines are found one after the other |
//! | while nothing is known of the capacity, the engines stay as many as they are, and a queue adds one | |
//!
//! An engine that is to go gets no more requests and ends when it has none: what carries this out sees to that.
//!
//! Pure: time is a parameter. A clock that goes back, or jumps by more than [`GAP`], begins a new minute; what is no number is left
//! out. Bounds: those of [`demand`] and [`capacity`].

pub mod capacity;
pub mod demand;
pub mod tally;
#[cfg(test)]
mod tests;

use std::time::Duration;

use self::capacity::Capacity;
use self::demand::Demand;
pub use self::tally::Tally;

/// What is looked at together.
const MINUTE: Duration = Duration::from_secs(60);
/// A longer time between two looks was not seen.
const GAP: Duration = Duration::from_secs(15);
/// A queue that has not been empty for so long does not empty by itself.
const WAITING: Duration = Duration::from_secs(10);
/// After an engine was added because of a queue, it may show its effect for so long, beyond its start.
const EFFECT: Duration = Duration::from_secs(30);
/// What one engine less must hold beyond the demand.
const MARGIN: f64 = 1.1;
/// Requests whose work is averaged.
const AVERAGED: f64 = 2_000.0;

/// What an operator decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerRules {
    /// The fewest engines; 0: none while there are no requests.
    pub min: u32,
    /// The most engines.
    pub max: u32,
    /// Share of the requests that should meet their objectives.
    pub attainment: f64,
    /// From the order of an engine to its first request.
    pub cold_start: Duration,
    /// How long one engine less must suffice.
    pub down_after: Duration,
    /// How long there must be no request before there is no engine.
    pub idle_after: Duration,
    /// Requests per second that one engine serves within the objectives, where that is known; `None`: it is learned.
    pub rate: Option<f64>,
}

/// A pool at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// Engines that take requests.
    pub ready: u32,
    /// Engines that were ordered and are not ready.
    pub starting: u32,
    /// Requests that wait.
    pub queue: usize,
    /// Sequences on engines.
    pub in_flight: usize,
    /// Sequences that one engine may have.
    pub slots: u32,
    /// Requests that ended since the last look.
    pub tally: Tally,
}

/// How many engines a pool needs. See the header of this file.
#[derive(Debug)]
pub struct Scaler {
    rules: ScalerRules,
    demand: Demand,
    capacity: Capacity,
    /// Mean work of a request: over how many, and that.
    work: (f64, f64),
    minute: Minute,
    /// Requests of the minute before.
    before: Tally,
    last: Option<Duration>,
    /// Engines that the pool should have; `None` before the first look.
    wanted: Option<u32>,
    /// A minute has been seen: engines that ran before are known by now.
    settled: bool,
    /// Since when one engine less has sufficed.
    enough_since: Option<Duration>,
    /// Since when requests have waited without a break.
    waiting_since: Option<Duration>,
    /// Until when an engine that was added because of a queue may show its effect.
    effect_until: Duration,
    /// When there was a request last.
    used: Duration,
    why: String,
}

/// The minute under way.
#[derive(Clone, Copy, Debug, Default)]
struct Minute {
    from: Duration,
    tally: Tally,
    /// Requests in flight and waiting when it began, and now.
    in_flight: (usize, usize),
    /// Sum of the engines that were ready, over the looks.
    ready: f64,
    looks: f64,
}

impl Scaler {
    /// A scaler that knows nothing yet.
    pub fn new(rules: ScalerRules) -> Self {
        Self {
            rules,
            demand: Demand::default(),
            capacity: Capacity::default(),
            work: (0.0, 0.0),
            minute: Minute::default(),
            before: Tally::default(),
            last: None,
            wanted: None,
            settled: false,
            enough_since: None,
            waiting_since: None,
            effect_until: Duration::ZERO,
            used: Duration::ZERO,
            why: String::new(),
        }
    }

    /// Other rules are in force, or the time of a start is known better.
    pub fn set_rules(&mut self, rules: ScalerRules) {
        self.rules = rules;
    }

    /// The work per second of each minute of the day before.
    pub fn set_day_before(&mut self, minutes: &[f64]) {
        self.demand.set_day_before(minutes);
    }

    /// Engines that the pool should have. `None` in the first minute, in which engines that ran before are still being found: a number
    /// that is too small then would end them.
    pub fn wanted(&self) -> Option<u32> {
        self.wanted.filter(|_| self.settled)
    }

    /// Why they are as many, in words; empty: nothing was decided yet.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Work per second that one engine holds, where anything is known of it.
    pub fn capacity(&self) -> Option<f64> {
        self.capacity.estimate(1.0 - self.rules.attainment).filter(|holds| holds.is_finite() && *holds > 0.0)
    }

    /// One look. Returns how many engines the pool should have.
    pub fn step(&mut self, look: &Look, now: Duration) -> u32 {
        let (min, max) = (self.rules.min.min(self.rules.max), self.rules.max);
        let committed = look.ready + look.starting;
        let found = if self.settled { 0 } else { committed };
        let wanted = self.wanted.unwrap_or(0).max(found).clamp(min, max);
        let seen = self.last.is_some_and(|last| now >= last && now - last <= GAP);
        if !seen {
            self.begin_anew(look, now);
        }
        self.last = Some(now);
        self.count(look, now);
        let urgent = self.urgent(look, committed, now);
        let mut next = wanted.max(urgent.unwrap_or(0)).clamp(min, max);
        if urgent.is_some() && next > wanted {
            self.why = format!("{} requests wait, and {} engines serve", look.queue, look.ready);
        }
        if now - self.minute.from >= MINUTE {
            self.end_minute(look, now);
            next = self.decide(look, next, now).clamp(min, max);
            self.settled = true;
        } else if self.settled && next > 0 && self.sleeps(look, next, now) {
            next = 0;
        }
        if next != wanted {
            self.enough_since = None;
        }
        self.wanted = Some(next);
        next
    }

    /// What came before the last look is not known.
    fn begin_anew(&mut self, look: &Look, now: Duration) {
        let missed = self.last.and_then(|last| now.checked_sub(last)).map_or(0, |gap| gap.as_secs() / 60);
        if missed > 0 {
            self.demand.skip(usize::try_from(missed).unwrap_or(usize::MAX));
        }
        let waiting = look.queue + look.in_flight;
        self.minute = Minute { from: now, in_flight: (waiting, waiting), ..Minute::default() };
        self.before = Tally::default();
        (self.enough_since, self.waiting_since) = (None, None);
        // Times of another clock mean nothing now.
        (self.effect_until, self.used) = (self.effect_until.min(now), now);
    }

    fn count(&mut self, look: &Look, now: Duration) {
        let minute = &mut self.minute;
        minute.tally.merge(&look.tally);
        minute.in_flight.1 = look.queue + look.in_flight;
        minute.ready += f64::from(look.ready);
        minute.looks += 1.0;
        let (count, work) = look.tally.known;
        if count > 0.0 && work.is_finite() {
            let mean = work / count;
            self.work.0 = (self.work.0 + count).min(AVERAGED);
            self.work.1 += (mean - self.work.1) * (count / self.work.0).min(1.0);
        }
        if look.queue + look.in_flight > 0 || look.tally.ended > 0.0 {
            self.used = now;
        }
        // Each look at which none waits ends it; where permits or slots are short, some wait at every look.
        self.waiting_since = if look.queue == 0 { None } else { self.waiting_since.or(Some(now)) };
    }

    /// The engines that a queue asks for at once.
    fn urgent(&mut self, look: &Look, committed: u32, now: Duration) -> Option<u32> {
        if look.queue > 0 && committed == 0 {
            return Some(1);
        }
        let since = self.waiting_since?;
        let waits = now - since >= WAITING && now >= self.effect_until && look.ready > 0;
        let (judged, missed) =
            (self.before.judged + self.minute.tally.judged, self.before.missed + self.minute.tally.missed);
        let late = missed > (1.0 - self.rules.attainment) * judged || judged == 0.0;
        (waits && late && look.starting == 0).then(|| {
            self.effect_until = now + self.rules.cold_start + EFFECT;
            look.ready + 1
        })
    }

    fn end_minute(&mut self, look: &Look, now: Duration) {
        let Minute { from, tally, in_flight: (first, last), ready, looks } = self.minute;
        let seconds = (now - from).as_secs_f64();
        let more = last as f64 - first as f64;
        // Those whose work is not known, and those that have not ended, count as the mean.
        let others = tally.ended - tally.known.0 + more;
        let demand = (tally.known.1 + others * self.work.1).max(0.0) / seconds;
        self.demand.push(demand, self.ahead());
        let ready = ready / looks.max(1.0);
        if ready > 0.0 {
            self.capacity.note(demand / ready, tally.judged, tally.missed, tally.near);
        }
        self.capacity.set_prior(self.rules.rate.map(|rate| rate * self.work.1));
        let waiting = look.queue + look.in_flight;
        self.minute = Minute { from: now, in_flight: (waiting, waiting), ..Minute::default() };
        self.before = tally;
    }

    /// Minutes until an engine that is ordered at the next look is ready.
    fn ahead(&self) -> usize {
        usize::try_from(self.rules.cold_start.as_secs().div_ceil(60) + 1).unwrap_or(usize::MAX).min(demand::DAY / 4)
    }

    fn decide(&mut self, look: &Look, wanted: u32, now: Duration) -> u32 {
        let in_use = (look.in_flight as u32).div_ceil(look.slots.max(1));
        if self.sleeps(look, wanted, now) {
            return 0;
        }
        let idle = now - self.used >= self.rules.down_after;
        let Some(holds) = self.capacity().or(idle.then_some(f64::INFINITY)) else { return wanted.max(in_use).max(1) };
        let highest = |until: usize| (0..=until).map(|ahead| self.demand.upper(ahead)).fold(0.0, f64::max);
        let ahead = self.ahead();
        let drained = self.rules.cold_start.max(MINUTE).as_secs_f64();
        let waits = self.waiting_since.is_some_and(|since| now - since >= WAITING);
        let backlog = if waits { look.queue as f64 * self.work.1 / drained } else { 0.0 };
        let soon = highest(ahead) + backlog;
        let engines = |demand: f64| if demand.is_finite() { (demand / holds).ceil().min(1e6) as u32 } else { 0 };
        let needed = engines(soon).max(in_use).max(1);
        if needed > wanted {
            self.why = format!(
                "{soon:.0} tokens of work per second are expected in {ahead} min, and an engine holds {holds:.0}"
            );
            return needed;
        }
        let later = ahead + usize::try_from(self.rules.down_after.as_secs() / 60).unwrap_or(0);
        // By chance, a minute has a standard deviation more: a large part of the demand where requests are few.
        let in_a_minute = (self.demand.forecast(1) / self.work.1 * 60.0).max(1.0);
        let margin = MARGIN + in_a_minute.sqrt().recip();
        let less = engines((highest(later.min(demand::DAY / 4)) + backlog) * margin).max(in_use).max(1);
        if less >= wanted || waits {
            self.enough_since = None;
            return wanted;
        }
        let since = *self.enough_since.get_or_insert(now);
        if now - since < self.rules.down_after {
            return wanted;
        }
        self.why = format!("{less} engines have held the load for {} min", self.rules.down_after.as_secs() / 60);
        wanted - 1
    }

    /// Whether the pool is to have no engine. One that has none stays so until a request waits, or some are expected.
    fn sleeps(&mut self, look: &Look, wanted: u32, now: Duration) -> bool {
        let stays = wanted == 0 && look.queue + look.in_flight == 0;
        if self.rules.min > 0 || !(stays || now - self.used >= self.rules.idle_after) {
            return false;
        }
        // A request a minute.
        let least = self.work.1.max(1.0) / 60.0;
        let expected = (0..=self.ahead()).any(|ahead| self.demand.day_before(ahead).is_some_and(|then| then >= least));
        if !expected {
            self.why = format!("no requests for {} s", (now - self.used).as_secs());
        }
        !expected
    }
}
