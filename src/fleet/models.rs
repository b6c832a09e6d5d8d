//! The models and routes that engines report: `GET /v1/models`, and the paths in `/openapi.json`.
//!
//! An engine gets requests for every model of the pool if its list cannot be read ([`Unreadable`])
//! or has more than [`CARDS_MAX`] models. An engine's `max_model_len` is the highest of its cards.
//!
//! FastAPI generates `/openapi.json` at the first request for it, which keeps an API server busy
//! for a moment. So it is read only after an engine of the pool has refused a route. Engines
//! without it (`--disable-fastapi-docs`, vLLM's Rust frontend) show their routes only by refusals.
//!
//! Bounds: [`BODY_BYTES`] per response, [`CARDS_MAX`] models per engine.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::http::{FetchError, fetch};
use sluice_config::Address;
use sluice_core::base::BackendId;
use sluice_core::openai::Route;
use sluice_gateway::pool::{RouteSet, Served};

/// Largest body that is accepted, bytes; a card of vLLM has about 500.
const BODY_BYTES: usize = 8 << 20;
const CARDS_MAX: usize = 8_192;
/// Names per backend in a message.
const NAMES_SHOWN: usize = 4;
/// Backends shown in a message.
const BACKENDS_SHOWN: usize = 8;

/// One entry of a backend's `/v1/models`, as it was sent.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The name.
    pub id: String,
    /// Whether it is a LoRA adapter of another model.
    pub is_adapter: bool,
    /// The folder or name that it was loaded from.
    pub root: Option<String>,
    /// The card's context limit, tokens.
    pub max_model_len: Option<u64>,
    /// The whole card as JSON.
    pub json: Box<RawValue>,
}

/// Why the models that an engine serves are not known.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// There was no response.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The status is not a success.
    #[error("/v1/models responds with status {0}")]
    Status(u16),
    /// The body is not a list of models.
    #[error("/v1/models is not a list of models: {0}")]
    NotAList(#[from] serde_json::Error),
    /// It lists no model.
    #[error("/v1/models lists no model")]
    Empty,
    /// The list has more models than are kept.
    #[error("/v1/models lists more than {} models", CARDS_MAX)]
    TooMany,
}

impl Unreadable {
    /// Whether the next attempt may succeed, so that the models read before still count.
    fn is_passing(&self) -> bool {
        match self {
            Self::Fetch(FetchError::Body(_)) => false,
            Self::Fetch(_) => true,
            Self::Status(status) => *status >= 500 || *status == 429,
            Self::NotAList(_) | Self::Empty | Self::TooMany => false,
        }
    }
}

/// The models that one engine lists.
#[derive(Debug)]
pub struct ModelList {
    /// At most [`CARDS_MAX`].
    pub cards: Vec<ModelCard>,
    /// Whether the engine lists more models than `cards` has.
    is_cut: bool,
}

impl ModelList {
    /// The names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.cards.iter().map(|card| &*card.id)
    }

    /// The names of models whose cards have a root, with that root.
    pub fn roots(&self) -> impl Iterator<Item = (&str, &str)> {
        self.cards.iter().filter_map(|card| Some((&*card.id, card.root.as_deref()?)))
    }

    /// The highest context limit of a card.
    pub fn max_model_len(&self) -> Option<u64> {
        self.cards.iter().filter_map(|card| card.max_model_len).max()
    }

    fn parse(body: &[u8]) -> Result<Self, Unreadable> {
        #[derive(Deserialize)]
        struct List {
            data: Vec<Box<RawValue>>,
        }
        #[derive(Deserialize)]
        struct Fields {
            id: String,
            max_model_len: Option<u64>,
            parent: Option<String>,
            root: Option<String>,
        }
        let list: List = serde_json::from_slice(body)?;
        let is_cut = list.data.len() > CARDS_MAX;
        let card = |json: Box<RawValue>| {
            let Fields { id, max_model_len, parent, root } = serde_json::from_str(json.get()).ok()?;
            Some(ModelCard { id, is_adapter: parent.is_some(), root, max_model_len, json })
        };
        let cards: Vec<_> = list.data.into_iter().take(CARDS_MAX).filter_map(card).collect();
        if cards.is_empty() { Err(Unreadable::Empty) } else { Ok(Self { cards, is_cut }) }
    }
}

/// Reads the models of an engine within `limit`.
///
/// # Errors
/// There is no readable list.
pub async fn read_models(address: &Address, limit: Duration) -> Result<ModelList, Unreadable> {
    let (status, body) = fetch(address, "/v1/models", limit, BODY_BYTES).await?;
    if !status.is_success() {
        return Err(Unreadable::Status(status.as_u16()));
    }
    ModelList::parse(&body)
}

/// Reads the routes of an engine within `limit`; `None` if it does not describe them.
pub(super) async fn read_routes(address: &Address, limit: Duration) -> Option<RouteSet> {
    match fetch(address, "/openapi.json", limit, BODY_BYTES).await {
        Ok((status, body)) if status.is_success() => routes_of(&body),
        _ => None,
    }
}

fn routes_of(body: &[u8]) -> Option<RouteSet> {
    #[derive(Deserialize)]
    struct OpenApi {
        paths: HashMap<String, IgnoredAny>,
    }
    let OpenApi { paths } = serde_json::from_slice(body).ok()?;
    let (mut routes, mut names_any) = (RouteSet::NONE, false);
    for (path, route) in paths.keys().filter_map(|path| Some((path, Route::from_path(path)?))) {
        names_any = true;
        // Refusals count by the canonical path only.
        if route.path() == Some(path) {
            routes.insert(route);
        }
    }
    // A description without a known route, or that accepts any path, is not an engine's.
    let takes_any = paths.keys().any(|path| path.contains(":path}"));
    (names_any && !takes_any).then_some(routes)
}

#[derive(Debug, Default)]
struct Reported {
    cards: Vec<ModelCard>,
    unreadable: Option<String>,
}

/// The models that backends report.
#[derive(Debug, Default)]
pub struct ReportedModels(Mutex<HashMap<BackendId, Reported>>);

/// The changes that a reading causes.
#[derive(Debug)]
pub(super) struct Reading {
    /// The models served; `None`: the same as before.
    pub(super) served: Option<Served>,
    /// The context limit, if the engine gives one.
    pub(super) max_model_len: Option<u64>,
    pub(super) names_changed: bool,
    /// Set when the list becomes readable, or unreadable (with the reason).
    pub(super) readable: Option<Result<(), String>>,
}

impl ReportedModels {
    /// Every card, one per name, in the order of backends. Of several cards with one name, the card
    /// with the highest context limit.
    pub fn cards(&self) -> Vec<ModelCard> {
        let by_backend = self.0.lock();
        let mut backends: Vec<_> = by_backend.keys().copied().collect();
        backends.sort();
        let (mut cards, mut places) = (Vec::<ModelCard>::new(), HashMap::new());
        for card in backends.iter().flat_map(|id| &by_backend[id].cards) {
            match places.get(&*card.id) {
                None => {
                    places.insert(&*card.id, cards.len());
                    cards.push(card.clone());
                }
                Some(place) if cards[*place].max_model_len < card.max_model_len => cards[*place] = card.clone(),
                Some(_) => {}
            }
        }
        cards
    }

    /// Whether a backend serves a model; `None`: the models are not known.
    pub fn serves(&self, backend: BackendId, model: &str) -> Option<bool> {
        let by_backend = self.0.lock();
        let reported = by_backend.get(&backend).filter(|reported| reported.unreadable.is_none())?;
        Some(reported.cards.iter().any(|card| card.id == model))
    }

    /// The model names of one backend.
    pub fn of(&self, backend: BackendId) -> Vec<String> {
        let by_backend = self.0.lock();
        by_backend.get(&backend).into_iter().flat_map(|known| &known.cards).map(|card| card.id.clone()).collect()
    }

    /// Why the models of a backend are not known.
    pub fn unreadable(&self, backend: BackendId) -> Option<String> {
        self.0.lock().get(&backend)?.unreadable.clone()
    }

    /// The names of all LoRA adapters.
    pub fn adapters(&self) -> Vec<String> {
        self.cards().into_iter().filter(|card| card.is_adapter).map(|card| card.id).collect()
    }

    /// The names of all models.
    pub fn names(&self) -> Vec<String> {
        self.cards().into_iter().map(|card| card.id).collect()
    }

    /// How the backends of a pool differ, as far as their models are known.
    pub fn differences<'a>(&self, backends: impl IntoIterator<Item = (&'a str, BackendId)>) -> Option<String> {
        let by_backend = self.0.lock();
        let known = backends.into_iter().filter_map(|(name, id)| {
            let reported = by_backend.get(&id).filter(|reported| reported.unreadable.is_none())?;
            Some((name, &*reported.cards))
        });
        differences(known)
    }

    pub(super) fn read(&self, backend: BackendId, list: Result<ModelList, Unreadable>) -> Reading {
        let mut by_backend = self.0.lock();
        let is_new = !by_backend.contains_key(&backend);
        let known = by_backend.entry(backend).or_default();
        let was_unreadable = known.unreadable.is_some();
        let (cards, unreadable) = match list {
            Ok(list) => (list.cards, list.is_cut.then(|| Unreadable::TooMany.to_string())),
            Err(why) if why.is_passing() && !is_new => {
                return Reading { served: None, max_model_len: None, names_changed: false, readable: None };
            }
            Err(why) => (Vec::new(), Some(why.to_string())),
        };
        let list = ModelList { cards, is_cut: false };
        let served = match &unreadable {
            None => Served::list(list.names()),
            Some(_) => Served::unreadable(),
        };
        let names_changed = !known.cards.iter().map(|card| &*card.id).eq(list.names());
        let readable = match &unreadable {
            Some(why) => (!was_unreadable).then(|| Err(why.clone())),
            None => was_unreadable.then_some(Ok(())),
        };
        let reading = Reading { served: Some(served), max_model_len: list.max_model_len(), names_changed, readable };
        *known = Reported { cards: list.cards, unreadable };
        reading
    }

    /// Removes all backends that are not `known`. Returns whether there were any.
    pub(super) fn retain(&self, known: &[BackendId]) -> bool {
        let mut by_backend = self.0.lock();
        let before = by_backend.len();
        by_backend.retain(|id, _| known.contains(id));
        by_backend.len() < before
    }
}

/// How engines of one pool differ: models that only some have, and context limits. `None`: not at
/// all.
pub fn differences<'a>(engines: impl Iterator<Item = (&'a str, &'a [ModelCard])>) -> Option<String> {
    let engines: Vec<_> = engines.collect();
    let mut all: Vec<&str> = Vec::new();
    let mut met = HashSet::new();
    all.extend(engines.iter().flat_map(|(_, cards)| cards.iter()).map(|card| &*card.id).filter(|id| met.insert(*id)));
    let mut parts = Vec::new();
    for (name, cards) in &engines {
        let own: HashSet<&str> = cards.iter().map(|card| &*card.id).collect();
        let missing: Vec<&str> = all.iter().copied().filter(|id| !own.contains(id)).collect();
        if !missing.is_empty() {
            parts.push(format!("{name} lacks {}", shown(&missing, NAMES_SHOWN)));
        }
    }
    let limit = |cards: &[ModelCard]| cards.iter().filter_map(|card| card.max_model_len).max();
    let limits: Vec<_> = engines.iter().filter_map(|(name, cards)| Some((name, limit(cards)?))).collect();
    if limits.iter().any(|(_, limit)| *limit != limits[0].1) {
        let each: Vec<String> = limits.iter().map(|(name, limit)| format!("{limit} on {name}")).collect();
        let each: Vec<&str> = each.iter().map(|text| &**text).collect();
        parts.push(format!("max_model_len is {}", shown(&each, BACKENDS_SHOWN)));
    }
    let parts: Vec<&str> = parts.iter().map(|text| &**text).collect();
    let more = parts.len().saturating_sub(BACKENDS_SHOWN);
    let text = parts[..parts.len() - more].join("; ");
    match (parts.is_empty(), more) {
        (true, _) => None,
        (false, 0) => Some(text),
        (false, more) => Some(format!("{text}; and {more} more")),
    }
}

fn shown(all: &[&str], most: usize) -> String {
    let more = all.len().saturating_sub(most);
    let text = all[..all.len() - more].join(", ");
    if more == 0 { text } else { format!("{text} and {more} more") }
}

#[cfg(test)]
mod tests;
