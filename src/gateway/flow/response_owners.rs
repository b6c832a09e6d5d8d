//! The backend that generated a stored response, and the API key it was generated for.
//!
//! An engine keeps the responses of `/v1/responses` in memory. Requests that name one must go to
//! that engine and come with the same key, because the engine knows no keys. There are two kinds of
//! such requests:
//! - `/v1/responses/{id}` (see `stored.rs`).
//! - `/v1/responses` with `previous_response_id`, which continues a stored conversation. The engine
//!   puts all of it into the prompt, so with the id of another key's response a client could read
//!   the texts of that key. Without keys, a request that continues an unknown response goes to any
//!   engine.
//!
//! Bounds: [`MAX_RESPONSES`] ids for [`LIFETIME`]. Beyond that, the oldest id of the key with the
//! most ids is removed, by the rule in `shares`, so a key that stores without end forgets only its
//! own responses.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::keys::ApiKey;
use crate::pool::Admission;
use crate::shares::ledger::{HoldingId, Ledger};
use crate::shares::{Demand, GivesWay};
use sluice_config::Address;
use sluice_core::openai::Refusal;

/// The most responses that are remembered, at about 200 bytes each.
const MAX_RESPONSES: usize = 65_536;
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResponseOwner {
    /// The name of the client's key, if keys are required.
    pub(super) key: Option<Arc<str>>,
    pub(super) pool: Arc<str>,
    pub(super) backend: Arc<str>,
    /// Tokens of the conversation up to and including this response; 0 until the response has
    /// ended.
    pub(super) tokens: u64,
}

#[derive(Debug, Default)]
pub(super) struct ResponseOwners {
    table: Mutex<Table>,
}

/// The time at which an id was first seen, and the id.
type Seen = Option<(Instant, Arc<str>)>;

#[derive(Debug)]
struct Table {
    by_id: HashMap<Arc<str>, Remembered>,
    /// One unit for each id, with the time at which it was first seen.
    shares: Ledger<Option<Arc<str>>, Seen>,
}

#[derive(Debug)]
struct Remembered {
    owner: ResponseOwner,
    place: HoldingId,
}

impl Default for Table {
    fn default() -> Self {
        Self { by_id: HashMap::new(), shares: Ledger::new(GivesWay::Oldest, MAX_RESPONSES as u64, 0) }
    }
}

impl ResponseOwners {
    pub(super) fn remember(&self, id: &str, owner: ResponseOwner, now: Instant) {
        let mut table = self.table.lock();
        table.forget_expired(now);
        match table.by_id.get_mut(id) {
            // Clients can choose ids, so an id may occur again. It keeps the first key.
            Some(known) if known.owner.key == owner.key => known.owner = owner,
            Some(_) => {}
            None => table.add(id.into(), owner, now),
        }
    }

    /// Notes the number of tokens in the conversation that this key's response ends.
    pub(super) fn note_tokens(&self, id: &str, key: Option<&Arc<str>>, tokens: u64) {
        let mut table = self.table.lock();
        if let Some(owner) = table.by_id.get_mut(id).filter(|owner| owner.owner.key.as_ref() == key) {
            owner.owner.tokens = tokens;
        }
    }

    /// Number of responses that were forgotten because there were too many.
    pub(super) fn gave_way(&self) -> u64 {
        self.table.lock().shares.gave_way()
    }

    /// Refuses a request that would store a response under an id of another key, because the engine
    /// would replace that key's response.
    pub(super) fn check_new(&self, id: Option<&str>, key: Option<&ApiKey>) -> Result<(), Refusal> {
        let is_taken = |id| {
            let table = self.table.lock();
            table.by_id.get(id).is_some_and(|known| known.owner.key.as_ref() != key.map(ApiKey::name))
        };
        if !id.is_some_and(is_taken) {
            return Ok(());
        }
        let message = "'request_id' is the id of another response; leave it out, or choose another".to_owned();
        Err(Refusal::BadRequest { message, param: Some("request_id") })
    }

    fn find(&self, id: &str, key: Option<&Arc<str>>, now: Instant) -> Option<ResponseOwner> {
        let mut table = self.table.lock();
        table.forget_expired(now);
        table.by_id.get(id).map(|known| &known.owner).filter(|owner| owner.key.as_ref() == key).cloned()
    }
}

impl Table {
    /// Adds an id. Another id may be forgotten for it.
    fn add(&mut self, id: Arc<str>, owner: ResponseOwner, now: Instant) {
        let mut forgotten = Vec::new();
        let tag = Some((now, Arc::clone(&id)));
        let place = self.shares.enter(owner.key.clone(), Demand::of(1), tag, &mut forgotten);
        if let Some(place) = place {
            self.by_id.insert(id, Remembered { owner, place });
        }
        forgotten.into_iter().flatten().for_each(|(_, id)| self.remove(&id));
    }

    fn remove(&mut self, id: &str) {
        if let Some(known) = self.by_id.remove(id) {
            self.shares.leave(known.place);
        }
    }

    fn forget_expired(&mut self, now: Instant) {
        let expired = |since: &Instant| now.saturating_duration_since(*since) >= LIFETIME;
        while let Some(Some((since, id))) = self.shares.oldest()
            && expired(since)
        {
            let id = Arc::clone(id);
            self.remove(&id);
        }
    }
}

/// The owner of the response that a request continues. `None`: the request continues none, or an
/// unknown one while no keys are required.
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

/// The owner of a response, if it was generated for this key, and the address of the backend.
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

/// The address of the owner's backend; `None` if it is no longer configured.
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
        assert_eq!(owners.gave_way(), 1);
    }

    #[test]
    fn a_key_that_stores_without_end_forgets_its_own_responses_only() {
        let (owners, now) = (ResponseOwners::default(), Instant::now());
        let remember = |key: &str, number: usize| owners.remember(&format!("{key}{number}"), owner(key, "b"), now);
        (0..10).for_each(|number| remember("quiet", number));
        (0..MAX_RESPONSES + 100).for_each(|number| remember("loud", number));
        (10..30).for_each(|number| remember("quiet", number));
        let quiet = (0..30).filter(|number| found(&owners, &format!("quiet{number}"), "quiet", now).is_some());
        assert_eq!((quiet.count(), owners.table.lock().by_id.len()), (30, MAX_RESPONSES));
        assert_eq!(found(&owners, "loud129", "loud", now), None);
        assert!(found(&owners, "loud130", "loud", now).is_some());
    }
}
