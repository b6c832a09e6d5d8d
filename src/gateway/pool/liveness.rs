//! Whether a backend shows signs of life: bytes that it sent, and exchanges to cancel if it hangs.
//!
//! Plain data behind the admission's lock, except [`Progress`]: every request touches that for each
//! chunk, so it is atomic and shared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::decoding::Decoding;
use super::engine_work::WorkEvidence;

/// When a backend last sent bytes that show work, and the evidence about silent streams.
#[derive(Debug)]
pub(super) struct Progress {
    epoch: Instant,
    last_ms: AtomicU64,
    /// Requests that wait for their client to read. If all do, the backend does not count as
    /// silent.
    at_client: AtomicU32,
    is_leaving: AtomicBool,
    pub(super) work: Arc<WorkEvidence>,
    pub(super) decoding: Decoding,
}

/// While this guard lives, a request waits for the client and not for the backend.
#[derive(Debug)]
pub struct ClientWait<'a>(&'a Progress);

impl Drop for ClientWait<'_> {
    fn drop(&mut self) {
        self.0.at_client.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Progress {
    fn new(now: Instant) -> Self {
        Self {
            epoch: now,
            last_ms: AtomicU64::new(0),
            at_client: AtomicU32::new(0),
            is_leaving: AtomicBool::new(false),
            work: Arc::default(),
            decoding: Decoding::new(now),
        }
    }

    pub(super) fn set_leaving(&self, is_leaving: bool) {
        self.is_leaving.store(is_leaving, Ordering::Relaxed);
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }

    /// Notes bytes that show that the engine works.
    pub(super) fn record_progress(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.epoch).as_millis();
        self.last_ms.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn client_wait(&self) -> ClientWait<'_> {
        self.at_client.fetch_add(1, Ordering::Relaxed);
        ClientWait(self)
    }

    pub(super) fn at_client(&self) -> u32 {
        self.at_client.load(Ordering::Relaxed)
    }

    pub(super) fn last(&self) -> Instant {
        self.epoch + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
pub(super) struct Liveness {
    pub(super) progress: Arc<Progress>,
    /// Cancels the exchanges on the backend.
    pub(super) abort: CancellationToken,
    pub(super) hangs: u64,
    /// When the liveness check first saw requests in flight, since it last saw none.
    busy_since: Option<Instant>,
}

impl Liveness {
    pub(super) fn new(now: Instant) -> Self {
        let progress = Arc::new(Progress::new(now));
        Self { progress, abort: CancellationToken::new(), hangs: 0, busy_since: None }
    }

    pub(super) fn hung(&mut self) {
        self.hangs += 1;
        std::mem::replace(&mut self.abort, CancellationToken::new()).cancel();
    }

    /// How long the backend has had `requests` in flight without sending bytes that show work;
    /// `None` while no request waits for the backend.
    pub(super) fn silence(&mut self, requests: u32, now: Instant) -> Option<Duration> {
        if requests <= self.progress.at_client() {
            self.busy_since = None;
            return None;
        }
        let busy_since = *self.busy_since.get_or_insert(now);
        Some(now.saturating_duration_since(self.progress.last().max(busy_since)))
    }

    /// Since when `requests` are in flight and no byte showed work, as of the last liveness check.
    pub(super) fn silent_since(&self, requests: u32) -> Option<Instant> {
        let busy_since = self.busy_since.filter(|_| requests > self.progress.at_client())?;
        Some(self.progress.last().max(busy_since))
    }
}
