//! The pages and errors that SGLang has in place of vLLM's.
//!
//! `/health_generate` waits a second, as in SGLang, and 20 s if the engine hangs. Field names and
//! texts are from SGLang 0.5.23. The values are the simulator's. Other routes and generated answers
//! have the same form as in vLLM.

use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::engine::BLOCK_TOKENS;
use crate::http::error_body::ErrorBody;
use crate::http::reply::{Reply, body, json_reply};
use crate::observe::stats::{Histogram, Stats};
use crate::real_time::state::ServerState;

/// The version that is imitated.
const VERSION: &str = "0.5.23";
/// Pause before `/health_generate` looks for a sign of life.
const HEALTH_PAUSE: Duration = Duration::from_secs(1);
/// Time after which `/health_generate` gives up.
const HEALTH_LIMIT: Duration = Duration::from_secs(20);
/// Steps after which `realtime_tokens_total` moves (`--decode-log-interval`).
const REPORT_STEPS: u64 = 40;

/// `/health_generate`.
pub(super) async fn health(shared: &ServerState) -> Reply {
    tokio::time::sleep(HEALTH_PAUSE).await;
    if shared.hung.load(Ordering::Relaxed) {
        tokio::time::sleep(HEALTH_LIMIT - HEALTH_PAUSE).await;
    }
    let is_down = shared.hung.load(Ordering::Relaxed) || shared.dead.is_cancelled();
    body(if is_down { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }, "", String::new())
}

/// Tokens that the KV cache holds.
fn kv_tokens(shared: &ServerState) -> u64 {
    u64::from(shared.config.engine.num_blocks) * u64::from(BLOCK_TOKENS)
}

/// `/v1/loads`.
pub(super) fn loads(shared: &ServerState) -> Reply {
    let gauges = shared.first().stats.lock().gauges;
    let (total, running) = (kv_tokens(shared), gauges.running);
    let waiting = gauges.waiting + gauges.deferred;
    let load = json!({
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": (gauges.kv_usage * total as f64) as u64,
        "max_total_num_tokens": total,
        "token_usage": gauges.kv_usage,
        "max_running_requests": shared.config.engine.max_num_seqs,
    });
    json_reply(&json!({
        "version": VERSION,
        "accelerator": shared.config.profile.gpu.title,
        "num_accelerators": 1,
        "loads": [load],
    }))
}

/// `/server_info` and `/get_server_info`.
pub(super) fn server_info(shared: &ServerState) -> Reply {
    let config = &shared.config;
    json_reply(&json!({
        "model_path": config.root,
        "served_model_name": config.names.first(),
        "max_running_requests": config.engine.max_num_seqs,
        "chunked_prefill_size": config.engine.max_num_batched_tokens,
        "mem_fraction_static": config.utilisation,
        "max_total_num_tokens": kv_tokens(shared),
        "internal_states": [{"effective_max_running_requests_per_dp": config.engine.max_num_seqs}],
        "version": VERSION,
    }))
}

/// `/model_info` and `/get_model_info`.
pub(super) fn model_info(shared: &ServerState) -> Reply {
    let config = &shared.config;
    json_reply(&json!({
        "model_path": config.root,
        "served_model_name": config.names.first(),
        "tokenizer_path": config.root,
        "is_generation": true,
        "load_format": "auto",
    }))
}

/// The body of an error: flat, where vLLM has an object within `error`.
pub(super) fn error(error: &ErrorBody) -> String {
    let plain = error.json();
    let Ok(Value::Object(fields)) = serde_json::from_str::<Value>(&plain) else { return plain };
    if !fields.contains_key("error") {
        return plain;
    }
    let is_full = error.status == 503;
    let message = if is_full { "The request queue is full." } else { &error.message };
    let kind = if is_full { "Service Unavailable" } else { error.kind };
    json!({"object": "error", "message": message, "type": kind, "param": error.param, "code": error.status}).to_string()
}

/// The families of the engine on `/metrics`.
pub(super) fn metrics(shared: &ServerState, stats: &Stats) -> String {
    let model = json!(shared.config.names.first().map_or("", String::as_str));
    let mut page =
        Page { out: String::new(), labels: format!("engine_type=\"unified\",model_name={model},tp_rank=\"0\"") };
    let total = kv_tokens(shared) as f64;
    let waiting = (stats.gauges.waiting + stats.gauges.deferred) as f64;
    page.value("num_running_reqs", "gauge", stats.gauges.running as f64);
    page.value("num_queue_reqs", "gauge", waiting);
    page.value("num_used_tokens", "gauge", (stats.gauges.kv_usage * total).floor());
    page.value("token_usage", "gauge", stats.gauges.kv_usage);
    page.value("max_total_num_tokens", "gauge", total);
    page.value("cache_hit_rate", "gauge", stats.prefix.1 as f64 / stats.prefix.0.max(1) as f64);
    page.value("prompt_tokens_total", "counter", stats.prompt_tokens as f64);
    page.value("generation_tokens_total", "counter", stats.generation_tokens as f64);
    page.value("num_retracted_requests_total", "counter", stats.preemptions as f64);
    let steps = stats.iteration.cumulative(f64::INFINITY);
    // As in SGLang, the counter moves only every [`REPORT_STEPS`] steps, with a report.
    let reported = if steps.count < REPORT_STEPS { steps.count.min(1) as f64 } else { steps.sum };
    page.value("realtime_tokens_total", "counter", reported);
    page.histogram("time_to_first_token_seconds", &stats.ttft);
    page.histogram("inter_token_latency_seconds", &stats.itl);
    page.histogram("e2e_request_latency_seconds", &stats.e2e);
    page.out
}

struct Page {
    out: String,
    labels: String,
}

impl Page {
    fn value(&mut self, name: &str, kind: &str, value: f64) {
        let _ = writeln!(self.out, "# TYPE sglang:{name} {kind}\nsglang:{name}{{{}}} {value:?}", self.labels);
    }

    fn histogram(&mut self, name: &str, histogram: &Histogram) {
        let found = histogram.cumulative(f64::INFINITY);
        let _ = writeln!(self.out, "# TYPE sglang:{name} histogram");
        for (bound, count) in found.buckets {
            let _ = writeln!(self.out, "sglang:{name}_bucket{{{},le=\"{bound:?}\"}} {count}.0", self.labels);
        }
        let labels = &self.labels;
        let _ = writeln!(self.out, "sglang:{name}_bucket{{{labels},le=\"+Inf\"}} {}.0", found.count);
        let _ = writeln!(self.out, "sglang:{name}_sum{{{labels}}} {:?}", found.sum);
        let _ = writeln!(self.out, "sglang:{name}_count{{{labels}}} {}.0", found.count);
    }
}
