//! Whether a backend may get work: a small state machine with three inputs.
//!
//! - The active probe (`/health`): success puts a backend into rotation or probation,
//!   `probe_failures` misses in a row take it down.
//! - Requests: connect failures, 5xx except 503, and timeouts eject ([`Breaker`]). A 4xx is the
//!   client's fault and does not count, except if the engine refuses the gateway's credentials.
//! - Progress: an engine with requests in flight, no token for too long and counters that stand
//!   still is hung, even if `/health` says 200.
//!
//! ```text
//!   Starting --probe ok--> Ready --tripped / hung--> Ejected --time over, probe ok--> Probation
//!   Ready, Ejected, Probation --probe misses--> Down --probe ok--> Probation
//!   Probation (one request at a time) --first success--> Ready
//!   Probation --failure--> Ejected (twice as long)
//! ```
//!
//! Failed responses, timeouts and refused credentials count by distinct origins
//! (`recent_origins.rs`): while an engine serves other clients, one client's failures eject
//! nothing. For failed responses and timeouts at most `health.max_ejected` of a pool are out at
//! once. Nothing keeps a backend in rotation after too many refused connections or a hang. Time is
//! a parameter. Draining is no part of health.

use std::time::Duration;

use tokio::time::Instant;

use super::breaker::{Breaker, RecentAnswers};
use super::recent_origins::RecentOrigins;
use crate::origin::Origin;

/// Thresholds and durations of health.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HealthRules {
    /// Probe misses in a row that take a backend down; at least 1.
    pub probe_failures: u32,
    /// Failed requests in a row after which a backend is ejected; at least 1.
    pub request_failures: u32,
    /// Length of the first ejection; each further one is twice as long.
    pub eject_base: Duration,
    /// The longest ejection.
    pub eject_max: Duration,
    /// Share of a pool, 0 to 1, that may be out of rotation when a backend is ejected for responses
    /// or timeouts.
    pub max_ejected: f64,
}

impl HealthRules {
    /// Backends of `members` that may be out of rotation at once for responses and timeouts: the
    /// share rounded down, but at least one if the share is above 0, and never all.
    pub fn most_ejected(&self, members: usize) -> usize {
        let share = (self.max_ejected.clamp(0.0, 1.0) * members as f64) as usize;
        share.max(usize::from(self.max_ejected > 0.0)).min(members.saturating_sub(1))
    }
}

/// A failure of a request that is the fault of the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendFault {
    /// No connection: the port is closed, or the host is unreachable.
    Connect,
    /// A 5xx status, an in-stream error, a broken or unreadable response.
    Response,
    /// No token or byte in time.
    Timeout,
    /// Requests in flight and no progress at all.
    Hung,
    /// The engine refuses the gateway's own credentials.
    Credentials,
}

/// An engine refuses the credentials that the gateway itself sends. A client's credentials never
/// lead to this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedGateway {
    /// The status of the engine's answer: 401 or 403.
    pub status: u16,
    /// Whether a probe was refused, not a request. A probe sends the same credentials as every
    /// request.
    pub by_probe: bool,
}

impl RefusedGateway {
    /// The state and the remedy, as text. `has_key`: the backend has an `api_key`.
    pub fn text(self, has_key: bool) -> String {
        let advice = match has_key {
            true => "`api_key` of the backend is not the engine's key; correct it",
            false => "the engine wants a key; set `api_key` of the backend",
        };
        format!("the engine refuses the gateway's credentials with status {}: {advice}", self.status)
    }
}

impl BackendFault {
    /// The fault, for logs and the admin API.
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

impl BackendFault {
    /// Whether the requests of one client may cause the fault, so that it counts by origin. The
    /// other faults are facts of the engine.
    pub(super) fn counts_by_origin(self) -> bool {
        match self {
            Self::Response | Self::Timeout | Self::Credentials => true,
            Self::Connect | Self::Hung => false,
        }
    }
}

/// Why a backend stays in rotation although enough requests failed for an ejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spared {
    /// The backend serves other clients.
    ServesOthers,
    /// No other backend of the pool is ready.
    OnlyOne,
    /// `health.max_ejected` of the pool are out of rotation.
    MaxEjected,
}

impl Spared {
    /// The reason, for a line of the log.
    pub fn text(self) -> &'static str {
        match self {
            Self::ServesOthers => "because it serves other clients",
            Self::OnlyOne => "because no other one of its pool is ready",
            Self::MaxEjected => "because health.max_ejected of its pool are out of rotation",
        }
    }
}

/// The effect of a failure on the backend's place in rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// The failure was only counted, or the backend was out of rotation already.
    #[default]
    Counted,
    /// Enough failures for an ejection, but the backend stays in rotation.
    Spared(Spared),
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
        /// The earliest time at which a successful probe ends the ejection.
        until: Instant,
        /// The cause.
        fault: BackendFault,
    },
    /// The probe fails.
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
/// Failures of one client among several that do not end a probation. The next request is then the
/// trial, so a client that fails on purpose cannot keep a backend out.
const TRIALS_OF_ONE: u32 = 16;

/// The health of one backend.
#[derive(Clone, Debug)]
pub struct BackendHealth {
    phase: Phase,
    breaker: Breaker,
    probe_misses: u32,
    /// Ejections not yet forgiven: the exponent of the next ejection's length.
    strikes: u32,
    successes: u32,
    refused: Option<RefusedGateway>,
    origins: RecentOrigins,
    /// Failed trials of this probation that did not end it.
    trials: u32,
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
            origins: RecentOrigins::default(),
            trials: 0,
        }
    }
}

impl BackendHealth {
    /// The current phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Requests that health permits at once; `None` is no bound.
    pub fn allowance(&self) -> Option<u32> {
        match self.phase {
            Phase::Ready => None,
            Phase::Probation => Some(1),
            Phase::Starting | Phase::Ejected { .. } | Phase::Down => Some(0),
        }
    }

    /// How the requests since the last ejection ended.
    pub fn recent(&self) -> RecentAnswers {
        self.breaker.recent()
    }

    /// Set while the engine refuses the gateway's credentials.
    pub fn refused(&self) -> Option<RefusedGateway> {
        self.refused
    }

    /// The engine refused the gateway's credentials. Returns whether that is new.
    pub fn refuse(&mut self, refused: RefusedGateway) -> bool {
        self.refused.replace(refused).is_none()
    }

    /// The engine accepted the credentials of a probe. A refusal of a request stays, because not
    /// every engine checks the key of a probe.
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

    /// The probe failed, or the status was not 200.
    pub fn probe_missed(&mut self, rules: &HealthRules) {
        self.probe_misses = self.probe_misses.saturating_add(1);
        // A backend that was never up stays "starting".
        if self.probe_misses >= rules.probe_failures && self.phase != Phase::Starting {
            self.phase = Phase::Down;
        }
    }

    pub(super) fn origins(&self) -> &RecentOrigins {
        &self.origins
    }

    /// Notes that a request of `origin` failed. Called before [`BackendHealth::failure`] judges it.
    pub(super) fn note_failed(&mut self, origin: Origin, now: Instant) {
        self.origins.note(origin, true, now);
    }

    pub(super) fn success(&mut self, origin: Origin, now: Instant) {
        self.origins.note(origin, false, now);
        self.breaker.success();
        self.refused = None;
        self.successes = self.successes.saturating_add(1);
        if self.successes >= FORGIVEN_AFTER {
            self.strikes = 0;
        }
        if self.phase == Phase::Probation {
            self.end_probation();
        }
    }

    /// Another rank of the same server was ejected. The strikes of both are then the same.
    pub(super) fn follow(&mut self, ejected: &Self) {
        if !matches!(self.phase, Phase::Starting | Phase::Down) {
            (self.phase, self.strikes, self.trials, self.successes) = (ejected.phase, ejected.strikes, 0, 0);
            self.breaker = Breaker::default();
        }
    }

    pub(super) fn end_probation(&mut self) {
        (self.phase, self.trials) = (Phase::Ready, 0);
    }

    /// The engine does not have the rank of the backend. A probe finds out when that changes.
    pub(super) fn lacks_rank(&mut self) {
        self.phase = Phase::Down;
    }

    /// A request failed through the backend's fault. `spared`: why faults that requests can cause
    /// must not eject the backend.
    ///
    /// `spared` does not count for refused connections and hangs. In phase `Ready`, the only
    /// backend of a pool is spared, since ejecting it would turn some failures into an outage. In
    /// probation every failure ejects, except the first [`TRIALS_OF_ONE`] of one client among
    /// several. One refusal of the gateway's credentials ejects, because the next request sends the
    /// same credentials.
    pub fn failure(
        &mut self,
        fault: BackendFault,
        spared: Option<Spared>,
        rules: &HealthRules,
        now: Instant,
    ) -> Verdict {
        self.successes = 0;
        let tripped = self.breaker.failure(rules.request_failures)
            || matches!(fault, BackendFault::Hung | BackendFault::Credentials);
        match self.phase {
            Phase::Ready if !tripped => return Verdict::Counted,
            Phase::Ready
                if fault.counts_by_origin()
                    && let Some(why) = spared =>
            {
                return Verdict::Spared(why);
            }
            Phase::Probation
                if fault.counts_by_origin() && spared == Some(Spared::ServesOthers) && self.trials < TRIALS_OF_ONE =>
            {
                self.trials += 1;
                return Verdict::Spared(Spared::ServesOthers);
            }
            Phase::Ready | Phase::Probation => {}
            Phase::Starting | Phase::Ejected { .. } | Phase::Down => return Verdict::Counted,
        }
        let length = rules.eject_base.saturating_mul(1 << self.strikes.min(16)).min(rules.eject_max);
        self.strikes = self.strikes.saturating_add(1);
        self.breaker = Breaker::default();
        self.trials = 0;
        self.phase = Phase::Ejected { until: now + length, fault };
        Verdict::Ejected(length)
    }
}

#[cfg(test)]
mod tests;
