//! The slow layer against a model of a pool: which changes it makes, when it stops, and that
//! engines end with the old value or all with the new one.

mod bounds;
mod decisions;
mod deployment;
mod limits;
mod surroundings;

use std::time::Duration;

use crate::engines::change::Stage;
use crate::engines::decide::ASK_INTERVAL;
use crate::engines::look::{EngineLook, EngineRules, Need, Restarted, TunerOrder};
use crate::engines::saved::SavedEngines;
use crate::engines::trial::ABSENT;
use crate::engines::verdict::COMPARED;
use crate::engines::{CLOSED, EngineTuner, SIMULATED, STOOD_STILL};
use crate::event::{Acting, EventKind};
use crate::observe::arms::Arms;
use crate::observe::window::Score;
use sluice_core::base::Rng;

use deployment::{BEFORE, Deployment, FLAG, RESTART, SECOND, helps, need_of, rules};

#[test]
fn what_helps_reaches_every_engine_one_by_one() {
    let mut pool = Deployment::new(3, helps);
    pool.run(7_200);
    assert_eq!(pool.kinds(), [EventKind::Tried, EventKind::Compared, EventKind::Promoted, EventKind::Kept]);
    assert!(pool.value(0) > BEFORE && pool.values().windows(2).all(|two| two[0] == two[1]), "{:?}", pool.values());
    assert_eq!(pool.begun.len(), 3);
    let change = &pool.tuner.measured()[0];
    assert!(change.range.0 <= 0.45 && 0.45 <= change.range.1, "{change:?}");
}

#[test]
fn what_makes_no_difference_is_taken_back_and_not_tried_again_for_hours() {
    for seed in 1..=5 {
        let mut pool = Deployment::new(2, |_| (0.5, 0.0));
        pool.rng = Rng::new(seed);
        pool.run(CLOSED.0.as_secs());
        let undone = pool.events.iter().filter(|(kind, _)| *kind == EventKind::Undone).count();
        let tried = pool.events.iter().filter(|(kind, _)| *kind == EventKind::Tried).count();
        // Four values are near. After a forecast that did not come true, later forecasts are
        // trusted less.
        assert!((1..=4).contains(&tried) && undone == tried, "{:?}", pool.events);
        assert_eq!(pool.values(), [BEFORE; 2]);
        assert!(pool.tuner.frozen.as_deref().is_none(), "a tie is no failure");
    }
}

#[test]
fn two_changes_that_fail_freeze_it_until_an_operator_resumes_it() {
    type Fault = (fn(f64) -> (f64, f64), fn(f64) -> Restarted);
    let starts: fn(f64) -> Restarted = |_| Restarted::Done;
    let refuses: fn(f64) -> Restarted =
        |value| if value == BEFORE { Restarted::Done } else { Restarted::Failed("out of memory".to_owned()) };
    let faults: [Fault; 2] =
        [(|_| (0.5, 0.0), refuses), (|value| (0.5, if value == BEFORE { 0.0 } else { 0.3 }), starts)];
    for (fares, restarts) in faults {
        let mut pool = Deployment::new(2, fares);
        pool.restarts = restarts;
        pool.run(4 * 3_600);
        assert_eq!(pool.kinds().last(), Some(&EventKind::Frozen), "{:?}", pool.events);
        assert_eq!(pool.kinds().iter().filter(|kind| **kind == EventKind::Undone).count(), 2);
        assert_eq!((pool.values(), pool.engines.iter().all(|engine| engine.serves)), (vec![BEFORE; 2], true));
        let begun = pool.begun.len();
        let saved = pool.tuner.saved(pool.now);
        pool.tuner = EngineTuner::new(rules());
        pool.tuner.restore(saved, true, pool.now);
        pool.run(3_600);
        assert_eq!(pool.begun.len(), begun, "frozen, also after a restart of the gateway");
        assert!(pool.belief().contains("sluice tuner resume"), "{}", pool.belief());
        pool.tuner.thaw();
        pool.fares = helps;
        pool.restarts = starts;
        pool.run(7_200);
        assert_eq!(pool.kinds().last(), Some(&EventKind::Kept), "{:?}", pool.events);
    }
}

#[test]
fn what_does_harm_is_taken_back_and_later_forecasts_are_trusted_less() {
    let mut pool = Deployment::new(2, |value| (if value == BEFORE { 0.5 } else { 0.9 }, 0.0));
    pool.run(4 * 3_600);
    assert_eq!(pool.kinds(), [EventKind::Tried, EventKind::Compared, EventKind::Undone], "{:?}", pool.events);
    assert_eq!(pool.values(), [BEFORE; 2]);
    assert!(pool.belief().contains("no change of a flag is expected to help"), "{}", pool.belief());
    assert_eq!(pool.forecasts.last().map(String::as_str), Some(&*pool.belief()), "every simulation is written down");
}

#[test]
fn after_a_failure_it_rests() {
    let mut pool = Deployment::new(2, |_| (0.5, 0.0));
    pool.restarts = |value| if value == BEFORE { Restarted::Done } else { Restarted::Failed("no".to_owned()) };
    pool.run(4 * 3_600);
    let [first, second] = pool.begun[..] else { panic!("{:?}", pool.begun) };
    assert!(second - first >= RESTART + rules().cool_down, "{:?}", pool.begun);
}

#[test]
fn a_gateway_that_restarts_takes_back_what_was_tried_and_finishes_what_was_promoted() {
    for stage in [Stage::Canary, Stage::Copies, Stage::Recovery, Stage::Compared, Stage::Promotion, Stage::Return] {
        let mut pool = Deployment::new(3, if stage == Stage::Return { |_| (0.5, 0.0) } else { helps });
        while pool.stage() != Some(stage) {
            if stage == Stage::Recovery && pool.stage().is_some() {
                pool.engines[0].waiting = 100;
            }
            pool.second();
        }
        // The restart has begun, or begins at the next look.
        pool.run(1);
        pool.engines[0].waiting = 0;
        if let Some((_, engine, value)) = pool.under_way.take() {
            pool.give(engine, value);
            pool.engines[engine].serves = true;
        }
        let saved = serde_json::to_string(&pool.tuner.saved(pool.now)).unwrap();
        let saved: SavedEngines = serde_json::from_str(&saved).unwrap();
        pool.tuner = EngineTuner::new(rules());
        pool.arms = Arms::default();
        pool.tuner.restore(saved, true, pool.now);
        pool.fares = |_| (0.0, 0.0);
        pool.run(1_200);
        assert_eq!(pool.stage(), None, "{stage:?}: {:?}", pool.events);
        let all_alike = pool.values().windows(2).all(|two| two[0] == two[1]);
        let is_changed = pool.value(0) != BEFORE;
        assert_eq!((all_alike, is_changed), (true, stage == Stage::Promotion), "{stage:?}: {:?}", pool.values());
        let stood_back = pool.kinds().contains(&EventKind::StoodBack);
        assert_eq!(stood_back, stage != Stage::Promotion, "{stage:?}: {:?}", pool.events);
    }
}

#[test]
fn flags_that_an_operator_gives_an_engine_meanwhile_stay() {
    for theirs in [0, 1] {
        let mut pool = Deployment::new(2, helps);
        pool.run_until(Some(Stage::Compared));
        let canary = pool.tuner.change().unwrap().canary().to_owned();
        let index = pool.engines.iter().position(|engine| engine.backend == canary).unwrap() ^ theirs;
        pool.give(index, 48.0);
        pool.fares = |_| (0.0, 0.0);
        pool.run(300);
        assert_eq!(pool.kinds().last(), Some(&EventKind::StoodBack), "{:?}", pool.events);
        assert_eq!(pool.stage(), None);
        assert_eq!((pool.value(index), pool.value(index ^ 1)), (48.0, BEFORE));
        assert!(pool.tuner.frozen.as_deref().is_none());
    }
}

#[test]
fn a_reason_to_stand_back_ends_a_change() {
    let reasons: [fn(&mut Deployment); 2] =
        [|pool| pool.stands_back = Some("an operator cordoned e1"), |pool| pool.acting = Acting::Proposes];
    for reason in reasons {
        let mut pool = Deployment::new(2, helps);
        pool.run_until(Some(Stage::Copies));
        reason(&mut pool);
        pool.run(300);
        assert_eq!((pool.stage(), pool.values()), (None, vec![BEFORE; 2]), "{:?}", pool.events);
        assert!(pool.kinds().contains(&EventKind::StoodBack));
        let begun = pool.begun.len();
        pool.run(3_600);
        assert_eq!(pool.begun.len(), begun);
    }
}

#[test]
fn a_change_whose_experiment_the_gateway_has_stopped_has_failed() {
    for stage in [Stage::Copies, Stage::Compared] {
        let mut pool = Deployment::new(2, helps);
        pool.run_until(Some(stage));
        let why = "canary was stopped after 40 requests: it broke guardrail.errors";
        assert_eq!(pool.tuner.experiment_stopped(why, pool.now), [TunerOrder::Configure]);
        assert_eq!(pool.tuner.experiment_stopped(why, pool.now), [], "said again");
        pool.fares = |_| (0.0, 0.0);
        pool.run(300);
        assert_eq!(pool.events.last().unwrap(), &(EventKind::Undone, why.to_owned()));
        assert_eq!((pool.stage(), pool.values(), pool.tuner.failures), (None, vec![BEFORE; 2], 1));
    }
}

#[test]
fn a_clock_that_jumps_a_new_configuration_and_another_engine_that_leaves_end_a_change_at_every_stage() {
    type Disturb = fn(&mut Deployment);
    let disturbances: [(&str, Disturb); 4] = [
        ("the clock went backwards", |pool| pool.now -= Duration::from_secs(7)),
        ("the gateway stood still for", |pool| pool.now += 2 * STOOD_STILL),
        ("the configuration has changed", |pool| {
            let orders = pool.tuner.stand_back("the configuration has changed", pool.now);
            assert_eq!(orders, [TunerOrder::Configure]);
        }),
        ("left rotation, which was not changed", |pool| {
            let canary = pool.tuner.change().unwrap().canary().to_owned();
            pool.engines.iter_mut().filter(|engine| engine.backend != canary).for_each(|engine| engine.serves = false);
        }),
    ];
    for (why, disturb) in disturbances {
        for stage in [Stage::Copies, Stage::Recovery, Stage::Compared] {
            let mut pool = Deployment::new(2, helps);
            while pool.stage() != Some(stage) {
                if stage == Stage::Recovery && pool.stage().is_some() {
                    pool.engines[0].waiting = 100;
                }
                pool.second();
            }
            pool.run(2);
            disturb(&mut pool);
            pool.run(ABSENT.as_secs() + 2);
            assert_eq!(pool.stage(), Some(Stage::Return), "{stage:?}: {why}");
            pool.engines.iter_mut().for_each(|engine| engine.waiting = 0);
            let said = &pool.events.last().unwrap();
            assert_eq!((said.0, said.1.contains(why)), (EventKind::StoodBack, true), "{stage:?}: {said:?}, not {why}");
            pool.fares = |_| (0.0, 0.0);
            pool.run(2 * RESTART.as_secs());
            assert_eq!((pool.stage(), pool.values()), (None, vec![BEFORE; 2]), "{stage:?}: {why}");
            assert_eq!(pool.tuner.failures, 0, "it is not the change's fault: {why}");
        }
    }
}

#[test]
fn without_requests_a_change_is_taken_back() {
    for stage in [Stage::Copies, Stage::Compared] {
        let mut pool = Deployment::new(2, helps);
        pool.run_until(Some(stage));
        (pool.rate, pool.at_once) = (0, 0);
        pool.arms = Arms::new(pool.now);
        pool.run(COMPARED.0.as_secs() + 300);
        assert_eq!((pool.stage(), pool.values()), (None, vec![BEFORE; 2]), "{stage:?}: {:?}", pool.events);
        assert_eq!((pool.kinds().last(), pool.tuner.failures), (Some(&EventKind::Undone), 0), "{stage:?}");
    }
}

#[test]
fn a_simulation_without_numbers_is_no_reason_for_a_change() {
    for none in [f64::NAN, f64::INFINITY] {
        let mut pool = Deployment::new(2, |_| (0.5, 0.0));
        for unknown in [true, false] {
            pool.forecast = match (unknown, none.is_nan()) {
                (true, true) => |value| if value == BEFORE { f64::NAN } else { 0.0 },
                (true, false) => |value| if value == BEFORE { f64::INFINITY } else { f64::NAN },
                (false, true) => |value| if value == BEFORE { 0.5 } else { f64::NAN },
                (false, false) => |value| if value == BEFORE { 0.5 } else { f64::NEG_INFINITY },
            };
            pool.run(2 * ASK_INTERVAL.as_secs());
            assert!(pool.begun.is_empty(), "{none}, {unknown}: {}", pool.belief());
        }
        let mut pool = Deployment::new(2, helps);
        pool.absence = none;
        pool.run(2 * ASK_INTERVAL.as_secs());
        assert!(pool.begun.is_empty(), "{}", pool.belief());
    }
}

#[test]
fn a_simulation_that_never_answers_is_given_up_and_the_next_one_is_not_asked_for_before() {
    let mut pool = Deployment::new(2, helps);
    let mut asked = Vec::new();
    for _ in 0..3 * SIMULATED.as_secs() {
        pool.second();
        asked.extend(pool.answer_due.take().map(|_| pool.now));
    }
    assert!(asked.len() >= 2 && asked.windows(2).all(|two| two[1] - two[0] >= SIMULATED), "{asked:?}");
    pool.run(SIMULATED.as_secs());
    assert!(!pool.begun.is_empty(), "{}", pool.belief());
}

#[test]
fn it_waits_for_its_window_and_its_hour() {
    let mut pool = Deployment::new(2, helps);
    pool.waits = Some("until 22:00");
    pool.run(3_600);
    assert!(pool.begun.is_empty() && pool.belief().contains("until 22:00"), "{}", pool.belief());
    pool.waits = None;
    pool.run_until(Some(Stage::Promotion));
    pool.waits = Some("until 22:00");
    let begun = pool.begun.len();
    pool.run(600);
    assert!(pool.begun.len() <= begun + 1, "the next engine waits");
    pool.waits = None;
    pool.run(600);
    assert_eq!(pool.kinds().last(), Some(&EventKind::Kept));

    let mut pool = Deployment::new(5, helps);
    pool.tuner.set_rules(EngineRules { restarts_per_hour: 2, ..rules() });
    pool.run(4 * 3_600);
    assert_eq!((pool.begun.len(), pool.kinds().last()), (5, Some(&EventKind::Kept)));
    assert!(pool.begun.windows(3).all(|three| three[2] - three[0] >= Duration::from_secs(3_600)), "{:?}", pool.begun);
}

#[test]
fn without_leave_to_act_it_proposes_and_an_approval_begins_the_change() {
    for acting in [Acting::Proposes, Acting::WaitsForApproval] {
        let mut pool = Deployment::new(2, helps);
        pool.acting = acting;
        pool.run(3_600);
        assert_eq!(pool.kinds(), [EventKind::Proposed], "said once");
        assert!(pool.begun.is_empty());
        let id = pool.tuner.proposals.shown().unwrap().0.id;
        assert!(!pool.tuner.proposals.approve(id + 1) && pool.tuner.proposals.approve(id));
        pool.acting = Acting::WaitsForApproval;
        pool.run(3_600);
        assert_eq!(pool.kinds().last(), Some(&EventKind::Kept));
    }
}

#[test]
fn a_gain_must_pay_for_the_restarts() {
    // An absent engine costs a loss of 0.1 for 180 s. The load should last two hours.
    let mut pool = Deployment::new(2, helps);
    pool.forecast = |value| if value == BEFORE { 0.5 } else { 0.46 };
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("too little"), "{}", pool.belief());
    let mut pool = Deployment::new(2, |_| (0.12, 0.0));
    pool.forecast = |value| if value == BEFORE { 0.05 } else { 0.03 };
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("less than restarts cost"), "{}", pool.belief());
    let mut pool = Deployment::new(2, helps);
    pool.forecast = |value| if value == BEFORE { 0.5 } else { 0.5 + value };
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("no change"), "{}", pool.belief());
    assert!(pool.tuner.proposals.shown().is_none());
}

#[test]
fn engines_that_have_the_change_bear_the_absence_of_the_last_one() {
    // Of a gain of 0.45, 0.195 is certain. Over two hours, this is three times the cost of 2.7 for
    // 173 s: restarts pay if they take 150 s, but not 210 s.
    for (absence_with, begins) in [(None, false), (Some(2.7), false), (Some(0.0), true)] {
        let mut pool = Deployment::new(2, helps);
        pool.tuner.lasts = Some(RESTART);
        (pool.absence, pool.absence_with) = (2.7, absence_with);
        pool.run(2 * ASK_INTERVAL.as_secs());
        assert_eq!(!pool.begun.is_empty(), begins, "{absence_with:?}: {}", pool.belief());
    }
}

#[test]
fn a_restart_is_expected_to_take_as_long_as_the_engines_took_to_start() {
    // Restarts of 60 s pay, of 120 s do not.
    for (started_in, begins) in [(None, false), (Some(2 * RESTART), false), (Some(RESTART), true)] {
        let mut pool = Deployment::new(2, helps);
        pool.engines.iter_mut().for_each(|engine| engine.started_in = started_in);
        (pool.absence, pool.absence_with) = (2.7, Some(0.0));
        pool.run(2 * ASK_INTERVAL.as_secs());
        assert_eq!(!pool.begun.is_empty(), begins, "{started_in:?}: {}", pool.belief());
    }
}

#[test]
fn simulations_that_follow_one_another_make_a_gain_more_certain() {
    // One simulation makes 0.126 of 0.45 certain, two make 0.159. Restarts pay from 0.138 on.
    let mut pool = Deployment::new(2, helps);
    pool.tuner.lasts = Some(RESTART);
    (pool.absence, pool.absence_with, pool.error) = (2.2, Some(0.0), 0.1);
    pool.run(60 + ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("less than restarts cost"), "{}", pool.belief());
    pool.run(ASK_INTERVAL.as_secs());
    assert_eq!(pool.kinds().first(), Some(&EventKind::Tried), "{}", pool.belief());
}

#[test]
fn sequences_are_lowered_from_those_that_ran() {
    let mut pool = Deployment::new(2, |value| (if value > 32.0 { 0.5 } else { 0.05 }, 0.0));
    pool.forecast = |value| if value > 32.0 { 0.5 } else { 0.05 };
    (0..2).for_each(|engine| pool.give(engine, 1_024.0));
    pool.running_peak = 49.0;
    pool.run(7_200);
    assert_eq!(pool.values(), [32.0; 2], "{}", pool.belief());
}

#[test]
fn a_comparison_that_shows_what_was_forecast_goes_on_until_it_is_certain() {
    let mut longest = Duration::ZERO;
    for seed in 1..=3 {
        let mut pool = Deployment::new(2, |value| (if value <= BEFORE { 0.5 } else { 0.42 }, 0.0));
        (pool.rng, pool.rate) = (Rng::new(seed), 1);
        pool.forecast = |value| if value <= BEFORE { 0.5 } else { 0.4 };
        (pool.absence, pool.tuner.lasts) = (0.0, Some(RESTART));
        pool.run_until(Some(Stage::Compared));
        let begun = pool.now;
        pool.run_until(Some(Stage::Promotion));
        longest = longest.max(pool.now - begun);
    }
    assert!(longest > COMPARED.0 + Duration::from_secs(300), "it was certain before: {longest:?}");
}

#[test]
fn a_simulation_that_does_not_show_what_is_measured_is_not_asked_for_a_cure() {
    let mut pool = Deployment::new(2, |value| (if value <= BEFORE { 0.9 } else { 0.05 }, 0.0));
    pool.forecast = |_| 0.01;
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("does not show"), "{}", pool.belief());
    pool.advice = Some((FLAG, true, "raise it".to_owned()));
    pool.run(7_200);
    assert_eq!(pool.kinds().last(), Some(&EventKind::Kept), "{:?}", pool.events);
    assert_eq!(pool.tuner.measured()[0].forecast, None);
}

#[test]
fn a_canary_that_leaves_rotation_is_taken_back() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Copies));
    let canary = pool.tuner.change().unwrap().canary().to_owned();
    let index = pool.engines.iter().position(|engine| engine.backend == canary).unwrap();
    pool.engines[index].serves = false;
    pool.run(ABSENT.as_secs() + 2);
    let (kind, why) = pool.events.last().unwrap();
    assert_eq!((*kind, why.contains("left rotation with it")), (EventKind::Undone, true), "{why}");
    pool.fares = |_| (0.0, 0.0);
    pool.run(120);
    assert_eq!(pool.values(), [BEFORE; 2]);
}

#[test]
fn copies_that_fail_keep_the_engine_from_requests() {
    let mut pool = Deployment::new(2, |value| (0.5, if value == BEFORE { 0.0 } else { 0.2 }));
    pool.run_until(Some(Stage::Copies));
    pool.run_until(Some(Stage::Return));
    assert!(!pool.kinds().contains(&EventKind::Compared), "{:?}", pool.events);
    let (_, why) = pool.events.last().unwrap();
    assert!(why.contains("copies of requests failed"), "{why}");
}

#[test]
fn changes_end_when_their_part_of_the_error_budget_is_used_up() {
    // With 10 requests/s for 30 days at 99 %, 259,200 requests may miss, and changes may cause 50
    // of these misses.
    let mut pool = Deployment::new(2, |value| (if value == BEFORE { 0.3 } else { 0.42 }, 0.0));
    pool.tuner.set_rules(EngineRules { error_budget: 50.0 / 259_200.0, ..rules() });
    pool.run(3_600);
    let why = &pool.events.iter().find(|(kind, _)| *kind == EventKind::Undone).unwrap().1;
    assert!(why.contains("error budget"), "{why}");
    assert_eq!(pool.values(), [BEFORE; 2]);
    let begun = pool.begun.len();
    pool.run(2 * 3_600);
    assert_eq!(pool.begun.len(), begun, "{:?}", pool.events);
    assert!(pool.belief().contains("error budget"), "{}", pool.belief());
    pool.now += SECOND * 60 * 24 * 3_600;
    pool.run(3_600);
    assert!(pool.begun.len() > begun, "the misses of sixty days ago: {}", pool.belief());
}

#[test]
fn engines_that_it_cannot_change_safely_are_left_alone() {
    type Case = (&'static str, fn(&mut Deployment));
    let cases: [Case; 4] = [
        ("one engine", |pool| drop(pool.engines.pop())),
        ("are not known", |pool| pool.engines[1].flags = None),
        ("different flags", |pool| pool.give(1, 16.0)),
        ("does not serve", |pool| pool.engines[1].serves = false),
    ];
    for (why, change) in cases {
        let mut pool = Deployment::new(2, |_| (0.5, 0.0));
        change(&mut pool);
        for _ in 0..600 {
            pool.now += SECOND;
            let needs = [Need {
                pools: vec![need_of("all", 0.5, Vec::new())],
                since: Some(Duration::ZERO),
                score: Score { loss: 0.5, rate: 10.0, ..Score::default() },
                ..Need::default()
            }];
            let look = EngineLook {
                now: pool.now,
                engines: &pool.engines,
                needs: &needs,
                acting: Acting::Acts,
                stands_back: None,
                waits: None,
                arms: &pool.arms,
                horizon: SECOND,
            };
            assert_eq!(pool.tuner.step(&look), [], "{why}");
        }
        assert!(pool.belief().contains(why), "{}", pool.belief());
    }
}
