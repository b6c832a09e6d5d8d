//! Tests of the client against a scripted server (`testing`) on a loopback port.

use super::*;
use crate::testing::{MockEngine, MockResponse, completion_stream, request};

const LIMIT: Duration = Duration::from_secs(20);

async fn send(response: MockResponse) -> Result<Timing, RequestFailure> {
    let engine = MockEngine::start(move |_| response.clone()).await;
    let client = LoadClient::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    client.send(&request(), Instant::now()).await
}

#[tokio::test]
async fn a_stream_is_measured_event_by_event() {
    let pause = Duration::from_millis(30);
    let timing = send(MockResponse::stream(completion_stream(4), pause)).await.unwrap();
    assert_eq!(timing.gaps.len(), 3);
    assert_eq!(timing.output_tokens, Some(4));
    assert_eq!(timing.prompt_tokens, Some(3));
    // If the machine is loaded, the wait before each piece can only be longer.
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
    assert_eq!(send(MockResponse::stream(pieces, Duration::ZERO)).await, Err(RequestFailure::InStream(Some(500))));
}

#[tokio::test]
async fn a_last_line_without_its_end_counts() {
    let token = r#"data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}"#;
    let ends = async |last: &str| {
        send(MockResponse::stream(vec![format!("{token}\n\n"), last.to_owned()], Duration::ZERO)).await
    };
    assert_eq!(ends("data: [DONE]").await.map(|timing| timing.output_tokens), Ok(None));
    assert_eq!(ends("data: [DON").await, Err(RequestFailure::Truncated));
    let abort = r#"data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}"#;
    assert_eq!(ends(abort).await, Err(RequestFailure::Aborted));
}

#[tokio::test]
async fn a_stream_that_stops_early_is_cut_whether_the_connection_breaks_or_closes() {
    let mut pieces = completion_stream(5);
    pieces.truncate(3);
    let polite = MockResponse::stream(pieces.clone(), Duration::ZERO);
    assert_eq!(send(polite).await, Err(RequestFailure::Truncated));
    let broken = MockResponse { breaks: true, ..MockResponse::stream(pieces, Duration::ZERO) };
    assert_eq!(send(broken).await, Err(RequestFailure::Truncated));
}

#[tokio::test]
async fn a_response_is_complete_without_done_if_every_choice_finished_or_usage_came_last() {
    let chunk = |index: u32, finish: &str| {
        format!("data: {{\"choices\":[{{\"index\":{index},\"text\":\"a\",\"finish_reason\":{finish}}}]}}\n\n")
    };
    let ends = async |pieces: Vec<String>| {
        let timing = send(MockResponse::stream(pieces, Duration::ZERO)).await?;
        Ok((timing.gaps.len() + 1, timing.output_tokens))
    };
    assert_eq!(ends(vec![chunk(0, "null"), chunk(0, "\"length\"")]).await, Ok((2, None)));
    let usage = |choices: &str| {
        format!("data: {{\"choices\":{choices},\"usage\":{{\"prompt_tokens\":8,\"completion_tokens\":7}}}}\n\n")
    };
    for choices in ["[]", "null"] {
        assert_eq!(ends(vec![chunk(0, "null"), usage(choices)]).await, Ok((1, Some(7))), "{choices}");
    }
    let one_of_two = vec![chunk(0, "\"stop\""), chunk(1, "null")];
    assert_eq!(ends(one_of_two).await, Err(RequestFailure::Truncated));
    let usage_first = vec![usage("[]"), chunk(0, "null")];
    assert_eq!(ends(usage_first).await, Err(RequestFailure::Truncated));
    let in_the_last_chunk = chunk(0, "\"stop\"").replace("]}", "],\"usage\":{\"completion_tokens\":5}}");
    assert_eq!(ends(vec![chunk(0, "null"), in_the_last_chunk]).await, Ok((2, Some(5))));
    let no_count = usage("[]").replace('7', "null");
    assert_eq!(ends(vec![chunk(0, "null"), no_count]).await, Ok((1, None)));
}

#[tokio::test]
async fn errors_and_malformed_streams_have_their_own_reasons() {
    let shed = MockResponse { status: 503, ..MockResponse::stream(vec!["{\"error\":{}}".into()], Duration::ZERO) };
    assert_eq!(send(shed).await, Err(RequestFailure::Status(503)));
    let html = MockResponse::stream(vec!["data: <html>\n\n".into()], Duration::ZERO);
    assert_eq!(send(html).await, Err(RequestFailure::Malformed));
    let whole = r#"{"choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":1}}"#;
    let json = MockResponse::stream(vec![whole.into()], Duration::ZERO);
    assert_eq!(send(json).await, Err(RequestFailure::Malformed), "it is no stream");
    let empty = MockResponse::stream(vec!["data: [DONE]\n\n".into()], Duration::ZERO);
    assert_eq!(send(empty).await, Err(RequestFailure::Empty));
}

#[tokio::test]
async fn a_refused_connection_is_a_failure_of_its_own() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = LoadClient::new(&[url], Api::Completions, LIMIT).unwrap();
    assert_eq!(client.send(&request(), Instant::now()).await, Err(RequestFailure::Connect));
}

#[tokio::test]
async fn a_request_over_its_limit_is_a_timeout() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(4), Duration::from_secs(600))).await;
    let client = LoadClient::new(&[engine.url()], Api::Completions, Duration::from_millis(50)).unwrap();
    assert_eq!(client.send(&request(), Instant::now()).await, Err(RequestFailure::Timeout));
}

#[tokio::test]
async fn connections_are_reused_and_a_dead_one_is_replaced() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::ZERO)).await;
    let client = LoadClient::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    for _ in 0..3 {
        client.send(&request(), Instant::now()).await.unwrap();
    }
    assert_eq!(engine.connections(), 1);
    let engine = engine.restart().await;
    client.send(&request(), Instant::now()).await.unwrap();
    assert_eq!(engine.connections(), 1);
}

#[tokio::test]
async fn several_targets_are_taken_in_turn() {
    let start = || MockEngine::start(|_| MockResponse::stream(completion_stream(1), Duration::ZERO));
    let (first, second) = (start().await, start().await);
    let client = LoadClient::new(&[first.url(), second.url()], Api::Completions, LIMIT).unwrap();
    for _ in 0..6 {
        client.send(&request(), Instant::now()).await.unwrap();
    }
    assert_eq!((first.requests(), second.requests()), (3, 3));
}

#[test]
fn an_unusable_address_is_named_in_the_error() {
    let new = |url: &str| LoadClient::new(&[url.into()], Api::Chat, LIMIT).map(|_| ());
    assert_eq!(new("localhost:8000"), Err(BenchError::BadUrl("localhost:8000".into())));
    assert_eq!(new("ftp://a"), Err(BenchError::BadUrl("ftp://a".into())));
    assert!(new("http://127.0.0.1:8000/prefix/").is_ok());
    assert_eq!(LoadClient::new(&[], Api::Chat, LIMIT).map(|_| ()), Err(BenchError::NoTarget));
}

#[tokio::test]
async fn a_client_that_leaves_closes_its_connection_after_so_many_events() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(50), Duration::from_millis(2))).await;
    let client = LoadClient::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    let leaving = |after| LoadRequest { leave_after: Some(after), ..request() };
    assert_eq!(client.send(&leaving(3), Instant::now()).await, Err(RequestFailure::ClientLeft));
    client.send(&request(), Instant::now()).await.unwrap();
    assert_eq!(engine.connections(), 2, "a connection that was left is not used again");
    let slow = MockEngine::start(|_| MockResponse::stream(completion_stream(1), Duration::from_secs(600))).await;
    let client = LoadClient::new(&[slow.url()], Api::Completions, LIMIT).unwrap();
    assert_eq!(client.send(&leaving(0), Instant::now()).await, Err(RequestFailure::ClientLeft));
}

#[tokio::test]
async fn routing_headers_and_the_first_error_message_are_kept() {
    let headers = "x-sluice-pool: long\r\nx-sluice-backend: gpu1\r\n\
        server-timing: estimate;dur=0.1, queue;dur=12.5, connect;dur=0\r\n";
    let response =
        MockResponse { headers: headers.into(), ..MockResponse::stream(completion_stream(1), Duration::ZERO) };
    let shed =
        MockResponse { status: 503, pieces: vec![r#"{"error":{"message":"queue full"}}"#.into()], ..response.clone() };
    let engine = MockEngine::start(move |number| if number == 0 { response.clone() } else { shed.clone() }).await;
    let client = LoadClient::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    for failure in [None, Some(RequestFailure::Status(503)), Some(RequestFailure::Status(503))] {
        let mut routing = RoutingInfo::default();
        assert_eq!(client.send_with_routing(&request(), Instant::now(), &mut routing).await.err(), failure);
        assert_eq!((routing.pool.as_deref(), routing.backend.as_deref()), (Some("long"), Some("gpu1")));
        assert_eq!(routing.queue, Some(Duration::from_micros(12_500)));
    }
    assert_eq!(client.reasons(), BTreeMap::from([(503, "queue full".to_owned())]));
}

#[tokio::test]
async fn the_text_is_kept_when_the_request_asks_for_it() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(3), Duration::ZERO)).await;
    let client = LoadClient::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    let wanting = LoadRequest { keep_text: true, ..request() };
    assert_eq!(client.send(&wanting, Instant::now()).await.unwrap().text(), Some(" a a a"));
    assert_eq!(client.send(&request(), Instant::now()).await.unwrap().text(), None);
}

#[tokio::test]
async fn connections_may_be_opened_ahead_and_are_then_used() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(1), Duration::ZERO)).await;
    let client = LoadClient::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
    client.open(40).await;
    let deadline = Instant::now() + LIMIT;
    while engine.connections() < 40 {
        assert!(Instant::now() < deadline, "{} connections", engine.connections());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    client.send(&request(), Instant::now()).await.unwrap();
    assert_eq!(engine.connections(), 40);
}
