//! Engines that come and go during a run, as an autoscaler decides: the gateway's own, or one of those that clusters have.
//!
//! An engine that is ordered starts for [`Autoscale::cold_start`] and is paid from its order to its end. One that is to go gets no
//! new requests and ends when those in flight have: the engine with the highest number goes first, as in a StatefulSet, and may take
//! [`DRAIN`], after which its streams break.
//!
//! | policy | engines |
//! |---|---|
//! | fixed | always as many |
//! | queue, in_flight | HPA or KEDA with an average value: ceil(metric / target); every 15 s; changes within 10 % are left out |
//! | busy | HPA with a utilization: ceil(ready * share of the time in which engines computed / target), otherwise the same |
//! | predicted | [`sluice_online::Scaler`] |
//!
//! Of the HPA also: it scales up to twice as many or by four at once, whichever is more, and down to the highest count that it wanted
//! in the last [`Autoscale::down_after`] (`stabilizationWindowSeconds`, 300 s by default), as its documentation says.
//!
//! Bounds: one look per second. The engines of the scenario are the most that there can be.

use std::collections::VecDeque;
use std::time::Duration;

use crate::autoscale_rules::{Autoscale, Policy};
use crate::cluster::Cluster;
use crate::engine::EngineStats;
use crate::setup::{EngineChange, Lab};
use crate::tuning::Surroundings;
use sluice_bench::{Extent, RunPlan};
use sluice_core::base::BackendId;
use sluice_gateway::pool::{Admission, Cordon, PoolView};
use sluice_online::scaler::demand::DAY;
use sluice_online::scaler::tally::OUTPUT_WORK;
use sluice_online::{Look, Scaler, ScalerRules};

/// The longest time for the requests of an engine that is to go; `terminationGracePeriodSeconds` in the chart.
const DRAIN: Duration = Duration::from_secs(330);
/// Between two decisions of the HPA.
const SYNC: Duration = Duration::from_secs(15);
/// A change of the metric within this share of the target changes nothing.
const TOLERANCE: f64 = 0.1;
/// The HPA adds so many at once, or doubles.
const AT_ONCE: u32 = 4;
/// The seed of the day before is this much after that of the run.
const DAY_BEFORE: u64 = 1 << 32;
/// Requests whose lengths give the mean work of the day before.
const SAMPLE: u64 = 2_000;

/// What an engine is doing.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Off,
    /// Ready then.
    Starting(Duration),
    Ready,
    /// Its requests may take until then.
    Draining(Duration),
}

/// The autoscaler of a run.
#[derive(Debug)]
pub(crate) struct LabScaler {
    rules: Autoscale,
    states: Vec<State>,
    /// Seconds for which each engine was paid.
    paid: Vec<f64>,
    last: Duration,
    hpa: Hpa,
    scaler: Scaler,
}

impl LabScaler {
    /// The scaler of a run, if it has one. Engines that do not run at the start are stopped.
    pub(crate) fn new(
        lab: &Lab,
        seed: u64,
        cluster: &Cluster,
        admission: &Admission,
        backends: &[(BackendId, usize)],
    ) -> Option<Self> {
        let rules = lab.autoscale.clone()?;
        let max = rules.max.unwrap_or(u32::MAX).min(backends.len() as u32);
        let start = rules.start.unwrap_or(rules.min.max(1)).min(max);
        let rules = Autoscale { max: Some(max), ..rules };
        let states =
            (0..backends.len()).map(|at| if at < start as usize { State::Ready } else { State::Off }).collect();
        let mut scaler = Scaler::new(ScalerRules {
            min: rules.min,
            max,
            attainment: lab.config.pools.first().map_or(0.99, |pool| pool.slo.attainment),
            cold_start: rules.cold_start(),
            down_after: rules.down_after(),
            idle_after: rules.down_after(),
            rate: rules.rate,
        });
        if rules.day_before {
            scaler.set_day_before(&day_before(&lab.traffic[0], seed.wrapping_add(DAY_BEFORE)));
        }
        let own =
            Self { states, paid: vec![0.0; backends.len()], last: Duration::ZERO, hpa: Hpa::default(), scaler, rules };
        for (at, (backend, engine)) in backends.iter().enumerate().skip(start as usize) {
            cluster.change(Duration::ZERO, *engine, EngineChange::Stop);
            admission.set_cordon(*backend, own.cordon_when_off(at));
        }
        Some(own)
    }

    /// While a pool may have no engine, requests may wait for its first one.
    fn cordon_when_off(&self, at: usize) -> Cordon {
        if at == 0 && self.rules.min == 0 { Cordon::Starting } else { Cordon::Down }
    }

    /// Seconds for which engines were paid, until `now`, by the index of the backend.
    pub(crate) fn paid(&self, now: Duration) -> Vec<f64> {
        let rest = now.saturating_sub(self.last).as_secs_f64();
        let count = |(paid, state): (&f64, &State)| paid + if *state == State::Off { 0.0 } else { rest };
        self.paid.iter().zip(&self.states).map(count).collect()
    }

    /// Notes for how long each engine was paid; without a scaler, all the time.
    pub(crate) fn count_paid(
        own: Option<&Self>,
        backends: &[(BackendId, usize)],
        now: Duration,
        engines: &mut [EngineStats],
    ) {
        let paid = own.map_or_else(|| vec![now.as_secs_f64(); backends.len()], |own| own.paid(now));
        for ((_, engine), paid) in backends.iter().zip(paid) {
            engines[*engine].paid = paid;
        }
    }

    /// One look.
    pub(crate) fn step(&mut self, around: &Surroundings<'_>) {
        self.paid = self.paid(around.now);
        self.last = around.now;
        self.advance(around);
        let view = around.admission.view();
        let Some(pool) = view.first() else { return };
        let committed = self.count(|state| matches!(state, State::Ready | State::Starting(_)));
        let wanted = self.wanted(around, pool, committed).clamp(self.rules.min, self.rules.max.unwrap_or(u32::MAX));
        for at in 0..self.states.len() {
            let have = self.count(|state| matches!(state, State::Ready | State::Starting(_)));
            if have < wanted && self.states[at] == State::Off {
                around.admission.set_cordon(around.backends[at].0, Cordon::Starting);
                self.states[at] = State::Starting(around.now + self.rules.cold_start());
            }
        }
        for at in (0..self.states.len()).rev() {
            let have = self.count(|state| matches!(state, State::Ready | State::Starting(_)));
            match self.states[at] {
                State::Ready if have > wanted => {
                    around.admission.set_cordon(around.backends[at].0, Cordon::Draining);
                    self.states[at] = State::Draining(around.now + DRAIN);
                }
                State::Starting(_) if have > wanted => self.end(at, around),
                _ => {}
            }
        }
    }

    fn count(&self, of: impl Fn(&State) -> bool) -> u32 {
        self.states.iter().filter(|state| of(state)).count() as u32
    }

    fn end(&mut self, at: usize, around: &Surroundings<'_>) {
        let (backend, engine) = around.backends[at];
        around.cluster.change(around.now, engine, EngineChange::Stop);
        around.admission.set_cordon(backend, self.cordon_when_off(at));
        self.states[at] = State::Off;
    }

    /// Engines whose start or whose drain is over.
    fn advance(&mut self, around: &Surroundings<'_>) {
        for at in 0..self.states.len() {
            let (backend, engine) = around.backends[at];
            match self.states[at] {
                State::Starting(until) if around.now >= until => {
                    around.cluster.start_as(around.now, engine, &around.lab.engines[engine]);
                    around.admission.engine_replaced(backend, around.start + around.now);
                    around.admission.set_cordon(backend, Cordon::Open);
                    self.states[at] = State::Ready;
                }
                State::Draining(until) if around.cluster.streams(engine) == 0 || around.now >= until => {
                    self.end(at, around);
                }
                _ => {}
            }
        }
    }

    fn wanted(&mut self, around: &Surroundings<'_>, pool: &PoolView, committed: u32) -> u32 {
        let ready = self.count(|state| *state == State::Ready);
        let in_flight: usize = pool.backends.iter().map(|backend| backend.used.slots as usize).sum();
        let target = self.rules.target();
        let metric = match self.rules.policy {
            Policy::Fixed => return committed,
            Policy::Predicted => {
                let slots = pool.backends.iter().map(|backend| backend.limits.slots).min().unwrap_or(1);
                let tally = around.observer.take_tally(&pool.name);
                let starting = committed - ready;
                let look = Look { ready, starting, queue: pool.queue_length, in_flight, slots, tally };
                return self.scaler.step(&look, around.now);
            }
            Policy::Queue => pool.queue_length as f64 / target,
            Policy::InFlight => (pool.queue_length + in_flight) as f64 / target,
            Policy::Busy => {
                let busy: f64 = around.backends.iter().map(|(_, engine)| around.cluster.busy(*engine)).sum();
                return self.hpa.by_busy(
                    busy,
                    f64::from(ready),
                    committed,
                    target,
                    self.rules.down_after(),
                    around.now,
                );
            }
        };
        self.hpa.step(metric, committed, self.rules.down_after(), around.now)
    }
}

/// The horizontal pod autoscaler.
#[derive(Debug, Default)]
struct Hpa {
    due: Duration,
    /// Seconds in which engines computed, and when that was read.
    busy: (f64, Duration),
    /// What it wanted, and when.
    wanted: VecDeque<(Duration, u32)>,
}

impl Hpa {
    /// `metric`: over its target.
    fn step(&mut self, metric: f64, have: u32, down_after: Duration, now: Duration) -> u32 {
        if now < self.due {
            return have;
        }
        self.due = now + SYNC;
        let ratio = metric / f64::from(have.max(1));
        let wanted = if (ratio - 1.0).abs() <= TOLERANCE { have } else { metric.ceil() as u32 };
        self.wanted.push_back((now, wanted));
        self.wanted.retain(|(at, _)| now - *at <= down_after);
        if wanted > have {
            return wanted.min((2 * have).max(have + AT_ONCE));
        }
        let highest = self.wanted.iter().map(|(_, wanted)| *wanted).max().unwrap_or(wanted);
        highest.min(have)
    }

    fn by_busy(&mut self, busy: f64, ready: f64, have: u32, target: f64, down_after: Duration, now: Duration) -> u32 {
        if now < self.due {
            return have;
        }
        let seconds = (now - self.busy.1).as_secs_f64().max(1.0);
        let share = ((busy - self.busy.0) / seconds / ready.max(1.0)).min(1.0);
        self.busy = (busy, now);
        // Engines that start are left out of the mean, and count as if they used nothing when it is to scale up.
        self.step(share * ready / target, have, down_after, now)
    }
}

/// Work per second of each minute of a day, of requests drawn with another seed.
fn day_before(traffic: &RunPlan, seed: u64) -> Vec<f64> {
    let mut plan = traffic.clone();
    plan.workload.seed = seed;
    let work = |ordinal: u64| {
        let request = plan.workload.request(ordinal);
        f64::from(request.prompt_tokens) + OUTPUT_WORK * f64::from(request.output_tokens)
    };
    let mean = (0..SAMPLE).map(work).sum::<f64>() / SAMPLE as f64;
    let extent = Extent::Lasting(Duration::from_secs(60 * DAY as u64));
    let mut minutes = vec![0.0; DAY];
    for at in plan.arrival.schedule(extent, seed).unwrap_or_default() {
        if let Some(minute) = minutes.get_mut(at.as_secs() as usize / 60) {
            *minute += mean / 60.0;
        }
    }
    minutes
}
