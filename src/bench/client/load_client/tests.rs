//! Tests of the client against a scripted server.

use super::*;
use crate::client::mock::{Answer, MockEngine, completion_stream, question};

const LIMIT: Duration = Duration::from_secs(20);

async fn ask(answer: Answer) -> Result<Timing, Failure> {
    let engine = MockEngine::start(move |_| answer.clone()).await;
    let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    client.ask(&question(), Instant::now()).await
}

#[tokio::test]
async fn a_stream_is_measured_event_by_event() {
    let pause = Duration::from_millis(30);
    let timing = ask(Answer::stream(completion_stream(4), pause)).await.unwrap();
    assert_eq!(timing.gaps.len(), 3);
    assert_eq!(timing.output_tokens, 4);
    assert_eq!(timing.prompt_tokens, Some(3));
    // The mock waits before each piece; a loaded machine can only make that longer.
    assert!(timing.ttft >= pause);
    assert!(timing.gaps.iter().all(|gap| *gap >= pause / 2), "{:?}", timing.gaps);
    assert_eq!(timing.e2el, timing.ttft + timing.gaps.iter().sum::<Duration>());
}

#[tokio::test]
async fn an_error_in_the_stream_is_a_failure_although_the_status_is_200() {
    let mut pieces = completion_stream(2);
    pieces.truncate(2);
    pieces.push("data: {\"error\":{\"message\":\"engine died\",\"code\":500}}\n\n".into());
    pieces.push("data: [DONE]\n\n".into());
    assert_eq!(ask(Answer::stream(pieces, Duration::ZERO)).await, Err(Failure::InStream(Some(500))));
}

#[tokio::test]
async fn a_last_line_without_its_end_counts() {
    let token = r#"data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}"#;
    let ends =
        async |last: &str| ask(Answer::stream(vec![format!("{token}\n\n"), last.to_owned()], Duration::ZERO)).await;
    assert_eq!(ends("data: [DONE]").await.map(|timing| timing.output_tokens), Ok(1));
    assert_eq!(ends("data: [DON").await, Err(Failure::Cut));
    let abort = r#"data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}"#;
    assert_eq!(ends(abort).await, Err(Failure::Aborted));
}

#[tokio::test]
async fn a_stream_that_stops_early_is_cut_whether_the_connection_breaks_or_ends_politely() {
    let mut pieces = completion_stream(5);
    pieces.truncate(3);
    let polite = Answer::stream(pieces.clone(), Duration::ZERO);
    assert_eq!(ask(polite).await, Err(Failure::Cut));
    let broken = Answer { breaks: true, ..Answer::stream(pieces, Duration::ZERO) };
    assert_eq!(ask(broken).await, Err(Failure::Cut));
}

#[tokio::test]
async fn refusals_and_nonsense_have_their_own_reasons() {
    let shed = Answer { status: 503, ..Answer::stream(vec!["{\"error\":{}}".into()], Duration::ZERO) };
    assert_eq!(ask(shed).await, Err(Failure::Status(503)));
    let html = Answer::stream(vec!["data: <html>\n\n".into()], Duration::ZERO);
    assert_eq!(ask(html).await, Err(Failure::Malformed));
    let empty = Answer::stream(vec!["data: [DONE]\n\n".into()], Duration::ZERO);
    assert_eq!(ask(empty).await, Err(Failure::Empty));
}

#[tokio::test]
async fn a_refused_connection_is_a_failure_of_its_own() {
    // Bound and dropped, so that the port is free and nobody listens.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = Client::new(&[url], Api::Completions, LIMIT).unwrap();
    assert_eq!(client.ask(&question(), Instant::now()).await, Err(Failure::Connect));
}

#[tokio::test]
async fn a_request_over_its_limit_is_a_timeout() {
    let engine = MockEngine::start(|_| Answer::stream(completion_stream(4), Duration::from_secs(600))).await;
    let client = Client::new(&[engine.url()], Api::Completions, Duration::from_millis(50)).unwrap();
    assert_eq!(client.ask(&question(), Instant::now()).await, Err(Failure::Timeout));
}

#[tokio::test]
async fn connections_are_reused_and_a_dead_one_is_replaced() {
    let engine = MockEngine::start(|_| Answer::stream(completion_stream(2), Duration::ZERO)).await;
    let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    for _ in 0..3 {
        client.ask(&question(), Instant::now()).await.unwrap();
    }
    assert_eq!(engine.connections(), 1);
    let engine = engine.restart().await;
    client.ask(&question(), Instant::now()).await.unwrap();
    assert_eq!(engine.connections(), 1);
}

#[tokio::test]
async fn several_targets_are_taken_in_turn() {
    let start = || MockEngine::start(|_| Answer::stream(completion_stream(1), Duration::ZERO));
    let (first, second) = (start().await, start().await);
    let client = Client::new(&[first.url(), second.url()], Api::Completions, LIMIT).unwrap();
    for _ in 0..6 {
        client.ask(&question(), Instant::now()).await.unwrap();
    }
    assert_eq!((first.requests(), second.requests()), (3, 3));
}

#[test]
fn an_address_that_cannot_be_used_is_named() {
    let new = |url: &str| Client::new(&[url.into()], Api::Chat, LIMIT).map(|_| ());
    assert_eq!(new("localhost:8000"), Err(BenchError::BadUrl("localhost:8000".into())));
    assert_eq!(new("https://a"), Err(BenchError::BadUrl("https://a".into())));
    assert!(new("http://127.0.0.1:8000/prefix/").is_ok());
    assert_eq!(Client::new(&[], Api::Chat, LIMIT).map(|_| ()), Err(BenchError::NoTarget));
}

#[tokio::test]
async fn a_client_that_leaves_closes_its_connection_after_so_many_events() {
    let engine = MockEngine::start(|_| Answer::stream(completion_stream(50), Duration::from_millis(2))).await;
    let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    let leaving = |after| Question { leave_after: Some(after), ..question() };
    assert_eq!(client.ask(&leaving(3), Instant::now()).await, Err(Failure::Left));
    client.ask(&question(), Instant::now()).await.unwrap();
    assert_eq!(engine.connections(), 2, "a connection that was left is not used again");
    // Waiting for a first token that does not come.
    let slow = MockEngine::start(|_| Answer::stream(completion_stream(1), Duration::from_secs(600))).await;
    let client = Client::new(&[slow.url()], Api::Completions, LIMIT).unwrap();
    assert_eq!(client.ask(&leaving(0), Instant::now()).await, Err(Failure::Left));
}

#[tokio::test]
async fn what_the_gateway_says_of_itself_is_kept_and_the_first_refusal_is_quoted() {
    let headers = "x-sluice-pool: long\r\nx-sluice-backend: gpu1\r\n\
        server-timing: estimate;dur=0.1, queue;dur=12.5, connect;dur=0\r\n";
    let answer = Answer { headers: headers.into(), ..Answer::stream(completion_stream(1), Duration::ZERO) };
    let shed = Answer { status: 503, pieces: vec![r#"{"error":{"message":"queue full"}}"#.into()], ..answer.clone() };
    let engine = MockEngine::start(move |number| if number == 0 { answer.clone() } else { shed.clone() }).await;
    let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    for failure in [None, Some(Failure::Status(503)), Some(Failure::Status(503))] {
        let mut place = Place::default();
        assert_eq!(client.ask_placed(&question(), Instant::now(), &mut place).await.err(), failure);
        assert_eq!((place.pool.as_deref(), place.backend.as_deref()), (Some("long"), Some("gpu1")));
        assert_eq!(place.queue, Some(Duration::from_micros(12_500)));
    }
    assert_eq!(client.reasons(), BTreeMap::from([(503, "queue full".to_owned())]));
}

#[tokio::test]
async fn the_text_of_an_answer_is_kept_when_the_question_wants_it() {
    let engine = MockEngine::start(|_| Answer::stream(completion_stream(3), Duration::ZERO)).await;
    let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    let wanting = Question { keep_text: true, ..question() };
    assert_eq!(client.ask(&wanting, Instant::now()).await.unwrap().text.as_deref(), Some(" a a a"));
    assert_eq!(client.ask(&question(), Instant::now()).await.unwrap().text, None);
}

#[tokio::test]
async fn connections_may_be_opened_ahead_and_are_then_used() {
    let engine = MockEngine::start(|_| Answer::stream(completion_stream(1), Duration::ZERO)).await;
    let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    client.open(40).await;
    let deadline = Instant::now() + LIMIT;
    while engine.connections() < 40 {
        assert!(Instant::now() < deadline, "{} connections", engine.connections());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    client.ask(&question(), Instant::now()).await.unwrap();
    assert_eq!(engine.connections(), 40);
}
