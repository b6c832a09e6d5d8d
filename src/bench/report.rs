//! A tally as a table for people and as JSON for programs.
//!
//! The table has one line for each class (and one for all of them, when there are several), times in
//! milliseconds, then one line for each reason of failure. The JSON uses the keys of `vllm bench serve`
//! for the whole run (`completed`, `request_throughput`, `p99_ttft_ms`, ..), so that scripts written
//! for its result files work, and the same keys again under `classes.<name>`.
//!
//! A measure without values is 0 there, as in the original, and a dash in the table.

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use super::tally::{ClassTally, Summary, Tally};

/// Percentiles in the JSON.
const PERCENTILES: [(f64, &str); 3] = [(50.0, "p50"), (90.0, "p90"), (99.0, "p99")];

/// The table.
pub fn table(tally: &Tally) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header([
        "class",
        "sent",
        "ok",
        "failed",
        "req/s",
        "out tok/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT mean",
        "ITL p99",
        "E2EL p50",
        "E2EL p99",
    ]);
    let several = tally.classes.len() > 1;
    for class in tally.classes.iter().chain(several.then_some(&tally.all)) {
        table.add_row(row(tally, class));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = table.to_string();
    for (failure, count) in &tally.all.failed {
        text.push_str(&format!("\nfailed: {count} x {failure}"));
    }
    text
}

fn row(tally: &Tally, class: &ClassTally) -> [String; 12] {
    [
        class.name.clone(),
        class.sent.to_string(),
        class.completed.to_string(),
        class.failures().to_string(),
        format!("{:.2}", tally.per_second(class.completed)),
        format!("{:.1}", tally.per_second(class.output_tokens)),
        millis(&class.ttft, class.ttft.percentile(50.0)),
        millis(&class.ttft, class.ttft.percentile(99.0)),
        millis(&class.tpot, class.tpot.mean()),
        millis(&class.itl, class.itl.percentile(99.0)),
        millis(&class.e2el, class.e2el.percentile(50.0)),
        millis(&class.e2el, class.e2el.percentile(99.0)),
    ]
}

/// `value` of `summary` with one decimal, or a dash when there is nothing to summarise.
pub fn millis(summary: &Summary, value: f64) -> String {
    if summary.count() == 0 { "-".to_owned() } else { format!("{value:.1}") }
}

/// The JSON.
pub fn json(tally: &Tally) -> Value {
    let mut all = class_json(tally, &tally.all);
    all.insert("duration".into(), json!(tally.duration.as_secs_f64()));
    let classes: Map<String, Value> =
        tally.classes.iter().map(|class| (class.name.clone(), Value::Object(class_json(tally, class)))).collect();
    all.insert("classes".into(), Value::Object(classes));
    Value::Object(all)
}

fn class_json(tally: &Tally, class: &ClassTally) -> Map<String, Value> {
    let mut map = Map::new();
    let tokens = class.prompt_tokens + class.output_tokens;
    let failed: Map<String, Value> =
        class.failed.iter().map(|(failure, count)| (failure.to_string(), json!(count))).collect();
    for (key, value) in [
        ("num_prompts", json!(class.sent)),
        ("completed", json!(class.completed)),
        ("failed", json!(class.failures())),
        ("failed_by_reason", Value::Object(failed)),
        ("total_input_tokens", json!(class.prompt_tokens)),
        ("total_output_tokens", json!(class.output_tokens)),
        ("request_throughput", json!(tally.per_second(class.completed))),
        ("output_throughput", json!(tally.per_second(class.output_tokens))),
        ("total_token_throughput", json!(tally.per_second(tokens))),
        ("p99_late_ms", json!(class.late.percentile(99.0))),
        ("max_late_ms", json!(class.late.max())),
    ] {
        map.insert(key.into(), value);
    }
    for (name, summary) in [("ttft", &class.ttft), ("tpot", &class.tpot), ("itl", &class.itl), ("e2el", &class.e2el)] {
        map.insert(format!("mean_{name}_ms"), json!(summary.mean()));
        map.insert(format!("median_{name}_ms"), json!(summary.percentile(50.0)));
        map.insert(format!("std_{name}_ms"), json!(summary.std()));
        for (p, label) in PERCENTILES {
            map.insert(format!("{label}_{name}_ms"), json!(summary.percentile(p)));
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::client::{Failure, Timing};
    use crate::bench::mock::small_workload;
    use crate::bench::run::{Run, Sample};

    fn tally() -> Tally {
        let timing = |ttft| Timing {
            ttft: Duration::from_millis(ttft),
            e2el: Duration::from_millis(ttft + 40),
            gaps: vec![Duration::from_millis(10); 4],
            output_tokens: 5,
            prompt_tokens: None,
        };
        let answers = [Ok(timing(10)), Ok(timing(20)), Err(Failure::Status(503))];
        let samples = (0u64..).zip(answers).map(|(ordinal, answer)| Sample {
            ordinal,
            class: 0,
            prompt_tokens: 3,
            started: Duration::ZERO,
            late: Duration::ZERO,
            answer,
        });
        Tally::of(&Run { samples: samples.collect(), duration: Duration::from_secs(2) }, &small_workload())
    }

    #[test]
    fn the_table_has_a_line_for_each_class_and_for_each_reason() {
        let lines: Vec<String> = table(&tally()).lines().map(|line| line.trim().to_owned()).collect();
        let cells: Vec<&str> = lines[3].split_whitespace().collect();
        assert_eq!(cells, ["small", "3", "2", "1", "1.00", "5.0", "15.0", "19.9", "10.0", "10.0", "55.0", "59.9"]);
        assert_eq!(lines.last().unwrap(), "failed: 1 x status 503");
    }

    #[test]
    fn the_json_has_the_keys_of_the_original_for_all_and_for_each_class() {
        let json = json(&tally());
        assert_eq!(json["completed"], 2);
        assert_eq!(json["median_ttft_ms"], 15.0);
        assert_eq!(json["p99_itl_ms"], 10.0);
        assert_eq!(json["mean_tpot_ms"], 10.0);
        assert_eq!(json["total_input_tokens"], 6);
        assert_eq!(json["failed_by_reason"]["status 503"], 1);
        assert_eq!(json["classes"]["small"]["request_throughput"], 1.0);
        assert_eq!(json["duration"], 2.0);
    }

    #[test]
    fn a_measure_without_values_is_a_dash() {
        assert_eq!(millis(&Summary::default(), 0.0), "-");
    }
}
