//! The open connections of the admin port: their number, deadlines, and the one that is closed when
//! there are too many.
//!
//! A connection is idle, sends a head, is served, or is written to. Phases that wait for the client
//! have deadlines. A stream of events is written to while the client has not taken the last event,
//! and otherwise idle. If [`CONNECTIONS_MAX`] connections are open, a new one closes the one that
//! has waited longest for a client. So clients that hold connections open cannot block scrapes or
//! probes of `/health`.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Most open connections: enough for a few scrapers, and a few browsers with six connections each.
pub(super) const CONNECTIONS_MAX: usize = 64;
/// Longest time that an idle connection stays open: longer than common scrape intervals (15 to 60
/// s), so that scrapers keep their connections.
const IDLE_MAX: Duration = Duration::from_secs(75);
/// Time limit of a request head, from the first byte.
const HEADER_MAX: Duration = Duration::from_secs(10);
/// Time limit of a write to a client: Prometheus' default scrape timeout.
const WRITE_MAX: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Head,
    Serving,
    Writing,
}

impl Phase {
    fn limit(self) -> Option<Duration> {
        match self {
            Self::Idle => Some(IDLE_MAX),
            Self::Head => Some(HEADER_MAX),
            Self::Writing => Some(WRITE_MAX),
            Self::Serving => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct Progress(Mutex<(Phase, Instant)>);

impl Progress {
    pub(super) fn new(now: Instant) -> Arc<Self> {
        Arc::new(Self(Mutex::new((Phase::Idle, now))))
    }

    pub(super) fn phase(&self) -> Phase {
        self.0.lock().0
    }

    pub(super) fn enter(&self, phase: Phase) {
        *self.0.lock() = (phase, Instant::now());
    }

    pub(super) fn enter_from(&self, from: Phase, to: Phase) {
        let mut current = self.0.lock();
        if current.0 == from {
            *current = (to, Instant::now());
        }
    }

    fn is_late(&self, now: Instant) -> bool {
        let (phase, since) = *self.0.lock();
        phase.limit().is_some_and(|limit| now.saturating_duration_since(since) >= limit)
    }

    /// The order of closing connections, lowest first: connections that wait for the client, the
    /// longest wait first, then connections that wait for the gateway.
    fn rank(&self) -> (bool, Instant) {
        let (phase, since) = *self.0.lock();
        (phase == Phase::Serving, since)
    }
}

#[derive(Debug, Default)]
pub(super) struct Connections(Vec<(Arc<Progress>, JoinHandle<()>)>);

impl Connections {
    /// Returns once fewer than [`CONNECTIONS_MAX`] are open.
    pub(super) async fn make_room(&mut self) {
        self.0.retain(|(_, task)| !task.is_finished());
        while self.0.len() >= CONNECTIONS_MAX {
            let oldest = (0..self.0.len()).min_by_key(|index| self.0[*index].0.rank()).unwrap_or_default();
            let (progress, task) = self.0.swap_remove(oldest);
            tracing::debug!(phase = ?progress.phase(), "closed an admin connection to make room for another");
            end(task).await;
        }
    }

    pub(super) fn add(&mut self, progress: Arc<Progress>, task: JoinHandle<()>) {
        self.0.push((progress, task));
    }

    pub(super) fn close_late(&mut self, now: Instant) {
        self.0.retain(|(_, task)| !task.is_finished());
        self.0.iter().filter(|(progress, _)| progress.is_late(now)).for_each(|(_, task)| task.abort());
    }

    /// Waits at most `limit` for all to end, and closes the rest.
    pub(super) async fn finish(mut self, limit: Duration) {
        let all = async {
            for (_, task) in &mut self.0 {
                let _ = task.await;
            }
        };
        if tokio::time::timeout(limit, all).await.is_err() {
            self.0.iter().for_each(|(_, task)| task.abort());
        }
    }
}

async fn end(task: JoinHandle<()>) {
    task.abort();
    let _ = task.await;
}

#[derive(Debug)]
pub(super) struct WatchedSocket {
    pub(super) socket: TcpStream,
    pub(super) progress: Arc<Progress>,
}

impl AsyncRead for WatchedSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(cx, buffer))?;
        if buffer.filled().len() > before {
            self.progress.enter_from(Phase::Idle, Phase::Head);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for WatchedSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    /// A flush shows that all bytes of a response are written.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
        self.progress.enter_from(Phase::Writing, Phase::Idle);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_phase_that_waits_for_the_client_has_its_deadline() {
        let progress = Progress::new(Instant::now());
        for (phase, limit) in [(Phase::Idle, IDLE_MAX), (Phase::Head, HEADER_MAX), (Phase::Writing, WRITE_MAX)] {
            progress.enter(phase);
            tokio::time::advance(limit - Duration::from_millis(1)).await;
            assert!(!progress.is_late(Instant::now()), "{phase:?}");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(progress.is_late(Instant::now()), "{phase:?}");
        }
        progress.enter(Phase::Serving);
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert!(!progress.is_late(Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_connection_that_has_waited_longest_for_its_client_is_closed_to_make_room() {
        let mut open = Connections::default();
        let mut all = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            tokio::time::advance(Duration::from_millis(1)).await;
            let progress = Progress::new(Instant::now());
            all.push(Arc::downgrade(&progress));
            let held = Arc::clone(&progress);
            open.add(
                progress,
                tokio::spawn(async move {
                    let _held = held;
                    std::future::pending::<()>().await;
                }),
            );
        }
        // The oldest waits for the gateway, and the second has just begun to wait.
        all[0].upgrade().unwrap().enter(Phase::Serving);
        all[1].upgrade().unwrap().enter(Phase::Writing);
        open.make_room().await;
        let gone: Vec<usize> = (0..all.len()).filter(|index| all[*index].upgrade().is_none()).collect();
        assert_eq!(gone, [2]);
        open.make_room().await;
        assert_eq!(open.0.len(), CONNECTIONS_MAX - 1);
    }
}
