//! One line of the access log: a JSON object about one finished request.
//!
//! Keys that do not apply are left out. The line of a copy for a shadow arm has the key `copy` and
//! the `request_id` of the original. Times are milliseconds with three decimals; `time` is when the
//! request ended, RFC 3339 in UTC. The prompt, the answer and the API key are never in a line;
//! `key` is the key's name.
//!
//! Keys are never renamed or removed, because users have queries on them. A line of `[records]`
//! lacks some of the keys and has others (`Line::into_record`); `version` says how to read the
//! hashes in it.

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use super::salt::Salt;
use crate::experiment::CopyOutcome;
use crate::flow::Record;
use sluice_core::openai::prefix::RECORD_VERSION;
use sluice_core::openai::{NotContinued, Route};

/// Initial capacity of a line; usual lines have 450 to 650 bytes.
const LINE_BYTES: usize = 768;

#[derive(Serialize)]
struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused_model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    home: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arm: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fell_back_from: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    copy: Option<&'static str>,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    estimate_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    estimate_how: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_events: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u64>,
    queue_ms: f64,
    connect_ms: f64,
    #[serde(skip_serializing_if = "is_zero")]
    client_wait_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend_ttft_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_queue_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_prefill_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tpot_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    e2el_ms: Option<f64>,
    total_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    outcome: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    detail: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    retries: Vec<&'static str>,
    #[serde(skip_serializing_if = "is_none")]
    continued: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_continued: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slo_met: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    prefix: Vec<String>,
}

impl Line<'_> {
    /// Converts the line to a record: adds hashes of the prompt; removes texts of the client (ids,
    /// paths, names of unknown models) and data that identifies the client (the key; ids that lead
    /// to the access log and traces).
    fn into_record(self, record: &Record, salt: &Salt) -> Self {
        let prefix = record.prefix.as_ref();
        Self {
            version: Some(RECORD_VERSION),
            request_id: None,
            upstream_id: None,
            trace_id: None,
            path: None,
            key: None,
            refused_model: None,
            prompt_bytes: prefix.map(|prefix| prefix.bytes),
            prefix: prefix.map(|prefix| salt.hashes(prefix)).unwrap_or_default(),
            ..self
        }
    }
}

#[derive(Default)]
pub(super) struct Shown {
    pub(super) client: bool,
    /// Key of the prompt's hashes; set if the line is a record.
    pub(super) salt: Option<Salt>,
}

/// The line, with line feed, of a request that ended at `time`.
pub(super) fn line(record: &Record, time: Timestamp, shown: &Shown) -> Vec<u8> {
    let stats = record.stats.as_ref();
    let usage = stats.map(|stats| stats.usage).unwrap_or_default();
    let line = Line {
        version: None,
        time: format!("{time:.3}"),
        request_id: Some(&record.request_id),
        upstream_id: Some(&*record.upstream_id).filter(|id| **id != *record.request_id),
        trace_id: record.trace.as_ref().map(|trace| format!("{:032x}", trace.id())),
        route: record.route.map(Route::label),
        path: record.path.as_deref(),
        client: record.client.filter(|_| shown.client),
        key: record.key.as_deref(),
        model: record.model.as_deref(),
        refused_model: record.refused_model.as_deref(),
        pool: record.pool.as_deref(),
        home: record.home.as_deref(),
        class: record.class.as_deref(),
        backend: record.backend.as_deref(),
        arm: record.arm.as_deref(),
        fell_back_from: record.fell_back_from(),
        copy: record.copy.map(CopyOutcome::label),
        stream: record.stream,
        estimate_tokens: record.estimate.as_ref().map(|estimate| estimate.tokens),
        estimate_how: record.estimate.as_ref().map(|estimate| estimate.source.label()),
        prompt_tokens: usage.prompt,
        completion_tokens: usage.completion,
        token_events: stats.map(|stats| stats.token_events).filter(|n| usage.completion.is_none() && *n > 0),
        cached_tokens: usage.cached,
        queue_ms: ms(record.queue_wait),
        connect_ms: ms(record.connect_time),
        client_wait_ms: ms(record.client_wait),
        ttft_ms: stats.and_then(|stats| stats.ttft).map(ms),
        backend_ttft_ms: record.backend_ttft.map(ms),
        engine_queue_ms: record.engine_times().map(|times| ms(times.queue)),
        engine_prefill_ms: record.engine_times().map(|times| ms(times.prefill)),
        tpot_ms: stats.and_then(|stats| stats.tpot).map(ms),
        e2el_ms: stats.and_then(|stats| stats.e2el).map(ms),
        total_ms: ms(record.total),
        status: record.status.map(|status| status.as_u16()),
        outcome: record.outcome.label(),
        detail: record.detail(),
        retries: record.retries.iter().map(|reason| reason.label()).collect(),
        continued: record.continued,
        not_continued: record.not_continued.map(NotContinued::label),
        slo_met: record.slo_met,
        prompt_bytes: None,
        prefix: Vec::new(),
    };
    let line = match &shown.salt {
        Some(salt) => line.into_record(record, salt),
        None => line,
    };
    let mut text = Vec::with_capacity(LINE_BYTES);
    // Cannot fail: there are no map keys and no foreign Serialize, and a Vec takes every byte.
    let _ = serde_json::to_writer(&mut text, &line);
    text.push(b'\n');
    text
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

fn is_zero(ms: &f64) -> bool {
    *ms == 0.0
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
