//! Findings in simulated time: planted incidents are named within two minutes, and days of good
//! traffic have no finding.
//!
//! `SLUICE_LAB_DAYS=7` simulates a week. The ignored test plays the days in `config/lab`, seven
//! times in a row (minutes in a release build, gigabytes of memory).

use std::path::Path;

use crate::{LabFile, LabRun, Scenario, run};
use sluice_online::findings::Cause;

/// Three engines in the recommended arrangement.
const GATEWAY: &str = r#"
[[model]]
name = "llama-3.2-1b"
[[pool]]
name = "all"
long_prefix = { threshold = "5k", slots = 1 }
[[pool.backend]]
name = "gpu0"
url = "http://127.0.0.1:8000"
[[pool.backend]]
name = "gpu1"
url = "http://127.0.0.1:8001"
[[pool.backend]]
name = "gpu2"
url = "http://127.0.0.1:8002"
"#;

fn play(engines: &str, traffic: &str, seed: u64) -> LabRun {
    let text = format!("gateway = '''{GATEWAY}'''\n{engines}\n{traffic}\n");
    let file = LabFile::parse(&text, "test").unwrap();
    let scenario = Scenario { file, folder: "/".into() };
    run(&scenario.lab(&scenario.file.variants()[0]).unwrap(), seed).unwrap()
}

fn engines(change: &str) -> String {
    let table = "gpu = \"l4\"\nmodel = \"llama-3.2-1b\"\nargs = { max-model-len = 32768, stream-interval = 5 }";
    let other = if change.is_empty() {
        String::new()
    } else {
        format!("[[engine]]\nbackend = [\"gpu1\"]\n{table}\nchange = [{change}]\n")
    };
    format!("[[engine]]\n{table}\n{other}")
}

const CLASSES: &str = r#"class = [
    { name = "short", weight = 17, in = "lognormal:300:0.8:4500", out = "lognormal:60:0.6:400" },
    { name = "long", weight = 2, in = "lognormal:8000:0.5:24000", out = 60 },
    { name = "embedding", weight = 1, in = 50, out = 1 },
]"#;

#[test]
fn incidents_are_named_within_minutes_and_nothing_else() {
    let steady = format!("[[traffic]]\n{CLASSES}\nsteps = [[4, 900]]");
    for (change, expected) in [
        ("{ at = \"10m\", slower = 10.0 }, { at = \"13m\", slower = 1.0 }", Some((Cause::SlowEngine, 720.0))),
        ("{ at = \"10m\", hang = true }, { at = \"13m\", resume = true }", Some((Cause::SilentEngine, 720.0))),
        ("{ at = \"10m\", stop = true }, { at = \"13m\", start = true }", Some((Cause::EngineDown, 720.0))),
        ("{ at = \"10m\", stop = true }, { at = \"605s\", start = true }", None),
        ("{ at = \"10m\", stall = \"3s\" }", None),
    ] {
        let found = play(&engines(change), &steady, 1).findings;
        let first = found.first().map(|(at, finding)| (finding.cause, *at));
        assert_eq!(first.map(|(cause, _)| cause), expected.map(|(cause, _)| cause), "{change}: {found:#?}");
        assert!(first.zip(expected).is_none_or(|((_, at), (_, until))| at <= until), "{change}: {found:#?}");
        assert!(found.iter().all(|(_, finding)| finding.subject == "gpu1"), "{change}: {found:#?}");
    }
    let burst = play(&engines(""), &format!("[[traffic]]\n{CLASSES}\nsteps = [[4, 600], [60, 120]]"), 1).findings;
    let found: Vec<(Cause, bool)> = burst.iter().map(|(at, finding)| (finding.cause, *at <= 720.0)).collect();
    assert_eq!(found, [(Cause::Burst, true)], "{burst:#?}");
}

/// The rate follows the hours, with a peak at 15:00.
#[test]
fn days_of_good_traffic_have_no_finding() {
    let days: usize = std::env::var("SLUICE_LAB_DAYS").map_or(1, |days| days.parse().unwrap());
    let rate = |quarter: u32| 1.1 - 0.9 * (f64::from(quarter) / 96.0 * std::f64::consts::TAU + 0.78).cos();
    let day: Vec<String> = (0..96).map(|quarter| format!("[{:.2}, 900]", rate(quarter))).collect();
    let steps = vec![day.join(", "); days].join(", ");
    let run = play(&engines(""), &format!("[[traffic]]\nburstiness = 0.6\n{CLASSES}\nsteps = [{steps}]"), 1);
    println!("{} requests in {days} days; findings: {:#?}", run.result.requests.len(), run.findings);
    assert!(run.findings.is_empty(), "{:#?}", run.findings);
}

#[test]
#[ignore = "takes minutes and gigabytes"]
fn the_days_of_the_configuration_seven_times_in_a_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/lab");
    for (path, variant) in [("tuner/engines/day.toml", 0), ("autoscale/day.toml", 0)] {
        let mut scenario = Scenario::load(&root.join(path)).unwrap();
        for traffic in &mut scenario.file.traffic {
            traffic.steps = traffic.steps.repeat(7);
        }
        let run = run(&scenario.lab(&scenario.file.variants()[variant]).unwrap(), 1).unwrap();
        let found: Vec<String> =
            run.findings.iter().map(|(at, finding)| format!("{:.2} h: {}", at / 3_600.0, finding.sentence)).collect();
        println!("{path}: {} requests, findings: {found:#?}", run.result.requests.len());
        assert!(found.len() <= 7, "{path}: {found:#?}");
    }
}
