//! The dashboard of experiments and of the online tuner. It shows the arms that are compared on
//! live traffic, the results, and the tuner's changes.
//!
//! Each replica measures an experiment separately, so the dashboard shows intervals and conclusions
//! for each replica. It adds the counts of the replicas.

use crate::panel::{Panel, adds, apart, between, lines, quantiles, row, stat};

const NONE: &str = "no experiment";

pub(super) fn panels() -> Vec<Panel> {
    [arms(), answers(), latencies(), tuner()].concat()
}

fn rate(by: &str, family: &str) -> String {
    format!("sum by ({by}) (rate({family}{{@gw}}[$__rate_interval]))")
}

fn arms() -> Vec<Panel> {
    let some = |family: &str| format!("{} > 0", rate("arm", family));
    vec![
        row("Experiments"),
        lines(
            "Requests by arm",
            "reqps",
            vec![
                adds(rate("arm", "sluice_arm_requests_total"), "{{arm}}").or_empty(NONE),
                adds(some("sluice_arm_failures_total"), "{{arm}} failed").or_empty("none failed"),
                adds(some("sluice_arm_slo_misses_total"), "{{arm}} missed an objective").or_empty("none missed"),
                adds(some("sluice_arm_fallbacks_total"), "{{arm}} fell back").or_empty("none fell back"),
            ],
        )
        .about("Finished requests by assigned arm; for a shadow arm, finished copies"),
        lines(
            "Arm over control, minus 1",
            "percentunit",
            vec![
                apart("sluice_arm_change{@gw,bound=\"value\"}", "{{instance}} {{arm}} {{quantity}}")
                    .or_empty("not bounded yet"),
                apart("sluice_arm_change{@gw,bound!=\"value\"}", "{{instance}} {{arm}} {{quantity}} {{bound}}")
                    .or_empty("not bounded yet"),
            ],
        )
        .signed()
        .about("With intervals that hold at all times; a quantity is absent until its interval is bounded"),
        lines(
            "State and conclusion",
            "none",
            vec![
                between(
                    "max by (job, experiment, state) (sluice_experiment_state{@gw}) == 1",
                    "{{experiment}} {{state}}",
                )
                .or_empty(NONE),
                apart("sluice_arm_conclusion{@gw} == 1", "{{instance}} {{arm}} {{conclusion}}").or_empty(NONE),
                apart("sluice_arm_stopped{@gw} == 1", "{{instance}} {{arm}} stopped by a guardrail")
                    .or_empty("none stopped"),
                between("max by (job, experiment) (sluice_experiment_exposure{@gw})", "{{experiment}} exposure")
                    .or_empty(NONE),
            ],
        )
        .about("State of each experiment, and the conclusion of each replica about each arm"),
    ]
}

fn answers() -> Vec<Panel> {
    let some = |by: &str, family: &str| format!("{} > 0", rate(by, family));
    vec![
        lines(
            "Answers by finish reason",
            "reqps",
            vec![
                adds(some("arm, finish", "sluice_arm_answers_total"), "{{arm}} {{finish}}").or_empty(NONE),
                adds(some("arm", "sluice_arm_refusals_total"), "{{arm}} refused").or_empty("no refusals"),
            ],
        )
        .about("Complete answers for which the engine reports a finish reason"),
        lines(
            "Ratings",
            "none",
            vec![adds("sum by (arm, rating) (sluice_arm_ratings{@gw})", "{{arm}} {{rating}}").or_empty(NONE)],
        )
        .about("Answers that users have rated through the admin API"),
        lines(
            "Copies for shadow arms",
            "reqps",
            vec![
                adds(some("arm, outcome", "sluice_copies_total"), "{{arm}} {{outcome}}").or_empty("no shadow arm"),
                adds("sum by (arm) (sluice_copies_in_flight{@gw})", "{{arm}} in flight").or_empty("no shadow arm"),
            ],
        )
        .about("Copies of requests by outcome, and copies in flight"),
    ]
}

/// Latencies by arm; requests outside experiments have an empty arm and are left out.
fn latencies() -> Vec<Panel> {
    let of = |family: &str| {
        let each = quantiles(family, "@req,arm!=\"\"", "arm");
        each.into_iter().map(|target| target.or_empty(NONE)).collect()
    };
    vec![
        lines("TTFT by arm", "s", of("sluice_time_to_first_token_seconds"))
            .about("Time to first token, queue included"),
        lines("TPOT by arm", "s", of("sluice_time_per_output_token_seconds")).about("Time per output token"),
        lines("E2EL by arm", "s", of("sluice_request_duration_seconds")).about("End-to-end latency"),
    ]
}

fn tuner() -> Vec<Panel> {
    let events = "sum by (event) (increase(sluice_tuner_events_total{@gw}[$__rate_interval])) > 0";
    let mode = "sluice_tuner_mode{@gw} == 1";
    vec![
        row("Online tuner"),
        stat("Mode", "none", vec![apart(mode, "{{instance}} {{mode}}")]).wide(8).about("The mode in force, by replica"),
        stat("Frozen", "none", vec![apart("sluice_tuner_frozen{@gw}", "{{instance}}")])
            .wide(8)
            .colors(&[(None, "green"), (Some(1.0), "orange")])
            .about("1 while the tuner makes no changes, in any mode"),
        stat("Proposals", "none", vec![apart("sluice_tuner_proposals{@gw}", "{{instance}}")])
            .wide(8)
            .about("Changes that the tuner proposes now: `sluice tuner show`"),
        lines("Changes by the tuner", "none", vec![adds(events, "{{event}}").or_empty("it changed nothing")])
            .wide(12)
            .about("Changes that were proposed, tried, kept, undone, or undone without a verdict because something else changed (stood_back)"),
        lines(
            "Limits that the tuner may move",
            "none",
            vec![
                apart("sluice_slots{@pool}", "{{instance}} {{pool}}/{{backend}} slots"),
                apart("sluice_long_prefills_max{@pool}", "{{instance}} {{pool}}/{{backend}} permits"),
            ],
        )
        .wide(12)
        .about("The limits in force on each replica"),
    ]
}
