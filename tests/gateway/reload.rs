//! A reload takes effect while requests run and wait.
//!
//! An invalid configuration changes nothing and is reported.

use std::path::PathBuf;

use crate::client::{CHAT, STREAMED, TestClient, change, chat, get, post};
use crate::engine::{COMPLETION, Engine, completion, ending, event, gated_stream};
use crate::test_gateway::{TestGateway, eventually, one_pool};

struct File {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl File {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sluice.toml");
        std::fs::write(&path, text).unwrap();
        Self { _folder: folder, path }
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.path, text).unwrap();
    }
}

async fn reload(gateway: &TestGateway) -> (u16, serde_json::Value) {
    let response = TestClient::to(gateway.admin()).await.request(change("/admin/reload")).await;
    (response.status(), response.json())
}

fn with_line(text: &str, line: &str) -> String {
    text.replacen("usage = \"off\"\n", &format!("usage = \"off\"\n{line}\n"), 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raised_limits_let_waiting_requests_through_and_lowered_ones_cut_no_stream() {
    let engine = Engine::always(gated_stream()).await;
    let text = one_pool(&[engine.url()]);
    let file = File::new(&with_line(&text, "slots = 1"));
    let gateway = TestGateway::from_file(&file.path).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await;
        clients.push(client);
    }
    eventually("one runs, three wait", async || gateway.load() == (1, 3)).await;
    file.write(&with_line(&text, "slots = 3"));
    let (status, body) = reload(&gateway).await;
    assert_eq!(status, 200, "{body}");
    assert!(body["changes"].to_string().contains("slots"), "{body}");
    eventually("three run, one waits", async || gateway.load() == (3, 1)).await;
    file.write(&with_line(&text, "slots = 1"));
    assert_eq!(reload(&gateway).await.0, 200);
    assert_eq!(gateway.load(), (3, 1), "running requests continue");
    for _ in 0..8 {
        engine.open_gate();
    }
    for client in &mut clients {
        let response = client.response().await;
        assert!(response.whole && response.text() == event("one") + &event("two") + &ending(), "{}", response.text());
    }
    assert_eq!((engine.count(), engine.left()), (4, 0));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_in_a_removed_pool_are_routed_by_the_new_configuration() {
    let (old, new) = (Engine::always(gated_stream()).await, Engine::always(gated_stream()).await);
    let file = File::new(&with_line(&one_pool(&[old.url()]), "slots = 1"));
    let gateway = TestGateway::from_file(&file.path).await;
    let mut running = gateway.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut waiting = gateway.client().await;
    waiting.send(chat(STREAMED)).await;
    eventually("one waits", async || gateway.load() == (1, 1)).await;
    file.write(&one_pool(&[new.url()]).replace("\"only\"", "\"other\""));
    assert_eq!(reload(&gateway).await.0, 200);
    waiting.until("one").await;
    assert_eq!(new.count(), 1);
    for engine in [&old, &new] {
        engine.open_gate();
        engine.open_gate();
    }
    let waited = waiting.response().await;
    assert!(waited.whole);
    assert_eq!(waited.head.header("x-sluice-pool"), Some("other"));
    // The removed backend still finishes its stream, and after that the gateway no longer knows it.
    let ran = running.response().await;
    assert!(ran.whole && ran.text().ends_with(&ending()), "{}", ran.text());
    assert_eq!((old.count(), old.left()), (1, 0));
    gateway.settled().await;
    eventually("the old pool is no longer shown", async || !gateway.page().await.contains("pool=\"only\",state="))
        .await;
}

fn with_key(text: &str, name: &str, sha256: &str) -> String {
    format!("{text}[auth]\nkeys = [{{ name = \"{name}\", sha256 = \"{sha256}\" }}]\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_body_arrives_across_a_reload_is_judged_by_the_new_configuration() {
    let engine = Engine::always(completion()).await;
    let text = one_pool(&[engine.url()]);
    // The hashes of "secret" and "other".
    let secret = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let other = "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa";
    let file = File::new(&with_key(&text, "team", secret));
    let gateway = TestGateway::from_file(&file.path).await;
    let request = |body: &str| post("/v1/chat/completions", "authorization: Bearer secret\r\n", body.as_bytes());
    let begin = async || {
        let mut client = gateway.client().await;
        let headers = "authorization: Bearer secret\r\nexpect: 100-continue\r\n";
        let request = post("/v1/chat/completions", headers, CHAT.as_bytes());
        client.send(&request[..request.len() - CHAT.len()]).await;
        // The status 100 shows that the gateway has read the head and accepted the key.
        assert_eq!(client.head().await.status, 100);
        client
    };
    let mut kept = begin().await;
    file.write(&with_key(&with_line(&text, "slots = 7").replace("\"only\"", "\"renamed\""), "team", secret));
    assert_eq!(reload(&gateway).await.0, 200);
    let response = kept.request(CHAT).await;
    assert_eq!((response.status(), response.head.header("x-sluice-pool")), (200, Some("renamed")));

    let mut revoked = begin().await;
    file.write(&with_key(&text, "team", other));
    assert_eq!(reload(&gateway).await.0, 200);
    revoked.request(CHAT).await.is(401, "invalid_api_key");
    gateway.request(request(CHAT)).await.is(401, "invalid_api_key");
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_is_removed_while_it_streams_gets_no_new_requests() {
    let engines = [Engine::always(gated_stream()).await, Engine::always(gated_stream()).await];
    let file = File::new(&one_pool(&[engines[0].url(), engines[1].url()]));
    let gateway = TestGateway::from_file(&file.path).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await.until("one").await;
        clients.push(client);
    }
    assert_eq!(engines.each_ref().map(Engine::count), [2, 2]);
    file.write(&one_pool(&[engines[0].url()]));
    assert_eq!(reload(&gateway).await.0, 200);
    for _ in 0..3 {
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await.until("one").await;
        clients.push(client);
    }
    assert_eq!(engines.each_ref().map(Engine::count), [5, 2]);
    for _ in 0..10 {
        engines.iter().for_each(Engine::open_gate);
    }
    for client in &mut clients {
        assert!(client.response().await.whole);
    }
    assert_eq!(engines.each_ref().map(Engine::left), [0, 0]);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_file_changes_nothing_and_every_problem_is_reported() {
    let engine = Engine::always(completion()).await;
    let text = one_pool(&[engine.url()]);
    let file = File::new(&text);
    let gateway = TestGateway::from_file(&file.path).await;
    for (bad, words) in [
        (with_line(&text, "slots = \"many\"\npolicy = \"magic\""), vec!["pool[0].slots", "magic"]),
        (text.replace("[server]", "[server"), vec!["sluice.toml"]),
        (String::new(), vec!["pool"]),
    ] {
        file.write(&bad);
        let (status, body) = reload(&gateway).await;
        assert_eq!((status, body["error"]["code"].as_str()), (422, Some("invalid_config")), "{body}");
        let problems = body["error"]["problems"].to_string();
        words.iter().for_each(|word| assert!(problems.contains(word), "{word}: {problems}"));
        assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
    }
    std::fs::remove_file(&file.path).unwrap();
    assert_eq!(reload(&gateway).await.0, 422);
    assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
    file.write(&text);
    assert_eq!(reload(&gateway).await, (200, serde_json::json!({ "changes": [] })));
    assert_eq!(TestClient::to(gateway.admin()).await.request(get("/admin/reload")).await.status(), 405);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reloads_under_load_lose_no_request() {
    let engines = [crate::health::sim().await, crate::health::sim().await];
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.addr()));
    let texts = [
        with_line(&one_pool(&urls), "slots = 2"),
        with_line(&one_pool(&urls[..1]), "slots = 8"),
        with_line(&one_pool(&urls), "slots = 4\npolicy = \"round_robin\"").replace("\"only\"", "\"again\""),
    ];
    let file = File::new(&texts[0]);
    let gateway = TestGateway::from_file(&file.path).await;
    let address = gateway.address();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..8 {
        clients.spawn(async move {
            let mut client = TestClient::to(address).await;
            let body = STREAMED.replace("\"stream\"", "\"max_tokens\":8,\"ignore_eos\":true,\"stream\"");
            for _ in 0..12 {
                let response = client.request(chat(&body)).await;
                assert!(response.whole && response.status() == 200, "{}: {}", response.status(), response.text());
                assert!(response.text().ends_with("data: [DONE]\n\n"), "{}", response.text());
            }
        });
    }
    let mut reloads = 0;
    while !clients.is_empty() {
        reloads += 1;
        file.write(&texts[reloads % 3]);
        assert_eq!(reload(&gateway).await.0, 200);
        while let Some(ended) = clients.try_join_next() {
            ended.unwrap();
        }
    }
    assert!(reloads >= 3, "only {reloads} reloads");
    gateway.settled().await;
    gateway.recorded("completed", 96.0).await;
    gateway.stop().await;
    for engine in engines {
        assert_eq!(engine.snapshot().aborted, 0);
        engine.shutdown().await;
    }
}
