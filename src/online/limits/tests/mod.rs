//! The controller against a model of a load: kept and undone changes, and that it comes to rest.

mod steps;

use std::time::Duration;

use proptest::prelude::*;

use crate::event::{Acting, EventKind};
use crate::limits::controller::{Action, Controller};
use crate::limits::moves::{Steps, candidates};
use crate::limits::{Knob, LimitRange, Limits, PoolLimits};
use crate::observe::loss::{Cause, Judged};
use crate::observe::usage::Usage;
use crate::observe::window::{PoolWindow, Window};
use sluice_core::base::Rng;

const SECOND: Duration = Duration::from_secs(1);

fn limits() -> Limits {
    Limits(vec![PoolLimits { slots: 64, prefill_tokens: None, long: Some((5_000, 1)), range: (0, None) }])
}

/// The loss and the cause of a request, by limits, time and a random number.
type Load<'a> = dyn Fn(&Limits, Duration, f64) -> (f64, Cause) + 'a;

struct Plant<'a> {
    controller: Controller,
    window: Window,
    now: Duration,
    rng: Rng,
    load: &'a Load<'a>,
    usage: Usage,
    changes: Vec<(Duration, EventKind)>,
}

impl<'a> Plant<'a> {
    fn new(load: &'a Load<'a>, acting: Acting, seed: u64) -> Self {
        let controller = Controller::new(vec!["all".to_owned()], limits(), 0.99, SECOND, acting);
        let usage = Usage { slots_peak: 40, permits_peak: 1, prefill_peak: 20_000, in_rotation: 2, ..Usage::default() };
        let window = Window { from: Duration::ZERO, pools: vec![PoolWindow::new(Duration::ZERO)] };
        Self { controller, window, now: Duration::ZERO, rng: Rng::new(seed), load, usage, changes: Vec::new() }
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += SECOND;
            for _ in 0..10 {
                let (loss, cause) = (self.load)(self.controller.limits(), self.now, self.rng.unit());
                let tokens = if self.rng.unit() < 0.06 { 16_000 } else { 200 };
                let cause = (loss > 0.0).then_some(cause);
                self.window.pools[0].add(self.now - SECOND, tokens, Judged { loss, cause, service: Some(1.0) });
            }
            self.sample();
            let action = self.controller.step(self.now, &self.window);
            if action != Action::Wait {
                self.window = Window { from: self.now, pools: vec![PoolWindow::new(self.now)] };
            }
            let now = self.now;
            self.changes.extend(self.controller.take_events().into_iter().map(|event| (now, event.kind)));
        }
    }

    fn sample(&mut self) {
        let moments = self.window.pools[0].usage.moments + 1;
        self.window.pools[0].usage =
            Usage { moments, waiting: moments, no_slots: moments, no_permits: moments, ..self.usage };
    }

    fn count(&self, kind: EventKind) -> usize {
        self.changes.iter().filter(|(_, other)| *other == kind).count()
    }

    fn own(&self) -> PoolLimits {
        self.controller.limits().0[0]
    }
}

fn missing(share: f64, draw: f64) -> f64 {
    if draw < share { 1.2 } else { 0.0 }
}

#[test]
fn before_the_first_verdict_it_says_how_much_was_observed() {
    let mut plant = Plant::new(&|_, _, _| (0.0, Cause::Queue), Acting::Proposes, 1);
    assert_eq!(plant.controller.belief().1, "no requests were observed yet");
    plant.run(30);
    let observed = plant.controller.belief().1.strip_suffix(" requests were observed, not yet enough to judge");
    assert!(observed.is_some_and(|count| count.parse::<u32>().is_ok_and(|count| count > 100)), "{observed:?}");
    plant.run(120);
    assert!(plant.controller.belief().1.ends_with("requests met their objectives"), "{}", plant.controller.belief().1);
}

#[test]
fn what_helps_is_kept_and_the_limits_come_to_rest() {
    let enough = |limits: &Limits, _: Duration, draw| {
        (missing(if limits.0[0].slots >= 100 { 0.001 } else { 0.4 }, draw), Cause::Queue)
    };
    let mut plant = Plant::new(&enough, Acting::Acts, 1);
    plant.run(600);
    assert!(plant.own().slots >= 100, "{:?}", plant.own());
    let made = plant.changes.len();
    plant.run(24 * 3600);
    assert_eq!(plant.changes.len(), made, "objectives that are met are left alone");
}

#[test]
fn what_does_not_help_is_undone_and_tried_ever_more_seldom() {
    let never = |_: &Limits, _: Duration, draw| (missing(0.3, draw), Cause::Queue);
    let mut plant = Plant::new(&never, Acting::Acts, 2);
    plant.run(24 * 3600);
    let first_day = plant.count(EventKind::Tried);
    assert!(plant.count(EventKind::Undone) > 3 && first_day < 40, "{:?}", plant.changes);
    plant.run(24 * 3600);
    assert!(plant.count(EventKind::Tried) - first_day <= first_day / 2, "{first_day}, {:?}", plant.changes);
}

#[test]
fn what_does_harm_is_undone_within_seconds() {
    let worse =
        |now: &Limits, _: Duration, draw| (missing(if *now == limits() { 0.05 } else { 0.9 }, draw), Cause::Queue);
    let mut plant = Plant::new(&worse, Acting::Acts, 3);
    // Requests count only 20 s after arrival, but the requests that have ended leave no doubt.
    let names = vec!["all".to_owned()];
    plant.controller = Controller::new(names, limits(), 0.99, Duration::from_secs(20), Acting::Acts);
    plant.run(1_200);
    let tried = plant.changes.iter().find(|(_, kind)| *kind == EventKind::Tried).unwrap().0;
    let undone = plant.changes.iter().find(|(_, kind)| *kind == EventKind::Undone).unwrap().0;
    assert!(undone - tried <= Duration::from_secs(15), "{:?}", undone - tried);
    assert_eq!(*plant.controller.kept_limits(), limits());
}

#[test]
fn it_proposes_where_it_may_not_act_and_acts_on_approval() {
    let enough = |limits: &Limits, _: Duration, draw| {
        (missing(if limits.0[0].slots > 64 { 0.0 } else { 0.4 }, draw), Cause::Queue)
    };
    let mut plant = Plant::new(&enough, Acting::WaitsForApproval, 4);
    plant.run(3_600);
    assert_eq!((plant.count(EventKind::Proposed), plant.count(EventKind::Tried)), (1, 0));
    assert_eq!(*plant.controller.limits(), limits());
    let id = plant.controller.proposals.shown().expect("a proposal").0.id;
    assert!(!plant.controller.proposals.approve(id + 1) && plant.controller.proposals.approve(id));
    plant.run(300);
    assert!(plant.own().slots > 64 && plant.count(EventKind::Kept) == 1, "{:?}", plant.changes);
    let mut plant = Plant::new(&enough, Acting::Proposes, 4);
    plant.run(3_600);
    assert_eq!((plant.count(EventKind::Proposed), *plant.controller.limits() == limits()), (1, true));
    // Causes that alternate must not fill the journal.
    let turns = |_: &Limits, now: Duration, draw| {
        (missing(0.4, draw), if now.as_secs() % 20 < 10 { Cause::Queue } else { Cause::Decode })
    };
    let mut plant = Plant::new(&turns, Acting::Proposes, 4);
    plant.run(3_600);
    assert!((1..=31).contains(&plant.count(EventKind::Proposed)), "{}", plant.count(EventKind::Proposed));
}

#[test]
fn it_stands_back_when_something_else_changes() {
    let slowly = |_: &Limits, _: Duration, draw| (missing(0.4, draw), Cause::Queue);
    type Disturb = fn(&mut Plant<'_>);
    let disturb: [(&str, Disturb); 3] = [
        ("an engine left", |plant| plant.usage.in_rotation = 1),
        ("the clock went back", |plant| plant.now -= Duration::from_secs(7)),
        ("it may no longer act", |plant| {
            let now = plant.now;
            assert_eq!(plant.controller.set_acting(Acting::Proposes, now), Action::Apply);
        }),
    ];
    for (name, disturb) in disturb {
        let mut plant = Plant::new(&slowly, Acting::Acts, 5);
        while !plant.controller.is_trying() {
            plant.run(1);
        }
        assert_ne!(*plant.controller.limits(), limits());
        for _ in 0..20 {
            assert_eq!(*plant.controller.kept_limits(), limits(), "what is being tried is not saved");
            plant.run(1);
        }
        assert!(plant.controller.is_trying());
        disturb(&mut plant);
        plant.run(1);
        assert_eq!((plant.count(EventKind::StoodBack), *plant.controller.limits() == limits()), (1, true), "{name}");
    }
}

#[test]
fn without_requests_nothing_happens() {
    let none = |_: &Limits, _: Duration, _| (0.0, Cause::Queue);
    let mut plant = Plant::new(&none, Acting::Acts, 6);
    for _ in 0..100_000 {
        plant.now += SECOND;
        plant.sample();
        assert_ne!(plant.controller.step(plant.now, &plant.window), Action::Apply);
    }
}

#[test]
fn another_load_may_need_what_did_not_help_before() {
    let never = |_: &Limits, _: Duration, draw| (missing(0.3, draw), Cause::Queue);
    let mut plant = Plant::new(&never, Acting::Acts, 7);
    let hour = 3_600.0;
    let closed_for_long =
        |plant: &Plant<'_>| plant.controller.blocked().iter().filter(|(.., left)| *left > hour).count();
    while closed_for_long(&plant) < 2 {
        plant.run(60);
        assert!(plant.now < Duration::from_secs(7 * 24 * 3600), "nothing is closed for long");
    }
    // From here on, twice the requests, half of them long.
    for _ in 0..900 {
        plant.run(1);
        for _ in 0..10 {
            let judged = Judged { loss: missing(0.3, plant.rng.unit()), cause: Some(Cause::Queue), service: None };
            plant.window.pools[0].add(plant.now - SECOND, 30_000, judged);
        }
    }
    assert_eq!(closed_for_long(&plant), 0, "{:?}", plant.controller.blocked());
}

#[test]
fn most_changes_without_effect_are_undone() {
    let (mut tried, mut kept) = (0, 0);
    for seed in 0..60 {
        let never = |_: &Limits, _: Duration, draw| (missing(0.1, draw), Cause::Decode);
        let mut plant = Plant::new(&never, Acting::Acts, seed);
        plant.run(3_600);
        tried += plant.count(EventKind::Tried);
        kept += plant.count(EventKind::Kept);
    }
    assert!(tried > 200 && (kept as f64) < 0.3 * tried as f64, "{kept} of {tried}");
}

/// The proposals for pools of which all loss has this cause.
fn moves_for(limits: Limits, cause: Cause, seen: impl Fn(usize, &mut PoolWindow)) -> Vec<(usize, Knob, bool)> {
    let pools = (0..limits.0.len()).map(|at| {
        let mut window = PoolWindow::new(Duration::ZERO);
        for tokens in [200, 400, 900, 2_000, 4_000, 20_000] {
            let judged = Judged { loss: 1.0, cause: Some(cause), service: Some(1.0) };
            window.add(Duration::ZERO, tokens, judged);
        }
        window.usage = Usage {
            moments: 9,
            waiting: 9,
            no_slots: 9,
            no_permits: 9,
            slots_peak: 64,
            permits_peak: 2,
            in_rotation: 1,
            ..window.usage
        };
        seen(at, &mut window);
        window
    });
    let window = Window { from: Duration::ZERO, pools: pools.collect() };
    let all = candidates(&window, &limits, &LimitRange::default(), &Steps::default());
    all.iter().map(|step| (step.direction.pool, step.direction.knob, step.direction.up)).collect()
}

#[test]
fn what_an_operator_forbids_is_not_undone() {
    let with = |permits| Limits(vec![PoolLimits { long: Some((5_000, permits)), ..limits().0[0] }]);
    let moves_long = |permits, cause| {
        let all = moves_for(with(permits), cause, |_, _| ());
        all.iter().any(|(_, knob, _)| matches!(knob, Knob::Permits | Knob::Threshold))
    };
    for cause in [Cause::Queue, Cause::Engine, Cause::Decode] {
        assert_eq!([0, 2].map(|permits| moves_long(permits, cause)), [false, true], "{cause:?}");
    }
}

#[test]
fn slots_stay_above_the_widest_request_and_boundaries_below_the_context_of_the_engines() {
    let lowers = |widest| {
        let all = moves_for(limits(), Cause::Decode, |_, window| window.widest = widest);
        all.contains(&(0, Knob::Slots, false))
    };
    assert_eq!([1, 20, 32, 200].map(lowers), [true, true, false, false]);
    let two = Limits(vec![
        PoolLimits { range: (0, Some(1_000)), ..limits().0[0] },
        PoolLimits { range: (1_000, None), ..limits().0[0] },
    ]);
    let raises = |context| {
        let all = moves_for(two.clone(), Cause::Queue, |at, window| {
            if at == 0 {
                let usage = Usage { context, ..window.usage };
                *window = PoolWindow::new(Duration::ZERO);
                window.usage = usage;
            }
        });
        all.contains(&(0, Knob::Boundary, true))
    };
    assert_eq!([None, Some(131_072), Some(2_048)].map(raises), [true, true, false]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Limits stay within their bounds, and each prompt length has exactly one home.
    #[test]
    fn limits_stay_within_bounds(seed in any::<u64>(), slots in 1_u32..5_000, permits in 1_u32..100, threshold in 1_u64..100_000) {
        let bounds = LimitRange::default();
        let mut rng = Rng::new(seed);
        let pool = |range| PoolLimits { slots, prefill_tokens: Some(8_192), long: Some((threshold, permits)), range };
        let mut now = Limits(vec![pool((0, Some(5_000))), pool((5_000, None))]);
        for _ in 0..60 {
            let pools = (0..2).map(|_| {
                let mut window = PoolWindow::new(Duration::ZERO);
                for _ in 0..50 {
                    let cause = [Cause::Queue, Cause::Engine, Cause::Decode][(rng.next_u64() % 3) as usize];
                    let judged = Judged { loss: 1.0, cause: Some(cause), service: Some(rng.unit() * 10.0) };
                    window.add(Duration::ZERO, rng.next_u64() % 60_000, judged);
                }
                let peak = (rng.next_u64() % 300) as u32;
                window.usage = Usage {
                    moments: 10, waiting: 9, no_slots: 9, no_permits: 5, no_prefill: 7, queue: 3,
                    slots_peak: peak, permits_peak: peak % 7, prefill_peak: u64::from(peak) * 100, in_rotation: 1,
                    context: None, in_flight: None,
                };
                window
            });
            let window = Window { from: Duration::ZERO, pools: pools.collect() };
            let moves = crate::limits::moves::candidates(&window, &now, &bounds, &crate::limits::moves::Steps::default());
            for step in &moves {
                let [short, long] = [step.to.0[0], step.to.0[1]];
                prop_assert_eq!((short.range.0, short.range.1, long.range.1), (0, Some(long.range.0), None));
                prop_assert!(long.range.0 >= bounds.boundary.0);
                for limits in [short, long] {
                    prop_assert!(limits.slots >= bounds.slots.0.min(slots) && limits.slots <= bounds.slots.1.max(slots));
                    let (threshold, permits) = limits.long.expect("never removed");
                    prop_assert!(permits >= 1 && permits <= bounds.permits.1.max(100) && threshold >= 1);
                    prop_assert!(limits.prefill_tokens.is_none_or(|tokens| tokens >= 1_024));
                }
                let changed = Knob::ALL.iter().filter(|knob| {
                    [0, 1].iter().any(|at| step.to.0[*at].show(**knob) != now.0[*at].show(**knob))
                });
                prop_assert_eq!(changed.count(), 1, "one limit at a time: {:?}", step);
            }
            if let Some(step) = moves.into_iter().nth((rng.next_u64() % 4) as usize) {
                now = step.to;
            }
        }
    }
}

#[test]
fn beside_the_limits_found_are_those_of_the_file_and_one_permit_for_long_prompts() {
    let mut lengths = crate::observe::lengths::Lengths::default();
    (0..15).for_each(|_| lengths.add(200));
    lengths.add(16_000);
    let beside =
        |now: PoolLimits, file: PoolLimits| crate::limits::moves::beside(&now, &file, &lengths, &LimitRange::default());
    let file = PoolLimits { slots: 256, prefill_tokens: None, long: None, range: (0, None) };
    let [same, one] = beside(PoolLimits { prefill_tokens: Some(12_000), ..file }, file)[..] else { panic!("two") };
    assert_eq!((same, one.prefill_tokens), (file, None));
    let (threshold, permits) = one.long.unwrap();
    assert!((200..16_000).contains(&threshold) && permits == 1, "{threshold}");
    assert_eq!(beside(file, file), [one], "the limits in force are simulated anyway");
    let four = PoolLimits { long: Some((5_000, 4)), ..file };
    assert_eq!(beside(four, four), [PoolLimits { long: Some((5_000, 1)), ..file }]);
    let none = PoolLimits { long: Some((5_000, 0)), ..file };
    assert_eq!(beside(none, none), [], "an operator keeps long prompts away");
    // A moved boundary stays, because the neighbours depend on it.
    let moved = PoolLimits { range: (0, Some(3_000)), ..file };
    assert!(beside(moved, PoolLimits { range: (0, Some(5_000)), ..file }).iter().all(|one| one.range == moved.range));
}

#[test]
fn limits_that_a_simulation_suggests_are_tried_next_and_judged_like_any_others() {
    for (found, kept) in [(0.01, EventKind::Kept), (0.5, EventKind::Undone)] {
        let load = move |now: &Limits, _: Duration, draw| {
            (missing(if now.0[0].prefill_tokens == Some(7_000) { found } else { 0.3 }, draw), Cause::Queue)
        };
        let mut plant = Plant::new(&load, Acting::Acts, 4);
        plant.controller.suggest(0, PoolLimits { prefill_tokens: Some(7_000), range: (9, None), ..plant.own() }, "why");
        plant.run(200);
        assert_eq!((plant.changes[1].1, plant.own().range), (kept, (0, None)), "{:?}", plant.changes);
    }
}
