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
use sluice_bench::Arrival;
use sluice_bench::Extent;
use sluice_lab::{Scenario, run};

/// Requests of a long run.
const LONG: u64 = 20_000;

fn seeds(default: u64) -> u64 {
    std::env::var("SLUICE_TUNE_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn is_part(name: &str) -> bool {
    std::env::var("SLUICE_TUNE_PART").map_or(true, |part| part == name)
}

/// The share of the requests of the worst class that meet their objectives in a long run at a rate.
fn attainment(scenario: &Scenario, setting: &Setting, rate: f64, requests: u64) -> f64 {
    let mut lab = scenario.lab(&variant(setting).unwrap()).unwrap();
    lab.traffic[0].arrival = Arrival::Poisson { rate };
    lab.traffic[0].extent = Extent::Requests(requests);
    let result = run(&lab, 987_654).unwrap().result;
    let share = |class: u32| {
        let own = || result.requests.iter().filter(|record| record.class == class);
        own().filter(|record| record.meets(result.config.slo_of(class))).count() as f64 / own().count().max(1) as f64
    };
    (0..result.config.classes.len() as u32).map(share).fold(1.0, f64::min)
}

/// The highest rate with 99 %, to 1 %, by long runs from a rate that is about right.
fn capacity(scenario: &Scenario, setting: &Setting, about: f64) -> f64 {
    let (mut holds, mut fails) = (None, None);
    let mut rate = about;
    loop {
        match attainment(scenario, setting, rate, LONG) >= 0.99 {
            true => holds = Some(rate),
            false => fails = Some(rate),
        }
        rate = match (holds, fails) {
            (Some(low), Some(high)) if high / low < 1.012 => return f64::sqrt(low * high),
            (Some(low), Some(high)) => f64::sqrt(low * high),
            (Some(low), None) => low * 1.06,
            (None, Some(high)) => high / 1.06,
            (None, None) => rate,
        };
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

const WORKLOADS: [(&str, &str, f64); 4] = [
    ("1024/256, 5 s", "{ name = \"a\", in = 1024, out = 256, e2el = \"5s\" }", 40.0),
    ("4000/16, 2.5 s", "{ name = \"a\", in = 4000, out = 16, e2el = \"2500ms\" }", 12.0),
    ("1024/1024, 20 s", "{ name = \"a\", in = 1024, out = 1024, e2el = \"20s\" }", 12.0),
    ("1024/256, 2.3 s", "{ name = \"a\", in = 1024, out = 256, e2el = \"2300ms\" }", 30.0),
];

#[test]
#[ignore = "takes long"]
fn certified_rates() {
    for (workload, class, about) in WORKLOADS.into_iter().filter(|(name, ..)| is_part(name)) {
        let file = grid(&format!("rate = 1\nclass = [{class}]"));
        let mut truths: BTreeMap<String, f64> = BTreeMap::new();
        let settings = plan(&file, None, 0, Budget::default()).space.settings().unwrap();
        let mut near = about;
        for setting in &settings {
            near = capacity(&file.scenario, setting, near);
            println!("{workload}: {}: true capacity {near:.2}", name(setting));
            truths.insert(name(setting), near);
        }
        // The default is in the table for comparison; the grid is what auto_tune can choose from.
        let best = settings.iter().map(|setting| truths[&name(setting)]).fold(0.0, f64::max);
        for seed in 0..seeds(20) {
            for method in [Method::Race, Method::AutoTune] {
                let began = std::time::Instant::now();
                let plan = plan(&file, Some(method), seed, Budget::default());
                let report = tuned(&plan, &mut laboratory(&file, &plan));
                let Some(winner) = &report.winner else {
                    println!("{workload}; {}; seed {seed}: no winner", method.name());
                    continue;
                };
                let Outcome::Measured { certified, .. } = &winner.outcome else { continue };
                let mut chosen = winner.setting.clone();
                chosen.remove("vllm.gpu-memory-utilization");
                let rate = certified.as_ref().map_or(f64::NAN, |certified| certified.rate);
                let truth = truths[&name(&chosen)];
                let long = attainment(&file.scenario, &winner.setting, rate, LONG);
                let sum = |of: fn(&Trial) -> f64| report.trials.iter().map(of).sum::<f64>();
                println!(
                    "{workload}; {}; seed {seed}: {}; certified {rate:.2} = {:.3} of its capacity; long-run {:.2} %; \
                     {:.3} of the best; {:.0} starts, {:.0} runs, {:.0} min; {:.0} s here",
                    method.name(),
                    name(&chosen),
                    rate / truth,
                    long * 100.0,
                    truth / best,
                    sum(|trial| f64::from(trial.starts)),
                    sum(|trial| f64::from(trial.loads)),
                    sum(|trial| trial.seconds + trial.start_seconds) / 60.0,
                    began.elapsed().as_secs_f64(),
                );
            }
        }
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
            let share = attainment(&with.scenario, setting, *at, LONG) * 100.0;
            println!("tuned {which} ({}; {rate:.2}/s), served with adapters at {at:.2}/s: {share:.1} %", name(setting));
        }
    }
}
