//! The priority of a request: clamped to the client's range, used in the queue, and sent only to
//! engines that schedule by it.
//!
//! The bodies that the engines receive are compared byte by byte: without a priority they must be
//! the client's.

use super::*;
use sluice_core::openai::Route;

/// A flow with two engines; `by_priority` says which of them schedule by priority.
fn flow(first: Vec<Script>, by_priority: [bool; 2]) -> TestFlow {
    let test = TestFlow::with(first, vec![good(), good(), good(), good()], "");
    let backends = test.flow.routing_table().pools[0].backends.clone();
    for (backend, by_priority) in backends.iter().zip(by_priority) {
        test.flow.admission().set_by_priority(*backend, by_priority);
    }
    test
}

/// Sends a body with the priority of the header. Returns the bodies that engines got, by port.
async fn send(test: &TestFlow, body: &'static str, header: Option<i64>) -> Vec<(u16, String)> {
    let incoming = Box::new(IncomingRequest { priority: header, ..*test.incoming(body) });
    test.flow.run(incoming, &mut TestClient::default()).await;
    let calls = test.flow.upstream().calls.lock().split_off(0);
    calls.into_iter().map(|(port, _, body)| (port, String::from_utf8(body.to_vec()).unwrap())).collect()
}

const ASKS: &str = r#"{"model":"m","priority":-7,"messages":[]}"#;
const LATER: &str = r#"{"model":"m","messages":[],"priority":"7"}"#;
const BARE: &str = r#"{"model":"m","messages":[]}"#;

#[tokio::test(start_paused = true)]
async fn an_engine_that_does_not_schedule_by_priority_gets_none() {
    let test = flow(vec![Script::Json(200, "{}"), Script::Json(200, "{}"), Script::Json(200, "{}")], [false, true]);
    for (body, header) in [(ASKS, None), (LATER, Some(3)), (BARE, Some(-3))] {
        assert_eq!(send(&test, body, header).await, [(PORTS[0], BARE.to_owned())]);
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_schedules_by_priority_gets_the_clamped_number() {
    let answers = || (0..5).map(|_| Script::Json(200, "{}")).collect();
    let test = flow(answers(), [true, false]);
    let sent = |priority: &str| [(PORTS[0], BARE.replacen('{', &format!("{{\"priority\":{priority},"), 1))];
    // Without keys no client can go before others, but each may step behind others. The header
    // wins.
    assert_eq!(send(&test, ASKS, None).await, sent("0"));
    assert_eq!(send(&test, LATER, None).await, sent("7"));
    assert_eq!(send(&test, ASKS, Some(i64::MAX)).await, sent(&i32::MAX.to_string()));
    assert_eq!(send(&test, LATER, Some(i64::MIN)).await, sent("0"));
    assert_eq!(send(&test, BARE, None).await, [(PORTS[0], BARE.to_owned())], "0 is what engines assume");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_moves_on_has_the_priority_of_no_engine_before() {
    for by_priority in [[true, false], [false, true]] {
        let test = flow(vec![Script::NoConnection], by_priority);
        let with = BARE.replacen('{', "{\"priority\":7,", 1);
        let body = |by_priority: bool| if by_priority { with.clone() } else { BARE.to_owned() };
        let sent = send(&test, LATER, None).await;
        let bodies: Vec<String> = sent.into_iter().map(|(_, body)| body).collect();
        assert_eq!(bodies, by_priority.map(body), "{by_priority:?}");
    }
}

#[test]
fn messages_get_the_header_because_vllm_reads_only_that() {
    let test_body = Bytes::from_static(br#"{"model":"m","messages":[]}"#);
    for (route, in_body) in [(Route::Messages, false), (Route::Responses, true), (Route::Tokenize, false)] {
        let view = sluice_core::openai::request::read(route, &test_body).unwrap();
        let body = sluice_core::openai::EditedBody::new(&test_body, &view.edits, Default::default());
        let mut request = UpstreamRequest { body, ..UpstreamRequest::default() };
        let priority = crate::flow::priority::RequestPriority::for_test(4);
        priority.give(&mut request, route, true);
        let header = request.headers.get(PRIORITY).and_then(|value| value.to_str().ok());
        assert_eq!(header, (route == Route::Messages).then_some("4"));
        assert_eq!(request.body.to_bytes().starts_with(b"{\"priority\":4,"), in_body, "{route}");
        priority.give(&mut request, route, false);
        assert_eq!((request.headers.get(PRIORITY), request.body.to_bytes()), (None, test_body.clone()));
    }
}
