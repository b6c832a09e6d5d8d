//! Where one rule of the path meets another: answers that have half begun, refusals that are passed on, numbers no client
//! should send, pools that a reload replaces under a request, and requests that wait while they hold something.
//!
//! The engines, the client and the clock are those of the other tests of the path.

use super::*;

#[tokio::test(start_paused = true)]
async fn half_an_event_is_not_yet_an_answer_and_another_backend_may_still_take_over() {
    let world = World::new(vec![Script::Stream(vec![(1, "data: {\"choi")], false)], vec![good()]);
    let (client, record) = world.ask(STREAM).await;
    assert_eq!(record.outcome, Outcome::Completed);
    assert_eq!(record.retries.as_slice(), [RetryReason::Broken]);
    assert_eq!(String::from_utf8(client.body).unwrap(), [ROLE, WORD, LAST, DONE].concat());
}

#[tokio::test(start_paused = true)]
async fn one_502_counts_once_against_its_backend_although_it_is_passed_on() {
    let bad = || vec![Script::Json(502, "{}")];
    let world = World::new(bad(), bad());
    for _ in 0..2 {
        let (client, _) = world.ask(STREAM).await;
        assert_eq!(client.head.unwrap().status, 502);
    }
    let states: Vec<_> = world.flow.admission().view()[0].backends.iter().map(|b| b.state()).collect();
    assert_eq!(states, ["ready", "ready"], "two failures each, three eject");
}

#[tokio::test(start_paused = true)]
async fn an_absurd_output_limit_cannot_overflow_the_tokens_of_a_backend() {
    let world = World::new(vec![good()], vec![good()]);
    let body = r#"{"model":"m","stream":true,"min_tokens":18446744073709551615,"messages":[]}"#;
    let (mut one, mut two) = (Client::default(), Client::default());
    for _ in 0..4 {
        tokio::join!(world.flow.run(world.incoming(body), &mut one), world.flow.run(world.incoming(body), &mut two));
        (one, two) = (Client::default(), Client::default());
    }
    world.idle();
}

#[tokio::test(start_paused = true)]
async fn a_retry_follows_a_pool_that_a_reload_has_replaced() {
    let broken = Script::Stream(vec![(100, "data: {\"choi")], false);
    let world = World::new(vec![broken, good()], vec![good()]);
    let mut client = Client::default();
    let reload = async {
        sleep(Duration::from_millis(50)).await;
        let config = config_of("q", "");
        let spec = pool_of(&config);
        let layout = world.flow.admission().apply_with(&[spec], RULES, Instant::now(), |layout| {
            world.flow.set_routing_table(RoutingTable::new(config, layout, &[], &[None], &LearnedState::default()));
        });
        for backend in &layout.backends[0] {
            world.flow.admission().record_probe(*backend, true, Instant::now());
        }
    };
    tokio::join!(world.flow.run(world.incoming(STREAM), &mut client), reload);
    let record = world.records.0.lock().pop().unwrap();
    assert_eq!((record.outcome, record.pool.as_deref()), (Outcome::Completed, Some("q")));
    world.idle();
}

#[tokio::test(start_paused = true)]
async fn two_requests_that_got_a_503_do_not_wait_for_each_others_slot() {
    let busy = || vec![Script::Json(503, "{}"), good()];
    let world = World::with(busy(), busy(), "slots = 1");
    let (mut one, mut two) = (Client::default(), Client::default());
    let begun = Instant::now();
    tokio::join!(world.flow.run(world.incoming(STREAM), &mut one), world.flow.run(world.incoming(STREAM), &mut two));
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    let outcomes: Vec<_> = world.records.0.lock().iter().map(|record| record.outcome).collect();
    assert_eq!(outcomes, [Outcome::Completed, Outcome::Completed]);
    world.idle();
}

#[tokio::test(start_paused = true)]
async fn a_task_that_is_dropped_is_recorded_and_frees_everything() {
    let world = World::new(vec![Script::NeverAnswers], vec![good()]);
    {
        let mut client = Client::default();
        let running = world.flow.run(world.incoming(STREAM), &mut client);
        assert!(tokio::time::timeout(Duration::from_millis(20), running).await.is_err());
    }
    assert_eq!(world.records.0.lock().len(), 1);
    world.idle();
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_the_engine_gave_up_is_passed_on_and_not_taken_for_a_whole_one() {
    let events = [(1, ROLE), (1, WORD), (1, GIVEN_UP), (0, DONE)];
    let world = World::new(vec![Script::Stream(events.to_vec(), true)], vec![good()]);
    let (client, record) = world.ask(STREAM).await;
    assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::InStream));
    let text = String::from_utf8(client.body).unwrap();
    assert!(client.finished && text.ends_with(&[GIVEN_UP, DONE].concat()), "{text}");
}
