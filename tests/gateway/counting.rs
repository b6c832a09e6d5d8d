//! Counts in the metrics.
//!
//! The gateway counts tokens for every stream, but latencies only for requests that generate.

use crate::client::{CHAT, STREAMED, chat, post};
use crate::engine::{Engine, Step, json, response};
use crate::test_gateway::TestGateway;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_generate_nothing_do_not_raise_attainment() {
    let engine = Engine::start(|_, seen| match seen.head.contains("/tokenize") {
        true => vec![Step::Send(json(br#"{"count":1,"max_model_len":100,"tokens":[1]}"#))],
        false => vec![Step::Close],
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &["slo.e2el=10s", "retry.attempts=1"]).await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 502);
    let mut client = gateway.client().await;
    for _ in 0..20 {
        assert_eq!(client.request(post("/tokenize", "", br#"{"model":"m","prompt":"hi"}"#)).await.status(), 200);
    }
    gateway.recorded("completed", 20.0).await;
    let page = gateway.page().await;
    assert!(page.contains("sluice_slo_attainment{pool=\"only\"} 0\n"), "{page}");
    assert_eq!(gateway.metric("sluice_request_duration_seconds_count", &[]).await, 0.0);
    assert_eq!(gateway.metric("sluice_other_request_duration_seconds_count", &["route=\"tokenize\""]).await, 20.0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_two_sequences_counts_its_tokens_although_it_reports_none() {
    let stream = std::fs::read("tests/fixtures/vllm-0.32/chat-stream-n2-plain.sse").unwrap();
    let engine = Engine::always(vec![Step::Send(response(200, "text/event-stream", &stream))]).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.usage=final"]).await;
    let body = STREAMED.replacen('{', "{\"n\":2,", 1);
    assert_eq!(gateway.request(chat(&body)).await.body, stream);
    // vLLM reported 24 tokens for the same request with usage.
    gateway.counts("sluice_generation_tokens_total", "", 24.0).await;
    assert!(gateway.metric("sluice_prompt_tokens_total", &[]).await > 0.0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_counts_wherever_it_stands_in_a_response_of_any_size() {
    const USAGE: &str = r#""usage":{"prompt_tokens":70,"completion_tokens":9,"total_tokens":79}"#;
    let ids = "123456,".repeat(300_000) + "7";
    let bodies = [
        format!(
            r#"{{"id":"a","choices":[{{"index":0,"text":"x","finish_reason":"stop"}}],{USAGE},"prompt_token_ids":[{ids}]}}"#
        ),
        format!(r#"{{{USAGE},"results":[{{"document":{{"text":"{}"}}}},{{"index":1}}]}}"#, "word \\\"".repeat(300_000)),
        format!(r#"{{"data":[{{"embedding":[{ids}]}}],"model":"m",{USAGE}}}"#),
    ];
    let sent = bodies.clone();
    let engine = Engine::start(move |number, _| vec![Step::Send(json(sent[number].as_bytes()))]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    for (number, body) in (1u32..).zip(&bodies) {
        assert!(gateway.request(chat(CHAT)).await.body == body.as_bytes());
        gateway.counts("sluice_prompt_tokens_total", "", 70.0 * f64::from(number)).await;
        gateway.counts("sluice_generation_tokens_total", "", 9.0 * f64::from(number)).await;
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminal_event_of_megabytes_ends_its_stream_and_counts() {
    let text = "x".repeat(5 << 20);
    let event = |kind: &str, rest: &str| {
        format!(
            "event: {kind}\ndata: {{\"type\":\"{kind}\",\"response\":{{\"id\":\"resp_1\",\"instructions\":\"{text}\"{rest}}}}}\n\n"
        )
    };
    let usage = r#","usage":{"input_tokens":9,"output_tokens":2}"#;
    let delta =
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"hi\"}\n\n";
    let whole = [&event("response.created", ""), delta, &event("response.completed", usage)].concat();
    let engine = Engine::always(vec![Step::Send(response(200, "text/event-stream", whole.as_bytes()))]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let got = gateway.request(post("/v1/responses", "", br#"{"model":"m","stream":true,"input":"hi"}"#)).await;
    assert!(got.whole && got.body == whole.as_bytes(), "{} of {} bytes", got.body.len(), whole.len());
    gateway.recorded("completed", 1.0).await;
    gateway.counts("sluice_generation_tokens_total", "", 2.0).await;
    gateway.settled().await;
}
