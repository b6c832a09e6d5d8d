//! The spans of one request, built from the record.
//!
//! ```text
//! chat MODEL                 server   from the request received to the end of the response
//! ├─ queue                   internal each wait for a lease
//! └─ attempt                 client   each delivery to a backend; the parent of the engine's span
//!    ├─ prefill              internal from the request sent to the first token, for a stream
//!    └─ decode               internal from there to the last
//! ```
//!
//! Names and attributes of the first span follow the semantic conventions for generative AI (in
//! development, as of 1.41); other attributes are `sluice.*`, in seconds and tokens. Only the first
//! span has token counts, so that they are not added up twice. Prompts and answers never enter a
//! span.
//!
//! The request ended when the record was handed over. Bounds: two spans for each step of the trace
//! and two more.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, SpanFlags, Status};

use super::origin::{attribute, number, scope, text};
use crate::flow::{Outcome, Record, RequestTrace, Step, StepKind};
use sluice_core::base::TraceParent;
use sluice_core::openai::Route;
use sluice_core::openai::response::FinishReason;

/// W3C's flag for a trace that is sampled.
const SAMPLED: u32 = 1;
/// Bases of the span numbers of waits and stages. Deliveries are numbered from 1.
const QUEUE: u64 = 1 << 32;
const PREFILL: u64 = 2 << 32;
const DECODE: u64 = 3 << 32;

pub(super) fn request(resource: &Resource, traces: impl Iterator<Item = Vec<Span>>) -> ExportTraceServiceRequest {
    let spans = traces.flatten().collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans, schema_url: String::new() }];
    let spans = ResourceSpans { resource: Some(resource.clone()), scope_spans, schema_url: String::new() };
    ExportTraceServiceRequest { resource_spans: vec![spans] }
}

/// The spans of a request that ended at `ended`; none if the trace is not sampled.
pub(super) fn spans(record: &Record, ended: SystemTime) -> Vec<Span> {
    let Some(trace) = record.trace.as_ref().filter(|trace| trace.is_sampled()) else { return Vec::new() };
    let received = ended.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(record.total);
    let own = Below { received, context: trace.own() };
    let mut spans = vec![root(record, trace, &own)];
    let steps = trace.steps();
    let ends = steps.iter().skip(1).map(|step| step.begun).chain([record.total]);
    let mut attempts = 0;
    for (number, (step, end)) in (0..).zip(steps.iter().zip(ends)) {
        match &step.kind {
            StepKind::Queue => spans.push(own.span(QUEUE + number, "queue", (step.begun, end))),
            StepKind::Attempt { number, .. } => {
                let retried = record.retries.get(attempts).map(|reason| reason.label());
                attempts += 1;
                attempt(
                    &mut spans,
                    record,
                    &own,
                    Below { received, context: trace.attempt(*number) },
                    (step, end, retried),
                );
            }
        }
    }
    spans
}

struct Below {
    /// When the request was received, since 1970.
    received: Duration,
    context: TraceParent,
}

impl Below {
    /// A span below this one; times are since the request was received.
    fn span(&self, number: u64, name: &str, within: (Duration, Duration)) -> Span {
        self.own(self.context.child(number), name, SpanKind::Internal, within)
    }

    fn own(&self, context: TraceParent, name: &str, kind: SpanKind, (begun, end): (Duration, Duration)) -> Span {
        let nanos = |since: Duration| u64::try_from((self.received + since).as_nanos()).unwrap_or(u64::MAX);
        Span {
            trace_id: context.trace.to_be_bytes().into(),
            span_id: context.span.to_be_bytes().into(),
            parent_span_id: self.context.span.to_be_bytes().into(),
            flags: SAMPLED | SpanFlags::ContextHasIsRemoteMask as u32,
            name: name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: nanos(begun),
            end_time_unix_nano: nanos(end.max(begun)),
            ..Span::default()
        }
    }
}

fn root(record: &Record, trace: &RequestTrace, own: &Below) -> Span {
    let operation = record.route.map_or("request", operation);
    let name = match &record.model {
        Some(model) => format!("{operation} {model}"),
        None => operation.to_owned(),
    };
    let mut span = own.own(own.context, &name, SpanKind::Server, (Duration::ZERO, record.total));
    span.parent_span_id = trace.parent().map(|span| span.to_be_bytes().into()).unwrap_or_default();
    if trace.parent().is_some() {
        span.flags |= SpanFlags::ContextIsRemoteMask as u32;
    }
    span.attributes = vec![
        text("gen_ai.operation.name", operation),
        text("gen_ai.provider.name", "vllm"),
        flag("gen_ai.request.stream", record.stream),
        text("sluice.request_id", &record.request_id),
        text("sluice.outcome", record.outcome.label()),
        seconds("sluice.queue_seconds", record.queue_wait),
        seconds("sluice.client_wait_seconds", record.client_wait),
    ];
    let texts = [
        ("gen_ai.request.model", &record.model),
        ("sluice.class", &record.class),
        ("sluice.pool", &record.pool),
        ("sluice.backend", &record.backend),
        ("sluice.arm", &record.arm),
        ("sluice.key", &record.key),
    ];
    span.attributes.extend(texts.into_iter().filter_map(|(name, value)| Some(text(name, value.as_deref()?))));
    span.attributes.extend(record.route.map(|route| text("sluice.route", route.label())));
    span.attributes.extend(record.status.map(|status| number("http.response.status_code", status.as_u16())));
    span.attributes.extend(record.estimate.map(|estimate| count("sluice.estimated_tokens", estimate.tokens)));
    span.attributes.extend(record.slo_met.map(|met| flag("sluice.slo_met", met)));
    span.attributes.extend((record.continued > 0).then(|| count("sluice.continued", record.continued.into())));
    span.attributes.extend(record.not_continued.map(|reason| text("sluice.not_continued", reason.label())));
    measured(record, &mut span.attributes);
    fail(&mut span, error(record));
    span
}

fn measured(record: &Record, attributes: &mut Vec<KeyValue>) {
    let Some(stats) = &record.stats else { return };
    let counts = [
        ("gen_ai.usage.input_tokens", stats.usage.prompt),
        ("gen_ai.usage.output_tokens", stats.usage.completion),
        ("gen_ai.usage.cache_read.input_tokens", stats.usage.cached),
    ];
    attributes.extend(counts.into_iter().filter_map(|(name, tokens)| Some(count(name, tokens?))));
    let times = [
        ("gen_ai.response.time_to_first_chunk", stats.ttft.filter(|_| record.stream)),
        ("sluice.tpot_seconds", stats.tpot),
        ("sluice.e2el_seconds", stats.e2el),
    ];
    attributes.extend(times.into_iter().filter_map(|(name, time)| Some(seconds(name, time?))));
    attributes.extend(stats.answer.finish.map(finish_reasons));
}

fn attempt(
    spans: &mut Vec<Span>,
    record: &Record,
    own: &Below,
    below: Below,
    (step, end, retried): (&Step, Duration, Option<&str>),
) {
    let StepKind::Attempt { number: which, pool, backend, sent } = &step.kind else { return };
    let mut span = own.own(below.context, "attempt", SpanKind::Client, (step.begun, end));
    span.attributes =
        vec![text("sluice.pool", pool), text("sluice.backend", backend), number("sluice.attempt", *which)];
    fail(&mut span, retried.or_else(|| error(record)));
    spans.push(span);
    // Only a delivery that was not repeated can have produced the client's first token.
    let (Some(sent), Some(ttft), None) = (*sent, record.backend_ttft, retried) else { return };
    let first = (sent + ttft).min(end);
    let last = record.stats.as_ref().and_then(|stats| stats.e2el).unwrap_or(end);
    spans.push(below.span(PREFILL, "prefill", (sent, first)));
    spans.push(below.span(DECODE, "decode", (first, last.clamp(first, end.max(first)))));
}

fn operation(route: Route) -> &'static str {
    match route {
        Route::ChatCompletions | Route::ChatBatch | Route::Responses | Route::Messages | Route::CohereChat => "chat",
        Route::Completions => "text_completion",
        other => other.label(),
    }
}

/// The error for the first span, if the gateway or an engine failed. A request that is the client's
/// fault, or that the client gave up, is no error of a server.
fn error(record: &Record) -> Option<&'static str> {
    match record.outcome {
        Outcome::Completed | Outcome::ClientGone | Outcome::Refused => None,
        Outcome::Shed(_) | Outcome::UpstreamError(_) | Outcome::Timeout(_) => Some(record.outcome.detail()),
    }
}

fn fail(span: &mut Span, error: Option<&str>) {
    let Some(error) = error else { return };
    span.attributes.push(text("error.type", error));
    span.status = Some(Status { message: error.to_owned(), code: StatusCode::Error.into() });
}

fn finish_reasons(reason: FinishReason) -> KeyValue {
    let values = vec![AnyValue { value: Some(Value::StringValue(reason.label().to_owned())) }];
    attribute("gen_ai.response.finish_reasons", Value::ArrayValue(ArrayValue { values }))
}

fn flag(key: &str, value: bool) -> KeyValue {
    attribute(key, Value::BoolValue(value))
}

fn count(key: &str, value: u64) -> KeyValue {
    number(key, i64::try_from(value).unwrap_or(i64::MAX))
}

fn seconds(key: &str, value: Duration) -> KeyValue {
    attribute(key, Value::DoubleValue(value.as_secs_f64()))
}

#[cfg(test)]
mod tests;
