//! Requests in the arms of experiments.
//!
//! An arm may rename the model upstream, and may have a pool and certain backends. A request that
//! the arm cannot serve is served as if there were no experiment, and recorded as fallen back.

use super::*;
use crate::experiment::Phase;
use crate::pool::{Bound, Cordon, TrialBound};
use sluice_config::Config;

const TWO_BACKENDS: &str = "[[model]]\nname = \"m\"\n[[model]]\nname = \"lora\"\n[[pool]]\nname = \"p\"\n\
     [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:7001\"\nweight = 1000.0\n\
     [[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:7002\"\n";

/// A gateway with an experiment whose second arm gets all requests.
fn promoted(target: &str, first: Vec<Script>, second: Vec<Script>) -> (TestFlow, LearnedState) {
    let text = format!(
        "{TWO_BACKENDS}[[experiment]]\nname = \"x\"\nmodels = [\"m\"]\n[[experiment.arm]]\nname = \"base\"\nweight = 50\n\
         [[experiment.arm]]\nname = \"new\"\nweight = 50\n{target}\n"
    );
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    let config = Arc::new(Config::parse(&text, "test", &[], &around).unwrap_or_else(|error| panic!("{error}")).config);
    let learned = LearnedState::default();
    let test = TestFlow::of(config, &learned, first, second);
    learned.experiments.find("x").unwrap().state.order(Phase::Promoted(1));
    (test, learned)
}

fn body_sent(test: &TestFlow, call: usize) -> String {
    let body = test.flow.upstream().calls.lock()[call].2.clone();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_model_of_an_arm_goes_upstream_and_nothing_else_changes() {
    let (test, _) = promoted("model = \"lora\"", vec![good()], vec![]);
    let (client, record) = test.request(PLAIN).await;
    assert_eq!(body_sent(&test, 0), PLAIN.replace("\"m\"", "\"lora\""));
    assert_eq!(client.head.unwrap().headers["x-sluice-arm"], "x/new");
    assert_eq!((record.model.as_deref(), record.arm.as_deref()), (Some("m"), Some("x/new")));
    assert_eq!(record.fell_back_from(), None);
}

#[tokio::test(start_paused = true)]
async fn an_arm_uses_its_own_backends_only() {
    let (test, _) = promoted("pool = \"p\"\nbackends = [\"b\"]", vec![], vec![good()]);
    for _ in 0..3 {
        let (_, record) = test.request(PLAIN).await;
        assert_eq!((record.backend.as_deref(), record.arm.as_deref()), (Some("b"), Some("x/new")));
    }
}

#[tokio::test(start_paused = true)]
async fn an_arm_whose_backend_fails_or_is_gone_is_served_by_the_others_and_recorded_as_such() {
    let gone = || Script::NoConnection;
    let (test, _) = promoted("pool = \"p\"\nbackends = [\"b\"]\nmodel = \"lora\"", vec![good()], vec![gone()]);
    for number in 0..4 {
        let (client, record) = test.request(PLAIN).await;
        let head = client.head.unwrap();
        assert_eq!((head.status, record.outcome), (StatusCode::OK, Outcome::Completed), "request {number}");
        assert!(!head.headers.contains_key("x-sluice-arm"));
        assert_eq!((record.backend.as_deref(), record.arm.as_deref()), (Some("a"), None));
        assert_eq!((record.home.as_deref(), record.fell_back_from()), (Some("p"), Some("x/new")));
        let last = test.asked().len() - 1;
        assert_eq!(body_sent(&test, last), PLAIN, "the client's own model");
    }
    // The fourth request did not try the backend, because the first three had ejected it.
    assert_eq!(test.asked().iter().filter(|(port, _)| *port == 7002).count(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_an_arm_whose_engine_begins_to_drain_is_served_by_the_others_at_once() {
    let (test, _) = promoted("pool = \"p\"\nbackends = [\"b\"]", vec![good()], vec![]);
    let backend = test.flow.routing_table().pools[0].backends[1];
    test.flow.admission.set_bounds([(backend, Bound::Trial(Some(TrialBound { slots: 0, tokens: 0 })))]);
    let mut client = TestClient::default();
    let drain = async {
        sleep(Duration::from_millis(20)).await;
        assert_eq!(test.flow.admission.load(), (0, 1));
        test.flow.admission.set_cordon(backend, Cordon::Draining);
    };
    let begun = Instant::now();
    tokio::join!(test.flow.run(test.incoming(PLAIN), &mut client), drain);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!((record.backend.as_deref(), record.fell_back_from()), (Some("a"), Some("x/new")));
    assert!(client.finished && begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_arm_whose_model_the_engine_does_not_know_is_served_with_the_model_of_the_client() {
    let unknown = Script::Json(404, "{\"error\":{\"message\":\"no such model\"}}");
    let (test, _) = promoted("model = \"lora\"", vec![unknown, good()], vec![]);
    let (client, record) = test.request(PLAIN).await;
    assert_eq!((client.head.unwrap().status, record.outcome), (StatusCode::OK, Outcome::Completed));
    assert_eq!(record.fell_back_from(), Some("x/new"));
    assert_eq!(body_sent(&test, 1), PLAIN);
    let ports: Vec<u16> = test.asked().iter().map(|(port, _)| *port).collect();
    assert_eq!(ports, [7001, 7001], "the backend itself has not failed");
}

#[tokio::test(start_paused = true)]
async fn what_the_engine_of_an_arm_does_not_know_is_served_by_another_one_that_does() {
    let unknown = Script::Json(404, "{\"error\":{\"message\":\"no such model\"}}");
    let (test, _) = promoted("pool = \"p\"\nbackends = [\"b\"]", vec![good()], vec![unknown]);
    let (client, record) = test.request(PLAIN).await;
    assert_eq!((client.head.unwrap().status, record.outcome), (StatusCode::OK, Outcome::Completed));
    assert_eq!((record.backend.as_deref(), record.fell_back_from()), (Some("a"), Some("x/new")));
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_finish_when_their_experiment_is_stopped_or_promoted() {
    let slow = || Script::Stream(vec![(0, ROLE), (50, WORD), (50, LAST), (0, DONE)], true);
    let (test, learned) = promoted("model = \"lora\"", vec![slow()], vec![]);
    let mut client = TestClient::default();
    let stop = async {
        sleep(Duration::from_millis(20)).await;
        learned.experiments.find("x").unwrap().state.order(Phase::Stopped);
    };
    tokio::join!(test.flow.run(test.incoming(STREAM), &mut client), stop);
    assert!(client.finished && !client.aborted);
    assert_eq!(test.records.0.lock().pop().unwrap().arm.as_deref(), Some("x/new"));
    let (_, record) = test.request(STREAM).await;
    assert_eq!((record.outcome, record.arm), (Outcome::Completed, None));
}
