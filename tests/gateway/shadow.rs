//! Shadow arms over sockets.
//!
//! The gateway measures copies of requests, shows them to no client, and cuts them when a request
//! needs their room.

use std::path::Path;

use serde_json::Value;

use crate::client::{CHAT, TestClient, change, get, post};
use crate::engine::{Engine, ReceivedRequest, Step, completion};
use crate::test_gateway::{TestGateway, access_log, eventually, key_digest, one_pool};

/// `text` and an experiment on model `m` with a shadow arm, which gets a copy of every request that
/// its budget allows.
fn shadowed(text: &str, arm: &str, shadow: &str, state: &Path) -> String {
    format!(
        "{text}[[experiment]]\nname = \"x\"\nmodels = [\"m\"]\n[[experiment.arm]]\nname = \"base\"\nweight = 100\n\
         [[experiment.arm]]\nname = \"shade\"\n{arm}\nshadow = {{ share = 1.0, per_second = 10000.0, {shadow} }}\n\
         [fleet]\nstate = \"{}\"\n",
        state.display()
    )
}

fn shade(url: &str, keys: &str) -> String {
    format!(
        "[[pool]]\nname = \"shade\"\narms_only = true\nusage = \"off\"\n{keys}[[pool.backend]]\nname = \"b1\"\nurl = \"{url}\"\n"
    )
}

fn request() -> Vec<u8> {
    post("/v1/chat/completions", "x-request-id: original\r\nauthorization: Bearer secret\r\n", CHAT.as_bytes())
}

fn is_copy(seen: &ReceivedRequest) -> bool {
    seen.header("x-request-id").is_some_and(|id| id.ends_with("-shade"))
}

async fn report(gateway: &TestGateway) -> Value {
    TestClient::to(gateway.admin()).await.request(get("/admin/experiments/x")).await.json()
}

async fn ended(gateway: &TestGateway, outcome: &str) -> u64 {
    let report = report(gateway).await;
    let ended = report["arms"][1]["copies"]["ended"].as_array().unwrap();
    ended.iter().find(|pair| pair[0] == outcome).unwrap()[1].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_are_measured_with_the_arms_model_and_no_client_sees_them() {
    const REQUESTS: usize = 12;
    let (engines, folder) =
        ([Engine::with_adapter().await, Engine::with_adapter().await], tempfile::tempdir().unwrap());
    let log = folder.path().join("access.log");
    let pools = one_pool(&[engines[0].url()]).replace("[[pool]]", "[[model]]\nname = \"lora\"\n[[pool]]")
        + &shade(&engines[1].url(), "models = [\"m\", \"lora\"]\n");
    let pools = pools.replace("models = [\"m\"]", "models = [\"m\", \"lora\"]");
    let text = format!(
        "[access_log]\npath = \"{}\"\n{}",
        log.display(),
        shadowed(&pools, "pool = \"shade\"\nmodel = \"lora\"", "in_flight = 64", folder.path())
    );
    let gateway = TestGateway::from_text(&text, &[]).await;
    for _ in 0..REQUESTS {
        let response = gateway.request(request()).await;
        assert_eq!((response.status(), response.head.header("x-sluice-arm")), (200, Some("x/base")));
    }
    eventually("all copies are measured", async || report(&gateway).await["arms"][1]["requests"] == REQUESTS).await;
    assert_eq!(engines.each_ref().map(Engine::count), [REQUESTS; 2]);
    assert!(engines[0].seen().iter().all(|seen| !is_copy(seen) && seen.body == CHAT.as_bytes()));
    let renamed = CHAT.replace("\"m\"", "\"lora\"");
    assert!(engines[1].seen().iter().all(|seen| is_copy(seen) && seen.body == renamed.as_bytes()));
    assert_eq!(ended(&gateway, "completed").await, REQUESTS as u64);
    gateway.recorded("completed", REQUESTS as f64).await;
    assert_eq!(gateway.metric("sluice_requests_total", &[]).await, REQUESTS as f64, "a copy is no request");
    let lines = access_log(&log, 2 * REQUESTS).await;
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let copies: Vec<&Value> = lines.iter().filter(|line| line["copy"] == "completed").collect();
    assert_eq!((lines.len(), copies.len()), (2 * REQUESTS, REQUESTS));
    assert!(copies.iter().all(|line| line["arm"] == "x/shade" && line["request_id"] == "original"));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_cut_when_a_request_needs_its_room() {
    let script = |_, seen: &ReceivedRequest| match is_copy(seen) {
        true => vec![Step::Silence],
        false => [vec![Step::Gate], completion()].concat(),
    };
    let (engine, folder) = (Engine::start(script).await, tempfile::tempdir().unwrap());
    let text = one_pool(&[engine.url()]).replace("usage = \"off\"\n", "usage = \"off\"\nslots = 2\n");
    let gateway = TestGateway::from_text(&shadowed(&text, "", "in_flight = 1", folder.path()), &[]).await;
    let [mut first, mut second] = [gateway.client().await, gateway.client().await];
    first.send(request()).await;
    eventually("the request and its copy are on the engine", async || engine.count() == 2).await;
    assert_eq!(gateway.load(), (1, 0), "a copy is no load");
    second.send(request()).await;
    eventually("the second request has the slot of the copy", async || engine.count() == 3).await;
    eventually("the engine sees that the copy is gone", async || engine.left() == 1).await;
    assert_eq!(engine.seen().iter().filter(|seen| is_copy(seen)).count(), 1);
    engine.open_gate();
    engine.open_gate();
    for mut client in [first, second] {
        assert_eq!(client.response().await.status(), 200);
    }
    gateway.recorded("completed", 2.0).await;
    eventually("the copy is counted as cut", async || ended(&gateway, "cut").await == 1).await;
    eventually("the requests are measured", async || report(&gateway).await["arms"][0]["requests"] == 2).await;
    assert_eq!(report(&gateway).await["arms"][1]["requests"], 0, "what was cut is not measured");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_without_room_is_not_sent_and_none_delays_a_drain_or_a_stop() {
    let engines = [Engine::with_adapter().await, Engine::always(vec![Step::Silence]).await];
    let folder = tempfile::tempdir().unwrap();
    let text = one_pool(&[engines[0].url()]) + &shade(&engines[1].url(), "slots = 1\n");
    // A copy in flight does not count towards the key's limit.
    let key =
        format!("[[auth.keys]]\nname = \"k\"\nsha256 = \"{}\"\nlimit = {{ in_flight = 1 }}\n", key_digest("secret"));
    let text = key + &shadowed(&text, "pool = \"shade\"", "in_flight = 64", folder.path());
    let gateway = TestGateway::from_text(&text, &[]).await;
    gateway.request(request()).await;
    eventually("a copy has the only slot", async || engines[1].count() == 1).await;
    for _ in 1..10 {
        assert_eq!(gateway.request(request()).await.status(), 200);
    }
    gateway.recorded("completed", 10.0).await;
    eventually("the other nine are not sent", async || ended(&gateway, "no_room").await == 9).await;
    assert_eq!(engines[1].count(), 1);
    let drain = change("/admin/backends/shade/b1/drain");
    assert_eq!(TestClient::to(gateway.admin()).await.request(drain).await.status(), 200);
    eventually("the drain cuts the copy", async || engines[1].left() == 1).await;
    let enable = change("/admin/backends/shade/b1/enable");
    assert_eq!(TestClient::to(gateway.admin()).await.request(enable).await.status(), 200);
    gateway.request(request()).await;
    eventually("the next copy is sent", async || engines[1].count() == 2).await;
    assert!(gateway.stop().await);
    eventually("the stop cuts it", async || engines[1].left() == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_arm_whose_engine_fails_is_stopped_and_no_request_notices() {
    let error = crate::engine::response(500, "application/json", b"{\"error\":{\"message\":\"broken\"}}");
    let engines = [Engine::with_adapter().await, Engine::always(vec![Step::Send(error)]).await];
    let folder = tempfile::tempdir().unwrap();
    let text = one_pool(&[engines[0].url()]) + &shade(&engines[1].url(), "");
    let text = shadowed(&text, "pool = \"shade\"", "in_flight = 64", folder.path());
    let gateway = TestGateway::from_text(&text, &[]).await;
    let mut sent = 0.0;
    let stopped = async || {
        assert_eq!(gateway.request(request()).await.status(), 200);
        sent += 1.0;
        report(&gateway).await["phase"] == "stopped"
    };
    eventually("the guardrail stops it", stopped).await;
    gateway.recorded("completed", sent).await;
    let why = report(&gateway).await["why"].as_str().unwrap().to_owned();
    assert!(why.starts_with("shade was stopped after"), "{why}");
    let page = gateway.page().await;
    assert!(page.contains("sluice_backend_state{backend=\"b1\",pool=\"shade\",state=\"ready\"} 1"), "{page}");
    gateway.settled().await;
}
