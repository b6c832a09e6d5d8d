//! The data-parallel ranks of one server: exact limits for each rank, the header that chooses a
//! rank, and prompts that return to the rank that has their beginning in its cache.
//!
//! Tests of schedulers use a simulated server, and tests of answers a scripted engine.

use std::time::Duration;

use sluice_sim::{Handle, Profile, SimConfig};

use crate::client::{CHAT, change, chat, post};
use crate::engine::{
    COMPLETION, Engine, LAST, ReceivedRequest, STREAM, Step, chunk, completion, ending, event, response, send,
};
use crate::ports::free_port;
use crate::test_gateway::{TestGateway, eventually, eventually_within, one_pool};

const OUT_OF_RANGE: &str = r#"{"error":{"message":"data_parallel_rank 1 is out of range [0, 1).","type":"BadRequestError","param":null,"code":400}}"#;

/// A simulated server with this many ranks.
async fn server(ranks: u32) -> Handle {
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    (config.data_parallel, config.speed) = (ranks, 20.0);
    sluice_sim::spawn(config, tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap()
}

async fn gateway_over(url: String, ranks: u32, sets: &[&str]) -> TestGateway {
    let text = one_pool(&[url]) + &format!("ranks = {ranks}\n");
    TestGateway::from_text(&text, sets).await
}

/// A scripted engine that counts as three ranks with two slots each, and a gateway over it.
async fn ranked() -> (Engine, TestGateway) {
    let begun = STREAM.to_owned() + &chunk(&event("one"));
    let engine = Engine::always(vec![send(begun), Step::Gate, send(chunk(&ending()) + LAST)]).await;
    let gateway = gateway_over(engine.url(), 3, &["pool.only.slots=2"]).await;
    (engine, gateway)
}

fn rank(seen: &ReceivedRequest) -> u16 {
    seen.header("x-data-parallel-rank").expect("the gateway names a rank").parse().unwrap()
}

fn streamed(content: &str) -> String {
    format!("{{\"model\":\"m\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"{content}\"}}]}}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rank_has_its_own_slots_and_no_client_chooses_one() {
    let (engine, gateway) = ranked().await;
    let mut clients = Vec::new();
    for number in 0..7 {
        let mut client = gateway.client().await;
        let body = streamed(&number.to_string());
        client.send(post("/v1/chat/completions", "X-Data-Parallel-Rank: 2\r\n", body.as_bytes())).await;
        clients.push(client);
    }
    eventually("six of seven requests run", async || engine.count() == 6 && gateway.load() == (6, 1)).await;
    let mut seen: Vec<u16> = engine.seen().iter().map(rank).collect();
    seen.sort_unstable();
    assert_eq!(seen, [0, 0, 1, 1, 2, 2]);
    assert!(engine.seen().iter().all(|seen| seen.head.to_lowercase().matches("x-data-parallel-rank").count() == 1));
    for rank in 0..3 {
        assert_eq!(gateway.metric("sluice_slots", &[&format!("backend=\"b0-{rank}\"")]).await, 2.0);
    }
    (0..7).for_each(|_| engine.open_gate());
    for client in &mut clients {
        assert_eq!(client.response().await.status(), 200);
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_scheduler_of_a_server_ever_has_more_than_the_slots_of_its_rank() {
    let server = server(2).await;
    let gateway = gateway_over(format!("http://{}", server.addr()), 2, &["pool.only.slots=3"]).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..40 {
        let mut client = gateway.client().await;
        let words = "word ".repeat(20 + 37 * (number % 7));
        clients.spawn(async move {
            let body = format!(
                "{{\"model\":\"m\",\"max_tokens\":40,\"ignore_eos\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"{number} {words}\"}}]}}"
            );
            client.request(chat(&body)).await.status()
        });
    }
    assert!(clients.join_all().await.iter().all(|status| *status == 200));
    let ranks = server.by_rank();
    assert_eq!(ranks.iter().map(|rank| rank.most).collect::<Vec<_>>(), [3, 3], "exactly the slots, in both");
    assert_eq!(ranks.iter().map(|rank| rank.finished).sum::<u64>(), 40);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_comes_back_to_the_rank_whose_cache_has_it() {
    let server = server(2).await;
    let gateway = gateway_over(format!("http://{}", server.addr()), 2, &[]).await;
    let turn = |who: &str, turns: usize| {
        let said = format!("{who} says something long, again and again. ").repeat(120);
        let more =
            ",{\"role\":\"assistant\",\"content\":\"yes\"},{\"role\":\"user\",\"content\":\"more\"}".repeat(turns);
        chat(&format!(
            "{{\"model\":\"m\",\"max_tokens\":4,\"messages\":[{{\"role\":\"user\",\"content\":\"{said}\"}}{more}]}}"
        ))
    };
    for turns in 0..3 {
        for who in ["Anna", "Bert"] {
            assert_eq!(gateway.request(turn(who, turns)).await.status(), 200);
        }
    }
    let ranks = server.by_rank();
    let shares: Vec<f64> = ranks.iter().map(|rank| rank.prefix.1 as f64 / rank.prefix.0 as f64).collect();
    assert_eq!(ranks.iter().map(|rank| rank.finished).collect::<Vec<_>>(), [3, 3], "one conversation on each");
    assert!(shares.iter().all(|share| *share > 0.6), "two of three turns find their beginning: {shares:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_the_engine_does_not_have_gets_no_request() {
    let server = server(2).await;
    let gateway = gateway_over(format!("http://{}", server.addr()), 3, &["health.probe_interval=20ms"]).await;
    eventually("two ranks are ready", async || gateway.state(0) == "ready" && gateway.state(1) == "ready").await;
    for _ in 0..9 {
        assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    }
    assert_eq!((gateway.state(2), server.snapshot().finished), ("starting", 9));
    assert_eq!(gateway.metric("sluice_retries_total", &[]).await, 0.0, "no request was tried there");
}

/// An engine that refuses rank 1, with a status or in a stream, and shows no metrics.
async fn refuses_rank_1(in_stream: bool) {
    let refusal = match in_stream {
        true => send(STREAM.to_owned() + &chunk(&format!("data: {OUT_OF_RANGE}\n\ndata: [DONE]\n\n")) + LAST),
        false => Step::Send(response(400, "application/json", OUT_OF_RANGE.as_bytes())),
    };
    let answer = match in_stream {
        true => vec![send(STREAM.to_owned() + &chunk(&event("one")) + &chunk(&ending()) + LAST)],
        false => completion(),
    };
    let engine = Engine::start(move |_, seen| match rank(seen) {
        1 => vec![refusal.clone()],
        _ => answer.clone(),
    })
    .await;
    let gateway = gateway_over(engine.url(), 2, &["health.probe_interval=10s"]).await;
    let body = if in_stream { streamed("hi") } else { CHAT.to_owned() };
    for _ in 0..6 {
        let found = gateway.request(chat(&body)).await;
        assert!(found.status() == 200 && !found.text().contains("data_parallel_rank"), "{}", found.text());
    }
    assert_eq!((gateway.state(0), gateway.state(1)), ("ready", "down"));
    assert_eq!(engine.seen().iter().filter(|seen| rank(seen) == 1).count(), 1, "it is asked once");
    gateway.counts("sluice_retries_total", "reason=\"not_served\"", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_for_a_missing_rank_goes_to_another_one() {
    refuses_rank_1(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_for_a_missing_rank_goes_to_another_one() {
    refuses_rank_1(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_drains_the_server_by_any_of_its_names() {
    let engine = Engine::always(completion()).await;
    let gateway = gateway_over(engine.url(), 2, &[]).await;
    let draining = async || gateway.metric("sluice_backend_state", &["state=\"draining\""]).await;
    for (drained, enabled) in [("b0", "b0-1"), ("b0-1", "b0")] {
        let act = async |backend: &str, what: &str| {
            let request = change(&format!("/admin/backends/only/{backend}/{what}"));
            crate::client::TestClient::to(gateway.admin()).await.request(request).await.status()
        };
        assert_eq!(act(drained, "drain").await, 200);
        assert_eq!(draining().await, 2.0);
        assert_eq!(act(enabled, "enable").await, 200);
        assert_eq!(draining().await, 0.0);
    }
    assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
}

/// `sluice sim` with two ranks, as an engine that the gateway runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launched_server_is_one_process_with_all_its_ranks() {
    let (folder, sim) = (tempfile::tempdir().unwrap(), env!("CARGO_BIN_EXE_sluice"));
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[fleet]\nstate = {:?}\nramp = \"0s\"\nwarm_up = 0\n\
         [[model]]\nname = \"m\"\n[[pool]]\nname = \"only\"\nmodels = [\"m\"]\nslots = 2\n[[pool.backend]]\nname = \"e\"\n\
         ranks = 2\nlaunch = {{ command = [{sim:?}, \"sim\", \"m\", \"--sim-speed\", \"1000\", \"--sim-startup\", \"0.1\"], \
         port = {}, args = {{ data-parallel-size = 2 }} }}\n",
        folder.path().display(),
        free_port(),
    );
    let gateway = TestGateway::from_text(&text, &[]).await;
    let ready = async || gateway.metric("sluice_backend_state", &["state=\"ready\""]).await == 2.0;
    eventually_within(Duration::from_secs(60), "both ranks are ready", ready).await;
    let started =
        async |rank: &str| gateway.metric("sluice_engine_start_seconds", &[&format!("backend=\"{rank}\"")]).await;
    assert!(started("e-0").await > 0.0);
    assert_eq!(started("e-1").await, 0.0, "one process for both ranks");
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut client = gateway.client().await;
        clients.spawn(async move { client.request(chat(CHAT)).await.status() });
    }
    assert!(clients.join_all().await.iter().all(|status| *status == 200));
    for rank in ["e-0", "e-1"] {
        let labels = [&format!("backend=\"{rank}\"")[..], "outcome=\"completed\""];
        eventually("each rank served", async || gateway.metric("sluice_backend_requests_total", &labels).await > 0.0)
            .await;
    }
    gateway.stop().await;
}
