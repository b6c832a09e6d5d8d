//! Ties a lane to the real clock: one task that owns the engine and sleeps its steps.
//!
//! Virtual time = real time since the start x speed. Steps follow the lane's schedule and not the wake-ups of the
//! timer, so lateness does not add up. The timer has a grain of 1 ms and rounds up: sleeping [`EARLY`] less makes it
//! fire half a grain early or late, so that gaps between tokens are right on average. A pause of the whole process
//! (over [`MAX_LAG`]) is forgiven: the clock is set back instead of running the missed steps in a burst.
//!
//! Requests, aborts and faults come in through an inbox that is emptied between steps; tokens leave through each
//! request's outlet. Bounds: the inbox takes at most [`crate::real_time::gate::MAX_IN_FLIGHT`] sequences (the rest is refused), aborts at most
//! one per sequence.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::engine::{Pause, Request, SequenceId};
use crate::http::wire::Finish;
use crate::observe::http_metrics::Requests;
use crate::observe::log::{Level, Speaker};
use crate::observe::stats::{Ended, Finished, Gauges, Stats};
use crate::process::config::SimConfig;
use crate::process::fault::Fault;
use crate::real_time::gate::Gate;
use crate::real_time::outlet::{Broken, Outlet};
use crate::unix_time::unix_seconds;
use crate::virtual_server::{Lane, StepEnd};

/// Half the grain of tokio's timer.
const EARLY: Duration = Duration::from_micros(500);
/// Real time that a pause may last before the clock is set back.
const MAX_LAG: Duration = Duration::from_millis(250);

/// One choice of a request, on its way to the driver.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: Request,
    pub(crate) finish: Finish,
    pub(crate) max_tokens: u32,
    pub(crate) n: u32,
}

#[derive(Debug)]
pub(crate) enum Command {
    Submit(Vec<Submission>, Arc<Outlet>),
    Abort(Vec<SequenceId>),
    Fault(Fault),
    Control(Control, Option<oneshot::Sender<bool>>),
}

/// What an operator does to a running engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// Nothing more is scheduled; what is inside ends as aborted first, if asked for.
    Pause { abort: bool },
    /// On with it.
    Resume,
    /// Empty the prefix cache; what runs is preempted for it, if asked for.
    ResetPrefixCache { preempt: bool },
    /// Sleep at a level, or wake up.
    Sleep(Option<u8>),
}

/// What the driver and the HTTP side share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: SimConfig,
    pub(crate) stats: Mutex<Stats>,
    pub(crate) gate: Mutex<Gate>,
    /// Adapters by id; unloaded ones leave a gap, so that ids stay what they were.
    pub(crate) adapters: Mutex<Vec<Option<(String, String)>>>,
    pub(crate) next_id: AtomicU64,
    pub(crate) load: AtomicU64,
    pub(crate) garbage: AtomicBool,
    pub(crate) paused: AtomicBool,
    pub(crate) profiling: AtomicBool,
    /// Nothing new is taken any more: what is inside is waited for.
    pub(crate) draining: AtomicBool,
    pub(crate) requests: Mutex<Requests>,
    /// Unix seconds of the start.
    pub(crate) started: f64,
    pub(crate) fingerprint: Arc<str>,
    /// Tokens after which streams are cut; 0 is never.
    pub(crate) reset_after: AtomicU32,
    pub(crate) dead: CancellationToken,
    pub(crate) stop: CancellationToken,
    /// Cuts connections as they are.
    pub(crate) cut: CancellationToken,
    inbox: Mutex<Vec<Command>>,
    arrived: Notify,
}

impl Shared {
    pub(crate) fn new(config: SimConfig) -> Self {
        let adapters = config.adapters.iter().cloned().map(Some).collect();
        let settings = format!("{:?}{:?}{}", config.names, config.engine, config.max_model_len);
        let hash = xxhash_rust::xxh3::xxh3_64(settings.as_bytes()) as u32;
        let fingerprint = format!("vllm-{}-{hash:08x}", config.version).into();
        Self {
            config,
            stats: Mutex::default(),
            gate: Mutex::default(),
            adapters: Mutex::new(adapters),
            next_id: AtomicU64::new(1),
            load: AtomicU64::new(0),
            garbage: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            profiling: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            requests: Mutex::default(),
            started: unix_seconds(),
            fingerprint,
            reset_after: AtomicU32::new(0),
            dead: CancellationToken::new(),
            stop: CancellationToken::new(),
            cut: CancellationToken::new(),
            inbox: Mutex::default(),
            arrived: Notify::new(),
        }
    }

    pub(crate) fn send(&self, command: Command) {
        self.inbox.lock().push(command);
        self.arrived.notify_one();
    }

    pub(crate) fn fault(&self, fault: Fault) {
        match fault {
            Fault::None => {
                self.garbage.store(false, Ordering::Relaxed);
                self.reset_after.store(0, Ordering::Relaxed);
            }
            Fault::Garbage => self.garbage.store(true, Ordering::Relaxed),
            Fault::ResetMidstream(after) => self.reset_after.store(after.max(1), Ordering::Relaxed),
            Fault::Die => self.dead.cancel(),
            Fault::Hang | Fault::Stall(_) | Fault::OutOfMemory(_) | Fault::SlowStart(_) => {}
        }
        self.send(Command::Fault(fault));
    }
}

/// A sequence that the driver follows.
#[derive(Debug)]
struct Followed {
    outlet: Arc<Outlet>,
    choice: usize,
    finish: Finish,
    prompt: u32,
    max_tokens: u32,
    n: u32,
    cached: u32,
    preempted: u32,
    generated: u32,
    arrived: Duration,
    scheduled: Option<Duration>,
    first: Option<Duration>,
    last: Duration,
}

#[derive(Debug)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
    lane: Lane,
    followed: HashMap<SequenceId, Followed>,
    /// Real time of virtual zero.
    epoch: Instant,
    hung_since: Option<Instant>,
    /// Running sequences at which the GPU is out of memory.
    out_of_memory_at: Option<u32>,
}

impl Driver {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let lane = shared.config.lane();
        Self { shared, lane, followed: HashMap::new(), epoch: Instant::now(), hung_since: None, out_of_memory_at: None }
    }

    /// Runs until the server stops or the engine dies.
    pub(crate) async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        loop {
            self.forgive_pause();
            let commands = std::mem::take(&mut *shared.inbox.lock());
            for command in commands {
                self.obey(command);
            }
            if shared.stop.is_cancelled() || shared.dead.is_cancelled() {
                break;
            }
            let wake_at = self.catch_up();
            let sleep = async {
                match wake_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = shared.arrived.notified() => {}
                () = shared.stop.cancelled() => {}
                () = shared.dead.cancelled() => {}
                () = sleep => {}
            }
        }
        self.end_all().await;
    }

    /// Nobody is served any more: what is inside ends, and what still comes.
    async fn end_all(&mut self) {
        loop {
            let ids: Vec<_> = self.followed.keys().copied().collect();
            for id in ids {
                self.drop_sequence(id, Ended::Error, Some(Broken::EngineDead));
            }
            self.lane = self.shared.config.lane();
            self.observe();
            if self.shared.stop.is_cancelled() {
                return;
            }
            tokio::select! {
                () = self.shared.arrived.notified() => {}
                () = self.shared.stop.cancelled() => {}
            }
            let commands = std::mem::take(&mut *self.shared.inbox.lock());
            for command in commands {
                self.obey(command);
            }
        }
    }

    fn virtual_now(&self) -> Duration {
        // A hung engine's clock stands still: what arrives meanwhile is not late when it goes on.
        let now = self.hung_since.unwrap_or_else(Instant::now);
        now.saturating_duration_since(self.epoch).mul_f64(self.shared.config.speed)
    }

    fn real(&self, at: Duration) -> Instant {
        self.epoch + at.div_f64(self.shared.config.speed)
    }

    /// Sets the clock back after a pause of the whole process, before anything is dated by it.
    fn forgive_pause(&mut self) {
        if self.hung_since.is_none()
            && let Some(next) = self.lane.next_at()
        {
            let lag = Instant::now().saturating_duration_since(self.real(next));
            if lag > MAX_LAG {
                self.epoch += lag;
            }
        }
    }

    /// Runs every step that is due; says when the next one is.
    fn catch_up(&mut self) -> Option<Instant> {
        if self.hung_since.is_some() {
            return None;
        }
        let due = self.virtual_now() + EARLY.mul_f64(self.shared.config.speed);
        let mut worked = false;
        while self.lane.next_at().is_some_and(|at| at <= due) {
            if let Some(end) = self.lane.poll(due) {
                self.step_ended(end);
                worked = true;
            }
        }
        if worked {
            self.observe();
        }
        self.lane.next_at().map(|at| self.real(at) - EARLY)
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submissions, outlet) => self.submit(submissions, &outlet),
            Command::Abort(ids) => {
                for id in ids {
                    self.lane.abort(id);
                    self.drop_sequence(id, Ended::Abort, None);
                }
                self.observe_unless_hung();
            }
            Command::Fault(Fault::Hang) => {
                self.hung_since.get_or_insert_with(Instant::now);
            }
            Command::Fault(Fault::None) => {
                self.out_of_memory_at = None;
                if let Some(since) = self.hung_since.take() {
                    self.epoch += since.elapsed();
                }
            }
            Command::Fault(Fault::Stall(extra)) => self.lane.stall(extra),
            Command::Fault(Fault::OutOfMemory(running)) => self.out_of_memory_at = Some(running),
            Command::Fault(_) => {}
            Command::Control(control, done) => {
                let result = self.control(control);
                // Whoever asked may have left.
                let _ = done.map(|done| done.send(result));
                self.observe_unless_hung();
            }
        }
    }

    fn control(&mut self, control: Control) -> bool {
        match control {
            Control::Pause { abort } => {
                if abort {
                    self.abort_all();
                }
                self.lane.pause(self.virtual_now(), Pause::All);
                self.shared.paused.store(true, Ordering::Relaxed);
            }
            Control::Resume => {
                self.lane.pause(self.virtual_now(), Pause::No);
                self.shared.paused.store(false, Ordering::Relaxed);
            }
            Control::ResetPrefixCache { preempt } => return self.lane.reset_prefix_cache(self.virtual_now(), preempt),
            Control::Sleep(level) => {
                if level.is_some() {
                    self.abort_all();
                    self.lane.reset_prefix_cache(self.virtual_now(), true);
                    self.lane.pause(self.virtual_now(), Pause::All);
                } else {
                    self.lane.pause(self.virtual_now(), Pause::No);
                }
                self.shared.stats.lock().sleep = level;
            }
        }
        true
    }

    /// Ends all that is inside, with the finish reason that says so.
    fn abort_all(&mut self) {
        let ids: Vec<_> = self.followed.keys().copied().collect();
        for id in ids {
            self.lane.abort(id);
            self.end_aborted(id);
        }
    }

    fn end_aborted(&mut self, id: SequenceId) {
        if let Some(followed) = self.followed.get(&id) {
            followed.outlet.end(followed.choice, Finish::Abort);
            followed.outlet.wake();
        }
        self.drop_sequence(id, Ended::Abort, None);
    }

    fn submit(&mut self, submissions: Vec<Submission>, outlet: &Arc<Outlet>) {
        let now = self.virtual_now();
        let mut requests = Vec::with_capacity(submissions.len());
        for (choice, submission) in submissions.into_iter().enumerate() {
            let Submission { request, finish, max_tokens, n } = submission;
            self.followed.insert(
                request.id,
                Followed {
                    outlet: Arc::clone(outlet),
                    choice,
                    finish,
                    prompt: request.prompt_tokens,
                    max_tokens,
                    n,
                    cached: 0,
                    preempted: 0,
                    generated: 0,
                    arrived: now,
                    scheduled: None,
                    first: None,
                    last: now,
                },
            );
            requests.push(Request { arrived: now, ..request });
        }
        self.lane.submit(now, requests);
    }

    fn step_ended(&mut self, end: StepEnd) {
        let shared = Arc::clone(&self.shared);
        let mut stats = shared.stats.lock();
        stats.step(end.load.tokens);
        stats.preemptions += u64::from(end.preempted);
        for admitted in end.admitted {
            if let Some(followed) = self.followed.get_mut(&admitted.id) {
                followed.scheduled.get_or_insert(end.started);
                followed.preempted += u32::from(admitted.resumed);
                if !admitted.resumed {
                    followed.cached = admitted.cached_tokens;
                    followed.outlet.admit(followed.choice, admitted.cached_tokens);
                }
            }
        }
        let mut finished = Vec::new();
        for token in &end.emitted {
            let Some(followed) = self.followed.get_mut(&token.id) else { continue };
            followed.generated += 1;
            if followed.first.is_none() {
                followed.first = Some(end.ended);
                stats.first_token(followed.prompt, followed.cached, end.ended.saturating_sub(followed.arrived));
                shared.gate.lock().prefilled(followed.prompt);
            } else {
                stats.next_token(end.ended.saturating_sub(followed.last));
            }
            followed.last = end.ended;
            followed.outlet.push(followed.choice, token.last.then_some(followed.finish));
            if token.last {
                finished.push(token.id);
            }
        }
        drop(stats);
        for token in &end.emitted {
            if let Some(followed) = self.followed.get(&token.id) {
                followed.outlet.wake();
            }
        }
        for id in finished {
            let stop = self.followed.get(&id).is_some_and(|followed| followed.finish == Finish::Stop);
            self.drop_sequence(id, if stop { Ended::Stop } else { Ended::Length }, None);
        }
        for (id, error) in end.refused {
            self.drop_sequence(id, Ended::Error, Some(Broken::Refused(error.to_string())));
        }
    }

    /// Forgets a sequence: counts how it ended and gives back what it held at the gate.
    fn drop_sequence(&mut self, id: SequenceId, ended: Ended, broken: Option<Broken>) {
        let Some(followed) = self.followed.remove(&id) else { return };
        self.shared.gate.lock().leave(if followed.first.is_none() { followed.prompt } else { 0 });
        let Followed { prompt, cached, preempted, generated, max_tokens, n, arrived, scheduled, first, last, .. } =
            followed;
        let now = if generated > 0 { last } else { self.virtual_now() };
        let finished =
            Finished { ended, prompt, generated, max_tokens, n, cached, preempted, arrived, scheduled, first, now };
        self.shared.stats.lock().finish(&finished);
        if let Some(broken) = broken {
            followed.outlet.fail(broken);
        }
    }

    /// A hung engine reports nothing: what was running still is, whoever left meanwhile.
    fn observe_unless_hung(&self) {
        if self.hung_since.is_none() {
            self.observe();
        }
    }

    fn observe(&self) {
        let engine = self.lane.engine();
        let deferred = engine.deferred().min(engine.waiting());
        let mut stats = self.shared.stats.lock();
        stats.gauges = Gauges {
            running: engine.running(),
            waiting: engine.waiting() - deferred,
            deferred,
            kv_usage: engine.blocks().usage(),
        };
        let prefix = engine.prefix();
        stats.prefix = (prefix.queries, prefix.hits);
        if self.shared.config.lora {
            let (running, waiting) = engine.adapters();
            let adapters = self.shared.adapters.lock();
            let names = |ids: Vec<u16>| {
                let name = |id: u16| Some(adapters.get(usize::from(id))?.as_ref()?.0.as_str());
                ids.into_iter().filter_map(name).collect::<Vec<_>>().join(",")
            };
            let key = (names(running), names(waiting));
            stats.saw_adapters(key, unix_seconds());
        }
        let running = stats.gauges.running;
        drop(stats);
        if self.out_of_memory_at.is_some_and(|most| running > most as usize) {
            self.run_out_of_memory();
        }
    }

    /// The GPU had no room for a step: the engine is gone.
    fn run_out_of_memory(&self) {
        let text = "EngineCore encountered a fatal error.\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate \
                    1.02 GiB. GPU 0 has a total capacity of which 0.31 GiB is free.";
        self.shared.config.log.line(Speaker::EngineCore, Level::Error, "core.py:1519", text);
        self.shared.dead.cancel();
    }
}

#[cfg(test)]
mod tests;
