//! Engines of one pool that serve different models, routes or lengths.
//!
//! Each request goes to an engine that can serve it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use parking_lot::Mutex;

use crate::client::{Response, TestClient, get, post};
use crate::commands::run;
use crate::engine::{Engine, Step, completion, response};
use crate::test_gateway::{TestGateway, eventually};

const UNKNOWN: &str =
    r#"{"error":{"message":"The model does not exist.","type":"NotFoundError","param":"model","code":404}}"#;

#[derive(Clone)]
struct Names(Arc<Mutex<Vec<String>>>);

impl Names {
    fn new(names: &[&str]) -> Self {
        let all = Self(Arc::default());
        all.set(names);
        all
    }

    fn set(&self, names: &[&str]) {
        *self.0.lock() = names.iter().map(|name| (*name).to_owned()).collect();
    }

    fn has_model_of(&self, body: &[u8]) -> bool {
        let body = String::from_utf8_lossy(body);
        self.0.lock().iter().any(|name| body.contains(&format!(r#""model":"{name}""#)))
    }
}

/// An engine that refuses other names, as vLLM does.
async fn engine(names: &Names) -> Engine {
    let known = names.clone();
    let engine = Engine::start(move |_, request| match known.has_model_of(&request.body) {
        true => completion(),
        false => refusal(404, UNKNOWN),
    })
    .await;
    let listed: Vec<String> = names.0.lock().clone();
    engine.set_models(&listed.iter().map(|name| &**name).collect::<Vec<_>>());
    engine
}

fn refusal(status: u16, body: &str) -> Vec<Step> {
    vec![Step::Send(response(status, "application/json", body.as_bytes()))]
}

async fn over(engines: &[&Engine], more: &str) -> TestGateway {
    let mut text = String::from(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[health]\nprobe_interval = \"100ms\"\n\
         [[pool]]\nname = \"open\"\nusage = \"off\"\n",
    );
    text += more;
    for (index, engine) in engines.iter().enumerate() {
        text += &format!("[[pool.backend]]\nname = \"b{index}\"\nurl = \"{}\"\n", engine.url());
    }
    TestGateway::from_text(&text, &[]).await
}

fn chat(model: &str) -> Vec<u8> {
    let body = format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"hi"}}]}}"#);
    post("/v1/chat/completions", "", body.as_bytes())
}

async fn statuses(gateway: &TestGateway, models: &[&str]) -> Vec<u16> {
    let mut all = Vec::new();
    for model in models {
        all.push(gateway.request(chat(model)).await.status());
    }
    all
}

async fn admin(gateway: &TestGateway, path: &str) -> String {
    TestClient::to(gateway.admin()).await.request(get(path)).await.text()
}

async fn listed(gateway: &TestGateway) -> Vec<String> {
    let text = gateway.request(get("/v1/models")).await.text();
    let list: serde_json::Value = serde_json::from_str(&text).unwrap();
    list["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_engines_with_different_models_get_their_own_requests() {
    let (x, y) = (engine(&Names::new(&["x", "both"])).await, engine(&Names::new(&["y", "both"])).await);
    let gateway = over(&[&x, &y], "").await;
    assert_eq!(listed(&gateway).await, ["x", "both", "y"]);
    assert_eq!(statuses(&gateway, &["x", "y", "x", "y", "both", "both", "x", "y"]).await, [200; 8]);
    assert_eq!(gateway.metric("sluice_retries_total", &[]).await, 0.0, "no engine was asked in vain");
    let unknown = gateway.request(chat("z")).await;
    assert_eq!((unknown.status(), unknown.text()), (404, UNKNOWN.to_owned()), "the engine's own answer");
    let (_, status, _) = run(&["status", "--admin", &gateway.admin().to_string()]).await;
    assert!(status.contains("open: its engines serve different requests: b0 lacks y; b1 lacks x"), "{status}");
    gateway.settled().await;
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rename_engine_by_engine_loses_no_request() {
    let names: Vec<Names> = (0..3).map(|_| Names::new(&["old"])).collect();
    let mut engines = Vec::new();
    for names in &names {
        engines.push(engine(names).await);
    }
    let gateway = Arc::new(over(&engines.iter().collect::<Vec<_>>(), "").await);
    let (ended, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    // One client uses the old name as long as an engine has it. Another client uses the new name as
    // soon as one engine has it.
    let send = |model: &'static str| {
        let (gateway, ended, count) = (Arc::clone(&gateway), Arc::clone(&ended), Arc::clone(&count));
        tokio::spawn(async move {
            while !ended.load(SeqCst) {
                let answer: Response = gateway.request(chat(model)).await;
                assert_eq!(answer.status(), 200, "{model}: {}", answer.text());
                count.fetch_add(1, SeqCst);
            }
        })
    };
    let more = async || {
        let before = count.load(SeqCst);
        eventually("requests go on", async || count.load(SeqCst) > before + 30).await;
    };
    let old = send("old");
    more().await;
    let rename = |index: usize| {
        // The engine serves the new name at once, but the gateway reads the engine's list later.
        names[index].set(&["new"]);
        engines[index].set_models(&["new"]);
    };
    rename(0);
    let new = send("new");
    more().await;
    rename(1);
    more().await;
    ended.store(true, SeqCst);
    old.await.unwrap();
    new.await.unwrap();
    rename(2);
    ended.store(false, SeqCst);
    let new = send("new");
    more().await;
    eventually("the lists were read", async || listed(&gateway).await == ["new"]).await;
    ended.store(true, SeqCst);
    new.await.unwrap();
    assert_eq!(statuses(&gateway, &["old", "new"]).await, [404, 200]);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_for_a_model_that_disappears_is_refused_at_once() {
    let names = Names::new(&["x", "y"]);
    let known = names.clone();
    let held = Engine::start(move |_, request| match String::from_utf8_lossy(&request.body).contains("\"y\"") {
        true => vec![Step::Gate, completion().remove(0)],
        false if known.has_model_of(&request.body) => completion(),
        false => refusal(404, UNKNOWN),
    })
    .await;
    held.set_models(&["x", "y"]);
    let other = engine(&Names::new(&["z"])).await;
    let gateway = over(&[&held, &other], "slots = 1\nqueue = { length = 9, timeout = \"60s\" }\n").await;
    let mut holder = gateway.client().await;
    holder.send(chat("y")).await;
    eventually("it runs", async || held.count() == 1).await;
    let (mut waits, mut stays) = (gateway.client().await, gateway.client().await);
    waits.send(chat("x")).await;
    stays.send(chat("y")).await;
    eventually("both wait", async || gateway.load() == (1, 2)).await;
    names.set(&["y"]);
    held.set_models(&["y"]);
    // The gateway reads the list again when the engine is up again.
    held.set_healthy(false);
    eventually("it is down", async || gateway.state(0) == "down").await;
    assert_eq!(gateway.load(), (1, 2));
    held.set_healthy(true);
    let refused = waits.response().await;
    assert!(refused.is(404, "model_not_found").text().contains("'x'"), "{}", refused.text());
    assert_eq!(gateway.load(), (1, 1));
    held.open_gate();
    held.open_gate();
    assert_eq!((holder.response().await.status(), stays.response().await.status()), (200, 200));
    gateway.settled().await;
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_list_cannot_be_read_is_used_and_the_status_says_so() {
    for (status, body) in [(404, "not found"), (401, "{}"), (200, "<html>"), (200, r#"{"data":[]}"#), (500, "")] {
        let (x, y) = (engine(&Names::new(&["x"])).await, engine(&Names::new(&["y", "x"])).await);
        x.set_list(status, body);
        let gateway = over(&[&x, &y], "").await;
        assert_eq!(statuses(&gateway, &["x", "y", "x", "y", "y", "y"]).await, [200; 6], "{status} {body}");
        assert!(x.count() >= 1, "{status} {body}");
        let answer = admin(&gateway, "/admin/status").await;
        assert!(answer.contains("models_unknown") && answer.contains("/v1/models"), "{answer}");
        gateway.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_one_engine_cannot_take_goes_to_one_with_a_higher_limit() {
    let long = format!(r#""model":"m","messages":[{{"role":"user","content":"{}"}}]"#, "word ".repeat(3_000));
    let too_long =
        openai("This model's maximum context length is 1024 tokens. However, your prompt contains 3001 input tokens.");
    let small = Engine::start(move |_, request| match request.body.len() > 8_000 {
        true => refusal(400, &too_long),
        false => completion(),
    })
    .await;
    let large = Engine::always(completion()).await;
    // The engine does not list its limit at first, so the gateway learns the limit from the
    // engine's refusal.
    small.set_list(200, r#"{"data":[{"id":"m"}]}"#);
    let gateway = over(&[&small, &large], "policy = \"round_robin\"\n").await;
    for _ in 0..6 {
        let answer = gateway.request(post("/v1/chat/completions", "", format!("{{{long}}}").as_bytes())).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
    }
    assert_eq!(statuses(&gateway, &["m"; 4]).await, [200; 4]);
    assert!(small.count() >= 2, "short prompts go to both");
    let moved = gateway.metric("sluice_retries_total", &["reason=\"not_served\""]).await;
    assert!(moved <= 1.0, "the limit is remembered: {moved}");
    small.set_list(200, r#"{"data":[{"id":"m","max_model_len":1024}]}"#);
    // An estimate alone is no reason to refuse. If the prompt is probably too long for every
    // engine, one is asked.
    let only_small = over(&[&small], "").await;
    let answer = only_small.request(post("/v1/chat/completions", "", format!("{{{long}}}").as_bytes())).await;
    assert!(answer.status() == 400 && answer.text().contains("maximum context length"), "{}", answer.text());
    gateway.stop().await;
    only_small.stop().await;
}

fn openai(message: &str) -> String {
    serde_json::json!({"error": {"message": message, "type": "BadRequestError", "param": null, "code": 400}})
        .to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_with_the_same_name_and_different_routes_get_the_requests_of_their_routes() {
    let with = async |own: &'static str| {
        Engine::start(move |_, request| match request.head.contains(own) {
            true => completion(),
            false => refusal(404, r#"{"detail":"Not Found"}"#),
        })
        .await
    };
    let (chats, embeds) = (with("/v1/chat/completions").await, with("/v1/embeddings").await);
    let gateway = over(&[&chats, &embeds], "").await;
    let input = post("/v1/embeddings", "", br#"{"model":"m","input":["a","b"]}"#);
    for _ in 0..5 {
        assert_eq!(gateway.request(&input).await.status(), 200);
        assert_eq!(gateway.request(chat("m")).await.status(), 200);
    }
    assert!(gateway.metric("sluice_retries_total", &["reason=\"not_served\""]).await <= 2.0);
    let neither = gateway.request(post("/v1/rerank", "", br#"{"model":"m","query":"q","documents":["d"]}"#)).await;
    assert_eq!((neither.status(), neither.text()), (404, r#"{"detail":"Not Found"}"#.to_owned()));
    gateway.settled().await;
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_with_two_thousand_adapters_lists_and_serves_all_of_them() {
    let names: Vec<String> = (0..2_000).map(|number| format!("adapter-{number}")).collect();
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    let (many, few) = (engine(&Names::new(&names)).await, engine(&Names::new(&["adapter-7", "base"])).await);
    let permission = "x".repeat(500);
    let cards: Vec<String> = names
        .iter()
        .map(|name| format!(r#"{{"id":"{name}","parent":"base","root":"/a","permission":"{permission}"}}"#))
        .collect();
    many.set_list(200, &format!(r#"{{"data":[{}]}}"#, cards.join(",")));
    let gateway = over(&[&many, &few], "").await;
    assert_eq!(listed(&gateway).await.len(), 2_001);
    assert_eq!(statuses(&gateway, &["adapter-1999", "adapter-0", "base", "adapter-7"]).await, [200; 4]);
    assert_eq!(gateway.metric("sluice_retries_total", &[]).await, 0.0);
    gateway.settled_within(Duration::from_secs(20)).await;
    gateway.stop().await;
}
