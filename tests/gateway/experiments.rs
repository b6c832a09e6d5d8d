//! Experiments over sockets.
//!
//! Arms are sticky. No request is lost when an experiment is stopped or promoted, or when an arm
//! loses its engine. Measurements survive a restart of the gateway.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use tokio::task::JoinSet;

use crate::client::{CHAT, TestClient, change, get, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, eventually, one_pool};

fn experiment(urls: [String; 2], keys: &str) -> String {
    let pool = one_pool(&urls[..1]).replace("[[pool]]", "[[model]]\nname = \"lora\"\n[[pool]]");
    format!(
        "{}[[pool]]\nname = \"canary\"\narms_only = true\nusage = \"off\"\n[[pool.backend]]\nname = \"b1\"\nurl = \"{}\"\n\
         [[experiment]]\nname = \"x\"\nmodels = [\"m\"]\nsticky = \"header\"\n{keys}\n\
         [[experiment.arm]]\nname = \"base\"\nweight = 50\n\
         [[experiment.arm]]\nname = \"lora\"\nweight = 50\nmodel = \"lora\"\npool = \"canary\"\n",
        pool.replace("models = [\"m\"]", "models = [\"m\", \"lora\"]"),
        urls[1]
    )
}

async fn start(urls: [String; 2], state: &std::path::Path) -> TestGateway {
    let text = format!("{}[fleet]\nstate = \"{}\"\n", experiment(urls, ""), state.display());
    TestGateway::from_text(&text, &[]).await
}

fn of_user(user: usize) -> Vec<u8> {
    post("/v1/chat/completions", &format!("x-user-id: user-{user}\r\n"), CHAT.as_bytes())
}

async fn report(gateway: &TestGateway) -> Value {
    TestClient::to(gateway.admin()).await.request(get("/admin/experiments/x")).await.json()
}

async fn order(gateway: &TestGateway, what: &str) -> Value {
    let response = TestClient::to(gateway.admin()).await.request(change(&format!("/admin/experiments/x/{what}"))).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    response.json()
}

fn requests(report: &Value) -> u64 {
    report["arms"].as_array().unwrap().iter().map(|arm| arm["requests"].as_u64().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_stay_in_their_arm_and_only_the_model_is_renamed() {
    let (engines, state) = ([Engine::with_adapter().await, Engine::with_adapter().await], tempfile::tempdir().unwrap());
    let gateway = start(engines.each_ref().map(Engine::url), state.path()).await;
    let mut arms = vec![Vec::new(); 2];
    for arms in &mut arms {
        for user in 0..20 {
            let response = gateway.request(of_user(user)).await;
            arms.push(response.head.header("x-sluice-arm").unwrap().to_owned());
        }
    }
    assert_eq!(arms[0], arms[1]);
    let lora = arms[0].iter().filter(|arm| *arm == "x/lora").count();
    assert!((4..=16).contains(&lora), "{lora} of 20");
    assert_eq!(engines.each_ref().map(Engine::count), [2 * (20 - lora), 2 * lora]);
    assert!(engines[0].seen().iter().all(|seen| seen.body == CHAT.as_bytes()));
    let renamed = CHAT.replace("\"m\"", "\"lora\"");
    assert!(engines[1].seen().iter().all(|seen| seen.body == renamed.as_bytes()));
    let response = gateway.request(post("/v1/chat/completions", "", CHAT.as_bytes())).await;
    assert_eq!((response.status(), response.head.header("x-sluice-arm")), (200, None), "nothing to be sticky by");
    gateway.recorded("completed", 41.0).await;
    eventually("all are measured", async || requests(&report(&gateway).await) == 40).await;
    gateway.settled().await;
}

/// Clients that send requests until the flag is set. Every response must be 200. The task of a
/// client returns the number of its requests.
fn load(gateway: &TestGateway, over: &Arc<AtomicBool>) -> JoinSet<usize> {
    let mut clients = JoinSet::new();
    for number in 0..4 {
        let (address, over) = (gateway.address(), Arc::clone(over));
        clients.spawn(async move {
            let (mut client, mut count) = (TestClient::to(address).await, 0);
            while !over.load(Ordering::Relaxed) {
                let response = client.request(of_user(number * 1_000 + count)).await;
                assert_eq!(response.status(), 200, "{}", response.text());
                count += 1;
            }
            count
        });
    }
    clients
}

async fn serves(engine: &Engine, more: usize) {
    let wanted = engine.count() + more;
    eventually("the engine gets requests", async || engine.count() >= wanted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_starting_and_promoting_under_load_loses_no_request() {
    let (engines, state) = ([Engine::with_adapter().await, Engine::with_adapter().await], tempfile::tempdir().unwrap());
    let gateway = start(engines.each_ref().map(Engine::url), state.path()).await;
    let over = Arc::new(AtomicBool::new(false));
    let clients = load(&gateway, &over);
    for (what, phase, engine) in [
        ("stop", "stopped", 0),
        ("promote/lora", "promoted", 1),
        ("start", "running", 0),
        ("promote/base", "promoted", 0),
    ] {
        assert_eq!(order(&gateway, what).await["phase"], phase);
        serves(&engines[engine], 20).await;
    }
    over.store(true, Ordering::Relaxed);
    let sent: usize = clients.join_all().await.iter().sum();
    gateway.recorded("completed", sent as f64).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_traffic_of_an_arm_whose_engine_has_crashed_is_served_by_the_other() {
    let [base, lora] = [Engine::with_adapter().await, Engine::with_adapter().await];
    let state = tempfile::tempdir().unwrap();
    let gateway = start([base.url(), lora.url()], state.path()).await;
    let over = Arc::new(AtomicBool::new(false));
    let clients = load(&gateway, &over);
    eventually("both arms have requests", async || base.count() > 10 && lora.count() > 10).await;
    lora.end().await;
    let fell_back = async || report(&gateway).await["arms"][1]["fell_back"].as_u64().unwrap();
    eventually("the arm falls back", async || fell_back().await > 5).await;
    eventually("its guardrail stops it", async || report(&gateway).await["phase"] == "stopped").await;
    let why = report(&gateway).await["why"].as_str().unwrap().to_owned();
    assert!(why.starts_with("lora was stopped after") && why.ends_with("guardrail.errors"), "{why}");
    let before = base.count();
    eventually("the other serves", async || base.count() > before + 20).await;
    over.store(true, Ordering::Relaxed);
    let sent: usize = clients.join_all().await.iter().sum();
    gateway.recorded("completed", sent as f64).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_gateway_goes_on_with_what_was_measured() {
    let (engines, state) = ([Engine::with_adapter().await, Engine::with_adapter().await], tempfile::tempdir().unwrap());
    let urls = engines.each_ref().map(Engine::url);
    let gateway = start(urls.clone(), state.path()).await;
    for user in 0..30 {
        gateway.request(of_user(user)).await;
    }
    eventually("all are measured", async || requests(&report(&gateway).await) == 30).await;
    order(&gateway, "stop").await;
    let before = report(&gateway).await;
    assert!(gateway.stop().await);
    let gateway = start(urls, state.path()).await;
    let after = report(&gateway).await;
    assert_eq!((&after["phase"], &after["arms"]), (&before["phase"], &before["arms"]));
    let response = gateway.request(of_user(1)).await;
    assert_eq!(response.head.header("x-sluice-arm"), None, "it is stopped");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arm_without_a_ready_backend_is_refused_by_name_and_traffic_flows_on() {
    let [base, lora] = [Engine::with_adapter().await, Engine::with_adapter().await];
    let (urls, state) = ([base.url(), lora.url()], tempfile::tempdir().unwrap());
    lora.end().await;
    let text = format!("{}[fleet]\nstate = \"{}\"\n", experiment(urls, "running = false"), state.path().display());
    let gateway = TestGateway::from_text(&text, &[]).await;
    let response = TestClient::to(gateway.admin()).await.request(change("/admin/experiments/x/start")).await;
    assert_eq!((response.status(), response.json()["error"]["code"].as_str()), (409, Some("arm_not_ready")));
    assert!(response.text().contains("experiment.x.arm.lora: none of its backends is ready"), "{}", response.text());
    for user in 0..10 {
        assert_eq!(gateway.request(of_user(user)).await.status(), 200);
    }
    assert_eq!(base.count(), 10);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_users_rating_counts_for_the_arm_that_answered_and_an_unknown_request_is_refused() {
    let (engines, state) = ([Engine::with_adapter().await, Engine::with_adapter().await], tempfile::tempdir().unwrap());
    let gateway = start(engines.each_ref().map(Engine::url), state.path()).await;
    let mut ids = Vec::new();
    for user in 0..20 {
        let response = gateway.request(of_user(user)).await;
        let header = |name: &str| response.head.header(name).unwrap().to_owned();
        ids.push((header("x-request-id"), header("x-sluice-arm")));
    }
    eventually("all are measured", async || requests(&report(&gateway).await) == 20).await;
    let rate = async |id: &str, body: &str| {
        let request = post(&format!("/admin/feedback/{id}"), "x-sluice-admin: 1\r\n", body.as_bytes());
        TestClient::to(gateway.admin()).await.request(request).await
    };
    for (number, (id, arm)) in ids.iter().enumerate() {
        let response = rate(id, &format!("{{\"good\": {}}}", number % 4 != 0)).await;
        assert_eq!(
            (response.status(), response.json()["arm"].as_str()),
            (200, Some(arm.as_str())),
            "{}",
            response.text()
        );
    }
    let ratings = async || {
        let report = report(&gateway).await;
        report["arms"].as_array().unwrap().iter().map(|arm| arm["quality"]["bad_ratings"].clone()).collect::<Vec<_>>()
    };
    let of_arm = |label: &str| {
        let own = || ids.iter().enumerate().filter(|(_, (_, arm))| arm == label);
        serde_json::json!([own().filter(|(number, _)| number % 4 == 0).count(), own().count()])
    };
    assert_eq!(ratings().await, [of_arm("x/base"), of_arm("x/lora")]);
    assert_eq!(rate(&ids[0].0, "{\"good\": false}").await.status(), 200, "the same once more");
    assert_eq!(ratings().await, [of_arm("x/base"), of_arm("x/lora")]);
    let unknown = rate("no-such-request", "{\"good\": true}").await;
    assert_eq!((unknown.status(), unknown.json()["error"]["code"].as_str()), (404, Some("no_such_request")));
    assert!(
        unknown.text().contains("no answer to a request with the id 'no-such-request' can be rated"),
        "{}",
        unknown.text()
    );
    for body in ["", "{}", "{\"good\": 1}", "{\"good\": true, \"x\": 1}"] {
        assert_eq!(rate(&ids[0].0, body).await.status(), 400, "{body}");
    }
    let finish = report(&gateway).await["arms"][0]["quality"]["finish"][0].clone();
    assert_eq!(finish, serde_json::json!(["stop", engines[0].count()]));
    let page = gateway.page().await;
    let series = format!("sluice_arm_requests_total{{arm=\"x/base\"}} {}", engines[0].count());
    assert!(
        page.contains(&series) && page.contains("sluice_experiment_state{experiment=\"x\",state=\"running\"} 1"),
        "{page}"
    );
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_takes_part_before_the_adapter_of_an_arm_is_loaded_which_happens_on_demand() {
    let (engine, state) = (Arc::new(Engine::always(completion()).await), tempfile::tempdir().unwrap());
    let text = one_pool(&[engine.url()])
        .replace("[[pool]]", "[[model]]\nname = \"lora\"\nadapter = \"adapter\"\n[[pool]]")
        .replace("models = [\"m\"]", "models = [\"m\", \"lora\"]");
    let text = format!(
        "{text}[[experiment]]\nname = \"x\"\nmodels = [\"m\"]\nsticky = \"header\"\n\
         [[experiment.arm]]\nname = \"base\"\nweight = 50\n[[experiment.arm]]\nname = \"lora\"\nweight = 50\nmodel = \"lora\"\n\
         [fleet]\nstate = \"{}\"\n",
        state.path().display()
    );
    let gateway = TestGateway::from_text(&text, &[]).await;
    for user in 0..10 {
        let response = gateway.request(of_user(user)).await;
        assert_eq!((response.status(), response.head.header("x-sluice-arm")), (200, None));
    }
    let seen = report(&gateway).await;
    let why = seen["arms"][1]["waiting"].as_str().unwrap();
    assert_eq!(why, "the arm lora waits: no ready backend serves the model lora; no request takes part until one does");
    assert_eq!((seen["phase"].as_str(), requests(&seen)), (Some("running"), 0));
    let loads = || engine.seen().into_iter().filter(|seen| seen.head.starts_with("POST /v1/load_lora_adapter")).count();
    let warm = || engine.seen().iter().any(|seen| seen.head.starts_with("POST /v1/completions"));
    eventually("the adapter is loaded and warmed", async || loads() == 1 && warm()).await;
    engine.set_models(&["m", "lora"]);
    eventually("the arm gets requests", async || {
        let response = gateway.request(of_user(1)).await;
        assert_eq!(response.status(), 200);
        response.head.header("x-sluice-arm").is_some()
    })
    .await;
    assert_eq!(report(&gateway).await["arms"][1]["waiting"], Value::Null);
    // An engine that was restarted has lost its loaded adapters.
    engine.set_models(&["m"]);
    engine.set_healthy(false);
    eventually("the engine is away", async || gateway.state(0) != "ready").await;
    engine.set_healthy(true);
    eventually("the arm waits again", async || report(&gateway).await["arms"][1]["waiting"].is_string()).await;
    let response = gateway.request(of_user(1)).await;
    assert_eq!((response.status(), response.head.header("x-sluice-arm")), (200, None));
    let seen = report(&gateway).await;
    assert_eq!((seen["phase"].as_str(), seen["arms"][1]["fell_back"].as_u64()), (Some("running"), Some(0)));
    gateway.settled().await;
}
