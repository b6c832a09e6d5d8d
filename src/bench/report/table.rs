//! A result in the terminal: the block that `vllm bench serve` prints, and more.
//!
//! The block has the labels and the layout of `vllm bench serve` (40 columns of label, then the
//! value with two decimals), so that scripts that parse it work. Below it: the delivered load and
//! the client's own lag, the steady window, metrics of the servers, lines for each class, adapter,
//! pool, backend and arm if there are several, reasons of failures, warnings.

use std::fmt::Write as _;

use super::columns::Columns;
use crate::result::metrics::{Distribution, Metrics};
use crate::result::record::{RunResult, ServerSide};
use crate::result::slices::{self, SliceBy};
use crate::result::steady::{self, Steady};
use crate::result::validity::Delivered;
use sluice_core::stats::proportion;

const WIDTH: usize = 50;
/// If the effective number of requests is below this share, the table explains the wide interval.
const FEWER: f64 = 0.8;
/// Delays up to this many seconds are not shown.
const NO_DELAY: f64 = 0.001;

/// The text of a run, for a terminal with `width` columns.
pub fn table(result: &RunResult, width: Option<usize>) -> String {
    let metrics = Metrics::of(result);
    let mut text = block(result, &metrics);
    load(&mut text, result, &metrics);
    if let Some(steady) = steady::steady(result).filter(|_| metrics.completed > 0) {
        steady_block(&mut text, &steady);
    }
    servers(&mut text, result);
    text.push_str(&"=".repeat(WIDTH));
    text.push('\n');
    for by in SliceBy::shown(result) {
        let parts = slices::slices(result, by);
        if parts.len() > 1 {
            let table = parts_table(by.name(), &parts, result.config.has_slo());
            let _ = writeln!(text, "{}", table.text(width));
        }
    }
    for (reason, count) in slices::failures(result) {
        let _ = writeln!(text, "failed: {count} x {reason}");
    }
    for warning in &result.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}

/// The block of `vllm bench serve`.
pub fn block(result: &RunResult, metrics: &Metrics) -> String {
    let config = &result.config;
    let mut text = String::new();
    title(&mut text, '=', if result.partial { "Partial Serving Benchmark Result" } else { "Serving Benchmark Result" });
    whole(&mut text, "Successful requests:", metrics.completed);
    whole(&mut text, "Failed requests:", metrics.failed);
    if metrics.left > 0 {
        whole(&mut text, "Clients that left:", metrics.left);
    }
    if metrics.unfinished > 0 {
        whole(&mut text, "Unfinished requests:", metrics.unfinished);
    }
    if let Some(most) = config.max_concurrency {
        whole(&mut text, "Maximum request concurrency:", u64::from(most));
    }
    if let Some(rate) = config.request_rate {
        line(&mut text, "Request rate configured (RPS):", rate);
    }
    line(&mut text, "Benchmark duration (s):", metrics.duration);
    whole(&mut text, "Total input tokens:", metrics.input_tokens);
    known(&mut text, "Total generated tokens:", metrics.known_output().map(|tokens| tokens.to_string()));
    line(&mut text, "Request throughput (req/s):", metrics.per_second(metrics.completed));
    if config.has_slo() {
        line(&mut text, "Request goodput (req/s):", metrics.per_second(metrics.good));
    }
    known(&mut text, "Output token throughput (tok/s):", metrics.output_rate().map(two));
    known(&mut text, "Peak output token throughput (tok/s):", metrics.known_peak().map(two));
    line(&mut text, "Peak concurrent requests:", metrics.peak_requests as f64);
    let total = metrics.known_output().map(|output| metrics.per_second(metrics.input_tokens + output));
    known(&mut text, "Total token throughput (tok/s):", total.map(two));
    // The median is the 50th percentile, so only a user who asked for that percentile sees both.
    let asked = config.arguments.iter().any(|argument| argument.starts_with("--metric-percentiles"));
    let percentiles: Vec<f64> = config.percentiles.iter().copied().filter(|p| asked || *p != 50.0).collect();
    for (name, short, long) in MEASURES {
        if config.percentile_metrics.iter().any(|asked| asked == name) {
            measure(&mut text, short, long, metrics.measure(name), &percentiles);
        }
    }
    text
}

const MEASURES: [(&str, &str, &str); 4] = [
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
];

fn measure(text: &mut String, short: &str, long: &str, of: Option<&Distribution>, percentiles: &[f64]) {
    title(text, '-', long);
    let mut show = |name: &str, value: &dyn Fn(&Distribution) -> f64| {
        known(text, &format!("{name} {short} (ms):"), of.map(|of| two(value(of) * 1e3)));
    };
    show("Mean", &Distribution::mean);
    show("Median", &Distribution::median);
    for p in percentiles {
        show(&format!("P{p}"), &|of| of.percentile(*p));
    }
}

fn load(text: &mut String, result: &RunResult, metrics: &Metrics) {
    title(text, '-', "Load and Client");
    if let Some(delivered) = Delivered::of(result) {
        line(text, "Request rate scheduled (req/s):", delivered.scheduled);
        line(text, "Request rate delivered (req/s):", delivered.sent);
    }
    line(text, "P99 lag of requests, our own (ms):", metrics.lag.percentile(99.0) * 1e3);
    line(text, "P99 lag of timers, our own (ms):", result.client.lag_p99 * 1e3);
    if result.duration > 0.0 {
        line(text, "CPU of this process (cores):", result.client.cpu_seconds / result.duration);
    }
    if result.config.has_slo() {
        let interval = slices::attainment(metrics);
        let share = metrics.attainment() * 100.0;
        let range = format!("{share:.2} % (95 %: {:.2} to {:.2})", interval.low * 100.0, interval.high * 100.0);
        known(text, "Met all objectives:", Some(range));
        let independent = proportion::effective(&interval, slices::CONFIDENCE);
        if independent < FEWER * metrics.judged() as f64 {
            let of = format!("{independent:.0} of {} requests (they share queues)", metrics.judged());
            known(text, "Independent of each other, about:", Some(of));
        }
    }
    if metrics.queue_wait.count() > 0 {
        line(text, "Mean wait in the gateway (ms):", metrics.queue_wait.mean() * 1e3);
        line(text, "P99 wait in the gateway (ms):", metrics.queue_wait.percentile(99.0) * 1e3);
    }
    let delays = Distribution::of(result.requests.iter().map(crate::result::record::Record::delay).collect());
    if delays.percentile(99.0) > NO_DELAY {
        let due = Metrics::of(&result.from_due());
        line(text, "P99 TTFT from when it was due (ms):", due.ttft.percentile(99.0) * 1e3);
        line(text, "P99 E2EL from when it was due (ms):", due.e2el.percentile(99.0) * 1e3);
    }
}

fn steady_block(text: &mut String, steady: &Steady) {
    let window = &steady.window;
    title(text, '-', "Steady State");
    let range = format!("{:.1} to {:.1} of the run", window.start_s, window.end_s);
    let _ = writeln!(text, "{:<40} {range}", "Window (s):");
    line(text, "Request throughput (req/s), steady:", steady.request_throughput);
    known(text, "Output token throughput (tok/s), steady:", steady.output_throughput.map(two));
    line(text, "Mean TTFT (ms), steady:", steady.metrics.ttft.mean() * 1e3);
    known(text, "Mean TPOT (ms), steady:", steady.metrics.known_tpot().map(|tpot| two(tpot.mean() * 1e3)));
    if let Some(warning) = &window.warning {
        let _ = writeln!(text, "{:<40} {warning}", "Note:");
    }
}

fn servers(text: &mut String, result: &RunResult) {
    for side in &result.servers {
        title(text, '-', &format!("Server {}", side.url.trim_start_matches("http://")));
        if side.prefix_queries > 0.0 {
            line(text, "Prefix cache hit rate (%):", hit_rate(side) * 100.0);
        }
        line(text, "Preemptions:", side.preemptions);
        for (label, value) in [
            ("Peak KV cache use (%):", side.kv_peak * 100.0),
            ("Most running at once:", side.running_peak),
            ("Most waiting at once:", side.waiting_peak),
        ] {
            let none = side.samples.is_empty();
            let value = if none { "not sampled: the run was too short".to_owned() } else { two(value) };
            known(text, label, Some(value));
        }
    }
}

/// Share of prompt tokens found in the prefix cache.
pub fn hit_rate(side: &ServerSide) -> f64 {
    if side.prefix_queries > 0.0 { side.prefix_hits / side.prefix_queries } else { 0.0 }
}

fn title(text: &mut String, fill: char, name: &str) {
    let name = if fill == '=' { format!(" {name} ") } else { name.to_owned() };
    let left = WIDTH.saturating_sub(name.chars().count()) / 2;
    let right = WIDTH.saturating_sub(name.chars().count() + left);
    let fill = |count: usize| fill.to_string().repeat(count);
    let _ = writeln!(text, "{}{name}{}", fill(left), fill(right));
}

fn line(text: &mut String, label: &str, value: f64) {
    known(text, label, Some(two(value)));
}

fn two(value: f64) -> String {
    format!("{value:.2}")
}

fn known(text: &mut String, label: &str, value: Option<String>) {
    let _ = writeln!(text, "{label:<40} {:<10}", value.as_deref().unwrap_or("-"));
}

fn whole(text: &mut String, label: &str, value: u64) {
    let _ = writeln!(text, "{label:<40} {value:<10}");
}

const OF_PARTS: &str =
    "sent,ok,failed,req/s,out tok/s,TTFT p50,TTFT p99,TPOT p50,TPOT p99,ITL p99,E2EL p50,E2EL p99,met %";
const OF_RUNS: &str = "ok,failed,req/s,out tok/s,TTFT mean,TTFT p50,TTFT p99,TPOT mean,ITL p99,E2EL p99,met %";
const MET: &str = "met %";

fn cell(of: &Metrics, column: &str) -> String {
    let latency = |values: &Distribution, seconds: f64| {
        if values.count() == 0 { "-".to_owned() } else { format!("{:.1}", seconds * 1e3) }
    };
    let percentile = |values: &Distribution, p: f64| latency(values, values.percentile(p));
    match column {
        "sent" => of.sent.to_string(),
        "ok" => of.completed.to_string(),
        "failed" => of.failed.to_string(),
        "req/s" => two(of.per_second(of.completed)),
        "out tok/s" => of.output_rate().map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}")),
        "TTFT mean" => latency(&of.ttft, of.ttft.mean()),
        "TTFT p50" => percentile(&of.ttft, 50.0),
        "TTFT p99" => percentile(&of.ttft, 99.0),
        "TPOT mean" => latency(&of.tpot, of.tpot.mean()),
        "TPOT p50" => percentile(&of.tpot, 50.0),
        "TPOT p99" => percentile(&of.tpot, 99.0),
        "ITL p99" => percentile(&of.itl, 99.0),
        "E2EL p50" => percentile(&of.e2el, 50.0),
        "E2EL p99" => percentile(&of.e2el, 99.0),
        _ => two(of.attainment() * 100.0),
    }
}

fn parts_table(name: &str, parts: &[(String, Metrics)], judged: bool) -> Columns {
    let columns = || OF_PARTS.split(',').filter(|column| judged || *column != MET);
    let mut table = Columns::new(std::iter::once(name).chain(columns()));
    for (name, metrics) in parts {
        table.add(std::iter::once(name.clone()).chain(columns().map(|column| cell(metrics, column))));
    }
    table
}

/// One line for each run of a sweep, named by the varied setting.
pub fn sweep_table(name: &str, runs: &[(String, RunResult)]) -> Columns {
    let mut table = Columns::new(std::iter::once(name).chain(OF_RUNS.split(',')));
    for (value, result) in runs {
        let metrics = Metrics::of(result);
        let of = |column: &str| match column {
            MET if !result.config.has_slo() => "-".to_owned(),
            column => cell(&metrics, column),
        };
        table.add(std::iter::once(value.clone()).chain(OF_RUNS.split(',').map(of)));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{ClassConfig, Outcome, Record, RunConfig, ServerSample, Slo};

    fn result() -> RunResult {
        let record = |class, ttft: f64| Record {
            class,
            outcome: Outcome::Completed,
            ttft,
            latency: ttft + 0.04,
            itls: vec![0.01; 4],
            prompt_tokens: 3,
            output_tokens: Some(5),
            ..Record::default()
        };
        let failed = Record { outcome: Outcome::Failed("status 503".into()), ..Record::default() };
        let class = |name: &str| ClassConfig { name: name.into(), ..ClassConfig::default() };
        let config = RunConfig {
            classes: vec![class("short"), class("long")],
            percentiles: vec![50.0, 90.0, 99.9],
            percentile_metrics: vec!["ttft".into(), "e2el".into()],
            slo: Slo { ttft: Some(15.0), ..Slo::default() },
            request_rate: Some(1.5),
            ..RunConfig::default()
        };
        let requests = vec![record(0, 0.01), failed, record(1, 0.02)];
        RunResult { requests, config, duration: 2.0, warnings: vec!["mind".into()], ..RunResult::default() }
    }

    #[test]
    fn the_block_has_the_labels_of_the_original_in_their_places() {
        let text = table(&result(), None);
        let starts =
            |line: &str| assert!(text.lines().any(|found| found.trim_end() == line), "{line}\nis not in\n{text}");
        starts("============ Serving Benchmark Result ============");
        starts("Successful requests:                     2");
        starts("Failed requests:                         1");
        starts("Request rate configured (RPS):           1.50");
        starts("Request throughput (req/s):              1.00");
        starts("Request goodput (req/s):                 0.50");
        starts("Output token throughput (tok/s):         5.00");
        starts("---------------Time to First Token----------------");
        starts("Median TTFT (ms):                        15.00");
        starts("P90 TTFT (ms):                           19.00");
        assert!(!text.contains("P50"), "it is the median");
        let mut asked = result();
        asked.config.arguments = vec!["--metric-percentiles".to_owned(), "50,99.9".to_owned()];
        assert!(table(&asked, None).contains("P50 TTFT (ms):                           15.00"));
        starts("P99.9 E2EL (ms):                         59.99");
        assert!(!text.contains("TPOT (ms)"), "not asked for");
        starts("Met all objectives:                      33.33 % (95 %: 6.15 to 79.23)");
        starts("failed: 1 x status 503");
        starts("warning: mind");
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_not_a_number() {
        let mut run = result();
        run.config.percentile_metrics.push("tpot".into());
        run.requests[0].output_tokens = None;
        run.requests[2].output_tokens = None;
        let text = table(&run, None);
        for label in
            ["Total generated tokens:", "Output token throughput (tok/s):", "Mean TPOT (ms):", "P90 TPOT (ms):"]
        {
            let line = text.lines().find(|line| line.starts_with(label)).unwrap();
            assert_eq!(line[label.len()..].trim(), "-", "{line}");
        }
        let line = text.lines().find(|line| line.trim_start().starts_with("short")).unwrap();
        assert_eq!(line.split_whitespace().collect::<Vec<_>>()[5..10], ["-", "10.0", "10.0", "-", "-"]);
    }

    #[test]
    fn peaks_of_a_run_without_samples_are_not_zeros() {
        let mut run = result();
        run.servers.push(ServerSide { url: "http://gpu0".into(), ..ServerSide::default() });
        let text = table(&run, None);
        assert!(text.contains("Peak KV cache use (%):                   not sampled: the run was too short"), "{text}");
        run.servers[0].samples.push(ServerSample::default());
        assert!(!table(&run, None).contains("not sampled"));
    }

    #[test]
    fn a_wide_interval_says_why() {
        let mut run = result();
        run.config.slo.ttft = Some(50.0);
        let slow = |i: u32| if (i / 20).is_multiple_of(2) { 0.01 } else { 0.02 };
        run.requests = (0..100)
            .map(|i| Record { ttft: slow(i), latency: slow(i), sent: f64::from(i), ..run.requests[0].clone() })
            .collect();
        let text = table(&run, Some(80));
        let line = text.lines().find(|line| line.starts_with("Independent of each other, about:")).unwrap();
        assert!(line.trim_end().ends_with("of 100 requests (they share queues)") && line.len() <= 80, "{line}");
        assert!(!table(&result(), None).contains("Independent of each other"), "two requests are just few");
    }

    #[test]
    fn each_class_has_a_line() {
        let text = table(&result(), None);
        let line = text.lines().find(|line| line.trim_start().starts_with("short")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            cells,
            ["short", "2", "1", "1", "0.50", "2.5", "10.0", "10.0", "10.0", "10.0", "10.0", "50.0", "50.0", "50.00"]
        );
    }

    #[test]
    fn the_text_fits_80_columns() {
        for text in [table(&result(), Some(80)), sweep_table("streams", &[("1".into(), result())]).text(Some(80))] {
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        }
        let wide = table(&result(), None);
        assert!(wide.lines().any(|line| line.chars().count() > 80), "else this proves nothing: {wide}");
    }

    #[test]
    fn a_sweep_has_a_line_for_each_run_and_dashes_for_nothing() {
        let empty = RunResult::default();
        let text = sweep_table("streams", &[("1".into(), result()), ("2".into(), empty)]).to_string();
        assert!(text.lines().any(|line| line.split_whitespace().next() == Some("1")));
        let dashes = text.lines().find(|line| line.split_whitespace().next() == Some("2")).unwrap();
        assert_eq!(dashes.matches('-').count(), 7, "{dashes}");
    }
}
