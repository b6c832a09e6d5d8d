//! Streams survive their engine: of two simulated engines, one is killed, stopped or drained while
//! it sends streams.
//!
//! Simulated engines with the same seed give the same answer to the same prompt. So a continued
//! answer must equal the uninterrupted one in text, usage and finish reason, and it must have one
//! id.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::client::{Response, TestClient, post};
use crate::simulator::Sim;
use crate::test_gateway::{TestGateway, access_log, one_pool};

/// An engine that starts at once, and is slow enough to be killed in the middle of an answer.
const FLAGS: &[&str] = &["--sim-startup", "0", "--served-model-name", "m", "--max-model-len", "4096"];
/// A tokenizer with characters of several bytes.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny");
const ON: &str = "retry.continue=failures";
/// Events that each client has received before the engine fails.
const BEGUN: usize = 8;

#[derive(Debug, PartialEq)]
struct Answer {
    text: String,
    roles: usize,
    finish: Vec<String>,
    usage: Value,
    done: bool,
}

/// Reads the answer and the ids from the events of a response.
fn answer(response: &Response) -> (Answer, BTreeSet<String>) {
    let text = response.text();
    let mut answer = Answer {
        text: String::new(),
        roles: 0,
        finish: Vec::new(),
        usage: Value::Null,
        done: text.ends_with("data: [DONE]\n\n"),
    };
    let mut ids = BTreeSet::new();
    for data in text.split("\n\n").filter_map(|event| event.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{data}")).unwrap();
        assert!(event.get("error").is_none(), "{text}");
        ids.insert(event["id"].as_str().unwrap().to_owned());
        let choice = &event["choices"][0];
        answer.text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        answer.roles += usize::from(choice["delta"].get("role").is_some());
        answer.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        if event["usage"].is_object() {
            answer.usage = event["usage"].clone();
        }
    }
    (answer, ids)
}

/// Chats and completions, of which some end by themselves and some at `max_tokens`. For a model
/// with a tokenizer there are only chats, because the simulator can continue a completion only if
/// the tokens are synthetic.
fn requests(model: &str) -> Vec<Vec<u8>> {
    let options = json!({"include_usage": true});
    let chat = |number: u32| {
        let body = json!({"model": "m", "stream": true, "stream_options": options, "max_tokens": 60 + 20 * number,
            "min_tokens": 40, "messages": [{"role": "user", "content": format!("question number {number}?")}]});
        post("/v1/chat/completions", "", body.to_string().as_bytes())
    };
    let completion = |number: u32| {
        let body = json!({"model": "m", "stream": true, "stream_options": options, "max_tokens": 100, "min_tokens": 40,
            "prompt": format!("Prompt {number}:")});
        post("/v1/completions", "", body.to_string().as_bytes())
    };
    let completions = if model == TINY { 0 } else { 4 };
    (0..6).map(chat).chain((0..completions).map(completion)).collect()
}

/// Sends the requests, and calls `fails` when every client has [`BEGUN`] events.
async fn answers(gateway: &TestGateway, requests: &[Vec<u8>], fails: impl AsyncFnOnce()) -> Vec<Response> {
    let mut clients: Vec<TestClient> = Vec::new();
    for request in requests {
        let mut client = gateway.client().await;
        client.send(request).await;
        clients.push(client);
    }
    for client in &mut clients {
        client.until_events(BEGUN).await;
    }
    fails().await;
    let mut responses = Vec::new();
    for client in &mut clients {
        responses.push(client.response().await);
    }
    responses
}

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Signal(Signal),
    Drained,
}

async fn whole_after(model: &str, sets: &[&str], fate: Fate) -> (Vec<Answer>, TestGateway) {
    let engines = [Sim::serving(model, FLAGS), Sim::serving(model, FLAGS)];
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.address()));
    // With usage in each event, the gateway's count is exact even if several tokens share an event.
    let own = ["pool.only.policy=round_robin", "health.probe_interval=1h", "pool.only.usage=continuous", ON];
    let sets = [&own[..], sets].concat();
    let gateway = TestGateway::over(&urls, &sets).await;
    let requests = requests(model);
    let whole: Vec<Answer> =
        answers(&gateway, &requests, async || {}).await.iter().map(|response| answer(response).0).collect();
    assert_eq!(gateway.metric("sluice_continued_requests_total", &[]).await, 0.0);
    let meets = async || match fate {
        Fate::Signal(signal) => engines[0].signal(signal),
        Fate::Drained => {
            let drain = post("/admin/backends/only/b0/drain", "x-sluice-admin: 1\r\n", b"");
            assert_eq!(TestClient::to(gateway.admin()).await.request(drain).await.status(), 200);
        }
    };
    let broken = answers(&gateway, &requests, meets).await;
    for (number, (response, want)) in broken.iter().zip(&whole).enumerate() {
        let (got, ids) = answer(response);
        assert_eq!(&got, want, "request {number}");
        assert_eq!(ids.len(), 1, "request {number}: one answer, {ids:?}");
        assert!(response.whole);
    }
    gateway.recorded("completed", 2.0 * requests.len() as f64).await;
    let continued = gateway.metric("sluice_continued_requests_total", &["outcome=\"completed\""]).await;
    assert!((1.0..requests.len() as f64).contains(&continued), "about half were on that engine: {continued}");
    assert!(gateway.metric("sluice_prefilled_again_tokens_total", &[]).await > 0.0);
    match fate {
        Fate::Signal(Signal::SIGSTOP) => engines[0].signal(Signal::SIGCONT),
        Fate::Signal(_) => {}
        Fate::Drained => assert_eq!(gateway.metric("sluice_retries_total", &["moved"]).await, continued),
    }
    gateway.settled().await;
    (whole, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_whole_when_an_engine_is_killed_under_them() {
    let (whole, _gateway) = whole_after("m", &[], Fate::Signal(Signal::SIGKILL)).await;
    for (number, answer) in whole.iter().enumerate() {
        let tokens = answer.usage["completion_tokens"].as_u64().unwrap();
        assert!(tokens >= 40 && answer.done && answer.finish.len() == 1, "{answer:?}");
        assert_eq!(answer.roles, usize::from(number < 6), "{answer:?}");
    }
    let finishes: BTreeSet<&str> = whole.iter().map(|answer| answer.finish[0].as_str()).collect();
    assert!(finishes.contains("length"), "{finishes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_character_is_lost_or_doubled_where_characters_have_several_bytes() {
    let (whole, _gateway) = whole_after(TINY, &[], Fate::Signal(Signal::SIGKILL)).await;
    assert!(whole.iter().any(|answer| !answer.text.is_ascii()), "{whole:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_whole_when_an_engine_hangs_under_them() {
    whole_after("m", &["timeouts.idle=1s"], Fate::Signal(Signal::SIGSTOP)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_move_when_their_engine_is_drained() {
    whole_after("m", &["drain.move_after=0s"], Fate::Drained).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_cannot_be_continued_ends_with_an_error_and_the_reason_is_logged() {
    let engines = [Sim::start(FLAGS), Sim::start(FLAGS)];
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.address()));
    let text = format!("{}[access_log]\npath = \"{}\"\n", one_pool(&urls), log.display());
    let gateway = TestGateway::from_text(&text, &["health.probe_interval=1h", ON]).await;
    let body = json!({"model": "m", "stream": true, "seed": 7, "max_tokens": 2_000, "ignore_eos": true,
        "messages": [{"role": "user", "content": "hi"}]});
    let request = post("/v1/chat/completions", "", body.to_string().as_bytes());
    // The test kills both engines, because the gateway may have chosen either.
    let fails = async || engines.iter().for_each(|engine| engine.signal(Signal::SIGKILL));
    let responses = answers(&gateway, &[request], fails).await;
    let text = responses[0].text();
    assert!(text.matches("event: error").count() == 1 && text.contains("upstream_broke"), "{text}");
    assert!(!responses[0].whole);
    let line: Value = serde_json::from_str(access_log(&log, 1).await.trim()).unwrap();
    assert_eq!(
        (&line["not_continued"], &line["detail"], line.get("continued")),
        (&json!("seed"), &json!("broken"), None)
    );
    gateway.counts("sluice_not_continued_requests_total", "reason=\"seed\"", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_engine_that_is_left_each_stream_ends_with_one_error() {
    let engines = [Sim::start(FLAGS), Sim::start(FLAGS)];
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.address()));
    let gateway = TestGateway::over(&urls, &["pool.only.policy=round_robin", ON]).await;
    let requests: Vec<Vec<u8>> = requests("m").into_iter().take(4).collect();
    let fails = async || engines.iter().for_each(|engine| engine.signal(Signal::SIGKILL));
    for response in answers(&gateway, &requests, fails).await {
        let text = response.text();
        assert!(text.matches("event: error").count() == 1 && !text.contains("[DONE]") && !response.whole, "{text}");
    }
    gateway.settled().await;
}
