//! The dashboard of latencies.
//!
//! Which tail is long, and which part of it: the queue, the gateway, or the engine?

use crate::panel::{Panel, Target, adds, between, heatmap, lines, quantiles, row};

const LATENCIES: [(&str, &str, &str); 4] = [
    ("TTFT", "sluice_time_to_first_token_seconds", "Time to first token of streams, queue included"),
    ("ITL", "sluice_inter_token_latency_seconds", "Gaps between output events of streams"),
    ("TPOT", "sluice_time_per_output_token_seconds", "Time per output token of completed streams"),
    ("E2EL", "sluice_request_duration_seconds", "End-to-end latency of completed requests"),
];

pub(super) fn panels() -> Vec<Panel> {
    [
        vec![row("By class (the home pool for the length of the prompt)")],
        by("class", ["TTFT by class", "ITL by class", "TPOT by class", "E2EL by class"]),
        vec![row("Which part"), parts(), estimate()],
        vec![row("Distributions of the selected pools and models")],
        distributions(),
        vec![row("By pool (where the request ran; it differs from the class if the request spilled)")],
        by("pool", ["TTFT by pool", "ITL by pool", "TPOT by pool", "E2EL by pool"]),
        vec![row("By model, and calls that generate nothing")],
        by_model(),
    ]
    .concat()
}

fn by(label: &str, titles: [&'static str; 4]) -> Vec<Panel> {
    let each = LATENCIES
        .iter()
        .zip(titles)
        .map(|((_, family, about), title)| lines(title, "s", quantiles(family, "@req", label)).wide(12).about(about));
    each.collect()
}

/// The mean of a histogram; `by` is a clause such as ` by (class)`, or empty.
fn mean(family: &str, filter: &str, by: &str) -> String {
    let rate = |suffix: &str| format!("sum{by} (rate({family}_{suffix}{{{filter}}}[$__rate_interval]))");
    format!("{} / {}", rate("sum"), rate("count"))
}

/// The parts of mean TTFT: means can be added, quantiles cannot.
fn parts() -> Panel {
    let queue = mean("sluice_queue_wait_seconds", "@pool", " by (pool)");
    let ttft = mean("sluice_time_to_first_token_seconds", "@req", " by (class)");
    let gateway = |stage: &str| mean("sluice_overhead_seconds", &format!("@gw,stage=\"{stage}\""), "");
    lines(
        "Mean TTFT and the parts outside the engine",
        "s",
        vec![
            between(ttft, "{{class}} TTFT"),
            between(queue, "{{pool}} in the queue"),
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
        heatmap(title, "s", adds(format!("sum by (le) (rate({family}_bucket{{@req}}[$__rate_interval]))"), "{{le}}"))
    });
    each.to_vec()
}

fn by_model() -> Vec<Panel> {
    let p99 = |family: &str, by: &str| -> Vec<Target> {
        let rate = format!("rate({family}_bucket{{@req}}[$__rate_interval])");
        let legend = by.split(", ").map(|label| format!("{{{{{label}}}}}")).collect::<Vec<_>>().join(" ");
        vec![between(format!("histogram_quantile(0.99, sum by (le, {by}) ({rate}))"), legend)]
    };
    vec![
        lines("TTFT P99 by model and class", "s", p99(LATENCIES[0].1, "model, class")),
        lines("E2EL P99 by model and class", "s", p99(LATENCIES[3].1, "model, class")),
        lines("Calls that generate nothing, P99", "s", p99("sluice_other_request_duration_seconds", "route"))
            .about("Calls such as tokenize, count_tokens and embeddings, from arrival to the last byte"),
    ]
}
