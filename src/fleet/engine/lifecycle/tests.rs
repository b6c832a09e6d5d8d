//! Every life there is, by exhaustive exploration, beside a world that knows whether a process may be running.

use std::collections::{HashSet, VecDeque};

use super::*;

const RULES: Rules = Rules { restarts: 2, window_ms: 1_000, backoff_ms: 10, backoff_max_ms: 40 };

fn failure(why: &str) -> StepFailure {
    StepFailure { why: why.to_owned(), permanent: false }
}

fn failed() -> Event {
    Event::Failed(failure("failed"))
}

fn gone() -> Event {
    Event::Gone(failure("gone"))
}

/// Runs effects that all succeed until the engine serves.
fn up(life: &mut Lifecycle<u8>) {
    for _ in 0..16 {
        if life.step == Step::Serve {
            return;
        }
        life.on(Event::Done, &RULES, 0);
    }
    panic!("does not come up: {life:?}");
}

fn serving() -> Lifecycle<u8> {
    let mut life = Lifecycle::new(0);
    up(&mut life);
    life.on(Event::Done, &RULES, 0);
    life
}

fn outcome(life: &Lifecycle<u8>) -> Outcome {
    life.ended.clone().expect("no change has ended").outcome
}

#[test]
fn a_change_drains_stops_starts_and_serves_in_this_order() {
    let mut life = serving();
    life.change(1, 5, false).unwrap();
    let mut steps = vec![life.step];
    while life.step != Step::Serve {
        life.on(Event::Done, &RULES, 0);
        steps.push(life.step);
    }
    use Step::{Adapters, Drain, Golden, Ramp, Serve, Start, Stop, WarmUp};
    assert_eq!(steps, [Drain, Stop, Start, Adapters, Golden, WarmUp, Ramp, Serve]);
    assert_eq!((life.wanted, life.good, outcome(&life)), (5, 0, Outcome::Done));
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.good, 5, "good only after the settling time");
}

#[test]
fn a_drain_that_takes_too_long_gives_the_change_up_unless_it_may_cut() {
    let mut life = serving();
    life.change(1, 5, false).unwrap();
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.wanted, outcome(&life)), (Step::Serve, 0, Outcome::Aborted("failed".to_owned())));
    life.change(2, 5, true).unwrap();
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.wanted), (Step::Stop, 5));
}

#[test]
fn settings_that_do_not_come_up_are_rolled_back_at_once_and_cost_no_budget() {
    for steps in 1..6 {
        let mut life = serving();
        life.change(1, 5, false).unwrap();
        (0..=steps).for_each(|_| life.on(Event::Done, &RULES, 0));
        life.on(failed(), &RULES, 0);
        assert_eq!((life.step, life.wanted, life.restarts_within(&RULES, 0)), (Step::Stop, 0, 0));
        up(&mut life);
        assert_eq!(outcome(&life), Outcome::RolledBack("failed".to_owned()));
    }
}

#[test]
fn a_change_after_which_nothing_comes_up_ends_and_what_was_good_is_tried_on() {
    for to in [0, 5] {
        let mut life = serving();
        life.change(1, to, false).unwrap();
        // Drained and stopped; then two starts in a row fail.
        (0..2).for_each(|_| life.on(Event::Done, &RULES, 0));
        for _ in 0..2 {
            life.on(failed(), &RULES, 0);
            while life.step != Step::Start && life.change.is_some() {
                life.on(Event::Done, &RULES, 0);
            }
        }
        assert_eq!((life.step, outcome(&life)), (Step::Stop, Outcome::Failed("failed".to_owned())));
        up(&mut life);
        assert_eq!(life.wanted, 0);
    }
}

#[test]
fn a_crash_before_the_new_settings_settled_returns_to_the_good_ones() {
    let mut life = serving();
    life.change(1, 5, false).unwrap();
    up(&mut life);
    life.on(gone(), &RULES, 0);
    assert_eq!((life.step, life.wanted), (Step::Stop, 0));
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Step::Backoff);
}

#[test]
fn crashes_are_restarted_after_doubling_waits_until_the_budget_is_spent() {
    let mut life = serving();
    let mut waits = Vec::new();
    while life.step != Step::Hold {
        life.on(gone(), &RULES, 0);
        life.on(Event::Done, &RULES, 0);
        if life.step == Step::Backoff {
            waits.push(life.backoff_ms(&RULES));
            up(&mut life);
        }
    }
    assert_eq!(waits, [10, 20]);
    life.enable().unwrap();
    assert_eq!(life.step, Step::Stop, "a stop that failed may be why it holds");
    up(&mut life);
    // A window later the same number of crashes is no reason to hold.
    for round in 1..10u64 {
        life.on(gone(), &RULES, round * RULES.window_ms);
        up(&mut life);
    }
}

#[test]
fn other_settings_begin_anew_whatever_the_life_before_came_to() {
    let mut left = serving();
    left.leave();
    (0..2).for_each(|_| left.on(Event::Done, &RULES, 0));
    assert_eq!(left.step, Step::Off);
    let mut crashed = serving();
    while crashed.step != Step::Hold {
        crashed.on(gone(), &RULES, 0);
        crashed.on(Event::Done, &RULES, 0);
    }
    for life in [left, crashed, serving()] {
        for fall_back in [false, true] {
            let mut life = life.clone().anew(7, fall_back);
            assert_eq!(life.step, Step::Stop, "whatever runs is stopped first");
            let mut broken = life.clone();
            broken.on(Event::Done, &RULES, 0);
            broken.on(Event::Failed(StepFailure { why: "no".to_owned(), permanent: true }), &RULES, 0);
            broken.on(Event::Done, &RULES, 0);
            let back = if fall_back { (Step::Backoff, 0) } else { (Step::Hold, 7) };
            assert_eq!((broken.step, broken.wanted), back);
            up(&mut life);
            life.on(Event::Done, &RULES, 0);
            assert_eq!((life.wanted, life.good), (7, 7));
        }
    }
}

#[test]
fn a_change_is_given_up_where_nobody_can_stand_in_even_if_it_may_cut() {
    let mut life = serving();
    life.change(1, 5, true).unwrap();
    life.on(Event::Failed(StepFailure { why: "alone".to_owned(), permanent: true }), &RULES, 0);
    assert_eq!((life.step, life.wanted, outcome(&life)), (Step::Serve, 0, Outcome::Aborted("alone".to_owned())));
}

#[test]
fn what_cannot_succeed_is_not_tried_again() {
    let mut life = Lifecycle::new(0);
    life.on(Event::Done, &RULES, 0);
    life.on(Event::Failed(StepFailure { why: "no such flag".to_owned(), permanent: true }), &RULES, 0);
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.step, life.why.as_deref()), (Step::Hold, Some("no such flag")));
    life.change(1, 3, false).unwrap();
    up(&mut life);
    assert_eq!((life.wanted, outcome(&life)), (3, Outcome::Done));
}

#[test]
fn what_a_crash_of_the_gateway_interrupts_is_given_up_before_the_stop_and_carried_through_after_it() {
    let mut life = serving();
    life.change(1, 5, false).unwrap();
    let mut drained = life.clone().recover(true, true);
    assert_eq!((drained.step, drained.wanted), (Step::Adopt, 0));
    assert!(matches!(outcome(&drained), Outcome::Aborted(_)));
    up(&mut drained);
    life.on(Event::Done, &RULES, 0);
    for alive in [true, false] {
        let mut stopping = life.clone().recover(alive, true);
        assert_eq!((stopping.step, stopping.wanted), (Step::Stop, 5));
        up(&mut stopping);
        assert_eq!(outcome(&stopping), Outcome::Done);
    }
}

/// A life, and what may be true of its processes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    life: Lifecycle<u8>,
    /// A process may run that no stop has confirmed to be gone.
    process: bool,
    /// It is known to have died by itself, or to hang.
    dead: bool,
    /// Requests may be running on it.
    busy: bool,
    changes: u8,
}

impl World {
    /// The step has just begun: what that means, and what must hold.
    fn enter(&mut self, before: Step) {
        let step = self.life.step;
        if step == Step::Start {
            assert!(!self.process, "started beside another one: {self:?}");
            (self.process, self.dead) = (true, false);
        }
        if step == Step::Stop && self.busy && !self.dead && before == Step::Drain {
            let cut = self.life.change.as_ref().is_some_and(|change| change.cut) || self.life.leaving;
            assert!(cut, "stopped under requests: {self:?}");
        }
        if step.in_rotation() {
            assert!(self.process && !self.dead, "in rotation without an engine: {self:?}");
            self.busy = true;
        }
        if matches!(step, Step::Off | Step::Backoff) {
            assert!(!self.process, "nothing should run: {self:?}");
        }
        if step == Step::Hold || step == Step::Off {
            assert!(self.life.change.is_none(), "a change without an end: {self:?}");
        }
        if step == Step::Serve {
            assert!(self.life.change.is_none(), "serves, but the change has no outcome: {self:?}");
        }
        assert!(self.life.restarts.len() <= RULES.restarts + 1);
    }

    fn after(&self, act: impl FnOnce(&mut Self)) -> Self {
        let mut next = self.clone();
        let before = next.life.step;
        act(&mut next);
        if next.life.step != before {
            next.enter(before);
        }
        next
    }

    /// Everything that can happen now.
    fn successors(&self) -> Vec<Self> {
        let step = self.life.step;
        let mut all = Vec::new();
        let mut push = |act: &dyn Fn(&mut Self)| all.push(self.after(act));
        // A dead engine's steps do not succeed, but for the stop and the waits.
        if !self.dead || matches!(step, Step::Stop | Step::Drain | Step::Backoff) {
            push(&|w| {
                if step == Step::Stop {
                    (w.process, w.busy) = (false, false);
                }
                if step == Step::Drain {
                    w.busy = false;
                }
                w.life.on(Event::Done, &RULES, 0);
            });
        }
        for permanent in [false, true] {
            push(&|w| w.life.on(Event::Failed(StepFailure { why: String::new(), permanent }), &RULES, 0));
        }
        if self.process && !matches!(step, Step::Off | Step::Hold | Step::Stop) {
            push(&|w| {
                w.dead = true;
                w.life.on(Event::Gone(failure("")), &RULES, 0);
            });
        }
        push(&|w| drop(w.life.enable()));
        if !self.life.leaving {
            push(&|w| w.life.leave());
        }
        if self.changes < 2 {
            for (to, cut) in [(0, false), (1, false), (1, true)] {
                push(&|w| {
                    w.changes += 1;
                    drop(w.life.change(u64::from(w.changes), to, cut));
                });
            }
        }
        // The gateway dies: what was written is all that is left, and the engine lives on or does not.
        for (alive, adopt) in [(true, true), (true, false), (false, true)] {
            if !alive || (self.process && !self.dead) {
                push(&|w| {
                    w.life = w.life.clone().recover(alive, adopt);
                    (w.busy, w.dead) = (false, !alive);
                });
            }
        }
        all
    }
}

/// Two changes, any failure at any step, crashes of the gateway at any step: nothing is ever started beside another
/// engine, nothing is stopped under requests, every change has an outcome, and from every state a run of successes serves.
#[test]
fn exhaustively_no_order_of_events_breaks_the_rules() {
    let mut first = World { life: Lifecycle::new(0), process: false, dead: false, busy: false, changes: 0 };
    first.enter(Step::Off);
    let (mut seen, mut open) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    while let Some(world) = open.pop_front() {
        for next in world.successors() {
            if seen.insert(next.clone()) {
                open.push_back(next);
            }
        }
    }
    assert!(seen.len() > 1_000, "explored only {} states", seen.len());
    for world in &seen {
        let mut life = world.life.clone();
        for _ in 0..16 {
            life.on(Event::Done, &RULES, 0);
        }
        let rest = if life.leaving { Step::Off } else { Step::Serve };
        assert!(matches!(life.step, Step::Hold | Step::Off) || life.step == rest, "stuck: {world:?} -> {life:?}");
    }
    println!("{} states", seen.len());
}
