//! Observations of finished requests, pools and engines.
//!
//! | file | observes |
//! |---|---|
//! | [`window`] | loss of the requests that arrived since a moment, from [`loss`] and [`usage`] |
//! | [`arms`] | two engines at the same time, one of which has a changed flag |
//! | [`recent`] | arrivals of the last minutes, for simulations |
//! | [`tally`] | cost and outcome of requests, for the scaler |
//! | [`engines`], [`diagnosis`] | metrics pages of engines, and the reading of them in words |
//!
//! The [`Observer`] gathers the first four.

pub mod lengths;
pub mod usage;
pub mod loss;
pub mod arms;
pub mod recent;
pub mod tally;
pub mod window;
pub mod engines;
pub mod diagnosis;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::arms::Arms;
use self::loss::{LOSS_OF_SHED, Undisturbed, judge, tpot_ratio};
use self::recent::{Recent, RecentRequest};
use self::tally::Tally;
use self::window::{PoolWindow, Window};
use sluice_config::{Config, OTHER_CLASS, Pool};
use sluice_core::meter::slo::Objectives;
use sluice_gateway::experiment::{CopyOutcome, OriginShares};
use sluice_gateway::flow::Record;
use sluice_gateway::flow::record::Outcome;
use sluice_gateway::pool::{PoolView, WaitingRequest};

/// Factor by which each request raises the shortest seen TPOT, so that an old minimum is forgotten.
const FORGET: f64 = 1.0005;
/// Prompt tokens per second until backends have shown theirs.
const PREFILL_RATE: f64 = 10_000.0;

#[derive(Debug)]
struct Observed {
    name: Arc<str>,
    /// Objectives by class name; the last entry is for requests without a class.
    objectives: Vec<(Arc<str>, Objectives)>,
    undisturbed: Undisturbed,
    widest: u32,
    window: PoolWindow,
    /// Requests since the scaler's last look.
    tally: Tally,
    /// Requests since the gateway started.
    ended: Tally,
    /// Judged requests since the gateway started, and those that missed an objective.
    totals: (f64, f64),
}

impl Observed {
    fn objectives(&self, class: Option<&str>) -> Objectives {
        let found = self.objectives.iter().find(|(name, _)| Some(&**name) == class);
        found.or(self.objectives.last()).map(|(_, own)| *own).unwrap_or_default()
    }
}

pub(crate) fn objectives(config: &Config, pool: &Pool) -> impl Iterator<Item = (Arc<str>, Objectives)> {
    let of_classes = config.classes.iter().map(|class| (class.name.as_str().into(), class.objectives_in(pool)));
    of_classes.chain([(OTHER_CLASS.into(), pool.slo.objectives())])
}

#[derive(Debug, Default)]
struct Gathered {
    pools: Vec<Observed>,
    /// Labels and counts of the compared arms, and each arm's failed requests by origin.
    arms: Option<([String; 2], Arms, [OriginShares; 2])>,
    recent: Recent,
}

/// Gathers finished requests. Any thread may add one, under a short lock.
#[derive(Debug, Default)]
pub struct Observer(Mutex<Gathered>);

impl Observer {
    /// Takes over pools and objectives of a configuration, and begins a window.
    pub fn configure(&self, config: &Config, now: Duration) {
        let pools = &mut self.0.lock().pools;
        let known = std::mem::take(pools);
        let observed = |pool: &Pool| {
            let known = known.iter().find(|other| *other.name == *pool.name);
            Observed {
                name: pool.name.as_str().into(),
                objectives: objectives(config, pool).collect(),
                widest: 1,
                undisturbed: known
                    .map_or(Undisturbed { prefill_rate: PREFILL_RATE, tpot: 1.0 }, |other| other.undisturbed),
                window: PoolWindow::new(now),
                tally: Tally::default(),
                ended: known.map(|other| other.ended).unwrap_or_default(),
                totals: known.map(|other| other.totals).unwrap_or_default(),
            }
        };
        *pools = config.pools.iter().map(observed).collect();
    }

    /// Adds a request that ended at `now`.
    pub fn record(&self, record: &Record, now: Duration) {
        let Some(home) = record.home.as_ref() else { return };
        let Gathered { pools, arms, recent } = &mut *self.0.lock();
        let Some(pool) = pools.iter_mut().find(|pool| pool.name == *home) else { return };
        let arrived = now.saturating_sub(record.total);
        let arm = arms.as_mut().zip(record.assigned.as_ref()).and_then(|((labels, arms, origins), assigned)| {
            Some((labels.iter().position(|label| **label == *assigned.arm().label)?, arms, origins))
        });
        if let Some(copy) = record.copy {
            if let (Some((arm, arms, _)), CopyOutcome::Completed | CopyOutcome::Failed) = (arm, copy) {
                arms.add(arm, (arrived, now), 0.0, copy == CopyOutcome::Failed);
            }
            return;
        }
        recent.add(record, now);
        let objectives = pool.objectives(record.class.as_deref());
        pool.tally.add(record, &objectives);
        pool.ended.add(record, &objectives);
        pool.window.ended += 1.0;
        pool.widest = pool.widest.max(record.sequences);
        // A continued stream includes an engine's failure, which no limit could have prevented.
        let is_whole = record.continued == 0;
        let tpot = record.stats.as_ref().and_then(|stats| stats.tpot).map(|tpot| tpot.as_secs_f64());
        if let Some(tpot) = tpot.filter(|_| is_whole) {
            pool.undisturbed.tpot = (pool.undisturbed.tpot * FORGET).min(tpot);
        }
        let judged = if is_whole { judge(record, &objectives, pool.undisturbed) } else { None };
        if let Some(judged) = judged {
            let tokens = record.estimate.map_or(0, |estimate| estimate.tokens);
            pool.window.add(arrived, tokens, judged);
            pool.window.add_tpot(arrived, tpot_ratio(record, &objectives));
            pool.totals.0 += 1.0;
            pool.totals.1 += f64::from(u8::from(judged.loss > 0.0));
        }
        let failed = matches!(record.outcome, Outcome::UpstreamError(_) | Outcome::Timeout(_))
            || record.assigned.as_ref().is_some_and(|assigned| assigned.fell_back);
        // One client's failures count if other clients' failures confirm them, or if it is the only
        // client.
        let is_confirmed = |arm: usize, origins: &mut [OriginShares; 2]| {
            let is_only = origins.iter().all(|own| own.is_only(record.origin));
            origins[arm].note(record.origin, failed) || is_only
        };
        if let Some((arm, arms, origins)) = arm
            && is_confirmed(arm, origins)
            && let Some(loss) = judged.map(|judged| judged.loss).or(failed.then_some(LOSS_OF_SHED))
        {
            arms.add(arm, (arrived, now), loss, failed);
        }
    }

    /// Takes the requests of a pool that ended since the last call.
    pub fn take_tally(&self, pool: &str) -> Tally {
        let pools = &mut self.0.lock().pools;
        pools.iter_mut().find(|own| *own.name == *pool).map(|own| std::mem::take(&mut own.tally)).unwrap_or_default()
    }

    /// The requests of a pool that ended since the gateway started.
    pub fn ended(&self, pool: &str) -> Tally {
        let pools = &self.0.lock().pools;
        pools.iter().find(|own| *own.name == *pool).map(|own| own.ended).unwrap_or_default()
    }

    /// Compares the arms with these labels, by arrivals from `from` on; `None`: ends the
    /// comparison.
    pub fn compare(&self, labels: Option<[String; 2]>, from: Duration) {
        self.0.lock().arms = labels.map(|labels| (labels, Arms::new(from), Default::default()));
    }

    /// The counts of the compared arms.
    pub fn arms(&self) -> Arms {
        self.0.lock().arms.as_ref().map_or_else(Arms::default, |(_, arms, _)| arms.clone())
    }

    /// Judged requests of these pools so far, and how many of them missed an objective.
    pub fn totals(&self, names: &[String]) -> (f64, f64) {
        let pools = &self.0.lock().pools;
        let own = pools.iter().filter(|pool| names.iter().any(|name| **name == *pool.name));
        own.fold((0.0, 0.0), |sum, pool| (sum.0 + pool.totals.0, sum.1 + pool.totals.1))
    }

    /// Notes the waiting requests for [`recent`](Self::recent).
    pub fn note_waiting(&self, waiting: &[WaitingRequest], now: Duration) {
        self.0.lock().recent.note_waiting(waiting, now);
    }

    /// Requests of the last minutes, ended and waiting.
    pub fn recent(&self) -> Vec<RecentRequest> {
        self.0.lock().recent.all()
    }

    /// Notes the present use of the pools' limits.
    pub fn sample(&self, view: &[PoolView], now: Duration) {
        for pool in &mut self.0.lock().pools {
            let Some(view) = view.iter().find(|view| view.name == pool.name) else { continue };
            pool.window.usage.count(view, now);
            let fastest = view.backends.iter().map(|backend| backend.prefill_rate).fold(0.0, f64::max);
            if fastest > 0.0 && fastest.is_finite() {
                pool.undisturbed.prefill_rate = fastest;
            }
        }
    }

    /// The window of the pools at these positions.
    pub fn window(&self, positions: &[usize]) -> Window {
        let pools = &self.0.lock().pools;
        let window = |pool: &Observed| PoolWindow { widest: pool.widest, ..pool.window.clone() };
        let pools: Vec<_> = positions.iter().filter_map(|at| Some(window(pools.get(*at)?))).collect();
        let from = pools.iter().map(|pool| pool.from).max().unwrap_or_default();
        Window { from, pools }
    }

    /// Begins a new window of these pools.
    pub fn begin(&self, positions: &[usize], now: Duration) {
        let pools = &mut self.0.lock().pools;
        for at in positions {
            if let Some(pool) = pools.get_mut(*at) {
                pool.window = PoolWindow::new(now);
            }
        }
    }
}
