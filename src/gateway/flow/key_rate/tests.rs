//! Rates, bursts and debts on virtual time.
//!
//! One test compares the window of a day with a list of all charges, another the lead of a key with
//! a sum of its tokens. Both draw charges, corrections and pauses at random.

use super::*;
use sluice_core::base::Rng;

fn limits(minute: Option<u64>, day: Option<u64>) -> TokenLimits {
    let limit = |whole| Limit { whole, part: whole };
    TokenLimits { minute: minute.map(limit), day: day.map(limit) }
}

fn hours(count: u64) -> Duration {
    Duration::from_secs(count * 3_600)
}

#[test]
fn what_was_used_in_a_day_returns_a_day_later() {
    let (mut budget, limits, start) = (TokenBudget::default(), limits(None, Some(1_000)), Instant::now());
    let mut take = |tokens, after| {
        budget.settle(limits, start + after);
        budget.take(tokens, limits, start + after)
    };
    take(400, Duration::ZERO).unwrap();
    take(600, hours(10)).unwrap();
    let Err(Exceeded::Day(wait)) = take(1, hours(11)) else { panic!("the day is used up") };
    assert!((hours(13)..=hours(13) + STEP).contains(&wait), "{wait:?}");
    let Err(Exceeded::Day(longer)) = take(401, hours(11)) else { panic!("the day is used up") };
    assert!((hours(23)..=hours(23) + STEP).contains(&longer), "{longer:?}");
    assert!(take(1, hours(24) - STEP).is_err(), "never before a day is over");
    take(400, hours(11) + wait).unwrap();
    assert!(take(1, hours(34) - STEP).is_err());
    take(600, hours(11) + longer).unwrap();
    assert_eq!(budget.used(limits), (0, 1_000));
    budget.settle(limits, start + hours(24 * 400));
    assert_eq!(budget.used(limits), (0, 0));
}

#[test]
fn no_window_of_a_day_has_more_than_the_limit_and_corrections_keep_the_sum() {
    let (mut rng, limit) = (Rng::new(5), limits(None, Some(10_000)));
    for _ in 0..20 {
        let (mut budget, mut used, start) = (TokenBudget::default(), Vec::new(), Instant::now());
        let mut now = start;
        for _ in 0..600 {
            now += Duration::from_secs(rng.below(5_000) as u64);
            budget.settle(limit, now);
            let tokens = 1 + rng.below(2_000) as u64;
            if budget.take(tokens, limit, now).is_ok() {
                // A part of the charge is given back at once.
                let kept = tokens - rng.below(tokens as usize) as u64;
                budget.correct(tokens, kept, limit);
                used.push((now, kept));
            }
            let within = |age: Duration| -> u64 {
                used.iter().filter(|(at, _)| now - *at < age).map(|(_, tokens)| tokens).sum()
            };
            assert!(within(DAY) <= 10_000);
            let sum = budget.used(limit).1;
            assert!((within(DAY)..=within(DAY + STEP)).contains(&sum), "{sum}");
        }
    }
}

#[test]
fn debt_is_paid_off_at_the_pace_and_is_bounded() {
    let (mut budget, limits, start) = (TokenBudget::default(), limits(Some(6_000), None), Instant::now());
    budget.settle(limits, start);
    budget.take(100, limits, start).unwrap();
    budget.correct(100, 36_000, limits);
    assert_eq!(budget.used(limits).0, 36_000);
    assert_eq!(budget.take(1_000, limits, start), Err(Exceeded::Minute(Duration::from_secs(310))));
    budget.correct(0, u64::MAX, limits);
    let Err(Exceeded::Minute(wait)) = budget.take(6_000, limits, start) else { panic!("it owes") };
    assert_eq!(wait, DEBT_MAX + MINUTE);
    let now = start + wait;
    budget.settle(limits, now);
    budget.take(6_000, limits, now).unwrap();
}

/// For any order of charges, corrections and payments, the key is ahead by the tokens used less the
/// tokens that the pace has paid.
#[test]
fn no_token_is_used_that_is_not_charged() {
    let mut rng = Rng::new(9);
    for _ in 0..200 {
        let rate = 60 + rng.below(60_000) as u64;
        let (limits, start) = (limits(Some(rate), None), Instant::now());
        let (mut budget, mut now, mut used) = (TokenBudget::default(), start, 0u64);
        let mut running: Vec<(u64, u64)> = Vec::new();
        for _ in 0..300 {
            now += Duration::from_millis(rng.below(4_000) as u64);
            budget.settle(limits, now);
            let tokens = 1 + rng.below(rate as usize / 4) as u64;
            if budget.take(tokens, limits, now).is_ok() {
                running.push((tokens, rng.below(tokens as usize * 3) as u64));
            }
            while running.len() > rng.below(20) {
                let (charged, actual) = running.swap_remove(rng.below(running.len()));
                budget.correct(charged, actual, limits);
                used += actual;
            }
        }
        for (charged, actual) in running {
            budget.correct(charged, actual, limits);
            used += actual;
        }
        let paid = (now - start).as_secs_f64() / 60.0 * rate as f64;
        let ahead = budget.used(limits).0 as f64;
        assert!(used as f64 <= paid + ahead + 2.0, "{used} used, {paid} paid, {ahead} ahead");
    }
}

#[test]
fn without_history_a_sequence_is_charged_with_a_large_part_of_a_small_limit_and_little_of_a_large_one() {
    let mut budget = TokenBudget::default();
    let need = Need { slots: 1, prompt_tokens: 10, output_tokens: 5 };
    let small = limits(Some(6_000), None);
    let large = limits(Some(2_000_000), Some(500_000_000));
    assert_eq!(budget.charge(&need, None, small), 3_000);
    assert_eq!(budget.charge(&need, None, large), UNKNOWN_OUTPUT);
    assert_eq!(budget.charge(&need, Some(64), large), 64, "what the request permits");
    assert_eq!(budget.charge(&need, Some(0), small), 5, "it generates nothing");
    let wide = Need { slots: 8, ..need };
    assert_eq!(budget.charge(&wide, None, small), 5_990, "never more than the limit");
    assert_eq!(budget.charge(&wide, None, large), 8 * UNKNOWN_OUTPUT);
    (0..50).for_each(|_| budget.learn(5));
    assert_eq!(budget.charge(&need, None, small), 1_500, "short answers of before are no proof");
    assert_eq!(budget.charge(&need, None, large), KNOWN_OUTPUT);
    (0..500).for_each(|_| budget.learn(9_000));
    assert!(budget.charge(&need, None, large) >= 9_000);
}
