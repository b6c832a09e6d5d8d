//! Edge cases of the request path.
//!
//! Among them: incomplete first events, forwarded refusals, absurd numbers, pools that a reload
//! replaces, and requests that wait while they hold capacity.

use super::*;

#[tokio::test(start_paused = true)]
async fn half_an_event_is_no_response_yet_and_another_backend_may_take_over() {
    let test = TestFlow::new(vec![Script::Stream(vec![(1, "data: {\"choi")], false)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::Completed);
    assert_eq!(record.retries.as_slice(), [RetryReason::Broken]);
    assert_eq!(String::from_utf8(client.body).unwrap(), [ROLE, WORD, LAST, DONE].concat());
}

#[tokio::test(start_paused = true)]
async fn one_502_counts_once_against_its_backend_although_it_is_passed_on() {
    let bad = || vec![Script::Json(502, "{}")];
    let test = TestFlow::new(bad(), bad());
    for _ in 0..2 {
        let (client, _) = test.request(STREAM).await;
        assert_eq!(client.head.unwrap().status, 502);
    }
    let states: Vec<_> = test.flow.admission().view()[0].backends.iter().map(|b| b.state()).collect();
    assert_eq!(states, ["ready", "ready"], "two failures each, three eject");
}

#[tokio::test(start_paused = true)]
async fn an_absurd_output_limit_cannot_overflow_the_tokens_of_a_backend() {
    let test = TestFlow::new(vec![good()], vec![good()]);
    let body = r#"{"model":"m","stream":true,"min_tokens":18446744073709551615,"messages":[]}"#;
    let (mut one, mut two) = (TestClient::default(), TestClient::default());
    for _ in 0..4 {
        tokio::join!(test.flow.run(test.incoming(body), &mut one), test.flow.run(test.incoming(body), &mut two));
        (one, two) = (TestClient::default(), TestClient::default());
    }
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn a_retry_follows_a_pool_that_a_reload_has_replaced() {
    let broken = Script::Stream(vec![(100, "data: {\"choi")], false);
    let test = TestFlow::new(vec![broken, good()], vec![good()]);
    let mut client = TestClient::default();
    let reload = async {
        sleep(Duration::from_millis(50)).await;
        let config = config_of("q", "");
        let spec = pool_of(&config);
        let draft = RoutingTable::draft(config, &[], &[None], &LearnedState::default());
        let layout = test.flow.admission().apply_with(&[spec], RULES, Instant::now(), |layout| {
            test.flow.set_routing_table(draft.placed(layout));
        });
        for backend in &layout.backends[0] {
            test.flow.admission().record_probe(*backend, true, Instant::now());
        }
    };
    tokio::join!(test.flow.run(test.incoming(STREAM), &mut client), reload);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!((record.outcome, record.pool.as_deref()), (Outcome::Completed, Some("q")));
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn two_requests_that_got_a_503_do_not_wait_for_each_others_slot() {
    let busy = || vec![Script::Json(503, "{}"), good()];
    let test = TestFlow::with(busy(), busy(), "slots = 1");
    let (mut one, mut two) = (TestClient::default(), TestClient::default());
    let begun = Instant::now();
    tokio::join!(test.flow.run(test.incoming(STREAM), &mut one), test.flow.run(test.incoming(STREAM), &mut two));
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    let outcomes: Vec<_> = test.records.0.lock().iter().map(|record| record.outcome).collect();
    assert_eq!(outcomes, [Outcome::Completed, Outcome::Completed]);
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn a_task_that_is_dropped_is_recorded_and_frees_everything() {
    let test = TestFlow::new(vec![Script::NeverAnswers], vec![good()]);
    {
        let mut client = TestClient::default();
        let running = test.flow.run(test.incoming(STREAM), &mut client);
        assert!(tokio::time::timeout(Duration::from_millis(20), running).await.is_err());
    }
    assert_eq!(test.records.0.lock().len(), 1);
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn a_response_that_the_engine_broke_off_is_passed_on_and_not_counted_as_complete() {
    let events = [(1, ROLE), (1, WORD), (1, GIVEN_UP), (0, DONE)];
    let test = TestFlow::new(vec![Script::Stream(events.to_vec(), true)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::InStream));
    let text = String::from_utf8(client.body).unwrap();
    assert!(client.finished && text.ends_with(&[GIVEN_UP, DONE].concat()), "{text}");
}

#[tokio::test(start_paused = true)]
async fn the_first_token_of_one_prompt_does_not_return_the_prefill_share_of_the_others() {
    let text = |pause| (pause, "data: {\"choices\":[{\"index\":0,\"text\":\"w\",\"finish_reason\":null}]}\n\n");
    let script = Script::Stream(vec![text(10), text(5_000), text(1_000), (0, DONE)], true);
    let test = TestFlow::new(vec![script], vec![good()]);
    let held = || test.flow.admission().view()[0].backends.iter().map(|b| b.used.prefill_tokens).sum::<u64>();
    let mut incoming = test.incoming(STREAM);
    incoming.route = sluice_core::openai::Route::Completions;
    let prompts = format!(r#"{{"model":"m","stream":true,"prompt":["x","{}"]}}"#, "word ".repeat(4_000));
    incoming.body = Bytes::from(prompts);
    let mut client = TestClient::default();
    let watching = async {
        sleep(Duration::from_millis(100)).await;
        assert!(held() > 2_000, "the long prompt may still be in prefill");
        sleep(Duration::from_millis(5_000)).await;
        assert_eq!(held(), 0);
    };
    tokio::join!(test.flow.run(incoming, &mut client), watching);
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_left_before_its_turn_was_noticed_reaches_no_engine() {
    let test = TestFlow::with(vec![good()], vec![good()], "slots = 1");
    let held: Vec<_> = (0..2).map(|_| hold(&test)).collect();
    let mut client = TestClient { leaves_at: Some(Instant::now() + Duration::from_secs(1)), ..TestClient::default() };
    {
        let mut waiting = Box::pin(test.flow.run(test.incoming(STREAM), &mut client));
        assert!(tokio::time::timeout(Duration::ZERO, waiting.as_mut()).await.is_err(), "it waits");
        // The request is granted a lease, and the client leaves, before the task runs again.
        drop(held);
        sleep(Duration::from_secs(2)).await;
        waiting.await;
    }
    assert!(test.asked().is_empty());
    assert_eq!(test.records.0.lock()[0].outcome, Outcome::ClientGone);
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn the_pieces_of_what_arrives_at_once_are_sent_together() {
    let announced = async |chunks: Vec<(u64, &'static str)>| {
        let test = TestFlow::new(vec![Script::Stream(chunks, true)], vec![good()]);
        let (client, _) = test.request(STREAM).await;
        assert!(client.body.ends_with(DONE.as_bytes()) && client.finished);
        client.announced
    };
    // The usage event, which the gateway requested, is removed between the pieces.
    let whole: &str = [ROLE, WORD, LAST, USAGE, DONE].concat().leak();
    assert_eq!(announced(vec![(5, whole)]).await, [true, true, true], "the end follows at once");
    let begun: &str = [ROLE, WORD, LAST, WORD].concat().leak();
    let pieces = announced(vec![(5, begun), (9, WORD), (0, DONE)]).await;
    assert_eq!(pieces[..4], [true, true, false, false], "the last piece of a chunk waits for nothing");
}

#[tokio::test(start_paused = true)]
async fn what_failed_or_was_shed_missed_its_objectives_and_what_was_refused_says_nothing() {
    let slow = || Script::Stream(vec![(2_000, ROLE), (0, WORD), (5, LAST), (0, USAGE), (0, DONE)], true);
    let broken = || Script::Stream(vec![(1, ROLE), (1, WORD)], false);
    let cases = [
        (good(), Some(true)),
        (slow(), Some(false)),
        (broken(), Some(false)),
        (Script::NoConnection, Some(false)),
        (Script::NeverAnswers, Some(false)),
        (Script::Json(500, "{}"), Some(false)),
        (Script::Json(400, "{}"), None),
    ];
    for (script, met) in cases {
        let test = TestFlow::with(vec![script.clone()], vec![script], "slo = { ttft = \"1s\" }");
        let (_, record) = test.request(STREAM).await;
        assert_eq!(record.slo_met, met, "{:?}", record.outcome);
    }
    let test = TestFlow::with(vec![good()], vec![good()], "slots = 1\nqueue = { length = 0 }\nslo = { ttft = \"1s\" }");
    let held: Vec<_> = (0..2).map(|_| hold(&test)).collect();
    test.flow.run(test.incoming(STREAM), &mut TestClient::default()).await;
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!((record.outcome, record.slo_met), (Outcome::Shed(ShedReason::QueueFull), Some(false)));
    drop(held);
    let without = TestFlow::new(vec![Script::NoConnection], vec![Script::NoConnection]);
    assert_eq!(without.request(STREAM).await.1.slo_met, None);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_repeated_waits_as_long_as_any_other() {
    let queue = "slots = 1\nqueue = { length = 1, timeout = \"2s\" }";
    let test = TestFlow::with(vec![Script::NeverAnswers], vec![good()], queue);
    let (first, second) = (hold(&test), hold(&test));
    drop(first);
    let begun = Instant::now();
    let busy = async {
        // One second after the first attempt has timed out.
        sleep(Duration::from_secs(61)).await;
        drop(second);
    };
    let ((_, record), ()) = tokio::join!(test.request(STREAM), busy);
    assert_eq!((record.outcome, record.backend.as_deref()), (Outcome::Completed, Some("b")));
    assert_eq!((record.retries.as_slice(), begun.elapsed().as_secs()), ([RetryReason::Timeout].as_slice(), 61));
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_with_the_end_marker_is_a_success_of_the_backend() {
    let late = Script::Stream(vec![(1, ROLE), (1, WORD), (1, LAST), (0, DONE), (1_000, ": more\n\n")], true);
    let failing = || Script::NoConnection;
    let test = TestFlow::new(vec![failing(), failing(), late, failing()], vec![good()]);
    test.set_attempts(1);
    for outcome in [Outcome::UpstreamError(UpstreamFault::Connect); 2] {
        assert_eq!(test.request(STREAM).await.1.outcome, outcome);
    }
    let leaves_at = Some(Instant::now() + Duration::from_millis(100));
    let (_, record) = test.request_as(STREAM, TestClient { leaves_at, ..TestClient::default() }).await;
    assert_eq!(record.outcome, Outcome::Completed);
    test.request(STREAM).await;
    assert_eq!(test.flow.admission().view()[0].backends[0].state(), "ready", "three failures, not in a row");
}
