//! `GET /admin/events`: the state of the gateway as server-sent events, once a second.
//!
//! While there are listeners, one task makes the events ([`snapshot`](super::snapshot)) for all. A
//! listener gets the latest events at once, and then each new one. A slow listener misses events.
//! When the token changes, all streams end.
//!
//! Bounds: [`STREAMS_MAX`] streams, each with at most the latest event of every kind, shared by the
//! streams. A client that takes nothing for ten seconds is disconnected
//! ([`connections`](super::connections)).

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::connections::{Phase, Progress};
use super::control::Control;
use super::snapshot::{Frames, KINDS};

/// Most streams: a quarter of the connections, so that scrapes and changes find room.
pub(super) const STREAMS_MAX: usize = 16;
const EVERY: Duration = Duration::from_secs(1);

pub(super) struct Events {
    control: Arc<dyn Control>,
    room: Arc<Semaphore>,
    /// The channel of events, while there are listeners.
    current: Mutex<Option<watch::Sender<Frames>>>,
}

impl Events {
    pub(super) fn new(control: Arc<dyn Control>) -> Arc<Self> {
        Arc::new(Self { control, room: Arc::new(Semaphore::new(STREAMS_MAX)), current: Mutex::default() })
    }

    /// Adds a listener; `None` if there are too many.
    pub(super) fn listen(self: &Arc<Self>) -> Option<EventStream> {
        let room = Arc::clone(&self.room).try_acquire_owned().ok()?;
        let mut current = self.current.lock();
        let frames = match &*current {
            Some(sender) => sender.subscribe(),
            None => {
                let (sender, frames) = watch::channel(Frames::default());
                *current = Some(sender.clone());
                tokio::spawn(Arc::clone(self).publish(sender));
                frames
            }
        };
        Some(EventStream::new(frames, room))
    }

    /// Makes events until no listener is left or the token changes.
    async fn publish(self: Arc<Self>, sender: watch::Sender<Frames>) {
        let token = self.control.access().token;
        let mut clock = interval(EVERY);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for turn in 1.. {
            clock.tick().await;
            {
                // The lock keeps a listener from joining a task that is ending.
                let mut current = self.current.lock();
                if sender.receiver_count() == 0 || self.control.access().token != token {
                    *current = None;
                    return;
                }
            }
            let (control, last) = (Arc::clone(&self.control), sender.borrow().clone());
            // The status takes locks that requests use, so it is made on a thread that may block.
            match tokio::task::spawn_blocking(move || last.next(&*control, turn)).await {
                Ok(frames) => {
                    sender.send_replace(frames);
                }
                Err(error) => tracing::error!(%error, "the events of the live page could not be made"),
            }
        }
    }
}

type Next = Pin<Box<dyn Future<Output = Option<watch::Receiver<Frames>>> + Send + Sync>>;

/// The events for one listener.
pub struct EventStream {
    next: Next,
    /// For each kind, the turn of the last event sent.
    sent: [u64; KINDS],
    pending: VecDeque<Bytes>,
    progress: Option<Arc<Progress>>,
    began: bool,
    _room: OwnedSemaphorePermit,
}

impl fmt::Debug for EventStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventStream").field("sent", &self.sent).finish_non_exhaustive()
    }
}

impl EventStream {
    fn new(mut frames: watch::Receiver<Frames>, room: OwnedSemaphorePermit) -> Self {
        frames.mark_changed();
        let pending = VecDeque::new();
        Self { next: next(frames), sent: [0; KINDS], pending, progress: None, began: false, _room: room }
    }

    pub(super) fn watch(&mut self, progress: Arc<Progress>) {
        self.progress = Some(progress);
    }

    /// The next event; `None` at the end of the stream.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                self.began = true;
                if let Some(progress) = &self.progress {
                    progress.enter_from(Phase::Idle, Phase::Writing);
                }
                return Poll::Ready(Some(event));
            }
            let Some(mut frames) = ready!(self.next.as_mut().poll(cx)) else { return Poll::Ready(None) };
            // The client has not taken the last event.
            let is_behind = self.began && self.progress.as_ref().is_some_and(|own| own.phase() == Phase::Writing);
            if !is_behind {
                let frames = frames.borrow_and_update();
                for (sent, (turn, event)) in self.sent.iter_mut().zip(&frames.events) {
                    if *turn > *sent {
                        *sent = *turn;
                        self.pending.push_back(event.clone());
                    }
                }
            }
            self.next = next(frames);
        }
    }
}

fn next(mut frames: watch::Receiver<Frames>) -> Next {
    Box::pin(async move {
        frames.changed().await.ok()?;
        Some(frames)
    })
}
