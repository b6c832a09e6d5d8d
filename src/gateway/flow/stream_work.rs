//! What a stream is doing, and until when it may go on without a token: work and bytes are different things.
//!
//! ```text
//!   Waiting --accepted--> Prefill --begun or token--> Generating <--token--> Silent
//!      |                     |                            |                    |
//!      `------ first_byte ---+----------------------------+------ no work -----+--> Stuck
//! ```
//!
//! Comments, pings, empty deltas, role-only chunks and lifecycle events (`response.created`, `message_start`) are neither the first
//! token nor progress: a program that has lost its engine may go on to send them. Up to the first token the limit is
//! `timeouts.first_byte`, then `timeouts.idle` from token to token. Shortly before it is over, a stream whose engine has begun is
//! `Silent`, and the engine is looked at (`pool/engine_work.rs`). While the engine provably works, the stream goes on, for at
//! most `timeouts.silent`; otherwise it is `Stuck`.
//!
//! Bytes of a response that is not streamed are progress. Time is a parameter.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use crate::pool::{EngineWatch, EngineWork};
use sluice_core::meter::StreamStage;

/// How long before its limit a silent stream's engine is looked at, at most; never longer than half of `timeouts.idle`.
const LOOK_AHEAD: Duration = Duration::from_secs(5);
/// How often a silent stream asks what was seen of its engine.
const ASK: Duration = Duration::from_millis(250);
/// How long beyond its limit a silent stream waits for a look at its engine: two looks and two pages that are late.
const LOOK_PENDING_MAX: Duration = Duration::from_secs(6);

/// What a response is doing, until it has ended.
#[derive(Debug)]
pub(super) enum StreamWork {
    /// Nothing of a stream came, at most pings; or it is no stream.
    Waiting,
    /// It was accepted, and its engine has not begun.
    Prefill,
    /// Its engine has begun.
    Generating,
    /// No token for nearly as long as is allowed.
    Silent(EngineWatch),
    /// Nothing shows that its engine works for it.
    Stuck,
}

/// How long a response may be without progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct SilenceLimits {
    /// `timeouts.idle`.
    pub(super) idle: Duration,
    /// `timeouts.silent`.
    pub(super) silent: Duration,
}

/// One response's state and limit.
#[derive(Debug)]
pub(super) struct WorkClock {
    work: StreamWork,
    limits: SilenceLimits,
    /// The last progress, or the start.
    progress_at: Instant,
    /// When it is stuck, if nothing comes and nothing is seen of its engine.
    due: Instant,
    has_token: bool,
}

impl WorkClock {
    /// A response that begins at `now` and whose first token is due at `due`.
    pub(super) fn new(now: Instant, due: Instant, limits: SilenceLimits) -> Self {
        Self { work: StreamWork::Waiting, limits, progress_at: now, due, has_token: false }
    }

    /// Bytes of a response that is not streamed came. Returns when to look again.
    pub(super) fn bytes(&mut self, now: Instant) -> Instant {
        self.due = now + self.limits.idle;
        self.due
    }

    /// Events came, after which a stream is at `stage`; `progress`: one of them shows work. Returns when to look again.
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

    /// The time of the last look has passed. Returns when to look again, or `None` if the response is stuck. `watch` begins to
    /// watch its engine.
    pub(super) fn look(&mut self, now: Instant, watch: impl FnOnce() -> EngineWatch) -> Option<Instant> {
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

    /// The engine was not read for this long, because its client had not read. Returns when to look
    /// again.
    pub(super) fn resume(&mut self, paused: Duration) -> Instant {
        self.due += paused;
        self.progress_at += paused;
        self.next_look()
    }

    fn has_begun(&self) -> bool {
        matches!(self.work, StreamWork::Generating | StreamWork::Silent(_))
    }

    /// While it generates, its engine is looked at before the limit.
    fn next_look(&self) -> Instant {
        match self.work {
            StreamWork::Generating => self.due - LOOK_AHEAD.min(self.limits.idle / 2),
            _ => self.due,
        }
    }
}

/// Silence of the backend: the timer is reset only when it fires, so that a chunk costs no timer operation.
pub(super) struct SilenceTimer<'a> {
    pub(super) limit: Instant,
    pub(super) timer: Pin<&'a mut Sleep>,
}

impl SilenceTimer<'_> {
    /// Resolves when the limit has passed.
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
        // Only the deadline of the first byte can be later than the new limit, so this resets the timer at most once.
        if limit < self.timer.deadline() {
            self.timer.as_mut().reset(limit);
        }
    }
}
