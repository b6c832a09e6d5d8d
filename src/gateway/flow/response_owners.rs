//! Which backend has generated a stored response, and for which API key.
//!
//! An engine keeps the responses of `/v1/responses` in its own memory. Requests that name one must go to that engine, and come
//! with the key for which it was generated: the engine itself does not know keys. There are two kinds:
//! - `/v1/responses/{id}` (see `stored.rs`).
//! - `/v1/responses` with `previous_response_id`, which continues a stored conversation. The engine puts all of it into the
//!   prompt, so with another key's id a client would read what that key has sent. Without keys, one that continues an unknown
//!   response goes to any engine.
//!
//! Bounds: [`MAX_RESPONSES`] ids for [`LIFETIME`]; the oldest are removed first. An id keeps its first key.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::keys::ApiKey;
use crate::pool::{Address, Admission};
use sluice_core::openai::Refusal;

/// The most responses that are remembered, at about 200 bytes each.
const MAX_RESPONSES: usize = 65_536;
/// How long a response is remembered.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// The backend and the key of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResponseOwner {
    /// The name of the client's key, where keys are required.
    pub(super) key: Option<Arc<str>>,
    pub(super) pool: Arc<str>,
    pub(super) backend: Arc<str>,
    /// Tokens of the conversation up to this response, its output included; 0 until the response has ended.
    pub(super) tokens: u64,
}

/// The owners of responses, by id.
#[derive(Debug, Default)]
pub(super) struct ResponseOwners {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    by_id: HashMap<Arc<str>, ResponseOwner>,
    /// Ids in the order in which they were first seen.
    by_age: VecDeque<(Instant, Arc<str>)>,
}

impl ResponseOwners {
    pub(super) fn remember(&self, id: &str, owner: ResponseOwner, now: Instant) {
        let mut table = self.table.lock();
        table.forget(now, MAX_RESPONSES - 1);
        match table.by_id.get_mut(id) {
            // Clients can choose ids, so an id may occur again. It stays with its first key.
            Some(known) if known.key == owner.key => *known = owner,
            Some(_) => {}
            None => {
                let id: Arc<str> = id.into();
                table.by_age.push_back((now, Arc::clone(&id)));
                table.by_id.insert(id, owner);
            }
        }
    }

    /// Notes the tokens of the conversation that a response of this key ends.
    pub(super) fn note_tokens(&self, id: &str, key: Option<&Arc<str>>, tokens: u64) {
        let mut table = self.table.lock();
        if let Some(owner) = table.by_id.get_mut(id).filter(|owner| owner.key.as_ref() == key) {
            owner.tokens = tokens;
        }
    }

    /// Refuses a request that would store its response under an id of another key: the engine would replace that response.
    pub(super) fn check_new(&self, id: Option<&str>, key: Option<&ApiKey>) -> Result<(), Refusal> {
        let is_taken = |id| {
            let owner = self.table.lock().by_id.get(id).cloned();
            owner.is_some_and(|owner| owner.key.as_ref() != key.map(ApiKey::name))
        };
        if !id.is_some_and(is_taken) {
            return Ok(());
        }
        let message = "'request_id' is the id of another response; leave it out, or choose another".to_owned();
        Err(Refusal::BadRequest { message, param: Some("request_id") })
    }

    fn find(&self, id: &str, key: Option<&Arc<str>>, now: Instant) -> Option<ResponseOwner> {
        let mut table = self.table.lock();
        table.forget(now, MAX_RESPONSES);
        table.by_id.get(id).filter(|owner| owner.key.as_ref() == key).cloned()
    }
}

impl Table {
    /// Removes expired entries, and the oldest beyond `most`.
    fn forget(&mut self, now: Instant, most: usize) {
        while let Some((since, _)) = self.by_age.front() {
            if self.by_age.len() <= most && now.saturating_duration_since(*since) < LIFETIME {
                return;
            }
            if let Some((_, id)) = self.by_age.pop_front() {
                self.by_id.remove(&id);
            }
        }
    }
}

/// The owner of the response that a request continues. `None`: the request continues none, or an unknown one and no keys are
/// required.
pub(super) fn continued(
    owners: &ResponseOwners,
    admission: &Admission,
    id: Option<&str>,
    key: Option<&ApiKey>,
) -> Result<Option<ResponseOwner>, Refusal> {
    let Some(id) = id else { return Ok(None) };
    match locate(owners, admission, id, key) {
        None if key.is_some() => Err(Refusal::UnknownResponse { id: id.to_owned() }),
        located => Ok(located.map(|(owner, _)| owner)),
    }
}

/// The owner of a response, if this key made it, and the address of its backend.
pub(super) fn locate(
    owners: &ResponseOwners,
    admission: &Admission,
    id: &str,
    key: Option<&ApiKey>,
) -> Option<(ResponseOwner, Arc<Address>)> {
    let owner = owners.find(id, key.map(ApiKey::name), Instant::now())?;
    let address = address_of(admission, &owner)?;
    Some((owner, address))
}

/// The address of the backend; `None` if it is no longer configured.
fn address_of(admission: &Admission, owner: &ResponseOwner) -> Option<Arc<Address>> {
    let pools = admission.view();
    let pool = pools.iter().find(|pool| pool.name == owner.pool)?;
    let backend = pool.backends.iter().find(|backend| backend.name == owner.backend && !backend.removed)?;
    Some(Arc::clone(&backend.address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(key: &str, backend: &str) -> ResponseOwner {
        ResponseOwner { key: Some(key.into()), pool: "p".into(), backend: backend.into(), tokens: 0 }
    }

    fn found(owners: &ResponseOwners, id: &str, key: &str, now: Instant) -> Option<Arc<str>> {
        owners.find(id, Some(&key.into()), now).map(|owner| owner.backend)
    }

    #[test]
    fn only_the_key_that_made_a_response_finds_it_and_keeps_it() {
        let (owners, now) = (ResponseOwners::default(), Instant::now());
        owners.remember("r", owner("mine", "b0"), now);
        owners.remember("r", owner("theirs", "b1"), now);
        assert_eq!(found(&owners, "r", "mine", now).as_deref(), Some("b0"));
        assert_eq!(found(&owners, "r", "theirs", now), None);
        assert_eq!(owners.find("r", None, now), None);
        owners.note_tokens("r", Some(&"theirs".into()), 9);
        owners.note_tokens("r", Some(&"mine".into()), 7);
        assert_eq!(owners.find("r", Some(&"mine".into()), now).map(|owner| owner.tokens), Some(7));
        owners.remember("r", owner("mine", "b1"), now);
        assert_eq!(found(&owners, "r", "mine", now).as_deref(), Some("b1"));
    }

    #[test]
    fn responses_are_forgotten_after_their_lifetime_and_the_oldest_beyond_the_bound() {
        let (owners, now) = (ResponseOwners::default(), Instant::now());
        for number in 0..=MAX_RESPONSES {
            owners.remember(&format!("r{number}"), owner("k", "b"), now);
        }
        assert_eq!(found(&owners, "r0", "k", now), None);
        assert!(found(&owners, "r1", "k", now).is_some());
        assert_eq!(owners.table.lock().by_id.len(), MAX_RESPONSES);
        assert_eq!(found(&owners, "r1", "k", now + LIFETIME), None);
        assert_eq!(owners.table.lock().by_id.len(), 0);
    }
}
