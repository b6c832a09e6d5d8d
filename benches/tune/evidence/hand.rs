//! The experiments of `config/tune/hand.toml` in one table, with the spread of the repetitions of
//! each experiment and a note on it.
//!
//! The engine must refuse the first experiment, because a request of the model's full length would
//! not fit into the KV cache. The other experiments must run.

use std::ops::Range;

use serde_json::{Value, json};
use sluice_tune::{Method, Outcome, report};

use crate::item::{Item, Lines};
use crate::tuning::{file, goal, tuned};

const TEXT: &str = include_str!("../../../config/tune/hand.toml");
/// Number of experiments in the file.
const EXPERIMENTS: usize = 17;

pub(crate) fn items(seeds: Range<u64>) -> Vec<Item> {
    seeds.map(|seed| Item::new(format!("hand/seed/{seed:02}"), move || tuning(seed))).collect()
}

fn tuning(seed: u64) -> Value {
    let file = file(TEXT);
    let report = tuned(&file, Method::for_space(EXPERIMENTS), seed, None);
    let search = report.trials.iter().filter(|trial| trial.is_search() && !trial.setting.is_empty());
    let measured = search.clone().filter(|trial| matches!(trial.outcome, Outcome::Measured { .. })).count();
    let refused: Vec<&String> = search
        .filter(|trial| trial.setting == file.tune.setting[0])
        .filter_map(|trial| if let Outcome::Refused { reason, .. } = &trial.outcome { Some(reason) } else { None })
        .collect();
    json!({ "measured": measured, "refused": refused, "table": report::table::text(&report, &goal(&file, seed)) })
}

pub(crate) fn summary(lines: &Lines) -> String {
    let mut text = String::new();
    for (seed, found) in lines.of("hand/seed/") {
        text += &format!(
            "seed {seed}: {} of {EXPERIMENTS} measured; the first: {}\n",
            found["measured"], found["refused"][0]
        );
    }
    let last = lines.of("hand/seed/").last().and_then(|(_, found)| found["table"].as_str()).unwrap_or("");
    text + "\n" + last
}
