//! The server over real sockets on loopback, read as raw bytes.
//!
//! A client library would hide a missing last chunk or a second response. Each wait is for a
//! condition and has a deadline. Durations are asserted only where they are the contract, or as a
//! lower bound.

use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::{Fault, Handle, Profile, SimConfig, Snapshot, spawn};
use sluice_core::vllm::metrics;

mod ranks;
mod shapes;
mod speculation;

const DEADLINE: Duration = Duration::from_secs(60);

async fn server(change: impl FnOnce(&mut SimConfig)) -> Handle {
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    config.max_model_len = 8192;
    change(&mut config);
    spawn(config, TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap()
}

async fn send(handle: &Handle, method: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(handle.addr()).await.unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         connection: close\r\nx-request-id: abc\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// Status, headers, and the body without chunk framing. The flag says whether the body ended
/// properly.
async fn receive(mut stream: TcpStream) -> (u16, String, String, bool) {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut bytes)).await.expect("a response in time");
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, mut rest) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    if !head.contains("transfer-encoding: chunked") {
        return (status, head.to_owned(), rest.to_owned(), read.is_ok());
    }
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return (status, head.to_owned(), body, true);
        }
        body.push_str(&after[..size]);
        rest = &after[size + 2..];
    }
    (status, head.to_owned(), body, false)
}

async fn call(handle: &Handle, method: &str, path: &str, body: &str) -> (u16, String) {
    let (status, _, body, _) = receive(send(handle, method, path, body).await).await;
    (status, body)
}

async fn until(handle: &Handle, reached: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let started = Instant::now();
    loop {
        let snapshot = handle.snapshot();
        if reached(&snapshot) {
            return snapshot;
        }
        assert!(started.elapsed() < DEADLINE, "not reached: {snapshot:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

#[tokio::test]
async fn a_stream_has_vllms_framing_and_ids() {
    let handle = server(|_| {}).await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"ignore_eos":true,"stream":true,
        "stream_options":{"include_usage":true}}"#;
    let (status, head, body, ended) = receive(send(&handle, "POST", CHAT, body).await).await;
    assert_eq!((status, ended), (200, true));
    assert!(head.contains("content-type: text/event-stream; charset=utf-8") && head.contains("server: uvicorn"));
    let events: Vec<&str> = body.split_terminator("\n\n").collect();
    assert!(events.iter().all(|event| event.starts_with("data: ")));
    assert_eq!(events.last(), Some(&"data: [DONE]"));
    assert!(events[0].contains(r#""id":"chatcmpl-abc""#) && events[0].contains(r#""role":"assistant""#));
    let usage: Value = serde_json::from_str(&events[events.len() - 2]["data: ".len()..]).unwrap();
    assert_eq!((&usage["usage"]["completion_tokens"], &usage["usage"]["prompt_tokens"]), (&5.into(), &10.into()));
    handle.shutdown().await;
}

#[tokio::test]
async fn streamed_and_complete_responses_have_the_same_text() {
    let handle = server(|_| {}).await;
    let whole = call(&handle, "POST", COMPLETION, r#"{"prompt":"once","max_tokens":40}"#).await.1;
    let whole: Value = serde_json::from_str(&whole).unwrap();
    let stream = call(&handle, "POST", COMPLETION, r#"{"prompt":"once","max_tokens":40,"stream":true}"#).await.1;
    let text: String = stream
        .split("\n\n")
        .filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok())
        .filter_map(|chunk| Some(chunk["choices"][0]["text"].as_str()?.to_owned()))
        .collect();
    assert_eq!(whole["choices"][0]["text"].as_str(), Some(text.as_str()));
    handle.shutdown().await;
}

#[tokio::test]
async fn prompts_times_n_make_choices() {
    let handle = server(|_| {}).await;
    let body = r#"{"prompt":[[1,2],[3,4,5]],"n":2,"max_tokens":3,"ignore_eos":true}"#;
    let response: Value = serde_json::from_str(&call(&handle, "POST", COMPLETION, body).await.1).unwrap();
    let indices: Vec<_> =
        response["choices"].as_array().unwrap().iter().map(|choice| choice["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!((&response["usage"]["prompt_tokens"], &response["usage"]["completion_tokens"]), (&5.into(), &12.into()));
    assert_eq!(handle.snapshot().finished, 4);
    handle.shutdown().await;
}

#[tokio::test]
async fn a_disconnect_aborts_the_request_and_frees_its_blocks() {
    let handle = server(|_| {}).await;
    for (stream, aborted) in [("true", 1), ("false", 2)] {
        let body = format!(r#"{{"prompt":"x","max_tokens":8000,"ignore_eos":true,"stream":{stream}}}"#);
        let connection = send(&handle, "POST", COMPLETION, &body).await;
        until(&handle, |snapshot| snapshot.running == 1).await;
        drop(connection);
        until(&handle, |snapshot| snapshot.aborted == aborted && snapshot.in_flight == 0).await;
        until(&handle, |snapshot| snapshot.kv_usage == 0.0 && snapshot.running == 0).await;
    }
    let page = call(&handle, "GET", "/metrics", "").await.1;
    assert_eq!(metrics::MetricsSnapshot::parse(&page).success.abort, 2.0);
    handle.shutdown().await;
}

#[tokio::test]
async fn the_metrics_page_counts_requests_and_tokens() {
    let handle = server(|_| {}).await;
    let before = metrics::MetricsSnapshot::parse(&call(&handle, "GET", "/metrics", "").await.1);
    call(&handle, "POST", COMPLETION, r#"{"prompt":[1,2,3],"max_tokens":7,"ignore_eos":true}"#).await;
    let after = metrics::MetricsSnapshot::parse(&call(&handle, "GET", "/metrics", "").await.1);
    assert_eq!((after.prompt_tokens, after.generation_tokens, after.success.length), (3.0, 7.0, 1.0));
    assert_eq!((after.iterations, after.ttft.0, after.gpu_blocks), (7.0, 1.0, Some(57_301)));
    assert!(after.progress() > before.progress());
    handle.shutdown().await;
}

#[tokio::test]
async fn without_statistics_the_page_has_no_engine() {
    let handle = server(|config| config.log_stats = false).await;
    let (status, page) = call(&handle, "GET", "/metrics", "").await;
    assert!(status == 200 && page.contains("process_resident_memory_bytes") && !page.contains("vllm:"), "{page}");
}

#[tokio::test]
async fn errors_are_vllms() {
    let handle = server(|_| {}).await;
    for (method, path, body, status, message) in [
        ("POST", CHAT, r#"{"model":"x","messages":[]}"#, 404, "The model `x` does not exist. Valid aliases: m."),
        ("POST", COMPLETION, r#"{"prompt":"a","max_tokens":9999}"#, 400, "cannot be greater than max_model_len=8192"),
        ("POST", COMPLETION, "{", 400, "1 validation error"),
    ] {
        let (found, body) = call(&handle, method, path, body).await;
        let error: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((found, error["error"]["code"].as_u64()), (status, Some(u64::from(status))), "{path}");
        assert!(error["error"]["message"].as_str().unwrap().contains(message), "{body}");
    }
    for (path, status, detail) in [("/v1/nothing", 404, "Not Found"), (CHAT, 405, "Method Not Allowed")] {
        assert_eq!(call(&handle, "GET", path, "").await, (status, format!("{{\"detail\":\"{detail}\"}}")));
    }
    handle.shutdown().await;
}

#[tokio::test]
async fn the_queue_limit_replies_503_and_counts_choices() {
    let handle = server(|config| config.max_queued_requests = Some(2)).await;
    let held = send(&handle, "POST", COMPLETION, r#"{"prompt":"x","max_tokens":8000,"ignore_eos":true}"#).await;
    until(&handle, |snapshot| snapshot.in_flight == 1).await;
    let (status, body) = call(&handle, "POST", COMPLETION, r#"{"prompt":"x","n":2}"#).await;
    assert_eq!(status, 503);
    assert!(body.contains("currently busy") && body.contains("Service Unavailable"));
    drop(held);
    handle.shutdown().await;
}

#[tokio::test]
async fn adapters_are_loaded_and_unloaded() {
    let handle = server(|config| {
        config.lora = true;
        config.engine.max_loras = 1;
    })
    .await;
    let load = r#"{"lora_name":"ad","lora_path":"/a"}"#;
    assert_eq!(call(&handle, "POST", "/v1/load_lora_adapter", load).await.0, 200);
    assert_eq!(call(&handle, "POST", "/v1/load_lora_adapter", load).await.0, 400);
    let models: Value = serde_json::from_str(&call(&handle, "GET", "/v1/models", "").await.1).unwrap();
    assert_eq!((&models["data"][1]["id"], &models["data"][1]["parent"]), (&"ad".into(), &"m".into()));
    let response = call(&handle, "POST", COMPLETION, r#"{"model":"ad","prompt":"x","max_tokens":2}"#).await.1;
    assert!(response.contains(r#""model":"ad""#));
    let again = r#"{"lora_name":"ad","lora_path":"/b","load_inplace":true}"#;
    assert_eq!(call(&handle, "POST", "/v1/load_lora_adapter", again).await.0, 200);
    assert_eq!(call(&handle, "POST", "/v1/unload_lora_adapter", load).await.0, 200);
    assert_eq!(call(&handle, "POST", COMPLETION, r#"{"model":"ad","prompt":"x"}"#).await.0, 404);
    handle.shutdown().await;
}

#[tokio::test]
async fn a_hung_engine_is_healthy_and_generates_nothing_until_it_resumes() {
    let handle = server(|config| config.fault = Some(Fault::Hang)).await;
    let waiting = send(&handle, "POST", COMPLETION, r#"{"prompt":"x","max_tokens":2}"#).await;
    until(&handle, |snapshot| snapshot.in_flight == 1).await;
    assert_eq!(call(&handle, "GET", "/health", "").await.0, 200);
    assert_eq!(handle.snapshot().generated_tokens, 0);
    assert_eq!(call(&handle, "POST", "/sim/fault", r#"{"fault":"none"}"#).await.0, 200);
    assert_eq!(receive(waiting).await.0, 200);
    handle.shutdown().await;
}

#[tokio::test]
async fn a_dead_engine_fails_every_route() {
    let handle = server(|_| {}).await;
    let body = r#"{"prompt":"x","max_tokens":8000,"ignore_eos":true,"stream":true}"#;
    let stream = send(&handle, "POST", COMPLETION, body).await;
    until(&handle, |snapshot| snapshot.generated_tokens > 0).await;
    handle.fault(Fault::Die);
    let (status, _, body, ended) = receive(stream).await;
    assert_eq!((status, ended), (200, true));
    assert!(body.contains(r#""code": 500"#) && body.ends_with("data: [DONE]\n\n"), "{body}");
    assert_eq!(call(&handle, "GET", "/health", "").await.0, 503);
    assert_eq!(call(&handle, "POST", COMPLETION, r#"{"prompt":"x"}"#).await.0, 500);
    assert_eq!(handle.snapshot().in_flight, 0);
    handle.shutdown().await;
}

#[tokio::test]
async fn faults_break_off_streams_and_corrupt_bodies() {
    let handle = server(|config| config.fault = Some(Fault::ResetMidstream(3))).await;
    let body = r#"{"prompt":"x","max_tokens":100,"ignore_eos":true,"stream":true}"#;
    let (_, _, text, ended) = receive(send(&handle, "POST", COMPLETION, body).await).await;
    assert!(!ended && text.contains("text_completion") && !text.contains("[DONE]"));
    until(&handle, |snapshot| snapshot.aborted == 1).await;
    handle.fault(Fault::None);
    handle.fault(Fault::Garbage);
    let response = call(&handle, "POST", COMPLETION, r#"{"prompt":"x","max_tokens":2}"#).await.1;
    assert!(serde_json::from_str::<Value>(&response).is_err());
    handle.shutdown().await;
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_five_seconds() {
    let handle = server(|_| {}).await;
    let mut stream = TcpStream::connect(handle.addr()).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: sim\r\n\r\n").await.unwrap();
    let started = Instant::now();
    let mut bytes = Vec::new();
    tokio::time::timeout(DEADLINE, stream.read_to_end(&mut bytes)).await.expect("the server closes").unwrap();
    assert!(bytes.starts_with(b"HTTP/1.1 200 OK"));
    let text = String::from_utf8_lossy(&bytes);
    assert_eq!(text.matches("HTTP/1.1").count(), 1, "closed without another response: {text}");
    assert!(started.elapsed() > Duration::from_secs(4));
    handle.shutdown().await;
}

#[tokio::test]
async fn a_shutdown_ends_streams_with_an_error_and_a_kill_breaks_them_off() {
    for kill in [false, true] {
        let handle = server(|_| {}).await;
        let body = r#"{"prompt":"x","max_tokens":8000,"ignore_eos":true,"stream":true}"#;
        let stream = send(&handle, "POST", COMPLETION, body).await;
        until(&handle, |snapshot| snapshot.generated_tokens > 0).await;
        let stop = async { if kill { handle.kill().await } else { handle.shutdown().await } };
        tokio::time::timeout(DEADLINE, stop).await.expect("it stops");
        let (_, _, body, ended) = receive(stream).await;
        let message = r#"data: {"error": {"message": "EngineCore encountered an issue."#;
        assert_eq!(
            (ended, body.ends_with("data: [DONE]\n\n"), body.contains(message)),
            (!kill, !kill, !kill),
            "{body}"
        );
    }
}

#[tokio::test]
async fn api_keys_protect_only_v1() {
    let handle = server(|config| config.api_keys = vec!["secret".into()]).await;
    assert_eq!(call(&handle, "GET", "/v1/models", "").await, (401, r#"{"error":"Unauthorized"}"#.to_owned()));
    assert_eq!(call(&handle, "GET", "/health", "").await.0, 200);
    handle.shutdown().await;
}

#[tokio::test]
async fn texts_and_chats_are_tokenized_and_ids_are_not() {
    let wait = Duration::from_millis(1500);
    let handle = server(|config| config.profile.front_end.text_us = 1.5e6).await;
    let started = Instant::now();
    let answer = async |path: &str, prompt: &str| {
        let body = format!(r#"{{"model":"m","max_tokens":1,{prompt}}}"#);
        assert_eq!(call(&handle, "POST", path, &body).await.0, 200);
        started.elapsed()
    };
    let (text, chat, ids) = tokio::join!(
        answer("/v1/completions", r#""prompt":"hello""#),
        answer("/v1/chat/completions", r#""messages":[{"role":"user","content":"hello"}]"#),
        answer("/v1/completions", r#""prompt":[1,2,3]"#),
    );
    assert!(text >= wait && chat >= wait, "{text:?} {chat:?}");
    assert!(ids < text.min(chat), "ids pass texts: {ids:?}");
}
