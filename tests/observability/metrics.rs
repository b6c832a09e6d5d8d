//! The metrics and labels that an expression names.
//!
//! Tests compare them with the table of metric families.

use sluice_gateway::telemetry::families::{self, Family, MetricKind};

/// Labels that a scraper adds to every series.
const SCRAPED: [&str; 2] = ["job", "instance"];

fn labels(metric: &str) -> Option<Vec<&'static str>> {
    let is = |family: &&Family| match family.kind {
        MetricKind::Histogram(_) => {
            ["_bucket", "_sum", "_count"].iter().any(|end| metric == format!("{}{end}", family.name))
        }
        MetricKind::Counter | MetricKind::Gauge => metric == family.name,
    };
    let family = families::ALL.iter().find(is)?;
    let le = matches!(family.kind, MetricKind::Histogram(_)).then_some("le");
    Some(family.labels.iter().copied().chain(SCRAPED).chain(le).collect())
}

/// Every metric of the gateway in an expression, with the labels in its selector.
pub(crate) fn named(expr: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = expr;
    while let Some(at) = ["sluice_", "process_"].iter().filter_map(|start| rest.find(start)).min() {
        rest = &rest[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let selector = after.strip_prefix('{').and_then(|selector| selector.split('}').next());
        let matchers = selector.into_iter().flat_map(|selector| selector.split(','));
        found.push((name.to_owned(), matchers.filter_map(|m| Some(m.split(['=', '!']).next()?.to_owned())).collect()));
        rest = after;
    }
    found
}

pub(crate) fn complaints(expr: &str) -> Vec<String> {
    let of = |(metric, selected): (String, Vec<String>)| match labels(&metric) {
        None => vec![format!("{metric} does not exist: {expr}")],
        Some(labels) => {
            let unknown = selected.into_iter().filter(|label| !labels.contains(&label.as_str()));
            unknown.map(|label| format!("{metric} has no label {label}: {expr}")).collect()
        }
    };
    named(expr).into_iter().flat_map(of).collect()
}

/// The expression with a matcher for the replicas in every selector of a metric of the gateway.
pub(crate) fn selecting(expr: &str, replicas: &str) -> String {
    let matcher = format!("instance=~\"{replicas}\"");
    let (mut text, mut rest) = (String::new(), expr);
    for (metric, _) in named(expr) {
        let (before, after) = rest.split_once(metric.as_str()).unwrap_or((rest, ""));
        text += &format!("{before}{metric}{{{matcher}");
        rest = match after.strip_prefix('{') {
            Some(selector) => {
                text.push(',');
                selector
            }
            None => {
                text.push('}');
                after
            }
        };
    }
    text + rest
}

#[test]
fn a_matcher_is_added_to_every_selector() {
    let selected = selecting("sum(rate(sluice_shed_total{pool=\"a\"}[1m])) / sluice_slots", "x|y");
    let wanted = "sum(rate(sluice_shed_total{instance=~\"x|y\",pool=\"a\"}[1m])) / sluice_slots{instance=~\"x|y\"}";
    assert_eq!(selected, wanted);
}

#[test]
fn unknown_metrics_and_labels_are_found() {
    assert_eq!(complaints("sum(rate(sluice_shed_total{pool=\"a\",job=\"b\"}[1m]))"), [""; 0]);
    assert_eq!(complaints("sluice_queue_wait_seconds_bucket{le=\"1\"} + sluice_engine_crashes_total"), [""; 0]);
    assert_eq!(complaints("sluice_queue_wait_seconds").len(), 1);
    assert_eq!(complaints("sluice_sheds_total").len(), 1);
    assert_eq!(complaints("sluice_shed_total{model!=\"a\"}").len(), 1);
}
