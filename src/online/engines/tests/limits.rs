//! Changes of flags that bring other limits of the pool. The limits end or stay with the change.

use super::deployment::{BEFORE, Deployment, LIMITS, RESTART, SECOND, helps, rules};
use crate::engines::EngineTuner;
use crate::engines::change::Stage;
use crate::engines::decide::ASK_INTERVAL;
use crate::event::{Acting, EventKind};
use crate::limits::controller::Controller;
use crate::limits::{Limits, PoolLimits};

const OTHER: PoolLimits = PoolLimits { prefill_tokens: None, long: Some((5_000, 1)), ..LIMITS };

fn in_force(pool: &Deployment) -> Option<PoolLimits> {
    pool.tuner.limits_in_force().map(|(_, limits)| limits)
}

#[test]
fn a_change_that_helps_only_under_other_limits_brings_them_and_they_stay() {
    let mut pool = Deployment::new(2, helps);
    pool.beside = Some((OTHER, 0.3));
    for stage in [Stage::Canary, Stage::Copies] {
        pool.run_until_begun(stage);
        assert_eq!(in_force(&pool), None, "no request is served under them: {stage:?}");
    }
    for stage in [Stage::Recovery, Stage::Compared, Stage::Promotion] {
        pool.run_until_begun(stage);
        assert_eq!(in_force(&pool), Some(OTHER), "{stage:?}");
    }
    let limits = "long_prefix.slots 1 (now 2), prefill_tokens none (now 4k)";
    assert!(pool.events[0].1.contains(limits), "{:?}", pool.events);
    pool.run_until(None);
    assert_eq!(pool.kinds().last(), Some(&EventKind::Kept), "{:?}", pool.events);
    assert_eq!(pool.tuner.adopted.take(), Some(("all".to_owned(), OTHER)));
    let change = &pool.tuner.measured()[0];
    assert!((change.forecast.unwrap() - 0.75).abs() < 1e-9 && (0.65..0.85).contains(&change.realised), "{change:?}");
}

#[test]
fn engines_that_are_better_only_because_the_limits_harm_the_others_return() {
    let mut pool = Deployment::new(2, |value| (if value == BEFORE { 0.5 } else { 0.6 }, 0.0));
    pool.beside = Some((OTHER, 0.4));
    // Other pools of the group lose more, but only this pool's loss counts.
    pool.loss_of_all = Some(0.95);
    pool.run_until(Some(Stage::Compared));
    pool.run_until(None);
    let (kind, why) = pool.events.last().unwrap();
    assert_eq!(
        (*kind, why.starts_with("with its limits not better than before (0.500): ")),
        (EventKind::Undone, true),
        "{why}"
    );
    assert_eq!((pool.values(), pool.tuner.adopted.take()), (vec![BEFORE; 2], None));
}

#[test]
fn limits_end_when_the_change_is_taken_back() {
    let mut pool = Deployment::new(2, helps);
    pool.beside = Some((OTHER, 0.0));
    pool.run_until(Some(Stage::Compared));
    pool.stands_back = Some("another gateway leads");
    pool.run(1);
    assert_eq!((pool.stage(), in_force(&pool)), (Some(Stage::Return), None));
    pool.run_until(None);
    assert_eq!(pool.tuner.adopted.take(), None);
}

#[test]
fn limits_that_suit_the_engines_that_remain_are_in_force_from_the_beginning() {
    // As in `engines_that_have_the_change_bear_the_absence_of_the_last_one`, a change does not pay
    // if an absent engine costs 2.7.
    for under in [None, Some(2.8), Some(0.3)] {
        let mut pool = Deployment::new(2, helps);
        (pool.beside, pool.tuner.lasts) = (Some((OTHER, 0.3)), Some(RESTART));
        (pool.absence, pool.absence_under) = (2.7, under);
        pool.run(2 * ASK_INTERVAL.as_secs());
        assert_eq!(!pool.begun.is_empty(), under == Some(0.3), "{under:?}: {}", pool.belief());
    }
    let mut pool = Deployment::new(2, helps);
    (pool.beside, pool.absence_under) = (Some((OTHER, 0.3)), Some(0.2));
    pool.run_until_begun(Stage::Canary);
    assert_eq!(in_force(&pool), None, "the engines that remain lose more under them");
    let mut pool = Deployment::new(2, helps);
    (pool.beside, pool.absence_under) = (Some((OTHER, 0.3)), Some(0.02));
    for stage in [Stage::Canary, Stage::Copies, Stage::Compared] {
        pool.run_until_begun(stage);
        assert_eq!(in_force(&pool), Some(OTHER), "{stage:?}");
    }
    let why = "with the same limits, loss rises by 0.020 while an engine restarts, not 0.100";
    assert!(pool.events[0].1.contains(why), "{:?}", pool.events);
    // The limits stay until the engine is back.
    pool.stands_back = Some("another gateway leads");
    pool.run(1);
    assert_eq!((pool.stage(), in_force(&pool)), (Some(Stage::Return), Some(OTHER)));
    pool.run_until(None);
    assert_eq!((pool.tuner.adopted.take(), in_force(&pool)), (None, None));
}

#[test]
fn limits_that_gain_as_much_without_a_restart_are_tried_alone() {
    // Of a gain of 0.45, 0.195 is certain. In the second case the limits alone gain less, but so
    // does the flag alone.
    for (alone, shown) in [(0.45, "loss 0.050 after 0.500"), (0.18, "loss 0.320 after 0.500")] {
        let mut pool = Deployment::new(2, helps);
        pool.beside = Some((OTHER, -alone));
        pool.run(300);
        assert_eq!((pool.begun.len(), pool.stage()), (0, None), "{:?}", pool.events);
        let (name, limits, why) = pool.tuner.suggested.take().unwrap();
        assert_eq!((name.as_str(), limits), ("all", OTHER));
        assert!(why.contains(shown), "{why}");
        // The limits were tried in vain. Now the flag is tried, if the flag alone gains enough.
        pool.run(1_200);
        assert_eq!(pool.tuner.suggested.take(), None);
        assert_eq!(pool.begun.is_empty(), alone == 0.45, "{}", pool.belief());
    }
}

#[test]
fn limits_of_another_configuration_do_not_outlive_it() {
    for is_same in [true, false] {
        let mut pool = Deployment::new(3, helps);
        pool.beside = Some((OTHER, 0.3));
        pool.run_until_begun(Stage::Promotion);
        let saved = pool.tuner.saved(pool.now);
        pool.tuner = EngineTuner::new(rules());
        pool.tuner.restore(saved, is_same, pool.now);
        assert_eq!(in_force(&pool), Some(OTHER).filter(|_| is_same), "after a restart of the gateway");
    }
    let mut pool = Deployment::new(2, helps);
    (pool.beside, pool.acting) = (Some((OTHER, 0.3)), Acting::WaitsForApproval);
    pool.run(1_200);
    let id = pool.tuner.proposals.shown().unwrap().0.id;
    assert!(pool.tuner.proposals.approve(id));
    pool.tuner.forget();
    pool.acting = Acting::Proposes;
    pool.run(1_200);
    assert!(!pool.kinds().contains(&EventKind::Tried), "what was approved concerned another configuration");
}

#[test]
fn limits_that_are_adopted_leave_the_boundary_where_it_is() {
    let moved = PoolLimits { range: (0, Some(4_000)), ..LIMITS };
    let mut controller = Controller::new(vec!["all".to_owned()], Limits(vec![moved]), 0.99, SECOND, Acting::Acts);
    controller.adopt(0, PoolLimits { range: (0, Some(3_000)), ..OTHER }, SECOND);
    assert_eq!(controller.limits().0[0], PoolLimits { range: moved.range, ..OTHER });
}
