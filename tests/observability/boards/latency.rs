//! The dashboard of latencies.
//!
//! It shows which tail is long, and whether the queue, the gateway or the engine makes it long.

use crate::panel::{Panel, adds, between, heatmap, lines, median_and_tail, quantiles, row};

const LATENCIES: [(&str, &str, &str); 4] = [
    ("TTFT", "sluice_time_to_first_token_seconds", "Time to first token of streams, queue included"),
    ("ITL", "sluice_inter_token_latency_seconds", "Gaps between output events of streams"),
    ("TPOT", "sluice_time_per_output_token_seconds", "Time per output token of completed streams"),
    ("E2EL", "sluice_request_duration_seconds", "End-to-end latency of completed requests"),
];

pub(super) fn panels() -> Vec<Panel> {
    [
        vec![row("By class (the kind of the request) and model")],
        by("class, model", ["TTFT by model", "ITL by model", "TPOT by model", "E2EL by model"]),
        vec![row("Which part"), parts(), estimate()],
        vec![row("Distributions of the selected pools and models")],
        distributions(),
        vec![row("By pool (where the request ran), and calls that generate nothing")],
        by("pool", ["TTFT by pool", "ITL by pool", "TPOT by pool", "E2EL by pool"]),
        vec![others()],
    ]
    .concat()
}

fn by(label: &str, titles: [&'static str; 4]) -> Vec<Panel> {
    let each = LATENCIES.iter().zip(titles).map(|((_, family, about), title)| {
        lines(title, "s", median_and_tail(family, "@class", label)).wide(12).about(about)
    });
    each.collect()
}

/// Expression for the mean of a histogram. `by` is a clause such as ` by (class)`, or empty.
fn mean(family: &str, filter: &str, by: &str) -> String {
    let rate = |suffix: &str| format!("sum{by} (rate({family}_{suffix}{{{filter}}}[$__rate_interval]))");
    format!("{} / {}", rate("sum"), rate("count"))
}

/// The parts of TTFT as means, because means of parts can be added and quantiles cannot.
fn parts() -> Panel {
    let queue = mean("sluice_queue_wait_seconds", "@engine", " by (class)");
    let ttft = mean("sluice_time_to_first_token_seconds", "@class", " by (class)");
    let gateway = |stage: &str| mean("sluice_overhead_seconds", &format!("@gw,stage=\"{stage}\""), "");
    lines(
        "Mean TTFT and the parts outside the engine",
        "s",
        vec![
            between(ttft, "{{class}} TTFT"),
            between(queue, "{{class}} in the queue"),
            between(gateway("estimate"), "gateway: read, estimate, place"),
            between(gateway("connect"), "gateway: connect"),
        ],
    )
    .wide(12)
    .about("Means, because means add up. The rest of TTFT is the engine's own queue and prefill. The mean of the queue covers all requests of the class, the mean of TTFT covers streams only")
}

fn estimate() -> Panel {
    let ratio = quantiles("sluice_prompt_estimate_ratio", "@model", "model");
    lines("Estimated / actual prompt tokens", "none", ratio)
        .wide(12)
        .about("1 is exact; an alert fires when the median is outside 0.8 to 1.25")
}

fn distributions() -> Vec<Panel> {
    let each = [("TTFT, distribution", 0), ("ITL, distribution", 1)].map(|(title, index)| {
        let family = LATENCIES[index].1;
        let buckets = format!("sum by (le) (rate({family}_bucket{{@class}}[$__rate_interval]))");
        heatmap(title, "s", adds(buckets, "{{le}}")).about("Requests per second in each bucket; the colour is the rate")
    });
    each.to_vec()
}

fn others() -> Panel {
    lines("Calls that generate nothing", "s", median_and_tail("sluice_other_request_duration_seconds", "@req", "route"))
        .wide(24)
        .about("Calls such as tokenize, count_tokens and embeddings, from arrival to the last byte")
}
