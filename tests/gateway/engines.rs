//! Engines other than vLLM: health pages, limits that an engine reports, jobs of serial workers,
//! and the paths of KServe.

use crate::client::{CHAT, Response, TestClient, chat, post};
use crate::engine::{Engine, LAST, STREAM, Step, chunk, completion, json, response, send};
use crate::test_gateway::{TestGateway, eventually};

const SETS: &[&str] = &["health.probe_interval=20ms", "health.failures=2"];

fn pool(kind: &str, urls: &[String], keys: &str) -> String {
    let mut text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[[model]]\nname = \"m\"\naliases = [\"alias\"]\n\
         [[pool]]\nname = \"only\"\nmodels = [\"m\"]\nengine = \"{kind}\"\n{keys}\n"
    );
    for (index, url) in urls.iter().enumerate() {
        text += &format!("[[pool.backend]]\nname = \"b{index}\"\nurl = \"{url}\"\n");
    }
    text
}

fn job(path: &str, body: &str) -> Vec<u8> {
    post(path, "", body.as_bytes())
}

async fn refused(gateway: &TestGateway, request: Vec<u8>, status: u16, words: &str) {
    let response: Response = gateway.request(request).await;
    let text = response.text();
    assert_eq!(response.status(), status, "{text}");
    assert!(text.contains(words), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sglang_is_asked_by_its_pages_and_a_full_queue_moves_the_request() {
    let full = br#"{"object":"error","message":"The request queue is full.","type":"Service Unavailable","code":503}"#;
    let busy = Engine::always(vec![Step::Send(response(503, "application/json", full))]).await;
    let free = Engine::always(completion()).await;
    for engine in [&busy, &free] {
        engine.set_page("/health_generate", 503, "");
        engine.set_page("/v1/loads?include=core", 200, r#"{"loads":[{"max_running_requests":3}]}"#);
    }
    let text = pool("sglang", &[busy.url(), free.url()], "policy = \"round_robin\"");
    let gateway = TestGateway::from_text(&text, SETS).await;
    for engine in [&busy, &free] {
        assert_ne!(gateway.state(0), "ready", "it is starting");
        engine.set_page("/health_generate", 200, "");
    }
    eventually("both serve", async || (gateway.state(0), gateway.state(1)) == ("ready", "ready")).await;
    eventually("the reported limit is in force", async || gateway.slots_limit() == 3).await;
    let mut client = gateway.client().await;
    for _ in 0..4 {
        assert_eq!(client.request(chat(CHAT)).await.status(), 200);
    }
    assert!(busy.count() > 0 && free.count() == 4, "{} {}", busy.count(), free.count());
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_sglang_whose_counters_stand_still_is_hung() {
    let engine = Engine::always(vec![Step::Silence]).await;
    engine.set_page("/health_generate", 200, "");
    engine.set_page("/metrics", 200, "sglang:realtime_tokens_total{mode=\"decode\"} 7\nsglang:num_running_reqs 1\n");
    let sets = ["health.probe_interval=20ms", "health.stall=300ms", "retry.attempts=1"];
    let gateway = TestGateway::from_text(&pool("sglang", &[engine.url()], ""), &sets).await;
    eventually("it serves", async || gateway.state(0) == "ready").await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 502);
    assert_eq!(gateway.state(0), "ejected");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn llama_cpp_gets_as_many_requests_as_it_has_slots() {
    let engine = Engine::always([vec![Step::Gate], completion()].concat()).await;
    engine.set_page("/health", 503, r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#);
    engine.set_page("/props", 200, r#"{"total_slots":2}"#);
    let gateway = TestGateway::from_text(&pool("llama.cpp", &[engine.url()], ""), SETS).await;
    assert_ne!(gateway.state(0), "ready");
    engine.set_page("/health", 200, r#"{"status":"ok"}"#);
    eventually("the slots are known", async || (gateway.state(0), gateway.slots_limit()) == ("ready", 2)).await;
    let mut clients = Vec::new();
    for _ in 0..5 {
        let mut client = gateway.client().await;
        client.send(chat(CHAT)).await;
        clients.push(client);
    }
    eventually("two run and three wait", async || gateway.load() == (2, 3)).await;
    assert_eq!(engine.count(), 2);
    (0..5).for_each(|_| engine.open_gate());
    for mut client in clients {
        assert_eq!(client.response().await.status(), 200);
    }
    refused(&gateway, job("/v1/score", r#"{"model":"m","text_1":"a","text_2":"b"}"#), 404, "runs on llama.cpp").await;
    gateway.settled().await;
}

const SPEECH: &str = "/v1/audio/speech";

/// A text to speak with this many characters.
fn speech(letters: usize) -> Vec<u8> {
    job(SPEECH, &format!(r#"{{"model":"m","voice":"v","input":"{}"}}"#, "x".repeat(letters)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serial_worker_gets_one_job_at_a_time_the_shortest_first() {
    let engine = Engine::always(vec![Step::Gate, Step::Send(response(200, "audio/wav", b"RIFF"))]).await;
    let keys = "cost = { fields = [\"input\"], unit = \"characters\" }\nqueue.aging_per_1k_tokens = \"1000s\"";
    let gateway = TestGateway::from_text(&pool("serial", &[engine.url()], keys), SETS).await;
    eventually("it serves", async || gateway.state(0) == "ready").await;
    assert_eq!(gateway.slots_limit(), 1);
    let mut clients = Vec::new();
    for (number, letters) in [5, 4_000, 300, 20].into_iter().enumerate() {
        let mut client: TestClient = gateway.client().await;
        client.send(speech(letters)).await;
        eventually("it is there", async || gateway.load() == (1, number)).await;
        clients.push(client);
    }
    (0..4).for_each(|_| engine.open_gate());
    for mut client in clients {
        let answer = client.response().await;
        assert_eq!((answer.status(), answer.text().as_str()), (200, "RIFF"));
    }
    let order: Vec<usize> = engine.seen().iter().map(|seen| seen.body.iter().filter(|b| **b == b'x').count()).collect();
    assert_eq!(order, [5, 20, 300, 4_000]);
    gateway.recorded("completed", 4.0).await;
    assert_eq!(gateway.metric("sluice_request_duration_seconds_count", &["pool=\"only\""]).await, 4.0);
    assert_eq!(gateway.metric("sluice_time_to_first_token_seconds_count", &["pool=\"only\""]).await, 4.0);
    engine.open_gate();
    assert_eq!(gateway.request(speech(0)).await.status(), 200, "a job without an amount is served");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_can_name_paths_of_its_workers() {
    let engine = Engine::always(vec![Step::Send(response(200, "audio/wav", b"RIFF"))]).await;
    let keys = "routes = [\"/synthesize\"]\ncost = { per = 100.0 }";
    let gateway = TestGateway::from_text(&pool("serial", &[engine.url()], keys), SETS).await;
    eventually("it serves", async || gateway.state(0) == "ready").await;
    let answer = gateway.request(job("/synthesize?voice=a", "text, not JSON \u{e9}")).await;
    assert_eq!((answer.status(), answer.text().as_str()), (200, "RIFF"));
    let seen = engine.seen().remove(0);
    assert!(seen.head.starts_with("POST /synthesize?voice=a HTTP/1.1"), "{}", seen.head);
    assert_eq!(String::from_utf8(seen.body).unwrap(), "text, not JSON \u{e9}", "the body is not changed");
    for path in ["/synthesize/x", "/%73ynthesize", "/load", "/synthesize/..%2fload"] {
        assert_eq!(gateway.request(job(path, "{}")).await.status(), 404, "{path}");
    }
    refused(&gateway, chat(CHAT), 404, "runs on serial").await;
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_silent_for_the_deadline_is_hung() {
    let engine = Engine::always(vec![Step::Silence]).await;
    let sets = ["health.probe_interval=20ms", "retry.attempts=1"];
    let gateway = TestGateway::from_text(&pool("serial", &[engine.url()], "deadline = \"300ms\""), &sets).await;
    eventually("it serves", async || gateway.state(0) == "ready").await;
    assert_eq!(gateway.request(speech(3)).await.status(), 502);
    eventually("the gateway has closed the connection", async || engine.left() == 1).await;
    assert_eq!(gateway.state(0), "ejected");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn triton_takes_the_model_from_the_path_and_ends_a_stream_with_the_body() {
    let engine = Engine::start(|_, seen| match seen.head.contains("generate_stream") {
        false => vec![Step::Send(json(br#"{"model_name":"m","outputs":[]}"#))],
        true => {
            let event = |text: &str| chunk(&format!("data: {{\"model_name\":\"m\",\"text_output\":\"{text}\"}}\n\n"));
            vec![send(STREAM.to_owned() + &event("a")), Step::Gate, send(event("b") + LAST)]
        }
    })
    .await;
    engine.set_page("/v2/health/ready", 200, "");
    let gateway = TestGateway::from_text(&pool("triton", &[engine.url()], ""), SETS).await;
    eventually("it serves", async || gateway.state(0) == "ready").await;
    let infer = r#"{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}"#;
    for path in ["/v2/models/m/infer", "/v2/models/alias/versions/2/infer"] {
        assert_eq!(gateway.request(job(path, infer)).await.status(), 200, "{path}");
    }
    let paths: Vec<String> = engine.seen().iter().map(|seen| seen.head.split(' ').nth(1).unwrap().to_owned()).collect();
    assert_eq!(paths, ["/v2/models/m/infer", "/v2/models/m/versions/2/infer"], "an alias is replaced");
    assert!(engine.seen().iter().all(|seen| seen.body == infer.as_bytes()));
    engine.open_gate();
    let streamed = gateway.request(job("/v2/models/m/generate_stream", r#"{"text_input":"x"}"#)).await;
    assert!(streamed.text().ends_with("\"b\"}\n\n"), "{}", streamed.text());
    gateway.recorded("completed", 3.0).await;
    refused(&gateway, job("/v2/models/other/infer", infer), 404, "other").await;
    for path in ["/v2/models/a%2Fm/infer", "/v2/models/../models/m/infer", "/v2/models/m/load"] {
        refused(&gateway, job(path, infer), 404, "unescaped").await;
    }
    assert_eq!(engine.count(), 3);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_of_another_kind_is_not_ready() {
    let engine = Engine::always(completion()).await;
    let text = pool("triton", &[engine.url()], "queue.timeout = \"100ms\"");
    let gateway = TestGateway::from_text(&text, SETS).await;
    refused(&gateway, job("/v2/models/m/infer", "{}"), 503, "try again later").await;
    assert_ne!(gateway.state(0), "ready");
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_does_not_notice_that_its_client_left_keeps_its_slot() {
    let engine = Engine::always(vec![Step::Gate, Step::Send(response(200, "audio/wav", b"RIFF"))]).await;
    let gateway = TestGateway::from_text(&pool("serial", &[engine.url()], ""), SETS).await;
    eventually("it serves", async || gateway.state(0) == "ready").await;
    let mut leaves: TestClient = gateway.client().await;
    leaves.send(speech(1)).await;
    eventually("it runs", async || engine.count() == 1).await;
    let mut next: TestClient = gateway.client().await;
    next.send(speech(2)).await;
    eventually("it waits", async || gateway.load() == (1, 1)).await;
    drop(leaves);
    // When the gateway notices that a third client leaves, it has had time to notice the first one.
    let mut waits: TestClient = gateway.client().await;
    waits.send(speech(3)).await;
    eventually("two wait", async || gateway.load() == (1, 2)).await;
    drop(waits);
    eventually("one waits", async || gateway.load() == (1, 1)).await;
    assert_eq!(engine.count(), 1, "the worker still works for the first one");
    engine.open_gate();
    eventually("the next one runs", async || engine.count() == 2).await;
    engine.open_gate();
    assert_eq!(next.response().await.status(), 200);
    gateway.recorded("client_gone", 2.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_answers_no_probe_while_it_works_stays_in_rotation() {
    let engine = || Engine::always(vec![Step::Gate, Step::Send(response(200, "audio/wav", b"RIFF"))]);
    let (first, second) = (engine().await, engine().await);
    let keys = "policy = \"fewest_requests\"";
    let gateway = TestGateway::from_text(&pool("serial", &[first.url(), second.url()], keys), SETS).await;
    eventually("they serve", async || (gateway.state(0), gateway.state(1)) == ("ready", "ready")).await;
    let mut client: TestClient = gateway.client().await;
    client.send(speech(1)).await;
    eventually("one runs", async || first.count() + second.count() == 1).await;
    let (busy, idle, works) = if first.count() == 1 { (0, 1, &first) } else { (1, 0, &second) };
    for engine in [&first, &second] {
        engine.set_page("/health", 503, "busy");
    }
    eventually("the idle one was asked", async || gateway.state(idle) == "down").await;
    assert_eq!(gateway.state(busy), "ready", "it was asked as often, if at all");
    works.open_gate();
    assert_eq!(client.response().await.status(), 200);
    eventually("now it is asked, too", async || gateway.state(busy) == "down").await;
    gateway.settled().await;
}
