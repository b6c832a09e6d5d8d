//! The engine loop of one rank: runs the virtual server on the real clock, in a task that owns it.
//!
//! Virtual time = real time since the start x speed. Steps follow virtual time, not the wake-ups of
//! the timer, so lateness does not accumulate. Tokio's timer has a resolution of 1 ms and rounds
//! up. A sleep shortened by [`EARLY`] ends up to half a millisecond early or late, so gaps between
//! tokens are right on average. If the process was suspended for more than [`MAX_LAG`], the clock
//! is set back, so that the missed steps do not run in a burst. The inbox for requests, aborts and
//! faults is emptied between steps.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::command::{Command, Control, Submission};
use super::output_collector::{Broken, OutputCollector};
use super::rank::Rank;
use super::state::ServerState;
use crate::engine::{Pause, Request, SequenceId, Timing};
use crate::http::wire::Finish;
use crate::observe::kv_events::Publisher;
use crate::observe::log::{Level, LogSource};
use crate::observe::stats::{Ended, Finished, Gauges};
use crate::process::fault::Fault;
use crate::unix_time::unix_seconds;
use crate::virtual_server::{StepEnd, VirtualServer};

/// Half the resolution of tokio's timer, by which each sleep is shortened.
const EARLY: Duration = Duration::from_micros(500);
/// Longest delay of the loop before the clock is set back.
const MAX_LAG: Duration = Duration::from_millis(250);

/// A sequence in flight, with data for the statistics.
#[derive(Debug)]
struct TrackedSequence {
    collector: Arc<OutputCollector>,
    choice: usize,
    finish: Finish,
    prompt: u32,
    max_tokens: u32,
    n: u32,
    session: Option<Arc<str>>,
    cached: u32,
    preempted: u32,
    generated: u32,
    arrived: Duration,
    scheduled: Option<Duration>,
    first: Option<Duration>,
    last: Duration,
}

impl TrackedSequence {
    /// The times of a sequence that ends.
    fn timing(&self) -> Timing {
        let scheduled = self.scheduled.unwrap_or(self.arrived);
        let first = self.first.unwrap_or(self.last);
        Timing {
            queue: scheduled.saturating_sub(self.arrived),
            prefill: first.saturating_sub(scheduled),
            decode: self.last.saturating_sub(first),
            tokens: self.generated,
        }
    }
}

#[derive(Debug)]
pub(crate) struct EngineLoop {
    shared: Arc<ServerState>,
    rank: Arc<Rank>,
    server: VirtualServer,
    tracked: HashMap<SequenceId, TrackedSequence>,
    /// Sequences that were ever submitted.
    submitted: usize,
    /// Real time at virtual time zero.
    epoch: Instant,
    hung_since: Option<Instant>,
    /// Running sequences above which the GPU runs out of memory.
    out_of_memory_at: Option<u32>,
    events: Option<Publisher>,
}

impl EngineLoop {
    /// `events`: publishes the changes of the prefix cache.
    pub(crate) fn new(shared: Arc<ServerState>, rank: Arc<Rank>, events: Option<Publisher>) -> Self {
        let server = shared.config.virtual_server();
        Self {
            shared,
            rank,
            server,
            tracked: HashMap::new(),
            submitted: 0,
            epoch: Instant::now(),
            hung_since: None,
            out_of_memory_at: None,
            events,
        }
    }

    /// Runs until the server stops or the engine dies.
    pub(crate) async fn run(mut self) {
        let (shared, rank) = (Arc::clone(&self.shared), Arc::clone(&self.rank));
        loop {
            self.absorb_suspension();
            for command in rank.commands() {
                self.execute(command);
            }
            if shared.stop.is_cancelled() || shared.dead.is_cancelled() {
                break;
            }
            let wake_at = self.run_due_steps();
            let sleep = async {
                match wake_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = rank.arrived.notified() => {}
                () = shared.stop.cancelled() => {}
                () = shared.dead.cancelled() => {}
                () = sleep => {}
            }
        }
        self.fail_everything().await;
    }

    /// Fails all sequences, and new ones too, until the server stops.
    async fn fail_everything(&mut self) {
        loop {
            let ids: Vec<_> = self.tracked.keys().copied().collect();
            for id in ids {
                self.forget(id, Ended::Error, Some(Broken::EngineDead));
            }
            self.server = self.shared.config.virtual_server();
            self.publish_gauges();
            if self.shared.stop.is_cancelled() {
                return;
            }
            tokio::select! {
                () = self.rank.arrived.notified() => {}
                () = self.shared.stop.cancelled() => {}
            }
            for command in self.rank.commands() {
                self.execute(command);
            }
        }
    }

    fn virtual_now(&self) -> Duration {
        // The clock of a hung engine stands still, so that afterwards no request counts the hang as
        // waiting time.
        let now = self.hung_since.unwrap_or_else(Instant::now);
        now.saturating_duration_since(self.epoch).mul_f64(self.shared.config.speed)
    }

    fn real(&self, at: Duration) -> Instant {
        self.epoch + at.div_f64(self.shared.config.speed)
    }

    /// Sets the clock back if the whole process was suspended.
    fn absorb_suspension(&mut self) {
        if self.hung_since.is_none()
            && let Some(next) = self.server.next_at()
        {
            let lag = Instant::now().saturating_duration_since(self.real(next));
            if lag > MAX_LAG {
                self.epoch += lag;
            }
        }
    }

    /// Runs every step that is due; returns the time of the next one.
    fn run_due_steps(&mut self) -> Option<Instant> {
        if self.hung_since.is_some() {
            return None;
        }
        let due = self.virtual_now() + EARLY.mul_f64(self.shared.config.speed);
        let mut worked = false;
        while self.server.next_at().is_some_and(|at| at <= due) {
            let end = self.server.poll(due);
            self.publish_kv_events();
            if let Some(end) = end {
                self.record_step(end);
                worked = true;
            }
        }
        if worked {
            self.publish_gauges();
        }
        self.server.next_at().map(|at| self.real(at) - EARLY)
    }

    fn publish_kv_events(&mut self) {
        if let Some(publisher) = &mut self.events {
            let changes = self.server.take_block_changes();
            publisher.publish(&changes, |id| self.tracked.get(&id)?.session.clone());
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Submit(submissions, collector) => self.submit(submissions, &collector),
            Command::Abort(ids) => {
                for id in ids {
                    self.server.abort(id);
                    self.forget(id, Ended::Abort, None);
                }
                self.publish_gauges_unless_hung();
            }
            Command::Fault(Fault::Hang) => {
                self.hung_since.get_or_insert_with(Instant::now);
            }
            Command::Fault(Fault::None) => {
                self.out_of_memory_at = None;
                if let Some(since) = self.hung_since.take() {
                    self.epoch += since.elapsed();
                }
                self.server.end_stall(self.virtual_now());
            }
            Command::Fault(Fault::Stall(extra)) => self.server.stall(extra),
            Command::Fault(Fault::OutOfMemory(running)) => self.out_of_memory_at = Some(running),
            Command::Fault(_) => {}
            Command::Control(Control::LoadAdapter(adapter), done) => {
                let loaded = self.server.load_adapter(self.virtual_now(), adapter);
                let loaded = self.real(loaded);
                tokio::spawn(async move {
                    tokio::time::sleep_until(loaded).await;
                    let _ = done.map(|done| done.send(true));
                });
            }
            Command::Control(control, done) => {
                let result = self.control(control);
                // The client may have disconnected.
                let _ = done.map(|done| done.send(result));
                self.publish_gauges_unless_hung();
            }
        }
    }

    fn control(&mut self, control: Control) -> bool {
        match control {
            Control::Pause { abort } => {
                if abort {
                    self.abort_all();
                }
                self.server.pause(self.virtual_now(), Pause::All);
                self.shared.paused.store(true, Ordering::Relaxed);
            }
            // `execute` handles the load of an adapter.
            Control::LoadAdapter(_) => {}
            Control::Resume => {
                self.server.pause(self.virtual_now(), Pause::No);
                self.shared.paused.store(false, Ordering::Relaxed);
            }
            Control::ResetPrefixCache { preempt } => {
                return self.server.reset_prefix_cache(self.virtual_now(), preempt);
            }
            Control::Sleep(level) => {
                if level.is_some() {
                    self.abort_all();
                    self.server.reset_prefix_cache(self.virtual_now(), true);
                    self.server.pause(self.virtual_now(), Pause::All);
                } else {
                    self.server.pause(self.virtual_now(), Pause::No);
                }
                self.rank.stats.lock().sleep = level;
            }
        }
        true
    }

    /// Ends all sequences with the finish reason `abort`.
    fn abort_all(&mut self) {
        let ids: Vec<_> = self.tracked.keys().copied().collect();
        for id in ids {
            self.server.abort(id);
            self.end_aborted(id);
        }
    }

    fn end_aborted(&mut self, id: SequenceId) {
        if let Some(tracked) = self.tracked.get(&id) {
            tracked.collector.end(tracked.choice, Finish::Abort);
            tracked.collector.wake();
        }
        self.forget(id, Ended::Abort, None);
    }

    fn submit(&mut self, submissions: Vec<Submission>, collector: &Arc<OutputCollector>) {
        let now = self.virtual_now();
        self.submitted += submissions.len();
        let mut requests = Vec::with_capacity(submissions.len());
        for (choice, submission) in submissions.into_iter().enumerate() {
            let Submission { request, finish, max_tokens, n, session } = submission;
            self.tracked.insert(
                request.id,
                TrackedSequence {
                    collector: Arc::clone(collector),
                    choice,
                    finish,
                    prompt: request.prompt_tokens,
                    max_tokens,
                    n,
                    session,
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
        let mut stats = self.rank.stats.lock();
        stats.most = stats.most.max(self.tracked.len() as u64);
        drop(stats);
        self.server.submit(now, requests);
    }

    fn record_step(&mut self, end: StepEnd) {
        let (shared, rank) = (Arc::clone(&self.shared), Arc::clone(&self.rank));
        let mut stats = rank.stats.lock();
        stats.step(end.load.tokens);
        stats.preemptions += u64::from(end.preempted);
        for admitted in end.admitted {
            if let Some(tracked) = self.tracked.get_mut(&admitted.id) {
                tracked.scheduled.get_or_insert(end.started);
                tracked.preempted += u32::from(admitted.resumed);
                if !admitted.resumed {
                    tracked.cached = admitted.cached_tokens;
                    tracked.collector.admit(tracked.choice, admitted.cached_tokens);
                }
            }
        }
        let mut finished = Vec::new();
        for token in &end.emitted {
            let Some(tracked) = self.tracked.get_mut(&token.id) else { continue };
            tracked.generated += token.tokens;
            stats.more_tokens(token.tokens - 1);
            if tracked.first.is_none() {
                tracked.first = Some(end.ended);
                stats.first_token(tracked.prompt, tracked.cached, end.ended.saturating_sub(tracked.arrived));
                shared.concurrency.lock().prefilled(tracked.prompt);
            } else {
                stats.next_token(end.ended.saturating_sub(tracked.last));
            }
            tracked.last = end.ended;
            if token.last && shared.config.request_metrics {
                tracked.collector.time(tracked.timing());
            }
            tracked.collector.push(tracked.choice, token.tokens, token.last.then_some(tracked.finish));
            if token.last {
                finished.push(token.id);
            }
        }
        drop(stats);
        for token in &end.emitted {
            if let Some(tracked) = self.tracked.get(&token.id) {
                tracked.collector.wake();
            }
        }
        for id in finished {
            let stop = self.tracked.get(&id).is_some_and(|tracked| tracked.finish == Finish::Stop);
            self.forget(id, if stop { Ended::Stop } else { Ended::Length }, None);
        }
        for (id, error) in end.refused {
            self.forget(id, Ended::Error, Some(Broken::Refused(error.to_string())));
        }
    }

    /// Counts how a sequence ended and reduces the load of the concurrency limit.
    fn forget(&mut self, id: SequenceId, ended: Ended, broken: Option<Broken>) {
        let Some(tracked) = self.tracked.remove(&id) else { return };
        self.shared.concurrency.lock().leave(if tracked.first.is_none() { tracked.prompt } else { 0 });
        let TrackedSequence {
            prompt,
            cached,
            preempted,
            generated,
            max_tokens,
            n,
            arrived,
            scheduled,
            first,
            last,
            ..
        } = tracked;
        let now = if generated > 0 { last } else { self.virtual_now() };
        let finished =
            Finished { ended, prompt, generated, max_tokens, n, cached, preempted, arrived, scheduled, first, now };
        self.rank.stats.lock().finish(&finished);
        if let Some(broken) = broken {
            tracked.collector.fail(broken);
        }
    }

    fn publish_gauges_unless_hung(&self) {
        if self.hung_since.is_none() {
            self.publish_gauges();
        }
    }

    fn publish_gauges(&self) {
        let engine = self.server.engine();
        let deferred = engine.deferred().min(engine.waiting());
        let mut stats = self.rank.stats.lock();
        stats.gauges = Gauges {
            running: engine.running(),
            waiting: engine.waiting() - deferred,
            deferred,
            kv_usage: engine.blocks().usage(),
        };
        let prefix = engine.prefix();
        stats.prefix = (prefix.queries, prefix.hits);
        stats.prefix_blocks = engine.blocks().published();
        stats.drafts = self.shared.config.engine.speculation.is_some().then(|| engine.drafts().clone());
        if self.shared.config.lora {
            let adapters = self.shared.adapters.lock();
            let name = |id: u16| Some(adapters.get(usize::from(id))?.as_ref()?.0.as_str());
            let names: Vec<&str> = engine.adapters().into_iter().filter_map(name).collect();
            stats.record_adapters(names.join(","), unix_seconds());
        }
        let running = stats.gauges.running;
        drop(stats);
        self.rank.published(self.submitted);
        if self.out_of_memory_at.is_some_and(|most| running > most as usize) {
            self.run_out_of_memory();
        }
    }

    fn run_out_of_memory(&self) {
        let text = "EngineCore encountered a fatal error.\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate \
                    1.02 GiB. GPU 0 has a total capacity of which 0.31 GiB is free.";
        self.shared.config.log.line(LogSource::EngineCore, Level::Error, "core.py:1519", text);
        self.shared.dead.cancel();
    }
}

#[cfg(test)]
mod tests;
