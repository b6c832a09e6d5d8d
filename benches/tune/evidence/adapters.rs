//! Tunings without and with LoRA adapters. Then the winner of each tuning runs with adapters, at
//! the rate that the tuning has certified.
//!
//! The table of the tuning with adapters must name too few adapter slots as a cause.

use std::ops::Range;

use serde_json::{Value, json};
use sluice_tune::setting::name;
use sluice_tune::{Method, Outcome, TuneFile, report};

use crate::item::{Item, Lines};
use crate::tuning::{attainment, file, goal, tuned};

/// The share of requests that must meet their objective.
const TARGET: f64 = 0.99;
const TUNED: [&str; 2] = ["without", "with"];
/// A long run may be below the target by this much.
const SLACK: f64 = 0.01;

fn lora(adapters: &str) -> TuneFile {
    file(&format!(
        "[[engine]]\nargs = {{ enable-lora = true, max-cpu-loras = 16, stream-interval = 1000, max-model-len = 8192 }}\n\
         [[traffic]]\nrate = 5\nclass = [{{ name = \"chat\", in = 512, out = 128, e2el = \"4s\" }}]\n{adapters}\n[tune]\n\
         [[tune.dimension]]\nkey = \"vllm.max-loras\"\nvalues = [1, 2, 4, 8]\n\
         [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [128, 256]\n"
    ))
}

pub(crate) fn items(seeds: Range<u64>) -> Vec<Item> {
    let item = |(seed, which): (u64, &'static str)| {
        Item::new(format!("adapters/{which}/{seed:02}"), move || tuning(which, seed))
    };
    seeds.flat_map(|seed| TUNED.map(|which| (seed, which))).map(item).collect()
}

fn tuning(which: &str, seed: u64) -> Value {
    let with = lora("adapters = { names = [\"a\", \"b\", \"c\", \"d\", \"e\", \"f\", \"g\", \"h\"], zipf = 0.8 }");
    let file = if which == "with" { with.clone() } else { lora("") };
    let report = tuned(&file, Method::Race, seed, None);
    let table = report::table::text(&report, &goal(&file, seed));
    let Some(winner) = &report.winner else { return Value::Null };
    let Outcome::Measured { certified: Some(certified), .. } = &winner.outcome else { return Value::Null };
    json!({
        "chosen": name(&winner.setting),
        "rate": certified.rate,
        "served": attainment(&with.scenario, &winner.setting, certified.rate),
        "table": table,
    })
}

pub(crate) fn summary(lines: &Lines) -> String {
    let mut text = String::from(
        "| tuned | seed | setting | certified | served with adapters at that rate |\n|---|--:|---|--:|--:|\n",
    );
    let mut table = "";
    for which in TUNED {
        let (mut met, mut said, mut all) = (0, 0, 0);
        let start = format!("adapters/{which}/");
        for (seed, found) in lines.of(&start) {
            let share = found["served"].as_f64().unwrap_or(0.0);
            text += &format!(
                "| {which} | {seed} | {} | {:.2}/s | {:.2} % |\n",
                found["chosen"].as_str().unwrap_or("none"),
                found["rate"].as_f64().unwrap_or(f64::NAN),
                share * 100.0,
            );
            table = found["table"].as_str().unwrap_or("");
            met += usize::from(share >= TARGET - SLACK);
            said += usize::from(table.contains("waited for an adapter slot") && table.contains("raise max-loras"));
            all += 1;
        }
        text +=
            &format!("| {which} | | meets its objective in {met} of {all} | | too few slots are named in {said} |\n");
    }
    format!("{text}\n{table}")
}
