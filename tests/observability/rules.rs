//! The recording rules and alerts.
//!
//! promtool accepts them. Each alert has a test and a section in `grafana/README.md`.

use std::collections::BTreeSet;
use std::fs;

use crate::metrics::complaints;
use crate::promtool::promtool;
use crate::{path, read};

const RULES: &str = "prometheus/rules.yml";
const ALERTS: &str = "prometheus/alerts.yml";
const TESTS: [&str; 2] = ["prometheus/test.yml", "prometheus/test-days.yml"];
/// Beginning of a test in a file of tests for rules.
const TEST: &str = "\n  - name: ";
const ALERT: &str = "- alert: ";

fn values<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| line.trim_start().strip_prefix(key))
}

/// The tests of an alert. Each becomes a separate file, which has the head of the original file and
/// this one test.
fn tests_of(alert: &str) -> Vec<String> {
    let of_file = |file: &str| {
        let text = read(file);
        let (head, tests) = text.split_once(TEST).unwrap();
        let about = |test: &&str| test.split_whitespace().any(|word| word == alert);
        let found = tests.split(TEST).filter(about).map(|test| format!("{head}{TEST}{test}"));
        found.collect::<Vec<_>>()
    };
    TESTS.iter().flat_map(|file| of_file(file)).collect()
}

/// The file of alerts, changed so that the expression of the alert `name` never holds.
fn without(alerts: &str, name: &str) -> String {
    let (before, rest) = alerts.split_once(&format!("{ALERT}{name}\n")).unwrap();
    let (_, after) = rest.split_once("        labels:").unwrap();
    format!("{before}{ALERT}{name}\n        expr: vector(0) > 1\n        labels:{after}")
}

#[test]
fn promtool_accepts_the_rules() {
    for file in [RULES, ALERTS] {
        let Some((ok, said)) = promtool(&["check", "rules", path(file).to_str().unwrap()], "") else { return };
        assert!(ok, "{said}");
    }
    let Some((ok, said)) = promtool(&["check", "config", path("prometheus/prometheus.yml").to_str().unwrap()], "")
    else {
        return;
    };
    assert!(ok, "{said}");
}

#[test]
fn the_rules_name_only_metrics_and_labels_that_exist() {
    for file in [RULES, ALERTS] {
        let text = read(file);
        let records: BTreeSet<&str> = values(&text, "- record: ").collect();
        let is_name = |line: &&str| ["#", "- name:"].iter().any(|start| line.trim_start().starts_with(start));
        for line in text.lines().filter(|line| !is_name(line)) {
            assert_eq!(complaints(line), [""; 0], "{file}");
        }
        assert!(file != RULES || records.len() > 10, "no rules were read");
    }
}

#[test]
fn alerts_use_only_recorded_names_that_exist() {
    let (rules, alerts) = (read(RULES), read(ALERTS));
    let records: BTreeSet<&str> = values(&rules, "- record: ").collect();
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_:".contains(c);
    let used: BTreeSet<&str> = alerts.split(|c| !is_name(c)).filter(|word| word.starts_with("sluice:")).collect();
    assert!(used.len() > 5);
    assert!(used.is_subset(&records), "{used:?}");
}

#[test]
fn every_test_of_an_alert_passes() {
    for file in TESTS {
        let Some((ok, said)) = promtool(&["test", "rules", path(file).to_str().unwrap()], "") else { return };
        assert!(ok, "{said}");
    }
}

#[test]
fn every_alert_has_a_case_that_fires_and_one_that_does_not() {
    let alerts = read(ALERTS);
    let names: Vec<&str> = values(&alerts, ALERT).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        let tests = tests_of(name);
        assert!(!tests.is_empty(), "{name} has no test");
        let folder = tempfile::tempdir().unwrap();
        fs::copy(path(RULES), folder.path().join("rules.yml")).unwrap();
        fs::write(folder.path().join("alerts.yml"), without(&alerts, name)).unwrap();
        for test in &tests {
            let asks = format!("ALERTS{{alertname=\"{name}\",alertstate=\"firing\"}}");
            let silent = test.lines().any(|line| line.contains(name) && line.contains("exp_samples: []"));
            // The expected samples list all series that fire. So a test with at least two input
            // series is taken to contain one for which the alert stays silent.
            let complete = test.contains(&format!("expr: {asks}\n")) && test.matches("series: ").count() > 1;
            assert!(silent && complete, "{name} has no case in which it does not fire");
            let file = folder.path().join("test.yml");
            fs::write(&file, test).unwrap();
            let Some((ok, _)) = promtool(&["test", "rules", file.to_str().unwrap()], "") else { return };
            let fires =
                test.lines().any(|line| line.contains("labels: 'ALERTS") && line.contains(&format!("\"{name}\"")));
            assert!(!ok || !fires, "the test of {name} passes without its expression");
            assert!(fires, "{name} has no case that fires");
        }
    }
}

#[test]
fn the_documentation_has_every_alert() {
    let (alerts, readme) = (read(ALERTS), read("README.md"));
    let names: BTreeSet<&str> = values(&alerts, ALERT).collect();
    let documented: BTreeSet<&str> = values(&readme, "### ").filter(|title| title.starts_with("Sluice")).collect();
    assert_eq!(names, documented);
}
