//! The token limits of a key. The gateway first charges the estimate, corrects the charge to the
//! tokens used at the end, and never charges more tokens than an engine can have counted.

use crate::client::{CHAT, STREAMED, post};
use crate::engine::{Engine, LAST, ReceivedRequest, STREAM, Step, chunk, ending, event, json, send};
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};

/// A gateway with one pool over this engine, the key `good` without limits, and the key `evil` with
/// the limits in `limit`.
async fn gateway(engine: &Engine, limit: &str) -> TestGateway {
    let key = |name: &str, limit: &str| {
        format!("[[auth.keys]]\nname = \"{name}\"\nsha256 = \"{}\"\nlimit = {{ {limit} }}\n", key_digest(name))
    };
    let text = one_pool(&[engine.url()]) + &key("good", "") + &key("evil", limit);
    TestGateway::from_text(&text, &[]).await
}

fn ask(path: &str, body: &str, key: &str) -> Vec<u8> {
    post(path, &format!("authorization: Bearer {key}\r\n"), body.as_bytes())
}

fn chat(body: &str, key: &str) -> Vec<u8> {
    ask("/v1/chat/completions", body, key)
}

fn answer(prompt: u64, completion: u64) -> Vec<Step> {
    let body = format!(
        r#"{{"choices":[{{"index":0,"message":{{"content":"yes"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}}}"#
    );
    vec![Step::Send(json(body.as_bytes()))]
}

async fn minute(gateway: &TestGateway) -> f64 {
    gateway.metric("sluice_key_tokens", &["key=\"evil\"", "window=\"minute\""]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_gets_no_multiple_of_its_tokens_although_others_have_short_answers() {
    let long = |request: &ReceivedRequest| String::from_utf8_lossy(&request.body).contains("long");
    let engine = Engine::start(move |_, request| answer(10, if long(request) { 4_000 } else { 5 })).await;
    let gateway = gateway(&engine, "tokens_per_minute = \"6k\"").await;
    for _ in 0..30 {
        assert_eq!(gateway.request(chat(CHAT, "good")).await.status(), 200);
    }
    let request = chat(&CHAT.replace("hi", "long"), "evil");
    let mut served = 0;
    for _ in 0..3 {
        let mut clients = Vec::new();
        for _ in 0..40 {
            let mut client = gateway.client().await;
            client.send(&request).await;
            clients.push(client);
        }
        for client in &mut clients {
            let response = client.response().await;
            served += u64::from(response.status() == 200);
            assert!(matches!(response.status(), 200 | 429), "{}", response.text());
        }
    }
    assert!((1..=4).contains(&served), "{served} of 4,010 tokens each, with 6,000 a minute");
    eventually("what was used is charged", async || minute(&gateway).await > 3_000.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_excess_is_owed_and_named_and_what_was_not_used_is_given_back() {
    let large = |request: &ReceivedRequest| String::from_utf8_lossy(&request.body).contains("large");
    let engine = Engine::start(move |_, request| answer(10, if large(request) { 11_990 } else { 5 })).await;
    let gateway = gateway(&engine, "tokens_per_minute = \"6k\", tokens_per_day = \"20k\"").await;
    for number in 0..5 {
        let reserved = CHAT.replacen('{', r#"{"min_tokens":5000,"#, 1);
        assert_eq!(gateway.request(chat(&reserved, "evil")).await.status(), 200, "{number}");
        eventually("it was given back", async || minute(&gateway).await < 500.0).await;
    }
    assert_eq!(gateway.request(chat(&CHAT.replace("hi", "large"), "evil")).await.status(), 200);
    eventually("the excess is owed", async || minute(&gateway).await > 11_000.0).await;
    let refused = gateway.request(chat(CHAT, "evil")).await;
    let message = refused.is(429, "rate_limit_exceeded").text();
    assert!(message.contains("6000 prompt and output tokens per minute"), "{message}");
    assert!((30..=130).contains(&refused.head.retry_after()), "{}", refused.head.retry_after());
    let day = gateway.metric("sluice_key_tokens", &["key=\"evil\"", "window=\"day\""]).await;
    assert!((12_000.0..12_200.0).contains(&day), "{day}");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_a_day_are_refused_until_they_are_a_day_old() {
    let engine = Engine::start(|_, _| answer(10, 990)).await;
    let gateway = gateway(&engine, "tokens_per_day = \"2k\"").await;
    for request in 1..=2 {
        assert_eq!(gateway.request(chat(CHAT, "evil")).await.status(), 200);
        let day = async || gateway.metric("sluice_key_tokens", &["key=\"evil\"", "window=\"day\""]).await;
        eventually("it is settled", async || day().await == f64::from(request) * 1_000.0).await;
    }
    let refused = gateway.request(chat(CHAT, "evil")).await;
    let message = refused.is(429, "rate_limit_exceeded").text();
    assert!(message.contains("2000 prompt and output tokens within 24 hours"), "{message}");
    assert!(refused.head.retry_after() > 23 * 3_600, "{}", refused.head.retry_after());
    assert_eq!(gateway.request(chat(CHAT, "good")).await.status(), 200);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_charged_while_it_runs_and_when_its_client_leaves() {
    let engine = Engine::start(|_, _| {
        let words: String = (0..1_000).map(|_| event("word")).collect();
        vec![send(STREAM.to_owned() + &chunk(&words)), Step::Gate, send(chunk(&ending()) + LAST)]
    })
    .await;
    let gateway = gateway(&engine, "tokens_per_minute = \"600\"").await;
    let mut client = gateway.client().await;
    client.send(chat(STREAMED, "evil")).await.until("word").await;
    eventually("its tokens are charged as they come", async || minute(&gateway).await > 900.0).await;
    gateway.request(chat(STREAMED, "evil")).await.is(429, "rate_limit_exceeded");
    drop(client);
    gateway.settled().await;
    eventually("1,000 tokens came, and they are paid off", async || (500.0..1_100.0).contains(&minute(&gateway).await))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_that_no_engine_can_have_counted_is_not_believed() {
    let text = "word ".repeat(2_000);
    let engine = Engine::start(move |number, _| {
        let usage = [
            r#"{"prompt_tokens":1000000000000,"completion_tokens":2500}"#,
            r#"{"prompt_tokens":12,"completion_tokens":1000000000000000}"#,
            r#"{"prompt_tokens":12,"completion_tokens":0}"#,
            r#"{"prompt_tokens":-5,"completion_tokens":-2.5}"#,
        ][number % 4];
        let choice = format!(r#"{{"index":0,"message":{{"content":"{text}"}},"finish_reason":"stop"}}"#);
        vec![Step::Send(json(format!(r#"{{"choices":[{choice}],"usage":{usage}}}"#).as_bytes()))]
    })
    .await;
    let gateway = gateway(&engine, "tokens_per_day = \"1000k\"").await;
    for number in 1..=4 {
        assert_eq!(gateway.request(chat(CHAT, "evil")).await.status(), 200);
        let day = async || gateway.metric("sluice_key_tokens", &["key=\"evil\"", "window=\"day\""]).await;
        let near = f64::from(number) * 2_510.0;
        eventually("the text is charged", async || (near - 50.0..near + 50.0).contains(&day().await)).await;
    }
    let generated = gateway.metric("sluice_generation_tokens_total", &[]).await;
    assert!((9_900.0..10_100.0).contains(&generated), "{generated}");
    assert!(gateway.metric("sluice_prompt_tokens_total", &[]).await < 1_000.0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stored_conversation_counts_where_it_is_continued() {
    let engine = Engine::start(|_, _| {
        let usage = r#"{"input_tokens":7000,"output_tokens":1000,"total_tokens":8000}"#;
        let body = format!(r#"{{"id":"resp_1","object":"response","output":[],"usage":{usage}}}"#);
        vec![Step::Send(json(body.as_bytes()))]
    })
    .await;
    let gateway = gateway(&engine, "tokens = \"4k\"").await;
    let first = r#"{"model":"m","input":"x","max_output_tokens":100}"#;
    assert_eq!(gateway.request(ask("/v1/responses", first, "evil")).await.status(), 200);
    let next = first.replacen('{', r#"{"previous_response_id":"resp_1","#, 1);
    let next = ask("/v1/responses", &next, "evil");
    eventually("its conversation is longer than the key may use", async || {
        gateway.request(&next).await.status() == 400
    })
    .await;
    gateway.request(&next).await.is(400, "exceeds_key_limit");
    gateway.settled().await;
}
