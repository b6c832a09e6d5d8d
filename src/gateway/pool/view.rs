//! A snapshot of all pools, for metrics, the admin API and the live page.
//!
//! Snapshots are copies, so no lock is held while one is read. Gauges are read from snapshots at
//! scrape time and stored nowhere else, so they cannot drift.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::bounds::LearnedTokens;
use super::breaker::RecentAnswers;
use super::cache_events::EventsView;
use super::capacity::{BackendLimits, CapacityUsage};
use super::fair_owner::OwnerView;
use super::health::{Phase, RefusedGateway};
use super::service::Cordon;
use super::share::Share;
use super::state::AdmissionState;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};

/// The most owners of one pool in a view.
pub const OWNERS_SHOWN: usize = 64;

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// How long it has waited.
    pub waited: Duration,
    /// Estimated prompt tokens.
    pub prompt_tokens: u64,
}

/// One pool.
#[derive(Clone, Debug)]
pub struct PoolView {
    /// The id.
    pub id: PoolId,
    /// The name.
    pub name: Arc<str>,
    /// Requests that wait.
    pub queue_length: usize,
    /// The most requests that may wait.
    pub queue_limit: usize,
    /// No backend is in rotation, and requests wait until one is.
    pub holds: bool,
    /// Owners of requests, at most [`OWNERS_SHOWN`]: owners with waiters first, then the most work
    /// first. None in a pool that is not fair.
    pub owners: Vec<OwnerView>,
    /// The backends, including removed ones that still have requests.
    pub backends: Vec<BackendView>,
}

/// One backend.
#[derive(Clone, Debug)]
pub struct BackendView {
    /// The id.
    pub id: BackendId,
    /// The name.
    pub name: Arc<str>,
    /// The address.
    pub address: Arc<Address>,
    /// Share of new work relative to the other backends of the pool.
    pub weight: f64,
    /// Phase of health.
    pub phase: Phase,
    /// How the latest requests ended.
    pub recent: RecentAnswers,
    /// Set while the engine refuses the gateway's credentials.
    pub refused: Option<RefusedGateway>,
    /// Taken out of rotation by the operator.
    pub draining: bool,
    /// Whether the process that runs the engine lets the backend get work.
    pub cordon: Cordon,
    /// Another gateway runs the engine, and drains or restarts it.
    pub closed: bool,
    /// No longer configured.
    pub removed: bool,
    /// How often the backend was found hung since it was configured.
    pub hangs: u64,
    /// The limits in force.
    pub limits: BackendLimits,
    /// The limit of tokens that was learned from preemptions.
    pub learned: Option<LearnedTokens>,
    /// Capacity in use.
    pub used: CapacityUsage,
    /// Capacity that other gateways use, or may begin to use.
    pub foreign: Share,
    /// Additional use by copies: sequences, and prompt and output tokens.
    pub copies: (u32, u64),
    /// This gateway's share by the ledger of several gateways; `None`: there is no ledger.
    pub share: Option<Share>,
    /// Seconds per output token, as observed.
    pub seconds_per_token: Option<f64>,
    /// Prompt tokens per second, as observed.
    pub prefill_rate: f64,
    /// When the prefill rate was last observed; `None`: it is a guess.
    pub prefill_seen: Option<Instant>,
    /// Since when the backend has had requests in flight and sent no byte that shows work.
    pub silent_since: Option<Instant>,
    /// The engine's context limit, if it reported one.
    pub max_model_len: Option<u64>,
    /// The facts of the engine must be read again.
    pub facts_due: bool,
    /// The routes must be read: an engine of the pool has refused a route.
    pub routes_due: bool,
    /// The engine's events about the prefix cache; `None`: they are not followed.
    pub events: Option<EventsView>,
}

impl BackendView {
    /// The label of the state in metrics and the admin API.
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

    /// The name of the backend that stands for the engine's process: rank 0 of the same server, if
    /// the gateway runs the engine, otherwise the backend itself.
    pub fn engine_name(&self) -> Cow<'_, str> {
        sluice_config::engine_name(&self.name, self.address.rank)
    }

    /// The limit of outstanding tokens, configured or learned.
    pub fn token_limit(&self) -> Option<u64> {
        let learned = self.learned.map(|learned| learned.tokens);
        self.limits.tokens.into_iter().chain(learned).min()
    }

    /// Whether the backend gets new work when it has room.
    pub fn in_rotation(&self) -> bool {
        let healthy = matches!(self.phase, Phase::Ready | Phase::Probation);
        healthy && self.cordon == Cordon::Open && !self.closed && !self.draining && !self.removed
    }

    /// This gateway's share by the ledger, for each limited unit by name. Empty without a ledger.
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
        let waits = self.waiters.iter().flatten().filter(|waiter| waiter.outcome.is_none());
        let shown = waits.map(|waiter| WaitingRequest {
            waited: now.saturating_duration_since(waiter.request.arrived),
            prompt_tokens: waiter.request.need.prompt_tokens,
        });
        shown.collect()
    }

    pub(super) fn oldest_waiting(&self) -> Vec<(PoolId, Instant)> {
        let mut oldest: Vec<(PoolId, Instant)> = Vec::new();
        for waiter in self.waiters.iter().flatten().filter(|waiter| waiter.outcome.is_none()) {
            let (home, arrived) = (waiter.request.home, waiter.request.arrived);
            match oldest.iter_mut().find(|(pool, _)| *pool == home) {
                Some((_, first)) => *first = arrived.min(*first),
                None => oldest.push((home, arrived)),
            }
        }
        oldest
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
                    weight: b.place.weight,
                    phase: b.health.phase(),
                    recent: b.health.recent(),
                    refused: b.health.refused(),
                    draining: b.service.draining,
                    cordon: b.service.own_cordon,
                    closed: b.service.closed,
                    removed: b.service.removed,
                    hangs: b.liveness.hangs,
                    limits: *b.bounds.in_force(),
                    learned: b.bounds.learned(),
                    used: b.used,
                    foreign: b.bounds.foreign(),
                    copies: (b.copies.sequences(), b.copies.tokens()),
                    share: b.bounds.ledger(),
                    seconds_per_token: b.speed.seconds_per_token,
                    prefill_rate: b.speed.prefill.tokens_per_second(),
                    prefill_seen: b.speed.prefill.seen(),
                    silent_since: b.liveness.silent_since(b.used.requests),
                    max_model_len: b.engine.facts.max_model_len,
                    facts_due: b.engine.facts_due,
                    routes_due: b.engine.routes_due,
                    events: b.events.as_ref().map(|follower| follower.view),
                };
                (b.place.position, view)
            })
            .collect();
        views.sort_by_key(|(position, _)| *position);
        views.into_iter().map(|(_, view)| view).collect()
    }
}
