//! Measures: the numbers by which runs are compared, and their names.
//!
//! | name | unit | meaning |
//! |---|---|---|
//! | `CLASS.ttft.STAT`, `tpot`, `itl`, `e2el` | ms | latency of completed requests |
//! | `CLASS.queue.STAT` | ms | wait of completed requests in the gateway |
//! | `CLASS.attainment` | % | share of requests that met all objectives; unfinished ones did not |
//! | `CLASS.failed` | % | share of requests without a complete response |
//! | `CLASS.rate`, `CLASS.tokens` | 1/s | completed requests, and their output tokens |
//! | `hit_rate` | % | share of prompt tokens that the engines found in their prefix caches |
//! | `busy` | % | share of time in which an engine was running a step, mean of all engines |
//! | `imbalance` | | `busy` of the busiest engine divided by the mean |
//! | `engine_hours` | h | total time for which engines existed, including their starts |
//! | `engines` | | average number of engines |
//! | `preemptions` | | sequences preempted for lack of KV blocks |
//!
//! CLASS is the name of a class of the traffic, otherwise of a class of the gateway. `all` means
//! all requests, even if a class has that name. Classes of the same name in several `[[traffic]]`
//! are one class. STAT is `mean`, `max` or a percentile such as `p99` or `p99.9`. Formulas are as
//! in `sluice bench`.

use std::cell::OnceCell;
use std::fmt;
use std::str::FromStr;

use crate::error::BadMeasure;
use crate::run::LabRun;
use sluice_bench::RunResult;
use sluice_bench::result::metrics::{Distribution, Metrics};
use sluice_bench::result::record::ServerSide;
use sluice_bench::result::slices::{SliceBy, slices};
use sluice_core::stats::Sense;

const ALL: &str = "all";

/// A measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Measure {
    /// The class; `all` for all requests and for measures of engines.
    class: String,
    kind: Kind,
    /// Whether requests without a complete response count as infinitely slow.
    counts_lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Latency(Latency, Statistic),
    Attainment,
    Failed,
    Rate,
    Tokens,
    HitRate,
    Busy,
    Imbalance,
    EngineHours,
    Engines,
    Preemptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Latency {
    Ttft,
    Tpot,
    Itl,
    E2el,
    Queue,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Statistic {
    Mean,
    Max,
    Percentile(f64),
}

const LATENCIES: [(&str, Latency); 5] = [
    ("ttft", Latency::Ttft),
    ("tpot", Latency::Tpot),
    ("itl", Latency::Itl),
    ("e2el", Latency::E2el),
    ("queue", Latency::Queue),
];
const OF_A_CLASS: [(&str, Kind); 4] =
    [("attainment", Kind::Attainment), ("failed", Kind::Failed), ("rate", Kind::Rate), ("tokens", Kind::Tokens)];
const OF_ENGINES: [(&str, Kind); 6] = [
    ("hit_rate", Kind::HitRate),
    ("busy", Kind::Busy),
    ("imbalance", Kind::Imbalance),
    ("engine_hours", Kind::EngineHours),
    ("engines", Kind::Engines),
    ("preemptions", Kind::Preemptions),
];

impl FromStr for Measure {
    type Err = BadMeasure;

    fn from_str(text: &str) -> Result<Self, BadMeasure> {
        let bad = || BadMeasure(text.to_owned());
        let named =
            |names: &[(&str, Kind)], text: &str| names.iter().find(|(name, _)| *name == text).map(|found| found.1);
        if let Some(kind) = named(&OF_ENGINES, text) {
            return Ok(Self::new(ALL, kind));
        }
        let (class, rest) = text.split_once('.').filter(|(class, _)| !class.is_empty()).ok_or_else(bad)?;
        let kind = match rest.split_once('.') {
            None => named(&OF_A_CLASS, rest).ok_or_else(bad)?,
            Some((latency, statistic)) => {
                let latency = LATENCIES.iter().find(|(name, _)| *name == latency).ok_or_else(bad)?.1;
                Kind::Latency(latency, statistic_of(statistic).ok_or_else(bad)?)
            }
        };
        Ok(Self::new(class, kind))
    }
}

fn statistic_of(text: &str) -> Option<Statistic> {
    match text {
        "mean" => Some(Statistic::Mean),
        "max" => Some(Statistic::Max),
        _ => {
            let percentile: f64 = text.strip_prefix('p')?.parse().ok()?;
            (0.0..=100.0).contains(&percentile).then_some(Statistic::Percentile(percentile))
        }
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name_of = |kind: Kind| {
            let names = OF_A_CLASS.iter().chain(&OF_ENGINES);
            names.clone().find(|(_, other)| *other == kind).map_or("", |(name, _)| *name)
        };
        match self.kind {
            Kind::Latency(latency, statistic) => {
                let name = LATENCIES.iter().find(|(_, other)| *other == latency).map_or("", |(name, _)| *name);
                write!(f, "{}.{name}.", self.class)?;
                match statistic {
                    Statistic::Mean => f.write_str("mean"),
                    Statistic::Max => f.write_str("max"),
                    Statistic::Percentile(percentile) => write!(f, "p{percentile}"),
                }
            }
            kind if OF_ENGINES.iter().any(|(_, other)| *other == kind) => f.write_str(name_of(kind)),
            kind => write!(f, "{}.{}", self.class, name_of(kind)),
        }
    }
}

impl Measure {
    fn new(class: &str, kind: Kind) -> Self {
        Self { class: class.to_owned(), kind, counts_lost: false }
    }

    /// The measure as a goal: in a percentile and in `max`, requests without a complete response
    /// are infinitely slow. Otherwise the setting that sheds most requests would seem fastest.
    #[must_use]
    pub fn counting_lost(self) -> Self {
        Self { counts_lost: true, ..self }
    }

    /// The default measures: P99 of TTFT and E2EL of each class, and failures.
    pub fn default_for(classes: &[String]) -> Vec<Self> {
        let latency = |class: &String, latency| Self::new(class, Kind::Latency(latency, Statistic::Percentile(99.0)));
        let each = classes.iter().flat_map(|class| [latency(class, Latency::Ttft), latency(class, Latency::E2el)]);
        each.chain([Self::new(ALL, Kind::Failed)]).collect()
    }

    /// The unit; empty for a plain number.
    pub fn unit(&self) -> &'static str {
        match self.kind {
            Kind::Latency(..) => "ms",
            Kind::Attainment | Kind::Failed | Kind::HitRate | Kind::Busy => "%",
            Kind::Rate | Kind::Tokens => "/s",
            Kind::EngineHours => "h",
            Kind::Engines | Kind::Imbalance | Kind::Preemptions => "",
        }
    }

    /// Whether a higher or a lower value is better.
    pub fn sense(&self) -> Sense {
        match self.kind {
            Kind::Attainment | Kind::Rate | Kind::Tokens | Kind::HitRate => Sense::HigherIsBetter,
            _ => Sense::LowerIsBetter,
        }
    }

    /// Whether only simulated engines have this measure.
    pub fn is_simulated(&self) -> bool {
        matches!(self.kind, Kind::Busy | Kind::Imbalance | Kind::EngineHours | Kind::Engines)
    }

    /// The class; `None` for all requests and for measures of engines.
    pub fn class(&self) -> Option<&str> {
        (self.class != ALL).then_some(&self.class)
    }
}

/// A run with the statistics from which every measure is computed.
#[derive(Debug)]
pub struct Measured<'a> {
    result: &'a RunResult,
    /// Busy seconds of each simulated engine; empty for real engines.
    busy: Vec<f64>,
    /// Seconds for which all engines together existed.
    paid: f64,
    servers: Vec<&'a ServerSide>,
    all: Metrics,
    classes: Vec<(String, Metrics)>,
    /// Metrics by class of the gateway, computed when first needed.
    of_gateway: OnceCell<Vec<(String, Metrics)>>,
}

impl<'a> Measured<'a> {
    /// The statistics of `run`.
    pub fn of(run: &'a LabRun) -> Self {
        let busy = run.engines.iter().map(|engine| engine.busy).collect();
        let paid = run.engines.iter().map(|engine| engine.paid).sum();
        let servers = run.engines.iter().map(|engine| &engine.side).collect();
        Self { busy, paid, servers, ..Self::of_real(&run.result) }
    }

    /// The statistics of a run with real engines, without busy and paid times.
    pub fn of_real(result: &'a RunResult) -> Self {
        let (all, classes) = (Metrics::of(result), slices(result, SliceBy::Load));
        let servers = result.servers.iter().collect();
        let of_gateway = OnceCell::new();
        Self { result, busy: Vec::new(), paid: f64::NAN, servers, all, classes, of_gateway }
    }

    /// The value of a measure in its unit; NaN without data.
    pub fn value(&self, measure: &Measure) -> f64 {
        let metrics = if measure.class == ALL { Some(&self.all) } else { self.of_class(&measure.class) };
        let Some(metrics) = metrics else { return f64::NAN };
        match measure.kind {
            Kind::Latency(latency, statistic) => {
                let distribution = match latency {
                    Latency::Ttft => &metrics.ttft,
                    Latency::Tpot => &metrics.tpot,
                    Latency::Itl => &metrics.itl,
                    Latency::E2el => &metrics.e2el,
                    Latency::Queue => &metrics.queue_wait,
                };
                let lost = if measure.counts_lost { metrics.failed + metrics.unfinished } else { 0 };
                // A lost request counts as many values as a completed request has on average.
                let each = distribution.count() as f64 / metrics.completed.max(1) as f64;
                let lost = if metrics.completed == 0 { lost as f64 } else { lost as f64 * each };
                statistic.of_all(distribution, lost) * 1e3
            }
            // Unfinished requests count as missed, because a setting under which requests do not
            // end must not gain by that.
            Kind::Attainment => percent(metrics.good, metrics.judged() + metrics.unfinished),
            Kind::Failed => percent(metrics.failed + metrics.unfinished, metrics.sent),
            Kind::Rate => metrics.per_second(metrics.completed),
            Kind::Tokens => metrics.output_rate().unwrap_or(f64::NAN),
            Kind::HitRate => self.hit_rate() * 100.0,
            Kind::Busy => self.mean_busy() / self.result.duration * 100.0,
            Kind::Imbalance => self.busy.iter().copied().fold(0.0, f64::max) / self.mean_busy(),
            Kind::EngineHours => self.paid / 3600.0,
            Kind::Engines => self.paid / self.result.duration,
            Kind::Preemptions if self.servers.is_empty() => f64::NAN,
            Kind::Preemptions => self.servers.iter().map(|side| side.preemptions).sum(),
        }
    }

    /// The metrics of a class of the traffic or, without such a class, of the gateway.
    fn of_class(&self, class: &str) -> Option<&Metrics> {
        let traffic = &self.result.config.classes;
        let classes = match traffic.iter().any(|own| own.name == class) {
            true => &self.classes,
            false => self.of_gateway.get_or_init(|| slices(self.result, SliceBy::Class)),
        };
        classes.iter().find(|(name, _)| name == class).map(|(_, metrics)| metrics)
    }

    fn mean_busy(&self) -> f64 {
        self.busy.iter().sum::<f64>() / self.busy.len() as f64
    }

    fn hit_rate(&self) -> f64 {
        let sides = || self.servers.iter();
        let (hits, queries): (f64, f64) =
            (sides().map(|side| side.prefix_hits).sum(), sides().map(|side| side.prefix_queries).sum());
        hits / queries
    }
}

/// A share in per cent; NaN without requests.
fn percent(count: u64, of: u64) -> f64 {
    100.0 * count as f64 / of as f64
}

impl Statistic {
    /// The statistic of the distribution and `lost` infinite values. A mean ignores infinite
    /// values.
    fn of_all(self, distribution: &Distribution, lost: f64) -> f64 {
        let share = match self {
            Self::Percentile(percentile) if lost > 0.0 => percentile / 100.0,
            Self::Max if lost > 0.0 => 1.0,
            _ => return self.of(distribution),
        };
        let last = distribution.count() as f64 - 1.0;
        let place = share * (last + lost);
        if place > last { f64::INFINITY } else { distribution.percentile(100.0 * place / last.max(1.0)) }
    }

    fn of(self, distribution: &Distribution) -> f64 {
        if distribution.count() == 0 {
            return f64::NAN;
        }
        match self {
            Self::Mean => distribution.mean(),
            Self::Max => distribution.max(),
            Self::Percentile(percentile) => distribution.percentile(percentile),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_bench::result::record::{ClassConfig, RunConfig};
    use sluice_bench::{Outcome, Record};

    #[test]
    fn what_is_written_is_read_and_written_again() {
        for text in ["short.ttft.p99", "all.e2el.p99.9", "long.queue.mean", "all.failed", "a.attainment", "hit_rate"] {
            assert_eq!(text.parse::<Measure>().unwrap().to_string(), text);
        }
        for text in ["ttft", "short.ttft", "short.ttft.p101", ".ttft.p9", "short.best", "", "all.hit_rate"] {
            let error = text.parse::<Measure>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("'{text}' is not a measure")), "{error}");
        }
    }

    #[test]
    fn requests_that_fail_or_do_not_end_are_misses_and_those_that_leave_are_not() {
        let of = |outcome: Outcome| Record { outcome, ..Record::default() };
        let ended = [of(Outcome::Completed), of(Outcome::Failed("timed out".into()))];
        let requests = ended.into_iter().chain([of(Outcome::Unfinished), of(Outcome::Unfinished), of(Outcome::Left)]);
        let result = RunResult { requests: requests.collect(), ..RunResult::default() };
        let value = |result: &RunResult, name: &str| Measured::of_real(result).value(&name.parse().unwrap());
        assert_eq!(value(&result, "all.attainment"), 25.0);
        for name in ["all.attainment", "all.failed", "preemptions"] {
            assert!(value(&RunResult::default(), name).is_nan(), "{name}");
        }
        // One response with uncounted tokens makes the rate unknown.
        let counted = |output_tokens| Record { outcome: Outcome::Completed, output_tokens, ..Record::default() };
        let tokens = |records: Vec<Record>| {
            value(&RunResult { requests: records, duration: 2.0, ..RunResult::default() }, "all.tokens")
        };
        assert_eq!(tokens(vec![counted(Some(4)), counted(Some(6))]), 5.0);
        assert!(tokens(vec![counted(Some(4)), counted(None)]).is_nan());
    }

    #[test]
    fn all_means_all_requests_and_a_name_all_classes_that_have_it() {
        let class = |name: &str| ClassConfig { name: name.into(), ..ClassConfig::default() };
        let config = RunConfig { classes: ["all", "short", "short"].map(class).to_vec(), ..RunConfig::default() };
        let of_class = |class| Record { class, outcome: Outcome::Completed, ..Record::default() };
        let requests = [0, 1, 2, 2].map(of_class).to_vec();
        let result = RunResult { requests, config, duration: 1.0, ..RunResult::default() };
        let value = |measure: &str| Measured::of_real(&result).value(&measure.parse().unwrap());
        assert_eq!([value("all.rate"), value("short.rate")], [4.0, 3.0]);
        assert!(value("long.rate").is_nan());
    }

    #[test]
    fn an_objective_counts_requests_without_a_response_as_infinitely_slow() {
        let completed = |latency: f64| Record { outcome: Outcome::Completed, latency, ..Record::default() };
        let shed = || Record { outcome: Outcome::Failed("status 503".into()), ..Record::default() };
        let value = |lost: usize, measure: &str| {
            let requests = (1..=9).map(|at| completed(f64::from(at))).chain((0..lost).map(|_| shed())).collect();
            let result = RunResult { requests, ..RunResult::default() };
            let measure: Measure = measure.parse().unwrap();
            [measure.clone(), measure.counting_lost()].map(|measure| Measured::of_real(&result).value(&measure) / 1e3)
        };
        assert_eq!(value(0, "all.e2el.p50"), [5.0, 5.0]);
        // The median of 17 values is the ninth. The median of 19 is the tenth, which is infinite.
        assert_eq!(value(8, "all.e2el.p50"), [5.0, 9.0]);
        assert_eq!(value(10, "all.e2el.p50"), [5.0, f64::INFINITY]);
        assert_eq!(value(1, "all.e2el.max"), [9.0, f64::INFINITY]);
        assert_eq!(value(1, "all.e2el.mean"), [5.0, 5.0]);
    }
}
