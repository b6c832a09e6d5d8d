//! Streams before and after their first token.
//!
//! Up to the first token another engine may serve a stream, whatever bytes came before. Bytes
//! without a token are no work, so pings do not keep a stream alive.

use super::*;
use crate::pool::EngineCounters;

const PING: &str = ": ping\n\n";
const CREATED: &str = "data: {\"choices\":[],\"id\":\"first\"}\n\n";
const EMPTY: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"finish_reason\":null}]}\n\n";

fn stream(chunks: &[(u64, &'static str)], in_order: bool) -> Script {
    Script::Stream(chunks.to_vec(), in_order)
}

fn text(client: &TestClient) -> String {
    String::from_utf8(client.body.clone()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn what_comes_before_the_first_token_leaves_no_trace_when_another_engine_takes_over() {
    for before in [ROLE, PING, CREATED, EMPTY, "event: ping\ndata: {}\n\n", ": half of a ping"] {
        for (dying, reason) in [
            (stream(&[(1, before)], false), RetryReason::Broken),
            (stream(&[(1, PING), (1, before), (1, "")], true), RetryReason::Broken),
            (stream(&[(1, before), (3_600_000, WORD)], true), RetryReason::Timeout),
            (stream(&[(1, before), (1, "\n\n"), (1, GIVEN_UP)], true), RetryReason::InStream),
        ] {
            let test = TestFlow::new(vec![dying], vec![good()]);
            let (client, record) = test.request(STREAM).await;
            let (seen, pings) = (text(&client).replace(PING, ""), text(&client).matches(PING).count());
            assert_eq!(seen, [ROLE, WORD, LAST, DONE].concat(), "{before:?}, {reason:?}");
            assert_eq!((record.outcome, record.retries.as_slice()), (Outcome::Completed, &[reason][..]));
            // A comment is passed on at once, after the head of the engine that sent it.
            let first = if pings > 0 { "a" } else { "b" };
            assert_eq!(client.head.unwrap().headers["x-sluice-backend"], first, "{before:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_preamble_leaves_with_the_first_token_unchanged() {
    let events = [(5, PING), (5, CREATED), (5, ROLE), (30_000, WORD), (1, LAST), (0, DONE)];
    let test = TestFlow::new(vec![stream(&events, true)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(text(&client), [PING, CREATED, ROLE, WORD, LAST, DONE].concat());
    assert_eq!(record.stats.unwrap().ttft.unwrap().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_preamble_without_end_is_passed_on_in_bounded_memory() {
    let long: &'static str = EMPTY.repeat(2_000).leak();
    let test = TestFlow::new(vec![stream(&[(1, ROLE), (1, long), (1, PING)], false)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert!(client.body.len() > long.len() && client.aborted);
    assert_eq!((record.outcome, record.retries.len()), (Outcome::UpstreamError(UpstreamFault::Broken), 0));
}

#[tokio::test(start_paused = true)]
async fn pings_and_empty_events_are_neither_the_first_token_nor_progress() {
    let mut pings = vec![(1, ROLE)];
    pings.extend((0..40).flat_map(|_| [(5_000, PING), (5_000, EMPTY)]));
    let begun = Instant::now();
    let test = TestFlow::new(vec![Script::Stream(pings.clone(), true)], vec![Script::Stream(pings.clone(), true)]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::Timeout(Stage::FirstByte));
    assert!(client.aborted && text(&client).ends_with("}\n\n") && text(&client).contains("event: error"));
    assert_eq!(text(&client).replace(PING, "").matches("data:").count(), 1, "nothing of either engine's response");
    assert!((120..130).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());

    let (begun, mut words) = (Instant::now(), vec![(1, WORD)]);
    words.extend(pings);
    let test = TestFlow::new(vec![Script::Stream(words, true)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::Timeout(Stage::Idle));
    assert!(client.aborted && text(&client).contains("event: error"));
    assert!((60..70).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    let silent = test.flow.admission().silent_backends(Duration::from_secs(30), Instant::now());
    assert!(silent.is_empty(), "no request is left");
}

#[tokio::test(start_paused = true)]
async fn pieces_of_a_long_event_are_progress() {
    let mut pieces = vec![(1, WORD), (30_000, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"")];
    pieces.extend((0..10).map(|_| (30_000, "more ")));
    pieces.extend([(30_000, "\"},\"finish_reason\":\"stop\"}]}\n\n"), (1, DONE)]);
    let test = TestFlow::new(vec![Script::Stream(pieces, true)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!((record.outcome, client.finished), (Outcome::Completed, true));
}

#[tokio::test(start_paused = true)]
async fn pings_do_not_hide_an_engine_that_has_stopped() {
    let pings: Vec<_> = std::iter::once((1, ROLE)).chain((0..40).map(|_| (1_000, PING))).collect();
    let test = TestFlow::new(vec![Script::Stream(pings, true)], vec![good()]);
    let mut client = TestClient::default();
    let watching = async {
        let suspects = || test.flow.admission().silent_backends(Duration::from_secs(30), Instant::now());
        sleep(Duration::from_secs(1)).await;
        assert!(suspects().is_empty());
        sleep(Duration::from_secs(31)).await;
        let silent = suspects();
        assert_eq!(silent.len(), 1, "it is suspected although it sends bytes");
        test.flow.admission().mark_hung(silent[0], Instant::now());
    };
    tokio::join!(test.flow.run(test.incoming(STREAM), &mut client), watching);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!((record.outcome, record.retries.as_slice()), (Outcome::Completed, &[RetryReason::Hung][..]));
    assert_eq!(text(&client).replace(PING, ""), [ROLE, WORD, LAST, DONE].concat());
}

#[tokio::test(start_paused = true)]
async fn behind_comments_that_were_passed_on_a_refusal_is_an_event() {
    for (refusing, outcome) in [
        (Script::Json(503, "{}"), Outcome::UpstreamError(UpstreamFault::Status)),
        (Script::Json(400, "{}"), Outcome::UpstreamError(UpstreamFault::Status)),
        (Script::Stream(vec![(1, BUSY)], true), Outcome::UpstreamError(UpstreamFault::InStream)),
        (Script::NoConnection, Outcome::UpstreamError(UpstreamFault::Connect)),
    ] {
        let test = TestFlow::new(vec![stream(&[(1, PING), (1, ROLE)], false)], vec![refusing]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!(record.outcome, outcome);
        assert_eq!((client.head.as_ref().unwrap().status.as_u16(), client.aborted), (200, true));
        let (comment, error) = text(&client)
            .split_once("\n\n\n\nevent: error\ndata: {")
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .unwrap();
        assert!(comment == PING.trim_end() && error.contains("\"error\""), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_complete_by_its_finish_reasons_and_cut_without() {
    for end in ["", "data: [DONE]\n", "data: [DONE] \n\n", "data: [DONE]\r\n\r\n", PING] {
        let test = TestFlow::new(vec![stream(&[(1, ROLE), (1, WORD), (1, LAST), (1, end)], true)], vec![good()]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!((record.outcome, client.finished), (Outcome::Completed, true), "{end:?}");
        assert_eq!(text(&client), [ROLE, WORD, LAST, end].concat());
    }
    let test = TestFlow::new(vec![stream(&[(1, ROLE), (1, WORD), (1, LAST)], false)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!((record.outcome, client.finished), (Outcome::UpstreamError(UpstreamFault::Broken), false));
    assert!(text(&client).contains("event: error"));
}

/// A stream with a pause of `pause` seconds between tokens, while the engine generates `each`
/// tokens a second that no stream receives.
async fn silent(pause: u64, each: f64, begin: &'static str) -> (TestClient, Record, Duration) {
    let events = [(1, begin), (pause * 1_000, WORD), (1, LAST), (0, DONE)];
    let test = TestFlow::new(vec![stream(&events, true)], vec![stream(&events, true)]);
    let (mut client, begun) = (TestClient::default(), Instant::now());
    let looking = async {
        let admission = test.flow.admission();
        let mut generated = 0.0;
        loop {
            for (backend, address) in admission.watched_backends() {
                let look = EngineCounters { generated, requests: Some(1.0) };
                admission.record_look(backend, &address, Some(look), Instant::now());
            }
            generated += each;
            if admission.watched_backends().is_empty() {
                admission.silent_stream().await;
            } else {
                sleep(Duration::from_secs(1)).await;
            }
        }
    };
    tokio::select! {
        () = test.flow.run(test.incoming(STREAM), &mut client) => {}
        () = looking => unreachable!(),
    }
    let record = test.records.0.lock().pop().unwrap();
    test.idle();
    (client, record, begun.elapsed())
}

#[tokio::test(start_paused = true)]
async fn silence_while_the_engine_generates_is_no_timeout_until_its_own_limit() {
    let (_, record, _) = silent(300, 50.0, WORD).await;
    assert_eq!(record.outcome, Outcome::Completed);
    let (_, record, _) = silent(300, 50.0, ROLE).await;
    assert_eq!((record.outcome, record.retries.len()), (Outcome::Completed, 0), "its engine had begun");
    let (client, record, took) = silent(3_000, 50.0, WORD).await;
    assert_eq!((record.outcome, client.aborted), (Outcome::Timeout(Stage::Idle), true));
    assert_eq!(took.as_secs(), 600, "timeouts.silent");
}

#[tokio::test(start_paused = true)]
async fn silence_of_an_engine_that_does_not_generate_or_has_not_begun_is_a_timeout() {
    let (_, record, took) = silent(300, 0.0, WORD).await;
    assert_eq!(record.outcome, Outcome::Timeout(Stage::Idle));
    assert!((60..67).contains(&took.as_secs()), "{took:?}");
    let (_, record, _) = silent(300, 50.0, CREATED).await;
    assert_eq!(record.outcome, Outcome::Timeout(Stage::FirstByte), "other requests may have made it generate");
}
