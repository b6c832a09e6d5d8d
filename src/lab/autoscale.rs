//! Starts and stops engines during a run, as the gateway's own autoscaler or a cluster's autoscaler
//! (HPA, KEDA) decides.
//!
//! An ordered engine starts for [`Autoscale::cold_start`], and is paid from the order to the end.
//! An engine that must go gets no new requests. It ends with the last request in flight, at the
//! latest after [`DRAIN`]. The highest number goes first, as in a StatefulSet.
//!
//! | policy | number of engines |
//! |---|---|
//! | fixed | constant |
//! | queue, in_flight | HPA or KEDA with an average value: ceil(metric / target), every 15 s |
//! | busy | HPA with a utilization: ceil(ready x share of time computing / target), every 15 s |
//! | predicted | [`sluice_online::scaler::Scaler`] |
//!
//! As documented, the HPA ignores changes within 10 %. At once it scales up to twice the number or
//! by four, whichever is more. It scales down only to the highest number that it wanted in the last
//! [`Autoscale::down_after`] (`stabilizationWindowSeconds`, default 300 s). Bounds: one look per
//! second; at most the engines of the scenario.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::autoscale_rules::{Autoscale, Policy};
use crate::cluster::Cluster;
use crate::engine::EngineStats;
use crate::setup::{EngineChange, Lab};
use sluice_bench::{Extent, RunPlan};
use sluice_config::attainment;
use sluice_core::base::BackendId;
use sluice_gateway::pool::{Admission, Cordon, PoolView};
use sluice_online::observe::Observer;
use sluice_online::observe::tally::OUTPUT_WORK;
use sluice_online::scaler::demand::DAY;
use sluice_online::scaler::{Look, Scaler, ScalerRules};

/// Longest drain of an engine that must go; `terminationGracePeriodSeconds` in the chart.
const DRAIN: Duration = Duration::from_secs(330);
const SYNC: Duration = Duration::from_secs(15);
/// Relative change of the metric up to which the HPA does nothing.
const TOLERANCE: f64 = 0.1;
/// Engines that the HPA may add at once, unless doubling adds more.
const AT_ONCE: u32 = 4;
/// Distance of the seed of the day before from the seed of the run.
const DAY_BEFORE: u64 = 1 << 32;
/// Requests whose lengths give the mean work of the day before.
const SAMPLE: u64 = 2_000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Off,
    Starting(Duration),
    Ready,
    Draining(Duration),
}

pub(crate) struct Surroundings<'a> {
    pub(crate) now: Duration,
    pub(crate) start: Instant,
    pub(crate) admission: &'a Admission,
    pub(crate) cluster: &'a Cluster,
    pub(crate) observer: &'a Observer,
    pub(crate) lab: &'a Lab,
    /// The gateway's backends, each with the index of its engine.
    pub(crate) backends: &'a [(BackendId, usize)],
}

#[derive(Debug)]
pub(crate) struct LabScaler {
    rules: Autoscale,
    states: Vec<State>,
    paid: Vec<f64>,
    last: Duration,
    hpa: Hpa,
    scaler: Scaler,
}

impl LabScaler {
    /// The autoscaler of a run, if the scenario has one. Stops the engines that do not run at the
    /// start.
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
            attainment: lab.config.pools.first().map_or(0.99, |pool| attainment(&lab.config.classes, pool)),
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

    /// The cordon of a stopped engine. If the pool may have no engine, requests may wait for the
    /// first one.
    fn cordon_when_off(&self, at: usize) -> Cordon {
        if at == 0 && self.rules.min == 0 { Cordon::Starting } else { Cordon::Down }
    }

    /// Seconds for which each engine was paid, by index of the backend.
    pub(crate) fn paid(&self, now: Duration) -> Vec<f64> {
        let rest = now.saturating_sub(self.last).as_secs_f64();
        let count = |(paid, state): (&f64, &State)| paid + if *state == State::Off { 0.0 } else { rest };
        self.paid.iter().zip(&self.states).map(count).collect()
    }

    /// Records the paid seconds of each engine. Without an autoscaler, each engine is paid for the
    /// whole run.
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

#[derive(Debug, Default)]
struct Hpa {
    due: Duration,
    /// Seconds in which engines computed, and when they were read.
    busy: (f64, Duration),
    wanted: VecDeque<(Duration, u32)>,
}

impl Hpa {
    /// Decides the number of engines. `metric`: the measured sum, divided by the target per engine.
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
        // A starting engine is not in the mean, and counts as unused in the comparison with the
        // current number.
        self.step(share * ready / target, have, down_after, now)
    }
}

/// Work per second in each minute of the day before, which has another seed.
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
