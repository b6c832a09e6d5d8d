//! A search over five flags on a small GPU, where many of the 481 settings do not start. The
//! methods `model` and `random` have 45 trials each.
//!
//! The objective is the P99 E2EL of the short requests of a mix. An exhaustive search finds the
//! best of all settings.

use std::ops::Range;

use serde_json::{Value, json};
use sluice_tune::setting::name;
use sluice_tune::{Method, TuneFile};

use crate::item::{Item, Lines};
use crate::tuning::{exhaustive, file, least, truths, tuned};

/// Maximum trials of a search.
const TRIALS: usize = 45;
/// Runs of each setting of the exhaustive search.
const RUNS: u64 = 16;
/// A setting with at most this excess over the best setting is near it.
const NEAR: f64 = 0.05;
const METHODS: [Method; 2] = [Method::Model, Method::Random];

const TEXT: &str = r#"
[[engine]]
gpu = "rtx3080-10"
model = "llama-3.2-1b"
args = { stream-interval = 100 }
[[traffic]]
duration = "40s"
class = [{ name = "short", rate = 8, in = 200, out = 64 }, { name = "long", rate = 0.7, in = 6000, out = 32 }]
[tune]
objective = "short.e2el.p99"
runs = 4
[[tune.dimension]]
key = "vllm.max-num-seqs"
values = [8, 32, 128, 512]
[[tune.dimension]]
key = "vllm.max-num-batched-tokens"
values = [256, 512, 1024, 2048, 8192]
[[tune.dimension]]
key = "vllm.long-prefill-token-threshold"
values = [64, 128, 256, 512]
[[tune.dimension]]
key = "vllm.gpu-memory-utilization"
values = [0.5, 0.75, 0.95]
[[tune.dimension]]
key = "vllm.max-model-len"
values = [8192, 131072]
"#;

pub(crate) fn items(seeds: Range<u64>) -> Vec<Item> {
    let mut items = exhaustive("space", &file(TEXT), RUNS);
    for seed in seeds {
        for method in METHODS {
            let title = format!("space/{}/{seed:02}", method.name());
            items.push(Item::new(title, move || tuning(&file(TEXT), method, seed)));
        }
    }
    items
}

fn tuning(file: &TuneFile, method: Method, seed: u64) -> Value {
    let report = tuned(file, method, seed, Some(TRIALS));
    json!({
        "chosen": report.winner.as_ref().map(|winner| name(&winner.setting)),
        "trials": report.trials.iter().filter(|trial| trial.is_search()).count(),
    })
}

pub(crate) fn summary(lines: &Lines) -> String {
    let truths = truths(lines, "space");
    let Some((best_name, values)) = least(&truths) else { return String::new() };
    let quartile = |number: usize| values[(values.len() - 1) * number / 4];
    let mut text = format!(
        "{} settings, {} of them do not start; best {:.0} ms ({best_name}), quartiles {:.0}, {:.0}, {:.0} ms, default {:.0} ms\n\n\
         | method | median | worst | within 5 % | trials |\n|---|--:|--:|--:|--:|\n",
        truths.len(),
        truths.len() - values.len(),
        values[0],
        quartile(1),
        quartile(2),
        quartile(3),
        truths.get("defaults").copied().flatten().unwrap_or(f64::NAN),
    );
    for method in METHODS {
        let start = format!("space/{}/", method.name());
        let found: Vec<&Value> = lines.of(&start).map(|(_, found)| found).collect();
        let excess = |found: &&Value| {
            let value = found["chosen"].as_str().and_then(|chosen| truths.get(chosen).copied().flatten());
            value.map_or(f64::INFINITY, |value| value / values[0] - 1.0)
        };
        let mut excesses: Vec<f64> = found.iter().map(excess).collect();
        excesses.sort_by(f64::total_cmp);
        let Some(worst) = excesses.last() else { continue };
        let trials: f64 = found.iter().filter_map(|found| found["trials"].as_f64()).sum();
        text += &format!(
            "| `{}` | {:.1} % | {:.1} % | {} of {} | {:.1} |\n",
            method.name(),
            excesses[excesses.len() / 2] * 100.0,
            worst * 100.0,
            excesses.iter().filter(|excess| **excess <= NEAR).count(),
            excesses.len(),
            trials / excesses.len() as f64,
        );
    }
    text
}
