//! Continues an answer on another engine after its engine has failed in the middle, or while it
//! leaves service.
//!
//! A stream that moves has the next lease before it loses the first one, and is not charged twice.
//! After a failure the first lease is returned as failed, and the next one is acquired as for any
//! attempt, in the order of arrival and within all limits. Only engines of the same pool that have
//! loaded the model from the same place may continue it, because others may have another revision.
//! If the client leaves meanwhile, the request leaves the queue.
//!
//! Bounds: [`CONTINUATIONS_MAX`] continuations of a request; none of a body that was on two engines
//! when they died (`deaths.rs`); tokens per minute by `continuation/limits.rs`.

use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{Attempts, First, note_lease, response_context};
use crate::flow::admit::AdmitError;
use crate::flow::attempt::FailedAttempt;
use crate::flow::classify::Placement;
use crate::flow::continuation::{self, Answer, Ended, Identity, Next, Seam};
use crate::flow::exchange::{ClientGone, Downstream, Upstream, UpstreamRequest};
use crate::flow::pump::{Pump, Unfinished};
use crate::flow::record::{Outcome, RecordGuard, Recorder, Stage};
use crate::flow::suspects::TurnOf;
use crate::pool::{AdmissionRequest, Lease, Need};
use sluice_core::meter::StreamMeter;
use sluice_core::openai::{EditedBody, NotContinued, Route};

/// How often the answer to one request may be continued.
const CONTINUATIONS_MAX: u32 = 2;
/// The route on which vLLM continues a message, also one of Anthropic's form.
const CHAT_PATH: &str = "/v1/chat/completions";

/// The end of an answer that no other engine continues.
pub(super) enum End {
    Error(Option<NotContinued>),
    /// Only the end is missing; the field has its events.
    Complete(Bytes),
}

/// The request with which another engine continues an answer.
struct Plan {
    body: EditedBody,
    need: Need,
    seam: Box<Seam>,
}

impl<U: Upstream> Attempts<'_, U> {
    /// The lease of the engine that continues the answer. `None`: the request is over.
    pub(super) async fn go_on<D: Downstream, R: Recorder>(
        &mut self,
        failed: FailedAttempt<U::Exchange>,
        mut lease: Lease,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Option<Lease> {
        let place = lease.place();
        let (next, prefilled) = match self.next.take() {
            Some(mut next) => {
                lease.release_failed();
                note_lease(&mut next, record);
                (next, 0)
            }
            None => self.next_engine(&failed, lease, down, record).await?,
        };
        record.retried(failed.reason, place);
        record.continued += 1;
        record.prefilled_again += prefilled;
        match self.count_tokens(&next).await {
            None => Some(next),
            Some(end) => {
                self.end(end, failed.outcome, next, down, record).await;
                None
            }
        }
    }

    /// The lease of another engine after a failure, and the tokens that it prefills again. `None`:
    /// the request is over.
    async fn next_engine<D: Downstream, R: Recorder>(
        &mut self,
        failed: &FailedAttempt<U::Exchange>,
        mut lease: Lease,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Option<(Lease, u64)> {
        let rest = self.unfinished.take();
        let planned = rest.as_ref().ok_or(End::Error(None)).and_then(|rest| {
            let rest = self.plan(rest, failed.why_not, &lease, record)?;
            self.may_prefill(&rest).then_some(rest).ok_or(End::Error(Some(NotContinued::Budget)))
        });
        self.unfinished = rest;
        let prefilled = match planned {
            Ok(plan) => self.follow(plan),
            Err(end) => {
                self.end(end, failed.outcome, lease, down, record).await;
                return None;
            }
        };
        self.prepared.placed.request.avoid.extend(lease.server());
        lease.release_failed();
        let next = match self.wait_for_turn(TurnOf::Continued, down, record).await {
            Ok(()) => self.lease_as_placed(down, record).await,
            Err(ClientGone) => Err(AdmitError::ClientGone),
        };
        match next {
            Ok(next) => Some((next, prefilled)),
            Err(AdmitError::ClientGone) => {
                record.outcome = Outcome::ClientGone;
                record.stats = self.unfinished.take().and_then(|rest| rest.meter().map(StreamMeter::stats));
                None
            }
            Err(_) => {
                self.end(End::Error(Some(NotContinued::NoEngine)), failed.outcome, lease, down, record).await;
                None
            }
        }
    }

    /// The lease of an engine that has room for the rest of the stream now. If there is one, the
    /// request is prepared for it.
    pub(super) fn room_elsewhere<R: Recorder>(
        &mut self,
        rest: &Unfinished,
        lease: &Lease,
        record: &mut RecordGuard<'_, R>,
    ) -> Option<Lease> {
        let plan = self.plan(rest, None, lease, record).ok()?;
        let placed = &self.prepared.placed.request;
        let request = AdmissionRequest { need: plan.need, since: Instant::now(), ..placed.clone() };
        let mut next = self.backends.admission.try_enter(request)?;
        if !self.may_prefill(&plan) {
            // The owner must not be charged for a prompt that is not sent.
            next.release_failed();
            return None;
        }
        record.prefilled_again += self.follow(plan);
        Some(next)
    }

    /// The request for the engine that continues the answer, or how the answer ends without one.
    fn plan<R: Recorder>(
        &mut self,
        rest: &Unfinished,
        why_not: Option<NotContinued>,
        lease: &Lease,
        record: &RecordGuard<'_, R>,
    ) -> Result<Plan, End> {
        let error = |why| End::Error(Some(why));
        if self.backends.abort.is_cancelled() {
            return Err(End::Error(None));
        }
        let meter = rest.meter().ok_or(End::Error(None))?;
        let kept = meter.kept().ok_or(error(NotContinued::Unreadable))?;
        let route = self.incoming.route;
        let identity = Identity::of(kept, route, meter.have_choices_begun()).map_err(error)?;
        let usage = self.usage(|| meter.prompt_tokens().map(|prompt| (prompt, meter.tokens())));
        if meter.have_choices_finished() {
            return Err(self.complete(false, usage, &identity));
        }
        if let Some(why) = why_not {
            return Err(error(why));
        }
        if record.continued >= CONTINUATIONS_MAX {
            return Err(error(NotContinued::Attempts));
        }
        if self.is_suspended() {
            return Err(error(NotContinued::Suspect));
        }
        let answer = Answer::of(kept, meter.text_tokens(), route).map_err(error)?;
        let (sent, need) = (&self.request.body, self.prepared.placed.request.need);
        let first = self.first.get_or_insert_with(|| First { body: sent.clone(), need, prompt: None });
        let prompt = meter.prompt_tokens().or(first.prompt);
        let need = first.need;
        let body = match continuation::next(route, &first.body.to_bytes(), &answer).map_err(error)? {
            Next::Send(body) => body,
            Next::AtLimit(_) => return Err(self.complete(true, usage, &identity)),
        };
        // The text is a part of the prompt now, and was a part of the expected output before.
        let need = Need {
            prompt_tokens: need.prompt_tokens + answer.tokens,
            output_tokens: need.output_tokens.saturating_sub(answer.tokens),
            ..need
        };
        self.stay_in_pool(lease);
        Ok(Plan { body, need, seam: Box::new(Seam::new(identity, answer, prompt)) })
    }

    /// Whether the tokens of the plan may be prefilled again now. If so, they count.
    fn may_prefill(&self, plan: &Plan) -> bool {
        self.backends.continuations.may_prefill(plan.need.prompt_tokens, Instant::now())
    }

    /// Prepares the request by the plan. Returns the tokens that the engine prefills again.
    fn follow(&mut self, plan: Plan) -> u64 {
        let Plan { body, need, seam } = plan;
        (self.request.body, self.prepared.placed.request.need) = (body, need);
        if self.incoming.route == Route::Messages {
            self.request.path = CHAT_PATH.to_owned();
        }
        self.seam = Some(seam);
        need.prompt_tokens
    }

    /// Restricts the request to the pool of the engine that began the answer, and to engines that
    /// have loaded the model from the same place.
    fn stay_in_pool(&mut self, lease: &Lease) {
        let placed = &mut self.prepared.placed;
        if let Some(model) = placed.request.asks.model {
            let others = self.backends.admission.of_another_root(lease.backend(), model);
            let avoid = &mut placed.request.avoid;
            others.into_iter().for_each(|id| {
                if !avoid.contains(&id) {
                    avoid.push(id)
                }
            });
        }
        placed.request.spill = SmallVec::new();
        let home = placed.table.pools.iter().position(|pool| pool.id == lease.pool());
        if let Some(home) = home.filter(|_| placed.request.home != lease.pool()) {
            let table = Arc::clone(&placed.table);
            placed.move_to(table, Placement { home, spill: SmallVec::new() });
            // The owner was chosen by the rule of the pool from which the request came.
            placed.request.fair = None;
        }
    }

    /// The usage, if the client wants it. Anthropic's form always has usage, in the last event but
    /// one.
    pub(super) fn usage<T>(&self, usage: impl FnOnce() -> T) -> Option<T> {
        (self.prepared.include_usage || self.incoming.route == Route::Messages).then(usage)
    }

    /// The end of an answer of which only the end is missing. `usage`: the outer `None` means that
    /// the client does not want it, the inner `None` that it is not known.
    pub(super) fn complete(&self, at_limit: bool, usage: Option<Option<(u64, u64)>>, identity: &Identity) -> End {
        match usage {
            Some(None) => End::Error(Some(NotContinued::UsageUnknown)),
            usage => {
                let ended = Ended { at_limit, usage: usage.flatten() };
                End::Complete(ended.events(self.incoming.route, identity))
            }
        }
    }

    /// Ends the answer, and delivers the bytes that wait for the client.
    async fn end<D: Downstream, R: Recorder>(
        &mut self,
        end: End,
        outcome: Outcome,
        mut lease: Lease,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) {
        let Some(mut rest) = self.unfinished.take() else { return };
        let now = Instant::now();
        let mut context = response_context(self.incoming, &self.prepared, &self.backends, &lease, (now, now));
        context.deadline = now + self.prepared.placed.table.timeouts().idle;
        let mut request = UpstreamRequest::default();
        let is_head_sent = &mut self.is_head_sent;
        match end {
            End::Complete(events) => {
                lease.release_failed();
                rest.go_on();
                let mut pump = Pump::resume(*rest, None, context, &mut request, &mut lease, record, is_head_sent);
                pump.run::<U::Exchange, D>(&mut None, events, down).await;
            }
            End::Error(why) => {
                record.not_continued = why;
                let is_stopping = self.backends.abort.is_cancelled();
                if is_stopping {
                    rest.stopped();
                }
                let outcome = if is_stopping { Outcome::Timeout(Stage::Drain) } else { outcome };
                let mut pump = Pump::resume(*rest, None, context, &mut request, &mut lease, record, is_head_sent);
                pump.end_with_error::<U::Exchange, D>(outcome, down).await;
            }
        }
    }
}
