//! SGLang behind the gateway, imitated by the simulator: pages, limits, permits, clients that
//! leave, and hangs.
//!
//! The simulated engine has SGLang's routes, metric names and errors, and none of vLLM's own pages.

use std::time::Duration;

use sluice_sim::{Fault, Handle, Profile, Sglang, SimConfig};
use tokio::net::TcpListener;

use crate::client::{TestClient, chat, get};
use crate::test_gateway::{TestGateway, eventually, eventually_within};

/// Time limit of a wait. `/health_generate` takes a second, so some waits take several seconds.
const WITHIN: Duration = Duration::from_secs(30);

/// A simulated SGLang that runs this many requests at once.
async fn sglang(running: u32, change: impl FnOnce(&mut SimConfig)) -> Handle {
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    config.sglang = Some(Sglang { metrics: true });
    config.embeddings = false;
    config.engine.max_num_seqs = running;
    change(&mut config);
    sluice_sim::spawn(config, TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap()
}

async fn gateway(engines: &[&Handle], keys: &str, sets: &[&str]) -> TestGateway {
    let mut text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[[model]]\nname = \"m\"\n[[pool]]\nname = \"only\"\n\
         engine = \"sglang\"\n{keys}\n"
    );
    for (index, engine) in engines.iter().enumerate() {
        text += &format!("[[pool.backend]]\nname = \"b{index}\"\nurl = \"http://{}\"\n", engine.addr());
    }
    let sets: Vec<&str> = ["health.probe_interval=50ms"].into_iter().chain(sets.iter().copied()).collect();
    let gateway = TestGateway::from_text(&text, &sets).await;
    eventually_within(WITHIN, "all serve", async || (0..engines.len()).all(|index| gateway.state(index) == "ready"))
        .await;
    gateway
}

/// A chat of this many prompt words and output tokens.
fn asked(words: usize, tokens: u32, stream: bool) -> Vec<u8> {
    let text = "word ".repeat(words);
    chat(&format!(
        r#"{{"model":"m","stream":{stream},"max_tokens":{tokens},"ignore_eos":true,"messages":[{{"role":"user","content":"{text}"}}]}}"#
    ))
}

async fn page(engine: &Handle, path: &str) -> (u16, String) {
    let mut client = TestClient::to(engine.addr()).await;
    let response = client.request(get(path)).await;
    (response.status(), response.text())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_simulator_has_the_pages_of_sglang_and_not_those_of_vllm() {
    let engine = sglang(4, |_| ()).await;
    for (path, status, word) in [
        ("/health_generate", 200, ""),
        ("/v1/loads?include=core", 200, r#""max_running_requests":4"#),
        ("/server_info", 200, r#""max_total_num_tokens":"#),
        ("/get_model_info", 200, r#""is_generation":true"#),
        ("/v1/models", 200, r#""owned_by":"sglang""#),
        ("/metrics", 200, "sglang:num_running_reqs{"),
        ("/version", 404, "Not Found"),
        ("/load", 404, "Not Found"),
    ] {
        let (found, text) = page(&engine, path).await;
        assert!(found == status && text.contains(word) && !text.contains("vllm:"), "{path}: {found} {text}");
    }
    let silent = sglang(4, |config| config.sglang = Some(Sglang { metrics: false })).await;
    assert_eq!(page(&silent, "/metrics").await.0, 404, "metrics exist with --enable-metrics");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_own_limit_bounds_the_requests_inside_and_its_memory_the_tokens() {
    let engine = sglang(3, |_| ()).await;
    // The probe takes longer than `health.probe_timeout`, because the page never answers within a
    // second. It does not fail.
    let gateway = gateway(&[&engine], "tokens = 20000", &["health.probe_timeout=200ms"]).await;
    eventually("the reported limit is in force", async || gateway.slots_limit() == 3).await;
    let mut clients = Vec::new();
    for _ in 0..7 {
        let mut client = gateway.client().await;
        client.send(asked(10, 400, true)).await;
        clients.push(client);
    }
    eventually("three run and four wait", async || gateway.load() == (3, 4)).await;
    let loads = page(&engine, "/v1/loads").await.1;
    assert!(loads.contains(r#""num_waiting_reqs":0"#), "{loads}");
    for mut client in clients {
        let answer = client.response().await;
        assert!(answer.status() == 200 && answer.text().contains("data: [DONE]"), "{}", answer.text());
    }
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = gateway.client().await;
        client.send(asked(10, 9_000, true)).await;
        clients.push(client);
    }
    eventually("two run, and the third waits for tokens with a slot free", async || gateway.load() == (2, 1)).await;
    drop(clients);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_the_request_in_the_engine() {
    let engine = sglang(4, |_| ()).await;
    let gateway = gateway(&[&engine], "", &[]).await;
    let mut client = gateway.client().await;
    client.send(asked(10, 4_000, true)).await;
    client.until_events(3).await;
    assert_eq!(engine.snapshot().in_flight, 1);
    drop(client);
    eventually("the engine has ended it", async || engine.snapshot().in_flight == 0).await;
    gateway.recorded("client_gone", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prompt_has_a_permit_and_a_full_queue_moves_to_another_engine() {
    let full = sglang(4, |config| config.max_queued_requests = Some(0)).await;
    let free = sglang(4, |_| ()).await;
    let refused = {
        let mut client = TestClient::to(full.addr()).await;
        client.request(asked(10, 4, false)).await
    };
    let text = refused.text();
    assert!(refused.status() == 503 && text.contains(r#""message":"The request queue is full.""#), "{text}");
    let keys = "policy = \"round_robin\"\nlong_prefix = { threshold = \"2k\", slots = 1 }";
    let gateway = gateway(&[&full, &free], keys, &[]).await;
    for _ in 0..4 {
        assert_eq!(gateway.request(asked(10, 4, false)).await.status(), 200);
    }
    assert_eq!(gateway.request(asked(4_000, 4, true)).await.status(), 200);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_hangs_is_ejected_and_its_request_moves() {
    let (hangs, serves) = (sglang(4, |_| ()).await, sglang(4, |_| ()).await);
    let gateway = gateway(&[&hangs, &serves], "policy = \"round_robin\"", &["health.stall=900ms"]).await;
    hangs.fault(Fault::Hang);
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = gateway.client().await;
        client.send(asked(10, 4, false)).await;
        clients.push(client);
    }
    for mut client in clients {
        assert_eq!(client.response().await.status(), 200);
    }
    assert_ne!(gateway.state(0), "ready");
    gateway.settled_within(WITHIN).await;
}
