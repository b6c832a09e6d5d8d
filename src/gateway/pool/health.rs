//! Whether a backend may get work: one small state machine with three inputs.
//!
//! - the active probe (`/health`): success puts a backend into rotation or probation; `probe_failures` misses in a row
//!   take it down;
//! - the requests themselves: connect failures, 5xx and timeouts eject ([`Breaker`]); a 4xx is the
//!   client's fault and never counts;
//! - progress: requests in flight, no token for too long and counters that stand still mean a hung
//!   engine although its `/health` still says 200.
//!
//! ```text
//!   Starting --probe ok--> Ready --tripped / hung--> Ejected --time over and probe ok--> Probation
//!   Ready, Ejected, Probation --probe misses--> Down --probe ok--> Probation --first success--> Ready
//!                                                 Probation --failure--> Ejected (twice as long)
//! ```
//! In probation a backend carries one request at a time: the half-open trial.
//! Time is a parameter. Draining is a decision of the operator, not health: it is kept beside this.

use std::time::Duration;

use tokio::time::Instant;

use super::breaker::{Breaker, RecentAnswers};

/// Thresholds and durations of health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthRules {
    /// Probe misses in a row that take a backend down; at least 1.
    pub probe_failures: u32,
    /// Failed requests in a row that eject; at least 1.
    pub request_failures: u32,
    /// The first ejection lasts this long; each further one twice as long.
    pub eject_base: Duration,
    /// The longest ejection.
    pub eject_max: Duration,
}

/// A failure of a request that is the fault of the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendFault {
    /// No connection: the port is closed, or the host is unreachable.
    Connect,
    /// A 5xx status, an in-stream error, a broken or unreadable response.
    Response,
    /// No byte in time.
    Timeout,
    /// Requests in flight and no progress at all.
    Hung,
    /// The engine refuses the gateway's own credentials.
    Credentials,
}

/// An engine refuses the credentials that the gateway itself sends. A client's credentials never lead to this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedGateway {
    /// The status of its answer: 401 or 403.
    pub status: u16,
    /// It refused a probe, whose credentials are those of every request; otherwise a request.
    pub by_probe: bool,
}

impl RefusedGateway {
    /// The state and what to do about it. `has_key`: the backend has an `api_key`.
    pub fn text(self, has_key: bool) -> String {
        let advice = match has_key {
            true => "`api_key` of the backend is not the engine's key; correct it",
            false => "the engine wants a key; set `api_key` of the backend",
        };
        format!("the engine refuses the gateway's credentials with status {}: {advice}", self.status)
    }
}

impl BackendFault {
    /// What failed, for logs and the admin API.
    pub fn text(self) -> &'static str {
        match self {
            Self::Connect => "failed connections",
            Self::Response => "failed responses",
            Self::Timeout => "timeouts",
            Self::Hung => "stalled streams",
            Self::Credentials => "refused credentials",
        }
    }
}

/// What a failure did to the backend's place in rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: it was counted, or the backend was out of rotation already.
    #[default]
    Counted,
    /// Enough failures for an ejection, but no other backend of the pool is ready.
    Spared,
    /// The backend is out of rotation, at least for this long.
    Ejected(Duration),
}

/// The health of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not probed successfully since it was configured.
    Starting,
    /// In rotation.
    Ready,
    /// In rotation for one request at a time.
    Probation,
    /// Out of rotation until a time, for a fault.
    Ejected {
        /// The earliest time of the next attempt.
        until: Instant,
        /// The cause.
        fault: BackendFault,
    },
    /// Its probe fails.
    Down,
}

impl Phase {
    /// The label used in metrics, logs and the admin API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Probation => "probation",
            Self::Ejected { .. } => "ejected",
            Self::Down => "down",
        }
    }
}

/// Successes in a row after which earlier ejections are forgiven.
const FORGIVEN_AFTER: u32 = 64;

/// The health of one backend.
#[derive(Clone, Debug)]
pub struct BackendHealth {
    phase: Phase,
    breaker: Breaker,
    probe_misses: u32,
    /// Ejections not yet forgiven; the exponent of the next one's length.
    strikes: u32,
    successes: u32,
    refused: Option<RefusedGateway>,
}

impl Default for BackendHealth {
    fn default() -> Self {
        Self {
            phase: Phase::Starting,
            breaker: Breaker::default(),
            probe_misses: 0,
            strikes: 0,
            successes: 0,
            refused: None,
        }
    }
}

impl BackendHealth {
    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Requests it may carry at once as far as health is concerned; `None` is no bound.
    pub fn allowance(&self) -> Option<u32> {
        match self.phase {
            Phase::Ready => None,
            Phase::Probation => Some(1),
            Phase::Starting | Phase::Ejected { .. } | Phase::Down => Some(0),
        }
    }

    /// How its last requests ended, since its last ejection.
    pub fn recent(&self) -> RecentAnswers {
        self.breaker.recent()
    }

    /// Its engine refuses the gateway's credentials.
    pub fn refused(&self) -> Option<RefusedGateway> {
        self.refused
    }

    /// The engine refused the gateway's credentials. Returns whether it did not before.
    pub fn refuse(&mut self, refused: RefusedGateway) -> bool {
        self.refused.replace(refused).is_none()
    }

    /// The engine accepted the credentials of a probe. A refused request stays: not every engine asks probes for a key.
    pub fn accepted_probe(&mut self) {
        self.refused = self.refused.filter(|refused| !refused.by_probe);
    }

    /// Not probed yet: a backend that a reload has just added may be up in a moment.
    pub fn is_untried(&self) -> bool {
        self.phase == Phase::Starting && self.probe_misses == 0
    }

    /// The probe succeeded.
    pub fn probe_ok(&mut self, now: Instant) {
        self.probe_misses = 0;
        self.phase = match self.phase {
            Phase::Starting => Phase::Ready,
            Phase::Down => Phase::Probation,
            Phase::Ejected { until, .. } if now >= until => Phase::Probation,
            other => other,
        };
    }

    /// The probe failed, or its status was not 200.
    pub fn probe_missed(&mut self, rules: &HealthRules) {
        self.probe_misses = self.probe_misses.saturating_add(1);
        // A backend that was never up stays "starting".
        if self.probe_misses >= rules.probe_failures && self.phase != Phase::Starting {
            self.phase = Phase::Down;
        }
    }

    /// A request succeeded.
    pub fn success(&mut self) {
        self.breaker.success();
        self.refused = None;
        self.successes = self.successes.saturating_add(1);
        if self.successes >= FORGIVEN_AFTER {
            self.strikes = 0;
        }
        if self.phase == Phase::Probation {
            self.phase = Phase::Ready;
        }
    }

    /// A request failed through the backend's fault. `only_one`: no other backend of the pool is ready.
    ///
    /// A ready backend that is the only one is ejected for refused connections and hangs, not for failed responses, timeouts
    /// or refused credentials: ejecting it would turn some failures into an outage. In probation every failure ejects, and so
    /// does one refusal of the gateway's credentials: the next request has the same ones.
    pub fn failure(&mut self, fault: BackendFault, only_one: bool, rules: &HealthRules, now: Instant) -> Verdict {
        self.successes = 0;
        let tripped = self.breaker.failure(rules.request_failures)
            || matches!(fault, BackendFault::Hung | BackendFault::Credentials);
        match self.phase {
            Phase::Ready if !tripped => return Verdict::Counted,
            Phase::Ready if only_one && !matches!(fault, BackendFault::Connect | BackendFault::Hung) => {
                return Verdict::Spared;
            }
            Phase::Ready | Phase::Probation => {}
            Phase::Starting | Phase::Ejected { .. } | Phase::Down => return Verdict::Counted,
        }
        let length = rules.eject_base.saturating_mul(1 << self.strikes.min(16)).min(rules.eject_max);
        self.strikes = self.strikes.saturating_add(1);
        self.breaker = Breaker::default();
        self.phase = Phase::Ejected { until: now + length, fault };
        Verdict::Ejected(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: HealthRules = HealthRules {
        probe_failures: 2,
        request_failures: 3,
        eject_base: Duration::from_secs(1),
        eject_max: Duration::from_secs(30),
    };

    fn ready(now: Instant) -> BackendHealth {
        let mut health = BackendHealth::default();
        health.probe_ok(now);
        assert_eq!(health.phase(), Phase::Ready);
        health
    }

    fn fail(health: &mut BackendHealth, times: u32, fault: BackendFault, now: Instant) {
        for _ in 0..times {
            health.failure(fault, false, &RULES, now);
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
        assert_eq!(
            health.phase(),
            Phase::Ejected { until: until + Duration::from_secs(2), fault: BackendFault::Response }
        );
    }

    #[test]
    fn one_success_ends_probation() {
        let now = Instant::now();
        let mut health = ready(now);
        fail(&mut health, 3, BackendFault::Timeout, now);
        health.probe_ok(now + Duration::from_secs(1));
        health.success();
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
            let verdicts = [(); 3].map(|()| health.failure(fault, true, &RULES, now));
            assert_eq!(matches!(health.phase(), Phase::Ejected { .. }), ejected, "{fault:?}");
            assert_eq!(verdicts.contains(&Verdict::Ejected(RULES.eject_base)), ejected, "{fault:?}");
            assert_eq!(verdicts[2] == Verdict::Spared, !ejected, "{fault:?}");
            assert_eq!(health.recent().is_failing(), !ejected, "{fault:?}");
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
        let verdict = health.failure(BackendFault::Credentials, false, &RULES, now);
        assert_eq!(verdict, Verdict::Ejected(RULES.eject_base));
        health.probe_ok(now + RULES.eject_base);
        health.accepted_probe();
        assert!(health.refused().is_some(), "a probe may need no key");
        health.success();
        assert_eq!((health.refused(), health.phase()), (None, Phase::Ready));
        assert!(health.refuse(refused(true)));
        health.accepted_probe();
        assert_eq!(health.refused(), None);
    }

    /// Every sequence of up to six events from every side: the invariants hold in each state.
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
                        2 => health.success(),
                        3 => {
                            health.failure(BackendFault::Connect, false, &RULES, now);
                        }
                        4 => {
                            health.failure(BackendFault::Response, true, &RULES, now);
                        }
                        5 => {
                            health.failure(BackendFault::Hung, true, &RULES, now);
                        }
                        _ => now += Duration::from_secs(1),
                    }
                    rest /= events;
                    if let Phase::Ejected { until, .. } = health.phase() {
                        assert!(until <= now + RULES.eject_max);
                    }
                    // Nothing but a probe brings a backend into rotation that was out of it.
                    let was_out = matches!(before, Phase::Starting | Phase::Ejected { .. } | Phase::Down);
                    let is_in = matches!(health.phase(), Phase::Ready | Phase::Probation);
                    assert!(!is_in || probed);
                    assert!(!(was_out && health.phase() == Phase::Ready) || before == Phase::Starting);
                }
            }
        }
    }
}
