//! Whole simulations: results, determinism, scenarios, plans.
//!
//! Each topic has a file. This file holds shared helpers and tests of the default behaviour.

mod autoscale;
mod classes;
mod experiments;
mod faults;
mod findings;
mod kv_limit;
mod loops;
mod measured;
mod engine_tuner;
mod plans;
mod records;
mod scenarios;
mod speculation;
mod tuner;

use std::path::Path;
use std::time::Duration;

use crate::prices::Prices;
use crate::{
    EngineChange, EngineSetup, Lab, LabFile, LabRun, Options, Scenario, Study, Variant, expect, rate, run, table,
};
use sluice_bench::search::SearchGoal;
use sluice_bench::{Arrival, Class, Extent, Length, Prefix, PrefixKind, RunPlan, Sessions, Workload};
use sluice_config::{Config, Machine, Surroundings};

const MODEL: &str = "llama-3.1-8b";

fn config(backends: usize, keys: &str) -> Config {
    let mut text = format!("[[model]]\nname = \"{MODEL}\"\n[[pool]]\nname = \"all\"\nmodels = [\"*\"]\n{keys}\n");
    for index in 0..backends {
        text += &format!("[[pool.backend]]\nname = \"gpu{index}\"\nurl = \"http://127.0.0.1:{}\"\n", 8000 + index);
    }
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    Config::parse(&text, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config
}

fn engines(count: usize, flags: &[&str]) -> Vec<EngineSetup> {
    let flags = [&[MODEL, "--max-num-seqs", "256"], flags].concat();
    (0..count).map(|index| EngineSetup::vllm(&format!("gpu{index}"), "h200", None, MODEL, &flags).unwrap()).collect()
}

fn mixed(seconds: u64) -> RunPlan {
    let short = Class::new("short", Length::Exactly(200), Length::Exactly(128), 30.0);
    let long = Class::new("long", Length::Exactly(16_000), Length::Exactly(64), 2.0);
    let workload = Workload::of_classes(MODEL, vec![short, long], 0);
    RunPlan::new(workload, Arrival::Poisson { rate: 32.0 }, Extent::Lasting(Duration::from_secs(seconds)))
}

/// A percentile over the completed requests of a class, milliseconds.
fn percentile(run: &LabRun, class: u32, of: impl Fn(&sluice_bench::Record) -> f64, share: f64) -> f64 {
    let records = run.result.requests.iter().filter(|record| record.class == class && record.is_completed());
    let mut values: Vec<f64> = records.map(|record| of(record) * 1e3).collect();
    values.sort_by(f64::total_cmp);
    values[(share * (values.len() - 1) as f64).round() as usize]
}

#[test]
fn least_work_keeps_short_requests_away_from_long_prefills_and_round_robin_does_not() {
    let lab = |policy: &str| Lab::new(config(2, &format!("policy = \"{policy}\"")), engines(2, &[]), vec![mixed(45)]);
    let [robin, work] = ["round_robin", "least_work"].map(|policy| run(&lab(policy), 1).unwrap());
    for (name, run) in [("round_robin", &robin), ("least_work", &work)] {
        let at = |class, share, of: fn(&sluice_bench::Record) -> f64| percentile(run, class, of, share);
        println!(
            "{name:<12} short TTFT P50 {:.0} P99 {:.0}, E2EL P99 {:.0}; long TTFT P99 {:.0}, E2EL P99 {:.0}",
            at(0, 0.5, |record| record.ttft),
            at(0, 0.99, |record| record.ttft),
            at(0, 0.99, |record| record.latency),
            at(1, 0.99, |record| record.ttft),
            at(1, 0.99, |record| record.latency),
        );
        assert!(run.result.requests.iter().all(sluice_bench::Record::is_completed));
        assert_eq!(run.result.requests.len() as u64, run.engines.iter().map(|engine| engine.requests).sum::<u64>());
        let tokens: u64 = run.result.requests.iter().filter_map(|record| record.output_tokens).sum();
        let gaps: usize = run.result.requests.iter().map(|record| record.itls.len() + 1).sum();
        assert_eq!(tokens, gaps as u64, "a client sees each token as an event");
    }
    let ttft = |run| percentile(run, 0, |record| record.ttft, 0.99);
    assert!(ttft(&work) < 0.8 * ttft(&robin), "{} and {}", ttft(&work), ttft(&robin));
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_does_not() {
    let lab = Lab::new(config(2, ""), engines(2, &[]), vec![mixed(5)]);
    let bytes = |seed| serde_json::to_vec(&run(&lab, seed).unwrap().result).unwrap();
    let first = bytes(7);
    assert!(first.len() > 100_000);
    assert!(first == bytes(7), "a second run differs");
    assert!(first != bytes(8));
    let on_another_thread = std::thread::scope(|scope| scope.spawn(|| bytes(7)).join().unwrap());
    assert!(first == on_another_thread, "a run on another thread differs");
}

#[test]
fn an_engine_that_slows_down_takes_longer_and_gets_less() {
    let usual = engines(2, &[]);
    let mut slower = usual.clone();
    slower[1] = slower[1].clone().changing(Duration::from_secs(5), EngineChange::Slower(3.0));
    let short = || {
        let class = Class::new("short", Length::Exactly(200), Length::Exactly(64), 1.0);
        let workload = Workload::of_classes(MODEL, vec![class], 0);
        RunPlan::new(workload, Arrival::Poisson { rate: 20.0 }, Extent::Lasting(Duration::from_secs(30)))
    };
    let [usual, slower] =
        [usual, slower].map(|engines| run(&Lab::new(config(2, ""), engines, vec![short()]), 3).unwrap());
    let tpot = |run: &LabRun, late: bool| {
        let on = |record: &&sluice_bench::Record| record.backend.as_deref() == Some("gpu1");
        let records = run.result.requests.iter().filter(on).filter(|record| (record.sent > 5.0) == late);
        let values: Vec<f64> = records.filter_map(sluice_bench::Record::tpot).collect();
        values.iter().sum::<f64>() / values.len() as f64
    };
    let ratio = tpot(&slower, true) / tpot(&usual, true);
    assert!((2.5..3.3).contains(&ratio), "{ratio}");
    assert!(slower.engines[1].requests < usual.engines[1].requests / 2, "{:?}", slower.engines[1].requests);
}

#[test]
fn an_engine_that_was_slow_for_a_while_gets_its_share_again() {
    let mut engines = engines(2, &[]);
    let change = |engine: EngineSetup, at, change| engine.changing(Duration::from_secs(at), change);
    engines[1] = change(engines[1].clone(), 5, EngineChange::Slower(8.0));
    engines[1] = change(engines[1].clone(), 30, EngineChange::Slower(1.0));
    let class = Class::new("short", Length::Exactly(300), Length::Exactly(16), 1.0);
    let workload = Workload::of_classes(MODEL, vec![class], 0);
    let load = RunPlan::new(workload, Arrival::Poisson { rate: 60.0 }, Extent::Lasting(Duration::from_secs(180)));
    let run = run(&Lab::new(config(2, ""), engines, vec![load]), 1).unwrap();
    let late: Vec<_> = run.result.requests.iter().filter(|record| record.sent > 120.0).collect();
    let on_it = late.iter().filter(|record| record.backend.as_deref() == Some("gpu1")).count();
    let share = on_it as f64 / late.len() as f64;
    assert!((0.4..0.6).contains(&share), "90 s after it was slow it gets {share:.3}");
}

#[test]
fn an_engine_that_stops_breaks_its_streams_and_the_other_serves_what_has_not_begun() {
    let mut engines = engines(2, &[]);
    let (down, up) = (Duration::from_secs(4), Duration::from_secs(8));
    engines[0] = engines[0].clone().changing(down, EngineChange::Stop).changing(up, EngineChange::Start);
    let run = run(&Lab::new(config(2, ""), engines, vec![mixed(16)]), 5).unwrap();
    let failed: Vec<_> = run.result.requests.iter().filter(|record| record.is_failed()).collect();
    assert!(!failed.is_empty() && failed.len() < 100, "{}", failed.len());
    assert!(failed.iter().all(|record| (record.ended - 4.0).abs() < 1e-9), "only what was streaming fails");
    let on_first = |from: f64, to: f64| {
        let sent = run.result.requests.iter().filter(|record| (from..to).contains(&record.sent));
        sent.filter(|record| record.backend.as_deref() == Some("gpu0")).count()
    };
    assert_eq!(on_first(4.1, 8.0), 0);
    assert!(on_first(12.0, 16.0) > 10, "it is readmitted");
}

#[test]
fn conversations_find_their_earlier_turns_in_the_cache() {
    let prefix = Prefix { kind: PrefixKind::Extra(512), ..Prefix::default() };
    let class = Class { prefix, ..Class::new("chat", Length::Exactly(200), Length::Exactly(100), 1.0) };
    let workload = Workload::of_classes(MODEL, vec![class], 0).with_text_prompts();
    let plan = RunPlan::new(workload, Arrival::Poisson { rate: 2.0 }, Extent::Lasting(Duration::from_secs(20)));
    let sessions = Sessions { turns: Length::Exactly(4), later: None, think: 2.0 };
    let plan = RunPlan { sessions: Some(sessions), ..plan };
    let run = run(&Lab::new(config(1, ""), engines(1, &[]), vec![plan]), 9).unwrap();
    let turns = |turn| run.result.requests.iter().filter(move |record| record.session.unwrap().1 == turn);
    assert_eq!(turns(0).count(), turns(3).count(), "every conversation has all of its turns");
    assert!(turns(3).all(|record| record.prompt_tokens == 512 + 4 * 200 + 3 * 100));
    let side = &run.engines[0].side;
    // An unbounded cache misses only partial blocks and the new messages of each turn.
    let hits = side.prefix_hits / side.prefix_queries;
    assert!((0.70..0.85).contains(&hits), "{hits}");
}

#[test]
fn a_closed_loop_keeps_its_requests_in_flight() {
    let class = Class::new("short", Length::Exactly(100), Length::Exactly(20), 1.0);
    let workload = Workload::of_classes(MODEL, vec![class], 0);
    let plan = RunPlan::new(workload, Arrival::ClosedLoop { concurrency: 8 }, Extent::Requests(100));
    let run = run(&Lab::new(config(1, ""), engines(1, &[]), vec![plan]), 1).unwrap();
    assert_eq!(run.result.requests.len(), 100);
    assert_eq!(run.engines[0].side.running_peak, 8.0);
}

/// `cargo test --release -p sluice-lab the_speed -- --ignored --nocapture`
#[test]
#[ignore = "prints a speed; nothing to assert on a shared machine"]
fn the_speed() {
    for (name, keys) in [("round robin", "policy = \"round_robin\""), ("least work", "")] {
        let lab = Lab::new(config(2, keys), engines(2, &[]), vec![mixed(300)]);
        let begun = std::time::Instant::now();
        let run = run(&lab, 1).unwrap();
        let took = begun.elapsed().as_secs_f64();
        let steps: u64 = run.engines.iter().map(|engine| engine.steps).sum();
        let tokens: u64 = run.result.requests.iter().filter_map(|record| record.output_tokens).sum();
        println!(
            "{name}: {:.0} s in {took:.2} s, {:.0} x; {} requests, {steps} steps, {tokens} tokens",
            run.result.duration,
            run.result.duration / took,
            run.result.requests.len(),
        );
    }
}

#[test]
fn scenarios_meet_their_expectations() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = |folder: &str| {
        let entries = std::fs::read_dir(root.join(folder)).unwrap();
        let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    let mut unmet = Vec::new();
    let scenarios = files("tests/scenarios");
    assert!(scenarios.len() >= 10, "{scenarios:?}");
    for path in &scenarios {
        let mut scenario = Scenario::load(path).unwrap_or_else(|error| panic!("{error}"));
        let expected = std::mem::take(&mut scenario.file.expect);
        assert!(!expected.is_empty(), "{}: expects nothing", path.display());
        let mut measures = expect::measures(&expected).unwrap();
        measures.dedup();
        let options = Options { seed: 1, seeds: scenario.file.seeds, threads: 2, keep: false };
        let study = Study::run(&scenario, &scenario.file.variants(), &measures, options);
        let study = study.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        println!("{}", table::text(&study));
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        unmet.extend(expect::unmet(&study, &expected).unwrap().into_iter().map(|unmet| format!("{name}: {unmet}")));
    }
    assert!(unmet.is_empty(), "{unmet:#?}");
}

#[test]
fn the_samples_in_config_are_valid() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/lab");
    for (file, engines) in [("mixed.toml", 2), ("plan.toml", 1)] {
        let scenario = Scenario::load(&folder.join(file)).unwrap_or_else(|error| panic!("{error}"));
        for variant in scenario.file.variants() {
            let lab = scenario.lab(&variant).unwrap_or_else(|error| panic!("{}: {error}", variant.name));
            assert_eq!(lab.engines.len(), engines, "{file}");
        }
    }
    assert!(Prices::load(&folder.join("prices.toml")).unwrap().per_hour.contains_key("h200"));
}

/// Every placement scenario compares the default policy, which is named first, with the same four
/// others.
#[test]
fn the_placement_scenarios_are_valid() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/lab/placement");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    assert!(files.len() >= 10, "{files:?}");
    for path in files {
        let scenario = Scenario::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let variants = scenario.file.variants();
        let names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
        assert_eq!(
            names,
            ["least_work", "round_robin", "fewest_requests", "two_choices", "split"],
            "{}",
            path.display()
        );
        for variant in &variants {
            let lab = scenario.lab(variant).unwrap_or_else(|error| panic!("{}: {error}", variant.name));
            assert_eq!(lab.config.pools.len(), if variant.name == "split" { 2 } else { 1 });
        }
    }
}

#[test]
fn an_invalid_scenario_says_what_to_change() {
    let error = |text: &str| {
        let file = match LabFile::parse(text, "lab.toml") {
            Ok(file) => file,
            Err(error) => return error.to_string(),
        };
        let scenario = Scenario { file, folder: "/".into() };
        let variant = scenario.file.variants().remove(0);
        scenario.lab(&variant).and_then(|lab| run(&lab, 1)).unwrap_err().to_string()
    };
    let class = "class = [{ name = \"a\", rate = 1, in = 10, out = 2 }]";
    let traffic = format!("[[traffic]]\n{class}\n");
    let pool = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"all\"\nmodels = [\"m\"]\n[[pool.backend]]\nname = \"g\"\nurl = \"http://g:1\"";
    let configured = |engines: &str| format!("gateway = '''{pool}'''\n{traffic}{engines}");
    for (text, says) in [
        (traffic.replace("rate", "weight"), "traffic needs one of rate"),
        (format!("{traffic}rate = 3\n"), "a rate of its own or one for each class"),
        (format!("{traffic}speed = 3\n"), "lab.toml: traffic[0].speed: unknown field"),
        (format!("banana = 1\n{traffic}"), "banana: unknown field"),
        (format!("seeds = 0\n{traffic}"), "seeds: 0 runs of each variant"),
        ("[[traffic]]\nrate = 3\n".to_owned(), "at least one class, or a trace"),
        (format!("{traffic}[[engine]]\ngpu = \"abacus\"\n"), "the engine of \"gpu0\": unknown GPU 'abacus'"),
        (format!("{traffic}[[engine]]\nargs = {{ max-num-seqs = 0 }}\n"), "would not start"),
        (format!("{traffic}[[engine]]\ncount = 0\n"), "0 engines; give between 1 and"),
        (format!("{traffic}[[engine]]\nchange = [{{ at = \"1s\" }}]\n"), "exactly one of slower"),
        (format!("{traffic}[[engine]]\nchange = [{{ at = \"1s\", slower = 0.0 }}]\n"), "slower = 0 is not above 0"),
        (configured("[[engine]]\n[[engine]]\n"), "2 [[engine]] tables have no key 'backend'"),
        (configured("[[engine]]\ncount = 2\n"), "count = 2 in [[engine]] is for files without a configuration"),
        (configured("[[engine]]\nbackend = [\"h\"]\n"), "the engine \"h\" belongs to no backend"),
        (configured("[[engine]]\nbackend = [\"g\"]\n[[engine]]\nbackend = [\"g\"]\n"), "backend \"g\" has two engines"),
        (
            configured("").replace(
                "g:1\"",
                "g:1\"\n[[model]]\nname = \"n\"\n[[pool]]\nname = \"b\"\nmodels = [\"n\"]\n[[pool.backend]]\nname = \"g\"\nurl = \"http://h:1\"",
            ),
            "backends named \"g\" have different addresses",
        ),
        (format!("gateway = \"[[pool]]\"\nconfig = \"x\"\n{traffic}"), "not both"),
        (format!("gateway = \"[pool\"\n{traffic}"), "gateway"),
        (traffic.replace("in = 10", "in = 0"), "'0' is not a length"),
    ] {
        let error = error(&text);
        assert!(error.contains(says), "{text}\n{error}");
    }
}

/// Short requests. One engine serves about a hundred of them per second.
const SMALL: &str =
    "duration = \"20s\"\n[[traffic]]\nclass = [{ name = \"tiny\", rate = 40, in = 2000, out = 4, e2el = \"400ms\" }]\n";

fn scenario(text: &str) -> Scenario {
    Scenario { file: LabFile::parse(text, "lab.toml").unwrap(), folder: "/".into() }
}

#[test]
fn the_highest_rate_holds_and_a_higher_one_does_not() {
    let scenario = scenario(SMALL);
    let lab = |load: f64| scenario.lab(&Variant { load: Some(load), ..Variant::default() }).unwrap();
    let one = lab(1.0);
    let goal = SearchGoal { requests: 300, tolerance: 0.1, ..rate::goal(&one.traffic, 0.99, 1).unwrap() };
    let found = rate::highest_rate(&one, &goal, |_| ()).unwrap();
    let best = found.best.unwrap().rate;
    let attainment = |rate: f64| {
        let mut long = lab(rate / 40.0);
        long.traffic[0].extent = Extent::Requests(500);
        let run = run(&long, 77).unwrap();
        let met = run.result.requests.iter().filter(|record| record.meets(run.result.config.slo_of(0))).count();
        met as f64 / run.result.requests.len() as f64
    };
    assert!(attainment(0.9 * best) > 0.97, "{best}: {}", attainment(0.9 * best));
    assert!(attainment(1.5 * best) < 0.98, "{best}: {}", attainment(1.5 * best));
}

#[test]
fn the_highest_rate_is_not_searched_with_requests_that_do_not_run_to_their_end() {
    for more in ["leave = 0.3", "conversation = { turns = 3 }"] {
        let lab = scenario(&format!("{SMALL}{more}\n")).lab(&Variant::default()).unwrap();
        let error = rate::goal(&lab.traffic, 0.99, 1).unwrap_err().to_string();
        assert!(error.contains("single requests that run to their end"), "{error}");
    }
}

#[test]
fn the_highest_rate_needs_a_share_of_requests_that_may_miss() {
    let lab = scenario(SMALL).lab(&Variant::default()).unwrap();
    for share in [0.0, 1.0, f64::NAN] {
        let error = rate::goal(&lab.traffic, share, 1).unwrap_err().to_string();
        assert!(error.contains("plan.attainment must be above 0 and below 100"), "{error}");
    }
}

#[test]
fn an_engine_runs_on_the_host_that_the_file_names() {
    let profile = |line: &str, folder: &Path| {
        let file = LabFile::parse(&format!("{SMALL}[[engine]]\n{line}\n"), "lab.toml").unwrap();
        let scenario = Scenario { file, folder: folder.to_owned() };
        scenario.lab(&Variant::default()).map(|lab| format!("{:?}", lab.engines[0].sim.profile))
    };
    let quiet = profile("host = \"quiet\"", Path::new("/")).unwrap();
    assert_ne!(quiet, profile("", Path::new("/")).unwrap());
    // Writes a host file next to the scenario, as `sluice sim fit` does.
    let folder = tempfile::tempdir().unwrap();
    let table = sluice_sim::Constants::on_host("quiet").unwrap().table().to_string();
    std::fs::write(folder.path().join("h.toml"), table).unwrap();
    assert_eq!(quiet, profile("host = \"h.toml\"", folder.path()).unwrap());
    let unknown = profile("host = \"mainframe\"", Path::new("/")).unwrap_err().to_string();
    assert!(unknown.contains("unknown host 'mainframe'; built in: busy, pair, quiet, trio"), "{unknown}");
}
