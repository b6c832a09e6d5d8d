//! Answers after which another backend serves the request, and the answer that the client gets when none can.

use super::*;

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
