//! Traces.
//!
//! The tests check the spans that a collector receives, the span that is passed to the engine, and
//! headers that pass unchanged.

use crate::client::{STREAMED, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, access_log};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn traced(parent: &str) -> Vec<u8> {
    let headers = format!("traceparent: {parent}\r\ntracestate: vendor=1,other=2\r\n");
    post("/v1/chat/completions", &headers, STREAMED.as_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_tracing_the_context_of_a_client_passes_unchanged_and_is_logged() {
    let engine = Engine::always(completion()).await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let set = format!("access_log={{path=\"{}\"}}", log.display());
    let gateway = TestGateway::over(&[engine.url()], &[&set]).await;
    for (number, parent) in [PARENT, "not one"].into_iter().enumerate() {
        assert_eq!(gateway.request(traced(parent)).await.status(), 200);
        let seen = &engine.seen()[number];
        assert_eq!((seen.header("traceparent"), seen.header("tracestate")), (Some(parent), Some("vendor=1,other=2")));
        // The gateway writes the line of a request after the response.
        access_log(&log, number + 1).await;
    }
    let lines = access_log(&log, 2).await;
    let ids = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["trace_id"].clone());
    assert_eq!(ids.collect::<Vec<_>>(), [serde_json::json!(TRACE), serde_json::Value::Null]);
    gateway.settled().await;
}

#[cfg(feature = "otel")]
mod collected {
    use std::collections::BTreeMap;

    use http_body_util::{BodyExt, Full};
    use hyper::body::{Bytes, Incoming};
    use hyper::service::service_fn;
    use hyper::{Request, Response};
    use hyper_util::rt::TokioIo;
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
    use opentelemetry_proto::tonic::common::v1::any_value::Value;
    use opentelemetry_proto::tonic::trace::v1::Span;
    use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
    use prost::Message;
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::*;
    use crate::client::TIMEOUT;
    use crate::engine::{LAST, STREAM, Step, chunk, event};

    struct TestCollector {
        url: String,
        requests: mpsc::Receiver<(String, ExportTraceServiceRequest)>,
    }

    impl TestCollector {
        async fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let (sender, requests) = mpsc::channel(64);
            tokio::spawn(async move {
                while let Ok((socket, _)) = listener.accept().await {
                    let sender = sender.clone();
                    let service = service_fn(move |request| take(request, sender.clone()));
                    let serving =
                        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service);
                    tokio::spawn(serving);
                }
            });
            Self { url, requests }
        }

        async fn spans(&mut self) -> (String, Vec<Span>) {
            let (path, request) = timeout(TIMEOUT, self.requests.recv()).await.expect("traces in time").unwrap();
            let all = request.resource_spans.into_iter().flat_map(|of| of.scope_spans).flat_map(|of| of.spans);
            (path, all.collect())
        }
    }

    async fn take(
        request: Request<Incoming>,
        sender: mpsc::Sender<(String, ExportTraceServiceRequest)>,
    ) -> Result<Response<Full<Bytes>>, hyper::Error> {
        let path = request.uri().path().to_owned();
        let body = request.into_body().collect().await?.to_bytes();
        sender.try_send((path, ExportTraceServiceRequest::decode(body).unwrap())).unwrap();
        Ok(Response::new(Full::default()))
    }

    fn attributes(span: &Span) -> BTreeMap<&str, String> {
        let text = |value: &Value| match value {
            Value::StringValue(text) => text.clone(),
            Value::IntValue(number) => number.to_string(),
            Value::ArrayValue(list) => format!("{:?}", list.values),
            other => format!("{other:?}"),
        };
        let of = |one: &opentelemetry_proto::tonic::common::v1::KeyValue| {
            text(one.value.as_ref().unwrap().value.as_ref().unwrap())
        };
        span.attributes.iter().map(|one| (one.key.as_str(), of(one))).collect()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    async fn streaming_engine() -> Engine {
        let rest = r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
        let usage = r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}"#;
        let end = format!("{rest}\n\n{usage}\n\ndata: [DONE]\n\n");
        Engine::always(vec![
            Step::Send(STREAM.as_bytes().to_vec()),
            Step::Gate,
            Step::Send(chunk(&event("one")).into()),
            Step::Gate,
            Step::Send((chunk(&(event("two") + &end)) + LAST).into()),
        ])
        .await
    }

    async fn tracing_gateway(engine: &Engine, collector: &TestCollector, sets: &[&str]) -> TestGateway {
        let endpoint = format!("tracing.endpoint={}", collector.url);
        TestGateway::over(&[engine.url()], &[&[endpoint.as_str()], sets].concat()).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_streamed_request_is_a_trace_below_the_client_and_above_the_engine() {
        let (engine, mut collector) = (streaming_engine().await, TestCollector::start().await);
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("access.log");
        let set = format!("access_log={{path=\"{}\"}}", log.display());
        let gateway = tracing_gateway(&engine, &collector, &["tracing.sample=0", &set]).await;
        engine.open_gate();
        engine.open_gate();
        assert_eq!(gateway.request(traced(PARENT)).await.status(), 200);
        let (path, spans) = collector.spans().await;
        assert_eq!(path, "/v1/traces");
        let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["chat m", "queue", "attempt", "prefill", "decode"]);
        let [root, queue, attempt, prefill, decode] = &spans[..] else { unreachable!() };
        assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
        assert_eq!(hex(&root.parent_span_id), "00f067aa0ba902b7");
        assert_eq!(
            (root.kind(), attempt.kind(), queue.kind()),
            (SpanKind::Server, SpanKind::Client, SpanKind::Internal)
        );
        assert_eq!((&queue.parent_span_id, &attempt.parent_span_id), (&root.span_id, &root.span_id));
        assert_eq!((&prefill.parent_span_id, &decode.parent_span_id), (&attempt.span_id, &attempt.span_id));
        let times = |span: &Span| (span.start_time_unix_nano, span.end_time_unix_nano);
        assert!(
            times(root).0 <= times(queue).0 && times(queue).1 <= times(attempt).0 && times(attempt).1 <= times(root).1
        );
        assert!(
            times(attempt).0 <= times(prefill).0
                && times(prefill).1 == times(decode).0
                && times(decode).1 <= times(attempt).1
        );
        assert!(times(prefill).0 < times(prefill).1 && times(decode).0 < times(decode).1);
        let seen = &engine.seen()[0];
        assert_eq!(seen.header("traceparent"), Some(&*format!("00-{TRACE}-{}-01", hex(&attempt.span_id))));
        assert_eq!(seen.header("tracestate"), Some("vendor=1,other=2"));
        let said = attributes(root);
        for (key, value) in [
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", "vllm"),
            ("gen_ai.request.model", "m"),
            ("gen_ai.usage.input_tokens", "7"),
            ("gen_ai.usage.output_tokens", "2"),
            ("sluice.pool", "only"),
            ("sluice.class", "short"),
            ("sluice.backend", "b0"),
            ("sluice.outcome", "completed"),
            ("http.response.status_code", "200"),
        ] {
            assert_eq!(said.get(key).map(String::as_str), Some(value), "{key} of {said:?}");
        }
        assert!(
            said["gen_ai.response.finish_reasons"].contains("\"stop\"") && said.contains_key("sluice.queue_seconds")
        );
        let line: serde_json::Value = serde_json::from_str(&access_log(&log, 1).await).unwrap();
        assert_eq!(line["trace_id"], TRACE);
        gateway.counts("sluice_traces_total", "result=\"sent\"", 1.0).await;
        gateway.settled().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_request_without_a_context_begins_a_trace_which_the_engine_joins() {
        let (engine, mut collector) = (Engine::always(completion()).await, TestCollector::start().await);
        let gateway = tracing_gateway(&engine, &collector, &[]).await;
        let request = post("/v1/chat/completions", "tracestate: orphan=1\r\n", STREAMED.as_bytes());
        assert_eq!(gateway.request(request).await.status(), 200);
        let (_, spans) = collector.spans().await;
        let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["chat m", "queue", "attempt"], "a response that is not streamed shows no first token");
        assert!(spans[0].parent_span_id.is_empty());
        let seen = &engine.seen()[0];
        let announced = format!("00-{}-{}-01", hex(&spans[0].trace_id), hex(&spans[2].span_id));
        assert_eq!((seen.header("traceparent"), seen.header("tracestate")), (Some(&*announced), None));
        gateway.settled().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_trace_that_is_not_sampled_passes_unchanged_and_is_not_sent() {
        let (engine, mut collector) = (Engine::always(completion()).await, TestCollector::start().await);
        let gateway = tracing_gateway(&engine, &collector, &["tracing.sample=0"]).await;
        let not_sampled = PARENT.replace("-01", "-00");
        assert_eq!(gateway.request(traced(&not_sampled)).await.status(), 200);
        assert_eq!(gateway.request(post("/v1/chat/completions", "", STREAMED.as_bytes())).await.status(), 200);
        let seen = engine.seen();
        assert_eq!(seen[0].header("traceparent"), Some(not_sampled.as_str()));
        assert_eq!(seen[0].header("tracestate"), Some("vendor=1,other=2"));
        assert_eq!(seen[1].header("traceparent"), None);
        gateway.settled().await;
        gateway.stop().await;
        assert!(collector.requests.try_recv().is_err());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_request_that_no_engine_sees_is_a_trace_too() {
        let (engine, mut collector) = (Engine::always(completion()).await, TestCollector::start().await);
        let gateway = tracing_gateway(&engine, &collector, &["tracing.sample=0"]).await;
        let headers = format!("traceparent: {PARENT}\r\n");
        gateway.request(post("/v1/nothing", &headers, b"{}")).await.is(404, "route_not_found");
        let (_, spans) = collector.spans().await;
        let [span] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((span.name.as_str(), hex(&span.trace_id).as_str()), ("request", TRACE));
        assert_eq!(attributes(span)["http.response.status_code"], "404");
        gateway.settled().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn each_attempt_is_a_span_of_its_own() {
        let broken = Engine::always(vec![Step::Close]).await;
        let (engine, mut collector) = (Engine::always(completion()).await, TestCollector::start().await);
        let endpoint = format!("tracing.endpoint={}", collector.url);
        let urls = [broken.url(), engine.url()];
        let sets = [endpoint.as_str(), "pool.only.policy=round_robin"];
        let gateway = TestGateway::over(&urls, &sets).await;
        let mut retried = None;
        for _ in 0..2 {
            assert_eq!(gateway.request(traced(PARENT)).await.status(), 200);
            let (_, spans) = collector.spans().await;
            let attempts: Vec<Span> = spans.into_iter().filter(|span| span.name == "attempt").collect();
            if attempts.len() == 2 {
                retried = Some(attempts);
            }
        }
        let attempts = retried.expect("one of two requests went to the broken engine first");
        let announced = |engine: &Engine, span: &Span| {
            let own = format!("-{}-01", hex(&span.span_id));
            engine.seen().iter().any(|seen| seen.header("traceparent").is_some_and(|parent| parent.ends_with(&own)))
        };
        assert!(announced(&broken, &attempts[0]) && announced(&engine, &attempts[1]));
        assert_eq!(
            (attributes(&attempts[0])["sluice.backend"].as_str(), attributes(&attempts[1])["sluice.backend"].as_str()),
            ("b0", "b1")
        );
        assert!(attempts[0].status.is_some() && attempts[1].status.is_none());
        gateway.settled().await;
    }
}
