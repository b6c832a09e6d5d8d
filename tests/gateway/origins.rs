//! One client's outcomes do not decide for all clients.
//!
//! One client causes failures, is refused, or kills engines, and the tests check the effect on the
//! other clients.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::client::{CHAT, TestClient, chat, get, post};
use crate::engine::{Engine, Step, completion, response};
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};

const FAILING: &str = r#"{"model":"m","messages":[{"role":"user","content":"FAIL"}]}"#;
const KILLING: &str = r#"{"model":"m","messages":[{"role":"user","content":"KILL"}]}"#;

/// An engine that answers 500 to a body with the prompt of [`FAILING`], and completes all others.
async fn engine() -> Engine {
    Engine::start(|_, seen| match String::from_utf8_lossy(&seen.body).contains("FAIL") {
        true => vec![Step::Send(response(500, "application/json", b"{}"))],
        false => completion(),
    })
    .await
}

async fn client(gateway: &TestGateway, last: u8) -> TestClient {
    TestClient::between(SocketAddr::from(([127, 0, 0, last], 0)), gateway.address()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_whose_requests_fail_ejects_no_backend_that_serves_others_and_several_at_most_half() {
    let engines = [engine().await, engine().await, engine().await, engine().await];
    let sets = ["pool.only.policy=round_robin", "health.ejection_base=60s", "health.probe_interval=1h"];
    let gateway = TestGateway::over(&engines.each_ref().map(Engine::url), &sets).await;
    let (mut good, mut evil) = (client(&gateway, 2).await, client(&gateway, 3).await);
    for _ in 0..10 {
        for _ in 0..4 {
            assert_eq!(good.request(chat(CHAT)).await.status(), 200);
        }
        for _ in 0..40 {
            assert_eq!(evil.request(chat(FAILING)).await.status(), 500);
        }
        assert_eq!([0, 1, 2, 3].map(|backend| gateway.state(backend)), ["ready"; 4]);
    }
    for _ in 0..200 {
        good.request(chat(FAILING)).await;
        evil.request(chat(FAILING)).await;
    }
    let ejected = [0, 1, 2, 3].into_iter().filter(|backend| gateway.state(*backend) == "ejected").count();
    assert_eq!(ejected, 2, "health.max_ejected");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_two_engines_died_of_is_refused_and_its_bystanders_are_served() {
    let killed = Arc::new(AtomicUsize::new(0));
    let engine = || {
        let killed = Arc::clone(&killed);
        Engine::start(move |_, seen| match seen.body == KILLING.as_bytes() {
            true => {
                killed.fetch_add(1, SeqCst);
                vec![Step::Close]
            }
            false => completion(),
        })
    };
    let engines = [engine().await, engine().await, engine().await];
    let sets = ["retry.attempts=8", "pool.only.policy=round_robin", "health.failures=1000"];
    let gateway = TestGateway::over(&engines.each_ref().map(Engine::url), &sets).await;
    gateway.request(chat(KILLING)).await.is(502, "upstream_broke");
    assert_eq!(killed.load(SeqCst), 2, "once more at most");
    for _ in 0..10 {
        gateway.request(chat(KILLING)).await.is(422, "suspected_crash");
        assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    }
    assert_eq!(killed.load(SeqCst), 2);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_find_the_shared_queue_full_are_no_failures_of_the_arm_that_their_client_chose() {
    let engine = Engine::start(|number, _| {
        let gate = (number == 0).then_some(Step::Gate);
        gate.into_iter().chain(completion()).collect()
    })
    .await;
    let text = format!(
        "{}[[experiment]]\nname = \"x\"\nmodels = [\"m\"]\nsticky = \"user\"\n[[experiment.arm]]\nname = \"base\"\n\
         weight = 50\n[[experiment.arm]]\nname = \"new\"\nweight = 50\n[experiment.guardrail]\nerrors = 0.01\n\
         [auth]\nkeys = [{{ name = \"a\", sha256 = \"{}\" }}]\n",
        one_pool(&[engine.url()]),
        key_digest("a")
    );
    let sets = ["pool.only.slots=1", "pool.only.queue.length=1"];
    let gateway = TestGateway::from_text(&text, &sets).await;
    let of_user = |user: usize| {
        let body = CHAT.replacen('{', &format!("{{\"user\":\"u{user}\","), 1);
        post("/v1/chat/completions", "authorization: Bearer a\r\n", body.as_bytes())
    };
    let mut holders = [gateway.client().await, gateway.client().await];
    for (number, holder) in holders.iter_mut().enumerate() {
        holder.send(of_user(number)).await;
        eventually("it runs or waits", async || gateway.load() == (1, number)).await;
    }
    for user in 0..300 {
        gateway.request(of_user(user)).await.is(503, "queue_full");
    }
    let report = TestClient::to(gateway.admin()).await.request(get("/admin/experiments/x")).await.json();
    assert_eq!(report["phase"], "running", "{report}");
    for arm in report["arms"].as_array().unwrap() {
        assert_eq!((arm["failed"].as_u64(), arm["stopped"].is_null()), (Some(0), true), "{report}");
    }
    engine.open_gate();
    for holder in &mut holders {
        assert_eq!(holder.response().await.status(), 200);
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failures_of_one_key_stop_no_arm_and_those_of_two_keys_do() {
    let engine = engine().await;
    let text = format!(
        "{}[[experiment]]\nname = \"x\"\nmodels = [\"m\"]\nsticky = \"user\"\n[[experiment.arm]]\nname = \"base\"\n\
         weight = 50\n[[experiment.arm]]\nname = \"new\"\nweight = 50\n[experiment.guardrail]\nerrors = 0.01\n\
         [auth]\nkeys = [{{ name = \"good\", sha256 = \"{}\" }}, {{ name = \"evil\", sha256 = \"{}\" }}]\n",
        one_pool(&[engine.url()]),
        key_digest("good"),
        key_digest("evil")
    );
    let gateway = TestGateway::from_text(&text, &["health.failures=1000", "health.probe_interval=1h"]).await;
    let send = async |key: &str, user: usize, body: &str| {
        let body = body.replacen('{', &format!("{{\"user\":\"u{user}\","), 1);
        let head = format!("authorization: Bearer {key}\r\n");
        let response = gateway.request(post("/v1/chat/completions", &head, body.as_bytes())).await;
        response.head.header("x-sluice-arm").map(str::to_owned)
    };
    let mut of_new = Vec::new();
    for user in 0..60 {
        if send("good", user, CHAT).await.as_deref() == Some("x/new") {
            of_new.push(user);
        }
    }
    assert!(of_new.len() > 10, "{of_new:?}");
    let phase = async || {
        let report = TestClient::to(gateway.admin()).await.request(get("/admin/experiments/x")).await.json();
        (report["phase"].as_str().unwrap_or_default().to_owned(), report)
    };
    for user in of_new.iter().cycle().take(300) {
        send("evil", *user, FAILING).await;
        send("good", *user, CHAT).await;
    }
    let (running, report) = phase().await;
    assert_eq!(running, "running", "one key's failures: {report}");
    eventually("the failures of both keys stop the arm", async || {
        for user in of_new.iter().take(20) {
            send("evil", *user, FAILING).await;
            send("good", *user, FAILING).await;
        }
        phase().await.0 == "stopped"
    })
    .await;
    gateway.settled().await;
}
