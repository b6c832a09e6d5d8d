//! Bodies pass unchanged in both directions.
//!
//! Response bytes reach the client as soon as the engine has sent them.

use crate::client::{CHAT, STREAMED, chat, post};
use crate::engine::{Engine, LAST, STREAM, Step, chunk, ending, event, gated_stream, json, send};
use crate::test_gateway::TestGateway;

fn body_of(length: usize) -> Vec<u8> {
    let (start, end) = (br#"{"model":"m","prompt":""#, br#""}"#);
    let mut body = start.to_vec();
    let mut number = 0_u64;
    while body.len() < length - end.len() {
        body.extend_from_slice(format!("{number} ").as_bytes());
        number += 1;
    }
    body.truncate(length - end.len());
    body.extend_from_slice(end);
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_around_64_kib_and_of_2_mb_arrive_intact_both_ways() {
    let engine = Engine::start(|_, seen| vec![Step::Send(json(&seen.body))]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    for length in [65_535, 65_536, 65_537, 2_000_000] {
        let body = body_of(length);
        let response = client.request(post("/v1/completions", "", &body)).await;
        assert_eq!(response.status(), 200);
        assert!(engine.seen().last().unwrap().body == body, "{length} bytes did not arrive as they were sent");
        assert!(response.body == body, "{length} bytes did not come back as they were sent");

        let mut chunked = b"POST /v1/completions HTTP/1.1\r\nhost: gate\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for piece in body.chunks(10_007) {
            chunked.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            chunked.extend_from_slice(piece);
            chunked.extend_from_slice(b"\r\n");
        }
        chunked.extend_from_slice(LAST.as_bytes());
        let response = client.request(chunked).await;
        let seen = engine.seen().pop().unwrap();
        assert!(seen.body == body && response.body == body, "{length} bytes in chunks");
        assert_eq!(seen.header("content-length"), Some(length.to_string().as_str()));
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_reaches_the_client_before_the_engine_has_sent_the_next() {
    let engine = Engine::always(gated_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    let so_far = client.send(chat(STREAMED)).await.until("\"one\"").await;
    assert!(!so_far.contains("\"two\""), "{so_far}");
    engine.open_gate();
    let so_far = client.until("\"two\"").await;
    assert!(!so_far.contains("[DONE]"), "{so_far}");
    engine.open_gate();
    let response = client.response().await;
    assert_eq!(response.text(), event("one") + &event("two") + &ending());
    assert!(response.whole);
    assert_eq!(engine.seen()[0].body, STREAMED.as_bytes());
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_an_incomplete_event_are_not_held_back() {
    let half = "data: {\"id\":\"c\",\"choi";
    let steps = vec![send(STREAM.to_owned() + &chunk(&event("one")) + &chunk(half)), Step::Gate, Step::Close];
    let engine = Engine::always(steps).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    client.send(chat(STREAMED)).await.until("\"choi").await;
    drop(client);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_cut_at_every_byte_comes_out_the_same() {
    let text = event("héllo") + ": comment\r\n\r\n" + &event("[DONE]") + &ending();
    let bytewise: String = text.bytes().map(|byte| format!("1\r\n{}\r\n", byte as char)).collect();
    // Each chunk has one byte, even within a character.
    let bytewise: Vec<u8> = bytewise.chars().map(|c| u8::try_from(u32::from(c)).unwrap()).collect();
    let steps = vec![send(STREAM), Step::Bytewise(bytewise), send(LAST)];
    let engine = Engine::always(steps).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    for _ in 0..2 {
        let response = client.request(chat(STREAMED)).await;
        assert!(response.whole);
        assert_eq!(response.text(), text);
    }
    gateway.recorded("completed", 2.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_that_the_client_did_not_request_is_injected_and_stripped() {
    let usage = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[],\
                 \"usage\":{\"prompt_tokens\":7,\"total_tokens\":9,\"completion_tokens\":2}}\n\n";
    let engine = Engine::start(move |_, seen| {
        let asked = String::from_utf8_lossy(&seen.body).contains(r#""include_usage":true"#);
        let end = if asked { ending().replace("data: [DONE]", &format!("{usage}data: [DONE]")) } else { ending() };
        vec![send(STREAM.to_owned() + &chunk(&event("one")) + &chunk(&event("two")) + &chunk(&end) + LAST)]
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.usage=final"]).await;
    let plain = gateway.request(chat(STREAMED)).await;
    assert!(String::from_utf8_lossy(&engine.seen()[0].body).contains("include_usage"));
    assert_eq!(plain.text(), event("one") + &event("two") + &ending());
    gateway.counts("sluice_generation_tokens_total", "", 2.0).await;
    let asking = STREAMED.replace("\"stream\"", "\"stream_options\":{\"include_usage\":true},\"stream\"");
    let asked = gateway.request(chat(&asking)).await;
    assert_eq!(engine.seen()[1].body, asking.as_bytes());
    assert!(asked.text().contains(usage), "{}", asked.text());
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_pass_both_ways_except_hop_by_hop_ones() {
    let body = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-engine: yes\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n\
                connection: x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\ncontent-length: 2\r\n\r\n{}";
    let engine = Engine::always(vec![send(body)]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let headers = "x-mine: 1\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\naccept-encoding: gzip\r\n\
                   authorization: Bearer theirs\r\nte: trailers\r\n";
    let response = gateway.request(post("/v1/chat/completions?beta=true", headers, CHAT.as_bytes())).await;
    let seen = engine.seen().pop().unwrap();
    assert!(seen.head.starts_with("POST /v1/chat/completions?beta=true HTTP/1.1\r\n"), "{}", seen.head);
    assert_eq!(seen.header("host"), Some(engine.address().to_string().as_str()));
    assert_eq!((seen.header("x-mine"), seen.header("authorization")), (Some("1"), Some("Bearer theirs")));
    for gone in ["x-hop", "te", "connection"] {
        assert_eq!(seen.header(gone), None, "{gone}: {}", seen.head);
    }
    assert_eq!(seen.header("accept-encoding"), Some("identity"));
    for once in ["host:", "content-length:", "accept-encoding:"] {
        let lines = seen.head.lines().filter(|line| line.to_ascii_lowercase().starts_with(once));
        assert_eq!(lines.count(), 1, "{once} {}", seen.head);
    }
    assert_eq!(response.head.header("x-engine"), Some("yes"));
    assert_eq!(response.head.headers.iter().filter(|(name, _)| name == "set-cookie").count(), 2);
    assert_eq!((response.head.header("x-private"), response.head.header("keep-alive")), (None, None));
    assert_eq!(response.text(), "{}");
    gateway.settled().await;
}
