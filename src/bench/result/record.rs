//! The result of a run: its configuration, one record for each request, the health of servers and
//! client.
//!
//! A result holds measurements only; `metrics` computes statistics, so new statistics can be
//! computed from old files.
//!
//! Times are seconds as `f64`; points in time count from the start of the run. The clock of a
//! request starts when it is sent, after any wait for `--max-concurrency`, as in `vllm bench
//! serve`. Earlier times are separate fields (`due`, `queued`).
//!
//! Bounds: about 300 bytes for each request, 8 for each gap between tokens, and the texts if they
//! are kept.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The result of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunResult {
    /// When the run began, UTC, RFC 3339; empty if unknown.
    pub started_at: String,
    /// The configuration of the run.
    pub config: RunConfig,
    /// Seconds until the last request ended. Rates are numbers divided by this.
    pub duration: f64,
    /// Whether the run was ended early (Ctrl-C), so that the result covers only the time until
    /// then.
    pub partial: bool,
    /// One record for each request that was sent, in the order of the workload.
    pub requests: Vec<Record>,
    /// One entry for each server with readable `/metrics`.
    pub servers: Vec<ServerSide>,
    /// How well the load generator kept up.
    pub client: ClientHealth,
    /// Warnings about the validity of the numbers.
    pub warnings: Vec<String>,
    /// The top-level keys of the file that was read; files of other tools may hold statistics
    /// without requests.
    #[serde(skip)]
    pub reported: Map<String, Value>,
    /// The file that was read; empty for a run of this process.
    #[serde(skip)]
    pub file: String,
}

/// The configuration of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunConfig {
    /// The user's name for the run.
    pub label: Option<String>,
    /// `openai`, `openai-chat` or `vllm`, as given; `sluice lab` for a simulated run.
    pub backend: String,
    /// Base addresses of the servers, which requests take in turn.
    pub urls: Vec<String>,
    /// Path of the requests.
    pub endpoint: String,
    /// The `"model"` of requests without an adapter.
    pub model: String,
    /// Path or name of the tokenizer that counts tokens; `None` if unknown.
    pub tokenizer: Option<String>,
    /// Number of requests that the user set; 0 if the user set a duration.
    pub num_prompts: u64,
    /// Source of the prompts: `random`, `sharegpt`, ...
    pub dataset: String,
    /// The arrivals in words: `poisson`, `closed loop`, `recorded`, ...
    pub arrival: String,
    /// Requests per second; `None`: all at once (`inf`), recorded times, or a changing rate.
    pub request_rate: Option<f64>,
    /// Shape of the gamma distribution of the gaps; 1 is Poisson, `None` constant gaps.
    pub burstiness: Option<f64>,
    /// The most requests in flight.
    pub max_concurrency: Option<u32>,
    /// How the rate changed during the run.
    pub ramp: Option<Ramp>,
    /// Objectives of classes without their own.
    pub slo: Slo,
    /// Percentiles to report, 0 to 100.
    pub percentiles: Vec<f64>,
    /// Measures to report: `ttft`, `tpot`, `itl`, `e2el`.
    pub percentile_metrics: Vec<String>,
    /// Kinds of requests, indexed by [`Record::class`].
    pub classes: Vec<ClassConfig>,
    /// The gateway's classes, indexed by [`Record::gateway_class`]; empty: reports use `classes`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gateway_classes: Vec<GatewayClass>,
    /// LoRA adapters in the mix, indexed by [`Record::adapter`].
    pub adapters: Vec<String>,
    /// The seed of all randomness.
    pub seed: u64,
    /// Keys and values given by the user.
    pub metadata: BTreeMap<String, String>,
    /// Version of the load generator; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// The versions of vLLM that servers reported (a gateway has no `/version`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub server_versions: Vec<String>,
    /// Arguments of the command line, secrets masked; may be empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
}

/// A rate that changes during a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ramp {
    /// `linear` or `exponential`.
    pub strategy: String,
    /// Rate at the first request, per second.
    pub start: f64,
    /// Rate at the last request, per second.
    pub end: f64,
}

/// One kind of request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClassConfig {
    /// Name in reports.
    pub name: String,
    /// Share of the requests, relative to the other classes.
    pub weight: f64,
    /// The objectives.
    pub slo: Slo,
    /// Prompt lengths in tokens, as on the command line (`200`, `100-2000`); empty for a file.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub prompt: String,
    /// Output lengths, written in the same way.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub output: String,
    /// The shared prefix in words; empty: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub prefix: String,
}

/// A class of the gateway (`[[class]]`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayClass {
    /// Name of the class.
    pub name: String,
    /// The requests of the class in words.
    pub requests: String,
}

/// Objectives: upper bounds in milliseconds, as in `--goodput`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Option<f64>,
    /// Time per output token. A response of one token has no TPOT, and meets any bound.
    pub tpot: Option<f64>,
    /// Time from the start to the last token.
    pub e2el: Option<f64>,
}

/// One request and the outcome.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Number in the workload.
    pub index: u64,
    /// Index into [`RunConfig::classes`].
    pub class: u32,
    /// Index into [`RunConfig::gateway_classes`]; `None` if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway_class: Option<u32>,
    /// Index into [`RunConfig::adapters`]; `None`: the base model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<u32>,
    /// Conversation and turn (from 0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<(u64, u32)>,
    /// When the request should have been sent; `None` in a closed loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due: Option<f64>,
    /// Time for which the request waited in this process for `max_concurrency`.
    #[serde(skip_serializing_if = "is_zero")]
    pub queued: f64,
    /// When the request was sent.
    pub sent: f64,
    /// When the response ended, or the request failed.
    pub ended: f64,
    /// The outcome.
    pub outcome: Outcome,
    /// Prompt tokens that the server reported, otherwise the requested number.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache, if the server reports them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Tokens that a generated prompt was meant to have, if the server counted another number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked_tokens: Option<u64>,
    /// Output tokens that the server reported, otherwise counted by a tokenizer.
    pub output_tokens: Option<u64>,
    /// Whether a tokenizer counted the output tokens.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub output_counted: bool,
    /// Time from sending to the first token event; 0 if there was no token event.
    pub ttft: f64,
    /// Time from sending to the last token event; 0 if there was no token event.
    pub latency: f64,
    /// Gaps between token events.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub itls: Vec<f64>,
    /// The generated text, if the run keeps texts.
    #[serde(skip)]
    pub text: Option<Box<str>>,
    /// From `x-sluice-pool`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Arc<str>>,
    /// From `x-sluice-backend`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<Arc<str>>,
    /// From `x-sluice-arm`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arm: Option<Arc<str>>,
    /// Time in the gateway's queue, from `server-timing: queue`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_wait: Option<f64>,
}

/// The outcome of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A complete response.
    Completed,
    /// The response was not complete, for this reason: `status 503`, `stream cut`, ...
    Failed(Arc<str>),
    /// The client left as the workload specified: neither a success nor a failure.
    Left,
    /// In flight when the run was ended early: neither a success nor a failure.
    #[default]
    Unfinished,
}

/// One server, from `/metrics`: growth of counters over the run, and peaks of the samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerSide {
    /// Base address of the server.
    pub url: String,
    /// Tokens looked up in the prefix cache.
    pub prefix_queries: f64,
    /// Tokens found in the prefix cache.
    pub prefix_hits: f64,
    /// Requests evicted from the KV cache and recomputed.
    pub preemptions: f64,
    /// Prompt tokens that the server counted.
    pub prompt_tokens: f64,
    /// Output tokens that the server counted.
    pub generation_tokens: f64,
    /// Highest share of KV blocks in use, 0 to 1.
    pub kv_peak: f64,
    /// Most requests running at once.
    pub running_peak: f64,
    /// Most requests waiting at once.
    pub waiting_peak: f64,
    /// Samples, in order of time.
    pub samples: Vec<ServerSample>,
}

/// One sample of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerSample {
    /// Time of the sample.
    pub at: f64,
    /// Requests running.
    pub running: f64,
    /// Requests waiting.
    pub waiting: f64,
    /// Share of KV blocks in use, 0 to 1.
    pub kv_usage: f64,
}

/// How well the load generator kept up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientHealth {
    /// CPU time of this process during the run, user and system, seconds.
    pub cpu_seconds: f64,
    /// Cores that the process may use.
    pub cores: u32,
    /// P99 of the lag of the timers, seconds.
    pub lag_p99: f64,
    /// The largest lag of a timer, seconds.
    pub lag_max: f64,
}

impl Record {
    /// Whether the response was complete.
    pub fn is_completed(&self) -> bool {
        self.outcome == Outcome::Completed
    }

    /// Whether the request failed.
    pub fn is_failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }

    /// (latency - ttft) / (output tokens - 1), if the request completed with more than one token.
    pub fn tpot(&self) -> Option<f64> {
        let tokens = self.output_tokens.filter(|tokens| self.is_completed() && *tokens > 1)?;
        Some((self.latency - self.ttft) / (tokens - 1) as f64)
    }

    /// Whether the request completed with an unknown number of output tokens.
    pub fn is_uncounted(&self) -> bool {
        self.is_completed() && self.output_tokens.is_none()
    }

    /// Tokens that the prompt was meant to have.
    pub fn asked(&self) -> u64 {
        self.asked_tokens.unwrap_or(self.prompt_tokens)
    }

    /// TPOT as it is compared with an objective: 0 for one token, infinite if unknown.
    fn judged_tpot(&self) -> f64 {
        if self.is_uncounted() { f64::INFINITY } else { self.tpot().unwrap_or(0.0) }
    }

    /// Time from the due time until the request was sent; 0 in a closed loop.
    pub fn delay(&self) -> f64 {
        self.due.map_or(0.0, |due| (self.sent - due).max(0.0))
    }

    /// [`Record::delay`] without the wait for `max_concurrency`.
    pub fn lag(&self) -> f64 {
        (self.delay() - self.queued).max(0.0)
    }

    /// Whether the request completed and met every bound of `slo`, as in `vllm bench serve`:
    /// equality meets a bound, and an unknown number of tokens meets no TPOT.
    pub fn meets(&self, slo: &Slo) -> bool {
        let holds = |bound: Option<f64>, value: f64| bound.is_none_or(|bound| value <= bound / 1e3);
        self.is_completed()
            && holds(slo.ttft, self.ttft)
            && holds(slo.tpot, self.judged_tpot())
            && holds(slo.e2el, self.latency)
    }
}

impl Record {
    /// The largest ratio of a measure to the bound, counted from the due time; infinite if the
    /// request did not complete.
    pub fn slo_ratio(&self, slo: &Slo) -> f64 {
        if !self.is_completed() {
            return f64::INFINITY;
        }
        let over = |bound: Option<f64>, value: f64| bound.map_or(0.0, |bound| value * 1e3 / bound);
        let delay = self.delay();
        over(slo.ttft, delay + self.ttft)
            .max(over(slo.e2el, delay + self.latency))
            .max(over(slo.tpot, self.judged_tpot()))
    }
}

impl RunResult {
    /// The same result as if every request had been sent when due.
    #[must_use]
    pub fn from_due(&self) -> Self {
        let mut result = self.clone();
        for record in &mut result.requests {
            let delay = record.delay();
            record.sent -= delay;
            record.queued = 0.0;
            if record.is_completed() {
                record.ttft += delay;
                record.latency += delay;
            }
        }
        result
    }
}

impl Slo {
    /// Whether there is no bound.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl RunConfig {
    /// The objectives of a class, or if it has none, of the run.
    pub fn slo_of(&self, class: u32) -> &Slo {
        self.classes.get(class as usize).map(|class| &class.slo).filter(|slo| !slo.is_empty()).unwrap_or(&self.slo)
    }

    /// Whether the run or any class has objectives.
    pub fn has_slo(&self) -> bool {
        !self.slo.is_empty() || self.classes.iter().any(|class| !class.slo.is_empty())
    }
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_room_is_not_the_clients_lag() {
        let record = Record { due: Some(1.0), queued: 0.25, sent: 1.5, ..Record::default() };
        assert_eq!((record.delay(), record.lag()), (0.5, 0.25));
        let closed = Record { due: None, sent: 3.0, ..Record::default() };
        assert_eq!((closed.delay(), closed.lag()), (0.0, 0.0));
    }

    #[test]
    fn latencies_from_the_due_time_include_the_delay_and_tpot_does_not() {
        let record = Record {
            due: Some(1.0),
            sent: 1.5,
            ttft: 0.25,
            latency: 0.75,
            outcome: Outcome::Completed,
            output_tokens: Some(3),
            ..Record::default()
        };
        let failed = Record { outcome: Outcome::Failed("cut".into()), ttft: 0.0, ..record.clone() };
        let run = RunResult { requests: vec![record, failed], ..RunResult::default() }.from_due();
        let record = &run.requests[0];
        assert_eq!((record.sent, record.ttft, record.latency, record.delay()), (1.0, 0.75, 1.25, 0.0));
        assert_eq!(record.tpot(), Some(0.25));
        assert_eq!(run.requests[1].ttft, 0.0);
    }

    #[test]
    fn an_objective_is_met_at_equality_and_never_by_a_failure() {
        let slo = Slo { ttft: Some(125.0), tpot: Some(10.0), e2el: Some(375.0) };
        let outcome = Outcome::Completed;
        let record = Record { outcome, output_tokens: Some(26), ttft: 0.125, latency: 0.375, ..Record::default() };
        assert!(record.meets(&slo));
        assert!(!Record { ttft: 0.1251, ..record.clone() }.meets(&slo));
        assert!(!Record { output_tokens: Some(25), ..record.clone() }.meets(&slo));
        assert!(Record { output_tokens: Some(1), ..record.clone() }.meets(&slo));
        let uncounted = Record { output_tokens: None, ..record.clone() };
        assert!(!uncounted.meets(&slo) && uncounted.meets(&Slo { tpot: None, ..slo }));
        assert_eq!((uncounted.tpot(), uncounted.slo_ratio(&slo)), (None, f64::INFINITY));
        assert!(!Record { outcome: Outcome::Failed("status 503".into()), ..record }.meets(&slo));
    }

    #[test]
    fn a_class_without_objectives_has_those_of_the_run() {
        let class = |slo| ClassConfig { name: "c".into(), weight: 1.0, slo, ..ClassConfig::default() };
        let own = Slo { ttft: Some(1.0), ..Slo::default() };
        let slo = Slo { e2el: Some(9.0), ..Slo::default() };
        let config = RunConfig { slo, classes: vec![class(Slo::default()), class(own)], ..RunConfig::default() };
        assert_eq!((config.slo_of(0), config.slo_of(1), config.slo_of(7)), (&slo, &own, &slo));
    }
}
