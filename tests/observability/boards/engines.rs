//! The dashboard of backends and engines.
//!
//! It shows which backend has a problem. Each backend has the worst state that a replica sees, the
//! load, and starts and crashes of the engine.

use crate::panel::{Panel, Target, adds, between, lines, row, stat, timeline};

/// States of backends from the best to the worst: value, name, colour.
const STATES: [(u32, &str, &str); 8] = [
    (0, "ready", "green"),
    (1, "removed", "dark-gray"),
    (2, "idle", "light-gray"),
    (3, "draining", "blue"),
    (4, "starting", "gray"),
    (5, "probation", "yellow"),
    (6, "ejected", "red"),
    (7, "down", "dark-red"),
];

pub(super) fn panels() -> Vec<Panel> {
    [states(), load(), prefill(), caches(), engines()].concat()
}

/// The worst state that a replica sees. The worst state comes first, and `or` keeps the first one
/// that has a value.
fn worst() -> String {
    let each = STATES.iter().rev().map(|(value, state, _)| {
        format!("(max by (job, pool, backend) (sluice_backend_state{{@pool,state=\"{state}\"}}) == 1) * {value}")
    });
    each.collect::<Vec<_>>().join(" or ")
}

fn states() -> Vec<Panel> {
    let ready = "(job, pool, backend) (sluice_backend_state{@pool,state=\"ready\"})";
    let failed =
        "count(max by (job, pool, backend) (sluice_backend_state{@pool,state=~\"down|ejected\"}) == 1) or vector(0)";
    vec![
        row("State"),
        stat("Ready", "none", vec![between(format!("sum(min by {ready})"), "")])
            .wide(6)
            .about("Backends that every replica finds ready"),
        stat("Configured", "none", vec![between(format!("count(count by {ready})"), "")])
            .wide(6)
            .about("Backends of the selected pools"),
        stat("Down or ejected", "none", vec![between(failed, "")])
            .wide(6)
            .colors(&[(None, "green"), (Some(1.0), "red")])
            .about("Backends that at least one replica finds down or ejected"),
        stat(
            "Replicas disagree",
            "none",
            vec![between(format!("count(max by {ready} != min by {ready}) or vector(0)"), "")],
        )
        .wide(6)
        .colors(&[(None, "green"), (Some(1.0), "orange")])
        .about(
            "Backends that some replicas find ready and others do not: check the network between them and the replicas",
        ),
        timeline("State of backends", &STATES, vec![between(worst(), "{{pool}}/{{backend}}")])
            .about("The worst state that a replica sees"),
    ]
}

fn load() -> Vec<Panel> {
    let by = "sum by (job, pool, backend)";
    vec![
        row("Load"),
        lines(
            "In flight and slots",
            "none",
            vec![
                adds(format!("{by} (sluice_in_flight{{@pool}})"), "{{pool}}/{{backend}}"),
                adds(format!("{by} (sluice_slots{{@pool}})"), "{{pool}}/{{backend}} slots"),
            ],
        )
        .about("Sum of all replicas: each replica gives its own slots, so an engine may get the sum"),
        lines(
            "Slots in use",
            "percentunit",
            vec![between(
                format!("{by} (sluice_in_flight{{@pool}}) / {by} (sluice_slots{{@pool}})"),
                "{{pool}}/{{backend}}",
            )],
        )
        .about("At 100 % a backend takes no further request"),
        lines(
            "Outstanding tokens",
            "none",
            vec![
                adds(format!("{by} (sluice_outstanding_tokens{{@pool}})"), "{{pool}}/{{backend}}"),
                adds(format!("{by} (sluice_outstanding_tokens_max{{@pool}})"), "{{pool}}/{{backend}} limit"),
            ],
        )
        .about("Estimated prompt and output tokens of the requests in flight, and their limit: configured, or learned from preemptions"),
    ]
}

fn prefill() -> Vec<Panel> {
    let by = "sum by (job, pool, backend)";
    vec![
        row("Prefill"),
        lines(
            "Prefill tokens",
            "none",
            vec![adds(format!("{by} (sluice_prefill_tokens{{@pool}})"), "{{pool}}/{{backend}}")],
        )
        .about("Estimated prompt tokens of requests before their first token"),
        lines(
            "Long prompts in prefill, and permits",
            "none",
            vec![
                adds(format!("{by} (sluice_long_prefills{{@pool}})"), "{{pool}}/{{backend}}"),
                adds(format!("{by} (sluice_long_prefills_max{{@pool}})"), "{{pool}}/{{backend}} permits"),
            ],
        )
        .about("Each long prompt in prefill holds a permit"),
        lines(
            "Permits in use",
            "percentunit",
            vec![between(
                format!("{by} (sluice_long_prefills{{@pool}}) / ({by} (sluice_long_prefills_max{{@pool}}) > 0)"),
                "{{pool}}/{{backend}}",
            )],
        )
        .about("If it stays at 100 %, long prompts wait for permits"),
    ]
}

fn caches() -> Vec<Panel> {
    let rate = |family: &str| format!("sum by (pool) (rate({family}{{@req}}[$__rate_interval]))");
    let of_prompt = |family: &str, legend: &str| -> Target {
        between(format!("{} / {}", rate(family), rate("sluice_prompt_tokens_total")), legend)
    };
    let retries = "sum by (pool, reason) (rate(sluice_retries_total{@pool}[$__rate_interval]))";
    let count = |family: &str, by: &str| format!("sum by (pool{by}) (increase({family}{{@pool}}[1h]))");
    let [continued, not_continued, prefilled] = [
        count("sluice_continued_requests_total", ", outcome"),
        count("sluice_not_continued_requests_total", ", reason"),
        count("sluice_prefilled_again_tokens_total", ""),
    ];
    let whole = "no stream was broken";
    let (each, no_events) = ("sum by (job, pool, backend)", "no pool has prefix = \"events\"");
    vec![
        row("Prefix caches and retries"),
        lines(
            "Prompt tokens in prefix caches",
            "percentunit",
            vec![
                of_prompt("sluice_cached_prompt_tokens_total", "{{pool}} cached"),
                of_prompt("sluice_expected_cached_prompt_tokens_total", "{{pool}} expected"),
            ],
        )
        .wide(12)
        .about("Share of prompt tokens that engines report as cached (vLLM: with --enable-prompt-tokens-details), and share that the gateway expected when it chose the engine"),
        lines(
            "KV events",
            "none",
            vec![
                adds(format!("{each} (sluice_kv_event_blocks{{@pool}})"), "{{pool}}/{{backend}} blocks").or_empty(no_events),
                adds(format!("{each} (increase(sluice_kv_event_losses_total{{@pool}}[1h]))"), "{{pool}}/{{backend}} losses in an hour").or_empty(no_events),
            ],
        )
        .wide(12)
        .about("Blocks in the prefix caches that KV events have named; losses: gaps in the numbers of events, and messages that could not be read"),
        lines(
            "Prompts found by KV events",
            "percentunit",
            vec![
                between(
                    format!("{each} (rate(sluice_kv_event_prompts_total{{result=\"linked\",@pool}}[$__rate_interval])) / {each} (rate(sluice_kv_event_prompts_total{{@pool}}[$__rate_interval]))"),
                    "{{pool}}/{{backend}}",
                )
                .or_empty(no_events),
                between(format!("{each} (sluice_kv_event_state{{state=\"followed\",@pool}})"), "{{pool}}/{{backend}} followed")
                    .or_empty(no_events),
            ],
        )
        .wide(12)
        .about("Share of finished prompts whose blocks the events named; the others are expected by the estimate. followed: 1 while events come in order"),
        lines("Retries by reason", "reqps", vec![adds(retries, "{{pool}} {{reason}}")])
            .wide(12)
            .about("Repeated attempts, by the pool of the last attempt"),
        lines(
            "Broken streams in an hour",
            "none",
            vec![
                adds(continued, "{{pool}} continued, {{outcome}}").or_empty(whole),
                adds(not_continued, "{{pool}} not continued, {{reason}}").or_empty(whole),
            ],
        )
        .wide(12)
        .about("Streams whose engine failed: continued by another engine, by outcome, or not, by reason"),
        lines("Tokens prefilled again in an hour", "none", vec![adds(prefilled, "{{pool}}").or_empty(whole)])
            .wide(12)
            .about("Prompts and texts that engines computed again to continue streams, as estimated"),
    ]
}

/// Only the replica that runs an engine reports it, so the maximum over replicas is the value of
/// that replica.
fn engines() -> Vec<Panel> {
    let phase = "max by (job, pool, backend, phase) (sluice_engine_phase{@pool}) == 1";
    let running = "time() - max by (job, pool, backend) (sluice_engine_start_seconds{@pool} > 0)";
    let count = |family: &str| format!("sum by (job, pool, backend) (increase({family}{{@pool}}[1h]))");
    let external = "no engine is run by the gateway";
    let never = "no engine has slept";
    let fixed = "no pool has autoscale";
    let wanted = "max by (job, pool) (sluice_engines_wanted{@pool})";
    let ready = "sum by (job, pool) (max by (job, pool, backend) (sluice_backend_state{@pool,state=\"ready\"}))";
    let start = "max by (job, pool) (sluice_engine_start_expected_seconds{@pool})";
    vec![
        row("Engines that the gateway runs"),
        lines("Phase", "none", vec![between(phase, "{{pool}}/{{backend}} {{phase}}").or_empty(external)])
            .about("The value is 1 for the current phase of each engine"),
        lines("Running for", "s", vec![between(running, "{{pool}}/{{backend}}").or_empty(external)])
            .about("Time since the start of each engine"),
        lines(
            "Restarts and crashes in an hour",
            "none",
            vec![
                adds(count("sluice_engine_restarts_total"), "{{pool}}/{{backend}} restarts").or_empty(external),
                adds(count("sluice_engine_crashes_total"), "{{pool}}/{{backend}} crashes").or_empty(external),
            ],
        )
        .about("Starts after the first, and failures, within the last hour"),
        lines(
            "Bytes of WebSockets in an hour",
            "bytes",
            vec![
                adds("sum by (job, pool, direction) (increase(sluice_tunnel_bytes_total{@pool}[1h]))", "{{pool}} {{direction}}")
                    .or_empty("no client uses /v1/realtime"),
            ],
        )
        .about("Bytes of WebSockets within the last hour, by direction"),
        lines("Wakes in an hour", "none", vec![adds(count("sluice_engine_wakes_total"), "{{pool}}/{{backend}}").or_empty(external)])
            .about("How often each engine woke from sleep within the last hour"),
        lines("Last wake", "s", vec![between("max by (job, pool, backend) (sluice_engine_wake_seconds{@pool})", "{{pool}}/{{backend}}").or_empty(never)])
            .about("Duration of the last wake of each engine"),
        lines(
            "Engines wanted",
            "none",
            vec![between(wanted, "{{pool}} wanted").or_empty(fixed), between(ready, "{{pool}} ready")],
        )
        .about("The largest number of engines that pool.autoscale computes on any replica, and the number of ready backends"),
        lines("Expected start of an engine", "s", vec![between(start, "{{pool}}").or_empty(fixed)])
            .about("Time from the order of an engine to its first request"),
    ]
}
