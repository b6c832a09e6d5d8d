//! A snapshot of all pools, for metrics, the admin API and the live page.
//!
//! Copies: no lock is held while a snapshot is read. Gauges are read from snapshots at scrape time and stored nowhere
//! else, so they cannot drift.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::backend::Cordon;
use super::breaker::RecentAnswers;
use super::capacity::{BackendLimits, CapacityUsage};
use super::fair_owner::OwnerView;
use super::health::{Phase, RefusedGateway};
use super::share::Share;
use super::spec::Address;
use super::state::{AdmissionState, WaiterState};
use sluice_core::base::{BackendId, PoolId};

/// Owners of one pool in a view.
pub const OWNERS_SHOWN: usize = 64;

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// For how long.
    pub waited: Duration,
    /// Estimated prompt tokens.
    pub prompt_tokens: u64,
}

/// One pool.
#[derive(Clone, Debug)]
pub struct PoolView {
    /// Its id.
    pub id: PoolId,
    /// Its name.
    pub name: Arc<str>,
    /// Requests that wait.
    pub queue_length: usize,
    /// How many may wait.
    pub queue_limit: usize,
    /// It has no backend in rotation, and requests wait until it has one.
    pub holds: bool,
    /// Owners of requests, owners with waiters and most work first, at most [`OWNERS_SHOWN`]; none
    /// where the pool is not fair.
    pub owners: Vec<OwnerView>,
    /// Its backends, including removed ones that still have requests.
    pub backends: Vec<BackendView>,
}

/// One backend.
#[derive(Clone, Debug)]
pub struct BackendView {
    /// Its id.
    pub id: BackendId,
    /// Its name.
    pub name: Arc<str>,
    /// Where it is reached.
    pub address: Arc<Address>,
    /// Share of new work.
    pub weight: f64,
    /// Its health.
    pub phase: Phase,
    /// How its last requests ended.
    pub recent: RecentAnswers,
    /// Its engine refuses the gateway's credentials.
    pub refused: Option<RefusedGateway>,
    /// Taken out of rotation by the operator.
    pub draining: bool,
    /// Set by the process that runs its engine.
    pub cordon: Cordon,
    /// Another gateway, which runs its engine, drains or restarts it.
    pub closed: bool,
    /// No longer configured.
    pub removed: bool,
    /// How often it was found hung since it was configured.
    pub hangs: u64,
    /// Its limits.
    pub limits: BackendLimits,
    /// What is in use.
    pub used: CapacityUsage,
    /// What other gateways use, or may begin to use.
    pub foreign: Share,
    /// What copies use beside that: sequences, and prompt and output tokens.
    pub copies: (u32, u64),
    /// What may be used by the ledger of several gateways; `None`: there is none.
    pub share: Option<Share>,
    /// Seconds per output token, as observed.
    pub seconds_per_token: Option<f64>,
    /// Prompt tokens per second, as observed.
    pub prefill_rate: f64,
    /// When that was last observed; `None`: it is a guess.
    pub prefill_seen: Option<Instant>,
    /// Since when it has had requests in flight and sent no byte.
    pub silent_since: Option<Instant>,
    /// The engine's context limit, if it reported one.
    pub max_model_len: Option<u64>,
    /// What the engine serves is to be read again.
    pub facts_due: bool,
    /// The routes of the engine must be read: it, or another engine of the pool, has refused one.
    pub routes_due: bool,
}

impl BackendView {
    /// The label of its state in metrics and the admin API.
    pub fn state(&self) -> &'static str {
        match self.cordon {
            _ if self.removed => "removed",
            _ if self.draining => "draining",
            Cordon::Draining => "draining",
            Cordon::Starting => "starting",
            Cordon::Down => "down",
            Cordon::Idle => "idle",
            Cordon::Open if self.closed => "draining",
            Cordon::Open => self.phase.label(),
        }
    }

    /// Whether it gets new work if it has room.
    pub fn in_rotation(&self) -> bool {
        let healthy = matches!(self.phase, Phase::Ready | Phase::Probation);
        healthy && self.cordon == Cordon::Open && !self.closed && !self.draining && !self.removed
    }

    /// What may be used by the ledger of several gateways, by the name of the unit, as far as units are limited. Empty without one.
    pub fn share_of_limits(&self) -> Vec<(&'static str, u64)> {
        let Some(share) = self.share else { return Vec::new() };
        let limits = &self.limits;
        let units = [
            ("slots", Some(u64::from(share.slots))),
            ("tokens", limits.tokens.map(|_| share.tokens)),
            ("prefill_tokens", limits.prefill_tokens.map(|_| share.prefill_tokens)),
            ("permits", limits.long_prefix.map(|_| u64::from(share.permits))),
        ];
        units.into_iter().filter_map(|(unit, share)| Some((unit, share?))).collect()
    }

    /// Every name [`BackendView::state`] can return.
    pub const STATES: [&'static str; 8] =
        ["starting", "ready", "probation", "ejected", "down", "draining", "idle", "removed"];
}

impl AdmissionState {
    pub(super) fn waiting_requests(&self, now: Instant) -> Vec<WaitingRequest> {
        let waits = self.waiters.iter().flatten().filter(|waiter| matches!(waiter.state, WaiterState::Waiting));
        let shown = waits.map(|waiter| WaitingRequest {
            waited: now.saturating_duration_since(waiter.request.arrived),
            prompt_tokens: waiter.request.need.prompt_tokens,
        });
        shown.collect()
    }

    pub(super) fn view(&self) -> Vec<PoolView> {
        let shown = self.pools.iter().enumerate().map(|(index, pool)| PoolView {
            id: PoolId::new(index),
            name: Arc::clone(&pool.name),
            queue_length: pool.queue.len(),
            queue_limit: pool.rules.queue_length,
            holds: self.holds(PoolId::new(index)),
            owners: pool.queue.view(OWNERS_SHOWN),
            backends: self.backends_of(PoolId::new(index)),
        });
        shown.filter(|view| !self.pools[view.id.index()].removed || !view.backends.is_empty()).collect()
    }

    fn backends_of(&self, pool: PoolId) -> Vec<BackendView> {
        let all =
            self.backends.iter().enumerate().filter_map(|(index, slot)| Some((BackendId::new(index), slot.as_ref()?)));
        let mut views: Vec<(usize, BackendView)> = all
            .filter(|(_, backend)| backend.pool == pool)
            .map(|(id, b)| {
                let view = BackendView {
                    id,
                    name: Arc::clone(&b.name),
                    address: Arc::clone(&b.address),
                    weight: b.weight,
                    phase: b.health.phase(),
                    recent: b.health.recent(),
                    refused: b.health.refused(),
                    draining: b.draining,
                    cordon: b.cordon,
                    closed: b.closed,
                    removed: b.removed,
                    hangs: b.hangs,
                    limits: b.limits,
                    used: b.used,
                    foreign: b.foreign,
                    copies: (b.copies.sequences(), b.copies.tokens()),
                    share: b.ledger,
                    seconds_per_token: b.seconds_per_token,
                    prefill_rate: b.prefill_rate.tokens_per_second(),
                    prefill_seen: b.prefill_rate.seen(),
                    silent_since: b.silent_since(),
                    max_model_len: b.facts.max_model_len,
                    facts_due: b.facts_due,
                    routes_due: b.routes_due,
                };
                (b.position, view)
            })
            .collect();
        views.sort_by_key(|(position, _)| *position);
        views.into_iter().map(|(_, view)| view).collect()
    }
}
