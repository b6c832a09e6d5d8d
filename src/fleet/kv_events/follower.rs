//! One engine's KV events, from the connection to the news for admission.
//!
//! Messages have numbers. A number that does not follow the last one means that messages were
//! lost, or that the engine has started again: then the blocks are forgotten, beginnings are kept
//! by the estimate again, and new blocks are followed from there on. A broken connection does the
//! same only if messages were lost meanwhile.
//!
//! A finished request is linked [`SETTLE`] after the end, when the events have come. If prompts of
//! at least [`SILENT_PROMPT`] tokens are served and no event comes for [`SILENT_AFTER`], the
//! estimate counts until an event comes. Bounds: [`PENDING_MAX`] requests wait to be linked; pauses
//! between connections grow from [`PAUSE_MIN`] to [`PAUSE_MAX`].

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::chains::Chains;
use super::zmtp::Subscriber;
use sluice_config::{Address, Endpoint};
use sluice_core::base::BackendId;
use sluice_core::vllm::kv_events::read_batch;
use sluice_gateway::connect::Connector;
use sluice_gateway::pool::{Admission, CacheNews, EventsState, EventsView, ServedPrompt};

/// vLLM publishes the events of a step right after the step, from another thread.
const SETTLE: Duration = Duration::from_millis(300);
const SILENT_AFTER: Duration = Duration::from_secs(30);
/// Prompt tokens from which a prompt has a block of its own, whatever the size of a block is.
const SILENT_PROMPT: u64 = 1_024;
const PENDING_MAX: usize = 4_096;
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(15);

pub(super) struct Follower {
    admission: Arc<Admission>,
    id: BackendId,
    name: String,
    address: Arc<Address>,
    served: mpsc::Receiver<ServedPrompt>,
    pending: VecDeque<(Instant, ServedPrompt)>,
    chains: Chains,
    /// The number that the next message should have; `None`: none was read yet.
    next: Option<u64>,
    /// When an event came last, or the connection was made.
    last_event: Instant,
    view: EventsView,
    /// The last reason for a missing connection, so that it is logged once.
    failed: Option<String>,
}

impl Follower {
    pub(super) fn new(
        admission: Arc<Admission>,
        id: BackendId,
        name: String,
        address: Arc<Address>,
        served: mpsc::Receiver<ServedPrompt>,
    ) -> Self {
        Self {
            admission,
            id,
            name,
            address,
            served,
            pending: VecDeque::new(),
            chains: Chains::default(),
            next: None,
            last_event: Instant::now(),
            view: EventsView::default(),
            failed: None,
        }
    }

    pub(super) async fn run(mut self) {
        let mut pause = PAUSE_MIN;
        loop {
            let before = self.view.state;
            let why = match self.follow().await {
                Ok(never) => match never {},
                Err(why) => why.to_string(),
            };
            if self.view.state == EventsState::Followed || before == EventsState::Followed {
                pause = PAUSE_MIN;
            }
            self.view.state = EventsState::Absent;
            self.put(CacheNews::default());
            if self.failed.as_ref() != Some(&why) {
                tracing::warn!(backend = self.name, "no KV events: {why}; cached prefixes are estimated");
                self.failed = Some(why);
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// Connects, and follows events until the connection fails.
    async fn follow(&mut self) -> io::Result<std::convert::Infallible> {
        let address = self.of_events();
        let connected = Connector::shared().connect(&address, CONNECT_LIMIT).await;
        let (_, stream) = connected.map_err(|error| io::Error::other(format!("{}: {error}", address.authority)))?;
        let hello = timeout(CONNECT_LIMIT, Subscriber::new(stream)).await;
        let mut events = hello.map_err(|_| io::Error::from(io::ErrorKind::TimedOut)).and_then(|hello| hello);
        let events = events.as_mut().map_err(|error| io::Error::other(format!("{}: {error}", address.authority)))?;
        self.last_event = Instant::now();
        self.put(CacheNews { subscribed: true, ..CacheNews::default() });
        loop {
            let due = self.pending.front().map(|(due, _)| *due);
            tokio::select! {
                message = events.message() => self.note(&message?)?,
                served = self.served.recv(), if self.pending.len() < PENDING_MAX => match served {
                    Some(served) => self.pending.push_back((Instant::now() + SETTLE, served)),
                    // The backend is gone, and this task is about to be ended.
                    None => std::future::pending().await,
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.link_due(),
            }
        }
    }

    /// The address of the events: without TLS, which vLLM's publisher does not have.
    fn of_events(&self) -> Address {
        let port = self.address.events.unwrap_or_default();
        let Endpoint { host, .. } = self.address.endpoint.clone();
        Address::new(Endpoint { https: false, host, port, prefix: String::new() }, None, None)
    }

    /// Reads a message: topic, number, batch.
    fn note(&mut self, frames: &[Bytes]) -> io::Result<()> {
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let [_, number, batch] = frames else {
            return self.lost().and(Err(invalid("a message does not have the three parts of KV events")));
        };
        let Ok(number) = <[u8; 8]>::try_from(&number[..]).map(u64::from_be_bytes) else {
            return self.lost().and(Err(invalid("a message has no number")));
        };
        let events = match read_batch(batch) {
            Ok(events) => events,
            Err(error) => return self.lost().and(Err(invalid(&error.to_string()))),
        };
        if self.next.is_some_and(|next| next != number) {
            tracing::warn!(
                backend = self.name,
                expected = self.next,
                number,
                "KV events were lost, or the engine has started again: cached prefixes are estimated until they are written again"
            );
            self.lost()?;
        }
        (self.next, self.last_event) = (number.checked_add(1), Instant::now());
        if self.view.state != EventsState::Followed {
            self.view.state = EventsState::Followed;
            self.failed = None;
            tracing::info!(backend = self.name, "KV events are followed");
        }
        let mut news = CacheNews::default();
        events.into_iter().for_each(|event| self.chains.apply(event, &mut news));
        self.put(news);
        Ok(())
    }

    fn lost(&mut self) -> io::Result<()> {
        let mut news = CacheNews::default();
        self.chains.reset(&mut news);
        (self.next, self.view.losses) = (None, self.view.losses + 1);
        self.put(news);
        Ok(())
    }

    /// Links the requests whose events have had time to come.
    fn link_due(&mut self) {
        let (now, mut news) = (Instant::now(), CacheNews::default());
        let mut is_missed = false;
        while let Some((_, served)) = self.pending.pop_front_if(|(due, _)| *due <= now) {
            let is_linked = self.chains.link(&served, &mut news);
            match is_linked {
                true => self.view.linked += 1,
                false => self.view.unlinked += 1,
            }
            is_missed |= !is_linked && served.prompt_tokens >= SILENT_PROMPT;
        }
        let is_silent = is_missed && self.last_event.elapsed() >= SILENT_AFTER;
        if self.view.state != EventsState::Silent && is_silent {
            self.view.state = EventsState::Silent;
            tracing::warn!(
                backend = self.name,
                "the engine serves prompts and publishes no KV events: cached prefixes are estimated; is it started with \
                 --kv-events-config and \"enable_kv_cache_events\": true, and is events_port its own port?"
            );
        }
        self.put(news);
    }

    fn put(&mut self, news: CacheNews) {
        self.view.blocks = self.chains.blocks() as u64;
        self.admission.put_cache_news(self.id, &self.address, &CacheNews { view: self.view, ..news });
    }
}
