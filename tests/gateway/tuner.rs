//! The online tuner through the admin API.
//!
//! The tests check the tuner's proposal for a limit that delays requests, and orders that operators
//! give the tuner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::client::{STREAMED, TestClient, change, chat, get};
use crate::engine::{Engine, gated_stream};
use crate::test_gateway::{TestGateway, eventually, eventually_within, one_pool};

/// Time limit for a step of the tuner, which observes for at least ten seconds, and judges requests
/// five seconds after their arrival.
const LOOKS: Duration = Duration::from_secs(120);
/// Requests kept in flight.
const CLIENTS: usize = 20;

async fn shown(gateway: &TestGateway) -> Value {
    TestClient::to(gateway.admin()).await.request(get("/admin/tuner")).await.json()
}

async fn order(gateway: &TestGateway, order: &str) -> (u16, Value) {
    let response = TestClient::to(gateway.admin()).await.request(change(&format!("/admin/tuner/{order}"))).await;
    (response.status(), response.json())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_that_holds_requests_up_is_raised_on_approval_and_put_back_when_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Arc::new(Engine::always(gated_stream()).await);
    let state = format!("fleet.state={:?}", folder.path().display().to_string());
    let sets = [&*state, "slo.ttft=\"100ms\"", "tuner.mode=\"approve\"", "pool.only.slots=1"];
    let gateway = TestGateway::from_text(&one_pool(&[engine.url()]), &sets).await;
    assert_eq!((order(&gateway, "approve/1").await.0, order(&gateway, "thaw").await.0), (404, 404));
    let ending = Arc::new(AtomicBool::new(false));
    let gates = Arc::clone(&engine);
    let gatekeeper = tokio::spawn(async move {
        loop {
            gates.open_gate();
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    });
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let (address, ended) = (gateway.address(), Arc::clone(&ending));
        clients.push(tokio::spawn(async move {
            let mut statuses = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                statuses.push(TestClient::to(address).await.request(chat(STREAMED)).await.status());
            }
            statuses
        }));
    }
    eventually_within(LOOKS, "a proposal", async || !shown(&gateway).await["groups"][0]["proposal"].is_null()).await;
    let report = shown(&gateway).await;
    let proposal = &report["groups"][0]["proposal"];
    assert_eq!((proposal["key"].as_str(), proposal["from"].as_str()), (Some("pool.only.slots"), Some("1")), "{report}");
    assert!(proposal["why"].as_str().unwrap().contains("in the queue"), "{report}");
    assert_eq!(gateway.slots_limit(), 1, "nothing changes without an approval");
    let (status, refused) = order(&gateway, "approve/99").await;
    assert!(status == 404 && refused["error"]["message"].as_str().unwrap().contains("now there are: 1"), "{refused}");
    assert_eq!(order(&gateway, &format!("approve/{}", proposal["id"].as_str().unwrap())).await.0, 200);
    eventually("more slots", async || gateway.slots_limit() > 1).await;
    let report = shown(&gateway).await;
    assert_eq!(report["groups"][0]["limits"][0]["configured"], "1", "{report}");
    assert_eq!(order(&gateway, "freeze").await.0, 200);
    assert_eq!(gateway.slots_limit(), 1, "a change that is being tried is undone");
    gateway.counts("sluice_tuner_frozen", "", 1.0).await;
    gateway.counts("sluice_tuner_events_total", "event=\"stood_back\"", 1.0).await;
    ending.store(true, Ordering::Relaxed);
    for client in clients {
        let statuses = client.await.unwrap();
        assert!(statuses.iter().all(|status| *status == 200), "no request is lost: {statuses:?}");
    }
    gatekeeper.abort();
    let journal = std::fs::read_to_string(folder.path().join("tuner.jsonl")).unwrap();
    let mut kinds: Vec<Value> =
        journal.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["kind"].clone()).collect();
    // The journal may have lines about windows of observation, but only if a window took long
    // enough.
    kinds.retain(|kind| kind != "observed");
    assert_eq!(kinds, ["proposed", "tried", "stood_back"]);
    gateway.settled().await;
    gateway.stop().await;
    // The next gateway with the same state folder is frozen, too.
    let gateway = TestGateway::from_text(&one_pool(&[engine.url()]), &sets).await;
    assert_eq!(shown(&gateway).await["frozen"], "by an operator");
    assert_eq!(order(&gateway, "resume").await.1["frozen"], Value::Null);
}
