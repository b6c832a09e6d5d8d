//! The state machine by itself.
//!
//! Tests which events move a backend to another phase, and which do not.

use super::*;

const RULES: HealthRules = HealthRules {
    probe_failures: 2,
    request_failures: 3,
    eject_base: Duration::from_secs(1),
    eject_max: Duration::from_secs(30),
    max_ejected: 0.5,
};

fn ready(now: Instant) -> BackendHealth {
    let mut health = BackendHealth::default();
    health.probe_ok(now);
    assert_eq!(health.phase(), Phase::Ready);
    health
}

fn fail(health: &mut BackendHealth, times: u32, fault: BackendFault, now: Instant) {
    for _ in 0..times {
        health.failure(fault, None, &RULES, now);
    }
}

#[test]
fn three_failures_in_a_row_eject_and_each_ejection_is_twice_as_long() {
    let now = Instant::now();
    let mut health = ready(now);
    fail(&mut health, 2, BackendFault::Connect, now);
    assert_eq!(health.phase(), Phase::Ready);
    fail(&mut health, 1, BackendFault::Connect, now);
    let until = now + Duration::from_secs(1);
    assert_eq!(health.phase(), Phase::Ejected { until, fault: BackendFault::Connect });
    health.probe_ok(now);
    assert!(matches!(health.phase(), Phase::Ejected { .. }), "a probe alone does not shorten it");
    health.probe_ok(until);
    assert_eq!(health.allowance(), Some(1));
    fail(&mut health, 1, BackendFault::Response, until);
    assert_eq!(health.phase(), Phase::Ejected { until: until + Duration::from_secs(2), fault: BackendFault::Response });
}

#[test]
fn one_success_ends_probation() {
    let now = Instant::now();
    let mut health = ready(now);
    fail(&mut health, 3, BackendFault::Timeout, now);
    health.probe_ok(now + Duration::from_secs(1));
    health.success(Origin::default(), now);
    assert_eq!(health.phase(), Phase::Ready);
}

#[test]
fn the_only_backend_is_not_ejected_for_its_answers_but_is_for_being_gone_or_hung() {
    let now = Instant::now();
    for (fault, ejected) in [
        (BackendFault::Response, false),
        (BackendFault::Timeout, false),
        (BackendFault::Credentials, false),
        (BackendFault::Connect, true),
        (BackendFault::Hung, true),
    ] {
        let mut health = ready(now);
        let verdicts = [(); 3].map(|()| health.failure(fault, Some(Spared::OnlyOne), &RULES, now));
        assert_eq!(matches!(health.phase(), Phase::Ejected { .. }), ejected, "{fault:?}");
        assert_eq!(verdicts.contains(&Verdict::Ejected(RULES.eject_base)), ejected, "{fault:?}");
        assert_eq!(verdicts[2] == Verdict::Spared(Spared::OnlyOne), !ejected, "{fault:?}");
        assert_eq!(health.recent().is_failing(), !ejected, "{fault:?}");
    }
}

#[test]
fn the_most_that_may_be_ejected_is_a_share_of_the_pool_and_never_all() {
    for (share, members, most) in
        [(0.5, 1, 0), (0.5, 2, 1), (0.5, 3, 1), (0.5, 8, 4), (0.1, 4, 1), (1.0, 4, 3), (0.0, 4, 0), (0.5, 0, 0)]
    {
        let rules = HealthRules { max_ejected: share, ..RULES };
        assert_eq!(rules.most_ejected(members), most, "{share} of {members}");
    }
}

#[test]
fn in_probation_failures_of_one_client_among_several_end_the_trial_only_after_many() {
    let now = Instant::now();
    let on_trial = || {
        let mut health = ready(now);
        fail(&mut health, 3, BackendFault::Response, now);
        health.probe_ok(now + Duration::from_secs(1));
        health
    };
    let spared = Some(Spared::ServesOthers);
    let mut health = on_trial();
    for _ in 0..TRIALS_OF_ONE {
        let verdict = health.failure(BackendFault::Response, spared, &RULES, now);
        assert_eq!((verdict, health.phase()), (Verdict::Spared(Spared::ServesOthers), Phase::Probation));
    }
    health.failure(BackendFault::Response, spared, &RULES, now);
    assert!(matches!(health.phase(), Phase::Ejected { .. }), "a trial has an end");
    for (fault, spared) in [
        (BackendFault::Connect, spared),
        (BackendFault::Hung, spared),
        (BackendFault::Response, None),
        (BackendFault::Response, Some(Spared::MaxEjected)),
    ] {
        let mut health = on_trial();
        health.failure(fault, spared, &RULES, now);
        assert!(matches!(health.phase(), Phase::Ejected { .. }), "{fault:?}, {spared:?}");
    }
}

#[test]
fn probe_misses_take_a_backend_down_but_not_one_that_never_was_up() {
    let now = Instant::now();
    let mut health = ready(now);
    health.probe_missed(&RULES);
    assert_eq!(health.phase(), Phase::Ready);
    health.probe_missed(&RULES);
    assert_eq!(health.phase(), Phase::Down);
    health.probe_ok(now);
    assert_eq!(health.phase(), Phase::Probation);
    let mut fresh = BackendHealth::default();
    (0..5).for_each(|_| fresh.probe_missed(&RULES));
    assert_eq!(fresh.phase(), Phase::Starting);
}

#[test]
fn one_refusal_of_the_gateway_s_credentials_ejects_and_its_reason_ends_with_it() {
    let now = Instant::now();
    let mut health = ready(now);
    let refused = |by_probe| RefusedGateway { status: 401, by_probe };
    assert!(health.refuse(refused(false)) && !health.refuse(refused(false)), "new once");
    let verdict = health.failure(BackendFault::Credentials, None, &RULES, now);
    assert_eq!(verdict, Verdict::Ejected(RULES.eject_base));
    health.probe_ok(now + RULES.eject_base);
    health.accepted_probe();
    assert!(health.refused().is_some(), "a probe may need no key");
    health.success(Origin::default(), now);
    assert_eq!((health.refused(), health.phase()), (None, Phase::Ready));
    assert!(health.refuse(refused(true)));
    health.accepted_probe();
    assert_eq!(health.refused(), None);
}

/// The invariants hold after every sequence of up to six events from all sides.
#[test]
fn exhaustively_no_sequence_of_events_breaks_the_machine() {
    let start = Instant::now();
    let events = 7usize;
    for length in 0..=6u32 {
        for code in 0..events.pow(length) {
            let (mut health, mut now, mut rest) = (BackendHealth::default(), start, code);
            let mut probed = false;
            for _ in 0..length {
                let before = health.phase();
                match rest % events {
                    0 => {
                        health.probe_ok(now);
                        probed = true;
                    }
                    1 => health.probe_missed(&RULES),
                    2 => health.success(Origin::default(), now),
                    3 => {
                        health.failure(BackendFault::Connect, None, &RULES, now);
                    }
                    4 => {
                        health.failure(BackendFault::Response, Some(Spared::OnlyOne), &RULES, now);
                    }
                    5 => {
                        health.failure(BackendFault::Hung, Some(Spared::OnlyOne), &RULES, now);
                    }
                    _ => now += Duration::from_secs(1),
                }
                rest /= events;
                if let Phase::Ejected { until, .. } = health.phase() {
                    assert!(until <= now + RULES.eject_max);
                }
                // Only a probe brings a backend back into rotation.
                let was_out = matches!(before, Phase::Starting | Phase::Ejected { .. } | Phase::Down);
                let is_in = matches!(health.phase(), Phase::Ready | Phase::Probation);
                assert!(!is_in || probed);
                assert!(!(was_out && health.phase() == Phase::Ready) || before == Phase::Starting);
            }
        }
    }
}
