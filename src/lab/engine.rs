//! One simulated engine in a run, and its statistics.
//!
//! [`Clock`] maps the clock of the [`VirtualServer`] to the clock of the run. At the usual speed
//! the clocks differ by a constant. An engine that is n times slower takes n times as long for
//! everything, including the API server. An engine that starts again is a new virtual server, with
//! the adapters of the flags. Bounds: at most [`MAX_SAMPLES`] samples; the traffic bounds the
//! requests.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::Duration;

use crate::setup::{EngineChange, EngineSetup, PlantedFault};
use sluice_bench::result::record::{ServerSample, ServerSide};
use sluice_core::base::Rng;
use sluice_core::vllm::metrics::STEP_TOKENS;
use sluice_gateway::experiment::EngineAdapters;
use sluice_online::findings::facts::PageFacts;
use sluice_online::observe::engines::EngineSample;
use sluice_sim::engine::{Admitted, BLOCK_TOKENS, SequenceId};
use sluice_sim::http::wire::Finish;
use sluice_sim::real_time::output_collector::{Broken, OutputCollector};
use sluice_sim::virtual_server::StepEnd;
use sluice_sim::{Content, Request, SimConfig, VirtualServer};

const MAX_SAMPLES: usize = 100_000;
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Statistics of an engine over a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Name of the backend.
    pub backend: String,
    /// Requests that the engine received.
    pub requests: u64,
    /// Number of steps.
    pub steps: u64,
    /// Seconds during which a step was running.
    pub busy: f64,
    /// Computed tokens: prompts without their cached part, and outputs.
    pub computed_tokens: u64,
    /// Most sequences that waited because other adapters had all slots (`--max-loras`).
    pub deferred_peak: u64,
    /// Seconds of steps during which a sequence waited for an adapter slot.
    pub deferred: f64,
    /// Values that a load generator would have scraped from `/metrics`.
    pub side: ServerSide,
    /// Seconds for which the engine took a GPU, from the order to the end.
    pub paid: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct EngineRequest {
    pub(crate) prompt_tokens: u32,
    pub(crate) output_tokens: u32,
    pub(crate) adapter: Option<u16>,
    pub(crate) priority: i64,
    pub(crate) content: Content,
}

#[derive(Clone, Copy, Debug)]
struct Clock {
    run: Duration,
    server: Duration,
    slower: f64,
}

impl Clock {
    fn to_server(self, at: Duration) -> Duration {
        let passed = at.saturating_sub(self.run);
        self.server + if self.slower == 1.0 { passed } else { passed.div_f64(self.slower) }
    }

    fn to_run(self, at: Duration) -> Duration {
        let left = at.saturating_sub(self.server);
        self.run + if self.slower == 1.0 { left } else { left.mul_f64(self.slower) }
    }
}

/// A map without a random seed, because the order of iteration must be the same in each run.
type BySequence<T> = HashMap<SequenceId, T, BuildHasherDefault<DefaultHasher>>;

/// Times are on the clock of the run unless a comment says otherwise.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) config: SimConfig,
    /// Names of all adapters of the run, by number.
    adapters: Vec<String>,
    server: VirtualServer,
    clock: Clock,
    slower: f64,
    up: bool,
    /// Whether the engine hangs. While it does, the clock stands still.
    hung: bool,
    streams: BySequence<Arc<OutputCollector>>,
    next: SequenceId,
    next_at: Option<Duration>,
    stats: EngineStats,
    /// Start and end of the last step, on the server's clock.
    last_step: Option<(Duration, Duration)>,
    was_deferring: bool,
    next_sample: Duration,
    fault: Option<PlantedFault>,
    /// Sums for the metrics page.
    sums: PageFacts,
    /// Time of arrival and length of each request without a first token.
    waits: BySequence<(Duration, u32)>,
}

/// A virtual server that has just started. All adapters in the flags are loaded, even ones that no
/// request names.
fn started(config: &SimConfig, adapters: &[String]) -> VirtualServer {
    let number = |(place, (name, _)): (usize, &(String, String))| {
        let known = adapters.iter().position(|known| known == name);
        u16::try_from(known.unwrap_or(adapters.len() + place)).ok()
    };
    config.virtual_server_with(config.adapters.iter().enumerate().filter_map(number))
}

impl Engine {
    /// An engine that has just started. `adapters`: the names of all adapters of the run, by
    /// number.
    pub(crate) fn new(setup: &EngineSetup, adapters: Vec<String>, seed: u64) -> Self {
        let config = SimConfig { seed: Rng::new(seed).next_u64(), ..setup.sim.clone() };
        let backend = setup.backend.as_str();
        let side = ServerSide { url: backend.to_owned(), ..ServerSide::default() };
        Self {
            server: started(&config, &adapters),
            config,
            adapters,
            clock: Clock { run: Duration::ZERO, server: Duration::ZERO, slower: 1.0 },
            slower: 1.0,
            up: true,
            hung: false,
            streams: BySequence::default(),
            next: 0,
            next_at: None,
            stats: EngineStats { backend: backend.to_owned(), side, ..EngineStats::default() },
            last_step: None,
            was_deferring: false,
            next_sample: Duration::ZERO,
            fault: None,
            sums: PageFacts::default(),
            waits: BySequence::default(),
        }
    }

    pub(crate) fn start_as(&mut self, now: Duration, setup: &EngineSetup) {
        let seed = Rng::new(self.config.seed).next_u64();
        self.config = SimConfig { seed, ..setup.sim.clone() };
        self.fault = setup.fault;
        self.slower = if let Some(PlantedFault::Slower(factor)) = self.fault { factor } else { 1.0 };
        self.replace_server(now);
        self.up = true;
        self.update_next();
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up
    }

    /// A hung engine accepts requests and generates nothing.
    pub(crate) fn is_hung(&self) -> bool {
        self.hung
    }

    pub(crate) fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Seconds in which the engine computed, without the current step.
    pub(crate) fn busy(&self) -> f64 {
        self.stats.busy
    }

    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.next_at
    }

    /// The adapters as metrics show them; `None` without LoRA.
    pub(crate) fn adapters(&self, name_of: impl Fn(u16) -> Option<String>) -> Option<EngineAdapters> {
        let (engine, flags) = (self.server.engine(), &self.config.engine);
        self.config.lora.then(|| EngineAdapters {
            backend: self.stats.backend.clone(),
            slots: u64::from(flags.max_loras),
            host: Some(u64::from(flags.max_cpu_loras.max(flags.max_loras))),
            rank: u32::try_from(self.config.max_lora_rank).ok(),
            in_use: engine.adapters().into_iter().filter_map(|id| Some((name_of(id)?, None))).collect(),
            defers: Some(engine.deferred() > 0),
        })
    }

    pub(crate) fn sample(&self) -> EngineSample {
        let (engine, side) = (self.server.engine(), &self.stats.side);
        let adapters = self.config.lora.then(|| (u64::from(self.config.engine.max_loras), engine.adapters().len()));
        EngineSample {
            running: engine.running() as f64,
            waiting: engine.waiting() as f64,
            kv_usage: engine.blocks().usage(),
            preemptions: side.preemptions,
            prompt_tokens: side.prompt_tokens,
            deferred: Some(engine.deferred() as f64),
            adapters: adapters.filter(|(_, used)| *used > 0),
        }
    }

    pub(crate) fn facts(&self) -> PageFacts {
        let (page, flags) = (self.sample(), &self.config.engine);
        let blocks = if flags.prefix_caching { flags.num_blocks } else { 0 };
        PageFacts {
            running: page.running,
            waiting: page.waiting,
            deferred: page.deferred.unwrap_or(0.0),
            kv_usage: page.kv_usage,
            preemptions: page.preemptions,
            tokens: [page.prompt_tokens, self.stats.side.generation_tokens],
            progress: self.stats.steps as f64,
            cache_tokens: Some(u64::from(blocks) * u64::from(BLOCK_TOKENS)),
            kv_tokens: Some(u64::from(flags.num_blocks) * u64::from(BLOCK_TOKENS)),
            adapters: page.adapters.map(|(slots, used)| (used as u64, slots)),
            ..self.sums
        }
    }

    pub(crate) fn submit(
        &mut self,
        now: Duration,
        request: &EngineRequest,
        collector: Arc<OutputCollector>,
    ) -> SequenceId {
        let id = self.next;
        self.next += 1;
        self.stats.requests += 1;
        match self.fault {
            Some(PlantedFault::CrashesAt(count)) if self.streams.len() >= count => {
                self.change(now, EngineChange::Stop);
                collector.fail(Broken::EngineDead);
                return id;
            }
            Some(PlantedFault::HangsAt(count)) if self.streams.len() >= count => self.change(now, EngineChange::Hang),
            Some(PlantedFault::FailsAbove(tokens)) if request.prompt_tokens > tokens => {
                collector.fail(Broken::EngineDead);
                return id;
            }
            _ => {}
        }
        self.stats.side.prompt_tokens += f64::from(request.prompt_tokens);
        self.streams.insert(id, collector);
        self.waits.insert(id, (now, request.prompt_tokens));
        let EngineRequest { prompt_tokens, output_tokens, adapter, priority, ref content } = *request;
        let content = content.clone();
        let sequence = Request { id, prompt_tokens, output_tokens, adapter, priority, content, ..Request::default() };
        let at = self.clock_at(now).server;
        self.server.submit(at, [sequence]);
        self.update_next();
        id
    }

    /// Aborts a sequence whose client disconnected, if it has not ended.
    pub(crate) fn abort(&mut self, id: SequenceId) {
        if self.streams.remove(&id).is_some() {
            self.waits.remove(&id);
            self.server.abort(id);
            self.update_next();
        }
    }

    /// Processes all events up to `now`. Returns whether tokens or errors were delivered.
    pub(crate) fn run_due(&mut self, now: Duration) -> bool {
        let mut visible = false;
        while self.next_at.is_some_and(|at| at <= now) {
            // With a slower clock, rounding may put `now` a nanosecond before the event that is
            // due.
            let at = self.server.next_at().unwrap_or_default().max(self.clock.to_server(now));
            if let Some(end) = self.server.poll(at) {
                visible |= self.deliver(&end);
                self.count(&end);
            }
            self.update_next();
        }
        visible
    }

    pub(crate) fn change(&mut self, now: Duration, change: EngineChange) {
        match change {
            EngineChange::Slower(factor) => {
                self.clock = Clock { slower: factor, ..self.clock_at(now) };
                self.slower = factor;
            }
            EngineChange::Hang => {
                self.clock = self.clock_at(now);
                self.hung = true;
            }
            EngineChange::Resume => {
                self.clock = self.clock_at(now);
                self.hung = false;
            }
            EngineChange::Stall(time) => {
                // A stall during a stall makes it longer.
                let clock = self.clock_at(now);
                self.clock = Clock { run: clock.run + time, ..clock };
            }
            EngineChange::Stop => {
                (self.up, self.hung) = (false, false);
                self.replace_server(now);
                self.waits.clear();
                self.streams.drain().for_each(|(_, collector)| collector.fail(Broken::EngineDead));
            }
            EngineChange::Start => self.up = true,
        }
        self.update_next();
    }

    /// The clock from `now` on. It stands still while the engine hangs.
    fn clock_at(&self, now: Duration) -> Clock {
        let server = if self.hung { self.clock.server } else { self.clock.to_server(now) };
        Clock { run: now.max(self.clock.run), server, slower: self.slower }
    }

    fn replace_server(&mut self, now: Duration) {
        self.count_caches();
        self.server = started(&self.config, &self.adapters);
        self.clock = Clock { run: now, server: Duration::ZERO, slower: self.slower };
        self.last_step = None;
    }

    fn update_next(&mut self) {
        let next = self.server.next_at().filter(|_| !self.hung);
        self.next_at = next.map(|at| self.clock.to_run(at));
    }

    /// Passes the tokens and errors of a step to the streams. Returns whether there were any.
    fn deliver(&mut self, end: &StepEnd) -> bool {
        for admitted in end.admitted.iter().filter(|admitted| !admitted.resumed) {
            if let Some(collector) = self.streams.get(&admitted.id) {
                collector.admit(0, admitted.cached_tokens);
            }
        }
        for token in &end.emitted {
            let collector =
                if token.last { self.streams.remove(&token.id) } else { self.streams.get(&token.id).cloned() };
            if let Some(collector) =
                collector.filter(|own| own.push(0, token.tokens, token.last.then_some(Finish::Length)))
            {
                collector.wake();
            }
        }
        for (id, _) in &end.refused {
            self.waits.remove(id);
            self.streams.remove(id).inspect(|collector| collector.fail(Broken::EngineDead));
        }
        !end.emitted.is_empty() || !end.refused.is_empty()
    }

    fn count(&mut self, end: &StepEnd) {
        let engine = self.server.engine();
        let (running, waiting) = (engine.running() as f64, engine.waiting() as f64);
        let kv_usage = engine.blocks().usage();
        let deferred = engine.deferred();
        self.count_for_findings(end);
        let (stats, slower) = (&mut self.stats, self.clock.slower);
        stats.steps += 1;
        stats.computed_tokens += u64::from(end.load.tokens);
        if let Some((started, seen)) = self.last_step.replace((end.started, end.ended)) {
            let lasted = seen.min(end.started).saturating_sub(started).as_secs_f64() * slower;
            stats.busy += lasted;
            stats.deferred += if self.was_deferring { lasted } else { 0.0 };
        }
        self.was_deferring = deferred > 0;
        stats.deferred_peak = stats.deferred_peak.max(deferred as u64);
        let side = &mut stats.side;
        side.generation_tokens += end.emitted.iter().map(|token| f64::from(token.tokens)).sum::<f64>();
        side.preemptions += f64::from(end.preempted);
        side.kv_peak = side.kv_peak.max(kv_usage);
        side.running_peak = side.running_peak.max(running);
        side.waiting_peak = side.waiting_peak.max(waiting);
        let at = self.clock.to_run(end.ended);
        if at >= self.next_sample && side.samples.len() < MAX_SAMPLES {
            side.samples.push(ServerSample { at: at.as_secs_f64(), running, waiting, kv_usage });
            self.next_sample = at + SAMPLE_INTERVAL;
        }
    }

    fn count_for_findings(&mut self, end: &StepEnd) {
        let of_prompt = |admitted: &Admitted| Some(self.waits.get(&admitted.id)?.1 - admitted.cached_tokens);
        let prompts: Vec<u32> = end.admitted.iter().filter_map(of_prompt).collect();
        let (sums, ended) = (&mut self.sums, self.clock.to_run(end.ended));
        let gap = self.last_step.map(|(_, seen)| ended.saturating_sub(self.clock.to_run(seen)).as_secs_f64());
        for token in &end.emitted {
            let first = self.waits.remove(&token.id).map(|(sent, _)| ended.saturating_sub(sent).as_secs_f64());
            let (latency, after) = if first.is_some() { (&mut sums.ttft, first) } else { (&mut sums.itl, gap) };
            *latency = after.map_or(*latency, |seconds| (latency.0 + seconds, latency.1 + 1.0));
        }
        for (index, bound) in STEP_TOKENS.iter().enumerate() {
            sums.large_steps[index] += f64::from(u8::from(f64::from(end.load.tokens) > *bound));
            sums.large_prompts[index] += prompts.iter().filter(|tokens| f64::from(**tokens) > *bound).count() as f64;
        }
    }

    fn count_caches(&mut self) {
        let prefix = self.server.engine().prefix();
        self.stats.side.prefix_queries += prefix.queries as f64;
        self.stats.side.prefix_hits += prefix.hits as f64;
    }

    pub(crate) fn into_stats(mut self) -> EngineStats {
        self.count_caches();
        if let Some((started, seen)) = self.last_step {
            self.stats.busy += seen.saturating_sub(started).as_secs_f64() * self.clock.slower;
        }
        self.stats
    }
}
