//! Backends leave rotation when they fail or hang.
//!
//! They return after successful probes and requests.

use std::collections::VecDeque;
use std::time::Duration;

use sluice_sim::{Fault, Handle, Profile, SimConfig};

use crate::client::{CHAT, STREAMED, chat, get};
use crate::engine::{COMPLETION, Engine, Step, completion, response};
use crate::test_gateway::{TestGateway, eventually, one_pool};

pub(crate) async fn sim() -> Handle {
    let config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    sluice_sim::spawn(config, listener).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_in_a_row_eject_and_one_good_request_in_probation_readmits() {
    // The pool has a second backend, because the only backend of a pool would not be ejected for
    // error responses.
    let other = Engine::always(completion()).await;
    let engine = Engine::start(|number, _| match number {
        0..3 => vec![Step::Send(response(500, "application/json", b"{}"))],
        3 => vec![Step::Gate, Step::Send(crate::engine::json(COMPLETION.as_bytes()))],
        _ => completion(),
    })
    .await;
    let sets = ["health.ejection_base=50ms", "health.probe_interval=20ms", "pool.only.policy=round_robin"];
    let gateway = TestGateway::over(&[engine.url(), other.url()], &sets).await;
    let mut failures = 0;
    while failures < 3 {
        let status = gateway.request(chat(CHAT)).await.status();
        assert!([200, 500].contains(&status), "a 500 passes unchanged");
        failures += usize::from(status == 500);
    }
    eventually("it is ejected", async || gateway.state(0) != "ready").await;
    other.set_healthy(false);
    eventually("the other is down", async || gateway.state(1) == "down").await;
    eventually("probation", async || gateway.state(0) == "probation").await;
    // Probation lets one request at a time through.
    let mut trial = gateway.client().await;
    trial.send(chat(CHAT)).await;
    eventually("the trial runs", async || engine.count() == 4).await;
    let mut next = gateway.client().await;
    next.send(chat(CHAT)).await;
    eventually("the next one waits", async || gateway.load() == (1, 1)).await;
    engine.open_gate();
    assert_eq!(trial.response().await.text(), COMPLETION);
    assert_eq!(next.response().await.text(), COMPLETION);
    assert_eq!(gateway.state(0), "ready");
    assert_eq!(gateway.metric("sluice_backend_state", &["backend=\"b0\"", "state=\"ready\""]).await, 1.0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_client_never_eject() {
    let engine = Engine::always(vec![Step::Send(response(400, "application/json", b"{}"))]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    for _ in 0..20 {
        assert_eq!(client.request(chat(CHAT)).await.status(), 400);
    }
    assert_eq!(gateway.state(0), "ready");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_whose_probe_fails_gets_no_requests_until_a_probe_succeeds() {
    let engines = [Engine::always(completion()).await, Engine::always(completion()).await];
    let sets = ["health.probe_interval=20ms", "health.failures=2"];
    let gateway = TestGateway::over(&[engines[0].url(), engines[1].url()], &sets).await;
    engines[0].set_healthy(false);
    eventually("it is down", async || gateway.state(0) == "down").await;
    let before = engines[0].count();
    let mut client = gateway.client().await;
    for _ in 0..10 {
        assert_eq!(client.request(chat(CHAT)).await.status(), 200);
    }
    assert_eq!((engines[0].count() - before, engines[1].count()), (0, 10));
    engines[0].set_healthy(true);
    eventually("it serves again", async || {
        assert_eq!(client.request(chat(CHAT)).await.status(), 200);
        engines[0].count() > before
    })
    .await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_without_a_backend_does_not_make_the_gateway_unready() {
    let engine = Engine::start(|_, _| completion()).await;
    let closed = crate::errors::closed_url().await;
    let pool = |name: &str, lengths: &str, url: &str| {
        format!(
            "[[pool]]\nname = \"{name}\"\nprompt_tokens = {{ {lengths} }}\n\
             [[pool.backend]]\nname = \"b\"\nurl = \"{url}\"\n"
        )
    };
    let text = pool("short", "max = \"1k\"", &engine.url()) + &pool("long", "min = \"1k\"", &closed);
    let gateway = TestGateway::from_text(&text, &[]).await;
    eventually("it is ready", async || gateway.request(get("/ready")).await.status() == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_starts_late_joins_the_rotation() {
    let address = {
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        socket.local_addr().unwrap()
    };
    let gateway = TestGateway::over(&[format!("http://{address}")], &["health.probe_interval=20ms"]).await;
    assert_eq!(gateway.request(get("/ready")).await.status(), 503);
    let _engine = Engine::at(address, |_, _| completion()).await;
    eventually("it is ready", async || gateway.request(get("/ready")).await.status() == 200).await;
    assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_hangs_behind_a_healthy_port_is_detected_and_its_waiting_requests_are_served_elsewhere() {
    let engines = [sim().await, sim().await];
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.addr()));
    let text = one_pool(&urls) + "[health]\nstall = \"300ms\"\nprobe_interval = \"100ms\"\nejection_base = \"60s\"\n";
    let gateway = TestGateway::from_text(&text, &["pool.only.policy=round_robin"]).await;
    let body = STREAMED.replace("\"stream\"", "\"max_tokens\":20,\"ignore_eos\":true,\"stream\"");
    assert_eq!(gateway.request(chat(&body)).await.status(), 200);
    engines[0].fault(Fault::Hang);
    // `/health` of the engine still succeeds.
    assert_eq!(crate::client::TestClient::to(engines[0].addr()).await.request(get("/health")).await.status(), 200);
    let mut clients = Vec::new();
    for _ in 0..6 {
        let mut client = gateway.client().await;
        client.send(chat(&body)).await;
        clients.push(client);
    }
    for client in &mut clients {
        let response = client.response().await;
        assert!(response.whole && response.text().ends_with("data: [DONE]\n\n"), "{}", response.text());
        assert_eq!(response.head.header("x-sluice-backend"), Some("b1"));
    }
    assert_eq!([gateway.state(0), gateway.state(1)], ["ejected", "ready"]);
    assert!(gateway.metric("sluice_retries_total", &["reason=\"hung\""]).await >= 1.0);
    gateway.recorded("completed", 7.0).await;
    gateway.settled().await;
    gateway.stop().await;
    for engine in engines {
        engine.kill().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_of_streams_do_not_hide_that_an_engine_hangs() {
    let engine = sim().await;
    let text = one_pool(&[format!("http://{}", engine.addr())])
        + "[health]\nstall = \"300ms\"\nprobe_interval = \"100ms\"\nejection_base = \"60s\"\n";
    let gateway = TestGateway::from_text(&text, &[]).await;
    assert_eq!(gateway.request(chat(STREAMED)).await.status(), 200);
    engine.fault(Fault::Hang);
    // The API server of a hung engine still sends the head of every new stream. So the test always
    // has streams open, and new ones arrive.
    let mut clients = VecDeque::new();
    eventually("it is ejected while requests arrive", async || {
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await;
        clients.push_back(client);
        tokio::time::sleep(Duration::from_millis(20)).await;
        clients.drain(..clients.len().saturating_sub(10));
        gateway.state(0) == "ejected"
    })
    .await;
    drop(clients);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_on_an_engine_that_hangs_in_the_middle_ends_with_an_error_event() {
    let engine = sim().await;
    let text = one_pool(&[format!("http://{}", engine.addr())])
        + "[health]\nstall = \"300ms\"\nprobe_interval = \"100ms\"\nejection_base = \"60s\"\n";
    let gateway = TestGateway::from_text(&text, &[]).await;
    let endless = STREAMED.replace("\"stream\"", "\"max_tokens\":100000,\"ignore_eos\":true,\"stream\"");
    let mut client = gateway.client().await;
    client.send(chat(&endless)).await.until("content").await;
    engine.fault(Fault::Hang);
    let response = client.response().await;
    assert!(!response.whole);
    assert!(response.text().contains("event: error"), "{}", &response.text()[response.text().len() - 300..]);
    assert_eq!(gateway.state(0), "ejected");
    gateway.settled().await;
    gateway.stop().await;
    engine.kill().await;
}
