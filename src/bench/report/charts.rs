//! The plots of a report: distributions and plots over time of one run; throughput and latency of a
//! sweep.
//!
//! Latencies are in milliseconds if the largest is below 10 s, otherwise in seconds. A distribution
//! of more than [`MOST_POINTS`] values shows every n-th in sorted order, and the highest. A series
//! over time has at most [`MOST_DOTS`] dots. With more requests, each dot shows the slowest of
//! several, so that no tail is hidden, and the caption says so.

use std::collections::BTreeSet;

use super::plot::{Axis, Draw, Mark, Plot, Series};
use crate::report::knee::knee;
use crate::result::metrics::{Distribution, Metrics};
use crate::result::record::{Outcome, RunResult, Slo};
use crate::result::slices::{SliceBy, slices};

const MOST_POINTS: usize = 400;
pub(super) const MOST_DOTS: usize = 1200;
pub(super) const MOST_CLASSES: usize = 4;

pub(super) const MEASURES: [(&str, &str); 4] = [
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token"),
    ("itl", "Gaps between tokens"),
    ("e2el", "End-to-end latency"),
];

fn unit(largest: f64) -> (f64, &'static str) {
    if largest < 10.0 { (1e3, "ms") } else { (1.0, "s") }
}

fn axis(label: String) -> Axis {
    Axis { label, ..Axis::default() }
}

pub(super) fn distributions(run: &RunResult) -> Vec<Plot> {
    let classes = slices(run, SliceBy::plotted(run));
    let parts: Vec<(String, Metrics)> = match classes.len() {
        2..=MOST_CLASSES => classes,
        _ => vec![("all".to_owned(), Metrics::of(run))],
    };
    let plots =
        MEASURES.map(|(measure, title)| distribution(&parts, measure, title, &objectives(&[run], measure, None)));
    plots.into_iter().filter(|plot| !plot.is_empty()).collect()
}

type Objective = (String, f64);

/// The different objectives for a measure, of `class` or of all classes. The labels name the class
/// if the classes have different objectives.
pub(super) fn objectives(runs: &[&RunResult], measure: &str, class: Option<&str>) -> Vec<Objective> {
    let of = |slo: &Slo| match measure {
        "ttft" => slo.ttft,
        "tpot" => slo.tpot,
        "e2el" => slo.e2el,
        _ => None,
    };
    let mut found: Vec<(&str, Option<f64>)> = Vec::new();
    for run in runs {
        let config = &run.config;
        // If the load has a single class, the plots show the gateway's classes.
        let is_single = config.classes.len() == 1;
        if config.classes.is_empty() {
            found.push(("", of(&config.slo)));
        }
        for (index, own) in
            config.classes.iter().enumerate().filter(|(_, own)| class.is_none_or(|name| is_single || own.name == name))
        {
            found.push((&own.name, of(config.slo_of(u32::try_from(index).unwrap_or(u32::MAX)))));
        }
    }
    let alike = found.iter().all(|(_, bound)| *bound == found[0].1);
    let mut objectives: Vec<Objective> = Vec::new();
    for (name, bound) in found.into_iter().filter_map(|(name, bound)| Some((name, bound? / 1e3))) {
        let of = if alike || class.is_some() || name.is_empty() { String::new() } else { format!(" for {name}") };
        let objective = (format!("objective{of} {}", duration_text(bound)), bound);
        if !objectives.contains(&objective) && objectives.len() < MOST_CLASSES {
            objectives.push(objective);
        }
    }
    objectives
}

fn lines(objectives: &[Objective], scale: f64) -> impl Iterator<Item = Mark> {
    objectives.iter().map(move |(label, bound)| Mark { at: bound * scale, label: label.clone() })
}

pub(super) fn distribution(parts: &[(String, Metrics)], measure: &str, title: &str, objectives: &[Objective]) -> Plot {
    let of = |metrics: &Metrics| metrics.measure(measure).cloned().unwrap_or_default();
    let all: Vec<(&String, Distribution)> = parts.iter().map(|(name, metrics)| (name, of(metrics))).collect();
    let (scale, unit) = unit(all.iter().map(|(_, values)| values.max()).fold(0.0, f64::max));
    let log =
        all.iter().any(|(_, values)| values.count() > 0 && values.max() > 20.0 * values.percentile(1.0).max(1e-9));
    let series: Vec<Series> = all
        .iter()
        .enumerate()
        .filter(|(_, (_, values))| values.count() > 0)
        .map(|(color, (name, values))| Series {
            name: (*name).clone(),
            draw: Draw::Line,
            color,
            points: cumulative(values.values(), scale),
        })
        .collect();
    let mut marks = match &all[..] {
        [(_, values)] if values.count() > 0 => [50.0, 99.0]
            .map(|p| Mark {
                at: values.percentile(p) * scale,
                label: format!("P{p} {}", duration_text(values.percentile(p))),
            })
            .to_vec(),
        _ => Vec::new(),
    };
    marks.extend(lines(objectives, scale));
    Plot {
        title: format!("{title}: distribution"),
        x: Axis { log, ..axis(format!("{} ({unit})", measure.to_uppercase())) },
        y: Axis { from_zero: true, until: Some(100.0), ..axis("share at or below (%)".to_owned()) },
        series,
        marks,
        ..Plot::default()
    }
}

fn cumulative(sorted: &[f64], scale: f64) -> Vec<(f64, f64)> {
    let count = sorted.len();
    let step = count.div_ceil(MOST_POINTS).max(1);
    let places = (0..count).filter(|place| place % step == 0 || *place + 1 == count || *place + step / 2 >= count);
    places.map(|place| (sorted[place] * scale, 100.0 * (place + 1) as f64 / count as f64)).collect()
}

pub(super) fn duration_text(seconds: f64) -> String {
    let (scale, unit) = if seconds < 1.0 { (1e3, "ms") } else { (1.0, "s") };
    format!("{} {unit}", super::scale::short(seconds * scale))
}

pub(super) fn in_flight(run: &RunResult) -> Plot {
    let mut changes: Vec<(f64, f64)> = Vec::new();
    for record in &run.requests {
        changes.push((record.sent, 1.0));
        changes.push((record.ended.max(record.sent), -1.0));
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut open = 0.0;
    let course: Vec<(f64, f64)> = changes
        .into_iter()
        .map(|(at, change)| {
            open += change;
            (at, open)
        })
        .collect();
    let mut series =
        vec![Series { name: "sent, not ended".to_owned(), draw: Draw::Steps, color: 0, points: thinned(course, 1000) }];
    if let [server] = &run.servers[..] {
        type Of = fn(&crate::result::record::ServerSample) -> f64;
        let shown: [(&str, usize, Of); 2] = [
            ("running in the server", 2, |sample| sample.running),
            ("waiting in the server", 1, |sample| sample.waiting),
        ];
        for (name, color, of) in shown {
            let points: Vec<_> = server.samples.iter().map(|sample| (sample.at, of(sample))).collect();
            if points.len() > 2 {
                series.push(Series { name: name.to_owned(), draw: Draw::Line, color, points: thinned(points, 1000) });
            }
        }
    }
    Plot {
        title: "Requests in flight over time".to_owned(),
        x: Axis { from_zero: true, ..axis("time from the start (s)".to_owned()) },
        y: Axis { from_zero: true, ..axis("requests".to_owned()) },
        series,
        ..Plot::default()
    }
}

/// Divides the points into at most `most` parts and keeps the highest of each.
fn thinned(points: Vec<(f64, f64)>, most: usize) -> Vec<(f64, f64)> {
    if points.len() <= most {
        return points;
    }
    let part = points.len().div_ceil(most);
    let highest = |part: &[(f64, f64)]| part.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
    points.chunks(part).filter_map(highest).collect()
}

pub(super) fn ttft_course(run: &RunResult) -> Plot {
    let largest =
        run.requests.iter().filter(|record| record.is_completed()).map(|record| record.ttft).fold(0.0, f64::max);
    let (scale, unit) = unit(largest);
    let mut series = Vec::new();
    let names = class_names(run);
    if (2..=MOST_CLASSES).contains(&names.len()) {
        let is = |class: usize, name: &str| run.config.classes.get(class).is_some_and(|own| own.name == name);
        let colored = names.iter().enumerate();
        series.extend(colored.map(|(color, name)| dots(run, name, color, scale, |class| is(class, name))));
    } else {
        series.push(dots(run, "completed", 0, scale, |_| true));
    }
    let failed: Vec<(f64, f64)> = run
        .requests
        .iter()
        .filter(|record| matches!(record.outcome, Outcome::Failed(_)))
        .map(|r| (r.sent, 0.0))
        .collect();
    if !failed.is_empty() {
        series.push(Series {
            name: "failed".to_owned(),
            draw: Draw::Dots,
            color: 4,
            points: thinned(failed, MOST_DOTS),
        });
    }
    Plot {
        title: "Time to first token over time".to_owned(),
        x: Axis { from_zero: true, ..axis("sent, from the start (s)".to_owned()) },
        y: Axis { from_zero: true, ..axis(format!("TTFT ({unit})")) },
        series,
        levels: lines(&objectives(&[run], "ttft", None), scale).collect(),
        ..Plot::default()
    }
}

/// Classes that have requests, in the order of [`slices`], which decides a class's colour in all
/// plots.
fn class_names(run: &RunResult) -> Vec<&str> {
    let used: BTreeSet<usize> = run.requests.iter().map(|record| record.class as usize).collect();
    let of = |index: usize| run.config.classes.get(index).map(|class| class.name.as_str());
    let used: BTreeSet<&str> = used.into_iter().filter_map(of).collect();
    let mut names: Vec<&str> = Vec::new();
    for class in &run.config.classes {
        if used.contains(class.name.as_str()) && !names.contains(&class.name.as_str()) {
            names.push(&class.name);
        }
    }
    names
}

fn dots(run: &RunResult, name: &str, color: usize, scale: f64, of: impl Fn(usize) -> bool) -> Series {
    let records = run.requests.iter().filter(|record| record.is_completed() && of(record.class as usize));
    let mut points: Vec<(f64, f64)> = records.map(|record| (record.sent, record.ttft * scale)).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    Series { name: name.to_owned(), draw: Draw::Dots, color, points: thinned(points, MOST_DOTS) }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sweep {
    /// `concurrency` or `rate`.
    pub(super) varied: &'static str,
    pub(super) label: &'static str,
    pub(super) places: Vec<(f64, usize)>,
}

impl Sweep {
    /// The sweep over concurrency, otherwise over rate.
    pub(super) fn of(runs: &[RunResult]) -> Option<Self> {
        let by = |varied, label, place: fn(&RunResult) -> Option<f64>| {
            let mut places: Vec<(f64, usize)> =
                runs.iter().enumerate().map(|(index, run)| Some((place(run)?, index))).collect::<Option<_>>()?;
            places.sort_by(|a, b| a.0.total_cmp(&b.0));
            let apart = places.first()?.0 < places.last()?.0;
            apart.then_some(Self { varied, label, places })
        };
        let concurrency = |run: &RunResult| run.config.max_concurrency.map(f64::from);
        by("concurrency", "concurrency (requests in flight)", concurrency)
            .or_else(|| by("rate", "configured rate (requests per second)", |run| run.config.request_rate))
    }

    pub(super) fn knee(&self, metrics: &[Metrics]) -> Option<f64> {
        let throughput = |metrics: &Metrics| metrics.per_second(metrics.completed);
        let points: Vec<(f64, f64)> = self.places.iter().map(|(at, run)| (*at, throughput(&metrics[*run]))).collect();
        knee(&points).filter(|_| self.varied == "concurrency")
    }

    pub(super) fn plots(&self, runs: &[RunResult], metrics: &[Metrics]) -> Vec<Plot> {
        let marks: Vec<Mark> =
            self.knee(metrics).map(|at| Mark { at, label: format!("knee at {at:.0}") }).into_iter().collect();
        let line = |name: &str, color, of: &dyn Fn(&Metrics) -> f64| Series {
            name: name.to_owned(),
            draw: Draw::Marked,
            color,
            points: self.places.iter().map(|(at, run)| (*at, of(&metrics[*run]))).collect(),
        };
        let plot = |title: String, y: Axis, series| Plot {
            title,
            x: Axis { from_zero: true, ..axis(self.label.to_owned()) },
            y,
            series,
            marks: marks.clone(),
            ..Plot::default()
        };
        let over = |what: &str| format!("{what} over {}", self.varied);
        let zero = |label: &str| Axis { from_zero: true, ..axis(label.to_owned()) };
        let mut throughput = vec![line("completed", 0, &|m| m.per_second(m.completed))];
        if runs.iter().all(|run| run.config.has_slo()) {
            throughput.push(line("within objectives", 1, &|m| m.per_second(m.good)));
        }
        let of = |p: f64, measure: &'static str, scale: f64| {
            move |m: &Metrics| m.measure(measure).map_or(0.0, |values| values.percentile(p)) * scale
        };
        let mut plots = vec![
            plot(over("Throughput"), zero("requests per second"), throughput),
            plot(
                over("Output"),
                zero("tokens per second"),
                vec![line("output tokens", 0, &|m| m.output_rate().unwrap_or(f64::NAN))],
            ),
        ];
        for (measure, title) in [("ttft", "Time to first token"), ("tpot", "Time per output token")] {
            let largest = metrics.iter().map(|m| of(99.0, measure, 1.0)(m));
            let least = metrics.iter().map(|m| of(50.0, measure, 1.0)(m)).fold(f64::INFINITY, f64::min);
            let largest = largest.fold(0.0, f64::max);
            let (scale, unit) = unit(largest);
            let log = largest > 30.0 * least && least > 0.0;
            let label = format!("{} ({unit})", measure.to_uppercase());
            let series = vec![line("P50", 0, &of(50.0, measure, scale)), line("P99", 1, &of(99.0, measure, scale))];
            let levels = lines(&objectives(&runs.iter().collect::<Vec<_>>(), measure, None), scale).collect();
            plots.push(Plot { levels, ..plot(over(title), Axis { log, from_zero: true, ..axis(label) }, series) });
        }
        // Throughput and TTFT, the most important plots, are side by side.
        plots.swap(1, 2);
        plots.into_iter().filter(|plot| !plot.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{ClassConfig, Record, RunConfig};

    fn run(streams: u32, ttft: f64, rate: f64) -> RunResult {
        let record = |index: u64| Record {
            index,
            sent: index as f64 / rate,
            ended: index as f64 / rate + 0.5,
            outcome: Outcome::Completed,
            output_tokens: Some(2),
            ttft,
            latency: 0.5,
            itls: vec![0.5 - ttft],
            ..Record::default()
        };
        RunResult {
            config: RunConfig { max_concurrency: Some(streams), ..RunConfig::default() },
            requests: (0..100).map(record).collect(),
            duration: 100.0 / rate,
            ..RunResult::default()
        }
    }

    #[test]
    fn a_sweep_is_in_order_and_its_knee_is_marked() {
        let streams = [100u32, 1, 10, 50, 20, 75, 35];
        let runs = streams.map(|streams| run(streams, 0.01, f64::from(streams.min(50))));
        let metrics: Vec<Metrics> = runs.iter().map(Metrics::of).collect();
        let sweep = Sweep::of(&runs).unwrap();
        assert_eq!(
            sweep.places.iter().map(|(at, _)| *at).collect::<Vec<_>>(),
            [1.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0]
        );
        let knee = sweep.knee(&metrics).unwrap();
        assert!((48.0..52.0).contains(&knee), "{knee}");
        let plots = sweep.plots(&runs, &metrics);
        assert_eq!(plots[0].title, "Throughput over concurrency");
        assert_eq!(plots[1].title, "Time to first token over concurrency");
        assert!(plots.iter().all(|plot| plot.marks[0].label == format!("knee at {knee:.0}")));
        assert_eq!(plots[0].series[0].points[0], (1.0, 1.0));
        assert_eq!(Sweep::of(&runs[..1]), None);
    }

    #[test]
    fn a_distribution_reaches_from_the_first_value_to_all_of_them() {
        let values: Vec<f64> = (0..10_000).map(f64::from).collect();
        let points = cumulative(&values, 1.0);
        assert!(points.len() <= MOST_POINTS * 2);
        assert_eq!((points[0].0, *points.last().unwrap()), (0.0, (9999.0, 100.0)));
        assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
    }

    #[test]
    fn objectives_of_classes_are_named_where_they_differ() {
        let class = |name: &str, ttft| ClassConfig {
            name: name.to_owned(),
            slo: Slo { ttft, ..Slo::default() },
            ..ClassConfig::default()
        };
        let run = |short, long| {
            let config =
                RunConfig { classes: vec![class("short", short), class("long", long)], ..RunConfig::default() };
            RunResult { config, ..RunResult::default() }
        };
        let with = |short, long| objectives(&[&run(short, long)], "ttft", None);
        assert_eq!(with(Some(300.0), Some(300.0)), [("objective 300 ms".to_owned(), 0.3)]);
        assert_eq!(
            with(Some(300.0), Some(2000.0)),
            [("objective for short 300 ms".to_owned(), 0.3), ("objective for long 2 s".to_owned(), 2.0)]
        );
        assert_eq!(with(Some(300.0), None), [("objective for short 300 ms".to_owned(), 0.3)]);
        assert_eq!(with(None, None), []);
        let of = |class| objectives(&[&run(Some(300.0), None)], "ttft", Some(class));
        assert_eq!(of("short"), [("objective 300 ms".to_owned(), 0.3)]);
        assert_eq!(of("long"), [], "that of another class");
    }

    #[test]
    fn a_class_has_the_same_colour_in_all_plots_of_a_run() {
        let mut run = run(4, 0.1, 10.0);
        let class = |name: &str| ClassConfig { name: name.to_owned(), ..ClassConfig::default() };
        run.config.classes = ["short", "unused", "long", "short"].map(class).to_vec();
        (0..4).for_each(|at| run.requests[at].class = [0, 2, 2, 3][at]);
        let colours = |plot: &Plot| plot.series.iter().map(|one| (one.name.clone(), one.color)).collect::<Vec<_>>();
        let expected = [("short".to_owned(), 0), ("long".to_owned(), 1)];
        assert_eq!(colours(&distributions(&run)[0]), expected);
        assert_eq!(colours(&ttft_course(&run)), expected);
    }

    #[test]
    fn requests_in_flight_rise_and_fall_to_none() {
        let plot = in_flight(&run(4, 0.1, 10.0));
        let most = plot.series[0].points.iter().map(|(_, open)| *open).fold(0.0, f64::max);
        assert!((5.0..=6.0).contains(&most), "{most}");
        assert_eq!(plot.series[0].points.last().unwrap().1, 0.0);
    }

    #[test]
    fn thinning_keeps_the_slowest() {
        let points: Vec<(f64, f64)> = (0..10_000).map(|n| (f64::from(n), if n == 7777 { 9.0 } else { 1.0 })).collect();
        let thin = thinned(points, 1000);
        assert!(thin.len() <= 1000 && thin.contains(&(7777.0, 9.0)));
    }
}
