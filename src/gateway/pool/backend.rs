//! One vLLM server as admission sees it: identity, limits, usage, health and speed.
//!
//! Plain data behind the admission's lock, except [`Progress`]: every request touches that for each
//! chunk, so it is atomic and shared.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::adapters::AdapterSlots;
use super::capacity::{Allocation, BackendLimits, CapacityUsage, Fit, Need};
use super::engine_load::{DecodeStart, EngineLoad, Learned};
use super::engine_work::WorkEvidence;
use super::fault_report::FaultLines;
use super::health::BackendHealth;
use super::known_routes::KnownRoutes;
use super::policy::Candidate;
use super::prefill_rate::PrefillRate;
use super::prefix::EngineCache;
use super::running_copies::RunningCopies;
use super::served::{Facts, Lack, ModelKey, Served};
use super::settled::Settled;
use super::share::Share;
use super::spec::BackendSpec;
use super::trial::TrialBound;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};

/// A TPOT (time per output token) below this is a measurement error: several tokens in one event.
const TPOT_MIN: Duration = Duration::from_micros(100);
/// A TPOT above this means that the engine is stuck, not slow.
const TPOT_MAX: Duration = Duration::from_secs(2);
/// Weight of one TPOT in the mean: about the last 20 requests count.
const TPOT_WEIGHT: f64 = 0.1;

/// Refusals that are kept, because a reading that began earlier must not undo them.
const REFUSALS_MAX: usize = 8;

/// When a backend last sent bytes that show work, and the evidence about silent streams.
#[derive(Debug)]
pub(super) struct Progress {
    epoch: Instant,
    last_ms: AtomicU64,
    /// Requests that wait for their client to read: this is not the backend's silence.
    at_client: AtomicU32,
    pub(super) work: Arc<WorkEvidence>,
}

/// While this guard lives, a request waits for the client and not for the backend.
#[derive(Debug)]
pub struct ClientWait<'a>(&'a Progress);

impl Drop for ClientWait<'_> {
    fn drop(&mut self) {
        self.0.at_client.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Progress {
    pub(super) fn new(now: Instant) -> Self {
        Self { epoch: now, last_ms: AtomicU64::new(0), at_client: AtomicU32::new(0), work: Arc::default() }
    }

    /// Notes bytes that show that the engine works.
    pub(super) fn record_progress(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.epoch).as_millis();
        self.last_ms.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn client_wait(&self) -> ClientWait<'_> {
        self.at_client.fetch_add(1, Ordering::Relaxed);
        ClientWait(self)
    }

    pub(super) fn at_client(&self) -> u32 {
        self.at_client.load(Ordering::Relaxed)
    }

    fn last(&self) -> Instant {
        self.epoch + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }
}

/// Whether a backend may get work, as set by the process that runs the engine. The operator's drain
/// is independent: neither lifts the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cordon {
    /// Health decides.
    #[default]
    Open,
    /// No new requests; requests in flight finish. The backend returns, so requests without another
    /// backend may wait for it.
    Draining,
    /// The engine is starting. Requests may wait for it.
    Starting,
    /// The engine does not run and is not about to start. No request waits for it.
    Down,
    /// The engine was stopped for lack of demand. A request waits for it only if none of its pools
    /// has an engine and its home pool holds requests until one is started.
    Idle,
}

#[derive(Debug)]
pub(super) struct BackendState {
    pub(super) name: Arc<str>,
    pub(super) address: Arc<Address>,
    pub(super) pool: PoolId,
    /// Position in the pool, for the order in views.
    pub(super) position: usize,
    /// Share of new work relative to the other backends of the pool.
    pub(super) weight: f64,
    /// Round robin: how much work the backend is owed.
    pub(super) turn: f64,
    /// The limits in force for requests: the configured ones, lowered by the ceiling and a trial.
    pub(super) limits: BackendLimits,
    pub(super) configured: BackendLimits,
    ceiling: Option<u32>,
    trial: Option<TrialBound>,
    pub(super) used: CapacityUsage,
    /// The capacity that other gateways use here; see `foreign.rs`.
    pub(super) foreign: Share,
    /// The capacity that this gateway may use here, where another gateway divides the limits.
    pub(super) share: Option<Share>,
    /// The capacity that this gateway may use by the ledger of several gateways; see `divided.rs`.
    pub(super) ledger: Option<Share>,
    pub(super) settled: Settled,
    /// Copies that run here; not counted in `used`.
    pub(super) copies: RunningCopies,
    pub(super) health: BackendHealth,
    pub(super) fault_lines: FaultLines,
    pub(super) draining: bool,
    pub(super) cordon: Cordon,
    /// The gateway that runs the engine is another one, and drains or starts it.
    pub(super) closed: bool,
    /// The flags of the engine say that it schedules by priority.
    pub(super) by_priority: bool,
    pub(super) start_takes: Option<Duration>,
    /// When the starting engine is expected to be ready, if known.
    pub(super) ready_at: Option<Instant>,
    /// No longer configured: the slot in the table is free once the last request here ends.
    pub(super) removed: bool,
    /// Decayed mean of the TPOT of finished requests, seconds. Used for views and prices; the
    /// policies use `load`.
    pub(super) seconds_per_token: Option<f64>,
    pub(super) load: EngineLoad,
    pub(super) cache: EngineCache,
    pub(super) adapters: AdapterSlots,
    pub(super) prefill_rate: PrefillRate,
    pub(super) facts: Facts,
    /// The facts must be read again: the engine was replaced, or refused a request that they
    /// promised.
    pub(super) facts_due: bool,
    /// The routes among the facts, and until when they count.
    pub(super) routes: KnownRoutes,
    /// The page of routes must be read: an engine of the pool has refused a route.
    pub(super) routes_due: bool,
    /// The latest refusals that were news, at most [`REFUSALS_MAX`]: a reading may have begun
    /// before them.
    refusals: SmallVec<[(Lack, Instant); 2]>,
    pub(super) progress: Arc<Progress>,
    pub(super) abort: CancellationToken,
    pub(super) hangs: u64,
    /// The backend is in the list of changed backends; see `room.rs`.
    pub(super) changed: bool,
    /// When the liveness check first saw requests in flight here, since it last saw none.
    busy_since: Option<Instant>,
}

impl BackendState {
    /// `layout`: number of the layout with which the backend appears.
    pub(super) fn new(spec: &BackendSpec, pool: PoolId, layout: u64, now: Instant) -> Self {
        let limits = BackendLimits { slots: 1, tokens: None, prefill_tokens: None, long_prefix: None };
        Self {
            name: Arc::clone(&spec.name),
            address: Arc::clone(&spec.address),
            pool,
            position: 0,
            weight: spec.weight,
            turn: 0.0,
            limits,
            configured: limits,
            ceiling: None,
            trial: None,
            used: CapacityUsage::default(),
            foreign: Share::default(),
            share: None,
            ledger: None,
            settled: Settled::default(),
            copies: RunningCopies::default(),
            health: BackendHealth::default(),
            fault_lines: FaultLines::default(),
            draining: false,
            cordon: Cordon::Open,
            closed: false,
            by_priority: false,
            start_takes: None,
            ready_at: None,
            removed: false,
            seconds_per_token: None,
            load: EngineLoad::new(now),
            cache: EngineCache::new(layout),
            adapters: AdapterSlots::default(),
            prefill_rate: PrefillRate::new(now),
            facts: Facts::default(),
            facts_due: false,
            routes: KnownRoutes::default(),
            routes_due: false,
            refusals: SmallVec::new(),
            progress: Arc::new(Progress::new(now)),
            abort: CancellationToken::new(),
            hangs: 0,
            changed: false,
            busy_since: None,
        }
    }

    /// Takes over the state of the same engine under another name or pool.
    pub(super) fn inherit(&mut self, known: &Self) {
        self.health = known.health.clone();
        self.seconds_per_token = known.seconds_per_token;
        self.load.learned = known.load.learned;
        self.prefill_rate = known.prefill_rate;
        self.facts = known.facts.clone();
        self.routes = known.routes.clone();
        self.draining = known.draining;
        self.cordon = known.cordon;
        self.closed = known.closed;
        self.ready_at = known.ready_at;
        self.by_priority = known.by_priority;
        self.start_takes = known.start_takes;
        self.ceiling = known.ceiling;
        self.trial = known.trial;
    }

    pub(super) fn set_limits(&mut self, limits: BackendLimits) {
        self.configured = limits;
        self.limits = self.trial.map_or(self.limits_of_copies(), |trial| trial.below(self.limits_of_copies()));
    }

    /// The limits without the bound of a trial: copies explore these.
    pub(super) fn limits_of_copies(&self) -> BackendLimits {
        let slots = self.configured.slots;
        let slots = self.ceiling.map_or(slots, |ceiling| slots.min(ceiling).max(1));
        BackendLimits { slots, ..self.configured }
    }

    /// Bounds requests. Copies are cut when requests begin: both together were not tried.
    pub(super) fn set_trial(&mut self, trial: Option<TrialBound>) {
        if self.trial.is_some_and(|known| known.is_closed()) && trial.is_none_or(|trial| !trial.is_closed()) {
            self.copies.cut();
        }
        self.trial = trial;
        self.set_limits(self.configured);
    }

    pub(super) fn trial(&self) -> Option<TrialBound> {
        self.trial
    }

    pub(super) fn is_for_copies_only(&self) -> bool {
        self.trial.is_some_and(|trial| trial.is_closed())
    }

    pub(super) fn set_ceiling(&mut self, slots: Option<u32>) {
        self.ceiling = slots;
        self.set_limits(self.configured);
    }

    /// The engine was replaced by one that is ready.
    pub(super) fn engine_replaced(&mut self, now: Instant) {
        self.health = BackendHealth::default();
        self.forget_engine(now);
        self.health.probe_ok(now);
        // The old names stay until the new engine is read; then waiters for one of them are judged
        // again.
        self.facts.max_model_len = None;
        self.facts_due = true;
    }

    /// The engine has started again: cache and adapters are empty, the speed is unknown.
    pub(super) fn forget_engine(&mut self, now: Instant) {
        self.seconds_per_token = None;
        self.load.learned = Learned::default();
        self.cache.clear();
        self.adapters.clear();
        self.routes_due |= self.routes.is_any();
        self.routes = KnownRoutes::default();
        self.facts.routes = self.routes.set();
        self.refusals.clear();
        self.prefill_rate = PrefillRate::new(now);
    }

    /// Takes over the listed models and context limit, by a reading that began at `begun`.
    pub(super) fn take_reading(&mut self, served: Served, max_model_len: Option<u64>, begun: Instant) {
        self.facts_due = self.cordon() != Cordon::Open;
        if self.facts_due && self.facts.served != Served::Unknown {
            return;
        }
        self.facts.served = served;
        self.facts.max_model_len = max_model_len.or(self.facts.max_model_len);
        self.refusals.retain(|(_, at)| *at > begun);
        for (lack, _) in &self.refusals {
            self.facts_due |= self.facts.correct(*lack) && !self.is_unreadable();
        }
    }

    /// The engine refused a request at `now`. Returns whether that is news.
    pub(super) fn refused(&mut self, lack: Lack, now: Instant) -> bool {
        let is_news = self.facts.correct(lack);
        if let Lack::Route(route) = lack {
            self.routes.deny(route, now);
            return is_news;
        }
        // An engine without a readable list has no more to say at once.
        self.facts_due |= (is_news || lack == Lack::Length(None)) && !self.is_unreadable();
        if is_news {
            if self.refusals.len() >= REFUSALS_MAX {
                self.refusals.remove(0);
            }
            self.refusals.push((lack, now));
        }
        is_news
    }

    fn is_unreadable(&self) -> bool {
        matches!(self.facts.served, Served::Unreadable { .. })
    }

    /// Forgets refusals and readings of routes that are too old at `now`.
    pub(super) fn expire_routes(&mut self, now: Instant) {
        if self.routes.is_any() {
            self.routes.expire(now);
            self.facts.routes = self.routes.set();
        }
    }

    /// Whether the backend may serve a model: nothing says that it does not, or the engine is
    /// changing.
    pub(super) fn may_serve(&self, model: ModelKey) -> bool {
        let changes = self.facts_due || !matches!(self.cordon(), Cordon::Open | Cordon::Down);
        changes || self.facts.served.has(model)
    }

    /// The data by which a choice compares the backend, until the backend changes. Times: seconds
    /// since `epoch`.
    pub(super) fn candidate(&self, id: BackendId, epoch: Instant) -> Candidate {
        let (used, occupied) = (&self.used, self.occupied());
        let left = |limit: Option<u64>, used: u64| limit.map_or(u64::MAX, |limit| limit.saturating_sub(used));
        let trial_is_taken = self.health.allowance().is_some_and(|requests| used.requests >= requests);
        let closed = trial_is_taken || !self.in_rotation();
        Candidate {
            id,
            free_slots: if closed { 0 } else { self.limits.slots.saturating_sub(occupied.slots) },
            free_tokens: left(self.limits.tokens, occupied.tokens),
            // A prompt above the limit runs when no other prompt is in prefill.
            free_prefill: left(
                self.limits.prefill_tokens.filter(|_| occupied.prefill_tokens > 0),
                occupied.prefill_tokens,
            ),
            weight: self.weight,
            // Room counts requests only; load also counts copies.
            requests: used.requests + self.copies.len(),
            sequences: used.slots + self.copies.sequences(),
            long_prefills: used.long_prefills,
            tokens: (used.tokens + self.copies.tokens()) as f64,
            backlog: self.load.backlog(used, epoch),
            small_tokens: (used.computed_prefill_tokens() - used.large_prefill_tokens) as f64,
            interference: self.load.learned.interference,
            trust: self.cache.trust(),
            decode: self.load.learned.decode.seen(epoch),
            prefill: self.load.learned.prefill.seen(epoch),
            granted: self.load.granted,
        }
    }

    /// Takes `need` for the request with number `serial`, of which the engine should have `cached`
    /// tokens. Also returns the seconds of large prefills ahead. Cuts copies in the room.
    pub(super) fn take(&mut self, need: &Need, cached: u64, now: Instant, serial: u64) -> (Allocation, f64) {
        self.copies.make_room(&self.occupied(), &self.limits, need);
        let (ahead, _) = self.load.remaining(&self.used, now);
        self.load.add(need.prompt_tokens - cached, &self.used, now, serial);
        self.cache.write(need.tokens() - cached);
        let mut allocation = self.used.take(&self.limits, need);
        self.used.expect_cached(&mut allocation, cached);
        (allocation, ahead)
    }

    pub(super) fn end_prefill(&mut self, allocation: &mut Allocation) -> DecodeStart {
        let before = self.used.computed_prefill_tokens();
        self.used.end_prefill(allocation);
        self.load.end_prefill(before - self.used.computed_prefill_tokens(), &self.used)
    }

    pub(super) fn observe_tpot(&mut self, tpot: Duration) {
        let sample = tpot.clamp(TPOT_MIN, TPOT_MAX).as_secs_f64();
        self.seconds_per_token =
            Some(self.seconds_per_token.map_or(sample, |mean| mean + TPOT_WEIGHT * (sample - mean)));
    }

    /// How long the backend has had requests in flight without sending a byte; `None` while no
    /// request waits for one.
    pub(super) fn silence(&mut self, now: Instant) -> Option<Duration> {
        if self.used.requests <= self.progress.at_client() {
            self.busy_since = None;
            return None;
        }
        let busy_since = *self.busy_since.get_or_insert(now);
        Some(now.saturating_duration_since(self.progress.last().max(busy_since)))
    }

    /// Since when requests are in flight and no byte was sent, as of the last look of the liveness
    /// check.
    pub(super) fn silent_since(&self) -> Option<Instant> {
        let busy_since = self.busy_since.filter(|_| self.used.requests > self.progress.at_client())?;
        Some(self.progress.last().max(busy_since))
    }

    /// The decision of the process that runs the engine, here or at another gateway.
    pub(super) fn cordon(&self) -> Cordon {
        if self.closed && self.cordon == Cordon::Open { Cordon::Draining } else { self.cordon }
    }

    /// Whether new work may go here, apart from room.
    pub(super) fn in_rotation(&self) -> bool {
        self.is_in_service() && self.health.allowance() != Some(0)
    }

    /// Whether the backend would get work if it were healthy.
    pub(super) fn is_in_service(&self) -> bool {
        !self.draining && !self.removed && self.cordon() == Cordon::Open
    }

    /// Whether the backend gets work now or is expected to soon.
    fn is_worth_waiting_for(&self) -> bool {
        let coming = match self.cordon() {
            Cordon::Open => self.health.is_untried(),
            Cordon::Draining | Cordon::Starting => true,
            Cordon::Down | Cordon::Idle => false,
        };
        self.in_rotation() || (coming && !self.draining && !self.removed)
    }

    /// Whether the configured limits permit `need` here.
    pub(super) fn could_serve(&self, need: &Need) -> bool {
        let barred = self.limits.long_prefix.is_some_and(|long| long.slots == 0 && need.prompt_tokens > long.threshold);
        let fits = self.trial.is_none_or(|trial| trial.is_closed() || trial.fits_alone(need));
        self.is_worth_waiting_for() && !barred && fits && self.configured.exceeded_by(need).is_none()
    }

    pub(super) fn fit(&self, need: &Need) -> Fit {
        match self.health.allowance() {
            Some(requests) if self.used.requests >= requests => Fit::Full,
            _ if !self.in_rotation() => Fit::Full,
            _ => self.occupied().fit(&self.limits, need),
        }
    }

    /// Whether a long prompt would get a permit.
    pub(super) fn has_permit(&self) -> bool {
        self.limits.long_prefix.is_none_or(|long| self.occupied().long_prefills < long.slots)
    }
}
