//! Sends a workload on its schedule and waits until everything has ended.
//!
//! Open arrivals: each request gets a task of its own, started [`LEAD`] before the request is due, so
//! that making a long prompt is over in time. The clock of a request starts when it was *due*, or when
//! it was really sent if that was earlier (timers here have a grain of 1 ms, so a task aims one grain
//! early). A request can only be late by our own fault, a busy machine or [`Plan::max_in_flight`]; the
//! delay is inside its TTFT and E2EL and also reported as `late`.
//!
//! Closed loop: `streams` tasks, each sends its next request when its last has ended. Nothing is due,
//! so nothing is late.
//!
//! The duration of a run is from its start until the last request has ended, as `vllm bench serve`
//! counts it. Dropping the future of [`run`] ends every request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::BenchError;
use super::arrival::{Arrival, Extent, MAX_REQUESTS};
use super::client::{Client, Failure, Timing};
use super::workload::{Question, Workload};

/// How long before a request is due its task starts.
pub const LEAD: Duration = Duration::from_millis(20);
/// The grain of the runtime's timers.
const TIMER_GRAIN: Duration = Duration::from_millis(1);
/// Requests in flight when nothing else is asked for: a descriptor each, below what a raised soft
/// limit allows.
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
    /// Requests in flight at most; further ones wait here, and are late.
    pub max_in_flight: usize,
}

/// Counts that may be read while a run goes on.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests sent.
    pub sent: AtomicU64,
    /// Requests ended, failures included.
    pub ended: AtomicU64,
    /// Requests failed.
    pub failed: AtomicU64,
}

/// One request and what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its number in the workload.
    pub ordinal: u64,
    /// Index of its class.
    pub class: usize,
    /// Prompt tokens asked for.
    pub prompt_tokens: u32,
    /// When its clock started, from the start of the run.
    pub started: Duration,
    /// How much later than due it was sent.
    pub late: Duration,
    /// What the client saw.
    pub answer: Result<Timing, Failure>,
}

/// Everything a run has shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// One for each request that was sent, by ordinal.
    pub samples: Vec<Sample>,
    /// From the start to the end of the last request.
    pub duration: Duration,
}

/// Runs `plan` against the servers of `client`.
///
/// # Errors
/// The plan makes no sense; nothing has been sent then.
pub async fn run(plan: &Plan, client: &Arc<Client>, progress: &Arc<Progress>) -> Result<Run, BenchError> {
    plan.workload.check()?;
    let schedule = plan.arrival.schedule(plan.extent, plan.workload.seed)?;
    let sender = Sender {
        workload: Arc::new(plan.workload.clone()),
        client: client.clone(),
        progress: progress.clone(),
        // Tasks are started ahead of time, and so is the run.
        start: Instant::now() + LEAD,
    };
    let mut samples = match plan.arrival {
        Arrival::ClosedLoop { streams } => sender.closed(streams, plan.extent).await?,
        _ => sender.open(&schedule, plan.max_in_flight).await,
    };
    samples.sort_unstable_by_key(|sample| sample.ordinal);
    Ok(Run { samples, duration: sender.start.elapsed() })
}

#[derive(Clone)]
struct Sender {
    workload: Arc<Workload>,
    client: Arc<Client>,
    progress: Arc<Progress>,
    start: Instant,
}

impl Sender {
    async fn open(&self, schedule: &[Duration], max_in_flight: usize) -> Vec<Sample> {
        let room = Arc::new(Semaphore::new(max_in_flight.max(1)));
        let mut tasks = JoinSet::new();
        let mut samples = Vec::with_capacity(schedule.len());
        for (ordinal, offset) in (0u64..).zip(schedule) {
            let due = self.start + *offset;
            tokio::time::sleep_until(due - LEAD).await;
            // Fails only when closed, and nobody closes it.
            let Ok(permit) = room.clone().acquire_owned().await else { break };
            while let Some(ended) = tasks.try_join_next() {
                samples.push(sample_of(ended));
            }
            let sender = self.clone();
            tasks.spawn(async move {
                let sample = sender.send_when_due(ordinal, due).await;
                drop(permit);
                sample
            });
        }
        while let Some(ended) = tasks.join_next().await {
            samples.push(sample_of(ended));
        }
        samples
    }

    async fn closed(&self, streams: u32, extent: Extent) -> Result<Vec<Sample>, BenchError> {
        let (count, end) = match extent {
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
            tasks.spawn(async move {
                let mut samples = Vec::new();
                tokio::time::sleep_until(sender.start).await;
                while end.is_none_or(|end| Instant::now() < end) {
                    let ordinal = next.fetch_add(1, Ordering::Relaxed);
                    if ordinal >= count {
                        break;
                    }
                    let question = sender.workload.question(ordinal);
                    let now = Instant::now();
                    samples.push(sender.send(ordinal, question, now, now).await);
                }
                samples
            });
        }
        let mut samples = Vec::new();
        while let Some(ended) = tasks.join_next().await {
            samples.extend(sample_of(ended));
        }
        Ok(samples)
    }

    async fn send_when_due(&self, ordinal: u64, due: Instant) -> Sample {
        let question = self.workload.question(ordinal);
        tokio::time::sleep_until(due - TIMER_GRAIN).await;
        self.send(ordinal, question, due, Instant::now()).await
    }

    async fn send(&self, ordinal: u64, question: Question, due: Instant, now: Instant) -> Sample {
        let start = due.min(now);
        self.progress.sent.fetch_add(1, Ordering::Relaxed);
        let answer = self.client.ask(&question, start).await;
        self.progress.ended.fetch_add(1, Ordering::Relaxed);
        if answer.is_err() {
            self.progress.failed.fetch_add(1, Ordering::Relaxed);
        }
        Sample {
            ordinal,
            class: question.class,
            prompt_tokens: question.prompt_tokens,
            started: start.saturating_duration_since(self.start),
            late: now.saturating_duration_since(due),
            answer,
        }
    }
}

/// A task's result; tasks are never cancelled while someone waits here, so an error is a panic of
/// ours, and it goes on where it can be seen.
fn sample_of<T>(ended: Result<T, JoinError>) -> T {
    match ended {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::mock::{Answer, MockEngine, completion_stream, small_workload};

    fn plan(arrival: Arrival, extent: Extent) -> Plan {
        Plan { workload: small_workload(), arrival, extent, max_in_flight: MAX_IN_FLIGHT }
    }

    async fn run_against(engine: &MockEngine, plan: &Plan) -> (Run, Arc<Progress>) {
        let client = Client::new(&[engine.url()], plan.workload.api, Duration::from_secs(20)).unwrap();
        let progress = Arc::new(Progress::default());
        let outcome = run(plan, &Arc::new(client), &progress).await.unwrap();
        (outcome, progress)
    }

    #[tokio::test]
    async fn every_scheduled_request_is_sent_once_and_near_its_time() {
        let engine = MockEngine::start(|_| Answer::stream(completion_stream(2), Duration::ZERO)).await;
        let plan = plan(Arrival::Poisson { rate: 200.0 }, Extent::Requests(60));
        let schedule = plan.arrival.schedule(plan.extent, plan.workload.seed).unwrap();
        let (outcome, progress) = run_against(&engine, &plan).await;
        assert_eq!(engine.requests(), 60);
        assert_eq!(outcome.samples.len(), 60);
        assert_eq!(progress.ended.load(Ordering::Relaxed), 60);
        for (sample, due) in outcome.samples.iter().zip(&schedule) {
            assert!(sample.started <= *due, "a clock starts when due or earlier");
            assert!(*due - sample.started <= TIMER_GRAIN * 2);
            assert!(sample.answer.is_ok());
        }
    }

    #[tokio::test]
    async fn a_late_send_is_measured_from_the_moment_it_was_due() {
        // Three requests due at once, one in flight at most, 50 ms or more each: the last waits for two.
        let pause = Duration::from_millis(25);
        let engine = MockEngine::start(move |_| Answer::stream(completion_stream(1), pause)).await;
        let burst = plan(Arrival::Burst { rate: 1_000.0, size: 3 }, Extent::Requests(3));
        let (outcome, _) = run_against(&engine, &Plan { max_in_flight: 1, ..burst }).await;
        let last = &outcome.samples[2];
        let timing = last.answer.as_ref().unwrap();
        assert!(last.late >= pause * 4 - TIMER_GRAIN, "late by {:?}", last.late);
        assert!(timing.ttft >= last.late + pause - TIMER_GRAIN, "{timing:?} does not contain {:?}", last.late);
        assert!(last.started < TIMER_GRAIN * 2);
    }

    #[tokio::test]
    async fn a_closed_loop_keeps_its_streams_busy_and_counts_its_requests() {
        let engine = MockEngine::start(|_| Answer::stream(completion_stream(2), Duration::from_millis(2))).await;
        let plan = plan(Arrival::ClosedLoop { streams: 4 }, Extent::Requests(30));
        let (outcome, _) = run_against(&engine, &plan).await;
        assert_eq!(outcome.samples.len(), 30);
        assert_eq!(engine.connections(), 4);
        assert!(outcome.samples.iter().all(|sample| sample.late.is_zero()));
        let ordinals: Vec<u64> = outcome.samples.iter().map(|sample| sample.ordinal).collect();
        assert_eq!(ordinals, (0..30).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn failures_are_counted_beside_the_rest() {
        let engine = MockEngine::start(|number| Answer {
            status: if number % 3 == 0 { 503 } else { 200 },
            ..Answer::stream(completion_stream(1), Duration::ZERO)
        })
        .await;
        let plan = plan(Arrival::Constant { rate: 500.0 }, Extent::Requests(30));
        let (outcome, progress) = run_against(&engine, &plan).await;
        assert_eq!(progress.failed.load(Ordering::Relaxed), 10);
        let failed = outcome.samples.iter().filter(|sample| sample.answer == Err(Failure::Status(503))).count();
        assert_eq!(failed, 10);
    }
}
