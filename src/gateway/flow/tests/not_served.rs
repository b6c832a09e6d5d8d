//! Refusals by one engine of requests that other engines may serve.
//!
//! The tests check the conclusions about the engine, how far a request moves on, and the answer
//! that the client gets in the end.

use super::*;
use crate::flow::response_owners::ResponseOwner;
use crate::pool::Served;
use sluice_core::openai::Route;

const UNKNOWN: &str =
    r#"{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model","code":404}}"#;
const NO_PATH: &str = r#"{"detail":"Not Found"}"#;
const NO_RESPONSE: &str =
    r#"{"error":{"message":"Response with id 'resp_1' not found.","type":"invalid_request_error","code":404}}"#;
const TOO_LONG: &str = r#"{"error":{"message":"This model's maximum context length is 1 tokens. However, your prompt contains 90 input tokens.","code":400}}"#;

fn ports(test: &TestFlow) -> Vec<u16> {
    test.asked().iter().map(|(port, _)| *port).collect()
}

impl TestFlow {
    /// A request to another route or path.
    async fn request_to(&self, route: Route, path: &str, body: &'static str) -> (TestClient, Record) {
        let mut incoming = self.incoming(body);
        (incoming.route, incoming.path) = (route, path.to_owned());
        let mut client = TestClient::default();
        self.flow.run(incoming, &mut client).await;
        let record = self.records.0.lock().pop().unwrap();
        self.idle();
        (client, record)
    }

    /// Sets the models and the context limit that an engine reports.
    fn serves(&self, engine: usize, served: Served, max_model_len: Option<u64>) {
        let id = self.flow.routing_table().pools[0].backends[engine];
        self.flow.admission().set_served(id, served, max_model_len, Instant::now());
    }
}

/// A pool of `engines` engines that all answer in the same way.
fn of_many(engines: u16, script: &Script) -> TestFlow {
    let mut text = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n".to_owned();
    for number in 0..engines {
        let port = PORTS[0] + number;
        text += &format!("[[pool.backend]]\nname = \"e{number}\"\nurl = \"http://127.0.0.1:{port}\"\n");
    }
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    let config = Arc::new(Config::parse(&text, "test", &[], &around).unwrap().config);
    let test = TestFlow::of(config, &LearnedState::default(), vec![script.clone()], vec![script.clone()]);
    let others = (2..engines).map(|number| (PORTS[0] + number, vec![script.clone()].into()));
    test.flow.upstream().scripts.lock().extend(others);
    test
}

#[tokio::test(start_paused = true)]
async fn a_404_of_the_only_engine_that_has_a_response_says_nothing_of_its_routes() {
    let test = TestFlow::new(vec![Script::Json(404, NO_RESPONSE), Script::Json(200, "{}")], vec![good()]);
    let owner = ResponseOwner { key: None, pool: "p".into(), backend: "a".into(), tokens: 0 };
    test.flow.owners.remember("resp_1", owner, Instant::now());
    (0..2).for_each(|engine| test.serves(engine, Served::unreadable(), None));
    let continued = r#"{"model":"m","input":"hi","previous_response_id":"resp_1"}"#;
    let (client, record) = test.request_to(Route::Responses, "/v1/responses", continued).await;
    assert_eq!((client.body, record.outcome), (NO_RESPONSE.as_bytes().to_vec(), Outcome::Refused));
    test.request_to(Route::Responses, "/v1/responses", r#"{"model":"m","input":"hi"}"#).await;
    assert_eq!(ports(&test), [PORTS[0]; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_404_whose_body_is_not_read_to_its_end_reaches_the_client_and_says_nothing_of_the_engine() {
    for refusal in [Script::Coded(404, "coded"), Script::Late(404, 6_000, NO_PATH), Script::HeadOnly(404)] {
        let test = TestFlow::new(vec![refusal, good()], vec![good()]);
        (0..2).for_each(|engine| test.serves(engine, Served::unreadable(), None));
        let (client, record) = test.request(STREAM).await;
        assert_eq!((client.head.unwrap().status.as_u16(), record.retries.len()), (404, 0));
        assert_eq!(test.request(STREAM).await.1.outcome, Outcome::Completed);
        assert_eq!(ports(&test), [PORTS[0]; 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_path_that_one_engine_lacks_says_nothing_of_the_route_by_its_own_path() {
    for (sent, own) in [("/invocations", "/v1/chat/completions"), ("/invocations?x=1", "/v1/chat/completions?x=1")] {
        let test = TestFlow::new(vec![Script::Json(404, NO_PATH), good()], vec![good()]);
        (0..2).for_each(|engine| test.serves(engine, Served::unreadable(), None));
        let (_, record) = test.request_to(Route::ChatCompletions, sent, STREAM).await;
        assert_eq!((record.outcome, record.retries.as_slice()), (Outcome::Completed, &[RetryReason::NotServed][..]));
        test.request_to(Route::ChatCompletions, own, STREAM).await;
        assert_eq!(ports(&test), [PORTS[0], PORTS[1], PORTS[0]], "{sent}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_only_an_engine_that_is_away_would_take_is_shed_and_not_refused_for_good() {
    for (limit, status) in [(Some(100_000), 503), (Some(1), 400)] {
        let test = TestFlow::new(vec![Script::Json(400, TOO_LONG)], vec![good()]);
        test.serves(0, Served::list(["m"]), None);
        test.serves(1, Served::list(["m"]), limit);
        let away = test.flow.routing_table().pools[0].backends[1];
        test.flow.admission().mark_hung(away, Instant::now());
        let (client, record) = test.request(PLAIN).await;
        let head = client.head.unwrap();
        assert_eq!((head.status.as_u16(), ports(&test)), (status, vec![PORTS[0]]));
        if status == 503 {
            assert_eq!(record.outcome, Outcome::Shed(ShedReason::NoBackend));
            assert_eq!(head.headers["x-sluice-error"], "no_backend");
            assert!(head.headers.contains_key("retry-after"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_that_no_one_lists_gets_the_engine_s_answer_while_another_engine_is_away() {
    let test = TestFlow::new(vec![Script::Json(404, UNKNOWN)], vec![good()]);
    (0..2).for_each(|engine| test.serves(engine, Served::list(["other"]), None));
    let away = test.flow.routing_table().pools[0].backends[1];
    test.flow.admission().mark_hung(away, Instant::now());
    let (client, _) = test.request(PLAIN).await;
    assert_eq!((client.head.unwrap().status.as_u16(), client.body), (404, UNKNOWN.as_bytes().to_vec()));
}

#[tokio::test(start_paused = true)]
async fn a_name_that_no_list_has_moves_on_a_bounded_number_of_times_as_any_other() {
    let test = of_many(12, &Script::Json(404, UNKNOWN));
    (0..12).for_each(|engine| test.serves(engine, Served::list(["other"]), None));
    let (client, record) = test.request(PLAIN).await;
    assert_eq!((client.head.unwrap().status.as_u16(), client.body), (404, UNKNOWN.as_bytes().to_vec()));
    assert_eq!((test.asked().len(), record.retries.len()), (9, 8), "engines may be renamed one by one");

    let test = of_many(12, &Script::Json(404, UNKNOWN));
    test.set_attempts(3);
    (0..12).for_each(|engine| test.serves(engine, Served::unreadable(), None));
    assert_eq!(test.request(PLAIN).await.1.outcome, Outcome::Refused);
    assert_eq!(test.asked().len(), 9, "eight moves, and none of the attempts after them");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_passed_on_in_the_end_has_every_byte_of_an_event_that_came_in_two_parts() {
    const FAILED: &str = "data: {\"error\":{\"message\":\"kaput\",\"type\":\"x\",\"code\":500}}\n\ndata: [DO";
    let failing = || vec![Script::Stream(vec![(1, FAILED), (1, "NE]\n\n")], true)];
    let test = TestFlow::new(failing(), failing());
    let (client, _) = test.request(STREAM).await;
    assert_eq!(String::from_utf8(client.body).unwrap(), [FAILED, "NE]\n\n"].concat());
    assert!(client.finished);
}
