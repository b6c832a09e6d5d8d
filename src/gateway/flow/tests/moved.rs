//! Streams of an engine that leaves service: they move to another engine of the pool once it has
//! room, and stay if they cannot move.
//!
//! The first engine sends a word each second, and is drained two seconds after the start.

use super::continued::{assert_nothing_kept, body, completing, last, role, text, word};
use super::*;

const WORDS: usize = 12;
const DRAINED: Duration = Duration::from_secs(2);
/// `drain.move_after` is five seconds and begins with the next word. A look for room follows a
/// word.
const MOVED: Duration = Duration::from_secs(8);

/// An engine that sends a word each second.
fn steady(engine: u32) -> Script {
    let words = (0..WORDS).map(|number| (1_000, word(engine, &format!(" w{number}"))));
    let end = [(1_000, last(engine, " end")), (0, DONE)];
    Script::Stream([(0, role(engine))].into_iter().chain(words).chain(end).collect(), true)
}

fn set_draining(test: &TestFlow, backend: &str, draining: bool) {
    let admission = test.flow.admission();
    let id = admission.view()[0].backends.iter().find(|found| &*found.name == backend).unwrap().id;
    admission.set_draining(id, draining);
}

/// Runs a request whose engine is drained meanwhile, and `other` at the same time.
async fn drained(test: &TestFlow, request: &'static str, other: impl Future<Output = ()>) -> (TestClient, Record) {
    let mut client = TestClient::default();
    let drain = async {
        sleep(DRAINED).await;
        set_draining(test, "a", true);
    };
    tokio::join!(test.flow.run(test.incoming(request), &mut client), drain, other);
    let mut records = test.records.0.lock();
    let at = records.iter().position(|record| record.backend.is_some()).unwrap();
    (client, records.remove(at))
}

#[tokio::test(start_paused = true)]
async fn a_stream_moves_when_its_engine_is_drained_and_another_one_has_room() {
    let test = TestFlow::new(vec![steady(1)], vec![completing(2, &[" b", " c"], 20)]);
    let begun = Instant::now();
    let (client, record) = drained(&test, STREAM, async {}).await;
    assert_eq!((record.outcome, record.continued, record.not_continued), (Outcome::Completed, 1, None));
    assert_eq!(record.retries.as_slice(), [RetryReason::Moved]);
    assert_eq!((record.backend.as_deref(), &*record.retried_on[0][1]), (Some("b"), "a"));
    assert!((MOVED..MOVED + Duration::from_secs(1)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    let words = text(&client).matches("\" w").count();
    assert_eq!(words, 8, "one for each second until the move");
    assert_eq!(body(&test, 1)["messages"][1]["content"], " w0 w1 w2 w3 w4 w5 w6 w7");
    assert!(text(&client).ends_with(DONE) && client.finished);
    assert!(record.prefilled_again > 0);
    assert_eq!(test.flow.admission().view()[0].backends[0].recent.failed, 0, "the engine did nothing wrong");
    assert!(test.records.1.lock().is_empty());
    test.idle();
    assert_nothing_kept(&test);
}

#[tokio::test(start_paused = true)]
async fn a_stream_stays_where_it_is_if_no_engine_has_room_or_it_cannot_be_continued() {
    const SEED: &str = r#"{"model":"m","stream":true,"messages":[],"seed":1}"#;
    for (request, pool, has_room) in [(STREAM, "slots = 1", false), (SEED, "", true)] {
        let slow = Script::Stream(vec![(60_000, role(3)), (1, last(3, "c")), (0, DONE)], true);
        let test = TestFlow::with(vec![steady(1)], vec![slow], pool);
        let other = async {
            sleep(Duration::from_millis(1)).await;
            if !has_room {
                test.flow.run(test.incoming(PLAIN), &mut TestClient::default()).await;
            }
        };
        let (client, record) = drained(&test, request, other).await;
        assert_eq!((record.outcome, record.continued), (Outcome::Completed, 0), "{request}");
        assert_eq!(text(&client).matches("\" w").count(), WORDS, "{request}");
        assert!(record.retries.is_empty() && client.finished);
        test.idle();
        assert_nothing_kept(&test);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_stays_if_the_engine_returns_in_time_or_moving_is_off() {
    for is_off in [false, true] {
        let test = TestFlow::new(vec![steady(1)], vec![completing(2, &[" b"], 20)]);
        if is_off {
            let mut config = Config::clone(&test.flow.routing_table().config);
            config.retry.on_failure = sluice_config::Continue::Off;
            test.configure(config);
        }
        let returns = async {
            sleep(MOVED - Duration::from_millis(500)).await;
            if !is_off {
                set_draining(&test, "a", false);
            }
        };
        let (client, record) = drained(&test, STREAM, returns).await;
        assert_eq!((record.outcome, record.continued), (Outcome::Completed, 0));
        assert_eq!(text(&client).matches("\" w").count(), WORDS);
        test.idle();
        assert_nothing_kept(&test);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_has_moved_moves_again_and_is_counted_as_one_answer() {
    let test = TestFlow::new(vec![steady(1), completing(3, &[" x", " y"], 30)], vec![steady(2)]);
    let back = async {
        sleep(MOVED + Duration::from_secs(2)).await;
        set_draining(&test, "a", false);
        set_draining(&test, "b", true);
    };
    let (client, record) = drained(&test, STREAM, back).await;
    assert_eq!((record.outcome, record.continued), (Outcome::Completed, 2));
    assert_eq!(record.retries.as_slice(), [RetryReason::Moved, RetryReason::Moved]);
    let text = text(&client);
    assert!(!text.contains("chatcmpl-2") && !text.contains("chatcmpl-3"), "{text}");
    assert_eq!(text.matches("\"role\"").count(), 1);
    let tokens = record.stats.unwrap().usage.completion;
    assert_eq!(tokens, Some(text.matches("\"content\":\" ").count() as u64), "{text}");
    test.idle();
    assert_nothing_kept(&test);
}
