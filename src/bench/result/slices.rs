//! Statistics of slices of a run: the requests of one class, adapter, pool, backend or arm.
//!
//! The classes are the gateway's (`[[class]]`) if [`divide`] has set them, otherwise the classes of
//! the load.
//!
//! Rates of a slice are numbers divided by the duration of the whole run, so the rates of all
//! slices add up to the rate of the run. Load classes with the same name form one slice, in which
//! each request is judged by the objectives of the load class.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::result::metrics::Metrics;
use crate::result::record::{ClassConfig, GatewayClass, Outcome, Record, RunResult};
use crate::result::vllm_keys::metric_keys;
use sluice_core::stats::{Estimate, proportion};

/// The property by which a run is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceBy {
    /// The gateway's classes, or if there are none, the load's.
    Class,
    /// The load's classes.
    Load,
    /// LoRA adapters, and the base model.
    Adapter,
    /// The gateway's pools.
    Pool,
    /// The gateway's backends.
    Backend,
    /// Arms of an experiment.
    Arm,
}

impl SliceBy {
    const ALL: [Self; 6] = [Self::Class, Self::Load, Self::Adapter, Self::Pool, Self::Backend, Self::Arm];

    /// The properties by which a report on `result` is divided. [`Self::Load`] is left out if it
    /// would give the same slices as [`Self::Class`].
    pub fn shown(result: &RunResult) -> impl Iterator<Item = Self> {
        let differs = |record: &Record| Self::Class.of(record, result) != Self::Load.of(record, result);
        let has_both = result.config.classes.len() > 1 && result.requests.iter().any(differs);
        Self::ALL.into_iter().filter(move |by| *by != Self::Load || has_both)
    }

    /// The classes in plots of `result`: the load's if there are several, because they differ most.
    pub fn plotted(result: &RunResult) -> Self {
        if result.config.classes.len() > 1 { Self::Load } else { Self::Class }
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Class => "class",
            Self::Load => "load class",
            Self::Adapter => "adapter",
            Self::Pool => "pool",
            Self::Backend => "backend",
            Self::Arm => "arm",
        }
    }

    /// The name of a request's slice.
    pub fn name_of<'a>(self, record: &'a Record, result: &'a RunResult) -> Option<&'a str> {
        self.of(record, result).map(|(_, name)| name)
    }

    /// The names of the slices that have a request for which `counts` is true, in the order of
    /// reports.
    pub fn names(self, result: &RunResult, counts: impl Fn(&Record) -> bool) -> Vec<&str> {
        let counted = result.requests.iter().filter(|record| counts(record));
        let slices: BTreeSet<_> = counted.filter_map(|record| self.of(record, result)).collect();
        slices.into_iter().map(|(_, name)| name).collect()
    }

    fn of<'a>(self, record: &'a Record, result: &'a RunResult) -> Option<(usize, &'a str)> {
        let config = &result.config;
        match self {
            Self::Class if !config.gateway_classes.is_empty() => {
                let class = record.gateway_class? as usize;
                config.gateway_classes.get(class).map(|found| (class, &*found.name))
            }
            Self::Class | Self::Load => {
                let class = record.class as usize;
                let Some(ClassConfig { name, .. }) = config.classes.get(class) else { return Some((class, "all")) };
                let first = config.classes.iter().position(|other| other.name == *name);
                Some((first.unwrap_or(class), name))
            }
            Self::Adapter if config.adapters.is_empty() => None,
            Self::Adapter => {
                let index = record.adapter.map_or(usize::MAX, |adapter| adapter as usize);
                Some((index, config.adapters.get(index).unwrap_or(&config.model)))
            }
            Self::Pool => record.pool.as_deref().map(|name| (0, name)),
            Self::Backend => record.backend.as_deref().map(|name| (0, name)),
            Self::Arm => record.arm.as_deref().map(|name| (0, name)),
        }
    }
}

/// Divides a result by the gateway's `classes`. `of`: the index of a request's class.
///
/// Adds a warning for each class of the load that has the name of a gateway's class but other
/// requests.
pub fn divide(result: &mut RunResult, classes: Vec<GatewayClass>, of: impl Fn(&Record) -> usize) {
    for record in &mut result.requests {
        record.gateway_class = u32::try_from(of(record)).ok();
    }
    result.config.gateway_classes = classes;
    for class in &result.config.gateway_classes {
        let own = |record: &&Record| SliceBy::Load.name_of(record, result) == Some(&*class.name);
        let apart = |record: &&Record| SliceBy::Class.name_of(record, result) != Some(&*class.name);
        let count = result.requests.iter().filter(own).filter(apart).count();
        if count > 0 {
            result.warnings.push(format!(
                "{count} requests that the load calls '{0}' are not in the gateway's class '{0}' ({1} prompt tokens)",
                class.name, class.requests
            ));
        }
    }
}

/// The slices with their statistics, in the order of reports.
pub fn slices(result: &RunResult, by: SliceBy) -> Vec<(String, Metrics)> {
    let mut slices: BTreeMap<(usize, &str), Vec<&Record>> = BTreeMap::new();
    for record in &result.requests {
        if let Some(slice) = by.of(record, result) {
            slices.entry(slice).or_default().push(record);
        }
    }
    let metrics_of = |records: Vec<&Record>| Metrics::of_requests(records, result.duration, &result.config);
    slices.into_iter().map(|((_, name), records)| (name.to_owned(), metrics_of(records))).collect()
}

/// Failures by reason.
pub fn failures(result: &RunResult) -> BTreeMap<&str, u64> {
    let mut failures = BTreeMap::new();
    for record in &result.requests {
        if let Outcome::Failed(reason) = &record.outcome {
            *failures.entry(&**reason).or_default() += 1;
        }
    }
    failures
}

/// Confidence of the interval of [`attainment`].
pub const CONFIDENCE: f64 = 0.95;

/// The share of requests that met their objectives. The interval is wider if misses come in
/// clusters.
pub fn attainment(metrics: &Metrics) -> Estimate {
    let (hits, latencies): (Vec<bool>, Vec<f64>) = metrics.judgements.iter().copied().unzip();
    proportion::of_series_with(&hits, &latencies, CONFIDENCE)
}

/// The slices as JSON.
pub fn json(result: &RunResult, by: SliceBy) -> Value {
    let of_slice = |(name, metrics): &(String, Metrics)| (name.clone(), Value::Object(slice_json(metrics, result)));
    Value::Object(slices(result, by).iter().map(of_slice).collect())
}

/// A slice as JSON: the keys of `vllm bench serve`, and additional ones.
pub fn slice_json(metrics: &Metrics, result: &RunResult) -> Map<String, Value> {
    let mut map = metric_keys(metrics, &result.config);
    map.insert("sent".into(), json!(metrics.sent));
    map.insert("left".into(), json!(metrics.left));
    map.insert("unfinished".into(), json!(metrics.unfinished));
    map.insert("asked_input_tokens".into(), json!(metrics.asked_tokens));
    if result.config.has_slo() {
        let attainment = attainment(metrics);
        map.insert("attainment".into(), json!(metrics.attainment()));
        map.insert("attainment_interval_95".into(), json!([attainment.low, attainment.high]));
    }
    if metrics.queue_wait.count() > 0 {
        map.insert("mean_queue_wait_ms".into(), json!(metrics.queue_wait.mean() * 1e3));
        map.insert("p99_queue_wait_ms".into(), json!(metrics.queue_wait.percentile(99.0) * 1e3));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{RunConfig, Slo};

    fn run() -> RunResult {
        let record = |class, adapter, pool: Option<&str>, outcome| Record {
            class,
            adapter,
            outcome,
            pool: pool.map(Into::into),
            ttft: 0.25,
            latency: 0.5,
            output_tokens: Some(2),
            ..Record::default()
        };
        let class = |name: &str, ttft| ClassConfig {
            name: name.into(),
            weight: 1.0,
            slo: Slo { ttft: Some(ttft), ..Slo::default() },
            ..ClassConfig::default()
        };
        let config = RunConfig {
            model: "base".into(),
            classes: vec![class("short", 300.0), class("long", 200.0)],
            adapters: vec!["a".into()],
            ..RunConfig::default()
        };
        let requests = vec![
            record(1, None, Some("p2"), Outcome::Completed),
            record(0, Some(0), Some("p1"), Outcome::Completed),
            record(0, Some(0), None, Outcome::Failed("status 503".into())),
            record(0, None, Some("p1"), Outcome::Completed),
        ];
        RunResult { requests, config, duration: 2.0, ..RunResult::default() }
    }

    #[test]
    fn slices_come_in_order_and_their_rates_add_up() {
        let names = |by| slices(&run(), by).into_iter().map(|(name, slice)| (name, slice.sent)).collect::<Vec<_>>();
        assert_eq!(names(SliceBy::Class), [("short".into(), 3), ("long".into(), 1)]);
        assert_eq!(names(SliceBy::Adapter), [("a".into(), 2), ("base".into(), 2)]);
        assert_eq!(names(SliceBy::Pool), [("p1".into(), 2), ("p2".into(), 1)]);
        assert_eq!(names(SliceBy::Arm), []);
        let rates: f64 =
            slices(&run(), SliceBy::Class).iter().map(|(_, slice)| slice.per_second(slice.completed)).sum();
        assert_eq!(rates, 1.5);
    }

    #[test]
    fn classes_of_the_same_name_are_one_slice_with_their_own_objectives() {
        let mut run = run();
        run.config.classes[1].name = "short".into();
        let slices = slices(&run, SliceBy::Class);
        // 250 ms is within the 300 ms of the first class, not within the 200 ms of the second.
        assert_eq!((slices.len(), slices[0].1.sent, slices[0].1.good), (1, 4, 2));
        assert_eq!(json(&run, SliceBy::Class)["short"]["sent"], 4);
    }

    #[test]
    fn each_class_is_judged_by_its_own_objectives() {
        let json = json(&run(), SliceBy::Class);
        assert_eq!(json["short"]["attainment"], 2.0 / 3.0);
        assert_eq!(json["long"]["attainment"], 0.0);
        assert_eq!(failures(&run()), BTreeMap::from([("status 503", 1)]));
    }
}
