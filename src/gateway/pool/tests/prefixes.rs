//! Requests that share a beginning.
//!
//! Tests which engines are expected to have the beginning, and which engines get the requests.

use super::*;
use sluice_core::openai::{Beginning, PromptPrefix};

/// A prompt of 32 kB. `system` determines the first quarter, and `own` the rest.
pub(super) fn prompt(system: u64, own: u64) -> Arc<PromptPrefix> {
    let begin = |quarter: u64| {
        let hash =
            if quarter == 1 { 1_000_000 + system } else { (own * 8 + quarter).wrapping_mul(0x9E37_79B9_7F4A_7C15) };
        Beginning { hash, end: quarter as u32 * 8_000 }
    };
    Arc::new(PromptPrefix { beginnings: (1..=4).map(begin).collect(), bytes: 32_000 })
}

fn pool_of(backends: usize) -> Fixture {
    let limits = BackendLimits { slots: 1_000, tokens: None, prefill_tokens: None, long_prefix: None };
    Fixture::new(&[spec("all", backends, limits, vec![])])
}

impl Fixture {
    pub(super) fn sent(&self, prompt: &Arc<PromptPrefix>) -> Lease {
        let request = AdmissionRequest { prefix: Arc::clone(prompt), ..self.request(0, 8_000) };
        match self.admission.enter(request) {
            AdmissionDecision::Granted(lease) => lease,
            other => panic!("expected a lease, got {other:?}"),
        }
    }

    /// Like `sent`, with a finished response. Returns the backend and the expected cached tokens.
    pub(super) fn served(&self, prompt: &Arc<PromptPrefix>) -> (BackendId, u64) {
        let mut lease = self.sent(prompt);
        lease.first_token();
        (lease.backend(), lease.expected_cached())
    }
}

#[test]
fn a_conversation_goes_where_it_was_however_many_engines_there_are() {
    for backends in [2, 100] {
        let fixture = pool_of(backends);
        let (conversation, mut others) = (prompt(1, 1), Vec::new());
        let (home, expected) = fixture.served(&conversation);
        assert_eq!(expected, 0);
        for own in 2..10 {
            others.push(fixture.served(&prompt(own, own)).0);
            assert_eq!(fixture.served(&conversation), (home, 8_000 - 1), "all but the last token");
        }
        assert!(others.iter().any(|other| *other != home), "{others:?}");
        fixture.admission.check_invariants().unwrap();
    }
}

#[test]
fn what_many_engines_have_draws_no_request_to_some_of_them() {
    let fixture = pool_of(8);
    let mut counts = [0_u32; 8];
    let mut leases = std::collections::VecDeque::new();
    for own in 0..800 {
        let lease = fixture.sent(&prompt(1, own));
        counts[lease.backend().index()] += 1;
        leases.push_back(lease);
        if leases.len() > 16 {
            leases.pop_front();
        }
    }
    assert!(counts.iter().all(|count| (80..=120).contains(count)), "{counts:?}");
    assert_eq!(fixture.served(&prompt(1, 10_000)).1, 2_000, "the common quarter");
}

#[test]
fn an_engine_that_starts_again_has_nothing() {
    let fixture = pool_of(1);
    let conversation = prompt(1, 1);
    let (home, _) = fixture.served(&conversation);
    assert_eq!(fixture.served(&conversation).1, 7_999);
    fixture.admission.engine_replaced(home, fixture.now);
    assert_eq!(fixture.served(&conversation).1, 0);
    assert_eq!(fixture.served(&conversation).1, 7_999);
    fixture.admission.record_probe(home, false, fixture.now);
    fixture.admission.record_probe(home, false, fixture.now);
    fixture.admission.record_probe(home, true, fixture.now);
    assert_eq!(fixture.served(&conversation).1, 0, "it was away");
    fixture.sent(&conversation).observe_cached(8_000, Some(7_984));
    fixture.sent(&conversation).observe_cached(8_000, None);
    fixture.admission.engine_replaced(home, fixture.now);
    fixture.served(&conversation);
    fixture.sent(&conversation).observe_cached(8_000, None);
    assert_eq!(fixture.served(&conversation).1, 7_999, "the new engine has reported nothing yet");
}

#[test]
fn an_engine_keeps_no_more_than_its_cache_holds() {
    let fixture = pool_of(1);
    let (first, second) = (prompt(1, 1), prompt(2, 2));
    let (home, _) = fixture.served(&first);
    fixture.admission.set_cache_size(home, 20_000);
    assert_eq!(fixture.served(&second).1, 0);
    assert_eq!(fixture.served(&first).1, 7_999, "two prompts of 8,000 tokens fit");
    assert_eq!(fixture.served(&prompt(3, 3)).1, 0);
    assert_eq!(fixture.served(&prompt(4, 4)).1, 0);
    assert_eq!(fixture.served(&second).1, 0, "evicted");
    fixture.admission.set_cache_size(home, 0);
    assert_eq!(fixture.served(&second).1, 0, "caching is off");
}

#[test]
fn expectations_that_do_not_come_true_are_forgotten() {
    let fixture = pool_of(1);
    let conversation = prompt(1, 1);
    fixture.served(&conversation);
    let unknown = fixture.sent(&conversation);
    unknown.observe_cached(8_000, None);
    assert_eq!(fixture.served(&conversation).1, 7_999, "it never reports any");
    fixture.sent(&conversation).observe_cached(8_000, Some(7_984));
    assert!(fixture.served(&conversation).1 > 7_900);
    let missed = fixture.sent(&conversation);
    fixture.sent(&prompt(9, 9)).observe_cached(8_000, None);
    missed.observe_cached(8_000, Some(2_000));
    let quarter = fixture.served(&conversation).1;
    assert!((1_800..=2_000).contains(&quarter), "the system prompt, {quarter}");
    for _ in 0..100 {
        fixture.sent(&conversation).observe_cached(8_000, None);
    }
    fixture.served(&conversation);
    let rarely = fixture.served(&conversation).1;
    assert!((100..1_000).contains(&rarely), "most of what is expected does not come true: {rarely}");
}
