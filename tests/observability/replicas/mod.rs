//! Every expression of every panel and rule, queried from a real Prometheus that scrapes two loaded
//! gateways.
//!
//! Each expression must return data, unless its table or [`QUIET`] gives a reason. Each is queried
//! three times for the same moment: for the first replica, for the second and for both. The value
//! for both must follow from the two single values as [`Replicas`] says for the expression. Then
//! one engine is killed, and the panels of both replicas together must show one backend less, not
//! two.
//!
//! `SLUICE_BIN` names another build of sluice.

mod deployment;
mod http;
mod prometheus;
mod tails;

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::boards;
use crate::metrics::{named, selecting};
use crate::panel::{Replicas, Target};
use deployment::{Deployment, KEYS, eventually};
use prometheus::{Prometheus, Vector};

/// Maximum seconds of load; the load also ends with the test.
const LOAD: u32 = 120;
/// Requests that each replica completes before the queries.
const COMPLETED: f64 = 160.0;
/// Age of the queried moment in seconds. Prometheus has stored every scrape of a moment that is so
/// old.
const AGO: f64 = 2.0;
/// The window that replaces `$__rate_interval`.
const WINDOW: &str = "15s";
/// Allowed relative error of sums of floats.
const ROUNDING: f64 = 1e-9;
/// Metrics of alerts that have no series in this test, each with the reason.
const QUIET: [(&str, &str); 3] = [
    ("sluice_finding", "nothing is wrong until an engine is killed"),
    ("sluice_tls_certificate_expiry_timestamp_seconds", "the gateways of this test use no TLS"),
    ("sluice_engines_wanted", "no pool of this test has autoscale"),
];

struct Asked<'a> {
    prometheus: &'a Prometheus,
    replicas: [String; 2],
    at: f64,
}

/// If the expression is a quantile, the same expression with counts since the start in place of
/// rates.
///
/// Prometheus extrapolates the rate of each bucket separately, so a quantile of the rates of two
/// replicas can lie just outside the range of their single quantiles. A quantile of counts cannot.
fn of_counts(expr: &str) -> String {
    if expr.contains("histogram_quantile") { expr.replace("rate(", "last_over_time(") } else { expr.to_owned() }
}

/// The expression with values in place of all variables except the replica.
fn filled(expr: &str) -> String {
    let all = ["$class", "$pool", "$model", "$key"].map(|name| (name, ".*"));
    let values = [("$job", "gw"), ("$__rate_interval", WINDOW)];
    values.iter().chain(&all).fold(expr.to_owned(), |expr, (name, value)| expr.replace(name, value))
}

impl Asked<'_> {
    /// The values for both replicas, queried as Grafana queries them.
    fn both(&self, target: &Target) -> Vector {
        let [a, b] = &self.replicas;
        self.prometheus.query(&filled(&target.expr).replace("$instance", &format!("{a}|{b}")), Some(self.at))
    }

    fn three(&self, expr: impl Fn(&str) -> String) -> [Vector; 3] {
        let [a, b] = &self.replicas;
        [a.clone(), b.clone(), format!("{a}|{b}")].map(|one| self.prometheus.query(&expr(&one), Some(self.at)))
    }

    fn panel(&self, target: &Target) -> [Vector; 3] {
        let expr = of_counts(&filled(&target.expr));
        self.three(|replicas| expr.replace("$instance", replicas))
    }
}

fn disagreement(replicas: Replicas, [a, b, both]: &[Vector; 3]) -> Option<String> {
    let known: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let close = |left: f64, right: f64| (left - right).abs() <= ROUNDING * left.abs().max(right.abs()).max(1.0);
    let right = |(labels, value): (&String, &f64)| {
        let each = [a.get(labels), b.get(labels)];
        let of_each = || each.iter().copied().flatten().copied();
        match replicas {
            Replicas::Add => close(of_each().sum(), *value),
            Replicas::Apart => of_each().count() == 1 && close(of_each().sum(), *value),
            Replicas::Between => {
                let (least, most) =
                    (of_each().fold(f64::INFINITY, f64::min), of_each().fold(f64::NEG_INFINITY, f64::max));
                (least <= *value && *value <= most) || close(least, *value) || close(most, *value)
            }
        }
    };
    if let Some(wrong) = both.iter().find(|one| !right(*one)) {
        return Some(format!("{wrong:?} does not follow from {a:?} and {b:?}"));
    }
    let lost = known.into_iter().find(|labels| replicas != Replicas::Between && !both.contains_key(*labels));
    lost.map(|labels| format!("{labels} is missing for both"))
}

/// Metrics of engines that have no series in this test. The first exists only with pool.autoscale,
/// the second only after an engine has slept.
const NOT_HERE: [&str; 2] = ["sluice_engine_start_expected_seconds", "sluice_engine_wake_seconds"];

/// Whether an expression is about engines that a gateway runs. The first gateway runs one, so such
/// an expression must have data.
fn runs_engines(expr: &str) -> bool {
    let of_engines = |metric: &str| metric.starts_with("sluice_engine_") && !NOT_HERE.contains(&metric);
    named(expr).iter().any(|(metric, _)| of_engines(metric))
}

fn panels(asked: &Asked<'_>, complaints: &mut Vec<String>) {
    let (mut with_data, mut empty) = (0, Vec::new());
    let boards = boards::all();
    let of_panels = boards.iter().flat_map(|board| {
        board.panels.iter().flat_map(move |panel| panel.targets.iter().map(move |one| (board.name, panel.title, one)))
    });
    let marks = boards::marks();
    let of_marks = marks.iter().map(|(name, _, target)| ("marks", *name, target));
    for (board, title, target) in of_panels.chain(of_marks) {
        if !asked.both(target).is_empty() {
            with_data += 1;
            let values = asked.panel(target);
            complaints.extend(
                disagreement(target.replicas, &values).map(|why| format!("{board}, {title}: {why}: {}", target.expr)),
            );
        } else if let Some(why) = target.may_be_empty.filter(|_| !runs_engines(&target.expr)) {
            empty.push(format!("{board}, {title}: {why}"));
        } else {
            complaints.push(format!("{board}, {title} has no data: {}", target.expr));
        }
    }
    println!(
        "panels: {with_data} expressions with data; {} are empty as expected:\n  {}",
        empty.len(),
        empty.join("\n  ")
    );
}

/// Panels that must show each of these values of a label.
const PARTS: [(&str, [&str; 2], &[&str]); 3] = [
    (
        "class",
        ["short", "long"],
        &["TTFT by class", "TPOT by class", "E2EL by class", "Objectives met by class and model"],
    ),
    (
        "backend",
        ["gpu0", "gpu1"],
        &[
            "Requests by engine",
            "Engine TTFT",
            "Engine TPOT",
            "Prefill pace",
            "Scheduler state",
            "Cache utilization",
            "Preemptions",
        ],
    ),
    (
        "key",
        [KEYS[0][0], KEYS[1][0]],
        &[
            "Requests and shed requests by key",
            "Tokens per second by key",
            "Queue wait by key",
            "TTFT by key",
            "Engine time by key",
        ],
    ),
];

fn parts(asked: &Asked<'_>, complaints: &mut Vec<String>) {
    let boards = boards::all();
    for (label, values, titles) in PARTS {
        for title in titles {
            let panel = boards.iter().flat_map(|board| &board.panels).find(|panel| panel.title == *title);
            let shown: String = asked.both(&panel.unwrap().targets[0]).into_keys().collect();
            let lacks = values.iter().filter(|value| !shown.contains(&format!("\"{label}\":\"{value}\"")));
            complaints.extend(lacks.map(|value| format!("{title} has no {label} {value}: {shown}")));
        }
    }
}

fn rules(asked: &Asked<'_>, complaints: &mut Vec<String>) {
    let (mut recorded, mut alerts) = (0, 0);
    for (name, expr, kind) in asked.prometheus.rules() {
        if kind == "recording" {
            let values = asked.three(|replicas| selecting(&of_counts(&expr), replicas));
            if asked.prometheus.query(&expr, Some(asked.at)).is_empty() {
                complaints.push(format!("{name} has no data: {expr}"));
            }
            complaints.extend(disagreement(Replicas::Between, &values).map(|why| format!("{name}: {why}")));
            recorded += 1;
            continue;
        }
        // The expression of an alert is empty while all is well, but its metrics must have series.
        asked.prometheus.query(&expr, Some(asked.at));
        for (metric, _) in named(&expr) {
            let quiet = QUIET.iter().any(|(name, _)| *name == metric);
            if !quiet && asked.prometheus.query(&format!("count({metric})"), Some(asked.at)).is_empty() {
                complaints.push(format!("alert {name}: {metric} has no series"));
            }
        }
        alerts += 1;
    }
    println!("rules: {recorded} recorded with data, {alerts} alerts with series");
    assert!(recorded > 10 && alerts > 15);
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
#[ignore = "needs Prometheus and takes half a minute"]
fn two_replicas_mean_the_same_as_one_and_every_expression_has_data() {
    let mut deployment = Deployment::start();
    let ports: Vec<u16> = deployment.gateways.iter().map(|gateway| gateway.admin).collect();
    let prometheus = Prometheus::start(&ports);
    eventually("both are scraped", || prometheus.query("sum(up)", None).values().sum::<f64>() == 2.0);
    let loads = [(0, KEYS[0], 10.0), (0, KEYS[1], 4.0), (1, KEYS[1], 7.0)];
    let _load = loads.map(|(gateway, [key, _], rate)| deployment.gateways[gateway].load(key, rate, LOAD));
    deployment.gateways.iter().for_each(|gateway| gateway.use_the_rest());
    let completed = "min(sum by (instance) (sluice_requests_total{outcome=\"completed\"}))";
    // The load must have lasted for the whole window of the rates.
    let loaded = "min(sum by (instance) (min_over_time(sluice_requests_total{outcome=\"completed\"}[15s] offset 2s)))";
    // Each gateway has read the pages of the engines twice, so their counters have rates.
    let looked_up = "min(sum by (instance) (rate(sluice_vllm_prefix_cache_queries_total[5m] offset 2s)))";
    eventually("both have served", || {
        deployment.gateways.iter().for_each(|gateway| gateway.tokenize());
        let least = |expr: &str| prometheus.query(expr, None).values().copied().fold(f64::INFINITY, f64::min);
        let served = |value: f64| value.is_finite() && value > 0.0;
        let loaded = served(least(loaded)) && least(completed) >= COMPLETED && least(completed).is_finite();
        loaded && served(least(looked_up))
    });
    let replicas = [0, 1].map(|index| format!("127.0.0.1:{}", ports[index]));
    let asked = Asked { prometheus: &prometheus, replicas, at: now() - AGO };
    let mut complaints = Vec::new();
    panels(&asked, &mut complaints);
    parts(&asked, &mut complaints);
    rules(&asked, &mut complaints);
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    let traces = prometheus.exemplars("sluice_time_to_first_token_seconds_bucket");
    assert!(!traces.is_empty() && traces.iter().all(|trace| trace.len() == 32), "{traces:?}");
    one_engine_less(&asked, &mut deployment);
}

/// Kills the engine for long prompts, and queries the panels about the pools that both replicas
/// have.
fn one_engine_less(asked: &Asked<'_>, deployment: &mut Deployment) {
    let boards = boards::all();
    let find = |title: &str| {
        let mut panels = boards.iter().flat_map(|board| &board.panels);
        let panel = panels.find(|panel| panel.title == title).unwrap_or_else(|| panic!("no panel {title}"));
        panel.targets[0].clone()
    };
    let shared = |title: &str| {
        let mut target = find(title);
        target.expr = target.expr.replace("$pool", "short|long");
        move |at: f64| Asked { at, replicas: asked.replicas.clone(), ..*asked }.panel(&target)
    };
    let (ready, state) = (shared("Backends ready"), shared("State of backends"));
    let single = |values: [Vector; 3]| values.map(|one| one.values().copied().collect::<Vec<f64>>());
    assert_eq!(single(ready(asked.at)), [[2.0], [2.0], [2.0]]);
    deployment.engines.pop();
    eventually("both replicas and their sum show one ready backend", || single(ready(now())) == [[1.0], [1.0], [1.0]]);
    let states = state(now());
    // 0 is ready; 5, 6 and 7 are probation, ejected and down.
    let is_out = |vector: &Vector| vector.iter().any(|(labels, value)| labels.contains("gpu1") && *value >= 5.0);
    assert!(states.iter().all(|one| one.len() == 2 && is_out(one)), "{states:?}");
    let pending =
        || asked.prometheus.query("ALERTS{alertname=\"SluiceNoBackendReady\",pool=\"long\"}", None).len() == 2;
    eventually("an alert for the pool without a backend begins on both replicas", pending);
    let finding = |metric: &str| {
        let found = asked.prometheus.query(&format!("{metric},cause=\"engine_down\",subject=\"gpu1\"}}"), None);
        found.len()
    };
    eventually("both replicas find the engine down", || finding("sluice_finding{job=\"gw\"") == 2);
    let table = filled(&find("Causes of slow requests").expr).replace("$instance", ".*");
    assert!(!asked.prometheus.query(&table, None).is_empty(), "the table shows the finding");
    eventually("an alert for the finding begins", || finding("ALERTS{alertname=\"SluiceFinding\"") == 1);
    println!("one engine less: 1 ready with one replica and with two, a finding, and two alerts began");
}
