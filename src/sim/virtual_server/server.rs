//! One simulated server on virtual time, as a discrete-event simulation.
//!
//! ```text
//! submit(t) -> front end (shared thread, then latency) -> engine -> step ends
//!           -> front end (tokens) -> emissions
//! ```
//!
//! The next step starts at the end of the last one, even if [`VirtualServer::poll`] is called
//! later. The tokens of a step are reported when clients see them, while later steps already run.
//! The engine processes results only after it has launched the next step. Without a graph the
//! launch takes the CPU 10 to 30 ms, and sometimes as long as the step takes on the GPU
//! ([`CostModel::stall_share`]).
//!
//! [`CostModel::stall_share`]: crate::machine::CostModel::stall_share

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::front_end::FrontEnd;
use crate::engine::{Admitted, BlockChange, Emitted, Engine, EngineError, Pause, Request, SequenceId, StepOutcome};
use crate::machine::StepLoad;
use sluice_core::base::Rng;

/// The result of a step, with the virtual time at which clients saw the tokens.
#[derive(Debug)]
pub struct StepEnd {
    /// Time at which the step started.
    pub started: Duration,
    /// Time at which clients saw the tokens.
    pub ended: Duration,
    /// Sampled tokens.
    pub emitted: Vec<Emitted>,
    /// Sequences admitted by the step, at its start.
    pub admitted: Vec<Admitted>,
    /// Sequences preempted by the step.
    pub preempted: u32,
    /// The computed load.
    pub load: StepLoad,
    /// Requests that the engine refused when they reached it.
    pub refused: Vec<(SequenceId, EngineError)>,
}

#[derive(Debug)]
struct RunningStep {
    started: Duration,
    ended: Duration,
    /// Time at which the step was planned.
    planned: Duration,
    /// Time at which the next step is planned, after the CPU has launched this one.
    next_plan: Duration,
    /// Whether the launch blocks until the GPU has finished the step.
    stalled: bool,
    extra: Duration,
    outcome: StepOutcome,
}

/// An engine with its front end, on virtual time.
#[derive(Debug)]
pub struct VirtualServer {
    front_end: FrontEnd,
    engine: Engine,
    /// Requests that have left the front end's thread, with the time at which they reach the
    /// engine; in order of time.
    in_front_end: VecDeque<(Duration, Request)>,
    under_way: Option<RunningStep>,
    /// Steps that have ended, with the time at which the engine takes the results, in order of
    /// time.
    computed: VecDeque<(Duration, RunningStep)>,
    /// Steps whose results were taken and whose tokens are being sent to the clients, in order of
    /// time.
    leaving: VecDeque<StepEnd>,
    /// Prompt tokens of the sequences that have no first token yet.
    prompts: HashMap<SequenceId, u32>,
    refused: Vec<(SequenceId, EngineError)>,
    stall: Duration,
    /// Time until which the engine loads adapters and starts no step.
    loading_until: Duration,
}

impl VirtualServer {
    /// An idle server at time zero.
    pub fn new(engine: Engine, front_end: FrontEnd) -> Self {
        Self {
            front_end,
            engine,
            in_front_end: VecDeque::new(),
            under_way: None,
            computed: VecDeque::new(),
            leaving: VecDeque::new(),
            prompts: HashMap::new(),
            refused: Vec::new(),
            stall: Duration::ZERO,
            loading_until: Duration::ZERO,
        }
    }

    /// Submits the sequences of one HTTP request that arrives at `now`. They pass the front end
    /// together.
    pub fn submit(&mut self, now: Duration, requests: impl IntoIterator<Item = Request>) {
        self.drain_front_end(now);
        let arrived = requests.into_iter().map(|request| Request { arrived: now, ..request });
        self.front_end.enter(now, arrived.collect());
    }

    /// Ends a sequence early, wherever it is; returns whether it still existed.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        self.prompts.remove(&id);
        let before = self.in_front_end.len();
        self.in_front_end.retain(|(_, request)| request.id != id);
        let found = self.front_end.abort(id) || self.in_front_end.len() < before;
        found || self.engine.abort(id)
    }

    fn drain_front_end(&mut self, now: Duration) {
        while let Some((ready, requests)) = self.front_end.leave(now) {
            self.in_front_end.extend(requests.into_iter().map(|request| (ready, request)));
        }
    }

    /// Makes the next step that starts longer by `extra`.
    pub fn stall(&mut self, extra: Duration) {
        self.stall += extra;
    }

    /// Ends an injected stall. A step that was made longer ends at the original time, but not
    /// before `now`.
    pub fn end_stall(&mut self, now: Duration) {
        self.stall = Duration::ZERO;
        if let Some(step) = &mut self.under_way {
            step.ended = (step.ended - std::mem::take(&mut step.extra)).max(now.min(step.ended));
            step.next_plan = step.next_plan.min(step.ended);
        }
    }

    /// Loads an adapter after the current step. The next step waits for it. Returns the time at
    /// which the adapter is loaded.
    pub fn load_adapter(&mut self, now: Duration, adapter: u16) -> Duration {
        let free = self.under_way.as_ref().map_or(now, |step| step.ended.max(now));
        self.loading_until = self.loading_until.max(free) + self.engine.load_adapter(adapter);
        self.loading_until
    }

    /// Pauses or resumes the engine. On resume a step starts at `now` if none is under way.
    pub fn pause(&mut self, now: Duration, pause: Pause) {
        self.engine.pause(pause);
        self.restart(now);
    }

    /// Empties the prefix cache; with `preempt`, running sequences are preempted and computed
    /// again. See [`Engine::reset_prefix_cache`].
    pub fn reset_prefix_cache(&mut self, now: Duration, preempt: bool) -> bool {
        let done = self.engine.reset_prefix_cache(preempt);
        self.restart(now);
        done
    }

    fn restart(&mut self, now: Duration) {
        if self.under_way.is_none() {
            self.start(now, now);
        }
    }

    /// The time of the next event; `None` if the server is idle.
    pub fn next_at(&self) -> Option<Duration> {
        let tokens = self.tokens_at();
        let engine = match &self.under_way {
            Some(step) => Some(step.ended),
            None => {
                let ready = self.in_front_end.front().map(|(ready, _)| *ready);
                ready.into_iter().chain(self.front_end.next_leave()).min()
            }
        };
        tokens.into_iter().chain(engine).min()
    }

    /// The time at which the next tokens reach the front end or the clients.
    fn tokens_at(&self) -> Option<Duration> {
        let leaving = self.leaving.front().map(|end| end.ended);
        leaving.into_iter().chain(self.computed.front().map(|(taken, _)| *taken)).min()
    }

    /// Processes at most one event that is due at `now`: the end of a step, results that reach the
    /// front end, tokens that reach the clients, or the start of a step.
    pub fn poll(&mut self, now: Duration) -> Option<StepEnd> {
        let step_ends = self.under_way.as_ref().map(|step| step.ended);
        let tokens = self.tokens_at();
        if let Some(at) = tokens.filter(|at| *at <= now && step_ends.is_none_or(|end| *at <= end)) {
            if self.leaving.front().is_some_and(|end| end.ended == at) {
                return self.leaving.pop_front();
            }
            self.send();
            return None;
        }
        match self.under_way.take() {
            Some(step) if step.ended <= now => {
                self.start(step.ended, step.next_plan);
                let taken = self.results_taken(step.ended);
                // The engine takes the results of steps in order.
                let taken = self.computed.back().map_or(taken, |(last, _)| taken.max(*last));
                self.computed.push_back((taken, step));
                None
            }
            Some(step) => {
                self.under_way = Some(step);
                None
            }
            None => {
                self.drain_front_end(now);
                if let Some((ready, _)) = self.in_front_end.front()
                    && *ready <= now
                {
                    self.start(*ready, *ready);
                }
                let refused = std::mem::take(&mut self.refused);
                let at = now;
                (self.under_way.is_none() && !refused.is_empty()).then(|| StepEnd {
                    started: at,
                    ended: at,
                    emitted: Vec::new(),
                    admitted: Vec::new(),
                    preempted: 0,
                    load: StepLoad::default(),
                    refused,
                })
            }
        }
    }

    /// The time at which the engine processes the results of a step that ended: at once or, if it
    /// plans ahead, after it has launched the next step.
    fn results_taken(&self, ended: Duration) -> Duration {
        match &self.under_way {
            _ if !self.engine.plans_ahead() => ended,
            None => ended,
            Some(next) if next.stalled => next.ended,
            Some(next) => ended.max(next.planned + next.outcome.host()),
        }
    }

    /// Passes the tokens of the first step whose results were taken to the front end.
    fn send(&mut self) {
        let Some((taken, step)) = self.computed.pop_front() else { return };
        self.drain_front_end(taken);
        let RunningStep { started, outcome, .. } = step;
        let StepOutcome { load, emitted, admitted, preempted, .. } = outcome;
        let prompts = &mut self.prompts;
        let tokens = emitted.iter().map(|token| (token.id, token.first.then(|| prompts.remove(&token.id)).flatten()));
        let seen = self.front_end.send(taken, tokens);
        // A client sees the tokens of steps in order.
        let seen = self.leaving.back().map_or(seen, |last| last.ended.max(seen));
        let refused = std::mem::take(&mut self.refused);
        self.leaving.push_back(StepEnd { started, ended: seen, emitted, admitted, preempted, load, refused });
    }

    fn start(&mut self, at: Duration, planned: Duration) {
        self.drain_front_end(at);
        self.add_ready(planned);
        self.engine.stage_fresh();
        self.add_ready(at);
        let Some(outcome) = self.engine.step() else { return };
        let extra = std::mem::take(&mut self.stall);
        let ended = outcome.ends(at, planned) + extra + self.loading_until.saturating_sub(at);
        let cost = self.engine.cost();
        // The GPU time has jitter, so its digits can be the seed of this draw.
        let stalled = Rng::new(outcome.gpu.as_nanos() as u64).unit() < cost.stall_share(&outcome.load);
        let launched = if stalled { ended } else { planned + outcome.host() };
        let next_plan = if self.engine.plans_ahead() { launched.clamp(at, ended) } else { ended };
        self.under_way = Some(RunningStep { started: at, ended, planned, next_plan, stalled, extra, outcome });
    }

    fn add_ready(&mut self, until: Duration) {
        while let Some((ready, _)) = self.in_front_end.front()
            && *ready <= until
        {
            let Some((_, request)) = self.in_front_end.pop_front() else { break };
            let (id, prompt) = (request.id, request.prompt_tokens);
            match self.engine.add(request) {
                Ok(()) => _ = self.prompts.insert(id, prompt),
                Err(error) => self.refused.push((id, error)),
            }
        }
    }

    /// The changes of the prefix cache since the last call.
    pub fn take_block_changes(&mut self) -> Vec<BlockChange> {
        self.engine.take_block_changes()
    }

    /// The engine, for gauges.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Sequences that are still in the front end.
    pub fn in_front_end(&self) -> usize {
        self.in_front_end.len() + self.front_end.sequences()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;
    use crate::machine::{CostModel, Profile};

    fn server() -> VirtualServer {
        let profile = Profile::named("h200-llama-8b").unwrap();
        let config = EngineConfig {
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            long_prefill_token_threshold: 0,
            chunked_prefill: true,
            num_blocks: 1000,
            max_loras: 1,
            max_cpu_loras: 1,
            seed: 1,
            ..EngineConfig::default()
        };
        VirtualServer::new(Engine::new(config, CostModel::new(&profile, 256, 8192)), FrontEnd::new(&profile.front_end))
    }

    fn request(id: u64) -> Request {
        Request { id, prompt_tokens: 100, output_tokens: 3, adapter: None, ..Request::default() }
    }

    #[test]
    fn late_polling_does_not_slow_the_engine() {
        let drive = |late: Duration| {
            let mut server = server();
            server.submit(Duration::ZERO, [request(1)]);
            let mut last = Duration::ZERO;
            while let Some(at) = server.next_at() {
                if let Some(end) = server.poll(at + late) {
                    last = end.ended;
                }
            }
            last
        };
        assert_eq!(drive(Duration::ZERO), drive(Duration::from_millis(50)));
    }

    #[test]
    fn a_loading_adapter_delays_the_step_that_follows_and_not_its_first_request() {
        let ended = |load: bool, arrives: u64| {
            let mut server = server();
            let arrives = Duration::from_millis(arrives);
            if load {
                assert!(server.load_adapter(Duration::ZERO, 0) < Duration::from_secs(1));
            }
            server.submit(arrives, [Request { adapter: Some(0), ..request(1) }]);
            let mut ends = Vec::new();
            while let Some(at) = server.next_at() {
                ends.extend(server.poll(at));
            }
            (ends[0].load.adapter_loads, ends[0].ended - arrives)
        };
        let (reads, unloaded) = ended(false, 1000);
        let (none, loaded) = ended(true, 1000);
        assert_eq!((reads, none), (1, 0));
        assert!(loaded < unloaded, "{loaded:?} {unloaded:?}");
        let (none, during) = ended(true, 0);
        assert!(none == 0 && during > loaded, "{during:?} {loaded:?}");
    }

    #[test]
    fn a_paused_server_keeps_its_sequences_and_continues_on_resume() {
        let mut server = server();
        server.submit(Duration::ZERO, [request(1)]);
        server.poll(Duration::from_secs(1));
        server.pause(Duration::from_secs(1), Pause::All);
        let mut tokens = 0;
        while let Some(at) = server.next_at() {
            tokens += server.poll(at).map_or(0, |end| end.emitted.len());
        }
        assert_eq!((tokens, server.engine().running()), (1, 1), "the step under way ends, and no other begins");
        let later = Duration::from_secs(60);
        server.pause(later, Pause::No);
        while let Some(at) = server.next_at() {
            assert!(at > later);
            tokens += server.poll(at).map_or(0, |end| end.emitted.len());
        }
        assert_eq!((tokens, server.engine().is_empty()), (3, true));
        assert!(server.reset_prefix_cache(later, false));
    }

    #[test]
    fn a_request_that_never_fits_is_refused_when_it_reaches_the_engine() {
        let mut server = server();
        server.submit(Duration::ZERO, [Request { prompt_tokens: 1_000_000, ..request(1) }]);
        let end = server.poll(Duration::from_secs(1)).unwrap();
        assert_eq!(end.refused.len(), 1);
        assert!(server.next_at().is_none());
    }

    #[test]
    fn the_engine_goes_on_while_tokens_are_on_their_way() {
        let mut server = server();
        server.submit(Duration::ZERO, [request(1)]);
        let (mut steps, mut together) = (Vec::new(), 0);
        while let Some(at) = server.next_at() {
            together += u32::from(server.under_way.is_some() && server.tokens_at().is_some());
            steps.extend(server.poll(at));
        }
        assert_eq!(steps.iter().map(|end| end.emitted.len()).sum::<usize>(), 3);
        assert!(together > 0 && steps.is_sorted_by_key(|end| end.ended));
        assert!(steps[1].started < steps[0].ended && server.prompts.is_empty());
    }

    #[test]
    fn an_abort_reaches_a_request_in_the_front_end() {
        let mut server = server();
        server.submit(Duration::ZERO, [request(1)]);
        assert!(server.abort(1));
        assert!(!server.abort(1));
        assert!(server.poll(Duration::from_secs(1)).is_none());
        assert!(server.next_at().is_none() && server.engine().is_empty());
    }
}
