//! Faults of a backend before the response begins.
//!
//! The tests check how often and under which ids the request is sent, the answer that the client
//! gets, and whether the fault counts against the backend.

use super::*;

const OVERLOADED: &str = "data: {\"error\":{\"message\":\"the engine is full\",\"type\":\"x\",\"code\":503}}\n\n";

#[tokio::test(start_paused = true)]
async fn a_backend_that_stops_reading_is_recorded_as_such_and_not_as_a_silent_one() {
    for (script, stage) in [(Script::StopsReading, Stage::Send), (Script::NeverAnswers, Stage::FirstByte)] {
        let test = TestFlow::new(vec![script.clone()], vec![good()]);
        let (_, record) = test.request(STREAM).await;
        assert_eq!((record.outcome, record.retries.as_slice()), (Outcome::Completed, &[RetryReason::Timeout][..]));

        let test = TestFlow::new(vec![script.clone()], vec![script]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!(client.head.unwrap().status, StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(record.outcome, Outcome::Timeout(stage));
    }
    assert_eq!(Outcome::Timeout(Stage::Send).detail(), "send");
}

#[tokio::test(start_paused = true)]
async fn deliveries_are_attempts_and_each_has_an_id_of_its_own() {
    for (attempts, asked) in [
        (1, vec![(7001, "req")]),
        (2, vec![(7001, "req"), (7001, "req-r2")]),
        (3, vec![(7001, "req"), (7001, "req-r2"), (7002, "req-r3")]),
        (8, vec![(7001, "req"), (7001, "req-r2"), (7002, "req-r3"), (7002, "req-r4")]),
    ] {
        let stale = || vec![Script::Stale(503, "{}")];
        let test = TestFlow::new(stale(), stale());
        test.set_attempts(attempts);
        let (client, record) = test.request(STREAM).await;
        let delivered = test.asked();
        let delivered: Vec<(u16, &str)> = delivered.iter().map(|(port, id)| (*port, id.as_str())).collect();
        assert_eq!(delivered, asked, "attempts = {attempts}");
        assert_eq!(record.retries.len() + 1, asked.len());
        let status = if attempts % 2 == 0 { 503 } else { 502 };
        assert_eq!(client.head.unwrap().status, status, "attempts = {attempts}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stale_connection_to_an_engine_that_is_gone_leaves_an_attempt_for_another_engine() {
    let test = TestFlow::new(vec![Script::StaleAndGone], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::Completed, "{client:?}", client = client.body);
    assert_eq!(record.retries.as_slice(), [RetryReason::StaleConnection, RetryReason::Connect]);
    assert_eq!(test.asked().len(), 3);
    let both = TestFlow::new(vec![Script::StaleAndGone], vec![Script::StaleAndGone]);
    let (_, record) = both.request(STREAM).await;
    assert!(matches!(record.outcome, Outcome::UpstreamError(_)), "{:?}", record.outcome);
    assert_eq!(both.asked().len(), 3, "two deliveries, and one connection that was refused");
}

#[tokio::test(start_paused = true)]
async fn a_stale_connection_is_no_fault_even_where_no_attempt_is_left() {
    let test = TestFlow::new(vec![Script::Stale(200, "{}")], vec![good()]);
    test.set_attempts(1);
    for _ in 0..10 {
        let (client, record) = test.request(STREAM).await;
        assert_eq!(client.head.unwrap().status, StatusCode::BAD_GATEWAY);
        assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::Broken));
    }
    assert_eq!(test.flow.admission().view()[0].backends[0].state(), "ready");
}

#[tokio::test(start_paused = true)]
async fn a_4xx_whose_body_breaks_off_is_still_the_clients() {
    let test = TestFlow::new(vec![Script::HeadOnly(413)], vec![good()]);
    for _ in 0..10 {
        let (client, record) = test.request(PLAIN).await;
        let head = client.head.unwrap();
        assert_eq!(
            (head.status, head.headers["content-length"].as_bytes()),
            (StatusCode::PAYLOAD_TOO_LARGE, &b"0"[..])
        );
        assert!(client.finished && client.body.is_empty());
        assert_eq!((record.outcome, record.retries.len()), (Outcome::Refused, 0));
    }
    assert_eq!(test.flow.admission().view()[0].backends[0].state(), "ready");
}

#[tokio::test(start_paused = true)]
async fn a_503_inside_a_stream_reaches_the_client_as_one_where_no_backend_takes_over() {
    let full = || vec![Script::Stream(vec![(0, OVERLOADED), (0, DONE)], true)];
    let test = TestFlow::new(full(), full());
    for _ in 0..5 {
        let (client, record) = test.request(STREAM).await;
        let head = client.head.unwrap();
        assert_eq!(head.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(head.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
        let body: serde_json::Value = serde_json::from_slice(&client.body).unwrap();
        assert_eq!(body["error"]["message"], "the engine is full");
        assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::InStream));
        assert_eq!(record.retries.as_slice(), [RetryReason::InStream]);
    }
    let states: Vec<_> = test.flow.admission().view()[0].backends.iter().map(|b| b.state()).collect();
    assert_eq!(states, ["ready", "ready"], "its own admission control is no fault");
}
