//! Finds out which kind of engine a server is.
//!
//! | asked | certain |
//! |---|---|
//! | the list of models | an owner that only one kind writes |
//! | the pages of kinds (`core/engines`) | a body that only servers of the kind send |
//!
//! The kind counts only if the server also has the health page of the kind: a proxy may pass on the
//! list of models and no other page. Only kinds that contradict the pool's are asked for, so a
//! server of a kind without a page is left alone. A vLLM names itself in the list of models, so no
//! page is asked for. A server that no answer identifies counts as the kind in the configuration
//! file.
//!
//! Bounds: [`PAGE_BYTES`] of a response; `health.probe_timeout` for all pages together, and again
//! for the health page; one kind for each backend.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::timeout;

use super::engine_health::{Unhealthy, read_health};
use super::http::fetch;
use super::models::{ModelCard, read_models};
use sluice_config::Address;
use sluice_core::base::BackendId;
use sluice_core::engines::EngineKind;
use sluice_gateway::pool::PoolView;

/// Largest page that is read, bytes: vLLM's metrics.
const PAGE_BYTES: usize = 8 << 20;

/// The kind of the server at an address; `cards`: the models that it lists, if they were read.
/// `None`: no answer is certain.
///
/// # Errors
/// The server did not give all answers about its kind within `limit`.
pub async fn identify(
    address: &Address,
    cards: Option<&[ModelCard]>,
    limit: Duration,
) -> Result<Option<EngineKind>, tokio::time::error::Elapsed> {
    let found = timeout(limit, ask(address, cards, limit)).await?;
    let Some(kind) = found.filter(|kind| *kind != address.engine) else { return Ok(found) };
    let address = Address { engine: kind, ..address.clone() };
    let has_page = matches!(read_health(&address, limit).await, Ok(()) | Err(Unhealthy::Loading));
    Ok(has_page.then_some(kind))
}

async fn ask(address: &Address, cards: Option<&[ModelCard]>, limit: Duration) -> Option<EngineKind> {
    let own = address.engine;
    let mut kinds: Vec<EngineKind> =
        EngineKind::ALL.into_iter().filter(|kind| *kind == own || own.excludes(*kind)).collect();
    kinds.sort_by_key(|kind| *kind != own);
    let named = |cards: &[ModelCard]| cards.iter().find_map(owner).filter(|kind| kinds.contains(kind));
    if let Some(kind) = cards.and_then(named) {
        return Some(kind);
    }
    if shows_page(address, own, limit).await {
        return Some(own);
    }
    if cards.is_none()
        && kinds.iter().any(|kind| !kind.rules().owners.is_empty())
        && let Ok(list) = read_models(address, limit).await
        && let Some(kind) = named(&list.cards)
    {
        return Some(kind);
    }
    for kind in kinds.into_iter().filter(|kind| *kind != own) {
        if shows_page(address, kind, limit).await {
            return Some(kind);
        }
    }
    None
}

/// The kind that the list of models names.
fn owner(card: &ModelCard) -> Option<EngineKind> {
    #[derive(Deserialize)]
    struct Owned<'a> {
        owned_by: &'a str,
    }
    let owned: Owned<'_> = serde_json::from_str(card.json.get()).ok()?;
    EngineKind::of_owner(owned.owned_by)
}

async fn shows_page(address: &Address, kind: EngineKind, limit: Duration) -> bool {
    let Some(page) = &kind.rules().identity else { return false };
    match fetch(address, page.path, limit, PAGE_BYTES).await {
        Ok((status, body)) => status.is_success() && (page.is_own)(&body),
        Err(_) => false,
    }
}

/// The advice for a server that is of another kind than its pool.
pub fn mismatch(pool: EngineKind, found: EngineKind) -> Option<String> {
    let (pool_label, found_label) = (pool.label(), found.label());
    pool.excludes(found).then(|| {
        format!(
            "it is {found_label}, and its pool is of the kind {pool_label}: write engine = \"{found_label}\" into the pool, or put the backend into another pool"
        )
    })
}

#[derive(Debug)]
struct Found {
    kind: EngineKind,
    /// The pool's kind in the last log line about this backend.
    said: Option<EngineKind>,
}

/// The kinds that probes found.
#[derive(Debug, Default)]
pub struct FoundKinds {
    by_backend: Mutex<HashMap<BackendId, Found>>,
}

impl FoundKinds {
    /// Records the kind that a probe of a backend found. `is_up`: the backend serves requests. Only
    /// then does an uncertain answer (`None`) remove an earlier kind. Returns whether the kind
    /// changed.
    pub(super) fn note(&self, backend: BackendId, kind: Option<EngineKind>, is_up: bool) -> bool {
        let mut by_backend = self.by_backend.lock();
        let before = by_backend.get(&backend).map(|found| found.kind);
        match kind {
            Some(kind) if before != Some(kind) => drop(by_backend.insert(backend, Found { kind, said: None })),
            None if is_up => drop(by_backend.remove(&backend)),
            _ => return false,
        }
        before != kind
    }

    pub(super) fn retain(&self, known: &[BackendId]) {
        self.by_backend.lock().retain(|id, _| known.contains(id));
    }

    /// The kind of a backend.
    pub fn of(&self, backend: BackendId) -> Option<EngineKind> {
        self.by_backend.lock().get(&backend).map(|found| found.kind)
    }

    /// The kinds of pools, by name, whose recognised backends are all of one kind.
    pub fn of_pools(&self, pools: &[PoolView]) -> BTreeMap<String, EngineKind> {
        let agreed = |pool: &PoolView| {
            let members = pool.backends.iter().filter(|backend| !backend.removed);
            let mut kinds = members.filter_map(|backend| self.of(backend.id));
            let first = kinds.next()?;
            kinds.all(|kind| kind == first).then(|| (pool.name.to_string(), first))
        };
        pools.iter().filter_map(agreed).collect()
    }

    /// The backends that are of another kind than their pools: `pool/backend`, and the advice. Each
    /// is returned once.
    pub fn news(&self, pools: &[PoolView]) -> Vec<(String, String)> {
        let mut by_backend = self.by_backend.lock();
        let mut news = Vec::new();
        for (pool, backend) in pools.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend))) {
            let Some(found) = by_backend.get_mut(&backend.id) else { continue };
            let engine = backend.address.engine;
            if found.said.replace(engine) != Some(engine)
                && let Some(text) = mismatch(engine, found.kind)
            {
                news.push((format!("{}/{}", pool.name, backend.name), text));
            }
        }
        news
    }
}

#[cfg(test)]
mod tests;
