//! Two mixes of lengths on two H200s behind the gateway: the best settings that the tuner finds for
//! each mix. It begins with default flags and round robin.
//!
//! There are 40 settings of the gateway's policy and three flags of vLLM, and the default. An
//! exhaustive search with separate runs finds the best of all.

use std::ops::Range;

use serde_json::{Value, json};
use sluice_tune::setting::name;
use sluice_tune::{Method, TuneFile};

use crate::item::{Item, Lines};
use crate::tuning::{exhaustive, file, least, total, truths, tuned};

/// Runs of each setting of the exhaustive search.
const RUNS: u64 = 16;
/// A setting with at most this excess over the best setting is near it.
const NEAR: f64 = 0.05;

/// Name of a mix, the objective, and the classes.
const MIXES: [(&str, &str, &str); 2] = [
    (
        "30 short and 2 long",
        "short.e2el.p99",
        "class = [{ name = \"short\", rate = 30, in = 200, out = 128 }, { name = \"long\", rate = 2, in = 16000, out = 64 }]",
    ),
    (
        "14 of three lengths",
        "long.e2el.p99",
        "rate = 14\nclass = [{ name = \"short\", weight = 6, in = \"100-600\", out = 128 }, \
         { name = \"middle\", weight = 3, in = \"2000-4000\", out = 128 }, \
         { name = \"long\", weight = 1, in = \"8000-12000\", out = 64 }]",
    ),
];

const DEPLOYMENT: &str = r#"
gateway = """
[[model]]
name = "llama-3.1-8b"
[[pool]]
name = "all"
models = ["*"]
policy = "round_robin"
slots = 2048
[[pool.backend]]
name = "gpu0"
url = "http://127.0.0.1:8000"
[[pool.backend]]
name = "gpu1"
url = "http://127.0.0.1:8001"
"""
duration = "60s"
[[engine]]
gpu = "h200"
args = { stream-interval = 100 }
"#;

const DIMENSIONS: &str = r#"
runs = 8
[[tune.dimension]]
key = "pool.all.policy"
values = ["round_robin", "least_work"]
[[tune.dimension]]
key = "vllm.long-prefill-token-threshold"
values = [0, 256, 512, 1024, 2048]
[[tune.dimension]]
key = "vllm.max-num-batched-tokens"
values = [2048, 8192]
[[tune.dimension]]
key = "vllm.max-num-seqs"
values = [64, 256]
"#;

fn mix(objective: &str, class: &str) -> TuneFile {
    file(&format!("{DEPLOYMENT}[[traffic]]\n{class}\n[tune]\nobjective = \"{objective}\"{DIMENSIONS}"))
}

pub(crate) fn items(seeds: Range<u64>) -> Vec<Item> {
    let all = |(title, objective, class): (&str, &str, &str)| {
        exhaustive(&format!("mixes/{title}"), &mix(objective, class), RUNS)
    };
    let mut items: Vec<Item> = MIXES.into_iter().flat_map(all).collect();
    for seed in seeds {
        for (title, objective, class) in MIXES {
            items
                .push(Item::new(format!("mixes/{title}/seed/{seed:02}"), move || tuning(&mix(objective, class), seed)));
        }
    }
    items
}

fn tuning(file: &TuneFile, seed: u64) -> Value {
    let report = tuned(file, Method::Race, seed, None);
    let change = report.comparison.as_ref().map(|comparison| comparison.change);
    json!({
        "chosen": report.winner.as_ref().map(|winner| name(&winner.setting)),
        "change": change.map(|change| [change.low, change.value, change.high]),
        "runs": total(&report, |trial| f64::from(trial.loads)),
        "starts": total(&report, |trial| f64::from(trial.starts)),
    })
}

pub(crate) fn summary(lines: &Lines) -> String {
    let mut text = String::from(
        "| mix | default | best of all | seed | chosen | over the best | its gain on new loads | runs |\n|---|--:|---|--:|---|--:|--:|--:|\n",
    );
    for (title, ..) in MIXES {
        let start = format!("mixes/{title}");
        let truths = truths(lines, &start);
        let Some((best_name, values)) = least(&truths) else { continue };
        let (mut near, mut all) = (0, 0);
        for (seed, found) in lines.of(&format!("{start}/seed/")) {
            let chosen = found["chosen"].as_str().unwrap_or("none");
            let excess = truths.get(chosen).copied().flatten().map_or(f64::INFINITY, |value| value / values[0] - 1.0);
            (near, all) = (near + usize::from(excess <= NEAR), all + 1);
            let change = |at: usize| found["change"][at].as_f64().unwrap_or(f64::NAN) * 100.0;
            text += &format!(
                "| {title} | {:.0} ms | {:.0} ms: {best_name} | {seed} | {chosen} | {:+.1} % | {:.1} % ({:.1} to {:.1}) | {} |\n",
                truths.get("defaults").copied().flatten().unwrap_or(f64::NAN),
                values[0],
                excess * 100.0,
                change(1),
                change(0),
                change(2),
                found["runs"],
            );
        }
        text += &format!("| {title} | | | {near} of {all} | | within 5 % | | |\n");
    }
    text
}
