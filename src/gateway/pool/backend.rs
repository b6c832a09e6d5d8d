//! One vLLM server as admission sees it: identity, limits, usage, health and speed.
//!
//! Plain data behind the admission's lock, except [`Progress`], which the pump of every request
//! touches per chunk and which is therefore atomic and shared.

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
use super::spec::{Address, BackendSpec};
use super::trial::TrialBound;
use sluice_core::base::{BackendId, PoolId};

/// Below this a TPOT is a measurement error (several tokens in one event).
const TPOT_MIN: Duration = Duration::from_micros(100);
/// Above this an engine is stuck rather than slow.
const TPOT_MAX: Duration = Duration::from_secs(2);
/// Weight of one TPOT in the mean: about the last 20 requests count.
const TPOT_WEIGHT: f64 = 0.1;

/// Refusals of an engine that are kept, against a reading that is older than they are.
const REFUSALS_MAX: usize = 8;

/// When a backend last sent bytes that show that its engine works, and what is known of streams that are silent.
#[derive(Debug)]
pub(super) struct Progress {
    epoch: Instant,
    last_ms: AtomicU64,
    /// Requests that wait for their client to read: not the backend's silence.
    at_client: AtomicU32,
    pub(super) work: Arc<WorkEvidence>,
}

/// While this guard lives, a request waits for its client and not for the backend.
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

    /// Bytes came that show it.
    pub(super) fn record_progress(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.epoch).as_millis();
        self.last_ms.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn client_wait(&self) -> ClientWait<'_> {
        self.at_client.fetch_add(1, Ordering::Relaxed);
        ClientWait(self)
    }

    /// Requests that wait for their client now.
    pub(super) fn at_client(&self) -> u32 {
        self.at_client.load(Ordering::Relaxed)
    }

    fn last(&self) -> Instant {
        self.epoch + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }
}

/// Whether a backend may get work, as set by the process that runs its engine. Independent of the operator's drain:
/// neither lifts the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cordon {
    /// Health decides.
    #[default]
    Open,
    /// No new requests; those in flight finish. It will return: requests without another backend may wait for it.
    Draining,
    /// Its engine is starting. Requests may wait for it.
    Starting,
    /// Its engine does not run and is not about to start. No request waits for it.
    Down,
    /// Its engine was stopped because fewer are wanted. A request waits for it only where none of its pools has an engine and
    /// the pool holds requests until one is started.
    Idle,
}

/// One backend.
#[derive(Debug)]
pub(super) struct BackendState {
    pub(super) name: Arc<str>,
    pub(super) address: Arc<Address>,
    pub(super) pool: PoolId,
    /// Position in its pool, for the order in views.
    pub(super) position: usize,
    /// Share of new work relative to the others of its pool.
    pub(super) weight: f64,
    /// Round robin: how much it is owed.
    pub(super) turn: f64,
    /// The limits in force for requests: those configured, under the ceiling and the bound of a trial.
    pub(super) limits: BackendLimits,
    pub(super) configured: BackendLimits,
    /// Limit of slots below the configured one.
    ceiling: Option<u32>,
    /// What requests may use of it while its engine is on trial.
    trial: Option<TrialBound>,
    pub(super) used: CapacityUsage,
    /// What other gateways use here; see `foreign.rs`.
    pub(super) foreign: Share,
    /// What this gateway may use here, where another one divides the limits.
    pub(super) share: Option<Share>,
    /// What it may use here by the ledger of several gateways; see `divided.rs`.
    pub(super) ledger: Option<Share>,
    /// Requests that its engine has for sure.
    pub(super) settled: Settled,
    /// Copies that run here; not in `used`.
    pub(super) copies: RunningCopies,
    pub(super) health: BackendHealth,
    /// How much of its faults may be logged.
    pub(super) fault_lines: FaultLines,
    pub(super) draining: bool,
    pub(super) cordon: Cordon,
    /// Another gateway, which runs its engine, drains or starts it.
    pub(super) closed: bool,
    /// Its engine schedules by priority, as its flags say.
    pub(super) by_priority: bool,
    /// How long a start of its engine takes, if that is known.
    pub(super) start_takes: Option<Duration>,
    /// When its engine, which starts, is expected to be ready, if that is known.
    pub(super) ready_at: Option<Instant>,
    /// No longer configured: finishes its requests, then its slot in the table is free.
    pub(super) removed: bool,
    /// Decayed mean of the TPOT of finished requests, seconds: for views. The policies use `load`.
    pub(super) seconds_per_token: Option<f64>,
    pub(super) load: EngineLoad,
    pub(super) cache: EngineCache,
    pub(super) adapters: AdapterSlots,
    pub(super) prefill_rate: PrefillRate,
    /// What its engine can serve.
    pub(super) facts: Facts,
    /// They are to be read again: the engine was replaced, or has refused what it was thought to serve.
    pub(super) facts_due: bool,
    /// The routes among its facts, and until when they count.
    pub(super) routes: KnownRoutes,
    /// Its page of routes must be read: an engine of its pool has refused a route.
    pub(super) routes_due: bool,
    /// Its last refusals that were news, and when, at most [`REFUSALS_MAX`]: a reading may have
    /// begun before.
    refusals: SmallVec<[(Lack, Instant); 2]>,
    pub(super) progress: Arc<Progress>,
    pub(super) abort: CancellationToken,
    /// How often it was found hung.
    pub(super) hangs: u64,
    /// It is noted as changed; see `room.rs`.
    pub(super) changed: bool,
    /// Since when it has been seen carrying something, at the pace of the liveness check.
    busy_since: Option<Instant>,
}

impl BackendState {
    /// A backend that appears with the layout of this number.
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

    /// Copies what is known of the same engine under another name or in another pool.
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

    /// Its configured limits.
    pub(super) fn set_limits(&mut self, limits: BackendLimits) {
        self.configured = limits;
        self.limits = self.trial.map_or(self.limits_of_copies(), |trial| trial.below(self.limits_of_copies()));
    }

    /// The limits without the bound of a trial, which copies explore.
    pub(super) fn limits_of_copies(&self) -> BackendLimits {
        let slots = self.configured.slots;
        let slots = self.ceiling.map_or(slots, |ceiling| slots.min(ceiling).max(1));
        BackendLimits { slots, ..self.configured }
    }

    /// Bounds what requests may use of it. Copies end where requests begin: both together were never tried.
    pub(super) fn set_trial(&mut self, trial: Option<TrialBound>) {
        if self.trial.is_some_and(|known| known.is_closed()) && trial.is_none_or(|trial| !trial.is_closed()) {
            self.copies.cut();
        }
        self.trial = trial;
        self.set_limits(self.configured);
    }

    /// What requests may use of it while its engine is on trial.
    pub(super) fn trial(&self) -> Option<TrialBound> {
        self.trial
    }

    /// Whether it may take no request, only copies.
    pub(super) fn is_for_copies_only(&self) -> bool {
        self.trial.is_some_and(|trial| trial.is_closed())
    }

    /// Limits its slots below the configured limit.
    pub(super) fn set_ceiling(&mut self, slots: Option<u32>) {
        self.ceiling = slots;
        self.set_limits(self.configured);
    }

    /// Its engine was replaced by one that is ready: neither the health nor the speed of the old one counts.
    pub(super) fn engine_replaced(&mut self, now: Instant) {
        self.health = BackendHealth::default();
        self.forget_engine(now);
        self.health.probe_ok(now);
        // Its names are those of the old one until they are read: requests that wait for one of them are then judged anew.
        self.facts.max_model_len = None;
        self.facts_due = true;
    }

    /// Its engine has started again: what the old one had and how fast it was no longer counts.
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

    /// Takes over the models and the context limit that its engine says it has, by a reading that
    /// began at `begun`.
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

    /// Its engine has refused a request at `now`. Returns whether that is news.
    pub(super) fn refused(&mut self, lack: Lack, now: Instant) -> bool {
        let is_news = self.facts.correct(lack);
        if let Lack::Route(route) = lack {
            self.routes.deny(route, now);
            return is_news;
        }
        // Of an engine without a list nothing more is learned by asking again at once.
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

    /// Forgets refusals of routes that are too old at `now`.
    pub(super) fn expire_routes(&mut self, now: Instant) {
        if self.routes.is_any() {
            self.routes.expire(now);
            self.facts.routes = self.routes.set();
        }
    }

    /// Whether it may serve a model: nothing says that it does not, or it changes.
    pub(super) fn may_serve(&self, model: ModelKey) -> bool {
        let changes = self.facts_due || !matches!(self.cordon(), Cordon::Open | Cordon::Down);
        changes || self.facts.served.has(model)
    }

    /// What a choice sees of it until it changes, with times in seconds since `epoch`.
    pub(super) fn candidate(&self, id: BackendId, epoch: Instant) -> Candidate {
        let (used, occupied) = (&self.used, self.occupied());
        let left = |limit: Option<u64>, used: u64| limit.map_or(u64::MAX, |limit| limit.saturating_sub(used));
        let trial_is_taken = self.health.allowance().is_some_and(|requests| used.requests >= requests);
        let closed = trial_is_taken || !self.in_rotation();
        Candidate {
            id,
            free_slots: if closed { 0 } else { self.limits.slots.saturating_sub(occupied.slots) },
            free_tokens: left(self.limits.tokens, occupied.tokens),
            // A prompt above the limit runs when no other is in prefill.
            free_prefill: left(
                self.limits.prefill_tokens.filter(|_| occupied.prefill_tokens > 0),
                occupied.prefill_tokens,
            ),
            weight: self.weight,
            // Room is that of requests; load is also that of copies.
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

    /// Takes what `need` asks for, as the request with this number, of whose prompt the engine is expected to have `cached`
    /// tokens; also how many seconds of prefill were before it. Copies that have its room are cut.
    pub(super) fn take(&mut self, need: &Need, cached: u64, now: Instant, serial: u64) -> (Allocation, f64) {
        self.copies.make_room(&self.occupied(), &self.limits, need);
        let (ahead, _) = self.load.remaining(&self.used, now);
        self.load.add(need.prompt_tokens - cached, &self.used, now, serial);
        self.cache.write(need.tokens() - cached);
        let mut allocation = self.used.take(&self.limits, need);
        self.used.expect_cached(&mut allocation, cached);
        (allocation, ahead)
    }

    /// Returns the prefill share of `allocation`: its first token was seen.
    pub(super) fn end_prefill(&mut self, allocation: &mut Allocation) -> DecodeStart {
        let before = self.used.computed_prefill_tokens();
        self.used.end_prefill(allocation);
        self.load.end_prefill(before - self.used.computed_prefill_tokens(), &self.used)
    }

    /// Notes the TPOT of a finished request.
    pub(super) fn observe_tpot(&mut self, tpot: Duration) {
        let sample = tpot.clamp(TPOT_MIN, TPOT_MAX).as_secs_f64();
        self.seconds_per_token =
            Some(self.seconds_per_token.map_or(sample, |mean| mean + TPOT_WEIGHT * (sample - mean)));
    }

    /// How long it has had requests in flight without sending a byte; `None` while no request waits for one.
    pub(super) fn silence(&mut self, now: Instant) -> Option<Duration> {
        if self.used.requests <= self.progress.at_client() {
            self.busy_since = None;
            return None;
        }
        let busy_since = *self.busy_since.get_or_insert(now);
        Some(now.saturating_duration_since(self.progress.last().max(busy_since)))
    }

    /// Since when it has had requests in flight and sent no byte, as far as the liveness check has looked.
    pub(super) fn silent_since(&self) -> Option<Instant> {
        let busy_since = self.busy_since.filter(|_| self.used.requests > self.progress.at_client())?;
        Some(self.progress.last().max(busy_since))
    }

    /// What the process that runs its engine has decided, here or at another gateway.
    pub(super) fn cordon(&self) -> Cordon {
        if self.closed && self.cordon == Cordon::Open { Cordon::Draining } else { self.cordon }
    }

    /// Whether new work may go here at all, room or not.
    pub(super) fn in_rotation(&self) -> bool {
        self.is_in_service() && self.health.allowance() != Some(0)
    }

    /// Whether it would get work if it were healthy.
    pub(super) fn is_in_service(&self) -> bool {
        !self.draining && !self.removed && self.cordon() == Cordon::Open
    }

    /// Whether it gets work now or is expected to soon.
    fn is_worth_waiting_for(&self) -> bool {
        let coming = match self.cordon() {
            Cordon::Open => self.health.is_untried(),
            Cordon::Draining | Cordon::Starting => true,
            Cordon::Down | Cordon::Idle => false,
        };
        self.in_rotation() || (coming && !self.draining && !self.removed)
    }

    /// Whether `need` could be served here with the configured limits.
    pub(super) fn could_serve(&self, need: &Need) -> bool {
        let barred = self.limits.long_prefix.is_some_and(|long| long.slots == 0 && need.prompt_tokens > long.threshold);
        let fits = self.trial.is_none_or(|trial| trial.is_closed() || trial.fits_alone(need));
        self.is_worth_waiting_for() && !barred && fits && self.configured.exceeded_by(need).is_none()
    }

    /// Whether there is room for `need` now.
    pub(super) fn fit(&self, need: &Need) -> Fit {
        match self.health.allowance() {
            Some(requests) if self.used.requests >= requests => Fit::Full,
            _ if !self.in_rotation() => Fit::Full,
            _ => self.occupied().fit(&self.limits, need),
        }
    }

    /// Whether a long prompt would find a permit.
    pub(super) fn has_permit(&self) -> bool {
        self.limits.long_prefix.is_none_or(|long| self.occupied().long_prefills < long.slots)
    }
}
