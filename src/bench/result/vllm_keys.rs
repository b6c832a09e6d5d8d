//! Statistics as JSON, under the keys of `vllm bench serve`.
//!
//! Latencies are in milliseconds; values that depend on unknown output tokens are null. The arrays
//! with a value for each request are in `file`.

use serde_json::{Map, Value, json};

use crate::result::metrics::{Distribution, Metrics};
use crate::result::record::{RunConfig, RunResult};

/// The keys for the whole run, without arrays.
pub fn vllm_keys(result: &RunResult, metrics: &Metrics) -> Map<String, Value> {
    let config = &result.config;
    let mut map: Map<String, Value> = config.metadata.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    let date: String = result.started_at.chars().filter(|c| c.is_ascii_digit() || *c == 'T').take(15).collect();
    let rate = config.request_rate.map_or(json!("inf"), |rate| json!(rate));
    for (key, value) in [
        ("date", json!(date.replace('T', "-"))),
        ("endpoint_type", json!(config.backend)),
        ("backend", json!(config.backend)),
        ("label", json!(config.label)),
        ("model_id", json!(config.model)),
        ("tokenizer_id", json!(config.tokenizer)),
        ("num_prompts", json!(config.num_prompts)),
        ("request_rate", rate),
        ("burstiness", config.burstiness.map_or(json!("inf"), |shape| json!(shape))),
        ("max_concurrency", json!(config.max_concurrency)),
    ] {
        map.insert(key.into(), value);
    }
    if let Some(ramp) = &config.ramp {
        map.insert("ramp_up_strategy".into(), json!(ramp.strategy));
        map.insert("ramp_up_start_rps".into(), json!(ramp.start));
        map.insert("ramp_up_end_rps".into(), json!(ramp.end));
    }
    map.append(&mut metric_keys(metrics, config));
    map
}

/// The keys for a set of requests.
pub fn metric_keys(metrics: &Metrics, config: &RunConfig) -> Map<String, Value> {
    let goodput = config.has_slo().then(|| metrics.per_second(metrics.good));
    let total = metrics.known_output().map(|output| metrics.per_second(metrics.input_tokens + output));
    let mut map = Map::new();
    for (key, value) in [
        ("duration", json!(metrics.duration)),
        ("completed", json!(metrics.completed)),
        ("failed", json!(metrics.failed)),
        ("total_input_tokens", json!(metrics.input_tokens)),
        ("total_output_tokens", json!(metrics.known_output())),
        ("request_throughput", json!(metrics.per_second(metrics.completed))),
        ("request_goodput", json!(goodput)),
        ("input_throughput", json!(metrics.per_second(metrics.input_tokens))),
        ("output_throughput", json!(metrics.output_rate())),
        ("total_token_throughput", json!(total)),
        ("max_output_tokens_per_s", json!(metrics.known_peak())),
        ("max_concurrent_requests", json!(metrics.peak_requests)),
        ("rtfx", json!(0.0)),
    ] {
        map.insert(key.into(), value);
    }
    for name in &config.percentile_metrics {
        match metrics.measure(name) {
            Some(distribution) => statistics(&mut map, name, distribution, &config.percentiles),
            None if name == "tpot" => unknown(&mut map, name, &config.percentiles),
            None => {}
        }
    }
    if config.max_concurrency.is_some() && config.percentile_metrics.iter().any(|name| name == "client_queue_time") {
        statistics(&mut map, "client_queue_time", &metrics.client_queue, &config.percentiles);
    }
    map
}

fn unknown(map: &mut Map<String, Value>, name: &str, percentiles: &[f64]) {
    for statistic in ["mean", "median", "std"] {
        map.insert(format!("{statistic}_{name}_ms"), Value::Null);
    }
    for p in percentiles {
        map.insert(format!("p{p}_{name}_ms"), Value::Null);
    }
}

pub(super) fn statistics(map: &mut Map<String, Value>, name: &str, of: &Distribution, percentiles: &[f64]) {
    map.insert(format!("mean_{name}_ms"), json!(of.mean() * 1e3));
    map.insert(format!("median_{name}_ms"), json!(of.median() * 1e3));
    map.insert(format!("std_{name}_ms"), json!(of.std() * 1e3));
    for p in percentiles {
        map.insert(format!("p{p}_{name}_ms"), json!(of.percentile(*p) * 1e3));
    }
}
