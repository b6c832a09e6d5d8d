//! Results as one self-contained HTML file: no script, no font, no network.
//!
//! A page of one run has numbers, distributions and plots over time. A page of several runs has
//! common plots, a table, and a folded section for each run. Runs that differ in concurrency or
//! rate are a sweep, whose plots of throughput and latency mark the knee.
//!
//! Every plot is drawn twice, for wide screens and for phones; the page shows the drawing that
//! fits.

use std::fmt::Write as _;

use super::charts::{self, MEASURES, Sweep};
use super::overlay::{MOST_RUNS, names, overlays};
use super::page::{Page, Tile};
use super::plot::{Plot, WIDE};

use super::scale::short;
use crate::result::metrics::Metrics;
use crate::result::record::RunResult;
use crate::result::slices::{SliceBy, attainment, failures, slices};
use sluice_core::stats::Estimate;

/// The HTML of one run, a sweep, or a list of runs.
pub fn html(runs: &[RunResult]) -> String {
    let metrics: Vec<Metrics> = runs.iter().map(Metrics::of).collect();
    let mut page = Page::new(&title(runs));
    let names = names(runs);
    head(&mut page, runs);
    warnings(&mut page, runs);
    match (runs, Sweep::of(runs)) {
        ([run], _) => one(&mut page, run, &metrics[0]),
        (_, sweep) => {
            if let Some(sweep) = sweep {
                page.section(sweep_title(&sweep, &metrics), "");
                page.plots(&sweep.plots(runs, &metrics));
            }
            let plots = overlays(runs, &names, &MEASURES);
            if !plots.is_empty() {
                let note = if runs.len() > MOST_RUNS { "The first runs of the list below." } else { "" };
                page.section("Distributions".to_owned(), note);
                page.plots(&plots);
            }
            page.section("Runs".to_owned(), "Latencies in milliseconds; rates of the whole run.");
            page.table(&run_table(runs, &names, &metrics));
            for ((run, name), metrics) in runs.iter().zip(&names).zip(&metrics) {
                page.fold(name, |page| one(page, run, metrics));
            }
        }
    }
    page.end()
}

/// The plots as SVG files, each with name and content.
pub fn plots(runs: &[RunResult]) -> Vec<(String, String)> {
    let metrics: Vec<Metrics> = runs.iter().map(Metrics::of).collect();
    let plots: Vec<Plot> = match (runs, Sweep::of(runs)) {
        ([run], _) => run_plots(run),
        (_, sweep) => {
            let mut plots = sweep.map(|sweep| sweep.plots(runs, &metrics)).unwrap_or_default();
            plots.extend(overlays(runs, &names(runs), &MEASURES));
            plots
        }
    };
    let name = |title: &str| {
        let words = title.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
    };
    let mut files: Vec<(String, String)> = Vec::new();
    for plot in &plots {
        // Names that differ only in characters that file names cannot have get a number.
        let (plain, mut number) = (name(&plot.title), 1);
        let mut file = format!("{plain}.svg");
        while files.iter().any(|(other, _)| *other == file) {
            number += 1;
            file = format!("{plain}-{number}.svg");
        }
        files.push((file, plot.file(WIDE)));
    }
    files
}

fn title(runs: &[RunResult]) -> String {
    let label = runs.iter().find_map(|run| run.config.label.clone());
    let model = runs.iter().map(|run| run.config.model.clone()).find(|model| !model.is_empty());
    label.or(model).unwrap_or_else(|| "benchmark".to_owned())
}

fn head(page: &mut Page, runs: &[RunResult]) {
    let Some(run) = runs.first() else { return };
    let config = &run.config;
    let count: usize = runs.iter().map(|run| run.requests.len()).sum();
    let facts = [
        ("when", run.started_at.clone()),
        ("model", config.model.clone()),
        ("server", config.urls.join(", ")),
        ("endpoint", config.endpoint.clone()),
        ("dataset", config.dataset.clone()),
        ("arrivals", if runs.len() == 1 { arrivals(run) } else { String::new() }),
        ("runs", if runs.len() > 1 { runs.len().to_string() } else { String::new() }),
        ("requests", short(count as f64)),
        ("seed", config.seed.to_string()),
    ];
    page.facts(&facts);
}

fn arrivals(run: &RunResult) -> String {
    let config = &run.config;
    let rate = config.request_rate.map(|rate| format!(", {} per second", short(rate))).unwrap_or_default();
    let most = config.max_concurrency.map(|most| format!(", at most {most} in flight")).unwrap_or_default();
    format!("{}{rate}{most}", config.arrival)
}

pub(super) fn warnings(page: &mut Page, runs: &[RunResult]) {
    let several = runs.len() > 1;
    let mut all = Vec::new();
    for (run, name) in runs.iter().zip(names(runs)) {
        let before = if several { format!("{name}: ") } else { String::new() };
        all.extend(run.warnings.iter().map(|warning| format!("{before}{warning}")));
        if run.requests.is_empty() {
            all.push(format!(
                "{before}the file has only totals, not each request, so nothing can be drawn; save with --save-detailed"
            ));
        }
    }
    page.warnings(&all);
}

fn run_plots(run: &RunResult) -> Vec<Plot> {
    let course = [charts::in_flight(run), charts::ttft_course(run)];
    let mut plots: Vec<Plot> = course.into_iter().filter(|plot| !plot.is_empty()).collect();
    plots.extend(charts::distributions(run));
    plots
}

pub(super) fn one(page: &mut Page, run: &RunResult, metrics: &Metrics) {
    if run.requests.is_empty() {
        return;
    }
    page.tiles(&tiles(run, metrics));
    let thin = run.requests.len() > charts::MOST_DOTS;
    let note =
        if thin { "There are more requests than dots: each dot is the slowest request of its interval." } else { "" };
    page.section("Over time, and distributions".to_owned(), note);
    page.plots(&run_plots(run));
    page.section("Latencies".to_owned(), "Completed requests only; milliseconds.");
    page.table(&latency_table(metrics));
    for by in SliceBy::shown(run) {
        let parts = slices(run, by);
        if parts.len() > 1 {
            page.section(
                format!("By {}", by.name()),
                format!("Latencies in milliseconds. {}", meaning(run, by)).trim_end(),
            );
            let rows = parts.iter().map(|(name, metrics)| (name, metrics));
            page.table(&metrics_table(by.name(), run.config.has_slo(), rows));
        }
    }
    let reasons: Vec<Vec<String>> =
        failures(run).into_iter().map(|(reason, count)| vec![reason.to_owned(), count.to_string()]).collect();
    if !reasons.is_empty() {
        page.section("Failures".to_owned(), "");
        page.table(&[vec![vec!["reason".to_owned(), "requests".to_owned()]], reasons].concat());
    }
}

fn meaning(run: &RunResult, by: SliceBy) -> String {
    let classes = &run.config.gateway_classes;
    match by {
        SliceBy::Class if !classes.is_empty() => {
            let found = by.names(run, |_| true);
            let known = classes.iter().filter(|class| found.contains(&&*class.name));
            let each = known.map(|class| format!("{}: {}", class.name, class.requests));
            format!("Classes of the gateway by prompt tokens; {}.", each.collect::<Vec<_>>().join("; "))
        }
        SliceBy::Load => "Classes of the load, as it was sent.".to_owned(),
        _ => String::new(),
    }
}

fn tiles(run: &RunResult, metrics: &Metrics) -> Vec<Tile> {
    let mut tiles = vec![
        (short(metrics.completed as f64), "completed", format!("{} failed", short(metrics.failed as f64))),
        (
            short(metrics.per_second(metrics.completed)),
            "requests per second",
            format!("over {}", charts::duration_text(metrics.duration)),
        ),
        (
            metrics.output_rate().map_or_else(unknown, short),
            "output tokens per second",
            format!("{} of input", short(metrics.per_second(metrics.input_tokens))),
        ),
    ];
    for (measure, name) in [("ttft", "TTFT P99"), ("tpot", "TPOT P99"), ("e2el", "E2EL P99")] {
        if let Some(values) = metrics.measure(measure).filter(|values| values.count() > 0) {
            let note = format!("P50 {}", charts::duration_text(values.median()));
            tiles.push((charts::duration_text(values.percentile(99.0)), name, note));
        }
    }
    if run.config.has_slo() {
        let Estimate { value: share, low, high } = attainment(metrics);
        let note = format!("95 %: {:.1} to {:.1} %", low * 100.0, high * 100.0);
        tiles.push((format!("{:.2} %", share * 100.0), "within objectives", note));
    }
    tiles
}

fn latency_table(metrics: &Metrics) -> Vec<Vec<String>> {
    let head = ["measure", "mean", "P50", "P90", "P95", "P99", "P99.9", "max"].map(str::to_owned).to_vec();
    let mut rows = vec![head];
    for measure in ["ttft", "tpot", "itl", "e2el"] {
        let Some(values) = metrics.measure(measure).filter(|values| values.count() > 0) else { continue };
        let mut row = vec![measure.to_uppercase(), millis(values.mean())];
        row.extend([50.0, 90.0, 95.0, 99.0, 99.9].map(|p| millis(values.percentile(p))));
        row.push(millis(values.max()));
        rows.push(row);
    }
    rows
}

fn millis(seconds: f64) -> String {
    short(seconds * 1e3)
}

fn unknown() -> String {
    "-".to_owned()
}

const PART: [&str; 10] =
    ["ok", "failed", "req/s", "tok/s", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "E2EL P50", "E2EL P99"];

fn part_row(metrics: &Metrics) -> Vec<String> {
    vec![
        short(metrics.completed as f64),
        short(metrics.failed as f64),
        short(metrics.per_second(metrics.completed)),
        metrics.output_rate().map_or_else(unknown, short),
        millis(metrics.ttft.median()),
        millis(metrics.ttft.percentile(99.0)),
        metrics.known_tpot().map_or_else(unknown, |tpot| millis(tpot.median())),
        metrics.known_tpot().map_or_else(unknown, |tpot| millis(tpot.percentile(99.0))),
        millis(metrics.e2el.median()),
        millis(metrics.e2el.percentile(99.0)),
    ]
}

fn metrics_table<'a>(
    first: &str,
    slo: bool,
    rows: impl Iterator<Item = (&'a String, &'a Metrics)>,
) -> Vec<Vec<String>> {
    let mut head: Vec<String> = std::iter::once(first).chain(PART).map(str::to_owned).collect();
    head.extend(slo.then(|| "within objectives".to_owned()));
    let row = |(name, metrics): (&String, &Metrics)| {
        let mut row = vec![name.clone()];
        row.extend(part_row(metrics));
        row.extend(slo.then(|| format!("{:.1} %", metrics.attainment() * 100.0)));
        row
    };
    std::iter::once(head).chain(rows.map(row)).collect()
}

fn run_table(runs: &[RunResult], names: &[String], metrics: &[Metrics]) -> Vec<Vec<String>> {
    let order: Vec<usize> = match Sweep::of(runs) {
        Some(sweep) => sweep.places.iter().map(|(_, run)| *run).collect(),
        None => (0..runs.len()).collect(),
    };
    let slo = runs.iter().all(|run| run.config.has_slo());
    metrics_table("run", slo, order.into_iter().map(|run| (&names[run], &metrics[run])))
}

fn sweep_title(sweep: &Sweep, metrics: &[Metrics]) -> String {
    let mut title = format!("Sweep over {}", sweep.varied);
    if sweep.varied == "concurrency" {
        let _ = match sweep.knee(metrics) {
            Some(knee) => write!(title, ": the knee is at {knee:.0} in flight"),
            None => write!(title, ": no knee in this range"),
        };
    }
    title
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{Outcome, Record, RunConfig, Slo};

    fn run(streams: Option<u32>, label: &str) -> RunResult {
        let record = |index: u64| Record {
            index,
            sent: index as f64 * 0.1,
            ended: index as f64 * 0.1 + 0.4,
            outcome: if index % 10 == 9 { Outcome::Failed("status <503>".into()) } else { Outcome::Completed },
            prompt_tokens: 10,
            output_tokens: Some(4),
            ttft: 0.1,
            latency: 0.4,
            itls: vec![0.1; 3],
            ..Record::default()
        };
        RunResult {
            config: RunConfig {
                label: Some(label.to_owned()),
                model: "llama".to_owned(),
                max_concurrency: streams,
                slo: Slo { ttft: Some(200.0), ..Slo::default() },
                ..RunConfig::default()
            },
            requests: (0..50).map(record).collect(),
            duration: 5.4,
            warnings: vec!["this client was the bottleneck".to_owned()],
            ..RunResult::default()
        }
    }

    #[test]
    fn a_page_is_self_contained_and_escaped() {
        let page = html(&[run(None, "<script>alert(1)</script>")]);
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        for outside in ["<script", "src=\"", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        let links = page.matches("http://").count() - page.matches("http://www.w3.org/2000/svg").count();
        assert_eq!(links, 0, "only the name of the SVG format");
        assert!(page.contains("&lt;script&gt;") && page.contains("status &lt;503&gt;"));
        assert!(page.contains("this client was the bottleneck") && page.contains("90.00 %"));
        assert_eq!(page.matches("<svg").count(), 2 * run_plots(&run(None, "")).len(), "wide and narrow");
    }

    #[test]
    fn a_sweep_has_its_plots_its_table_and_every_run() {
        let runs = [1, 2, 4].map(|streams| run(Some(streams), "sweep"));
        let page = html(&runs);
        for text in ["Throughput over concurrency", "no knee in this range", "concurrency 4", "<details>"] {
            assert!(page.contains(text), "{text}");
        }
        let files: Vec<String> = plots(&runs).into_iter().map(|(name, _)| name).collect();
        assert_eq!(files[..2], ["throughput-over-concurrency.svg", "time-to-first-token-over-concurrency.svg"]);
        assert!(plots(&runs).iter().all(|(_, svg)| svg.contains("<style>")));
    }

    #[test]
    fn two_runs_of_one_load_are_drawn_over_one_another_under_different_names() {
        let runs = ["a.json", "b.json"].map(|file| RunResult { file: file.to_owned(), ..run(Some(4), "x") });
        let page = html(&runs);
        for text in ["x, concurrency 4 (a.json)", "x, concurrency 4 (b.json)", "objective 200 ms", "Distributions"] {
            assert!(page.contains(text), "{text}");
        }
        let files = plots(&runs);
        assert_eq!(files[0].0, "time-to-first-token-distribution.svg");
        assert_eq!(files.len(), MEASURES.len());
        assert!(files.iter().all(|(_, svg)| svg.contains("(a.json)") && svg.contains("<title>")), "{files:?}");
    }

    #[test]
    fn a_result_without_requests_says_what_to_do() {
        let page = html(&[RunResult::default()]);
        assert!(page.contains("--save-detailed"));
        assert!(html(&[]).ends_with("</html>\n"));
    }
}
