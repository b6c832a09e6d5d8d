//! The scaler against a model of a pool, whose engines do a fixed amount of work per second and
//! take a while to start.

use std::time::Duration;

use proptest::prelude::*;

use super::{Look, Scaler, ScalerRules, Tally};
use sluice_core::base::Rng;

const SECOND: Duration = Duration::from_secs(1);
const WORK: f64 = 2_000.0;
/// Requests per second of one engine.
const RATE: f64 = 2.0;

fn rules() -> ScalerRules {
    ScalerRules {
        min: 1,
        max: 20,
        attainment: 0.99,
        cold_start: Duration::from_secs(120),
        down_after: Duration::from_secs(300),
        idle_after: Duration::from_secs(300),
        rate: None,
    }
}

struct Pool {
    scaler: Scaler,
    rng: Rng,
    now: Duration,
    ready: u32,
    starting: Vec<Duration>,
    waiting: f64,
    arrived: f64,
    missed: f64,
    paid: f64,
    changes: Vec<(Duration, u32)>,
}

impl Pool {
    fn new(rules: ScalerRules, ready: u32, seed: u64) -> Self {
        Self {
            scaler: Scaler::new(rules),
            rng: Rng::new(seed),
            now: Duration::ZERO,
            ready,
            starting: Vec::new(),
            waiting: 0.0,
            arrived: 0.0,
            missed: 0.0,
            paid: 0.0,
            changes: Vec::new(),
        }
    }

    fn run(&mut self, seconds: u64, rate: impl Fn(Duration) -> f64) {
        for _ in 0..seconds {
            self.now += SECOND;
            self.second(rate(self.now));
        }
    }

    fn second(&mut self, rate: f64) {
        let due = self.starting.iter().filter(|at| **at <= self.now).count();
        self.starting.retain(|at| *at > self.now);
        self.ready += due as u32;
        let mut arrived = 0.0;
        let mut at = self.rng.exponential() / rate;
        while at < 1.0 {
            arrived += 1.0;
            at += self.rng.exponential() / rate;
        }
        let room = f64::from(self.ready) * RATE;
        let before = self.waiting;
        self.waiting = (before + arrived - room).max(0.0).floor();
        let ended = before + arrived - self.waiting;
        // Requests that wait for more than a second miss.
        let missed = if self.waiting > room { ended } else { 0.0 };
        let tally = Tally {
            ended,
            known: (ended, ended * WORK),
            judged: ended,
            missed,
            near: if self.waiting > 0.0 { ended } else { 0.0 },
        };
        (self.arrived, self.missed) = (self.arrived + arrived, self.missed + missed);
        let look = Look {
            ready: self.ready,
            starting: self.starting.len() as u32,
            queue: self.waiting as usize,
            in_flight: 0,
            slots: 64,
            tally,
        };
        let wanted = self.scaler.step(&look, self.now);
        self.follow(wanted);
        self.paid += f64::from(self.ready) + self.starting.len() as f64;
    }

    fn follow(&mut self, wanted: u32) {
        let have = self.ready + self.starting.len() as u32;
        for _ in have..wanted {
            self.starting.push(self.now + self.scaler.rules.cold_start);
        }
        for _ in wanted..have {
            if self.starting.pop().is_none() {
                self.ready -= 1;
            }
        }
        if wanted != have {
            self.changes.push((self.now, wanted));
        }
    }

    fn attainment(&self) -> f64 {
        1.0 - self.missed / self.arrived.max(1.0)
    }
}

/// Requests per second over a day: 1 at night, up to 15.
fn day(now: Duration) -> f64 {
    let turn = now.as_secs_f64() / 86_400.0 * std::f64::consts::TAU;
    8.0 - 7.0 * turn.cos()
}

#[test]
fn a_day_is_followed_with_fewer_engines_than_its_peak_needs_and_hardly_a_miss() {
    let mut pool = Pool::new(rules(), 2, 1);
    pool.run(86_400, day);
    pool.changes.clear();
    (pool.arrived, pool.missed, pool.paid) = (0.0, 0.0, 0.0);
    pool.run(86_400, day);
    let mean = pool.paid / 86_400.0;
    assert!(pool.attainment() > 0.985, "{}", pool.attainment());
    // A fixed fleet for the peak would need 9 or more engines.
    assert!((4.0..7.0).contains(&mean), "{mean}");
    assert!(pool.changes.len() < 40, "{:?}", pool.changes);
}

#[test]
fn a_queue_adds_engines_before_anything_is_known() {
    let mut pool = Pool::new(rules(), 1, 2);
    pool.run(1_800, |_| 7.0);
    assert!(pool.ready >= 4, "{} engines, {} wait", pool.ready, pool.waiting);
    assert!(pool.changes.first().is_some_and(|(at, _)| *at < Duration::from_secs(15)), "{:?}", pool.changes);
    pool.run(7_200, |_| 7.0);
    assert!(pool.waiting < 20.0);
}

#[test]
fn a_rate_that_is_known_is_used_from_the_first_minute_on() {
    let mut pool = Pool::new(ScalerRules { rate: Some(1.7), ..rules() }, 1, 3);
    pool.run(62, |_| 7.0);
    // The demand is 7 / 1.7 = 4.1 engines, a third more until the noise is known, and the backlog.
    assert!((6..=8).contains(&(pool.ready + pool.starting.len() as u32)), "{:?}", pool.changes);
}

#[test]
fn an_engine_less_is_tried_only_after_it_has_sufficed_for_the_stated_time_and_one_at_a_time() {
    let mut pool = Pool::new(ScalerRules { rate: Some(1.7), ..rules() }, 10, 4);
    pool.run(3_600, |_| 6.0);
    let downs: Vec<_> = pool.changes.iter().filter(|(_, to)| *to < 10).collect();
    assert!(downs.len() >= 4, "{:?}", pool.changes);
    let mut before = (Duration::ZERO, 10);
    for (at, to) in downs {
        assert_eq!(*to, before.1 - 1);
        assert!(*at - before.0 >= rules().down_after, "{:?}", pool.changes);
        before = (*at, *to);
    }
}

#[test]
fn the_day_before_has_engines_ready_when_the_rush_begins() {
    let rush = |now: Duration| if now.as_secs() % 86_400 < 7_200 { 1.0 } else { 12.0 };
    let missed = |knows: bool| {
        let mut pool = Pool::new(ScalerRules { rate: Some(1.7), ..rules() }, 1, 5);
        if knows {
            let minutes: Vec<f64> = (0..1_440).map(|minute| WORK * rush(60 * SECOND * minute)).collect();
            pool.scaler.set_day_before(&minutes);
        }
        pool.run(9_000, rush);
        eprintln!("{knows} {:?} {}", pool.changes, pool.missed);
        pool.missed
    };
    let (with, without) = (missed(true), missed(false));
    assert!(with < without / 2.0, "{with} {without}");
}

#[test]
fn without_requests_there_may_be_no_engine_and_the_first_request_brings_one() {
    let mut pool = Pool::new(ScalerRules { min: 0, ..rules() }, 2, 6);
    pool.run(1_200, |_| 1e-9);
    assert_eq!((pool.ready, pool.scaler.wanted()), (0, Some(0)), "{:?}", pool.changes);
    pool.waiting = 1.0;
    pool.run(1, |_| 1e-9);
    assert_eq!(pool.scaler.wanted(), Some(1));
    pool.run(125, |_| 1e-9);
    assert_eq!((pool.ready, pool.waiting), (1, 0.0));
    let mut kept = Pool::new(rules(), 2, 6);
    kept.run(3_600, |_| 1e-9);
    assert_eq!(kept.ready, 1, "at least min");
}

#[test]
fn a_pool_without_engines_stays_so_until_a_request_comes_and_goes_back_after_idle_after() {
    let rules =
        ScalerRules { min: 0, idle_after: Duration::from_secs(100), down_after: Duration::from_secs(1_000), ..rules() };
    let mut pool = Pool::new(rules, 0, 7);
    pool.run(3_600, |_| 1e-9);
    assert_eq!(pool.changes, [], "no request, no engine");
    pool.waiting = 1.0;
    pool.run(125, |_| 1e-9);
    assert_eq!((pool.ready, pool.waiting), (1, 0.0));
    let served = pool.now;
    pool.run(200, |_| 1e-9);
    let (at, wanted) = pool.changes[pool.changes.len() - 1];
    assert_eq!((wanted, pool.ready), (0, 0), "{:?}", pool.changes);
    assert!(at - served < Duration::from_secs(102), "{:?}", pool.changes);
}

#[test]
fn engines_that_are_found_one_after_the_other_are_kept() {
    let mut scaler = Scaler::new(rules());
    for second in 0..600 {
        let look = Look { ready: (second / 5).min(6), slots: 64, ..Look::default() };
        scaler.step(&look, SECOND * second);
        assert!(
            scaler.wanted().is_none_or(|wanted| wanted >= 6 || second > 300),
            "{:?} at {second} s",
            scaler.wanted()
        );
        assert_eq!(scaler.wanted().is_some(), second >= 60);
    }
}

#[test]
fn engines_in_use_are_not_taken_away() {
    let mut scaler = Scaler::new(ScalerRules { min: 0, rate: Some(100.0), ..rules() });
    let tally = Tally { ended: 1.0, known: (1.0, WORK), judged: 1.0, ..Tally::default() };
    for second in 0..7_200 {
        // Hardly any of the long streams ends.
        let look = Look { ready: 5, in_flight: 200, slots: 64, tally, ..Look::default() };
        assert!(scaler.step(&look, SECOND * second) >= 4);
    }
}

/// Each run has twelve hours at one rate, after six hours of learning. Chance moves small fleets
/// now and then. Of 100 runs at 0.5 requests/s, 98 have at most 8 changes.
#[test]
fn a_load_that_stays_the_same_hardly_moves_it() {
    let runs = [0.5, 1.0, 4.0, 20.0].into_iter().flat_map(|rate| (0..4).map(move |seed| (rate, seed)));
    let mut changes = Vec::new();
    for (rate, seed) in runs {
        let mut pool = Pool::new(rules(), 1, seed);
        pool.run(6 * 3_600, |_| rate);
        pool.changes.clear();
        pool.run(12 * 3_600, |_| rate);
        assert!(pool.attainment() > 0.9, "{rate}, seed {seed}: {}", pool.attainment());
        changes.push(pool.changes.len());
    }
    assert!(changes.iter().sum::<usize>() <= changes.len(), "{changes:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn whatever_it_sees_it_stays_within_bounds(
        seed in any::<u64>(), min in 0u32..4, more in 0u32..8,
    ) {
        let rules = ScalerRules { min, max: min + more, ..rules() };
        let (mut scaler, mut rng, mut now) = (Scaler::new(rules), Rng::new(seed), Duration::from_secs(1_000_000));
        let odd = [f64::NAN, f64::INFINITY, -1.0, 0.0, 1.0, 1e300];
        for _ in 0..2_000 {
            let mut any = |most: usize| rng.below(most);
            now = match any(50) {
                0 => now.saturating_sub(SECOND * any(100_000) as u32),
                1 => now + SECOND * any(1_000_000) as u32,
                _ => now + SECOND,
            };
            let mut value = || odd[rng.below(6)];
            let tally = Tally { ended: value(), known: (value(), value()), judged: value(), missed: value(), near: value() };
            let look = Look {
                ready: rng.below(20) as u32,
                starting: rng.below(3) as u32,
                queue: rng.below(1_000),
                in_flight: rng.below(1_000),
                slots: rng.below(100) as u32,
                tally,
            };
            let wanted = scaler.step(&look, now);
            prop_assert!((rules.min..=rules.max).contains(&wanted), "{wanted}");
        }
    }
}
