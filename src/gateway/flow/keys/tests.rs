//! API keys and the limits on requests, sequences and tokens in flight.
//!
//! The tests on rates need no clock, because every call takes the time as an argument. One test
//! floods a key with requests without `max_tokens`, and bounds the tokens used.

use super::*;
use crate::pool::Need;
use sluice_config::{KeyDigest, ModelScope};
use sluice_core::base::Tokens;
use sluice_core::openai::{LimitUnit, TooLarge};

fn auth(limit: sluice_config::KeyLimit) -> Auth {
    let key = Key {
        name: "team-a".to_owned(),
        sha256: KeyDigest::new(Sha256::digest(b"secret").into(), None),
        models: ModelScope::Only(vec![ModelId::new(1)]),
        priority: 0,
        priority_min: None,
        priority_max: i32::MAX,
        weight: 1.0,
        on_failure: None,
        limit,
    };
    Auth { keys: vec![key], admin_token: None }
}

fn known(ring: &Keyring) -> ApiKey {
    ring.authenticate(Some("secret")).unwrap().unwrap()
}

#[test]
fn only_the_right_key_is_recognised_and_only_for_its_models() {
    let ring = Keyring::new(&auth(sluice_config::KeyLimit::default()), &KeyUsage::default());
    assert_eq!(ring.authenticate(None).unwrap_err(), KeyError::Missing);
    assert_eq!(ring.authenticate(Some("Secret")).unwrap_err(), KeyError::Unknown);
    assert!(ring.authenticate(["foreign", "secret"]).is_ok(), "a foreign token does not hide a key");
    let key = known(&ring);
    assert!(key.may_use(Some(ModelId::new(1))));
    assert!(!key.may_use(Some(ModelId::new(0))));
    assert!(!key.may_use(None));
}

#[test]
fn requests_in_flight_are_counted_until_dropped_and_across_a_reload() {
    let usage = KeyUsage::default();
    let limit = sluice_config::KeyLimit { in_flight: Some(1), ..sluice_config::KeyLimit::default() };
    let now = Instant::now();
    let first = known(&Keyring::new(&auth(limit.clone()), &usage)).start_request(now).unwrap();
    let reloaded = Keyring::new(&auth(limit), &usage);
    let key = known(&reloaded);
    assert!(key.start_request(now).is_err());
    drop(first);
    assert!(key.start_request(now).is_ok());
}

#[test]
fn a_rate_allows_a_burst_and_then_its_pace() {
    let limit = sluice_config::KeyLimit { requests_per_minute: Some(60), ..sluice_config::KeyLimit::default() };
    let ring = Keyring::new(&auth(limit), &KeyUsage::default());
    let key = known(&ring);
    let start = Instant::now();
    let at_once = (0..100).take_while(|_| key.start_request(start).is_ok()).count();
    assert_eq!(at_once, 10);
    let exceeded = KeyLimitExceeded { limit: KeyLimit::RequestRate(60), retry_after: Duration::from_secs(1) };
    assert_eq!(key.start_request(start).unwrap_err(), exceeded);
    assert!(key.start_request(start + Duration::from_secs(1)).is_ok());
    assert!(key.start_request(start + Duration::from_secs(1)).is_err());
}

#[test]
fn after_a_reload_a_key_owes_as_many_requests_and_tokens_at_the_new_rate() {
    let limit = |requests, tokens| sluice_config::KeyLimit {
        requests_per_minute: Some(requests),
        tokens_per_minute: Some(Tokens(tokens)),
        ..sluice_config::KeyLimit::default()
    };
    let (usage, now) = (KeyUsage::default(), Instant::now());
    let key = known(&Keyring::new(&auth(limit(6, 6_000)), &usage));
    for _ in 0..6 {
        key.start_request(now).unwrap().take(&need(1, 1_000), Some(0), now).unwrap();
    }
    assert!(key.start_request(now).is_err());
    let key = known(&Keyring::new(&auth(limit(6_000, 6_000_000)), &usage));
    key.start_request(now).unwrap().take(&need(1, 1_000_000), Some(0), now).unwrap();
    let key = known(&Keyring::new(&auth(limit(6, 6_000)), &usage));
    let after = |seconds| key.start_request(now + Duration::from_secs(seconds)).is_ok();
    assert!(!after(15) && after(20), "the eighth request of a minute, as the second is paid for");
}

#[test]
fn a_small_rate_may_be_used_at_once_and_a_large_one_for_ten_seconds() {
    let now = Instant::now();
    for (rate, at_once) in [(1, 1), (2, 2), (7, 7), (10, 10), (30, 10), (60, 10), (600, 100)] {
        let limit = sluice_config::KeyLimit { requests_per_minute: Some(rate), ..sluice_config::KeyLimit::default() };
        let key = known(&Keyring::new(&auth(limit), &KeyUsage::default()));
        let found = (0..200).take_while(|_| key.start_request(now).is_ok()).count();
        assert_eq!(found, at_once, "{rate} per minute");
        let exceeded = key.start_request(now).unwrap_err();
        assert_eq!(exceeded.limit, KeyLimit::RequestRate(rate.into()));
        assert!(key.start_request(now + exceeded.retry_after).is_ok(), "{rate} per minute: after its retry_after");
    }
}

fn need(slots: u32, tokens: u64) -> Need {
    Need { slots, prompt_tokens: tokens, output_tokens: 0 }
}

fn exceeded(result: Result<(), KeyNeedError>) -> Duration {
    match result {
        Err(KeyNeedError::Exceeded(exceeded)) => exceeded.retry_after,
        other => panic!("expected a limit on what runs at once, got {other:?}"),
    }
}

#[test]
fn sequences_and_tokens_are_counted_until_the_request_ends() {
    let limit = sluice_config::KeyLimit {
        sequences: Some(8),
        tokens: Some(Tokens(1_000)),
        ..sluice_config::KeyLimit::default()
    };
    let key = known(&Keyring::new(&auth(limit), &KeyUsage::default()));
    let now = Instant::now();
    let mut wide = key.start_request(now).unwrap();
    wide.take(&need(6, 600), Some(0), now).unwrap();
    for need in [need(3, 1), need(1, 401)] {
        assert_eq!(exceeded(key.start_request(now).unwrap().take(&need, Some(0), now)), SOON);
    }
    let mut beside = key.start_request(now).unwrap();
    beside.take(&need(2, 400), Some(0), now).unwrap();
    drop((wide, beside));
    key.start_request(now).unwrap().take(&need(8, 1_000), Some(0), now).unwrap();
}

#[test]
fn a_request_above_a_limit_by_itself_is_refused_with_the_limit() {
    let limits = sluice_config::KeyLimit {
        sequences: Some(8),
        tokens: Some(Tokens(1_000)),
        tokens_per_minute: Some(Tokens(900)),
        ..sluice_config::KeyLimit::default()
    };
    let key = known(&Keyring::new(&auth(limits), &KeyUsage::default()));
    assert_eq!(key.tokens_limit(), Some(900));
    let now = Instant::now();
    let cases = [
        (need(9, 1), LimitUnit::Sequences, 9, 8),
        (need(1, 1_001), LimitUnit::Tokens, 1_001, 1_000),
        (need(1, 901), LimitUnit::Tokens, 901, 900),
    ];
    for (need, unit, wanted, limit) in cases {
        let refused = key.start_request(now).unwrap().take(&need, Some(0), now);
        assert_eq!(refused, Err(KeyNeedError::TooLarge(TooLarge { unit, wanted, limit })));
    }
    key.start_request(now).unwrap().take(&need(8, 900), Some(0), now).expect("what was refused is not counted");
}

#[test]
fn a_rate_of_tokens_allows_a_minute_s_worth_at_once_and_then_its_pace() {
    let limit =
        sluice_config::KeyLimit { tokens_per_minute: Some(Tokens(6_000)), ..sluice_config::KeyLimit::default() };
    let key = known(&Keyring::new(&auth(limit), &KeyUsage::default()));
    let start = Instant::now();
    let take = |tokens, after: u64| {
        let now = start + Duration::from_secs(after);
        key.start_request(now).unwrap().take(&need(1, tokens), Some(0), now)
    };
    take(4_000, 0).unwrap();
    take(2_000, 0).unwrap();
    assert_eq!(exceeded(take(1_000, 0)), Duration::from_secs(10), "1,000 tokens are 10 s");
    take(1_000, 10).unwrap();
    assert_eq!(exceeded(take(100, 10)), Duration::from_secs(1));
}

fn counted(prompt: u64, output: u64) -> UsedTokens {
    UsedTokens::Counted { prompt, output, whole: true }
}

fn per_minute(tokens: u64) -> ApiKey {
    let limit =
        sluice_config::KeyLimit { tokens_per_minute: Some(Tokens(tokens)), ..sluice_config::KeyLimit::default() };
    known(&Keyring::new(&auth(limit), &KeyUsage::default()))
}

/// An estimate far below the real output, as other requests may have caused it.
const SHORT: Need = Need { slots: 1, prompt_tokens: 10, output_tokens: 5 };

/// Sends 100 requests at once, seven times, each with `output` output tokens. Streams report tokens
/// as they come.
fn used_by_bursts(key: &ApiKey, output: u64, stream: bool, mut now: Instant) -> u64 {
    let mut used = 0;
    for _ in 0..7 {
        let mut running = Vec::new();
        for _ in 0..100 {
            let mut request = key.start_request(now).unwrap();
            if request.take(&SHORT, None, now).is_ok() {
                running.push(request);
            }
        }
        now += Duration::from_millis(400);
        for mut request in running {
            if stream {
                (1..=output).for_each(|tokens| request.observe(tokens));
            }
            request.release();
            request.settle(counted(10, output), now);
            used += 10 + output;
        }
    }
    used
}

#[test]
fn many_requests_without_max_tokens_do_not_take_many_times_the_limit() {
    for (limit, output) in [(6_000, 4_000), (6_000, 8_000), (60_000, 4_000), (60_000, 20_000), (600_000, 30_000)] {
        for stream in [false, true] {
            // For a key with history, the charge bounds only a burst of answers of ordinary length.
            let histories = if output <= 4_000 { &[0, 1, 60][..] } else { &[0] };
            for history in histories.iter().copied() {
                let (key, mut now) = (per_minute(limit), Instant::now());
                for _ in 0..history {
                    let mut request = key.start_request(now).unwrap();
                    request.take(&SHORT, None, now).unwrap();
                    request.settle(counted(10, 5), now);
                    now += Duration::from_secs(1);
                }
                let used = used_by_bursts(&key, output, stream, now);
                assert!(used <= 3 * limit, "{used} of {limit}, {output} each, stream {stream}, history {history}");
                assert!(used > 0);
            }
        }
    }
}

#[test]
fn an_overestimate_is_given_back_and_an_excess_is_owed() {
    let (key, start) = (per_minute(6_000), Instant::now());
    let take = |now| -> Result<InFlight, KeyNeedError> {
        let mut request = key.start_request(now).unwrap();
        request.take(&need(1, 6_000), Some(0), now).map(|()| request)
    };
    let mut large = take(start).unwrap();
    assert_eq!(exceeded(take(start).map(drop)), Duration::from_secs(60));
    large.settle(counted(60, 0), start);
    assert_eq!(exceeded(take(start).map(drop)), Duration::from_millis(600), "60 tokens are 0.6 s");
    large.settle(counted(1 << 40, 0), start);
    let mut next = take(start + Duration::from_secs(1)).unwrap();
    next.settle(counted(60, 60_000), start + Duration::from_secs(1));
    let wait = exceeded(take(start + Duration::from_secs(1)).map(drop));
    assert!((Duration::from_secs(600)..Duration::from_secs(602)).contains(&wait), "{wait:?}");
    drop(take(start + Duration::from_secs(1) + wait).unwrap());
    let kept = exceeded(take(start + Duration::from_secs(1) + wait).map(drop));
    assert_eq!(kept, Duration::from_secs(60), "a request that ends without settlement keeps its charge");
}

#[test]
fn a_running_stream_is_charged_in_steps_and_holds_the_tokens_that_came() {
    let limit = sluice_config::KeyLimit {
        tokens: Some(Tokens(5_000)),
        tokens_per_day: Some(Tokens(100_000)),
        ..sluice_config::KeyLimit::default()
    };
    let (usage, now) = (KeyUsage::default(), Instant::now());
    let key = known(&Keyring::new(&auth(limit), &usage));
    let mut stream = key.start_request(now).unwrap();
    stream.take(&SHORT, None, now).unwrap();
    let used = || usage.tokens(now)[0].day.unwrap().0;
    let mut charges = vec![used()];
    for tokens in 1..=40_000 {
        stream.observe(tokens);
        if charges.last() != Some(&used()) {
            charges.push(used());
        }
    }
    assert!(charges.len() <= 4 && *charges.last().unwrap() >= 40_010, "{charges:?}");
    let beside = key.start_request(now).unwrap().take(&need(1, 1), Some(0), now);
    assert_eq!(exceeded(beside), SOON, "more tokens came than may be in use at once");
    stream.settle(counted(10, 40_000), now);
    assert_eq!(used(), 40_010);
    stream.release();
    key.start_request(now).unwrap().take(&need(1, 1), Some(0), now).unwrap();
}

#[test]
fn a_limit_for_a_day_is_named_and_survives_a_reload() {
    let limit =
        |tokens| sluice_config::KeyLimit { tokens_per_day: Some(Tokens(tokens)), ..sluice_config::KeyLimit::default() };
    let (usage, now) = (KeyUsage::default(), Instant::now());
    let key = known(&Keyring::new(&auth(limit(1_000)), &usage));
    assert_eq!(key.tokens_limit(), Some(1_000));
    let too_large = key.start_request(now).unwrap().take(&need(1, 1_001), Some(0), now);
    assert!(matches!(too_large, Err(KeyNeedError::TooLarge(TooLarge { limit: 1_000, .. }))), "{too_large:?}");
    key.start_request(now).unwrap().take(&need(1, 900), Some(0), now).unwrap();
    let key = known(&Keyring::new(&auth(limit(950)), &usage));
    let refused = key.start_request(now).unwrap().take(&need(1, 100), Some(0), now);
    let Err(KeyNeedError::Exceeded(KeyLimitExceeded { limit: named, retry_after })) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(named, KeyLimit::DayTokens(950));
    assert!(retry_after >= Duration::from_secs(24 * 3_600));
    key.start_request(now).unwrap().take(&need(1, 50), Some(0), now).unwrap();
    let shown = usage.tokens(now);
    assert_eq!((&*shown[0].name, shown[0].minute, shown[0].day), ("team-a", None, Some((950, 950))));
}
