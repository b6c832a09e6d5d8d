//! Events about the prefix cache of an engine.
//!
//! The tokens that admission expects in an engine's cache while events come, and when they end.

use super::prefixes::prompt;
use super::*;
use crate::pool::{CacheNews, EventsState, EventsView, ServedPrompt};
use sluice_core::openai::PromptPrefix;
use tokio::sync::mpsc;

/// A pool of one engine whose events are followed.
fn followed() -> (Fixture, BackendId, Arc<sluice_config::Address>, mpsc::Receiver<ServedPrompt>) {
    let limits = BackendLimits { slots: 1_000, tokens: None, prefill_tokens: None, long_prefix: None };
    let fixture = Fixture::new(&[spec("all", 1, limits, vec![])]);
    let (id, address) = {
        let view = fixture.admission.view();
        (view[0].backends[0].id, Arc::clone(&view[0].backends[0].address))
    };
    let served = fixture.admission.follow_events(id, &address).unwrap();
    fixture.admission.set_cache_size(id, 20_000);
    (fixture, id, address, served)
}

fn news(state: EventsState) -> CacheNews {
    CacheNews { view: EventsView { state, ..EventsView::default() }, ..CacheNews::default() }
}

fn hashes(prompt: &PromptPrefix) -> Vec<u64> {
    prompt.beginnings.iter().map(|beginning| beginning.hash).collect()
}

#[test]
fn a_linked_prompt_is_expected_until_an_event_says_that_it_is_gone() {
    let (fixture, id, address, mut served) = followed();
    let conversation = prompt(1, 1);
    let lease = fixture.sent(&conversation);
    lease.observe_cached(8_000, None);
    let report = served.try_recv().unwrap();
    assert_eq!((lease.session(), report.prompt_tokens, report.cached), (Some(report.session), 8_000, None));
    drop(lease);
    let put = |news: CacheNews| fixture.admission.put_cache_news(id, &address, &news);
    put(CacheNews { linked: hashes(&conversation), ..news(EventsState::Followed) });
    // Other clients write more than the cache holds, and the engine keeps the conversation.
    put(CacheNews { written_tokens: 100_000, ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 7_999);
    let [first, .., last] = hashes(&conversation)[..] else { panic!("four beginnings") };
    put(CacheNews { gone: vec![last], ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 6_000, "the last quarter is gone");
    put(CacheNews { gone: vec![last], ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 7_999, "it came again, and this news are about the time before");
    put(CacheNews { cleared: true, ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 0);
    assert_ne!(first, last);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn a_prompt_that_was_forgotten_is_expected_again_once_it_is_linked() {
    let (fixture, id, address, _served) = followed();
    let conversation = prompt(1, 1);
    fixture.served(&conversation);
    fixture.sent(&conversation).observe_cached(8_000, Some(0));
    let linked = CacheNews { linked: hashes(&conversation), ..news(EventsState::Followed) };
    fixture.admission.put_cache_news(id, &address, &linked);
    assert!(fixture.served(&conversation).1 > 7_000, "the engine had nothing, and has it now");
    let unknown = CacheNews { linked: vec![1, 2, 3], ..news(EventsState::Followed) };
    fixture.admission.put_cache_news(id, &address, &unknown);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn what_is_not_linked_goes_with_the_blocks_that_the_engine_writes() {
    let (fixture, id, address, _served) = followed();
    let put = |news: CacheNews| fixture.admission.put_cache_news(id, &address, &news);
    put(news(EventsState::Followed));
    let conversation = prompt(1, 1);
    fixture.served(&conversation);
    for own in 2..10 {
        fixture.served(&prompt(own, own));
    }
    assert_eq!(fixture.served(&conversation).1, 7_999, "the engine has written nothing");
    put(CacheNews { written_tokens: 20_000, ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 0);
}

#[test]
fn writes_between_the_subscription_and_the_first_event_count_once() {
    let (fixture, id, address, _served) = followed();
    let put = |news: CacheNews| fixture.admission.put_cache_news(id, &address, &news);
    put(CacheNews { subscribed: true, ..news(EventsState::Absent) });
    let conversation = prompt(1, 1);
    fixture.served(&conversation);
    fixture.served(&prompt(2, 2));
    put(CacheNews { written_tokens: 16_000, ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 7_999, "the cache has room for both prompts");
    put(CacheNews { written_tokens: 20_000, ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&prompt(2, 2)).1, 0, "the next events are all counted");
}

#[test]
fn without_events_the_estimate_counts_again() {
    for state in [EventsState::Absent, EventsState::Silent] {
        let (fixture, id, address, _served) = followed();
        let put = |news: CacheNews| fixture.admission.put_cache_news(id, &address, &news);
        let conversation = prompt(1, 1);
        fixture.served(&conversation);
        put(CacheNews { linked: hashes(&conversation), ..news(EventsState::Followed) });
        put(news(state));
        assert_eq!(fixture.admission.view()[0].backends[0].events.unwrap().state, state);
        fixture.served(&prompt(2, 2));
        assert_eq!(fixture.served(&conversation).1, 7_999);
        for own in 3..6 {
            fixture.served(&prompt(own, own));
        }
        assert_eq!(fixture.served(&conversation).1, 0, "as much was written as the cache holds");
    }
}

#[test]
fn lost_events_leave_the_estimate() {
    let (fixture, id, address, _served) = followed();
    let put = |news: CacheNews| fixture.admission.put_cache_news(id, &address, &news);
    let conversation = prompt(1, 1);
    fixture.served(&conversation);
    put(CacheNews { linked: hashes(&conversation), ..news(EventsState::Followed) });
    put(CacheNews { unlinked: hashes(&conversation), ..news(EventsState::Followed) });
    put(CacheNews { gone: hashes(&conversation), ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 7_999, "no news about blocks that are not known");
    put(CacheNews { written_tokens: 20_000, ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 0);
}

#[test]
fn news_about_another_engine_at_the_same_place_change_nothing() {
    let (fixture, id, address, _served) = followed();
    let conversation = prompt(1, 1);
    fixture.served(&conversation);
    let other = sluice_config::Address { events: Some(1), ..sluice_config::Address::clone(&address) };
    fixture.admission.put_cache_news(id, &other, &CacheNews { cleared: true, ..news(EventsState::Followed) });
    assert_eq!(fixture.served(&conversation).1, 7_999);
    assert!(fixture.admission.follow_events(id, &other).is_none());
    fixture.admission.stop_following_events(id, &address);
    assert_eq!((fixture.sent(&conversation).session(), fixture.admission.view()[0].backends[0].events), (None, None));
}
