//! The classes of the gateway in a simulation: the tuner judges requests by class, and results are
//! divided by class.

use std::path::PathBuf;
use std::time::Duration;

use super::{SMALL, config, engines, mixed};
use crate::measure::Measured;
use crate::{Lab, LabFile, Measure, Options, Scenario, Study, run};

#[test]
fn the_tuner_judges_a_request_by_the_objectives_of_its_class() {
    let class = |name: &str, range: &str, ttft: &str| {
        format!("[[class]]\nname = \"{name}\"\nprompt_tokens = {{ {range} }}\nslo = {{ ttft = \"{ttft}\" }}\n")
    };
    let attainment = |short: &str, long: &str| {
        let keys = class("short", "max = \"5k\"", short) + &class("long", "min = \"5k\"", long);
        let run = run(&Lab::new(config(1, &keys), engines(1, &[]), vec![mixed(20)]), 1).unwrap();
        let is_long = |record: &&sluice_bench::Record| record.prompt_tokens >= 5_000;
        let requests = &run.result.requests;
        let share = requests.iter().filter(is_long).count() as f64 / requests.len() as f64;
        (run.window.score(Duration::from_secs(20)).attainment, share)
    };
    let (attained, long) = attainment("1us", "100s");
    assert!((attained - long).abs() < 0.02, "the long ones alone meet theirs: {attained} and {long}");
    let (attained, long) = attainment("100s", "1us");
    assert!((attained - (1.0 - long)).abs() < 0.02, "the short ones alone meet theirs: {attained} and {long}");
}

#[test]
fn a_measure_names_a_class_of_the_traffic_or_of_the_gateway() {
    let mut plan = mixed(5);
    if let sluice_bench::RequestSource::Classes(classes) = &mut plan.workload.source {
        (classes[0].name, classes[1].name) = ("chat".to_owned(), "document".to_owned());
    }
    let run = run(&Lab::new(config(1, ""), engines(1, &[]), vec![plan]), 1).unwrap();
    let measured = Measured::of(&run);
    let value = |name: &str| measured.value(&name.parse::<Measure>().unwrap());
    for (traffic, gateway) in [("chat", "short"), ("document", "long")] {
        let of = |class: &str| ["rate", "ttft.p99", "failed"].map(|measure| value(&format!("{class}.{measure}")));
        assert!(of(traffic)[0] > 0.0);
        assert_eq!(of(traffic), of(gateway));
    }
    let scenario = Scenario { file: LabFile::parse(SMALL, "lab.toml").unwrap(), folder: PathBuf::from(".") };
    let options = Options { seed: 1, seeds: 1, threads: 1, keep: false };
    let study = |name: &str| Study::run(&scenario, &scenario.file.variants(), &[name.parse().unwrap()], options);
    assert!(study("short.failed").is_ok());
    let error = study("brief.failed").unwrap_err().to_string();
    assert!(error.ends_with("and the classes of the gateway are long, short"), "{error}");
}
