//! Functions with which the cases run a tuning, and measure the true values to compare it with.
//!
//! True values come from separate runs, with seeds that no tuning uses.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use sluice_bench::{Arrival, Extent, PromptTokens};
use sluice_lab::{Lab, Scenario, run};
use sluice_tune::setting::{Setting, name, variant};
use sluice_tune::{
    Backend as _, Budget, Goal, Header, Journal, Laboratory, Method, Plan, Report, Space, Started, System as _, Trial,
    TuneFile, at_once, tune,
};

use crate::item::{Item, Lines};

/// Number of requests in a long run.
pub(crate) const LONG: u64 = 20_000;
/// First of the seeds with which true values are measured.
pub(crate) const TRUTH: u64 = 5_000_000;
/// Number of settings whose true values are measured by one item.
const TOGETHER: usize = 8;

pub(crate) fn file(text: &str) -> TuneFile {
    TuneFile::parse(text, "evidence", Path::new(".")).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

pub(crate) fn settings(file: &TuneFile) -> Vec<Setting> {
    Space::new(&file.tune).and_then(|space| space.settings()).expect("the space is valid")
}

pub(crate) fn goal(file: &TuneFile, seed: u64) -> Goal {
    Goal::new(&file.tune, seed).expect("the goal is valid")
}

/// Runs a tuning in the laboratory, without predictions.
pub(crate) fn tuned(file: &TuneFile, method: Method, seed: u64, trials: Option<usize>) -> Report {
    let goal = goal(file, seed);
    let space = Space::new(&file.tune).expect("the space is valid");
    let budget = Budget { trials, time: None };
    let plan = Plan { space, goal, method, budget, prior: None };
    let mut laboratory = Laboratory::new(file.scenario.clone(), plan.goal.measures());
    let folder = tempfile::tempdir().expect("a folder can be made");
    let mut journal = Journal::create(&folder.path().join("journal"), &Header::new("", method.name(), seed))
        .expect("it can be written");
    at_once(tune(&plan, &mut laboratory, &mut journal, Vec::new(), |_| ())).expect("the tuning ends")
}

pub(crate) fn total(report: &Report, of: fn(&Trial) -> f64) -> f64 {
    report.trials.iter().map(of).sum()
}

/// The laboratory's setup for a long run of a setting at a rate.
pub(crate) fn long(scenario: &Scenario, setting: &Setting, rate: f64) -> Lab {
    let mut lab = scenario.lab(&variant(setting).expect("the setting is valid")).expect("the setup is valid");
    lab.traffic[0].arrival = Arrival::Poisson { rate };
    lab.traffic[0].extent = Extent::Requests(LONG);
    if lab.engines.len() == 1 {
        // A single engine gets every request, so token ids have no effect. Writing them would be
        // half of the work.
        lab.traffic[0].workload.tokens = PromptTokens::Ids(0..1);
    }
    lab
}

/// The share of requests that meet their objectives in a long run at a rate, for the group with the
/// lowest share. A group is a class with an adapter.
pub(crate) fn attainment(scenario: &Scenario, setting: &Setting, rate: f64) -> f64 {
    let result = run(&long(scenario, setting, rate), TRUTH - 1).expect("it runs").result;
    let mut groups: BTreeMap<(u32, Option<u32>), (f64, f64)> = BTreeMap::new();
    for record in &result.requests {
        let (hits, all) = groups.entry((record.class, record.adapter)).or_default();
        let hit = record.meets(result.config.slo_of(record.class));
        (*hits, *all) = (*hits + f64::from(hit), *all + 1.0);
    }
    groups.values().map(|(hits, all)| hits / all).fold(1.0, f64::min)
}

/// The items of an exhaustive search. Each item has some settings, each with the mean of the
/// measure over `runs` runs, or null if the setting does not start.
pub(crate) fn exhaustive(start: &str, file: &TuneFile, runs: u64) -> Vec<Item> {
    let some = |settings: &[Setting], number: usize| {
        let (file, settings) = (file.clone(), settings.to_vec());
        Item::new(format!("{start}/true/{number:03}"), move || {
            let mut laboratory = Laboratory::new(file.scenario.clone(), goal(&file, 0).measures());
            let mut of = |setting: &Setting| match at_once(laboratory.start(setting)).expect("the setup is valid") {
                Started::Refused { .. } => Value::Null,
                Started::Up { mut system, .. } => {
                    let value = |run| at_once(system.observe(TRUTH + run)).expect("it runs").0[0];
                    json!((0..runs).map(value).sum::<f64>() / runs as f64)
                }
            };
            settings.iter().map(|setting| (name(setting), of(setting))).collect::<serde_json::Map<_, _>>().into()
        })
    };
    (0..).zip(settings(file).chunks(TOGETHER)).map(|(number, chunk)| some(chunk, number)).collect()
}

/// The results of an exhaustive search for every setting. A setting that does not start has `None`.
pub(crate) fn truths(lines: &Lines, start: &str) -> BTreeMap<String, Option<f64>> {
    let start = format!("{start}/true/");
    let chunks = lines.of(&start).filter_map(|(_, found)| found.as_object());
    chunks.flatten().map(|(name, value)| (name.clone(), value.as_f64())).collect()
}

/// The setting with the lowest value, and all values in ascending order.
pub(crate) fn least(truths: &BTreeMap<String, Option<f64>>) -> Option<(&str, Vec<f64>)> {
    let started = truths.iter().filter_map(|(name, value)| Some((name.as_str(), (*value)?)));
    let (best, _) = started.clone().min_by(|one, other| one.1.total_cmp(&other.1))?;
    let mut values: Vec<f64> = started.map(|(_, value)| value).collect();
    values.sort_by(f64::total_cmp);
    Some((best, values))
}
