//! The state of a stream, and the time until which it may go on without a token: bytes alone are no
//! work.
//!
//! ```text
//!   Waiting --accepted--> Prefill --begun or token--> Generating <--token--> Silent
//!      |                     |                            |                    |
//!      `------ first_byte ---+----------------------------+------ no work -----+--> Stuck
//! ```
//!
//! Comments, pings, empty deltas, role-only chunks and lifecycle events (`response.created`,
//! `message_start`) are neither the first token nor progress: an API server without an engine may
//! go on sending them. Up to the first token the limit is `timeouts.first_byte`, then
//! `timeouts.idle` from token to token. Shortly before the limit, a stream whose engine has begun
//! becomes `Silent`, and the gateway looks at the engine's metrics (`pool/engine_work.rs`). While
//! the engine provably works, the stream goes on, for at most `timeouts.silent`; otherwise it is
//! `Stuck`.
//!
//! Bytes of a response that is not streamed are progress. Time is a parameter.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use crate::pool::{EngineWork, SilenceWatch};
use sluice_core::meter::StreamStage;

/// The longest time before the limit at which the gateway looks at a silent stream's engine; never
/// longer than half of `timeouts.idle`.
const LOOK_AHEAD: Duration = Duration::from_secs(5);
/// Interval at which a silent stream asks for the result of the look.
const ASK: Duration = Duration::from_millis(250);
/// The longest time beyond the limit for which a silent stream waits for the result of looks: two
/// looks and two late pages.
const LOOK_PENDING_MAX: Duration = Duration::from_secs(6);

#[derive(Debug)]
pub(super) enum StreamWork {
    /// Nothing of the stream came except pings; or the response is no stream.
    Waiting,
    /// The stream was accepted, and the engine has not begun.
    Prefill,
    /// The engine has begun.
    Generating,
    /// No token came for nearly as long as is allowed.
    Silent(SilenceWatch),
    /// Nothing shows that the engine works on the response.
    Stuck,
}

/// The longest times that a response may be without progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct SilenceLimits {
    /// `timeouts.idle`.
    pub(super) idle: Duration,
    /// `timeouts.silent`.
    pub(super) silent: Duration,
}

#[derive(Debug)]
pub(super) struct WorkClock {
    work: StreamWork,
    limits: SilenceLimits,
    /// Time of the last progress, or of the start.
    progress_at: Instant,
    /// When the response becomes stuck, if nothing comes and the engine shows no work.
    due: Instant,
    has_token: bool,
}

impl WorkClock {
    /// A response that begins at `now` and whose first token is due at `due`.
    pub(super) fn new(now: Instant, due: Instant, limits: SilenceLimits) -> Self {
        Self { work: StreamWork::Waiting, limits, progress_at: now, due, has_token: false }
    }

    /// Notes bytes of a response that is not streamed. Returns the time of the next look.
    pub(super) fn bytes(&mut self, now: Instant) -> Instant {
        self.due = now + self.limits.idle;
        self.due
    }

    /// Notes events, after which a stream is at `stage`. `progress`: one of them shows work.
    /// Returns the time of the next look.
    pub(super) fn events(&mut self, stage: StreamStage, progress: bool, now: Instant) -> Instant {
        match stage {
            StreamStage::Waiting => return self.due,
            StreamStage::Accepted => {
                self.work = StreamWork::Prefill;
                return self.due;
            }
            StreamStage::Begun if self.has_begun() && !progress => return self.next_look(),
            StreamStage::Begun => {
                self.work = StreamWork::Generating;
                // Tokens without text came, or a part of the response began.
                if progress {
                    self.progress_at = now;
                    self.due = self.due.max(now + self.limits.idle);
                }
            }
            StreamStage::Open => {
                if progress || !self.has_token {
                    self.work = StreamWork::Generating;
                    self.progress_at = now;
                    self.due = now + self.limits.idle;
                }
                self.has_token = true;
            }
        }
        self.next_look()
    }

    /// Called when the time of the look has come. Returns the time of the next look, or `None` if
    /// the response is stuck. `watch` begins to watch the engine.
    pub(super) fn look(&mut self, now: Instant, watch: impl FnOnce() -> SilenceWatch) -> Option<Instant> {
        let next = match &self.work {
            StreamWork::Generating => {
                self.work = StreamWork::Silent(watch());
                (now + ASK).max(self.due)
            }
            StreamWork::Silent(watch) => match watch.work() {
                EngineWork::Proven(at) => {
                    (at + self.limits.idle).min(self.progress_at + self.limits.silent).max(self.due)
                }
                EngineWork::Pending => (now + ASK).min(self.due + LOOK_PENDING_MAX).max(self.due),
                EngineWork::Unproven => self.due,
            },
            StreamWork::Waiting | StreamWork::Prefill => self.due,
            StreamWork::Stuck => return None,
        };
        if next <= now {
            self.work = StreamWork::Stuck;
            return None;
        }
        Some(next)
    }

    /// Extends all limits by `paused`, in which the engine was not read because of a slow client.
    /// Returns the time of the next look.
    pub(super) fn resume(&mut self, paused: Duration) -> Instant {
        self.due += paused;
        self.progress_at += paused;
        self.next_look()
    }

    fn has_begun(&self) -> bool {
        matches!(self.work, StreamWork::Generating | StreamWork::Silent(_))
    }

    /// The time of the next look: before the limit while the stream generates, otherwise the limit.
    fn next_look(&self) -> Instant {
        match self.work {
            StreamWork::Generating => self.due - LOOK_AHEAD.min(self.limits.idle / 2),
            _ => self.due,
        }
    }
}

/// Timer for the backend's silence. It is reset only when it fires, so that a chunk costs no timer
/// operation.
pub(super) struct SilenceTimer<'a> {
    pub(super) limit: Instant,
    pub(super) timer: Pin<&'a mut Sleep>,
}

impl SilenceTimer<'_> {
    pub(super) async fn expired(&mut self) {
        loop {
            self.timer.as_mut().await;
            if self.limit <= Instant::now() {
                return;
            }
            self.timer.as_mut().reset(self.limit);
        }
    }

    pub(super) fn set_limit(&mut self, limit: Instant) {
        self.limit = limit;
        // Only the deadline of the first byte can be later than the new limit, so this resets the
        // timer at most once.
        if limit < self.timer.deadline() {
            self.timer.as_mut().reset(limit);
        }
    }
}
