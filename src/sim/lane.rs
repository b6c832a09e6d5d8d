//! One simulated server on virtual time: the front end, then the engine, as a discrete-event machine.
//!
//! ```text
//! submit(t) -> front end (shared thread, then latency) -> engine -> emissions at step ends
//! ```
//!
//! The front end is one thread (vLLM's API server) whose event loop serves the requests inside it in turns, so a
//! burst of n reaches the engine together after n times the work of one. The measured first tokens of 100 streams
//! show it: half of them take nearly as long as the last. Steps follow each other
//! without a gap: the next one starts when the last one ended, whenever [`Lane::poll`] is called. So a driver that
//! is late does not slow the engine down.
//!
//! The server drives a lane against the real clock, tests drive it against a number: both see the same engine.

use std::collections::VecDeque;
use std::time::Duration;

use super::cost::{FrontEndRates, StepLoad};
use super::engine::{Admitted, Emitted, Engine, EngineError, Pause, Request, SequenceId, StepOutcome};

/// The API server's thread, shared by the requests in it (processor sharing).
///
/// With n requests inside, each advances at 1/n of the thread. All need the same work S, so they leave in order of
/// arrival: with V the work done per request since time zero (dV/dt = 1/n), a request that came at V leaves at V + S.
/// Tokens on their way out take the thread first, so requests enter slowly while many streams decode.
#[derive(Clone, Debug)]
pub struct FrontEnd {
    /// Work per request, seconds of the thread.
    work: f64,
    /// What every request waits on top, in parallel.
    latency: Duration,
    /// Work to send one token, which goes first.
    token_work: Duration,
    /// The thread sends tokens until then.
    busy_until: Duration,
    /// Work done per request until `at`.
    done: f64,
    at: Duration,
    /// Values of `done` at which requests leave, with their engine requests; in order.
    inside: VecDeque<(f64, Vec<Request>)>,
}

impl FrontEnd {
    /// A stage with the profile's constants.
    pub fn new(rates: &FrontEndRates) -> Self {
        Self {
            work: rates.serial_us.max(0.0) * 1e-6,
            latency: Duration::from_secs_f64(rates.latency_us.max(0.0) * 1e-6),
            token_work: Duration::from_secs_f64(rates.token_us.max(0.0) * 1e-6),
            busy_until: Duration::ZERO,
            done: 0.0,
            at: Duration::ZERO,
            inside: VecDeque::new(),
        }
    }

    /// One HTTP request enters at `now` (times never decrease).
    fn enter(&mut self, now: Duration, requests: Vec<Request>) {
        self.advance(now);
        self.inside.push_back((self.done + self.work, requests));
    }

    /// When the next request leaves the thread if nobody else enters.
    fn next_leave(&self) -> Option<Duration> {
        let (tag, _) = self.inside.front()?;
        let left = (tag - self.done).max(0.0) * self.inside.len() as f64;
        Some(self.at.max(self.busy_until) + Duration::from_secs_f64(left))
    }

    /// The tokens of a step that ended at `now` are sent before any request goes on.
    fn send_tokens(&mut self, now: Duration, tokens: usize) {
        self.advance(now);
        self.busy_until = self.busy_until.max(now) + self.token_work * tokens as u32;
    }

    /// Lets the first request leave if it is due at `now`; says when it reaches the engine.
    fn leave(&mut self, now: Duration) -> Option<(Duration, Vec<Request>)> {
        let at = self.next_leave().filter(|at| *at <= now)?;
        let (tag, requests) = self.inside.pop_front()?;
        (self.done, self.at) = (tag, at);
        Some((at + self.latency, requests))
    }

    /// Moves the clock within an interval in which nobody leaves.
    fn advance(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at.max(self.busy_until));
        if !self.inside.is_empty() {
            self.done += passed.as_secs_f64() / self.inside.len() as f64;
        }
        self.at = self.at.max(now);
    }
}

/// Something that happened in a lane, with the virtual time at which it became visible.
#[derive(Debug)]
pub struct StepEnd {
    /// When the step started.
    pub started: Duration,
    /// When it ended: the time of every emission in it.
    pub ended: Duration,
    /// Tokens sampled.
    pub emitted: Vec<Emitted>,
    /// Sequences admitted by the step, at its start.
    pub admitted: Vec<Admitted>,
    /// Sequences preempted by the step.
    pub preempted: u32,
    /// What it computed.
    pub load: StepLoad,
    /// Requests that the engine refused when they reached it.
    pub refused: Vec<(SequenceId, EngineError)>,
}

/// A front end and an engine on one time line. See the head of this file.
#[derive(Debug)]
pub struct Lane {
    front_end: FrontEnd,
    engine: Engine,
    /// On the way through the front end, in order of readiness.
    coming: VecDeque<(Duration, Request)>,
    under_way: Option<(Duration, Duration, StepOutcome)>,
    refused: Vec<(SequenceId, EngineError)>,
    stall: Duration,
}

impl Lane {
    /// An idle lane at time zero.
    pub fn new(engine: Engine, front_end: FrontEnd) -> Self {
        Self { front_end, engine, coming: VecDeque::new(), under_way: None, refused: Vec::new(), stall: Duration::ZERO }
    }

    /// The sequences of one HTTP request that arrives at `now`: one pass of the front end for all of them.
    pub fn submit(&mut self, now: Duration, requests: impl IntoIterator<Item = Request>) {
        self.drain_front_end(now);
        let arrived = requests.into_iter().map(|request| Request { arrived: now, ..request });
        self.front_end.enter(now, arrived.collect());
    }

    /// Ends a sequence early, wherever it is. Says whether it was still there.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        let mut found = false;
        let mut keep = |request: &Request| {
            found |= request.id == id;
            request.id != id
        };
        // What left an empty place in the front end still costs its work there.
        self.front_end.inside.iter_mut().for_each(|(_, requests)| requests.retain(&mut keep));
        self.coming.retain(|(_, request)| keep(request));
        found || self.engine.abort(id)
    }

    fn drain_front_end(&mut self, now: Duration) {
        while let Some((ready, requests)) = self.front_end.leave(now) {
            self.coming.extend(requests.into_iter().map(|request| (ready, request)));
        }
    }

    /// Makes the next step that starts longer by `extra`.
    pub fn stall(&mut self, extra: Duration) {
        self.stall += extra;
    }

    /// Pauses the engine or lets it go on: then a step starts at `now` if none is under way.
    pub fn pause(&mut self, now: Duration, pause: Pause) {
        self.engine.pause(pause);
        self.restart(now);
    }

    /// Empties the prefix cache; with `preempt` what runs is computed again. See [`Engine::reset_prefix_cache`].
    pub fn reset_prefix_cache(&mut self, now: Duration, preempt: bool) -> bool {
        let done = self.engine.reset_prefix_cache(preempt);
        self.restart(now);
        done
    }

    /// An adapter was unloaded.
    pub fn forget_adapter(&mut self, adapter: u16) {
        self.engine.forget_adapter(adapter);
    }

    fn restart(&mut self, now: Duration) {
        if self.under_way.is_none() {
            self.start(now);
        }
    }

    /// When something happens next, or nothing when the lane is idle.
    pub fn next_at(&self) -> Option<Duration> {
        match &self.under_way {
            Some((_, end, _)) => Some(*end),
            None => {
                let ready = self.coming.front().map(|(ready, _)| *ready);
                let leaving = self.front_end.next_leave().map(|at| at + self.front_end.latency);
                ready.into_iter().chain(leaving).min()
            }
        }
    }

    /// Advances by at most one step end that is due at `now`, and starts what can start.
    pub fn poll(&mut self, now: Duration) -> Option<StepEnd> {
        match self.under_way.take() {
            Some((started, ended, outcome)) if ended <= now => {
                self.start(ended);
                self.front_end.send_tokens(ended, outcome.emitted.len());
                let StepOutcome { load, emitted, admitted, preempted, .. } = outcome;
                let refused = std::mem::take(&mut self.refused);
                Some(StepEnd { started, ended, emitted, admitted, preempted, load, refused })
            }
            Some(step) => {
                self.under_way = Some(step);
                None
            }
            None => {
                self.drain_front_end(now);
                if let Some((ready, _)) = self.coming.front()
                    && *ready <= now
                {
                    self.start(*ready);
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

    /// Starts a step at `at` with what has come through the front end by then.
    fn start(&mut self, at: Duration) {
        self.drain_front_end(at);
        while let Some((ready, _)) = self.coming.front()
            && *ready <= at
        {
            let Some((_, request)) = self.coming.pop_front() else { break };
            let id = request.id;
            if let Err(error) = self.engine.add(request) {
                self.refused.push((id, error));
            }
        }
        if let Some(outcome) = self.engine.step() {
            let end = at + outcome.duration + std::mem::take(&mut self.stall);
            self.under_way = Some((at, end, outcome));
        }
    }

    /// The engine, for gauges.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, for what an operator does to it.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Ends a pause of the engine: what waits is scheduled from `now` on.
    pub fn resume(&mut self, now: Duration) {
        self.engine.pause(Pause::No);
        if self.under_way.is_none() {
            self.start(now);
        }
    }

    /// Sequences still in the front end.
    pub fn coming(&self) -> usize {
        self.coming.len() + self.front_end.inside.iter().map(|(_, requests)| requests.len()).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::cost::{CostModel, Profile};
    use crate::sim::engine::EngineConfig;

    pub(crate) fn lane() -> Lane {
        let profile = Profile::named("h200-llama-8b").unwrap();
        let config = EngineConfig {
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            long_prefill_token_threshold: 0,
            chunked_prefill: true,
            num_blocks: 1000,
            seed: 1,
            ..EngineConfig::default()
        };
        Lane::new(Engine::new(config, CostModel::new(&profile, 256, 8192)), FrontEnd::new(&profile.front_end))
    }

    fn request(id: u64) -> Request {
        Request { id, prompt_tokens: 100, output_tokens: 3, adapter: None, ..Request::default() }
    }

    #[test]
    fn a_burst_leaves_the_front_end_together_and_a_lone_request_alone() {
        let mut front_end = FrontEnd::new(&FrontEndRates { serial_us: 1000.0, latency_us: 5000.0, token_us: 0.0 });
        for _ in 0..10 {
            front_end.enter(Duration::ZERO, vec![request(1)]);
        }
        assert!(front_end.leave(Duration::from_millis(9)).is_none());
        let late = Duration::from_secs(1);
        let left: Vec<_> = std::iter::from_fn(|| front_end.leave(late)).map(|(at, _)| at.as_millis()).collect();
        assert_eq!(left, [15; 10]);
        front_end.enter(late, vec![request(1)]);
        assert_eq!(front_end.leave(late * 2).unwrap().0, late + Duration::from_millis(6));
    }

    #[test]
    fn a_late_driver_does_not_slow_the_engine() {
        let drive = |late: Duration| {
            let mut lane = lane();
            lane.submit(Duration::ZERO, [request(1)]);
            let mut last = Duration::ZERO;
            while let Some(at) = lane.next_at() {
                if let Some(end) = lane.poll(at + late) {
                    last = end.ended;
                }
            }
            last
        };
        assert_eq!(drive(Duration::ZERO), drive(Duration::from_millis(50)));
    }

    #[test]
    fn a_paused_lane_keeps_what_it_has_and_goes_on_when_told() {
        let mut lane = lane();
        lane.submit(Duration::ZERO, [request(1)]);
        lane.poll(Duration::from_secs(1));
        lane.pause(Duration::from_secs(1), Pause::All);
        let mut tokens = 0;
        while let Some(at) = lane.next_at() {
            tokens += lane.poll(at).map_or(0, |end| end.emitted.len());
        }
        assert_eq!((tokens, lane.engine().running()), (1, 1), "the step under way ends, and no other begins");
        let later = Duration::from_secs(60);
        lane.pause(later, Pause::No);
        while let Some(at) = lane.next_at() {
            assert!(at > later);
            tokens += lane.poll(at).map_or(0, |end| end.emitted.len());
        }
        assert_eq!((tokens, lane.engine().is_empty()), (3, true));
        assert!(lane.reset_prefix_cache(later, false));
    }

    #[test]
    fn a_request_that_never_fits_is_refused_when_it_reaches_the_engine() {
        let mut lane = lane();
        lane.submit(Duration::ZERO, [Request { prompt_tokens: 1_000_000, ..request(1) }]);
        let end = lane.poll(Duration::from_secs(1)).unwrap();
        assert_eq!(end.refused.len(), 1);
        assert!(lane.next_at().is_none());
    }

    #[test]
    fn an_abort_reaches_a_request_in_the_front_end() {
        let mut lane = lane();
        lane.submit(Duration::ZERO, [request(1)]);
        assert!(lane.abort(1));
        assert!(!lane.abort(1));
        assert!(lane.poll(Duration::from_secs(1)).is_none());
        assert!(lane.next_at().is_none() && lane.engine().is_empty());
    }
}
