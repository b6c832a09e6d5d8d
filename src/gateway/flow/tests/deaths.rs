//! Requests whose engines die: a body is delivered once more, and refused after a second death.
//!
//! A dying engine closes the connection before the head of a response. Other failures, such as an
//! invalid response, are no deaths.

use super::*;
use crate::flow::suspects::REFUSED_FOR;

const DYING: Script = Script::CloseBeforeHead;

fn code(client: &TestClient) -> &str {
    client.head.as_ref().unwrap().headers.get("x-sluice-error").map_or("", |code| code.to_str().unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_body_that_two_engines_die_of_is_refused_for_a_while_and_other_bodies_are_not() {
    let test = TestFlow::new(vec![DYING, good()], vec![DYING, good()]);
    test.set_attempts(8);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(client.head.as_ref().unwrap().status, StatusCode::BAD_GATEWAY);
    assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::Broken));
    assert_eq!(test.asked().len(), 2, "once more at most, however many attempts there are");
    for _ in 0..3 {
        let (client, record) = test.request(STREAM).await;
        assert_eq!(client.head.as_ref().unwrap().status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(
            (code(&client), record.outcome, record.detail()),
            ("suspected_crash", Outcome::Refused, "suspected_crash")
        );
    }
    assert_eq!(test.asked().len(), 2, "no engine gets it");
    let (client, _) = test.request(PLAIN).await;
    assert_eq!(client.head.unwrap().status, StatusCode::OK);
    tokio::time::sleep(REFUSED_FOR).await;
    let (client, _) = test.request(STREAM).await;
    assert_eq!(client.head.unwrap().status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn of_two_bodies_on_an_engine_that_dies_only_the_one_that_is_there_again_is_refused() {
    let test = TestFlow::new(vec![DYING, DYING, good()], vec![good(), DYING, good()]);
    let mut clients = [TestClient::default(), TestClient::default()];
    let [one, other] = &mut clients;
    tokio::join!(test.flow.run(test.incoming(STREAM), one), test.flow.run(test.incoming(PLAIN), other));
    test.records.0.lock().clear();
    let statuses = clients.each_ref().map(|client| client.head.as_ref().unwrap().status.as_u16());
    assert!(statuses == [200, 502] || statuses == [502, 200], "{statuses:?}");
    for (body, status) in [STREAM, PLAIN].into_iter().zip(statuses) {
        let (client, _) = test.request(body).await;
        let again = client.head.as_ref().unwrap().status;
        assert_eq!(again, if status == 200 { 200 } else { 422 }, "{body}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_answers_garbage_or_ends_a_stream_early_has_not_died() {
    let unfinished = || vec![Script::Stream(vec![(1, WORD)], true)];
    let test = TestFlow::new(unfinished(), unfinished());
    for _ in 0..5 {
        let (client, _) = test.request(STREAM).await;
        assert_eq!(client.head.unwrap().status, StatusCode::OK);
    }
    assert_eq!(test.asked().len(), 5);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_serves_other_clients_is_not_ejected_for_the_failures_of_one() {
    let failing = || vec![Script::Json(500, "{}")];
    let mut test = TestFlow::new([vec![good()], failing()].concat(), vec![good()]);
    test.origin = Origin::of_key("good");
    test.request(STREAM).await;
    test.origin = Origin::of_key("evil");
    let state = |test: &TestFlow| test.flow.admission().view()[0].backends[0].state().to_owned();
    for _ in 0..50 {
        test.request(PLAIN).await;
    }
    assert_eq!(state(&test), "ready");
    test.origin = Origin::of_key("another");
    test.request(PLAIN).await;
    assert_eq!(state(&test), "ejected", "most of its clients fail");
}
