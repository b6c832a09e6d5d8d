//! How many engines a pool needs: the demand when a new engine would be ready, divided by one
//! engine's capacity.
//!
//! ```text
//!  finished requests --> Tally --.                 .--> Demand: work/s, upper bound --.
//!  queue, in flight, engines ----+--> each minute -+                                  +--> engines
//!  (once a second)                                 '--> Capacity: work/s per engine --'
//! ```
//!
//! The demand counts arrivals: ended requests plus the rise of requests in flight. Work is
//! measured in tokens ([`Tally`]). Nothing depends on hardware, model or flags: the capacity is
//! learned from hits and misses ([`capacity`]), or starts with a stated rate.
//!
//! | rule | why |
//! |---|---|
//! | up: at once, by all missing engines | an engine takes minutes to start |
//! | demand: upper bound ([`demand`]) until a new engine is ready | 1 minute in 20 exceeds it |
//! | a lasting queue and misses: one more than serve | the learned capacity may be wrong |
//! | down: by one, if less suffices for [`ScalerRules::down_after`] | a start takes minutes |
//! | down: only with [`MARGIN`] and a minute's chance to spare | steady demand hardly moves it |
//! | never fewer than requests in flight need slots | the requests would wait |
//! | to none: after `idle_after`, unless the day before had requests | requests wait for a start |
//! | in the first minute: as many as are found | they are found one by one |
//! | unknown capacity: no change, except that a queue adds one | |
//!
//! The caller sends no more requests to an engine that must go, and ends it when it has none left.
//! Pure: time is a parameter. A clock that goes back, or jumps by more than [`GAP`], begins a new
//! minute. Bounds: see [`demand`] and [`capacity`].

pub mod capacity;
pub mod demand;
#[cfg(test)]
mod tests;

use std::time::Duration;

use self::capacity::Capacity;
use self::demand::Demand;
use crate::observe::tally::Tally;

const MINUTE: Duration = Duration::from_secs(60);
/// The time between two looks counts as seen up to this length.
const GAP: Duration = Duration::from_secs(15);
/// Age of a queue that does not empty by itself.
const WAITING: Duration = Duration::from_secs(10);
/// Time for an added engine to take effect after its start.
const EFFECT: Duration = Duration::from_secs(30);
/// Before an engine goes, the others must hold this multiple of the demand.
const MARGIN: f64 = 1.1;
/// Number of requests in the average of the work.
const AVERAGED: f64 = 2_000.0;

/// Bounds and objectives set by an operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerRules {
    /// The fewest engines; 0: none without requests.
    pub min: u32,
    /// The most engines.
    pub max: u32,
    /// Share of the requests that should meet their objectives.
    pub attainment: f64,
    /// Time from the order of an engine to its first request.
    pub cold_start: Duration,
    /// How long one engine less must suffice before an engine goes.
    pub down_after: Duration,
    /// Time without a request after which no engine is needed.
    pub idle_after: Duration,
    /// Requests per second that one engine serves within the objectives; `None`: learned.
    pub rate: Option<f64>,
}

/// A pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// Engines that take requests.
    pub ready: u32,
    /// Engines ordered and not ready.
    pub starting: u32,
    /// Waiting requests.
    pub queue: usize,
    /// Sequences on engines.
    pub in_flight: usize,
    /// Slots of one engine.
    pub slots: u32,
    /// Requests that ended since the last look.
    pub tally: Tally,
}

/// Computes how many engines a pool needs.
#[derive(Debug)]
pub struct Scaler {
    rules: ScalerRules,
    demand: Demand,
    capacity: Capacity,
    /// Requests in the average, and the mean work of one.
    work: (f64, f64),
    minute: Minute,
    before: Tally,
    last: Option<Duration>,
    /// Engines that the pool should have; `None` before the first look.
    wanted: Option<u32>,
    /// Whether a minute has passed, so that running engines are known.
    settled: bool,
    enough_since: Option<Duration>,
    /// Since when there has always been a queue.
    waiting_since: Option<Duration>,
    /// Until when an engine that was added for a queue may take effect.
    effect_until: Duration,
    used: Duration,
    why: String,
}

#[derive(Clone, Copy, Debug, Default)]
struct Minute {
    from: Duration,
    tally: Tally,
    /// Requests in flight and waiting, at the beginning of the minute and now.
    in_flight: (usize, usize),
    /// Ready engines, summed over the looks.
    ready: f64,
    looks: f64,
}

impl Scaler {
    /// A scaler without observations.
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

    /// Replaces the rules.
    pub fn set_rules(&mut self, rules: ScalerRules) {
        self.rules = rules;
    }

    /// Sets the work per second of each minute of the day before.
    pub fn set_day_before(&mut self, minutes: &[f64]) {
        self.demand.set_day_before(minutes);
    }

    /// Engines that the pool should have. `None` in the first minute, while running engines are
    /// being found, because too small a number would end them.
    pub fn wanted(&self) -> Option<u32> {
        self.wanted.filter(|_| self.settled)
    }

    /// The reason for the last change, in words; empty before the first.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Work per second that one engine holds, if known.
    pub fn capacity(&self) -> Option<f64> {
        self.capacity.estimate(1.0 - self.rules.attainment).filter(|holds| holds.is_finite() && *holds > 0.0)
    }

    /// Takes one look, and returns the number of engines that the pool should have.
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

    /// Begins a minute after a time that was not seen.
    fn begin_anew(&mut self, look: &Look, now: Duration) {
        let missed = self.last.and_then(|last| now.checked_sub(last)).map_or(0, |gap| gap.as_secs() / 60);
        if missed > 0 {
            self.demand.skip(usize::try_from(missed).unwrap_or(usize::MAX));
        }
        let waiting = look.queue + look.in_flight;
        self.minute = Minute { from: now, in_flight: (waiting, waiting), ..Minute::default() };
        self.before = Tally::default();
        (self.enough_since, self.waiting_since) = (None, None);
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
        // Too few permits or slots show as a queue at every look.
        self.waiting_since = if look.queue == 0 { None } else { self.waiting_since.or(Some(now)) };
    }

    /// The engines that a lasting queue demands at once.
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
        // Requests with unknown work, or in flight, count with the mean work.
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

    /// Minutes until an engine ordered at the next look is ready.
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
        // Chance may add one standard deviation to a minute, which is much where requests are few.
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

    /// Whether the pool should have no engine, until a request waits or is expected.
    fn sleeps(&mut self, look: &Look, wanted: u32, now: Duration) -> bool {
        let stays = wanted == 0 && look.queue + look.in_flight == 0;
        if self.rules.min > 0 || !(stays || now - self.used >= self.rules.idle_after) {
            return false;
        }
        // One request a minute is the least demand that counts.
        let least = self.work.1.max(1.0) / 60.0;
        let expected = (0..=self.ahead()).any(|ahead| self.demand.day_before(ahead).is_some_and(|then| then >= least));
        if !expected {
            self.why = format!("no requests for {} s", (now - self.used).as_secs());
        }
        !expected
    }
}
