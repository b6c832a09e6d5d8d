//! Whole tunings, of queues with known capacity and of the laboratory: the winner, the trials, and
//! how a tuning resumes.

mod bounds;
mod confirmation;

use std::path::Path;

use crate::report::{answer, json, result_txt, table};
use crate::setting::value;
use crate::testing::{BOUND, Queue, Queues, capacity};
use crate::*;
use sluice_bench::search::{Judge, SystemUnderTest as _, TrialKind, TrialLoad, TrialRule};
use sluice_config::ArgValue;

pub(crate) fn file(engine: &str, class: &str, tune: &str) -> TuneFile {
    let text = format!("[[engine]]\n{engine}\n[[traffic]]\n{class}\n{tune}");
    TuneFile::parse(&text, "test", Path::new(".")).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

pub(crate) fn plan(file: &TuneFile, method: Option<Method>, seed: u64, budget: Budget) -> Plan {
    let space = Space::new(&file.tune).unwrap();
    let settings = space.settings().map_or(1, |settings| settings.len());
    let goal = Goal::new(&file.tune, seed).unwrap();
    Plan { space, goal, method: method.unwrap_or(Method::for_space(settings)), budget, prior: None }
}

fn tuned_at<B: Backend>(
    plan: &Plan,
    fingerprint: &str,
    backend: &mut B,
    journal: &Path,
    resume: bool,
) -> Result<Report, TuneError> {
    let header = Header::new(fingerprint, plan.method.name(), plan.goal.seed);
    let (mut journal, done) = match resume {
        true => Journal::resume(journal, &header)?,
        false => (Journal::create(journal, &header)?, Vec::new()),
    };
    at_once(tune(plan, backend, &mut journal, done, |_| ()))
}

pub(crate) fn tuned<B: Backend>(plan: &Plan, backend: &mut B) -> Report {
    let folder = tempfile::tempdir().unwrap();
    tuned_at(plan, "", backend, &folder.path().join("journal"), false).unwrap()
}

pub(crate) fn laboratory(file: &TuneFile, plan: &Plan) -> Laboratory {
    Laboratory::new(file.scenario.clone(), plan.goal.measures())
}

const CLASS: &str = "rate = 1\nclass = [{ name = \"a\", in = 500, out = 20, e2el = \"500ms\" }]";
const GRID: &str = "[[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [4, 128]\n\
    [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = [64, 2048]\n";

fn grid(tune: &str) -> TuneFile {
    let tune = format!(
        "[tune]\nrequests = 400\nconstraints = [\"vllm.max-num-seqs <= vllm.max-num-batched-tokens\"]\n{tune}\n{GRID}"
    );
    file("args = { max-num-seqs = 16, stream-interval = 100 }", CLASS, &tune)
}

fn dimension(key: &str, count: usize) -> String {
    format!("[[tune.dimension]]\nkey = \"vllm.{key}\"\nfrom = 1\nto = {count}\nstep = 1\n")
}

fn of(setting: &setting::Setting, key: &str) -> f64 {
    setting.get(&format!("vllm.{key}")).and_then(ArgValue::number).unwrap_or(2.0)
}

/// The best service rate is at a = 4, b = 2.
fn hill(setting: &setting::Setting) -> Option<f64> {
    let (a, b) = (of(setting, "a"), of(setting, "b"));
    (a + b < 9.0).then(|| 20.0 * (-0.03 * (a - 4.0).powi(2) - 0.05 * (b - 2.0).powi(2)).exp())
}

fn hills(tune: &str) -> TuneFile {
    file("", CLASS, &format!("[tune]\nrequests = 400\n{tune}\n{}{}", dimension("a", 5), dimension("b", 5)))
}

#[test]
fn every_method_finds_a_setting_near_the_best_and_certifies_what_it_can_do() {
    let mut file = hills("");
    file.tune.requests = 1500;
    for method in [Method::Race, Method::Model, Method::Random] {
        let (mut near, mut right, mut high) = (0, 0, 0);
        for seed in 0..4 {
            let plan = plan(&file, Some(method), seed, Budget::default());
            let report = tuned(&plan, &mut Queues::new(hill));
            let winner = report.winner.as_ref().unwrap();
            let Outcome::Measured { certified: Some(certified), .. } = &winner.outcome else { panic!("{winner:?}") };
            let own = capacity(hill(&winner.setting).unwrap(), 0.99);
            near += usize::from(own > 0.95 * capacity(20.0, 0.99));
            right += usize::from((certified.rate / own - 1.0).abs() < 0.05);
            high += usize::from(certified.rate > capacity(hill(&winner.setting).unwrap(), 0.98));
            assert!(certified.attainment.value >= 0.99, "{certified:?}");
        }
        // Exponential work is the hardest case: of 100 rate searches alone, 9 would be too high.
        let found = format!("{}: {near} near the best, {right} within 5 %, {high} too high", method.name());
        assert!(near == 4 && right >= 3 && high <= 1, "{found}");
    }
}

#[test]
fn defaults_that_are_as_good_are_called_so() {
    let plan = plan(&hills(""), Some(Method::Race), 1, Budget::default());
    let flat = |_: &setting::Setting| Some(20.0);
    let report = tuned(&plan, &mut Queues::new(flat));
    // 400 requests at each rate do not show the difference to the margin.
    let lines = answer::answer(&report, &plan.goal);
    assert!(lines[0].starts_with("the defaults ") && lines[0].contains("as good: keep them"), "{lines:?}");
    assert_eq!(answer::advised(&report, &plan.goal), Some(setting::Setting::new()));
    // A race against an equal setting nearly always ends early.
    let worse = report.trials.iter().filter(|trial| matches!(trial.outcome, Outcome::Worse { .. })).count();
    assert!(worse >= 22, "{worse} of 25");
}

#[test]
fn a_rule_that_excludes_a_better_setting_is_found_out_by_the_check() {
    // The engine starts with 3 and 4 of `max-loras`, but not with 2, against the rule.
    let tune = format!("[tune]\nrequests = 400\n{}", dimension("max-loras", 4));
    let plan = plan(&file("", CLASS, &tune), Some(Method::Race), 1, Budget::default());
    let service = |setting: &setting::Setting| match of(setting, "max-loras") as u32 {
        2 if !setting.is_empty() => None,
        3 | 4 => Some(30.0),
        _ => Some(10.0),
    };
    let report = tuned(&plan, &mut Queues::new(service));
    let winner = report.winner.unwrap();
    assert!(of(&winner.setting, "max-loras") >= 3.0, "{winner:?}");
}

#[test]
fn a_refusal_for_lack_of_memory_excludes_what_needs_more_and_one_is_checked() {
    let tune = format!("[tune]\nrequests = 400\n{}", dimension("max-loras", 6));
    let plan = plan(&file("", CLASS, &tune), Some(Method::Race), 2, Budget::default());
    let service = |setting: &setting::Setting| (of(setting, "max-loras") < 3.0).then_some(10.0);
    let mut queues = Queues::new(service);
    let report = tuned(&plan, &mut queues);
    assert_eq!(report.pruned.iter().filter(|pruned| pruned.checked).count(), usize::from(!report.pruned.is_empty()));
    let refused = report.trials.iter().filter(|trial| matches!(trial.outcome, Outcome::Refused { .. })).count();
    let unchecked = report.pruned.iter().filter(|pruned| !pruned.checked).count();
    assert!(refused + unchecked == 4 && !report.pruned.is_empty(), "{:?}", report.pruned);
    assert!(report.pruned[0].reason.starts_with("no engine ran with max-loras"), "{:?}", report.pruned);
}

#[test]
fn a_tuning_that_was_killed_resumes_to_the_same_result_without_repeating_a_trial() {
    let file = hills("");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    for method in [Method::Race, Method::Model] {
        let plan = plan(&file, Some(method), 1, Budget { trials: Some(14), time: None });
        let mut first = Queues::new(hill);
        let whole = tuned_at(&plan, "x", &mut first, &path, false).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for share in [0.0, 0.3, 0.7, 1.0] {
            std::fs::write(&path, &bytes[..(bytes.len() as f64 * share) as usize]).unwrap();
            let mut second = Queues::new(hill);
            let resumed = tuned_at(&plan, "x", &mut second, &path, true).unwrap();
            let same = resumed.winner.as_ref().map(|trial| &trial.setting)
                == whole.winner.as_ref().map(|trial| &trial.setting);
            assert!(same, "{} at {share}", method.name());
            assert_eq!(resumed.trials.len(), whole.trials.len());
            let left = first.started.len() as f64 * (1.0 - share);
            assert!(second.started.len() as f64 <= left + 2.0, "{} starts at {share}", second.started.len());
        }
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn the_memory_is_what_the_hungriest_setting_lives_with_and_every_setting_but_the_default_gets_it() {
    let tune = format!(
        "[tune]\nrequests = 400\n[tune.memory]\nfrom = 0.5\nto = 0.98\nstep = 0.02\n{}",
        dimension("max-num-seqs", 4)
    );
    let plan = plan(&file("", CLASS, &tune), Some(Method::Race), 1, Budget::default());
    let share = |setting: &setting::Setting| setting.get("vllm.gpu-memory-utilization").and_then(ArgValue::number);
    // With four sequences, engines start up to 0.94 and survive load up to 0.86.
    let service = |setting: &setting::Setting| match (share(setting), of(setting, "max-num-seqs") as u32) {
        (Some(share), 4) if share > 0.94 => None,
        (Some(share), 4) if share > 0.86 => Some(0.5),
        (Some(_), _) => Some(20.0),
        (None, _) => Some(10.0),
    };
    let report = tuned(&plan, &mut Queues::new(service));
    let stressed: Vec<&Trial> = report.trials.iter().filter(|trial| trial.effort == Effort::Stress).collect();
    assert!(stressed.len() <= 6 && share(&stressed[0].setting) == Some(0.98), "{stressed:?}");
    assert!(stressed.iter().all(|trial| of(&trial.setting, "max-num-seqs") == 4.0));
    let searched = report.trials.iter().filter(|trial| matches!(trial.effort, Effort::Race(_)));
    let shares: Vec<Option<f64>> = searched.map(|trial| share(&trial.setting)).collect();
    assert_eq!(shares, [None, Some(0.86), Some(0.86), Some(0.86), Some(0.86)]);
    let text = table::text(&report, &plan.goal);
    assert!(text.contains("it ends under load: out of memory"), "{text}");
}

#[test]
fn a_budget_ends_the_search_and_is_said() {
    for budget in [
        Budget { trials: Some(3), time: None },
        Budget { trials: None, time: Some(std::time::Duration::from_secs(60)) },
    ] {
        let plan = plan(&hills(""), Some(Method::Race), 1, budget);
        let report = tuned(&plan, &mut Queues::new(hill));
        assert!(report.out_of_budget && report.trials.iter().filter(|trial| trial.is_search()).count() <= 3);
        assert!(answer::answer(&report, &plan.goal).join("\n").contains("the budget ended the search"));
    }
}

#[test]
fn what_cannot_be_met_and_what_never_starts_is_said_with_its_reason() {
    let plan = plan(&hills(""), Some(Method::Race), 1, Budget::default());
    let slow = tuned(&plan, &mut Queues::new(|_: &setting::Setting| Some(1.0)));
    let text = answer::answer(&slow, &plan.goal).join("\n");
    assert!(text.contains("no setting meets the objectives") && text.contains("of 'all' miss E2EL by "), "{text}");
    let dead = tuned(&plan, &mut Queues::new(|_: &setting::Setting| None));
    let text = answer::answer(&dead, &plan.goal).join("\n");
    assert!(text.contains("no engine starts") && text.contains("no room"), "{text}");
}

#[test]
fn a_measure_is_tuned_by_pairs_of_runs() {
    let plan = plan(&hills("objective = \"a.e2el.p99\"\nruns = 8\n"), Some(Method::Race), 1, Budget::default());
    let report = tuned(&plan, &mut Queues::new(hill));
    let (winner, comparison) = (report.winner.unwrap(), report.comparison.unwrap());
    assert_eq!(winner.setting, [("vllm.a".to_owned(), value("4")), ("vllm.b".to_owned(), value("2"))].into());
    let truth = hill(&setting::Setting::new()).unwrap() / hill(&winner.setting).unwrap() - 1.0;
    let lost = |trials: &[Trial]| trials.iter().filter(|trial| matches!(trial.outcome, Outcome::Worse { .. })).count();
    assert!(lost(&report.trials) > 10);
    let complete = Plan { goal: Goal { complete: true, ..plan.goal.clone() }, ..plan.clone() };
    assert_eq!(lost(&tuned(&complete, &mut Queues::new(hill)).trials), 0);
    // The runs of a pair share all noise.
    assert!((comparison.change.value - truth).abs() < 1e-9, "{comparison:?}");
}

#[test]
fn a_grid_is_tuned_on_simulated_engines_and_the_report_says_what_was_found() {
    let mut file = grid("objective = \"a.e2el.p99\"\nruns = 2\n");
    file.tune.constraints.clear();
    file.scenario.file.traffic[0].rate = Some(60.0);
    file.scenario.file.duration = Some(sluice_core::base::Period(std::time::Duration::from_secs(4)));
    let plan = plan(&file, None, 1, Budget::default());
    let report = tuned(&plan, &mut laboratory(&file, &plan));
    let text = table::text(&report, &plan.goal);
    println!("{text}");
    assert!(text.contains("not started: Value error, max_num_batched_tokens (64) must be greater"), "{text}");
    assert!(text.contains("vllm serve: --max-num-batched-tokens=2048 --max-num-seqs=128"), "{text}");
    let json = json::json(&report, &plan.goal);
    assert_eq!(json["winner"]["setting"]["vllm.max-num-seqs"], 128);
    let script = result_txt::text(&report, &plan.goal);
    assert!(script.contains("\nbest_max_num_seqs: 128, best_num_batched_tokens: 2048, best_throughput: "), "{script}");
}

#[test]
fn a_rate_is_found_on_a_simulated_engine() {
    let mut file = grid("");
    file.tune.requests = 100;
    file.tune.repeats = 1;
    file.tune.dimension.truncate(1);
    file.scenario.file.traffic[0].class[0].e2el =
        Some(sluice_core::base::Period(std::time::Duration::from_millis(250)));
    let plan = plan(&file, None, 1, Budget { trials: Some(1), time: None });
    let report = tuned(&plan, &mut laboratory(&file, &plan));
    let text = table::text(&report, &plan.goal);
    println!("{text}");
    assert!(text.contains("requests/s certified") && text.contains("the budget ended"), "{text}");
}

#[test]
fn a_space_without_a_setting_is_refused_with_the_constraint() {
    let tune = "[tune]\nconstraints = [\"vllm.max-num-seqs > 500\"]\n".to_owned() + GRID;
    let file = file("", CLASS, &tune);
    let error = Space::new(&file.tune).unwrap().settings().unwrap_err().to_string();
    assert!(error.contains("all of its 4 settings break") && error.contains("max-num-seqs > 500"), "{error}");
}

/// The script's certified rate, throughput and cost, worked out by hand.
fn script_on(service: f64, seed: u64) -> (f64, f64, u32) {
    let run = |load: TrialLoad, requests: usize| {
        let mut queue = Queue::new(service, 1.0);
        let rule = TrialRule { kind: TrialKind::Sample, target: 0.0, warmup: 0, length: requests };
        let trial = sluice_bench::search::Trial { load, requests, warmup: 0, seed };
        at_once(queue.run(&trial, &mut Judge::new(rule))).unwrap();
        let result = queue.last().unwrap();
        let mut latencies: Vec<f64> = result.requests.iter().map(|record| record.latency).collect();
        latencies.sort_by(f64::total_cmp);
        // Linear interpolation between ranks, as in numpy.
        let at = (requests - 1) as f64 * 0.99;
        let (low, part) = (at.floor() as usize, at.fract());
        (requests as f64 / result.duration, latencies[low] * (1.0 - part) + latencies[low + 1] * part)
    };
    let (most, _) = run(TrialLoad::Saturated(1000), 1000);
    let (mut rate, mut runs) = (most.floor() + 1.0, 2);
    loop {
        let (throughput, p99) = run(TrialLoad::Rate(rate), 100);
        if p99 <= BOUND {
            return (rate, throughput, runs);
        }
        (rate, runs) = (rate - 1.0, runs + 1);
    }
}

#[test]
fn the_script_goes_through_its_steps_in_its_order_with_its_arithmetic() {
    let tune = format!("[tune]\n{}", dimension("a", 3));
    let plan = plan(&file("", CLASS, &tune), Some(Method::AutoTune), 5, Budget::default());
    let service =
        |setting: &setting::Setting| match setting.get("vllm.gpu-memory-utilization").and_then(ArgValue::number) {
            Some(share) if share > 0.945 => None,
            _ => Some([8.0, 7.0, 12.5][of(setting, "a") as usize - 1]),
        };
    let mut queues = Queues::new(service);
    let report = tuned(&plan, &mut queues);
    let started: Vec<(f64, f64)> =
        queues.started.iter().map(|setting| (of(setting, "gpu-memory-utilization"), of(setting, "a"))).collect();
    // The memory with the last setting of the grid, then the grid in order, without the default.
    let memory = [0.98, 0.97, 0.96, 0.95, 0.94].map(|share| (share, 3.0));
    assert_eq!(started, [&memory[..], &[(0.94, 1.0), (0.94, 2.0), (0.94, 3.0)]].concat());
    for (trial, service) in report.trials[5..].iter().zip([8.0, 7.0, 12.5]) {
        let Outcome::Measured { value, certified: Some(certified), .. } = &trial.outcome else { panic!("{trial:?}") };
        let (rate, throughput, runs) = script_on(service, 5);
        assert_eq!((certified.rate, trial.loads), (rate, runs));
        assert!((value.value - throughput).abs() < 1e-9, "{value:?} {throughput}");
        // Pauses of 5 s before each rate, 10 s at the end.
        let load = trial.requests as f64 / trial.seconds;
        assert!(trial.requests == 1000 + 100 * u64::from(runs - 1) && load < 12.5, "{trial:?}");
    }
    assert_eq!(of(&report.winner.unwrap().setting, "a"), 3.0);
    assert!(report.default.is_none() && report.comparison.is_none());
}

#[test]
fn the_script_says_when_no_rate_is_left_and_needs_a_bound_on_e2el() {
    let plan = plan(&hills(""), Some(Method::AutoTune), 1, Budget::default());
    let report = tuned(&plan, &mut Queues::new(|_: &setting::Setting| Some(1.5)));
    assert!(report.winner.is_none());
    let text = table::text(&report, &plan.goal);
    assert!(text.contains("the lowest rate of 1/s does not meet an E2EL of 2.000 s"), "{text}");
    let script = result_txt::text(&report, &plan.goal);
    assert!(
        script.ends_with(
            "best_max_num_seqs: 0, best_num_batched_tokens: 0, best_throughput: 0, profile saved in: none\n"
        )
    );
}

/// The first measure is best at a = 1, the second at a = 5; both are best at b = 2.
fn trade(setting: &setting::Setting) -> Option<f64> {
    (!setting.is_empty()).then(|| (-0.1 * of(setting, "a") - 0.2 * (of(setting, "b") - 2.0).abs()).exp()).or(Some(0.1))
}

fn against(setting: &setting::Setting) -> f64 {
    let value = (-0.1 * of(setting, "a") + 0.2 * (of(setting, "b") - 2.0).abs()).exp();
    if setting.is_empty() { 10.0 } else { value }
}

#[test]
fn a_front_holds_every_compromise_and_nothing_that_another_setting_beats() {
    let file = hills("objective = \"a.ttft.p99\"\nagainst = \"a.e2el.p99\"\nruns = 8\n");
    for (method, trials, least) in [(Method::Race, 26, 5), (Method::Random, 26, 5), (Method::Model, 18, 4)] {
        let plan = plan(&file, Some(method), 3, Budget { trials: Some(trials), time: None });
        let mut queues = Queues::new(trade);
        queues.other = against;
        let report = tuned(&plan, &mut queues);
        let text = table::text(&report, &plan.goal);
        let front: Vec<(f64, f64)> =
            report.front.iter().map(|trial| (of(&trial.setting, "a"), of(&trial.setting, "b"))).collect();
        assert!(front.len() >= least && front.iter().all(|(_, b)| *b == 2.0), "{}: {text}", method.name());
        assert!(front.windows(2).all(|two| two[0].0 < two[1].0), "{front:?}");
        assert!(text.contains("settings are not beaten in both a.ttft.p99 and a.e2el.p99"), "{text}");
        // A setting beaten in both measures loses after two of eight runs.
        let lost = report.trials.iter().filter(|trial| matches!(trial.outcome, Outcome::Worse { .. })).count();
        assert!(lost >= 5, "{}: {lost} lost", method.name());
    }
    let plan = plan(&file, Some(Method::AutoTune), 3, Budget::default());
    let folder = tempfile::tempdir().unwrap();
    let error = tuned_at(&plan, "", &mut Queues::new(trade), &folder.path().join("j"), false).unwrap_err().to_string();
    assert!(error.contains("use race, random or model"), "{error}");
}

fn small(tune: &str) -> TuneFile {
    let class =
        "requests = 60\nrate = 30\nclass = [{ name = \"a\", in = 512, out = 10, prefix_share = 0.5, e2el = \"2s\" }]";
    let tune = format!(
        "[tune]\nobjective = \"a.e2el.p99\"\nruns = 2\n{tune}\n\
         [[tune.dimension]]\nkey = \"pool.all.policy\"\nvalues = [\"round_robin\", \"least_work\"]\n\
         [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [4, 32]\n"
    );
    file("args = { stream-interval = 100, max-cudagraph-capture-size = 512 }", class, &tune)
}

#[test]
fn a_key_of_the_gateway_needs_no_start() {
    let file = small("");
    let plan = plan(&file, Some(Method::Race), 1, Budget::default());
    let report = tuned(&plan, &mut laboratory(&file, &plan));
    // One start for the default, then one for each number of sequences, with which both policies
    // are tried.
    let search = report.trials.iter().filter(|trial| trial.is_search());
    assert_eq!(search.map(|trial| trial.starts).sum::<u32>(), 3);
}

#[test]
fn too_few_hits_in_the_prefix_cache_make_a_setting_unusable() {
    let outcome = |hit_rate: u32| {
        let file = small(&format!("hit_rate = {hit_rate}"));
        let plan = plan(&file, Some(Method::Race), 1, Budget::default());
        let report = tuned(&plan, &mut laboratory(&file, &plan));
        (report.winner.is_some(), table::text(&report, &plan.goal))
    };
    assert!(outcome(30).0);
    let (found, text) = outcome(80);
    assert!(
        !found && text.contains("cold cache") && text.contains("and not at least 80 %: give the classes prefixes"),
        "{text}"
    );
    let plan = plan(&small("hit_rate = 30"), Some(Method::Race), 1, Budget::default());
    let folder = tempfile::tempdir().unwrap();
    let unknown =
        tuned_at(&plan, "", &mut Queues::new(|_: &setting::Setting| Some(1.0)), &folder.path().join("j"), false);
    assert!(unknown.unwrap_err().to_string().contains("do not report"));
}

#[test]
fn a_simulation_orders_the_settings_and_is_shown_beside_what_was_measured() {
    let file = small("");
    let mut plan = plan(&file, Some(Method::Race), 1, Budget::default());
    plan.prior = Some(file.scenario.clone());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let report = tuned_at(&plan, "x", &mut laboratory(&file, &plan), &path, false).unwrap();
    assert_eq!((report.predicted.len(), report.trials[0].setting.len()), (5, 0));
    let predicted = |setting: &setting::Setting| {
        report.predicted.iter().find(|trial| trial.setting == *setting).and_then(Trial::value).unwrap()
    };
    // 4 sequences are far too few, so both settings with 32 come first.
    let seqs: Vec<f64> =
        report.trials[1..5].iter().map(|trial| trial.setting["vllm.max-num-seqs"].number().unwrap()).collect();
    assert_eq!(seqs, [32.0, 32.0, 4.0, 4.0]);
    let text = table::text(&report, &plan.goal);
    assert!(text.contains("  predicted\n") && text.contains("The laboratory's prediction of "), "{text}");
    let winner = report.winner.as_ref().unwrap();
    assert!((predicted(&winner.setting) / winner.value().unwrap() - 1.0).abs() < 0.3, "{text}");
    // A tuning killed among the predictions continues with the next one.
    let whole = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, whole.lines().take(3).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let resumed = tuned_at(&plan, "x", &mut laboratory(&file, &plan), &path, true).unwrap();
    assert_eq!(resumed.predicted.len(), 5);
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), whole.lines().count());
}

#[test]
fn a_prediction_that_is_wrong_costs_trials_and_decides_nothing() {
    // The laboratory knows none of these flags.
    let file = hills("");
    for method in [Method::Race, Method::Model] {
        let mut plan = plan(&file, Some(method), 2, Budget::default());
        plan.prior = Some(file.scenario.clone());
        let report = tuned(&plan, &mut Queues::new(hill));
        let own = capacity(hill(&report.winner.as_ref().unwrap().setting).unwrap(), 0.99);
        assert!(own > 0.95 * capacity(20.0, 0.99), "{}: {own}", method.name());
        let text = table::text(&report, &plan.goal);
        assert!(text.contains("does not start"), "{text}");
    }
}

#[test]
fn a_setting_that_sheds_requests_does_not_win_by_the_latency_of_the_others() {
    let class = "rate = 40\nrequests = 100\nclass = [{ name = \"a\", in = 512, out = 20 }]";
    let text = "[tune]\nobjective = \"a.e2el.p90\"\nruns = 2\n\
        [[tune.setting]]\n\"pool.all.slots\" = 1\n\"pool.all.queue.length\" = 1\n";
    let file = file("args = { stream-interval = 100, max-num-seqs = 4 }", class, text);
    let plan = plan(&file, Some(Method::Race), 1, Budget::default());
    let report = tuned(&plan, &mut laboratory(&file, &plan));
    assert!(report.winner.as_ref().is_some_and(|winner| winner.setting.is_empty()), "{:?}", report.trials);
    let text = table::text(&report, &plan.goal);
    assert!(text.contains("requests fail") && text.contains("so many requests fail that a.e2el.p90"), "{text}");
}
