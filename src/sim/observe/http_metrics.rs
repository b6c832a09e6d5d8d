//! HTTP requests counted as `prometheus-fastapi-instrumentator` does, and metrics of the process.
//!
//! The label `handler` is the template of a known route, and `none` for other paths, which bounds
//! the label sets.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use crate::observe::stats::{Cumulative, Histogram};

const MANY: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
];
const FEW: &[f64] = &[0.1, 0.5, 1.0];

const EXCLUDED: &[&str] = &["/metrics", "/health", "/load", "/ping", "/version", "/server_info"];

#[derive(Clone, Debug)]
pub(crate) struct Requests {
    totals: BTreeMap<(&'static str, String, u16), u64>,
    durations: BTreeMap<(&'static str, String), Histogram>,
    sizes: BTreeMap<&'static str, (u64, u64)>,
    all: Histogram,
}

impl Default for Requests {
    fn default() -> Self {
        Self { totals: BTreeMap::new(), durations: BTreeMap::new(), sizes: BTreeMap::new(), all: Histogram::new(MANY) }
    }
}

impl Requests {
    /// Counts a request that ended. `handler`: the template of the route, `None` for an unknown
    /// path. `size`: bytes of the request's body.
    pub(crate) fn count(
        &mut self,
        handler: Option<&'static str>,
        method: &str,
        status: u16,
        took: Duration,
        size: u64,
    ) {
        let handler = handler.unwrap_or("none");
        if EXCLUDED.contains(&handler) {
            return;
        }
        let seconds = took.as_secs_f64();
        *self.totals.entry((handler, method.to_owned(), status / 100)).or_default() += 1;
        self.durations.entry((handler, method.to_owned())).or_insert_with(|| Histogram::new(FEW)).observe(seconds);
        self.all.observe(seconds);
        let sizes = self.sizes.entry(handler).or_default();
        *sizes = (sizes.0 + 1, sizes.1 + size);
    }

    /// Writes the HTTP metrics; `created` in Unix seconds.
    pub(crate) fn render(&self, out: &mut String, created: f64) {
        let head = |out: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        if !self.totals.is_empty() {
            for (suffix, kind) in [("total", "counter"), ("created", "gauge")] {
                head(out, &format!("http_requests_{suffix}"), kind, "Requests by route, method and status.");
                for ((handler, method, class), count) in &self.totals {
                    let value = if suffix == "total" { *count as f64 } else { created };
                    let labels = format!("handler=\"{handler}\",method=\"{method}\",status=\"{class}xx\"");
                    let _ = writeln!(out, "http_requests_{suffix}{{{labels}}} {value:?}");
                }
            }
            for direction in ["request", "response"] {
                let name = format!("http_{direction}_size_bytes");
                head(out, &name, "summary", "Length of bodies by route, as their header says.");
                for (handler, (count, bytes)) in &self.sizes {
                    let bytes = if direction == "request" { *bytes } else { 0 };
                    let _ = writeln!(out, "{name}_count{{handler=\"{handler}\"}} {count}.0");
                    let _ = writeln!(out, "{name}_sum{{handler=\"{handler}\"}} {bytes}.0");
                }
                head(out, &format!("{name}_created"), "gauge", "When counting began.");
                for handler in self.sizes.keys() {
                    let _ = writeln!(out, "{name}_created{{handler=\"{handler}\"}} {created:?}");
                }
            }
        }
        let bucket = |out: &mut String, name: &str, labels: &str, histogram: &Histogram| {
            let Cumulative { buckets: rows, sum, count: total } = histogram.cumulative(f64::INFINITY);
            let le = |bound: f64| if bound.is_finite() { format!("{bound:?}") } else { "+Inf".to_owned() };
            for (bound, count) in rows.into_iter().chain([(f64::INFINITY, total)]) {
                let labels = match labels.split_once(',') {
                    Some((handler, method)) => format!("{handler},le=\"{}\",{method}", le(bound)),
                    None => format!("le=\"{}\"", le(bound)),
                };
                let _ = writeln!(out, "{name}_bucket{{{labels}}} {count}.0");
            }
            let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
            let _ = writeln!(out, "{name}_count{labels} {total}.0\n{name}_sum{labels} {sum:?}");
        };
        let name = "http_request_duration_highr_seconds";
        head(out, name, "histogram", "Durations of all requests.");
        bucket(out, name, "", &self.all);
        head(out, &format!("{name}_created"), "gauge", "When counting began.");
        let _ = writeln!(out, "{name}_created {created:?}");
        if !self.durations.is_empty() {
            let name = "http_request_duration_seconds";
            head(out, name, "histogram", "Durations by route and method.");
            for ((handler, method), histogram) in &self.durations {
                bucket(out, name, &format!("handler=\"{handler}\",method=\"{method}\""), histogram);
            }
            head(out, &format!("{name}_created"), "gauge", "When counting began.");
            for (handler, method) in self.durations.keys() {
                let _ = writeln!(out, "{name}_created{{handler=\"{handler}\",method=\"{method}\"}} {created:?}");
            }
        }
    }
}

pub(crate) fn process(out: &mut String, started: f64) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let number = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    const PAGE: f64 = 4096.0;
    const TICKS: f64 = 100.0;
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as f64;
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let most =
        limits.lines().find(|line| line.starts_with("Max open files")).and_then(|line| line.split_whitespace().nth(3));
    let most = most.and_then(|text| text.parse().ok()).unwrap_or(0.0);
    for (name, kind, help, value) in [
        ("virtual_memory_bytes", "gauge", "Virtual memory.", number(20)),
        ("resident_memory_bytes", "gauge", "Resident memory.", number(21) * PAGE),
        ("start_time_seconds", "gauge", "Start, Unix seconds.", started),
        ("cpu_seconds_total", "counter", "CPU time.", (number(11) + number(12)) / TICKS),
        ("open_fds", "gauge", "Open files.", open),
        ("max_fds", "gauge", "Most open files.", most),
    ] {
        let _ = writeln!(out, "# HELP process_{name} {help}\n# TYPE process_{name} {kind}\nprocess_{name} {value:?}");
    }
}
