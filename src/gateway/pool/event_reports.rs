//! Between a backend and the follower of the engine's events: finished requests go to the follower,
//! news about the prefix cache come back (`cache_events.rs`).
//!
//! Bound: [`SERVED_MAX`] finished requests wait for the follower; further ones are not linked.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::admission::Admission;
use super::cache_events::{CacheNews, EventFollower, EventsState, EventsView, ServedPrompt};
use super::grant::Grant;
use super::state::AdmissionState;
use sluice_config::Address;
use sluice_core::base::{BackendId, hash_two};

const SERVED_MAX: usize = 1_024;

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
        if news.subscribed {
            found.cache.subscribe();
        }
        let is_followed = news.view.state == EventsState::Followed;
        if is_followed {
            found.cache.first_event();
        }
        found.cache.wrote(news.written_tokens);
        found.cache.set_followed(is_followed);
        pool.prefixes.unlink(&news.unlinked, backend);
        pool.prefixes.remove(&news.gone, backend);
        pool.prefixes.link(&news.linked, backend, &found.cache);
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
            && !grant.prefix.beginnings.is_empty()
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
