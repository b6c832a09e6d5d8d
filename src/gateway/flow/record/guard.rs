//! The record of a request that is in progress.
//!
//! The guard hands the record over when it is dropped, so that a request whose task is cancelled is
//! recorded too. It also holds the count against the limits of the client's key, and settles it
//! before the record is written.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use smallvec::SmallVec;

use super::super::classes::{ClassIndex, Classes, Kind};
use super::super::keys::InFlight;
use super::super::routing_table::PoolRoute;
use super::super::suspects::SuspectTurn;
use super::super::trace::StepKind;
use super::super::used_tokens;
use super::{Outcome, Record, Recorder, RetryReason};
use crate::origin::Origin;
use sluice_core::meter::slo::Objectives;
use sluice_core::openai::Route;

/// The record of a request in progress; recorded when dropped.
pub struct RecordGuard<'a, R: Recorder> {
    recorder: &'a R,
    record: Record,
    arrived: tokio::time::Instant,
    /// The count against the limits of the client's key.
    in_flight: Option<InFlight>,
    /// The trial of a suspect: the request's body may kill engines.
    pub(in crate::flow) trial: Option<SuspectTurn>,
    /// The properties that decide the class.
    kind: Kind,
    /// The position of the class.
    class: ClassIndex,
    /// Whether the connection of the last attempt closed before the response was complete.
    pub(in crate::flow) is_lost: bool,
}

impl<'a, R: Recorder> RecordGuard<'a, R> {
    /// Creates the record of a request received at `arrived`.
    pub fn new(recorder: &'a R, route: Option<Route>, request_id: Arc<str>, arrived: tokio::time::Instant) -> Self {
        let record = Record {
            upstream_id: Arc::clone(&request_id),
            request_id,
            trace: None,
            route,
            path: None,
            key: None,
            model: None,
            refused_model: None,
            home: None,
            class: None,
            pool: None,
            backend: None,
            arm: None,
            assigned: None,
            copy: None,
            stream: false,
            estimate: None,
            status: None,
            outcome: Outcome::ClientGone,
            refused: None,
            client: None,
            origin: Origin::default(),
            retries: SmallVec::new(),
            retried_on: SmallVec::new(),
            continued: 0,
            prefilled_again: 0,
            not_continued: None,
            estimate_time: Duration::ZERO,
            queue_wait: Duration::ZERO,
            connect_time: Duration::ZERO,
            client_wait: Duration::ZERO,
            held_up: false,
            total: Duration::ZERO,
            stats: None,
            backend_ttft: None,
            expected_cached: 0,
            prefix: None,
            sequences: 1,
            has_objectives: false,
            slo_met: None,
        };
        Self {
            recorder,
            record,
            arrived,
            in_flight: None,
            trial: None,
            kind: Kind::default(),
            class: 0,
            is_lost: false,
        }
    }

    /// Notes that another attempt follows the one on this pool and backend.
    pub(in crate::flow) fn retried(&mut self, reason: RetryReason, on: [Arc<str>; 2]) {
        if reason.is_failure() && self.record.copy.is_none() {
            self.recorder.attempt_failed(&on);
        }
        self.record.retries.push(reason);
        self.record.retried_on.push(on);
    }

    /// Notes the class of a placed request.
    pub(in crate::flow) fn set_class(&mut self, classes: &Classes, kind: Kind) {
        self.kind = kind;
        self.class = classes.index(kind);
        self.record.class = Some(Arc::clone(classes.name(self.class)));
    }

    pub(in crate::flow) fn class_index(&self) -> ClassIndex {
        self.class
    }

    /// Corrects the class by the length of the prompt as the engine counted it.
    pub(in crate::flow) fn correct_class(&mut self, classes: &Classes, prompt_tokens: u64) {
        let kind = Kind { tokens: prompt_tokens, ..self.kind };
        if self.record.class.is_some() && kind != self.kind && classes.index(kind) != self.class {
            self.set_class(classes, kind);
        }
    }

    /// The objectives of the request's class, among the objectives of a pool.
    pub(in crate::flow) fn objectives(&self, of_pool: &[Objectives]) -> Objectives {
        of_pool.get(self.class).or(of_pool.last()).copied().unwrap_or_default()
    }

    /// Notes the home pool, whose objectives apply to the request.
    pub(in crate::flow) fn set_home(&mut self, home: &PoolRoute) {
        self.record.home = Some(Arc::clone(&home.name));
        self.record.has_objectives = !self.objectives(&home.objectives).is_empty();
    }

    pub(in crate::flow) fn start_in_flight(&mut self, in_flight: Option<InFlight>) {
        self.in_flight = in_flight;
    }

    /// Notes in the trace that the request waits for a lease from now on.
    pub(in crate::flow) fn begin_wait(&mut self) {
        if let Some(trace) = &mut self.record.trace {
            trace.step(self.arrived.elapsed(), StepKind::Queue);
        }
    }

    /// Notes in the trace that the request is delivered to its backend from now on. If the trace is
    /// sampled, the engine gets the span of this attempt.
    pub(in crate::flow) fn begin_attempt(&mut self, number: u32, headers: &mut HeaderMap) {
        let Record { trace: Some(trace), pool: Some(pool), backend: Some(backend), .. } = &mut self.record else {
            return;
        };
        let (pool, backend) = (Arc::clone(pool), Arc::clone(backend));
        trace.step(self.arrived.elapsed(), StepKind::Attempt { number, pool, backend, sent: None });
        trace.announce(number, headers);
    }

    pub(in crate::flow) fn sent(&mut self) {
        if let Some(trace) = &mut self.record.trace {
            trace.sent(self.arrived.elapsed());
        }
    }

    pub(in crate::flow) fn first_token_seen(&self) {
        if let Some(trial) = &self.trial {
            trial.survived();
        }
    }

    /// The count against the limits of the client's key.
    pub(in crate::flow) fn in_flight(&mut self) -> Option<&mut InFlight> {
        self.in_flight.as_mut()
    }

    /// Notes the output tokens of a stream so far. Tokens beyond the charge are charged while it
    /// runs.
    pub(in crate::flow) fn note_tokens(&mut self, output: u64) {
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.observe(output);
        }
    }

    /// Ends the request's count against the client's key before the last bytes of the response are
    /// sent, because a client may send its next request as soon as it has them. If the record has
    /// the measurements, also settles the limits on tokens.
    pub(in crate::flow) fn end_in_flight(&mut self) {
        if self.record.stats.is_some() {
            self.settle_in_flight();
        } else if let Some(in_flight) = &mut self.in_flight {
            in_flight.release();
        }
    }

    /// Ends the request's count against the client's key, and settles the limits on tokens with the
    /// usage in the record.
    pub(in crate::flow) fn settle_in_flight(&mut self) {
        if let Some(mut in_flight) = self.in_flight.take() {
            in_flight.release();
            in_flight.settle(used_tokens::used(&self.record), tokio::time::Instant::now());
        }
    }
}

impl<R: Recorder> std::ops::Deref for RecordGuard<'_, R> {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

impl<R: Recorder> std::ops::DerefMut for RecordGuard<'_, R> {
    fn deref_mut(&mut self) -> &mut Record {
        &mut self.record
    }
}

impl<R: Recorder> Drop for RecordGuard<'_, R> {
    fn drop(&mut self) {
        self.record.total = self.arrived.elapsed();
        self.settle_in_flight();
        self.record.judge();
        self.recorder.record(&self.record);
        if let Some(assigned) = &self.record.assigned {
            let id = self.record.copy.is_none().then_some(&*self.record.request_id);
            assigned.observe(&self.record.observation(assigned), id);
        }
    }
}
