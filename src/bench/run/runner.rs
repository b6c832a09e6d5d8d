//! Sends a workload on its schedule and waits until everything has ended, or until it is told to stop.
//!
//! Open arrivals: each request gets a task of its own, started [`LEAD`] before the request is due, so that making a long
//! prompt is over in time. A task aims one grain of the timers early, and sends. The clock of a request starts when it is
//! sent; when it was *due* is in its record, and so is a wait for `max_concurrency`, so a late client can hide nothing.
//!
//! Closed loop: `streams` tasks, each sends its next request when its last has ended; the next one is made while the last
//! is answered. Nothing is due, so nothing is late.
//!
//! Sessions (`session`) take the place of single requests in both.
//!
//! The duration of a run is from its start until the last request has ended, as `vllm bench serve` counts it. A run that is
//! stopped gives up what is in flight and returns what it has. Dropping the future of [`run`] ends every request.
//!
//! Streams and bursts that begin at the start find their connections open: hundreds of them opened in one moment overflow a
//! server's queue of new connections, and the kernel tries those again after a second, which is nobody's TTFT.
//!
//! Prompts are made on other threads than the ones that read answers, so that a long prompt does not delay a clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use crate::client::load_client::{Client, Failure, Place, Timing};
use crate::error::BenchError;
use crate::load::arrival::{Arrival, Extent, MAX_REQUESTS};
use crate::load::session::Sessions;
use crate::load::workload::{Question, Source, Workload};
use crate::result::record::{Outcome, Ramp, Record, RunConfig, RunResult};
use crate::result::validity;
use crate::run::lag::Watch;
use crate::run::progress::{News, Progress};
use crate::run::scrape::Scraper;

/// How long before a request is due its task starts.
pub const LEAD: Duration = Duration::from_millis(20);
/// The longest that a run's start is put off so that prompts due at once can be made.
pub const MAX_LEAD: Duration = Duration::from_secs(5);
/// Time to make a prompt, for each of its tokens: several times what it takes.
const MAKING: Duration = Duration::from_nanos(100);
/// Time to open a connection, likewise.
const CONNECTING: Duration = Duration::from_millis(1);
/// The grain of the runtime's timers.
pub(crate) const TIMER_GRAIN: Duration = Duration::from_millis(1);
/// Requests in flight when nothing else is asked for: a descriptor each, below what a raised soft limit allows.
pub const MAX_IN_FLIGHT: usize = 10_000;

/// What to send, and when.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The requests.
    pub workload: Workload,
    /// Their moments.
    pub arrival: Arrival,
    /// How many, or for how long.
    pub extent: Extent,
    /// Requests that exist at once at most; further ones wait here, and are late by our own fault.
    pub max_in_flight: usize,
    /// Requests in flight that the user allows; the wait for it is the request's `queued`.
    pub max_concurrency: Option<u32>,
    /// Conversations in the place of single requests.
    pub sessions: Option<Sessions>,
    /// Servers whose `/metrics` are read during the run.
    pub scrape: Vec<String>,
}

impl Plan {
    /// A plan without anything special.
    pub fn new(workload: Workload, arrival: Arrival, extent: Extent) -> Self {
        Self {
            workload,
            arrival,
            extent,
            max_in_flight: MAX_IN_FLIGHT,
            max_concurrency: None,
            sessions: None,
            scrape: Vec::new(),
        }
    }

    /// What a result says of this plan. The words of the user (label, objectives, percentiles) are his to add.
    pub fn config(&self, client: &Client) -> RunConfig {
        let concurrency = match self.arrival {
            Arrival::ClosedLoop { streams } => Some(streams),
            _ => self.max_concurrency,
        };
        let burstiness = match self.arrival {
            Arrival::Gamma { burstiness, .. } | Arrival::Ramp { burstiness, .. } => Some(burstiness),
            Arrival::Constant { .. } => None,
            _ => Some(1.0),
        };
        let ramp = match &self.arrival {
            Arrival::Ramp { start, end, geometric, .. } => Some(Ramp {
                strategy: if *geometric { "exponential" } else { "linear" }.to_owned(),
                start: *start,
                end: *end,
            }),
            _ => None,
        };
        RunConfig {
            urls: client.urls(),
            endpoint: client.path().to_owned(),
            model: self.workload.model.clone(),
            num_prompts: if let Extent::Requests(count) = self.extent { count } else { 0 },
            dataset: match self.workload.source {
                Source::Classes(_) => "random".to_owned(),
                Source::Items(_) => "file".to_owned(),
            },
            arrival: self.arrival.name().to_owned(),
            request_rate: self.arrival.rate(),
            burstiness: burstiness.filter(|shape| shape.is_finite()),
            max_concurrency: concurrency,
            ramp,
            percentiles: vec![50.0, 90.0, 99.0],
            percentile_metrics: ["ttft", "tpot", "itl", "e2el"].map(str::to_owned).to_vec(),
            classes: self.workload.class_configs(),
            adapters: self.workload.adapters.names.clone(),
            seed: self.workload.seed,
            ..RunConfig::default()
        }
    }

    /// Requests that are sent at the very start.
    fn at_once(&self) -> usize {
        let at_once = match (&self.arrival, self.extent) {
            (Arrival::ClosedLoop { streams }, _) => *streams as usize,
            (Arrival::Burst { size, .. }, _) => *size as usize,
            (Arrival::AtOnce, Extent::Requests(count)) => usize::try_from(count).unwrap_or(usize::MAX),
            _ => 0,
        };
        at_once.min(self.max_in_flight).min(self.max_concurrency.map_or(usize::MAX, |most| most as usize))
    }

    /// Seconds between the call of [`run`] and the start that its moments count from.
    pub fn lead_seconds(&self) -> f64 {
        self.lead().as_secs_f64()
    }

    /// How far ahead of its start a run must begin, so that connections are open and the prompts due first are made in time.
    fn lead(&self) -> Duration {
        let at_once = u32::try_from(self.at_once()).unwrap_or(u32::MAX);
        let tokens = u64::from(self.workload.question(0).prompt_tokens) * u64::from(at_once.max(1));
        let making = MAKING.saturating_mul(u32::try_from(tokens).unwrap_or(u32::MAX));
        LEAD.saturating_add(making).saturating_add(CONNECTING.saturating_mul(at_once)).min(MAX_LEAD)
    }
}

/// Runs `plan` against the servers of `client`.
///
/// # Errors
/// The plan makes no sense; nothing has been sent then.
pub async fn run(plan: &Plan, client: &Arc<Client>, progress: &Arc<Progress>) -> Result<RunResult, BenchError> {
    plan.workload.check()?;
    plan.sessions.as_ref().map_or(Ok(()), Sessions::check)?;
    let schedule = plan.arrival.schedule(plan.extent, plan.workload.seed)?;
    let started_at = jiff::Timestamp::now();
    // Tasks are started ahead of time, and so is the run.
    let start = Instant::now() + plan.lead();
    client.open(plan.at_once()).await;
    let sender = Sender {
        plan: Arc::new(plan.clone()),
        client: client.clone(),
        progress: progress.clone(),
        room: plan.max_concurrency.map(|most| Arc::new(Semaphore::new(most.max(1) as usize))),
        start,
    };
    let scraper = Scraper::start(&plan.scrape, client.headers(), sender.start).await?;
    let watch = Watch::start();
    let mut requests = match plan.arrival {
        Arrival::ClosedLoop { streams } => sender.closed(streams).await?,
        _ => sender.open(&schedule).await,
    };
    let client_health = watch.finish();
    let duration = Instant::now().saturating_duration_since(sender.start).as_secs_f64();
    requests.sort_unstable_by_key(|record| record.index);
    let mut result = RunResult {
        started_at: format!("{started_at:.0}"),
        config: plan.config(client),
        duration,
        partial: progress.is_stopped(),
        requests,
        servers: scraper.finish(sender.start).await,
        client: client_health,
        ..RunResult::default()
    };
    result.warnings = validity::warnings(&result);
    Ok(result)
}

#[derive(Clone)]
pub(crate) struct Sender {
    pub(crate) plan: Arc<Plan>,
    client: Arc<Client>,
    pub(crate) progress: Arc<Progress>,
    room: Option<Arc<Semaphore>>,
    start: Instant,
}

impl Sender {
    async fn open(&self, schedule: &[Duration]) -> Vec<Record> {
        let room = Arc::new(Semaphore::new(self.plan.max_in_flight.max(1)));
        let lead = self.plan.lead();
        let mut tasks = JoinSet::new();
        let mut records = Vec::with_capacity(schedule.len());
        for (ordinal, offset) in (0u64..).zip(schedule) {
            let due = self.start + *offset;
            let begin = async {
                tokio::time::sleep_until(due - lead).await;
                room.clone().acquire_owned().await
            };
            let permit = tokio::select! {
                permit = begin => permit,
                () = self.progress.stopped() => break,
            };
            // Fails only when closed, and nobody closes it.
            let Ok(permit) = permit else { break };
            while let Some(ended) = tasks.try_join_next() {
                records.extend(value_of::<Vec<Record>>(ended));
            }
            let sender = self.clone();
            tasks.spawn(async move {
                let records = sender.unit(ordinal, Some(due)).await;
                drop(permit);
                records
            });
        }
        while let Some(ended) = tasks.join_next().await {
            records.extend(value_of(ended));
        }
        records
    }

    /// One request, or one session.
    async fn unit(&self, ordinal: u64, due: Option<Instant>) -> Vec<Record> {
        if self.plan.sessions.is_some() {
            return self.session(ordinal, due).await;
        }
        let question = self.make(ordinal).await;
        self.send_when_due(ordinal, question, due).await.into_iter().collect()
    }

    async fn closed(&self, streams: u32) -> Result<Vec<Record>, BenchError> {
        let (count, end) = match self.plan.extent {
            Extent::Requests(count) if count > MAX_REQUESTS => {
                return Err(BenchError::TooManyRequests(count, MAX_REQUESTS));
            }
            Extent::Requests(count) => (count, None),
            Extent::Lasting(length) => (MAX_REQUESTS, Some(self.start + length)),
        };
        let next = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..streams {
            let (sender, next) = (self.clone(), next.clone());
            tasks.spawn(async move { sender.stream(&next, count, end).await });
        }
        let mut records = Vec::new();
        while let Some(ended) = tasks.join_next().await {
            records.extend(value_of::<Vec<Record>>(ended));
        }
        Ok(records)
    }

    /// One stream of a closed loop.
    async fn stream(&self, next: &AtomicU64, count: u64, end: Option<Instant>) -> Vec<Record> {
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|ordinal| *ordinal < count);
        let mut records = Vec::new();
        let mut ordinal = take();
        let mut made = match ordinal {
            Some(ordinal) if self.plan.sessions.is_none() => Some(self.make(ordinal).await),
            _ => None,
        };
        self.until(self.start).await;
        while let Some(current) = ordinal {
            if self.progress.is_stopped() || end.is_some_and(|end| Instant::now() >= end) {
                break;
            }
            let Some(question) = made.take() else {
                records.extend(self.session(current, None).await);
                ordinal = take();
                continue;
            };
            ordinal = take();
            let making = ordinal.map(|ordinal| tokio::spawn(self.clone().make_owned(ordinal)));
            records.extend(self.send_when_due(current, question, None).await);
            made = match making {
                Some(making) => Some(value_of(making.await)),
                None => None,
            };
        }
        records
    }

    async fn make(&self, ordinal: u64) -> Question {
        let plan = self.plan.clone();
        value_of(tokio::task::spawn_blocking(move || plan.workload.question(ordinal)).await)
    }

    async fn make_owned(self, ordinal: u64) -> Question {
        self.make(ordinal).await
    }

    /// Returns at `moment`, or when the run is stopped.
    pub(crate) async fn until(&self, moment: Instant) {
        tokio::select! {
            () = tokio::time::sleep_until(moment) => {}
            () = self.progress.stopped() => {}
        }
    }

    async fn send_when_due(&self, ordinal: u64, question: Question, due: Option<Instant>) -> Option<Record> {
        self.send(ordinal, question, due).await.map(|(record, _)| record)
    }

    /// Sends a question when it is due and there is room; nothing when the run is stopped before.
    pub(crate) async fn send(
        &self,
        ordinal: u64,
        question: Question,
        due: Option<Instant>,
    ) -> Option<(Record, Option<String>)> {
        if let Some(due) = due {
            self.until(due - TIMER_GRAIN).await;
        }
        let (_permit, queued) = self.enter(due).await?;
        if self.progress.is_stopped() {
            return None;
        }
        let sent = Instant::now();
        self.progress.note_sent();
        let at = due.unwrap_or(sent).saturating_duration_since(self.start).as_secs_f64();
        self.progress.tell(News::Sent { index: ordinal, class: question.class, at });
        let mut place = Place::default();
        let answer = tokio::select! {
            answer = self.client.ask_placed(&question, sent, &mut place) => Some(answer),
            () = self.progress.stopped() => None,
        };
        let ttft = answer.as_ref().and_then(|answer| answer.as_ref().ok()).map(|timing| timing.ttft.as_secs_f64());
        let failed = matches!(&answer, Some(Err(failure)) if *failure != Failure::Left);
        self.progress.note_ended(ttft, failed);
        let mut record = self.record(ordinal, &question, due, sent);
        record.queued = queued.as_secs_f64();
        place_in(&mut record, place);
        let text = answer_in(&mut record, answer);
        self.progress.tell(News::Ended(&record));
        Some((record, text))
    }

    /// Room under the user's limit, and how long it was waited for. Nothing when the run is stopped meanwhile.
    async fn enter(&self, due: Option<Instant>) -> Option<(Option<tokio::sync::OwnedSemaphorePermit>, Duration)> {
        let Some(room) = &self.room else { return Some((None, Duration::ZERO)) };
        if let Ok(permit) = room.clone().try_acquire_owned() {
            return Some((Some(permit), Duration::ZERO));
        }
        let since = due.unwrap_or_else(Instant::now);
        tokio::select! {
            permit = room.clone().acquire_owned() => Some((permit.ok(), since.elapsed())),
            () = self.progress.stopped() => None,
        }
    }

    fn record(&self, ordinal: u64, question: &Question, due: Option<Instant>, sent: Instant) -> Record {
        let offset = |moment: Instant| moment.saturating_duration_since(self.start).as_secs_f64();
        Record {
            index: ordinal,
            class: question.class,
            adapter: question.adapter,
            session: question.session,
            due: due.map(offset),
            sent: offset(sent),
            ended: offset(Instant::now()),
            prompt_tokens: u64::from(question.prompt_tokens),
            ..Record::default()
        }
    }
}

fn place_in(record: &mut Record, place: Place) {
    record.pool = place.pool;
    record.backend = place.backend;
    record.arm = place.arm;
    record.queue_wait = place.queue.map(|queue| queue.as_secs_f64());
}

/// Fills in what came of a request; nothing is one that was still running. Returns the answer's text.
fn answer_in(record: &mut Record, answer: Option<Result<Timing, Failure>>) -> Option<String> {
    match answer {
        None => record.outcome = Outcome::Unfinished,
        Some(Err(Failure::Left)) => record.outcome = Outcome::Left,
        Some(Err(failure)) => record.outcome = Outcome::Failed(failure.to_string().into()),
        Some(Ok(timing)) => {
            record.outcome = Outcome::Completed;
            record.prompt_tokens = timing.prompt_tokens.unwrap_or(record.prompt_tokens);
            record.cached_tokens = timing.cached_tokens;
            record.output_tokens = timing.output_tokens;
            record.ttft = timing.ttft.as_secs_f64();
            record.latency = timing.e2el.as_secs_f64();
            record.itls = timing.gaps.iter().map(Duration::as_secs_f64).collect();
            return timing.text;
        }
    }
    None
}

/// A task's result; tasks are never cancelled while someone waits here, so an error is a panic of
/// ours, and it goes on where it can be seen.
fn value_of<T>(ended: Result<T, JoinError>) -> T {
    match ended {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

#[cfg(test)]
mod tests;
