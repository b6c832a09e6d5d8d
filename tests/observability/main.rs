//! Metrics as other tools read them: promtool accepts the page, and the dashboard uses only metrics that exist.
//!
//! `promtool` comes with Prometheus (`apt-get install prometheus`). Without it, the two tests that need it print so and
//! pass: it checks the form of the page and of the dashboard, not the gateway.

use std::io::Write;
use std::process::{Command, Stdio};

use sluice::telemetry::Telemetry;
use sluice::telemetry::families::{self, MetricKind};

const DASHBOARD: &str = include_str!("../grafana/sluice.json");
/// Labels that a scraper adds to every series.
const SCRAPED: [&str; 2] = ["job", "instance"];

/// Runs promtool on `input`; `None`, with a message, when it is not installed.
fn promtool(args: &[&str], input: &str) -> Option<(bool, String)> {
    let spawned =
        Command::new("promtool").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut child) = spawned else {
        eprintln!("skipped: promtool is not installed (apt-get install prometheus)");
        return None;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Some((output.status.success(), said))
}

/// Every expression of the dashboard, its variables replaced as Grafana does.
fn expressions() -> Vec<String> {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let exprs = targets.map(|target| target["expr"].as_str().unwrap());
    exprs
        .map(|expr| {
            expr.replace("$__rate_interval", "1m").replace("$pool", ".*").replace("$model", ".*").replace("$job", ".*")
        })
        .collect()
}

#[test]
fn the_metrics_page_passes_promtool() {
    let telemetry = Telemetry::with(Box::new(Vec::new), None);
    let Some((ok, said)) = promtool(&["check", "metrics"], &telemetry.page()) else { return };
    assert!(ok && said.trim().is_empty(), "{said}");
}

#[test]
fn every_expression_of_the_dashboard_parses() {
    let mut rules = String::from("groups:\n- name: dashboard\n  rules:\n");
    for (index, expr) in expressions().iter().enumerate() {
        rules.push_str(&format!("  - record: dashboard:{index}\n    expr: {}\n", serde_json::to_string(expr).unwrap()));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rules.yml");
    std::fs::write(&path, rules).unwrap();
    let Some((ok, said)) = promtool(&["check", "rules", path.to_str().unwrap()], "") else { return };
    assert!(ok, "{said}");
}

#[test]
fn the_dashboard_names_only_metrics_and_labels_that_exist() {
    for expr in expressions() {
        let mut rest = expr.as_str();
        let mut found = 0;
        while let Some(at) = ["sluice_", "process_"].iter().filter_map(|start| rest.find(start)).min() {
            rest = &rest[at..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let (name, after) = rest.split_at(end);
            let family = families::ALL.iter().find(|family| match family.kind {
                MetricKind::Histogram(_) => name == format!("{}_bucket", family.name),
                MetricKind::Counter | MetricKind::Gauge => name == family.name,
            });
            let family = family.unwrap_or_else(|| panic!("{name} does not exist: {expr}"));
            if let Some(selector) = after.strip_prefix('{') {
                for matcher in selector.split('}').next().unwrap().split(',') {
                    let label = matcher.split(['=', '!']).next().unwrap();
                    assert!(family.labels.contains(&label) || SCRAPED.contains(&label), "{label} of {name}: {expr}");
                }
            }
            rest = after;
            found += 1;
        }
        assert!(found > 0, "no metric in {expr}");
    }
}

#[test]
fn the_dashboard_shows_every_family() {
    let shown = expressions().join(" ") + DASHBOARD;
    for family in families::ALL {
        let by_hand = ["process_max_fds", "process_start_time_seconds"].contains(&family.name);
        assert!(by_hand || shown.contains(family.name), "{} is on no panel", family.name);
    }
}
