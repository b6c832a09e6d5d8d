//! Answers of engines about origins, and the requests that wait for them, on paused time.
//!
//! A future replaces the engine.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::sleep;

use super::*;

fn page(number: usize) -> HeaderValue {
    HeaderValue::from_str(&format!("https://{number}.example")).unwrap()
}

fn allowed(origin: &HeaderValue) -> Option<Allow> {
    Some(Some(origin.clone()))
}

/// Asks an engine that answers after a second, and counts the questions.
fn ask_slowly(origins: &Arc<EngineOrigins>, origin: &HeaderValue, said: Option<Allow>, asked: &Arc<AtomicUsize>) {
    let asked = Arc::clone(asked);
    origins.ask(origin, Asker::Anyone, |_| async move {
        asked.fetch_add(1, Ordering::Relaxed);
        sleep(Duration::from_secs(1)).await;
        said
    });
}

#[tokio::test(start_paused = true)]
async fn an_old_answer_is_used_at_once_and_asked_for_again_once() {
    let (origins, asked) = (Arc::new(EngineOrigins::default()), Arc::default());
    let origin = page(1);
    ask_slowly(&origins, &origin, allowed(&origin), &asked);
    assert_eq!(origins.known(&origin), None);
    origins.answered(&origin).await;
    assert_eq!(origins.known(&origin), Some(origin.clone()));
    ask_slowly(&origins, &origin, Some(None), &asked);
    sleep(FRESH).await;
    assert_eq!(asked.load(Ordering::Relaxed), 1, "a fresh answer is not asked for");
    for _ in 0..3 {
        ask_slowly(&origins, &origin, Some(None), &asked);
        let begun = Instant::now();
        origins.answered(&origin).await;
        assert_eq!((begun.elapsed(), origins.known(&origin)), (Duration::ZERO, Some(origin.clone())));
    }
    sleep(Duration::from_secs(2)).await;
    assert_eq!((asked.load(Ordering::Relaxed), origins.known(&origin)), (2, None));
}

#[tokio::test(start_paused = true)]
async fn where_no_engine_answers_none_is_asked_for_some_seconds_and_the_old_answer_stays() {
    let (origins, asked) = (Arc::new(EngineOrigins::default()), Arc::default());
    let (known, unknown) = (page(1), page(2));
    ask_slowly(&origins, &known, allowed(&known), &asked);
    origins.answered(&known).await;
    for _ in 0..3 {
        ask_slowly(&origins, &unknown, None, &asked);
        origins.answered(&unknown).await;
    }
    assert_eq!((asked.load(Ordering::Relaxed), origins.known(&unknown)), (2, None));
    assert_eq!(origins.known(&known), Some(known.clone()));
    sleep(FAILED_FOR).await;
    ask_slowly(&origins, &unknown, allowed(&unknown), &asked);
    origins.answered(&unknown).await;
    assert_eq!(origins.known(&unknown), Some(unknown));
}

#[tokio::test(start_paused = true)]
async fn requests_without_a_key_leave_places_to_those_with_one() {
    let (origins, asked) = (Arc::new(EngineOrigins::default()), Arc::default());
    for number in 0..ASKS_MAX {
        ask_slowly(&origins, &page(number), Some(None), &asked);
    }
    assert_eq!(origins.table.lock().asking.len(), ASKS_OF_ANYONE_MAX);
    let origin = page(ASKS_MAX);
    origins.ask(&origin, Asker::Accepted, |origin| async move { Some(Some(origin)) });
    origins.answered(&origin).await;
    assert_eq!(origins.known(&origin), Some(origin));
    let long = HeaderValue::from_str(&"x".repeat(ORIGIN_BYTES + 1)).unwrap();
    assert!(!origins.table.lock().begin(&long, Asker::Accepted, Instant::now()));
}

#[test]
fn origins_that_anyone_makes_up_replace_none_in_use_and_none_that_is_allowed() {
    let (mut table, now) = (Table::default(), Instant::now());
    let (used, allowed_one) = (page(0), page(1));
    for origin in [&used, &allowed_one] {
        table.note(origin, allowed(origin), now);
    }
    assert!(!table.begin(&used, Asker::Accepted, now), "it is fresh");
    for number in 2..2 * ORIGINS_MAX {
        table.note(&page(number), Some(None), now + Duration::from_secs(1));
    }
    assert_eq!(table.by_origin.len(), ORIGINS_MAX);
    assert!(table.answer(&used).is_some() && table.answer(&allowed_one).is_some());
    for number in 0..2 * ORIGINS_MAX {
        let origin = page(number + 10_000);
        table.note(&origin, allowed(&origin), now + Duration::from_secs(2));
    }
    assert!(table.by_origin.len() == ORIGINS_MAX && table.answer(&used).is_some());
}

#[test]
fn an_engine_that_allows_every_origin_has_one_answer_until_it_says_otherwise() {
    let (mut table, now) = (Table::default(), Instant::now());
    table.note(&page(1), Some(Some(HeaderValue::from_static("*"))), now);
    assert!(table.by_origin.is_empty());
    assert_eq!(table.answer(&page(2)).and_then(|answer| answer.allow.clone()), Some(HeaderValue::from_static("*")));
    assert!(!table.begin(&page(3), Asker::Anyone, now));
    table.note(&page(1), allowed(&page(1)), now + FRESH);
    assert!(table.answer(&page(2)).is_none() && table.answer(&page(1)).is_some());
}
