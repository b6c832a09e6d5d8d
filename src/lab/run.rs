//! The event loop of a simulation, and its result.
//!
//! Each iteration finds the time of the next event, at most [`TIMER_STEP`] ahead while requests are
//! in flight. It processes the due events, sets tokio's clock to their time, and runs all tasks
//! until each is blocked. Events that no client can see (the end of a step, a request that reaches
//! an engine) wake no task and do not set the clock.
//!
//! The gateway's own timers (timeouts of queues and streams) have tokio's resolution of 1 ms and
//! fire up to [`TIMER_STEP`] late. All other times are exact.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::autoscale::{LabScaler, Surroundings};
use crate::classes;
use crate::client::{LastRecord, seconds};
use crate::cluster::Cluster;
use crate::engine::{Engine, EngineStats};
use crate::error::LabError;
use crate::event_queue::{Event, EventQueue};
use crate::findings::LabFindings;
use crate::job::{Ended, Job, LabFlow, parsed_request};
use crate::setup::Lab;
use crate::tuning::{LabDeployment, LabTuner};
use crate::upstream::LabUpstream;
use sluice_bench::load::conversation::Conversation;
use sluice_bench::load::workload::LoadRequest;
use sluice_bench::result::record::ServerSide;
use sluice_bench::{Arrival, Extent, Record, RunResult};
use sluice_core::base::{BackendId, Rng};
use sluice_gateway::experiment::ExperimentReport;
use sluice_gateway::flow::{Flow, LearnedState, RoutingTable, specs};
use sluice_gateway::pool::{Admission, Bound, Served};
use sluice_online::drive::LOOK_INTERVAL;
use sluice_online::event::Event as TunerEvent;
use sluice_online::findings::{Finding, LOOK};
use sluice_online::observe::window::Window;
use sluice_online::tuner::report::TunerReport;
use sluice_sim::engine::BLOCK_TOKENS;

/// Largest jump of the clock with requests in flight, because timers may fire in between.
const TIMER_STEP: Duration = Duration::from_millis(10);
/// Number of tasks after which tokio checks timers: more than can be ready at once.
const EVENT_INTERVAL: u32 = 1 << 30;
const SCALE_INTERVAL: Duration = Duration::from_secs(1);
/// Pause of a client in a closed loop after a failure, unless `Retry-After` is longer.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// Requests of traffic number k (from 0) have numbers from k times this number on.
const INDEX_STRIDE: u64 = 1 << 40;

/// The result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct LabRun {
    /// The result as a load generator without any lag would have measured it.
    pub result: RunResult,
    /// Statistics of each engine, in the order of [`Lab::engines`].
    pub engines: Vec<EngineStats>,
    /// The experiments of the configuration at the end.
    pub experiments: Vec<ExperimentReport>,
    /// Actions of the online tuner, if the configuration has one that acts.
    pub tuning: Vec<TunerEvent>,
    /// The tuner's estimates at the end.
    pub tuner: Option<TunerReport>,
    /// Findings that appeared, with the seconds from the start.
    pub findings: Vec<(f64, Finding)>,
    /// Losses of requests by pool, as the tuner sees them. Without a tuner, all requests since the
    /// start count.
    pub window: Window,
}

/// Runs a simulation with a seed. Must not be called inside a single-threaded runtime.
///
/// # Errors
/// The setup is not valid. After virtual time has started there are no errors.
pub fn run(lab: &Lab, seed: u64) -> Result<LabRun, LabError> {
    run_until(lab, seed, &mut |_| false)
}

/// The state of a run, for the caller of [`run_until`].
#[derive(Debug)]
pub struct Progress<'a> {
    /// Seconds from the start.
    pub now: f64,
    /// Requests that have ended since the last call.
    pub ended: &'a [Record],
    /// Requests in flight, by number.
    pub in_flight: &'a BTreeMap<u64, Record>,
}

/// Runs a simulation until `done` returns true. `done` is called whenever requests have ended.
/// Requests in flight are then unfinished. Blocks the thread.
pub fn run_until(lab: &Lab, seed: u64, done: &mut dyn FnMut(&Progress<'_>) -> bool) -> Result<LabRun, LabError> {
    let lab = checked(lab, seed)?;
    let simulate = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().start_paused(true).event_interval(EVENT_INTERVAL).build()?;
        runtime.block_on(async { Simulation::new(lab, seed)?.run(done).await })
    };
    // A tuner of real engines calls this on a thread of its runtime, which the thread must leave
    // first.
    if tokio::runtime::Handle::try_current().is_ok() { tokio::task::block_in_place(simulate) } else { simulate() }
}

fn checked(lab: &Lab, seed: u64) -> Result<Lab, LabError> {
    let mut lab = lab.clone();
    if lab.traffic.is_empty() {
        return Err(LabError::NoTraffic);
    }
    for (place, traffic) in lab.traffic.iter_mut().enumerate() {
        traffic.workload.seed = seed.wrapping_add(place as u64 * INDEX_STRIDE);
        traffic.workload.check()?;
        traffic.arrival.check()?;
        traffic.sessions.as_ref().map_or(Ok(()), |sessions| sessions.check())?;
        if traffic.max_concurrency.is_some() {
            return Err(LabError::Concurrency);
        }
    }
    lab.check_engines()?;
    Ok(lab)
}

struct Simulation {
    lab: Lab,
    events: EventQueue,
    cluster: Arc<Cluster>,
    flow: Arc<LabFlow>,
    learned: LearnedState,
    /// The gateway's backends, each with the index of its engine.
    backends: Vec<(BackendId, usize)>,
    start: Instant,
    /// tokio's clock, since the start.
    clock: Duration,
    /// Time at which a request was last sent or queued; in a closed loop, also at which one last
    /// ended.
    last_request: Duration,
    /// Number of arrivals of each traffic that were put into the event queue.
    arrivals: Vec<u64>,
    records: Vec<Record>,
    in_flight: BTreeMap<u64, Record>,
    ended: Arc<Mutex<Vec<Ended>>>,
    tuner: Option<LabTuner>,
    scaler: Option<LabScaler>,
    findings: LabFindings,
}

impl Simulation {
    fn new(lab: Lab, seed: u64) -> Result<Self, LabError> {
        let mut seeds = Rng::new(seed);
        let engines = lab.engines.iter().map(|setup| Engine::new(setup, lab.adapter_names(), seeds.next_u64()));
        let addresses = lab.addresses()?;
        let engine_of: Vec<usize> = addresses.iter().map(|(_, engine)| *engine).collect();
        let cluster = Cluster::new(engines.collect(), addresses, lab.arm_models());
        let start = Instant::now();
        let rules = specs::health_rules(&lab.config.health);
        let admission = Admission::new(start, rules, seeds.next_u64());
        let layout = admission.apply(&specs::pools(&lab.config), rules, start);
        let backends: Vec<_> = layout.backends.iter().flatten().copied().zip(engine_of).collect();
        for (backend, engine) in &backends {
            let sim = &lab.engines[*engine].sim;
            let blocks = if sim.engine.prefix_caching { sim.engine.num_blocks } else { 0 };
            admission.set_cache_size(*backend, u64::from(blocks) * u64::from(BLOCK_TOKENS));
            let adapters = if sim.lora { lab.adapter_names() } else { Vec::new() };
            let served = Served::list(sim.names.iter().chain(&adapters).map(|name| &**name));
            admission.set_bounds([(*backend, Bound::Ceiling(lab.launched.then_some(sim.engine.max_num_seqs)))]);
            admission.set_served(*backend, served, Some(u64::from(sim.max_model_len)), start);
            if sim.lora {
                admission.set_adapter_slots(*backend, sim.engine.max_loras as usize);
            }
        }
        let counters = vec![None; lab.config.models.len()];
        let learned = LearnedState::default();
        learned.set_adapters(lab.adapter_names());
        let table = RoutingTable::new(Arc::clone(&lab.config), &layout, &lab.model_names(), &counters, &learned);
        let recorder = LastRecord::new(start);
        let tuner = LabTuner::new(&lab, recorder.observer());
        if tuner.is_none() {
            recorder.observer().configure(&lab.config, Duration::ZERO);
        }
        let scaler = LabScaler::new(&lab, seed, &cluster, &admission, &backends);
        let flow = Flow::new(admission, LabUpstream(Arc::clone(&cluster)), recorder, table);
        let mut simulation = Self {
            events: EventQueue::default(),
            cluster,
            flow: Arc::new(flow),
            learned,
            backends,
            start,
            clock: Duration::ZERO,
            last_request: Duration::ZERO,
            arrivals: vec![0; lab.traffic.len()],
            records: Vec::new(),
            in_flight: BTreeMap::new(),
            ended: Arc::default(),
            tuner,
            scaler,
            findings: LabFindings::default(),
            lab,
        };
        simulation.schedule(seed)?;
        Ok(simulation)
    }

    fn schedule(&mut self, seed: u64) -> Result<(), LabError> {
        self.events.add(Duration::ZERO, Event::Probe);
        self.events.add(LOOK, Event::Look);
        if self.tuner.is_some() {
            self.events.add(LOOK_INTERVAL, Event::Tune);
        }
        if self.scaler.is_some() {
            self.events.add(SCALE_INTERVAL, Event::Scale);
        }
        for (engine, setup) in self.lab.engines.iter().enumerate() {
            for (at, change) in &setup.changes {
                self.events.add(*at, Event::Change { engine, change: *change });
            }
        }
        for (traffic, plan) in self.lab.traffic.iter().enumerate() {
            let schedule = match plan.arrival {
                Arrival::ClosedLoop { concurrency } => {
                    let most = if let Extent::Requests(count) = plan.extent { count } else { u64::MAX };
                    vec![Duration::ZERO; u64::from(concurrency).min(most) as usize]
                }
                _ => plan.arrival.schedule(plan.extent, seed.wrapping_add(traffic as u64 * INDEX_STRIDE))?,
            };
            self.arrivals[traffic] = schedule.len() as u64;
            self.last_request = self.last_request.max(schedule.last().copied().unwrap_or_default());
            for (ordinal, at) in (0u64..).zip(schedule) {
                self.events.add(at, Event::Arrival { traffic, ordinal });
            }
        }
        Ok(())
    }

    fn add_request(&mut self, at: Duration, event: Event) {
        self.last_request = self.last_request.max(at);
        self.events.add(at, event);
    }

    async fn run(mut self, done: &mut dyn FnMut(&Progress<'_>) -> bool) -> Result<LabRun, LabError> {
        if self.tuner.is_some() {
            tokio::spawn(Arc::clone(&self.flow).serve_copies());
        }
        while self.events.has_requests() || !self.in_flight.is_empty() {
            let next = [self.cluster.next_at(), self.events.next_at()].into_iter().flatten().min();
            let limit = if self.in_flight.is_empty() { Duration::MAX } else { self.clock + TIMER_STEP };
            let now = next.unwrap_or(limit).min(limit);
            if now > self.last_request + self.lab.give_up_after {
                break;
            }
            if self.process_due(now) || now == limit {
                let before = self.records.len();
                self.run_tasks(now).await;
                let ended = &self.records[before..];
                let progress = Progress { now: seconds(self.clock), ended, in_flight: &self.in_flight };
                if !ended.is_empty() && done(&progress) {
                    break;
                }
            }
        }
        Ok(self.result())
    }

    /// Processes the events up to `now`. Returns whether one may have woken a task.
    fn process_due(&mut self, now: Duration) -> bool {
        let mut woken = self.cluster.run_due(now);
        while let Some(event) = self.events.take(now) {
            match event {
                Event::Arrival { traffic, ordinal } => self.arrive(now, traffic, ordinal),
                Event::Turn { traffic, conversation } => self.turn(now, traffic, conversation, Some(now)),
                Event::Change { engine, change } => self.cluster.change(now, engine, change),
                Event::Probe => self.probe(now),
                Event::Tune => self.tune(now),
                Event::Scale => self.scale(now),
                Event::Look => self.look(now),
            }
            woken = true;
        }
        woken
    }

    async fn run_tasks(&mut self, now: Duration) {
        tokio::time::advance(now.saturating_sub(self.clock)).await;
        self.clock = now.max(self.clock);
        let ended = std::mem::take(&mut *self.ended.lock());
        for Ended { traffic, record, conversation, retry_after } in ended {
            self.in_flight.remove(&record.index);
            let completed = record.is_completed();
            // Without the pause, a client whose request is refused at once would repeat it for
            // ever.
            let at_once = !record.is_failed() && record.ended > record.sent;
            let pause = if at_once { Duration::ZERO } else { retry_after.unwrap_or_default().max(RETRY_AFTER) };
            self.records.push(record);
            let sessions = self.lab.traffic[traffic].sessions;
            if let (Some(conversation), Some(sessions), true) = (conversation, sessions, completed) {
                let think = conversation.think(&self.lab.traffic[traffic].workload, &sessions);
                self.add_request(self.clock + think, Event::Turn { traffic, conversation });
            } else {
                self.repeat(traffic, pause);
            }
        }
    }

    /// In a closed loop, schedules the next request after `pause`.
    fn repeat(&mut self, traffic: usize, pause: Duration) {
        let (plan, at) = (&self.lab.traffic[traffic], self.clock + pause);
        if !matches!(plan.arrival, Arrival::ClosedLoop { .. }) {
            return;
        }
        let more = match plan.extent {
            Extent::Requests(count) => self.arrivals[traffic] < count,
            Extent::Lasting(length) => at < length,
        };
        self.last_request = self.last_request.max(self.clock);
        if more {
            let ordinal = self.arrivals[traffic];
            self.arrivals[traffic] += 1;
            self.add_request(at, Event::Arrival { traffic, ordinal });
        }
    }

    /// Advances the ramps of experiments, and probes the engines without a network: a running
    /// engine answers, and a hung one shows no progress.
    fn probe(&mut self, now: Duration) {
        let (admission, at) = (self.flow.admission(), self.start + now);
        self.learned.experiments.advance(Timestamp::UNIX_EPOCH + now);
        if !self.learned.experiments.arm_models().is_empty() {
            self.learned.experiments.note_adapters(&self.cluster.adapters(&self.lab.adapters()));
        }
        let silent = admission.silent_backends(self.lab.config.health.stall, at);
        for (backend, engine) in &self.backends {
            admission.record_probe(*backend, self.cluster.is_up(*engine), at);
            if self.cluster.is_hung(*engine) && silent.contains(backend) {
                admission.mark_hung(*backend, at);
            }
        }
        if self.events.has_requests() || !self.in_flight.is_empty() {
            self.events.add(now + self.lab.config.health.probe_interval, Event::Probe);
        }
    }

    fn tune(&mut self, now: Duration) {
        let Some(tuner) = &mut self.tuner else { return };
        let mut deployment = LabDeployment {
            own: tuner,
            now,
            start: self.start,
            lab: &mut self.lab,
            flow: &self.flow,
            learned: &self.learned,
            cluster: &self.cluster,
            backends: &self.backends,
        };
        deployment.step();
        if self.events.has_requests() || !self.in_flight.is_empty() {
            self.events.add(now + LOOK_INTERVAL, Event::Tune);
        }
    }

    fn scale(&mut self, now: Duration) {
        let Some(scaler) = &mut self.scaler else { return };
        scaler.step(&Surroundings {
            now,
            start: self.start,
            admission: self.flow.admission(),
            cluster: &self.cluster,
            observer: self.flow.recorder().observer(),
            lab: &self.lab,
            backends: &self.backends,
        });
        if self.events.has_requests() || !self.in_flight.is_empty() {
            self.events.add(now + SCALE_INTERVAL, Event::Scale);
        }
    }

    fn look(&mut self, now: Duration) {
        self.findings.look(now, self.start, &self.flow, (&self.cluster, &self.backends));
        self.findings.limit_tokens(&self.lab.config, &self.flow, &self.cluster, &self.backends, now);
        if self.events.has_requests() || !self.in_flight.is_empty() {
            self.events.add(now + LOOK, Event::Look);
        }
    }

    fn arrive(&mut self, now: Duration, traffic: usize, ordinal: u64) {
        let plan = &self.lab.traffic[traffic];
        let due = (!matches!(plan.arrival, Arrival::ClosedLoop { .. })).then_some(now);
        match &plan.sessions {
            Some(sessions) => {
                let conversation = Conversation::new(&plan.workload, sessions, ordinal);
                self.turn(now, traffic, Box::new(conversation), due);
            }
            None => {
                let request = plan.workload.request(ordinal);
                self.send(now, traffic, ordinal, request, due, None);
            }
        }
    }

    fn turn(&mut self, now: Duration, traffic: usize, mut conversation: Box<Conversation>, due: Option<Duration>) {
        let plan = &self.lab.traffic[traffic];
        match plan.sessions.and_then(|sessions| conversation.next_turn(&plan.workload, &sessions)) {
            Some(request) => self.send(now, traffic, conversation.ordinal(), request, due, Some(conversation)),
            None => self.repeat(traffic, Duration::ZERO),
        }
    }

    fn send(
        &mut self,
        now: Duration,
        traffic: usize,
        ordinal: u64,
        request: LoadRequest,
        due: Option<Duration>,
        conversation: Option<Box<Conversation>>,
    ) {
        let index = traffic as u64 * INDEX_STRIDE + ordinal;
        let record = Record {
            index,
            class: self.lab.class_offset(traffic) + request.class,
            adapter: request.adapter.map(|adapter| self.lab.adapter_id(traffic, adapter)),
            session: request.session,
            due: due.map(seconds),
            sent: seconds(now),
            prompt_tokens: u64::from(request.prompt_tokens),
            ..Record::default()
        };
        let plan = &self.lab.traffic[traffic];
        self.cluster.lock().requests.insert(index, parsed_request(plan, &request, &record, conversation.as_deref()));
        self.in_flight.insert(index, record.clone());
        let job = Job {
            flow: Arc::clone(&self.flow),
            cluster: Arc::clone(&self.cluster),
            ended: Arc::clone(&self.ended),
            api: plan.workload.api,
            tenant: self.lab.tenants.get(traffic).cloned().flatten(),
            start: self.start,
            client_timeout: self.lab.client_timeout,
            has_copies: self.tuner.is_some(),
        };
        tokio::spawn(job.serve(traffic, request, record, conversation));
    }

    fn result(self) -> LabRun {
        #[cfg(test)]
        self.check_released();
        let findings = self.findings.appeared;
        let Self {
            lab, events, mut records, in_flight, cluster, clock, learned, tuner, scaler, flow, backends, ..
        } = self;
        let experiments = learned.experiments.all();
        let experiments = experiments.iter().map(|experiment| ExperimentReport::new(experiment, false)).collect();
        let duration = records.iter().map(|record| record.ended).fold(0.0, f64::max);
        let partial = !in_flight.is_empty() || events.has_requests();
        records.extend(in_flight.into_values().map(|record| Record { ended: seconds(clock), ..record }));
        records.sort_unstable_by_key(|record| record.index);
        let mut engines = cluster.take_stats();
        LabScaler::count_paid(scaler.as_ref(), &backends, clock, &mut engines);
        let servers: Vec<ServerSide> = engines.iter().map(|engine| engine.side.clone()).collect();
        let duration = if partial { seconds(clock) } else { duration };
        let config = lab.run_config();
        let mut result = RunResult { config, duration, partial, requests: records, servers, ..RunResult::default() };
        classes::divide(&mut result, &lab.config.classes);
        let pools: Vec<usize> = (0..lab.config.pools.len()).collect();
        let window = flow.recorder().observer().window(&pools);
        let (tuning, tuner) = tuner.map(LabTuner::result).unzip();
        LabRun { result, engines, experiments, tuning: tuning.unwrap_or_default(), tuner, findings, window }
    }
}

/// In every test, checks that a run without requests in flight has released everything.
#[cfg(test)]
impl Simulation {
    fn check_released(&self) {
        if !self.in_flight.is_empty() {
            return;
        }
        let admission = self.flow.admission();
        assert_eq!((admission.load(), admission.check_invariants()), ((0, 0), Ok(())));
        for backend in admission.view().iter().flat_map(|pool| &pool.backends) {
            assert_eq!(backend.used, sluice_gateway::pool::CapacityUsage::default(), "{} holds capacity", backend.name);
        }
        let state = self.cluster.lock();
        assert!(
            state.requests.is_empty() && state.engines.iter().all(|engine| engine.streams() == 0),
            "an exchange was not closed"
        );
    }
}
