//! Answers after which another backend serves the request, and the answer that the client gets if
//! none can.
//!
//! The tests also check which answers count against an engine's health, and that an engine which
//! refuses the gateway's credentials is left out.

use super::*;
use crate::pool::Served;

const FAILED: &str = "data: {\"error\":{\"message\":\"kaput\",\"type\":\"InternalServerError\",\"code\":500}}\n\n";
const LIMITED: &str = "data: {\"error\":{\"message\":\"slow down\",\"type\":\"x\",\"code\":429}}\n\n";

fn event(text: &'static str) -> Vec<Script> {
    vec![Script::Stream(vec![(1, text), (1, DONE)], true)]
}

fn states(test: &TestFlow) -> Vec<&'static str> {
    test.flow.admission().view()[0].backends.iter().map(|backend| backend.state()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_429_and_an_error_event_before_any_token_are_tried_on_the_other_engine() {
    for (refusing, reason) in [
        (vec![Script::Json(429, "{}")], RetryReason::Status),
        (event(FAILED), RetryReason::InStream),
        (event(LIMITED), RetryReason::InStream),
    ] {
        let test = TestFlow::new(refusing, vec![good()]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!(String::from_utf8(client.body).unwrap(), [ROLE, WORD, LAST, DONE].concat());
        assert_eq!((record.outcome, record.retries.as_slice()), (Outcome::Completed, &[reason][..]));
    }
}

#[tokio::test(start_paused = true)]
async fn the_client_gets_the_last_engine_s_own_answer_when_no_other_engine_takes_the_request() {
    let limited = || vec![Script::Json(429, "{\"error\":{\"message\":\"slow down\",\"code\":429}}")];
    let test = TestFlow::new(limited(), limited());
    let (client, record) = test.request(STREAM).await;
    assert_eq!((client.head.unwrap().status.as_u16(), record.outcome), (429, Outcome::Refused));
    assert!(String::from_utf8(client.body).unwrap().contains("slow down"));

    let test = TestFlow::new(event(FAILED), event(FAILED));
    let (client, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::InStream));
    assert_eq!(client.head.unwrap().status, 200);
    assert_eq!(String::from_utf8(client.body).unwrap(), [FAILED, DONE].concat());
    assert!(client.finished);
}

#[tokio::test(start_paused = true)]
async fn a_429_never_ejects_and_a_failed_event_counts_once() {
    let limited = || vec![Script::Json(429, "{}")];
    let test = TestFlow::new(limited(), limited());
    for _ in 0..10 {
        test.request(STREAM).await;
    }
    assert_eq!(states(&test), ["ready", "ready"]);
    let test = TestFlow::new(event(FAILED), event(FAILED));
    for _ in 0..2 {
        test.request(STREAM).await;
    }
    assert_eq!(states(&test), ["ready", "ready"], "two failures each, three eject");
    test.request(STREAM).await;
    assert!(states(&test).contains(&"ejected"));
}

/// Like `new`, with an `api_key` for each backend.
fn with_own_keys(first: Vec<Script>, second: Vec<Script>) -> TestFlow {
    let mut config = Config::clone(&config_of("p", ""));
    for backend in &mut config.pools[0].backends {
        backend.api_key = Some(sluice_config::Secret::new("k".to_owned(), None));
    }
    TestFlow::of(Arc::new(config), &LearnedState::default(), first, second)
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_the_gateway_s_key_is_left_out_with_a_reason_and_no_request_fails() {
    let refusing = vec![Script::Json(401, "{\"error\":\"Unauthorized\"}")];
    let test = with_own_keys(refusing, vec![good()]);
    for _ in 0..3 {
        let (_, record) = test.request(STREAM).await;
        assert_eq!(record.outcome, Outcome::Completed);
    }
    assert_eq!(states(&test), ["ejected", "ready"]);
    let asked: Vec<u16> = test.asked().iter().map(|(port, _)| *port).collect();
    assert_eq!(asked, [7001, 7002, 7002, 7002], "asked once");
    let refused = test.flow.admission().view()[0].backends[0].refused.unwrap();
    assert!(refused.text(true).contains("status 401: `api_key` of the backend is not the engine's key"));
}

#[tokio::test(start_paused = true)]
async fn a_client_does_not_read_that_its_key_is_wrong_when_the_gateway_s_is() {
    let refusing = || vec![Script::Json(401, "{\"error\":\"Unauthorized\"}")];
    let test = with_own_keys(refusing(), refusing());
    let (client, record) = test.request(STREAM).await;
    assert_eq!(client.head.unwrap().status.as_u16(), 502);
    assert!(String::from_utf8(client.body).unwrap().contains("upstream_refused_gateway"));
    assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::Credentials));
}

#[tokio::test(start_paused = true)]
async fn a_401_to_the_client_s_own_key_is_the_client_s_and_says_nothing_of_the_engine() {
    let refusing = || vec![Script::Json(401, "{\"error\":\"Unauthorized\"}")];
    let test = TestFlow::new(refusing(), refusing());
    let (client, record) = test.request(STREAM).await;
    assert_eq!((client.head.unwrap().status.as_u16(), record.outcome), (401, Outcome::Refused));
    assert_eq!((test.asked().len(), states(&test)), (1, vec!["ready", "ready"]));
}

#[tokio::test(start_paused = true)]
async fn a_403_is_tried_elsewhere_and_ejects_nothing_because_it_may_be_the_content_of_the_request() {
    let forbidding = || vec![Script::Json(403, "{\"error\":\"blocked\"}")];
    let test = with_own_keys(forbidding(), vec![good()]);
    assert_eq!(test.request(STREAM).await.1.outcome, Outcome::Completed);
    let test = with_own_keys(forbidding(), forbidding());
    for _ in 0..5 {
        let (client, record) = test.request(STREAM).await;
        assert_eq!((client.head.unwrap().status.as_u16(), record.outcome), (403, Outcome::Refused));
    }
    assert_eq!(states(&test), ["ready", "ready"]);
}

const UNKNOWN: &str =
    r#"{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model","code":404}}"#;
const TOO_LONG: &str = r#"{"error":{"message":"This model's maximum context length is 1 tokens. However, your prompt contains 90 input tokens.","code":400}}"#;

#[tokio::test(start_paused = true)]
async fn a_refusal_that_another_engine_would_not_give_moves_the_request_to_it() {
    for refusing in [(404, UNKNOWN), (404, r#"{"detail":"Not Found"}"#), (400, TOO_LONG)] {
        let test = TestFlow::new(vec![Script::Json(refusing.0, refusing.1)], vec![good()]);
        let backends = test.flow.routing_table().pools[0].backends.clone();
        backends
            .iter()
            .for_each(|id| test.flow.admission().set_served(*id, Served::unreadable(), None, Instant::now()));
        for number in 0..3 {
            let (client, record) = test.request(STREAM).await;
            assert_eq!(String::from_utf8(client.body).unwrap(), [ROLE, WORD, LAST, DONE].concat(), "{refusing:?}");
            let moved = if number == 0 { &[RetryReason::NotServed][..] } else { &[] };
            assert_eq!((record.outcome, record.retries.as_slice()), (Outcome::Completed, moved), "{refusing:?}");
        }
        assert_eq!(states(&test), ["ready", "ready"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_every_engine_gives_reaches_the_client_as_the_engine_sent_it() {
    for (status, body) in [(404, UNKNOWN), (404, r#"{"detail":"Not Found"}"#), (400, TOO_LONG)] {
        let refusing = || vec![Script::Json(status, body)];
        let test = TestFlow::new(refusing(), refusing());
        for _ in 0..5 {
            let (client, record) = test.request(STREAM).await;
            assert_eq!((client.head.unwrap().status.as_u16(), client.body), (status, body.as_bytes().to_vec()));
            assert_eq!(record.outcome, Outcome::Refused);
        }
        assert_eq!(states(&test), ["ready", "ready"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_concerns_the_client_is_not_repeated() {
    let body = r#"{"error":{"message":"temperature must be at most 2","code":400}}"#;
    let test = TestFlow::new(vec![Script::Json(400, body)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!((client.head.unwrap().status.as_u16(), record.retries.len()), (400, 0));
    assert_eq!(client.body, body.as_bytes());
}
