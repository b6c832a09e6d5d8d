//! The task that renews this gateway's shares: reads the ledger, plans, lowers the pool's shares,
//! writes, raises them.
//!
//! If another gateway wrote first, this one reads again after a short random pause. Engines are
//! asked for their load once in half a lease, and at every renewal while requests of silent
//! gateways (lease over) may run there.
//!
//! The pool admits requests while a plan is made, so its use is compared with the plan after the
//! shares were lowered. If the use is larger, another plan is made before anything is sent.
//!
//! Bounds: one call to the store at a time, with a deadline; [`SCRAPES`] engines asked at once.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sluice_cluster::keys::parts;
use sluice_cluster::ledger::{BYTES_MAX, is_gateway};
use sluice_cluster::{EARLIER, KeyClaim, Ledger, LocalUse, Member, Notice, Page, Plan, Standing, UNEXPLAINED, Unit};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::attained::{self, OthersAttained};
use super::pulse::Pulse;
use super::store::{Found, Store, Written};
use super::units::{amounts_of, limit_of, local_use, name_of, share_of};
use super::view::{Counts, View};
use sluice_config::Address;
use sluice_core::base::Rng;
use sluice_fleet::{Lead, OtherGateways, scrape};
use sluice_gateway::flow::key_share::KeyUse;
use sluice_gateway::flow::keys::KeyUsage;
use sluice_gateway::pool::{Admission, BackendUse, ShareEnd};

/// Longest time between renewals. A member that makes no plan for more than 2 s must measure the
/// silence of engines anew.
const PERIOD_MAX: Duration = Duration::from_millis(1_500);
/// Longest deadline of a call to the store, however long the lease is.
const CALL_MAX: Duration = Duration::from_secs(2);
/// Bounds of the time between renewals while requests wait.
const EARLY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));
/// Longest random pause after another gateway wrote first.
const AGAIN: Duration = Duration::from_millis(100);
/// Most attempts to write in one period.
const ATTEMPTS: u32 = 4;
/// Most plans for one write. The last plan is sent even if the use has grown.
const PLANS: u32 = 4;
/// Time limit for an engine's answer.
const SCRAPE: Duration = Duration::from_secs(1);
/// Most engines that are asked at once.
const SCRAPES: usize = 32;

/// Leases for which a backend that another gateway closed stays closed without a store. Mode `keep`
/// holds unexplained capacity for the same time.
const CLOSED_LEASES: u32 = 12;

#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) period: Duration,
    pub(super) early: Duration,
    /// Deadline of a call, so that a read and a write together take less than half the lease.
    pub(super) call: Duration,
    scrape: Duration,
    /// How long a backend that another gateway closed stays closed without a store.
    closed: Duration,
}

impl Timing {
    pub(super) fn of(lease: Duration) -> Self {
        Self {
            period: (lease / 4).min(PERIOD_MAX),
            early: (lease / 20).clamp(EARLY.0, EARLY.1),
            call: (lease / 5).min(CALL_MAX),
            scrape: lease / 2,
            closed: lease * CLOSED_LEASES,
        }
    }
}

/// The number of running and waiting sequences. `None`: the engine does not answer.
pub(super) type Running = Pin<Box<dyn Future<Output = Option<u64>> + Send>>;

pub(super) fn running(address: Arc<Address>) -> Running {
    Box::pin(async move {
        let page = scrape(&address, SCRAPE).await?;
        Some((page.running + page.waiting).max(0.0) as u64)
    })
}

type Pages = BTreeMap<String, Page>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The ledger was written, or nothing had to be written.
    Done,
    Refused,
    Failed,
}

pub(super) struct Renewal<S> {
    pub(super) member: Member,
    pub(super) store: Arc<S>,
    pub(super) admission: Arc<Admission>,
    pub(super) keys: Arc<KeyUsage>,
    pub(super) lead: Arc<Lead>,
    pub(super) others: Arc<OtherGateways>,
    pub(super) timing: Timing,
    pub(super) pulse: Arc<Pulse>,
    pub(super) view: Arc<View>,
    pub(super) rng: Rng,
    pub(super) running: fn(Arc<Address>) -> Running,
    /// The moment at which the member's clock is 0.
    pub(super) epoch: Instant,
    /// Whether this process replaces another one, which may have the same name.
    pub(super) takes_over: bool,
    pub(super) state: State,
}

#[derive(Default)]
pub(super) struct State {
    read: Option<Instant>,
    planned: Option<Instant>,
    asked: Option<Instant>,
    asking: Option<JoinHandle<Pages>>,
    others: OthersAttained,
    /// Backends where silent gateways may have requests.
    unexplained: BTreeSet<String>,
    leaves: bool,
    counts: Counts,
    trouble: Option<String>,
}

impl<S: Store> Renewal<S> {
    /// Renews until the member has left. It begins to leave when `leaving` is true.
    pub(super) async fn keep(mut self, mut leaving: watch::Receiver<bool>) {
        let mut attempts = 0;
        loop {
            let begun = Instant::now();
            self.state.leaves |= *leaving.borrow_and_update();
            // The member leaves only when no request waits.
            if self.state.leaves && self.admission.load().1 == 0 {
                self.member.leave();
            }
            let outcome = self.renew().await;
            self.publish();
            if self.member.has_left() {
                return;
            }
            attempts = if outcome == Outcome::Refused { attempts + 1 } else { 0 };
            let (next, early) = match outcome {
                Outcome::Refused if attempts < ATTEMPTS => {
                    let pause = AGAIN.mul_f64(0.2 + 0.8 * self.rng.unit());
                    (Instant::now() + pause, None)
                }
                // The next attempt comes early, because another member of etcd may answer.
                Outcome::Failed => (Instant::now() + self.timing.early, None),
                // The next renewal comes early, because an engine waits to be stopped.
                Outcome::Done if self.member.is_closing() => (begun + self.timing.early, None),
                Outcome::Done | Outcome::Refused => (begun + self.timing.period, Some(begun + self.timing.early)),
            };
            tokio::select! {
                () = sleep_until(next) => {}
                () = demand(&self.pulse, early) => {}
                _ = leaving.changed() => {}
            }
        }
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    async fn renew(&mut self) -> Outcome {
        let found = match timeout(self.timing.call, self.store.read()).await {
            Ok(Ok(found)) => found,
            Ok(Err(why)) => return self.failed(why),
            Err(_) => return self.failed(self.no_answer()),
        };
        let ledger = match found.bytes.as_deref().map(Ledger::parse).transpose() {
            Ok(ledger) => ledger,
            Err(why) => {
                self.member.stand_back(why);
                self.share();
                return Outcome::Done;
            }
        };
        let pages = self.pages().await;
        // Backends are closed before the use is counted, because this gateway must send nothing
        // more to closed backends once the count is written.
        if let Some(ledger) = &ledger {
            self.state.read = Some(Instant::now());
            self.close(ledger);
            self.view.loads.see(ledger, self.member.id());
            self.state.others.see(ledger, self.member.id(), &self.admission);
        }
        self.member.set_pools(self.view.own_loads());
        self.member.set_attained(attained::own(&self.admission));
        self.claim_keys();
        let Some(plan) = self.plan(ledger.as_ref(), pages) else { return Outcome::Done };
        self.write(plan, &found).await
    }

    /// The next ledger, if one must be written. The pool then uses no more than both this ledger
    /// and the last one allow.
    fn plan(&mut self, found: Option<&Ledger>, mut pages: Pages) -> Option<Ledger> {
        for attempt in 1.. {
            let since = self.state.planned.replace(Instant::now()).unwrap_or(self.epoch);
            let uses = self.admission.uses();
            let closed = if self.lead.is_held() { self.others.closed() } else { BTreeSet::new() };
            self.member.set_closed(&closed);
            let mut local = local_use(&uses, self.pulse.is_blind(since, Instant::now()));
            give_pages(&mut local, std::mem::take(&mut pages));
            self.ask_engines(&uses);
            let Plan::Write(plan) = self.member.plan(self.now(), found, &local) else {
                self.share();
                return None;
            };
            self.note(&plan);
            if self.share_less(&plan) || attempt == PLANS {
                return Some(plan);
            }
            // The lower share now stops further requests, and the next plan counts the ones
            // admitted meanwhile.
            self.member.refused();
        }
        None
    }

    async fn write(&mut self, plan: Ledger, over: &Found) -> Outcome {
        let bytes = plan.to_bytes();
        if bytes.len() > BYTES_MAX {
            self.member.refused();
            return self.failed(format!("the ledger would have {} bytes, and {BYTES_MAX} are possible", bytes.len()));
        }
        let written = timeout(self.timing.call, self.store.write(bytes, over)).await;
        let outcome = match written.unwrap_or_else(|_| Written::Unknown(self.no_answer())) {
            Written::Done => {
                self.member.confirmed();
                self.divide_keys(&plan);
                self.state.counts.written += 1;
                self.state.trouble = None;
                Outcome::Done
            }
            Written::Refused => {
                self.member.refused();
                self.state.counts.refused += 1;
                Outcome::Refused
            }
            Written::Unknown(why) => {
                self.member.unknown();
                self.state.counts.unknown += 1;
                self.failed(why)
            }
        };
        self.share();
        outcome
    }

    fn close(&self, ledger: &Ledger) {
        let closed = ledger.closed_by_others(self.member.id());
        self.admission.set_closed(|pool, backend| !closed.is_empty() && closed.contains(&*name_of(pool, backend)));
    }

    fn claim_keys(&mut self) {
        let since = self.state.planned.unwrap_or(self.epoch);
        let claim = |KeyUse { name, wanted, largest, used, .. }| (name, KeyClaim { wanted, largest, used });
        let claims = self.keys.uses(since.elapsed(), Instant::now()).into_iter().map(claim);
        self.member.set_keys(claims.filter(|(_, claim)| !claim.is_none()).collect());
    }

    fn divide_keys(&self, ledger: &Ledger) {
        let gateways = ledger.gateways.keys().filter(|id| is_gateway(id)).count() as u64;
        self.keys.divide(gateways, Instant::now(), |name, limits| parts(ledger, self.member.id(), name, limits));
    }

    fn no_answer(&self) -> String {
        format!("{} has not answered within {:?}", self.store.name(), self.timing.call)
    }

    fn failed(&mut self, why: String) -> Outcome {
        if self.state.trouble.is_none() {
            tracing::warn!("cluster: the ledger cannot be renewed: {why}");
        }
        self.state.trouble = Some(why);
        Outcome::Failed
    }

    fn share(&self) {
        let (now, mut has_room) = (self.now(), false);
        self.admission.set_ledger_shares(self.end(), |pool, backend, limits, _| {
            let room = self.member.room(now, &name_of(pool, backend));
            has_room |= room.get(Unit::Slots) > 0;
            share_of(&room, limits)
        });
        self.view.note_room(has_room);
    }

    /// Sets the shares as [`Renewal::share`] does, before a plan is sent. Returns whether the use
    /// is within the plan.
    fn share_less(&self, plan: &Ledger) -> bool {
        let (now, own) = (self.now(), plan.gateways.get(self.member.id()));
        let mut fits = true;
        self.admission.set_ledger_shares(self.end(), |pool, backend, limits, used| {
            let name = name_of(pool, backend);
            if let Some(holding) = own.and_then(|own| own.backends.get(&name)) {
                let (used, limit) = (amounts_of(&used), limit_of(limits));
                let within = |unit: &Unit| {
                    let held = holding.share.get(*unit).max(holding.used.get(*unit));
                    limit.get(*unit).is_none() || used.get(*unit) <= held
                };
                fits &= Unit::ALL.iter().all(within);
            }
            share_of(&self.member.room(now, &name), limits)
        });
        fits
    }

    fn end(&self) -> Option<ShareEnd> {
        self.member.ends().map(|end| ShareEnd { at: self.epoch + end, clock: Instant::now })
    }

    async fn pages(&mut self) -> Pages {
        match self.state.asking.take_if(|asking| asking.is_finished()) {
            Some(asked) => asked.await.unwrap_or_default(),
            None => Pages::new(),
        }
    }

    fn ask_engines(&mut self, uses: &[BackendUse]) {
        let unexplained = &self.state.unexplained;
        let all = self.state.asked.is_none_or(|asked| asked.elapsed() >= self.timing.scrape);
        let is_due = all || !unexplained.is_empty();
        if self.state.asking.is_some() || !is_due {
            return;
        }
        if all {
            self.state.asked = Some(Instant::now());
        }
        let named =
            uses.iter().filter(|used| !used.removed).map(|used| (name_of(&used.pool, &used.name), &used.address));
        let asked = named.filter(|(name, _)| all || unexplained.contains(name));
        let engines: Vec<(String, Arc<Address>)> = asked.map(|(name, address)| (name, Arc::clone(address))).collect();
        self.state.asking = Some(tokio::spawn(ask(engines, self.epoch, self.running)));
    }

    fn note(&mut self, ledger: &Ledger) {
        let left = |id: &str| {
            ledger.gateways.get(id).map_or_else(BTreeSet::new, |entry| entry.backends.keys().cloned().collect())
        };
        self.state.unexplained = left(UNEXPLAINED);
        self.view.note_ledger(ledger, !self.state.unexplained.is_empty() || !left(EARLIER).is_empty());
    }

    fn publish(&mut self) {
        let now = self.now();
        let standing = self.member.standing(now);
        self.others.note(self.member.left_by_others());
        if !matches!(standing, Standing::Holding | Standing::Joining) {
            self.view.loads.forget();
        }
        // Before that time, the gateway that closed a backend may still reach the store and restart
        // the engine.
        if self.state.read.is_some_and(|read| read.elapsed() > self.timing.closed) {
            self.admission.set_closed(|_, _| false);
        }
        for notice in self.member.notices() {
            match notice {
                Notice::Stands(_, Standing::Holding) | Notice::Began => tracing::info!("cluster: {notice}"),
                Notice::NameTwice(_) if self.takes_over || self.state.leaves => tracing::debug!("cluster: {notice}"),
                _ => tracing::warn!("cluster: {notice}"),
            }
        }
        let renewed = self.member.renewed().map(|at| self.epoch + at);
        self.view.note(standing, renewed, self.state.counts, self.state.trouble.clone());
    }
}

async fn demand(pulse: &Pulse, early: Option<Instant>) {
    let Some(early) = early else { return std::future::pending().await };
    sleep_until(early).await;
    pulse.demand.notified().await;
}

fn give_pages(local: &mut LocalUse, pages: Pages) {
    for (name, page) in pages {
        if let Some(usage) = local.get_mut(&name) {
            usage.page = Some(page);
        }
    }
}

/// Asks engines for their load.
async fn ask(engines: Vec<(String, Arc<Address>)>, epoch: Instant, running: fn(Arc<Address>) -> Running) -> Pages {
    let (mut asking, permits) = (JoinSet::new(), Arc::new(Semaphore::new(SCRAPES)));
    for (name, address) in engines {
        let permits = Arc::clone(&permits);
        asking.spawn(async move {
            let _permit = permits.acquire().await;
            let asked = epoch.elapsed();
            Some((name, Page { asked, running: running(address).await? }))
        });
    }
    let mut pages = Pages::new();
    while let Some(asked) = asking.join_next().await {
        pages.extend(asked.ok().flatten());
    }
    pages
}
