//! Whether a change begins: outdated forecasts, approvals, pools that cannot change, and a change
//! of the leading gateway.

use std::time::Duration;

use super::deployment::{BEFORE, Deployment, helps, rules};
use crate::engines::EngineTuner;
use crate::engines::change::Stage;
use crate::engines::decide::ASK_INTERVAL;
use crate::engines::saved::SavedEngines;
use crate::event::{Acting, EventKind};

#[test]
fn a_forecast_for_other_limits_or_before_objectives_were_met_begins_nothing() {
    let disturbances: [fn(&mut Deployment); 2] = [|pool| pool.limits.slots /= 2, |pool| pool.fares = |_| (0.0, 0.0)];
    for disturb in disturbances {
        let mut pool = Deployment::new(2, helps);
        pool.run_until_asked();
        disturb(&mut pool);
        pool.second();
        assert_eq!((pool.begun.len(), pool.stage()), (0, None), "{:?}", pool.events);
    }
}

#[test]
fn an_approval_is_for_one_proposal_and_waits_until_it_may_begin() {
    let mut pool = Deployment::new(2, helps);
    pool.acting = Acting::WaitsForApproval;
    pool.run_until_asked();
    pool.second();
    let id = pool.tuner.proposals.shown().unwrap().0.id;
    pool.run_until_asked();
    assert!(pool.tuner.proposals.approve(id));
    pool.forecast = |value| if value == BEFORE { 0.5 } else { 0.01 * value };
    pool.run(2 * ASK_INTERVAL.as_secs());
    let next = pool.tuner.proposals.shown().unwrap().0.id;
    assert!(next != id && pool.begun.is_empty(), "{:?}", pool.events);
    pool.waits = Some("until 22:00");
    assert!(pool.tuner.proposals.approve(next));
    pool.run(3_600);
    assert!(pool.begun.is_empty() && pool.belief().contains("until 22:00"), "{}", pool.belief());
    pool.waits = None;
    pool.run_until(Some(Stage::Promotion));
}

#[test]
fn a_configuration_that_changes_during_a_simulation_does_not_hold_up_the_next_one() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until_asked();
    pool.tuner.forget();
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(!pool.begun.is_empty(), "{}", pool.belief());
}

#[test]
fn engines_that_cannot_be_changed_do_not_hold_up_those_of_another_pool() {
    let mut pool = Deployment::new(2, helps);
    pool.another_misses = true;
    pool.run_until(Some(Stage::Promotion));
}

#[test]
fn a_gateway_that_leads_again_goes_on_where_the_other_one_ended() {
    for stage in [Stage::Canary, Stage::Compared] {
        let mut pool = Deployment::new(2, helps);
        pool.run_until_begun(stage);
        // The other gateway took the change back.
        let saved = SavedEngines { change: None, ..pool.tuner.saved(pool.now) };
        pool.under_way = None;
        for engine in 0..2 {
            pool.give(engine, BEFORE);
            pool.engines[engine].serves = true;
        }
        pool.tuner.restore(saved, true, pool.now);
        pool.run_until(Some(Stage::Promotion));
    }
}

#[test]
fn a_change_that_goes_on_after_a_restart_is_not_charged_with_the_misses_before() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until_begun(Stage::Promotion);
    // Counted while another gateway led.
    pool.totals = (1e6, 1e6);
    let saved = pool.tuner.saved(pool.now);
    pool.tuner = EngineTuner::new(rules());
    pool.tuner.restore(saved, true, pool.now);
    pool.run_until(None);
    assert_eq!(pool.kinds().last(), Some(&EventKind::Kept), "{:?}", pool.events);
    let spent = pool.tuner.saved(pool.now).spent;
    assert!(spent < 1_000.0, "{spent}");
}

#[test]
fn the_file_of_an_earlier_version_is_read_and_written_as_it_was() {
    let text = r#"{
        "change": {
            "number": 3, "pool": "all", "backends": ["e0", "e1"], "flag": "max-num-seqs", "from": 8.0, "to": 16.0,
            "limits": {"slots": 256, "prefill_tokens": 4000, "long": [5000, 2], "range": [0, null]},
            "limits_first": false, "loss_before": 0.5, "forecast": 0.4, "crowded": true, "changed": ["e0"],
            "stage": "promotion", "proved": {"sequences": 20, "tokens": 2000}
        },
        "trust": [{
            "pool": "all", "flag": "max-num-seqs", "values": [4.0, 8.0], "forecast": null, "realised": 0.1,
            "range": [0.05, 0.15], "verdict": "promoted"
        }],
        "numbers": 3, "failures": 1, "lasts": 60,
        "closed": [[{"pool": "all", "flag": "max-num-seqs", "to": 32.0, "failures": 1}, 600]],
        "frozen": null, "spent": 12.0, "missed_before": 0.5, "restarts": [30]
    }"#;
    let mut tuner = EngineTuner::new(rules());
    let now = Duration::from_secs(1_000);
    tuner.restore(serde_json::from_str(text).unwrap(), true, now);
    assert_eq!(tuner.stage(), Some(Stage::Promotion));
    let (written, read) = (serde_json::to_value(tuner.saved(now)), serde_json::from_str::<serde_json::Value>(text));
    assert_eq!(written.unwrap(), read.unwrap());
    let oldest = r#"{"change": null, "trust": [], "numbers": 0, "failures": 0, "lasts": 0, "closed": []}"#;
    tuner.restore(serde_json::from_str(oldest).unwrap(), true, now);
    assert_eq!(tuner.stage(), None);
}
