//! The grid of `auto_tune.sh` under four workloads: the certified rates of the tuner and of the
//! script's own algorithm, compared with true capacities.
//!
//! The true capacity of a setting is the highest rate at which 99 % of the requests of a long run
//! ([`LONG`]) meet their objectives, found by bisection to 1.2 %. Another long run measures the
//! attainment at a certified rate.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Value, json};
use sluice_bench::Record;
use sluice_lab::Scenario;
use sluice_lab::run::{Progress, run_until};
use sluice_tune::setting::{Setting, name};
use sluice_tune::{Method, Outcome, TuneFile};

use crate::item::{Item, Lines};
use crate::tuning::{LONG, TRUTH, attainment, file, long, settings, total, tuned};

/// Name of a workload, and its lengths and objective.
const WORKLOADS: [(&str, &str); 4] = [
    ("1024-256-5s", "in = 1024, out = 256, e2el = \"5s\""),
    ("4000-16-2.5s", "in = 4000, out = 16, e2el = \"2500ms\""),
    ("1024-1024-20s", "in = 1024, out = 1024, e2el = \"20s\""),
    ("1024-256-2.3s", "in = 1024, out = 256, e2el = \"2300ms\""),
];
/// Key for the share of GPU memory, which the script adds to every setting.
const SHARE: &str = "vllm.gpu-memory-utilization";
/// The first rate of the search, requests per second.
const FIRST: f64 = 10.0;
/// Factor between two rates of the search, until it knows one rate that holds and one that fails.
const STEP: f64 = 1.5;
/// The bisection ends when the higher rate divided by the lower one is below this.
const NEAR: f64 = 1.012;
/// Lower bound of the search for a capacity.
const LEAST: f64 = 0.01;

fn grid(class: &str) -> TuneFile {
    file(&format!(
        "[[engine]]\nargs = {{ stream-interval = 1000, max-model-len = 8192 }}\n\
         [[traffic]]\nrate = 1\nclass = [{{ name = \"a\", {class} }}]\n\
         [tune]\nconstraints = [\"vllm.max-num-seqs <= vllm.max-num-batched-tokens\"]\n\
         [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [128, 256]\n\
         [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = [512, 1024, 2048, 4096]\n"
    ))
}

pub(crate) fn items(seeds: Range<u64>) -> Vec<Item> {
    let mut items = Vec::new();
    for (workload, class) in WORKLOADS {
        let file = grid(class);
        for setting in settings(&file) {
            let scenario = file.scenario.clone();
            let title = format!("grid/true/{workload}/{}", name(&setting));
            items.push(Item::new(title, move || json!(capacity(&scenario, &setting))));
        }
    }
    for seed in seeds {
        for (workload, class) in WORKLOADS {
            for method in [Method::Race, Method::AutoTune] {
                let file = grid(class);
                let title = format!("grid/{}/{workload}/{seed:02}", method.name());
                items.push(Item::new(title, move || tuning(&file, method, seed)));
            }
        }
    }
    items
}

/// Whether 99 % of the requests of a long run at this rate meet their objectives. The run ends at
/// the first miss that makes this impossible.
fn holds(scenario: &Scenario, setting: &Setting, rate: f64) -> bool {
    let lab = long(scenario, setting, rate);
    let slo = lab.traffic[0].workload.class_configs()[0].slo;
    let bound = slo.e2el.unwrap_or(f64::INFINITY) / 1e3;
    let (mut misses, mut late, allowed) = (0, 0, (LONG / 100) as usize);
    let done = &mut |progress: &Progress<'_>| {
        misses += progress.ended.iter().filter(|record| !record.meets(&slo)).count();
        let is_late = |record: &&Record| progress.now - record.due.unwrap_or(record.sent) > bound;
        late = progress.in_flight.values().take_while(is_late).count();
        misses + late > allowed
    };
    run_until(&lab, TRUTH, done).expect("it runs");
    misses + late <= allowed
}

/// The highest rate for which [`holds`] is true, or `None` if this rate is below [`LEAST`].
fn capacity(scenario: &Scenario, setting: &Setting) -> Option<f64> {
    let (mut most, mut least, mut rate) = (None, None, FIRST);
    while rate > LEAST {
        match holds(scenario, setting, rate) {
            true => most = Some(rate),
            false => least = Some(rate),
        }
        rate = match (most, least) {
            (Some(low), Some(high)) if high / low < NEAR => return Some(f64::sqrt(low * high)),
            (Some(low), Some(high)) => f64::sqrt(low * high),
            (Some(low), None) => low * STEP,
            (None, _) => rate / STEP,
        };
    }
    None
}

/// The result of one tuning, or null if it certified no setting.
fn tuning(file: &TuneFile, method: Method, seed: u64) -> Value {
    let report = tuned(file, method, seed, None);
    let Some(winner) = &report.winner else { return Value::Null };
    let Outcome::Measured { certified: Some(certified), .. } = &winner.outcome else { return Value::Null };
    let mut chosen = winner.setting.clone();
    chosen.remove(SHARE);
    json!({
        "chosen": name(&chosen),
        "rate": certified.rate,
        "attainment": attainment(&file.scenario, &winner.setting, certified.rate),
        "starts": total(&report, |trial| f64::from(trial.starts)),
        "runs": total(&report, |trial| f64::from(trial.loads)),
        "minutes": total(&report, |trial| trial.seconds + trial.start_seconds) / 60.0,
    })
}

pub(crate) fn summary(lines: &Lines) -> String {
    let mut text = String::from(
        "| workload | method | within 5 % of the capacity | certified rate / capacity | long run below 98 % | worst long run \
         | setting within 3 % of the best | worst setting | starts | runs | engine time |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    for (workload, _) in WORKLOADS {
        let start = format!("grid/true/{workload}/");
        let truths: BTreeMap<&str, f64> =
            lines.of(&start).filter_map(|(name, found)| Some((name, found.as_f64()?))).collect();
        for method in [Method::AutoTune, Method::Race] {
            let start = format!("grid/{}/{workload}/", method.name());
            let found: Vec<&Value> = lines.of(&start).map(|(_, found)| found).collect();
            if truths.len() == 9 && !found.is_empty() {
                text += &format!("| {workload} | {} | {} |\n", method.name(), row(&found, &truths));
            }
        }
    }
    text
}

/// A row with the results of all seeds. It has certified rates as shares of the true capacities,
/// and medians of the costs.
fn row(all: &[&Value], truths: &BTreeMap<&str, f64>) -> String {
    let best = truths.values().copied().fold(0.0, f64::max);
    let of = |found: &Value| Some((found["rate"].as_f64()?, *truths.get(found["chosen"].as_str()?)?));
    let sorted = |of: &dyn Fn(&Value) -> Option<f64>| {
        let mut values: Vec<f64> = all.iter().map(|found| of(found).unwrap_or(0.0)).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let rates = sorted(&|found| of(found).map(|(rate, truth)| rate / truth));
    let chosen = sorted(&|found| of(found).map(|(_, truth)| truth / best));
    let shares = sorted(&|found| found["attainment"].as_f64());
    let median = |key: &str| sorted(&|found| found[key].as_f64())[all.len() / 2];
    format!(
        "{} of {} | {:.3} ({:.3} to {:.3}) | {} | {:.2} % | {} | {:.1} % | {:.0} | {:.0} | {:.0} min",
        rates.iter().filter(|rate| (**rate - 1.0).abs() <= 0.05).count(),
        all.len(),
        rates[all.len() / 2],
        rates[0],
        rates[all.len() - 1],
        shares.iter().filter(|share| **share < 0.98).count(),
        shares[0] * 100.0,
        chosen.iter().filter(|chosen| **chosen >= 0.97).count(),
        chosen[0] * 100.0,
        median("starts"),
        median("runs"),
        median("minutes"),
    )
}
