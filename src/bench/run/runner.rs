//! Runs a plan from the first request to the result.
//!
//! Open loop: each request has a task, which starts `RunPlan::lead` before the due time, so that
//! even a long prompt is built in time. Closed loop: each request in flight has a task, which
//! builds the next request meanwhile and sends it when the present one has ended. With sessions,
//! the tasks send conversations.
//!
//! A run lasts until the last request has ended, as in `vllm bench serve`. A stopped run abandons
//! the requests in flight and returns the records so far. Dropping the future of [`run`] ends all
//! requests.
//!
//! Connections are opened in advance, a few at a time. Hundreds at once would overflow the server's
//! accept queue, and the kernel's retry after a second would count as TTFT.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::load_client::LoadClient;
use crate::error::BenchError;
use crate::load::arrival::{Arrival, Extent, MAX_REQUESTS};
use crate::load::session::Sessions;
use crate::load::workload::LoadRequest;
use crate::result::record::{Record, RunResult};
use crate::result::validity;
use crate::run::conversation::run_conversation;
use crate::run::counts;
use crate::run::lag::LagMonitor;
use crate::run::plan::RunPlan;
use crate::run::progress::Progress;
use crate::run::scrape::Scraper;
use crate::run::sender::{RequestSender, join};

/// Runs `plan` against the servers of `client`.
///
/// The future is boxed, so that the load generator is compiled with this crate, not with each
/// caller.
///
/// # Errors
/// The plan, or the address of a server to scrape, is invalid; nothing was sent.
pub fn run<'a>(
    plan: &'a RunPlan,
    client: &'a Arc<LoadClient>,
    progress: &'a Arc<Progress>,
) -> Pin<Box<dyn Future<Output = Result<RunResult, BenchError>> + Send + 'a>> {
    Box::pin(run_plan(plan, client, progress))
}

async fn run_plan(plan: &RunPlan, client: &Arc<LoadClient>, progress: &Arc<Progress>) -> Result<RunResult, BenchError> {
    plan.workload.check()?;
    plan.sessions.as_ref().map_or(Ok(()), Sessions::check)?;
    let schedule = plan.arrival.schedule(plan.extent, plan.workload.seed)?;
    let started_at = jiff::Timestamp::now();
    let start = Instant::now() + plan.lead();
    client.open(plan.initial_requests()).await;
    let sender = RequestSender::new(plan, client, progress, start);
    let scraper = Scraper::start(&plan.scrape, client, start).await?;
    let lag = LagMonitor::start();
    let mut requests = match plan.arrival {
        Arrival::ClosedLoop { concurrency } => closed_loop(&sender, concurrency).await?,
        _ => open_loop(&sender, &schedule).await,
    };
    let client_health = lag.finish();
    let duration = Instant::now().saturating_duration_since(start).as_secs_f64();
    requests.sort_unstable_by_key(|record| record.index);
    let mut result = RunResult {
        started_at: format!("{started_at:.0}"),
        config: plan.config(client.urls(), client.path()),
        duration,
        partial: progress.is_stopped(),
        requests,
        servers: scraper.finish().await,
        client: client_health,
        ..RunResult::default()
    };
    result.warnings = validity::warnings(&result);
    result.warnings.extend(counts::warnings(&result, plan));
    Ok(result)
}

async fn open_loop(sender: &RequestSender, schedule: &[Duration]) -> Vec<Record> {
    let in_flight = Arc::new(Semaphore::new(sender.plan.max_in_flight.max(1)));
    let lead = sender.plan.lead();
    let mut tasks = JoinSet::new();
    let mut records = Vec::with_capacity(schedule.len());
    for (ordinal, offset) in (0u64..).zip(schedule) {
        let due = sender.start + *offset;
        let begin = async {
            tokio::time::sleep_until(due - lead).await;
            in_flight.clone().acquire_owned().await
        };
        let permit = tokio::select! {
            permit = begin => permit,
            () = sender.progress.stopped() => break,
        };
        let Ok(permit) = permit else { break };
        while let Some(ended) = tasks.try_join_next() {
            records.extend(join::<Vec<Record>>(ended));
        }
        let sender = sender.clone();
        tasks.spawn(async move {
            let records = send_scheduled(&sender, ordinal, due).await;
            drop(permit);
            records
        });
    }
    while let Some(ended) = tasks.join_next().await {
        records.extend(join(ended));
    }
    records
}

async fn send_scheduled(sender: &RequestSender, ordinal: u64, due: Instant) -> Vec<Record> {
    if let Some(sessions) = &sender.plan.sessions {
        return run_conversation(sender, sessions, ordinal, Some(due)).await;
    }
    let request = sender.build_request(ordinal).await;
    sender.send(ordinal, request, Some(due)).await.map(|sent| sent.record).into_iter().collect()
}

async fn closed_loop(sender: &RequestSender, concurrency: u32) -> Result<Vec<Record>, BenchError> {
    let (count, end) = match sender.plan.extent {
        Extent::Requests(count) if count > MAX_REQUESTS => {
            return Err(BenchError::TooManyRequests(count, MAX_REQUESTS));
        }
        Extent::Requests(count) => (count, None),
        Extent::Lasting(length) => (MAX_REQUESTS, Some(sender.start + length)),
    };
    let numbers = Arc::new(RequestNumbers { next: AtomicU64::new(0), count, end });
    let mut tasks = JoinSet::new();
    for _ in 0..concurrency {
        let (sender, numbers) = (sender.clone(), numbers.clone());
        tasks.spawn(async move {
            match &sender.plan.sessions {
                Some(sessions) => repeat_conversations(&sender, sessions, &numbers).await,
                None => repeat_requests(&sender, &numbers).await,
            }
        });
    }
    let mut records = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        records.extend(join::<Vec<Record>>(ended));
    }
    Ok(records)
}

/// Gives out the request numbers of a closed loop, below `count` and until the time `end`.
struct RequestNumbers {
    next: AtomicU64,
    count: u64,
    end: Option<Instant>,
}

impl RequestNumbers {
    fn take(&self) -> Option<u64> {
        Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|ordinal| *ordinal < self.count)
    }

    fn is_over(&self, sender: &RequestSender) -> bool {
        sender.progress.is_stopped() || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

async fn repeat_conversations(sender: &RequestSender, sessions: &Sessions, numbers: &RequestNumbers) -> Vec<Record> {
    let mut records = Vec::new();
    let mut next = numbers.take();
    sender.wait_until(sender.start).await;
    while let Some(session) = next.filter(|_| !numbers.is_over(sender)) {
        records.extend(run_conversation(sender, sessions, session, None).await);
        next = numbers.take();
    }
    records
}

async fn repeat_requests(sender: &RequestSender, numbers: &RequestNumbers) -> Vec<Record> {
    let mut records = Vec::new();
    let Some(mut ordinal) = numbers.take() else { return records };
    let mut request: LoadRequest = sender.build_request(ordinal).await;
    sender.wait_until(sender.start).await;
    while !numbers.is_over(sender) {
        let next = numbers.take();
        let building = next.map(|next| tokio::spawn(sender.clone().build_request_owned(next)));
        records.extend(sender.send(ordinal, request, None).await.map(|sent| sent.record));
        let Some((next, building)) = next.zip(building) else { break };
        (ordinal, request) = (next, join(building.await));
    }
    records
}

#[cfg(test)]
mod tests;
