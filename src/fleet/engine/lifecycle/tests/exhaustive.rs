//! The life cycle next to a model of the processes, exhaustively.
//!
//! The model knows whether a process may run and have requests, and whether another one sleeps next
//! to it. The life cycle does not know this.

use std::collections::{HashSet, VecDeque};

use super::*;

/// A life cycle, and the possible state of the processes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LifecycleModel {
    life: Lifecycle<u8>,
    /// A process may run: no stop was confirmed.
    process: bool,
    /// Another process may sleep next to it.
    aside: bool,
    /// The process is known to be dead, or to hang.
    dead: bool,
    /// The process may have requests.
    busy: bool,
    changes: u8,
}

impl LifecycleModel {
    /// Checks the rules when a step begins.
    fn enter(&mut self, before: Step) {
        let step = self.life.step;
        let has_kept = self.life.kept.is_some();
        if step == Step::Start {
            if before == Step::Sleep {
                // The effect stops an engine that an earlier gateway had kept.
                assert!(has_kept && self.process, "no old engine was put aside: {self:?}");
                (self.aside, self.process) = (true, false);
            }
            assert!(!self.process, "started beside another one: {self:?}");
            assert!(has_kept || !self.aside, "started beside an engine that should be gone: {self:?}");
            (self.process, self.dead) = (true, false);
        }
        if step == Step::Wake && has_kept {
            assert!(!self.process, "woken beside another one: {self:?}");
            (self.process, self.aside, self.dead) = (true, false, !self.aside);
        }
        if step == Step::Stop && self.busy && !self.dead && before == Step::Drain {
            let cut = self.life.change.as_ref().is_some_and(|change| change.cut) || self.life.leaving;
            assert!(cut, "stopped under requests: {self:?}");
        }
        if matches!(step, Step::Sleep | Step::Asleep) {
            assert!(self.process && !self.busy, "asleep without an engine or under requests: {self:?}");
        }
        assert!(step != Step::Asleep || self.life.resting, "asleep although it is wanted: {self:?}");
        if step.in_rotation() {
            assert!(self.process && !self.dead, "in rotation without an engine: {self:?}");
            // A withdrawn engine gets no new requests, even when it returns after a crash.
            let opens = self.life.cordon() == Some(Cordon::Open) || (step == Step::Ramp && self.life.opens_in_ramp());
            assert!(!(opens && self.life.withdrawn), "opened although it is withdrawn: {self:?}");
            let closed = self.life.leaving || self.life.cordon() == Some(Cordon::Draining);
            assert!(!self.life.withdrawn || closed, "withdrawn and not closed: {self:?}");
            self.busy |= opens;
        }
        if step == Step::Adapters && before == Step::Wake {
            assert!(self.life.adopted && !has_kept, "a woken engine is warm: {self:?}");
        }
        assert!(step != Step::Start || !self.life.adopted, "a fresh engine taken for a warm one: {self:?}");
        if self.life.cordon() == Some(Cordon::Open) {
            assert!(step == Step::Serve && !self.life.withdrawn && !self.life.leaving, "open too early: {self:?}");
        }
        if matches!(step, Step::Off | Step::Idle | Step::Backoff) {
            assert!(!self.process, "nothing should run: {self:?}");
            assert!(!self.aside || (has_kept && step == Step::Backoff), "nothing should sleep: {self:?}");
        }
        if matches!(step, Step::Off | Step::Idle | Step::Hold | Step::Asleep) {
            assert!(!has_kept, "a return is not expected: {self:?}");
        }
        assert!(step != Step::Idle || self.life.resting, "idle although it is wanted: {self:?}");
        let rests = self.life.resting || !matches!(step, Step::Sleep | Step::Wake);
        if rests && matches!(step, Step::Hold | Step::Off | Step::Idle | Step::Sleep | Step::Asleep | Step::Wake) {
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

    /// All states that one event leads to.
    fn successors(&self) -> Vec<Self> {
        let step = self.life.step;
        let mut all = Vec::new();
        let mut push = |act: &dyn Fn(&mut Self)| all.push(self.after(act));
        // The steps of a dead engine fail, except for the stop and the waits.
        if !self.dead || matches!(step, Step::Stop | Step::Drain | Step::Backoff) {
            push(&|w| {
                if step == Step::Stop {
                    (w.process, w.busy) = (false, false);
                    w.aside &= w.life.kept.is_some();
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
        if self.process && !matches!(step, Step::Off | Step::Idle | Step::Hold | Step::Stop) {
            push(&|w| {
                w.dead = true;
                w.life.on(Event::EngineLost(failure("")), &RULES, 0);
            });
        }
        // The old engine that is kept dies, or is stopped because it is not needed any more.
        if self.aside && self.life.kept.is_some() {
            push(&|w| w.aside = false);
        }
        if step == Step::Serve && self.aside {
            push(&|w| {
                w.life.forget_kept();
                w.aside = false;
            });
        }
        push(&|w| drop(w.life.enable()));
        [false, true].iter().for_each(|sleeps| push(&|w| drop(w.life.rest(*sleeps))));
        push(&|w| w.life.wake());
        if step == Step::Serve {
            push(&|w| w.life.withdraw());
            if self.life.blocked.is_none() {
                push(&|w| {
                    w.life.block(RestartBlocked::StillRunning(1));
                });
            }
        }
        // In any step, the gateway may give up the change for which it withdrew the engine.
        if self.life.withdrawn {
            push(&|w| {
                w.life.reinstate();
                w.busy |= step.in_rotation();
            });
        }
        // The coordinator repeats a failed stop of an engine that leaves.
        if step == Step::Hold && self.life.leaving {
            push(&|w| {
                (w.process, w.aside, w.busy) = (false, false, false);
                w.life.confirm_stopped();
            });
            push(&|w| w.life.stop_failed(String::new()));
        }
        if !self.life.leaving {
            push(&|w| w.life.leave());
        }
        if self.changes < 2 {
            for (to, cut, keep) in [(0, false, None), (1, true, None), (1, false, Some(Keep::Settling))] {
                push(&|w| {
                    w.changes += 1;
                    drop(w.life.change(ChangeRequest { keep, ..request(u64::from(w.changes), to, cut) }));
                });
            }
        }
        // The gateway dies. Only the journal remains, and perhaps the engine. The next gateway has
        // the same configuration, other flags or another program.
        for survivor in [Survivor::Adoptable, Survivor::ToStop, Survivor::None] {
            let wakes_kept = step == Step::Wake && self.life.kept.is_some();
            if survivor != Survivor::None && (!self.process || self.dead || wakes_kept) {
                continue;
            }
            for difference in [None, Some(Difference::None), Some(Difference::Flags), Some(Difference::Program)] {
                // A journal without a record means that there was no process.
                if difference.is_none() && (self.aside || survivor == Survivor::None && self.process) {
                    continue;
                }
                push(&|w| {
                    let mut before = w.life.clone();
                    // In the journal, the old engine is next to the present one until it is awake.
                    if step == Step::Wake && before.kept.is_some() {
                        (w.aside, w.process) = (w.process && !w.dead, false);
                    }
                    if !w.aside || survivor == Survivor::ToStop {
                        before.forget_kept();
                    }
                    let previous = difference.map(|difference| (before, difference));
                    w.life = Lifecycle::new(0);
                    w.life.recover(previous, survivor);
                    assert!(!w.life.withdrawn && w.life.blocked.is_none(), "left from the engine before: {w:?}");
                    (w.busy, w.dead) = (false, survivor == Survivor::None);
                });
            }
        }
        all
    }
}

/// With two changes, and any failure and any crash of the gateway at any step: no engine starts
/// next to another, no engine is stopped under requests, every change has an outcome, and from
/// every state a run of successes leads to `Serve`.
#[test]
fn exhaustively_no_order_of_events_breaks_the_rules() {
    let mut first = LifecycleModel { life: new(0), process: false, aside: false, dead: false, busy: false, changes: 0 };
    first.enter(Step::Off);
    let (mut seen, mut open) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    while let Some(model) = open.pop_front() {
        for next in model.successors() {
            if seen.insert(next.clone()) {
                open.push_back(next);
            }
        }
    }
    assert!(seen.len() > 1_000, "explored only {} states", seen.len());
    for model in &seen {
        let mut life = model.life.clone();
        for _ in 0..16 {
            life.on(Event::Done, &RULES, 0);
        }
        let rest = match (life.leaving, life.resting) {
            (true, _) => Step::Off,
            (false, true) => Step::Idle,
            (false, false) => Step::Serve,
        };
        assert!(matches!(life.step, Step::Hold | Step::Off) || life.step == rest, "stuck: {model:?} -> {life:?}");
    }
    println!("{} states", seen.len());
}
