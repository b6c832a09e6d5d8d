//! Requests that still run when `server.drain_timeout` has passed.
//!
//! Each test aborts everything 50 ms after the start, and checks the answer to the client: an error
//! event in a stream that has begun, otherwise a 503.

use super::*;
use sluice_core::openai::Route;

/// The beginning of a stream, with its first token.
const MESSAGE: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n\
                       event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\
                       \"delta\":{\"type\":\"text_delta\",\"text\":\"w\"}}\n\n";

/// Runs a request and aborts everything 50 ms later.
async fn run_and_abort(test: &TestFlow, route: Route, body: &'static str) -> (TestClient, Record) {
    let mut client = TestClient::default();
    let mut incoming = test.incoming(body);
    incoming.route = route;
    let aborting = async {
        sleep(Duration::from_millis(50)).await;
        test.flow.close();
        test.flow.abort_all();
    };
    let begun = Instant::now();
    tokio::join!(test.flow.run(incoming, &mut client), aborting);
    assert_eq!(begun.elapsed().as_millis(), 50, "at once");
    (client, test.records.0.lock().pop().unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_aborted_ends_with_an_error_event_in_the_shape_of_its_api() {
    for (route, first, shape) in [
        (Route::ChatCompletions, WORD, r#"data: {"error":{"#),
        (
            Route::Messages,
            MESSAGE,
            r#"data: {"error":{"message":"the gateway is shutting down","type":"api_error"},"type":"error"}"#,
        ),
    ] {
        let script = || vec![Script::Stream(vec![(1, first), (3_600_000, first)], true)];
        let test = TestFlow::new(script(), script());
        let (client, record) = run_and_abort(&test, route, STREAM).await;
        let text = String::from_utf8(client.body).unwrap();
        assert!(text.starts_with(first) && text.contains("\n\nevent: error\n") && text.contains(shape), "{text}");
        assert!(text.contains("shutting down") && !text.contains("[DONE]"), "{text}");
        assert!(client.aborted && !client.finished);
        assert_eq!((record.outcome, record.outcome.detail()), (Outcome::Timeout(Stage::Drain), "drain"));
        assert_eq!(test.flow.admission().view()[0].backends[0].state(), "ready", "not its fault");
        test.idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_aborted_before_its_first_token_is_shed_and_not_sent_again() {
    for script in [
        Script::NeverAnswers,
        Script::Stream(vec![(3_600_000, WORD)], true),
        Script::Stream(vec![(1, ROLE), (3_600_000, WORD)], true),
    ] {
        let test = TestFlow::new(vec![script], vec![good()]);
        let (client, record) = run_and_abort(&test, Route::ChatCompletions, STREAM).await;
        let head = client.head.unwrap();
        assert_eq!((head.status, head.headers["retry-after"].as_bytes()), (StatusCode::SERVICE_UNAVAILABLE, &b"1"[..]));
        assert_eq!(record.outcome, Outcome::Shed(ShedReason::ShuttingDown));
        assert_eq!(test.asked().len(), 1);
        test.idle();
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_a_lease_is_shed_when_everything_is_aborted() {
    let test = TestFlow::with(vec![good()], vec![good()], "slots = 1");
    let held: Vec<_> = (0..2).map(|_| hold(&test)).collect();
    let (client, record) = run_and_abort(&test, Route::ChatCompletions, STREAM).await;
    assert_eq!(client.head.unwrap().status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(record.outcome, Outcome::Shed(ShedReason::ShuttingDown));
    drop(held);
    test.idle();
}
