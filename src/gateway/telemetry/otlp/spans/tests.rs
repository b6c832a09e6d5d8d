//! Spans of records: number, times, parents and attributes.
//!
//! All requests end 10 s after 1970, so that times can be compared.

use http::{HeaderMap, HeaderValue};
use smallvec::smallvec;

use super::*;
use crate::flow::record::{RetryReason, Stage};
use crate::flow::trace::TRACEPARENT;
use crate::telemetry::testing::{completed, record};
use sluice_core::meter::StreamStats;
use sluice_core::openai::response::Answer;

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: [u8; 16] = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes();

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn queue(begun: u64) -> Step {
    Step { begun: ms(begun), kind: StepKind::Queue }
}

fn delivery(number: u32, begun: u64, sent: Option<u64>) -> Step {
    let (pool, backend) = ("short".into(), format!("gpu{}", number - 1).into());
    Step { begun: ms(begun), kind: StepKind::Attempt { number, pool, backend, sent: sent.map(ms) } }
}

/// A trace that its client samples, with these steps.
fn trace(steps: impl IntoIterator<Item = Step>) -> Option<Box<RequestTrace>> {
    let mut headers = HeaderMap::new();
    headers.insert(TRACEPARENT, HeaderValue::from_static(PARENT));
    let mut trace = RequestTrace::of(&headers, Some(0.0), || unreachable!("the client has decided"));
    steps.into_iter().for_each(|step| trace.as_mut().unwrap().step(step.begun, step.kind));
    trace
}

/// Name, parent, and milliseconds from and to, for each span of a request.
fn shown(record: &Record) -> Vec<(String, String, u64, u64)> {
    let spans = spans(record, UNIX_EPOCH + ms(10_000));
    let name =
        |id: &[u8]| spans.iter().find(|span| span.span_id == id).map_or("client".to_owned(), |span| span.name.clone());
    let received = 10_000 - record.total.as_millis() as u64;
    let at = |nanos: u64| nanos / 1_000_000 - received;
    let row = |span: &Span| {
        assert_eq!(span.trace_id, TRACE);
        (span.name.clone(), name(&span.parent_span_id), at(span.start_time_unix_nano), at(span.end_time_unix_nano))
    };
    spans.iter().map(row).collect()
}

fn attributes(span: &Span) -> Vec<String> {
    let value = |value: &AnyValue| match value.value.clone().unwrap() {
        Value::StringValue(text) => text,
        Value::BoolValue(flag) => flag.to_string(),
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        Value::ArrayValue(list) => {
            format!("{:?}", list.values.iter().map(|one| one.value.clone().unwrap()).collect::<Vec<_>>())
        }
        other => panic!("{other:?}"),
    };
    span.attributes.iter().map(|one| format!("{}={}", one.key, value(one.value.as_ref().unwrap()))).collect()
}

fn row(name: &str, parent: &str, from: u64, to: u64) -> (String, String, u64, u64) {
    (name.to_owned(), parent.to_owned(), from, to)
}

#[test]
fn a_stream_has_a_span_for_each_stage() {
    let steps = [queue(1), delivery(1, 3, Some(5))];
    let answer = Answer { finish: Some(FinishReason::Length), refused: false };
    let mut record = Record { trace: trace(steps), ..completed(ms(30), ms(10)) };
    record.backend_ttft = Some(ms(25));
    record.stats.as_mut().unwrap().answer = answer;
    assert_eq!(
        shown(&record),
        [
            row("chat llama", "client", 0, 800),
            row("queue", "chat llama", 1, 3),
            row("attempt", "chat llama", 3, 800),
            row("prefill", "attempt", 5, 30),
            row("decode", "attempt", 30, 520),
        ]
    );
    let first = spans(&record, SystemTime::now()).remove(0);
    assert_eq!(first.kind(), SpanKind::Server);
    assert_eq!(first.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
    insta::assert_snapshot!(attributes(&first).join("\n"));
    assert_eq!(first.status, None);
}

#[test]
fn the_engine_gets_the_span_of_its_attempt() {
    let record =
        Record { trace: trace([queue(0), delivery(1, 1, None), delivery(2, 2, None)]), ..record(Outcome::ClientGone) };
    let ids: Vec<Vec<u8>> = spans(&record, SystemTime::now())
        .into_iter()
        .filter(|span| span.name == "attempt")
        .map(|span| span.span_id)
        .collect();
    let announced = [1, 2].map(|number| record.trace.as_ref().unwrap().attempt(number).span.to_be_bytes().to_vec());
    assert_eq!(ids, announced);
}

#[test]
fn an_attempt_that_was_repeated_says_why_and_has_no_stages() {
    let steps = [queue(0), delivery(1, 2, Some(3)), queue(10), delivery(2, 12, Some(13))];
    let outcome = Outcome::Timeout(Stage::Idle);
    let stats = Some(StreamStats { ttft: Some(ms(40)), ..StreamStats::default() });
    let record = Record {
        trace: trace(steps),
        retries: smallvec![RetryReason::Broken],
        backend_ttft: Some(ms(27)),
        stats,
        ..record(outcome)
    };
    assert_eq!(
        shown(&record)[1..],
        [
            row("queue", "chat llama", 0, 2),
            row("attempt", "chat llama", 2, 10),
            row("queue", "chat llama", 10, 12),
            row("attempt", "chat llama", 12, 800),
            row("prefill", "attempt", 13, 40),
            row("decode", "attempt", 40, 800),
        ]
    );
    let spans = spans(&record, SystemTime::now());
    let error = |at: usize| spans[at].status.as_ref().map(|status| status.message.as_str());
    assert_eq!([0, 1, 2, 4].map(error), [Some("idle"), None, Some("broken"), Some("idle")]);
    assert!(attributes(&spans[2]).contains(&"sluice.backend=gpu0".to_owned()));
}

#[test]
fn a_request_that_was_shed_or_refused_has_what_it_went_through() {
    let shed = Outcome::Shed(sluice_core::openai::ShedReason::QueueFull);
    let shed = Record { trace: trace([queue(1)]), ..record(shed) };
    assert_eq!(shown(&shed), [row("chat llama", "client", 0, 800), row("queue", "chat llama", 1, 800)]);
    let refused = Record { trace: trace([]), model: None, ..record(Outcome::Refused) };
    assert_eq!(shown(&refused), [row("chat", "client", 0, 800)]);
    let status = |record: &Record| spans(record, SystemTime::now()).remove(0).status.map(|status| status.code());
    assert_eq!((status(&shed), status(&refused)), (Some(StatusCode::Error), None));
}

#[test]
fn a_trace_that_is_not_sampled_has_no_spans() {
    assert_eq!(spans(&completed(ms(30), ms(10)), SystemTime::now()), []);
    let mut headers = HeaderMap::new();
    headers.insert(TRACEPARENT, HeaderValue::from_static(PARENT));
    let trace = RequestTrace::of(&headers, None, || unreachable!());
    assert_eq!(spans(&Record { trace, ..completed(ms(30), ms(10)) }, SystemTime::now()), []);
}
