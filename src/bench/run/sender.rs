//! Sends one request of a run and turns the response into a record.
//!
//! The record has the due time and the wait for `max_concurrency`, so the lag of the client is
//! visible. Prompts are built on blocking threads, so that building a long prompt delays no timer.
//! A failed request is not retried.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;
use tokio::time::Instant;

use crate::client::failure::RequestFailure;
use crate::client::load_client::{LoadClient, RoutingInfo, Timing};
use crate::load::workload::LoadRequest;
use crate::result::record::{Outcome, Record};
use crate::run::plan::RunPlan;
use crate::run::progress::{InFlight, Progress, RequestEvent};

pub(super) const TIMER_GRAIN: Duration = Duration::from_millis(1);

#[derive(Clone)]
pub(super) struct RequestSender {
    pub(super) plan: Arc<RunPlan>,
    client: Arc<LoadClient>,
    pub(super) progress: Arc<Progress>,
    limit: Option<Arc<Semaphore>>,
    pub(super) start: Instant,
}

struct Slot {
    _permit: Option<OwnedSemaphorePermit>,
    waited: Duration,
}

enum Exchange {
    Completed(Timing),
    Failed(RequestFailure),
    Abandoned,
}

pub(super) struct SentRequest {
    pub(super) record: Record,
    pub(super) text: Option<String>,
}

impl RequestSender {
    pub(super) fn new(plan: &RunPlan, client: &Arc<LoadClient>, progress: &Arc<Progress>, start: Instant) -> Self {
        Self {
            plan: Arc::new(plan.clone()),
            client: client.clone(),
            progress: progress.clone(),
            limit: plan.max_concurrency.map(|most| Arc::new(Semaphore::new(most.max(1) as usize))),
            start,
        }
    }

    pub(super) async fn build_request(&self, ordinal: u64) -> LoadRequest {
        let plan = self.plan.clone();
        join(tokio::task::spawn_blocking(move || plan.workload.request(ordinal)).await)
    }

    pub(super) async fn build_request_owned(self, ordinal: u64) -> LoadRequest {
        self.build_request(ordinal).await
    }

    pub(super) async fn wait_until(&self, moment: Instant) {
        tokio::select! {
            () = tokio::time::sleep_until(moment) => {}
            () = self.progress.stopped() => {}
        }
    }

    /// Sends the request when it is due. `None` if the run is stopped before the request could be
    /// sent.
    pub(super) async fn send(
        &self,
        ordinal: u64,
        mut request: LoadRequest,
        due: Option<Instant>,
    ) -> Option<SentRequest> {
        request.keep_text |= self.plan.keep_texts || self.plan.counter.is_some();
        if let Some(due) = due {
            // The timer may be late by [`TIMER_GRAIN`].
            self.wait_until((due - TIMER_GRAIN).max(self.start)).await;
        }
        let slot = self.acquire_slot(due).await?;
        if self.progress.is_stopped() {
            return None;
        }
        let sent = Instant::now();
        self.progress.record_sent();
        let due_at = due.unwrap_or(sent).saturating_duration_since(self.start).as_secs_f64();
        let (class, adapter) = (request.class, request.adapter);
        self.progress.notify(RequestEvent::Sent(InFlight { index: ordinal, class, adapter, due: due_at }));
        let mut routing = RoutingInfo::default();
        let mut exchange = tokio::select! {
            response = self.client.send_with_routing(&request, sent, &mut routing) => match response {
                Ok(timing) => Exchange::Completed(timing),
                Err(failure) => Exchange::Failed(failure),
            },
            () = self.progress.stopped() => Exchange::Abandoned,
        };
        let ttft = if let Exchange::Completed(timing) = &exchange { Some(timing.ttft.as_secs_f64()) } else { None };
        let failed = matches!(&exchange, Exchange::Failed(failure) if *failure != RequestFailure::ClientLeft);
        self.progress.record_ended(ttft, failed);
        let mut record = self.new_record(ordinal, &request, due, sent);
        record.queued = slot.waited.as_secs_f64();
        // Another request may be sent while the tokens of this one are counted.
        drop(slot);
        if let Exchange::Completed(timing) = &mut exchange {
            record.output_counted = self.count_output(timing).await;
        }
        fill_routing(&mut record, routing);
        let text = fill_outcome(&mut record, exchange, request.generated);
        record.text = text.as_deref().filter(|_| self.plan.keep_texts).map(Box::from);
        self.progress.notify(RequestEvent::Ended(&record));
        Some(SentRequest { record, text })
    }

    /// Counts the output tokens if the response has no usage. Returns whether it did.
    async fn count_output(&self, timing: &mut Timing) -> bool {
        let (None, Some(counter), Some(texts)) = (timing.output_tokens, &self.plan.counter, &mut timing.texts) else {
            return false;
        };
        let (counter, said) = (counter.clone(), std::mem::take(texts));
        let counting = move || {
            let tokens = said.iter().map(|choice| counter.output(&choice.text) + counter.output(&choice.other)).sum();
            (tokens, said)
        };
        let (tokens, said): (u64, _) = join(tokio::task::spawn_blocking(counting).await);
        (*texts, timing.output_tokens) = (said, Some(tokens));
        true
    }

    /// Waits until `max_concurrency` allows a request. `None` if the run is stopped before.
    async fn acquire_slot(&self, due: Option<Instant>) -> Option<Slot> {
        let Some(limit) = &self.limit else { return Some(Slot { _permit: None, waited: Duration::ZERO }) };
        if let Ok(permit) = limit.clone().try_acquire_owned() {
            return Some(Slot { _permit: Some(permit), waited: Duration::ZERO });
        }
        let since = due.unwrap_or_else(Instant::now);
        tokio::select! {
            permit = limit.clone().acquire_owned() => Some(Slot { _permit: permit.ok(), waited: since.elapsed() }),
            () = self.progress.stopped() => None,
        }
    }

    fn new_record(&self, ordinal: u64, request: &LoadRequest, due: Option<Instant>, sent: Instant) -> Record {
        let offset = |moment: Instant| moment.saturating_duration_since(self.start).as_secs_f64();
        Record {
            index: ordinal,
            class: request.class,
            adapter: request.adapter,
            session: request.session,
            due: due.map(offset),
            sent: offset(sent),
            ended: offset(Instant::now()),
            prompt_tokens: u64::from(request.prompt_tokens),
            ..Record::default()
        }
    }
}

fn fill_routing(record: &mut Record, routing: RoutingInfo) {
    record.pool = routing.pool;
    record.backend = routing.backend;
    record.arm = routing.arm;
    record.queue_wait = routing.queue.map(|queue| queue.as_secs_f64());
}

/// Sets the record's outcome. Returns the response's text.
fn fill_outcome(record: &mut Record, exchange: Exchange, generated: bool) -> Option<String> {
    match exchange {
        Exchange::Abandoned => record.outcome = Outcome::Unfinished,
        Exchange::Failed(RequestFailure::ClientLeft) => record.outcome = Outcome::Left,
        Exchange::Failed(failure) => record.outcome = Outcome::Failed(failure.to_string().into()),
        Exchange::Completed(timing) => {
            record.outcome = Outcome::Completed;
            let asked = record.prompt_tokens;
            record.prompt_tokens = timing.prompt_tokens.unwrap_or(asked);
            record.asked_tokens = (generated && record.prompt_tokens != asked).then_some(asked);
            record.cached_tokens = timing.cached_tokens;
            record.output_tokens = timing.output_tokens;
            record.ttft = timing.ttft.as_secs_f64();
            record.latency = timing.e2el.as_secs_f64();
            record.itls = timing.gaps.iter().map(Duration::as_secs_f64).collect();
            return timing.text().map(str::to_owned);
        }
    }
    None
}

/// A task's value. Tasks are never cancelled, so an error is a panic, which is resumed.
pub(super) fn join<T>(ended: Result<T, JoinError>) -> T {
    match ended {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
