//! Measurements of the tuner on simulated engines, whose true capacity long runs show. Not run by `cargo test`:
//!
//! ```sh
//! cargo test --release -p sluice-tune evidence -- --ignored --nocapture NAME
//! ```
//!
//! | name | shows |
//! |---|---|
//! | `certified_rates` | eight combinations under four workloads: certified rate, true capacity, cost; `auto_tune.sh`'s algorithm beside it |
//! | `five_dimensions` | 504 settings, some of which do not start: the model and chance after 45 trials |
//! | `two_mixes` | two mixes of lengths on two engines: which settings are best for each |
//! | `adapters` | tuned without and with LoRA adapters, served with them |
//!
//! `SLUICE_TUNE_SEEDS` is the number of seeds, `SLUICE_TUNE_PART` one of the workloads.

use std::collections::BTreeMap;

use crate::setting::{Setting, name, variant};
use crate::tests::{file, laboratory, plan, tuned};
use crate::*;
use sluice_bench::{Arrival, Extent, PromptTokens, Record};
use sluice_lab::run::{Progress, run_until};
use sluice_lab::{Lab, Scenario, run};

/// Requests of a long run.
const LONG: u64 = 20_000;
/// Long runs by which a capacity is known.
const TRUTH_SEEDS: u64 = 1;

fn seeds(default: u64) -> u64 {
    std::env::var("SLUICE_TUNE_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn is_part(name: &str) -> bool {
    std::env::var("SLUICE_TUNE_PART").map_or(true, |part| part == name)
}

/// A laboratory for long runs of a setting at a rate.
fn long(scenario: &Scenario, setting: &Setting, rate: f64) -> Lab {
    let mut lab = scenario.lab(&variant(setting).unwrap()).unwrap();
    lab.traffic[0].arrival = Arrival::Poisson { rate };
    lab.traffic[0].extent = Extent::Requests(LONG);
    if lab.engines.len() == 1 {
        lab.traffic[0].workload.tokens = PromptTokens::Ids(0..1);
    }
    lab
}

/// The share of the requests of the worst group (class, adapter) that meet their objectives in a long run at a rate.
fn attainment(scenario: &Scenario, setting: &Setting, rate: f64) -> f64 {
    let result = run(&long(scenario, setting, rate), 987_654).unwrap().result;
    let mut groups: BTreeMap<(u32, Option<u32>), (f64, f64)> = BTreeMap::new();
    for record in &result.requests {
        let (hits, all) = groups.entry((record.class, record.adapter)).or_default();
        let hit = record.meets(result.config.slo_of(record.class));
        (*hits, *all) = (*hits + f64::from(hit), *all + 1.0);
    }
    groups.values().map(|(hits, all)| hits / all).fold(1.0, f64::min)
}

/// Whether 99 % of the requests of long runs of one class meet their objectives. It ends with the first miss that is too many.
fn holds(scenario: &Scenario, setting: &Setting, rate: f64) -> bool {
    let lab = long(scenario, setting, rate);
    let slo = lab.traffic[0].workload.class_configs()[0].slo;
    let bound = slo.e2el.unwrap() / 1e3;
    let (mut misses, allowed) = (0, (TRUTH_SEEDS * LONG / 100) as usize);
    (0..TRUTH_SEEDS).all(|seed| {
        let mut late = 0;
        let done = &mut |progress: &Progress<'_>| {
            misses += progress.ended.iter().filter(|record| !record.meets(&slo)).count();
            let is_late = |record: &&Record| progress.now - record.due.unwrap_or(record.sent) > bound;
            late = progress.in_flight.values().take_while(is_late).count();
            misses + late > allowed
        };
        run_until(&lab, 987_655 + seed, done).unwrap();
        misses + late <= allowed
    })
}

/// The highest rate with 99 %, to 1 %, by long runs from a rate that is about right.
fn capacity(scenario: &Scenario, setting: &Setting, about: f64) -> f64 {
    let (mut most, mut least) = (None, None);
    let (mut rate, mut step) = (about, 1.03);
    loop {
        match holds(scenario, setting, rate) {
            true => most = Some(rate),
            false => least = Some(rate),
        }
        rate = match (most, least) {
            (Some(low), Some(high)) if high / low < 1.012 => return f64::sqrt(low * high),
            (Some(low), Some(high)) => f64::sqrt(low * high),
            (Some(low), None) => low * step,
            (None, Some(high)) => high / step,
            (None, None) => rate,
        };
        step = (step * step).min(1.5);
        assert!(rate > 0.01, "{} meets no rate", name(setting));
    }
}

/// The grid of `auto_tune.sh`.
fn grid(class: &str) -> TuneFile {
    let tune = "[tune]\nconstraints = [\"vllm.max-num-seqs <= vllm.max-num-batched-tokens\"]\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [128, 256]\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = [512, 1024, 2048, 4096]\n";
    file("args = { stream-interval = 1000, max-model-len = 8192 }", class, tune)
}

const WORKLOADS: [(&str, &str); 4] = [
    ("1024/256, 5 s", "{ name = \"a\", in = 1024, out = 256, e2el = \"5s\" }"),
    ("4000/16, 2.5 s", "{ name = \"a\", in = 4000, out = 16, e2el = \"2500ms\" }"),
    ("1024/1024, 20 s", "{ name = \"a\", in = 1024, out = 1024, e2el = \"20s\" }"),
    ("1024/256, 2.3 s", "{ name = \"a\", in = 1024, out = 256, e2el = \"2300ms\" }"),
];

/// What one tuning of the grid found.
#[derive(Clone, Copy)]
struct Found {
    /// Certified rate over the true capacity of the chosen setting.
    rate: f64,
    /// Long-run attainment at that rate.
    attainment: f64,
    /// True capacity of the chosen setting over that of the best.
    chosen: f64,
    starts: f64,
    runs: f64,
    minutes: f64,
}

fn grid_seed(file: &TuneFile, method: Method, seed: u64, truths: &BTreeMap<String, f64>) -> Option<(String, Found)> {
    let plan = plan(file, Some(method), seed, Budget::default());
    let report = tuned(&plan, &mut laboratory(file, &plan));
    let Outcome::Measured { certified, .. } = &report.winner.as_ref()?.outcome else { return None };
    let winner = &report.winner.as_ref()?.setting;
    let mut chosen = winner.clone();
    chosen.remove("vllm.gpu-memory-utilization");
    let (rate, truth) = (certified.as_ref()?.rate, truths[&name(&chosen)]);
    let best = truths.values().copied().fold(0.0, f64::max);
    let sum = |of: fn(&Trial) -> f64| report.trials.iter().map(of).sum::<f64>();
    let found = Found {
        rate: rate / truth,
        attainment: attainment(&file.scenario, winner, rate),
        chosen: truth / best,
        starts: sum(|trial| f64::from(trial.starts)),
        runs: sum(|trial| f64::from(trial.loads)),
        minutes: sum(|trial| trial.seconds + trial.start_seconds) / 60.0,
    };
    Some((name(&chosen), found))
}

/// Medians and extremes of what all seeds found, as a row of a table.
fn grid_row(found: &[Found]) -> String {
    let sorted = |of: fn(&Found) -> f64| {
        let mut values: Vec<f64> = found.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let median = |of: fn(&Found) -> f64| sorted(of)[found.len() / 2];
    let (rates, shares, chosen) = (sorted(|f| f.rate), sorted(|f| f.attainment), sorted(|f| f.chosen));
    format!(
        "{} of {} | {:.3} ({:.3} to {:.3}) | {} | {:.2} % | {} | {:.1} % | {:.0} | {:.0} | {:.0} min",
        rates.iter().filter(|rate| (**rate - 1.0).abs() <= 0.05).count(),
        found.len(),
        rates[rates.len() / 2],
        rates[0],
        rates[rates.len() - 1],
        shares.iter().filter(|share| **share < 0.98).count(),
        shares[0] * 100.0,
        chosen.iter().filter(|chosen| **chosen >= 0.97).count(),
        chosen[0] * 100.0,
        median(|f| f.starts),
        median(|f| f.runs),
        median(|f| f.minutes),
    )
}

/// The true capacity of every setting of the grid.
fn truths(workload: &str, file: &TuneFile) -> BTreeMap<String, f64> {
    let settings = plan(file, None, 0, Budget::default()).space.settings().unwrap();
    // What the first search finds is about right.
    let first = plan(file, Some(Method::Race), 0, Budget { trials: Some(1), time: None });
    let first = tuned(&first, &mut laboratory(file, &first)).trials[0].value().unwrap();
    let truth = |near: &mut f64, setting: &Setting| {
        *near = capacity(&file.scenario, setting, *near);
        println!("{workload}: {}: true capacity {near:.2}", name(setting));
        Some((name(setting), *near))
    };
    settings.iter().scan(first, truth).collect()
}

#[test]
#[ignore = "takes long"]
fn certified_rates() {
    let parts = WORKLOADS.into_iter().filter(|(name, _)| is_part(name));
    let known: Vec<(&str, TuneFile, BTreeMap<String, f64>)> = parts
        .map(|(workload, class)| {
            let file = grid(&format!("rate = 1\nclass = [{class}]"));
            let truths = truths(workload, &file);
            (workload, file, truths)
        })
        .collect();
    let mut all: BTreeMap<(&str, &str), Vec<Found>> = BTreeMap::new();
    for seed in 0..seeds(20) {
        for ((workload, file, truths), method) in
            known.iter().flat_map(|known| [Method::Race, Method::AutoTune].map(|method| (known, method)))
        {
            let began = std::time::Instant::now();
            let Some((chosen, found)) = grid_seed(file, method, seed, truths) else {
                println!("{workload}; {}; seed {seed}: no winner", method.name());
                continue;
            };
            println!(
                "{workload}; {}; seed {seed}: {chosen}; certified {:.3} of its capacity; long-run {:.2} %; {:.3} of the best; \
                 {:.0} starts, {:.0} runs, {:.0} min; {:.1} s here",
                method.name(),
                found.rate,
                found.attainment * 100.0,
                found.chosen,
                found.starts,
                found.runs,
                found.minutes,
                began.elapsed().as_secs_f64(),
            );
            all.entry((workload, method.name())).or_default().push(found);
        }
    }
    for ((workload, method), found) in &all {
        println!("| {workload} | {method} | {} |", grid_row(found));
    }
}

/// Values of a measure that were taken before: by setting, then by run. `None` does not start.
struct Table(BTreeMap<String, Option<Vec<f64>>>);

struct Row(Vec<f64>);

impl Backend for Table {
    type System = Row;

    async fn start(&mut self, setting: &Setting) -> Result<Started<Row>, TuneError> {
        Ok(match &self.0[&name(setting)] {
            Some(values) => Started::Up { system: Row(values.clone()), seconds: 60.0 },
            None => Started::Refused { reason: "no memory".to_owned(), seconds: 30.0, foreseen: false },
        })
    }

    fn search_goal(&self, _: f64, _: usize, _: u64) -> Result<sluice_bench::search::SearchGoal, TuneError> {
        Err(TuneError::Goal("a table has no rate".to_owned()))
    }
}

impl sluice_bench::search::SystemUnderTest for Row {
    type Error = TuneError;

    async fn run(
        &mut self,
        _: &sluice_bench::search::Trial,
        _: &mut sluice_bench::search::Judge,
    ) -> Result<sluice_bench::search::TrialStats, TuneError> {
        Err(TuneError::Goal("a table has no rate".to_owned()))
    }
}

impl System for Row {
    fn last(&self) -> Option<&sluice_bench::RunResult> {
        None
    }

    fn group(&self, _: usize) -> String {
        String::new()
    }

    async fn observe(&mut self, seed: u64) -> Result<(Vec<f64>, f64), TuneError> {
        Ok((vec![self.0[seed as usize % self.0.len()]], 60.0))
    }

    async fn stress(&mut self, _: u64) -> Result<f64, TuneError> {
        Ok(0.0)
    }

    fn is_kv_full(&self) -> bool {
        false
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Every setting of a file with so many runs each, the exhaustive search. Seeds are those of no tuning.
fn exhaustive(file: &TuneFile, runs: u64) -> BTreeMap<String, Option<Vec<f64>>> {
    let plan = plan(file, None, 0, Budget::default());
    let settings = plan.space.settings().unwrap();
    let half = |odd: usize| {
        let mut backend = laboratory(file, &plan);
        let mut rows = Vec::new();
        for setting in settings.iter().skip(odd).step_by(2) {
            let values = match at_once(backend.start(setting)).unwrap() {
                Started::Refused { .. } => None,
                Started::Up { mut system, .. } => {
                    Some((0..runs).map(|run| at_once(system.observe(5_000_000 + run)).unwrap().0[0]).collect())
                }
            };
            rows.push((name(setting), values));
        }
        rows
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| half(1));
        let own = half(0);
        own.into_iter().chain(other.join().unwrap()).collect()
    })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
#[ignore = "takes long"]
fn five_dimensions() {
    let tune = "[tune]\nobjective = \"short.e2el.p99\"\nruns = 4\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [8, 32, 128, 512]\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = [256, 512, 1024, 2048, 8192]\n\
        [[tune.dimension]]\nkey = \"vllm.long-prefill-token-threshold\"\nvalues = [64, 128, 256, 512]\n\
        [[tune.dimension]]\nkey = \"vllm.gpu-memory-utilization\"\nvalues = [0.5, 0.75, 0.95]\n\
        [[tune.dimension]]\nkey = \"vllm.max-model-len\"\nvalues = [8192, 131072]\n";
    let class = "duration = \"40s\"\nclass = [{ name = \"short\", rate = 8, in = 200, out = 64 }, \
        { name = \"long\", rate = 0.7, in = 6000, out = 32 }]";
    let file = file("gpu = \"rtx3080-10\"\nmodel = \"llama-3.2-1b\"\nargs = { stream-interval = 100 }", class, tune);
    let table = exhaustive(&file, 8);
    let truths: BTreeMap<&String, f64> =
        table.iter().filter_map(|(name, values)| Some((name, mean(values.as_ref()?)))).collect();
    let (best_name, best) = truths.iter().min_by(|one, other| one.1.total_cmp(other.1)).unwrap();
    let mut values: Vec<f64> = truths.values().copied().collect();
    values.sort_by(f64::total_cmp);
    println!(
        "{} settings, {} do not start; best {best:.0} ms ({best_name}), quartiles {:.0} {:.0} {:.0}, default {:?}",
        table.len(),
        table.len() - truths.len(),
        values[values.len() / 4],
        values[values.len() / 2],
        values[values.len() * 3 / 4],
        table.get("defaults").map(|values| values.as_ref().map(|values| mean(values))),
    );
    for method in [Method::Model, Method::Random] {
        let mut found: Vec<(f64, usize)> = (0..seeds(20))
            .map(|seed| {
                let budget = Budget { trials: Some(45), time: None };
                let plan = plan(&file, Some(method), seed, budget);
                let report = tuned(&plan, &mut Table(table.clone()));
                let chosen = search::best(&report.trials, &plan.goal).unwrap();
                (truths[&name(&chosen.setting)] / best, report.trials.iter().filter(|trial| trial.is_search()).count())
            })
            .collect();
        found.sort_by(|one, other| one.0.total_cmp(&other.0));
        let trials: usize = found.iter().map(|(_, trials)| trials).sum();
        println!(
            "{}: over the best: median {:+.1} %, worst {:+.1} %, {} of {} within 5 %; {:.1} trials on average",
            method.name(),
            (found[found.len() / 2].0 - 1.0) * 100.0,
            (found[found.len() - 1].0 - 1.0) * 100.0,
            found.iter().filter(|(ratio, _)| *ratio <= 1.05).count(),
            found.len(),
            trials as f64 / found.len() as f64,
        );
    }
}

const TWO_ENGINES: &str = "gateway = \"\"\"\n[[model]]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"all\"\nmodels = [\"*\"]\n\
    policy = \"round_robin\"\nslots = 2048\n[[pool.backend]]\nname = \"gpu0\"\nurl = \"http://127.0.0.1:8000\"\n\
    [[pool.backend]]\nname = \"gpu1\"\nurl = \"http://127.0.0.1:8001\"\n\"\"\"\nduration = \"60s\"\n";

#[test]
#[ignore = "takes long"]
fn two_mixes() {
    let dimensions = "[[tune.dimension]]\nkey = \"pool.all.policy\"\nvalues = [\"round_robin\", \"least_work\"]\n\
        [[tune.dimension]]\nkey = \"vllm.long-prefill-token-threshold\"\nvalues = [0, 256, 512, 1024, 2048]\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = [2048, 8192]\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [64, 256]\n";
    let mixes = [
        (
            "30 short and 2 long",
            "short.e2el.p99",
            "class = [{ name = \"short\", rate = 30, in = 200, out = 128 }, \
              { name = \"long\", rate = 2, in = 16000, out = 64 }]",
        ),
        (
            "three lengths",
            "long.e2el.p99",
            "rate = 14\nclass = [{ name = \"short\", weight = 6, in = \"100-600\", out = 128 }, \
              { name = \"middle\", weight = 3, in = \"2000-4000\", out = 128 }, \
              { name = \"long\", weight = 1, in = \"8000-12000\", out = 64 }]",
        ),
    ];
    for (mix, objective, class) in mixes.into_iter().filter(|(name, ..)| is_part(name)) {
        let text = format!(
            "{TWO_ENGINES}[[engine]]\ngpu = \"h200\"\nargs = {{ stream-interval = 100 }}\n[[traffic]]\n{class}\n\
             [tune]\nobjective = \"{objective}\"\nruns = 8\n{dimensions}"
        );
        let file = TuneFile::parse(&text, mix, std::path::Path::new(".")).unwrap();
        let table = exhaustive(&file, 8);
        let truths: BTreeMap<&String, f64> =
            table.iter().filter_map(|(name, values)| Some((name, mean(values.as_ref()?)))).collect();
        let (best_name, best) = truths.iter().min_by(|one, other| one.1.total_cmp(other.1)).unwrap();
        println!(
            "{mix}: {objective}: best {best:.0} ms ({best_name}), default {:.0} ms",
            truths[&"defaults".to_owned()]
        );
        for seed in 0..seeds(5) {
            let plan = plan(&file, Some(Method::Race), seed, Budget::default());
            let report = tuned(&plan, &mut laboratory(&file, &plan));
            let winner = report.winner.as_ref().unwrap();
            let ratio = truths[&name(&winner.setting)] / best;
            let runs: u32 = report.trials.iter().map(|trial| trial.loads).sum();
            let answer = report::answer::answer(&report, &plan.goal);
            println!(
                "{mix}; seed {seed}: {}: {:+.1} % over the best, {runs} runs; {:?}",
                name(&winner.setting),
                (ratio - 1.0) * 100.0,
                answer.get(2)
            );
        }
    }
}

#[test]
#[ignore = "takes long"]
fn adapters() {
    let names = "adapters = { names = [\"a\", \"b\", \"c\", \"d\", \"e\", \"f\", \"g\", \"h\"], zipf = 0.8 }";
    let class = "rate = 5\nclass = [{ name = \"chat\", in = 512, out = 128, e2el = \"4s\" }]";
    let tune = "[tune]\n[[tune.dimension]]\nkey = \"vllm.max-loras\"\nvalues = [1, 2, 4, 8]\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [128, 256]\n";
    let engine = "args = { enable-lora = true, max-cpu-loras = 16, stream-interval = 1000, max-model-len = 8192 }";
    let with = file(engine, &format!("{class}\n{names}"), tune);
    let without = file(engine, class, tune);
    let mut rates = Vec::new();
    for (which, file) in [("without adapters", &without), ("with adapters", &with)] {
        let plan = plan(file, Some(Method::Race), 1, Budget::default());
        let report = tuned(&plan, &mut laboratory(file, &plan));
        println!("{which}\n{}", report::table::text(&report, &plan.goal));
        let winner = report.winner.unwrap();
        let Outcome::Measured { certified: Some(certified), .. } = winner.outcome else {
            panic!("{:?}", winner.outcome)
        };
        rates.push((which, winner.setting, certified.rate));
    }
    for (which, setting, rate) in &rates {
        for (_, _, at) in &rates {
            let share = attainment(&with.scenario, setting, *at) * 100.0;
            println!("tuned {which} ({}; {rate:.2}/s), served with adapters at {at:.2}/s: {share:.1} %", name(setting));
        }
    }
}
