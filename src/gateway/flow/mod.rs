//! The path of a request: read, estimate, classify, assign, admit, forward, meter, record.
//!
//! [`Flow::run`] takes one request that has been received whole and sees it to its end. It is written
//! against two small traits ([`exchange`]) and tokio's clock, so the same code serves real traffic
//! behind pingora and runs in memory on paused time. What each stage decides:
//!
//! | stage | file | question |
//! |---|---|---|
//! | read, gate | `gate.rs` | is it a request we understand, for a model this key may use? |
//! | estimate, classify | `classify.rs` | how long is the prompt, which pools may take it? |
//! | admit | `admit.rs` | a lease on a backend with room, or shed, or the client left |
//! | forward | `forward.rs` | send; try again elsewhere while the client has seen nothing |
//! | pump | `pump.rs` | bytes through, metered, watched from both ends |
//! | record | `record.rs` | exactly one record |
//!
//! Nothing here outlives the request: dropping the future gives back the lease, closes the upstream
//! connection and writes the record.

pub mod classify;
pub mod exchange;
pub mod keys;
pub mod routing_table;
pub mod record;

mod admit;
mod response_meter;
mod forward;
mod prepare;
mod pump;
mod respond;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::HeaderMap;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::experiment::Experiments;
use crate::pool::Admission;
use sluice_core::openai::{Refusal, Route, ShedReason};

pub use exchange::{
    ClientGone, Downstream, Exchange, ExchangeError, ResponseHead, SendError, Upstream, UpstreamRequest,
};
pub use record::{Outcome, Record, RecordGuard, Recorder};
pub use respond::refuse;
pub use routing_table::{LearnedState, RoutingTable};

/// One request, received whole.
#[derive(Debug)]
pub struct IncomingRequest {
    /// What is asked.
    pub route: Route,
    /// Path and query as the client sent them.
    pub path: String,
    /// End-to-end headers for the backend; no hop-by-hop ones, no credentials of ours.
    pub headers: HeaderMap,
    /// `Content-Type`, for multipart bodies.
    pub content_type: String,
    /// The body.
    pub body: Bytes,
    /// When its last byte had been received.
    pub arrived: Instant,
    /// Given to the client and sent upstream.
    pub request_id: Arc<str>,
    /// The API key the client sent.
    pub key: Option<String>,
}

/// The request path and what it needs.
#[derive(Debug)]
pub struct Flow<U, R> {
    admission: Arc<Admission>,
    upstream: U,
    recorder: R,
    experiments: Experiments,
    plan: ArcSwap<RoutingTable>,
    /// Tells that `plan` was swapped.
    replanned: Notify,
    closing: AtomicBool,
}

impl<U: Upstream, R: Recorder> Flow<U, R> {
    /// A path that routes by `plan`.
    pub fn new(admission: Arc<Admission>, upstream: U, recorder: R, plan: RoutingTable) -> Self {
        let plan = ArcSwap::from_pointee(plan);
        let experiments = Experiments::default();
        Self {
            admission,
            upstream,
            recorder,
            experiments,
            plan,
            replanned: Notify::new(),
            closing: AtomicBool::new(false),
        }
    }

    /// The plan in force.
    pub fn routing_table(&self) -> Arc<RoutingTable> {
        self.plan.load_full()
    }

    /// Routes by another plan from now on. Requests under way keep theirs.
    pub fn set_routing_table(&self, plan: RoutingTable) {
        self.plan.store(Arc::new(plan));
        self.replanned.notify_waiters();
    }

    /// The plan in force as soon as it is another than `old`: for who has learned from admission, which is told
    /// first, that `old` is out of date.
    async fn newer_routing_table(&self, old: &Arc<RoutingTable>) -> Arc<RoutingTable> {
        loop {
            // Made before looking, so that a swap in between is not missed.
            let swapped = self.replanned.notified();
            let plan = self.routing_table();
            if !Arc::ptr_eq(&plan, old) {
                return plan;
            }
            swapped.await;
        }
    }

    /// The owner of capacity.
    pub fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    /// The engine side.
    pub fn upstream(&self) -> &U {
        &self.upstream
    }

    /// Where records go.
    pub fn recorder(&self) -> &R {
        &self.recorder
    }

    /// From now on new requests are shed; those under way go on.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    /// Whether [`Flow::close`] was called.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Sees one request to its end.
    pub async fn run<D: Downstream>(&self, mut incoming: Box<IncomingRequest>, down: &mut D) {
        let mut record =
            RecordGuard::new(&self.recorder, Some(incoming.route), Arc::clone(&incoming.request_id), incoming.arrived);
        if let Err(refusal) = self.serve(&mut incoming, down, &mut record).await {
            refuse(down, &refusal, incoming.route.error_format(), &mut record).await;
        }
    }

    /// From here on the request lives in what goes upstream, and only as long as that may be sent again.
    fn attempts<'a>(
        &'a self,
        plan: Arc<RoutingTable>,
        incoming: &'a mut IncomingRequest,
        mut admitted: prepare::PreparedRequest,
    ) -> forward::Attempts<'a, U, R> {
        incoming.body = Bytes::new();
        let call = UpstreamRequest {
            path: std::mem::take(&mut incoming.path),
            headers: std::mem::take(&mut incoming.headers),
            body: std::mem::take(&mut admitted.body),
        };
        forward::Attempts::new(self, plan, incoming, admitted, call)
    }

    /// Everything up to the answer; an error is an answer of our own that has not been sent.
    async fn serve<D: Downstream>(
        &self,
        incoming: &mut IncomingRequest,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        let plan = self.routing_table();
        if self.is_closing() {
            return Err(respond::shed(ShedReason::ShuttingDown, crate::config::limits::RETRY_AFTER_MIN, record));
        }
        let admitted = prepare::prepare(&plan, &self.experiments, incoming, record).await?;
        let mut attempts = self.attempts(plan, incoming, admitted);
        attempts.run(down, record).await
    }
}
