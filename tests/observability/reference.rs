//! The list of metrics in `grafana/README.md`.
//!
//! It is generated from the table of families, between two marks.

use sluice_gateway::telemetry::families::{self, Family, MetricKind};

use crate::{golden, read};

const BEGIN: &str = "<!-- metrics: generated from src/gateway/telemetry/families.rs, do not edit -->\n";
const END: &str = "<!-- end of metrics -->\n";

/// Maximum number of bucket bounds that the list names one by one.
const LISTED: usize = 24;

/// The bucket bounds of a histogram, each with as few digits as possible. Empty for other metrics.
fn bounds(family: &Family) -> String {
    let MetricKind::Histogram(bounds) = family.kind else { return String::new() };
    let each: Vec<String> = bounds.iter().map(f64::to_string).collect();
    if let [first, .., last] = &each[..]
        && each.len() > LISTED
    {
        return format!("; {} buckets from {first} to {last}", each.len());
    }
    format!("; buckets {}", each.join(" "))
}

fn kind(family: &Family) -> &'static str {
    match family.kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram(_) => "histogram",
    }
}

fn table() -> String {
    let mut text = String::from("| metric | kind | labels | what it says |\n|---|---|---|---|\n");
    for family in families::ALL {
        let labels = family.labels.join(", ");
        text += &format!("| `{}` | {} | {labels} | {}{} |\n", family.name, kind(family), family.help, bounds(family));
    }
    text
}

#[test]
fn the_reference_is_that_of_the_table() {
    let readme = read("README.md");
    let (before, rest) = readme.split_once(BEGIN).expect("the first mark");
    let (_, after) = rest.split_once(END).expect("the second mark");
    golden("README.md", &format!("{before}{BEGIN}{}{END}{after}", table()));
}
