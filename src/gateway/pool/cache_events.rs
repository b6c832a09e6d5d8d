//! Events about an engine's prefix cache correct the expectations of `prefix.rs`.
//!
//! A follower of the engine's events (in `sluice-fleet`) gets each finished request with a prompt
//! ([`ServedPrompt`]) and finds out in which blocks the engine has the beginnings of the prompt. It
//! returns [`CacheNews`]: beginnings that are *linked* to blocks stay until the news say that the
//! block is gone. The news also count written blocks, those of other clients included.
//!
//! While the events are not in order, and for requests that the events do not name, the estimate
//! counts. Bound: [`SERVED_MAX`] finished requests wait for the follower; further ones are not
//! linked.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::admission::Admission;
use super::grant::Grant;
use super::state::AdmissionState;
use sluice_config::Address;
use sluice_core::base::{BackendId, hash_two};
use sluice_core::openai::PromptPrefix;

const SERVED_MAX: usize = 1_024;

/// A finished request.
#[derive(Clone, Debug)]
pub struct ServedPrompt {
    /// The name of the request in the events.
    pub session: u64,
    /// The hashed beginnings of the prompt.
    pub prefix: Arc<PromptPrefix>,
    /// The tokens of the prompt, as the engine counted them.
    pub prompt_tokens: u64,
    /// Prompt tokens that the engine reports as cached; `None`: it does not report them.
    pub cached: Option<u64>,
}

/// Changes of an engine's prefix cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheNews {
    /// The cache was emptied, before everything else in these news.
    pub cleared: bool,
    /// Tokens in the blocks that the engine has written.
    pub written_tokens: u64,
    /// Beginnings whose blocks are known.
    pub linked: Vec<u64>,
    /// Linked beginnings whose blocks are gone.
    pub gone: Vec<u64>,
    /// Linked beginnings whose blocks are no longer known, because events were lost.
    pub unlinked: Vec<u64>,
    /// The follower's state after the news.
    pub view: EventsView,
}

/// Whether the events of an engine can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventsState {
    /// There is no connection, or no event has come yet.
    #[default]
    Absent,
    /// Events come in order.
    Followed,
    /// The engine serves prompts, and no events come.
    Silent,
}

impl EventsState {
    /// Every name [`EventsState::label`] can return.
    pub const LABELS: [&'static str; 3] = ["absent", "followed", "silent"];

    /// The name in metrics and the admin API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Followed => "followed",
            Self::Silent => "silent",
        }
    }
}

/// The follower of an engine's events, as shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventsView {
    /// Whether the events count.
    pub state: EventsState,
    /// Blocks in the engine's cache that the events have named.
    pub blocks: u64,
    /// Prompts that were linked to blocks.
    pub linked: u64,
    /// Prompts whose blocks the events did not name.
    pub unlinked: u64,
    /// How often events were lost: a gap in their numbers, or a message that could not be read.
    pub losses: u64,
}

#[derive(Debug)]
pub(super) struct EventFollower {
    served: mpsc::Sender<ServedPrompt>,
    pub(super) view: EventsView,
}

impl Admission {
    /// Begins to report finished requests of a backend to a follower of the engine's events.
    /// `None`: no backend with this id has this address.
    pub fn follow_events(&self, backend: BackendId, address: &Address) -> Option<mpsc::Receiver<ServedPrompt>> {
        let (served, reports) = mpsc::channel(SERVED_MAX);
        let mut state = self.shared.lock();
        let found = state.backend_mut(backend).filter(|found| *found.address == *address)?;
        found.events = Some(Box::new(EventFollower { served, view: EventsView::default() }));
        found.cache.set_followed(false);
        Some(reports)
    }

    /// Ends the reports: the events of the backend are no longer followed.
    pub fn stop_following_events(&self, backend: BackendId, address: &Address) {
        if let Some(found) = self.shared.lock().backend_mut(backend).filter(|found| *found.address == *address) {
            found.events = None;
            found.cache.set_followed(false);
        }
    }

    /// Corrects the expectations about a backend's prefix cache.
    pub fn put_cache_news(&self, backend: BackendId, address: &Address, news: &CacheNews) {
        let mut state = self.shared.lock();
        let AdmissionState { pools, backends, .. } = &mut *state;
        let Some(found) = backends.get_mut(backend.index()).and_then(Option::as_mut) else { return };
        let (Some(pool), Some(follower)) = (pools.get_mut(found.pool.index()), &mut found.events) else { return };
        if *found.address != *address {
            return;
        }
        follower.view = news.view;
        if news.cleared {
            found.cache.clear();
        }
        found.cache.wrote(news.written_tokens);
        found.cache.set_followed(news.view.state == EventsState::Followed);
        pool.prefixes.set_linked(&news.unlinked, backend, &found.cache, false);
        pool.prefixes.remove(&news.gone, backend);
        pool.prefixes.set_linked(&news.linked, backend, &found.cache, true);
    }
}

impl AdmissionState {
    /// A name for a request in the events of the backend.
    pub(super) fn new_session(&self, backend: BackendId) -> Option<u64> {
        let followed = self.backend(backend)?.events.is_some();
        followed.then(|| hash_two(self.rng.clone().next_u64(), self.grants))
    }

    pub(super) fn report_served(&self, grant: &Grant, prompt_tokens: u64, cached: Option<u64>) {
        if let Some(session) = grant.session
            && let Some(found) = self.backend(grant.backend)
            && let Some(follower) = &found.events
            && grant.allocation.is_one_sequence()
        {
            let _ = follower.served.try_send(ServedPrompt {
                session,
                prefix: Arc::clone(&grant.prefix),
                prompt_tokens,
                cached: found.cache.reported(cached),
            });
        }
    }
}
