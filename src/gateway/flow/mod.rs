//! The request path: read, estimate, classify, assign, admit, forward, meter, record.
//!
//! [`Flow::run`] takes one request that was received whole and ends with exactly one record. It is written against
//! two small traits ([`exchange`]) and tokio's clock, so that the same code serves real traffic behind pingora and runs
//! in memory on paused time.
//!
//! | stage | file | decides |
//! |---|---|---|
//! | read, authorize | `prepare.rs` | is the request valid, and may this key use the model? |
//! | estimate, classify, assign | `prepare.rs`, `classify.rs` | how long is the prompt, which pools may serve it? |
//! | admit | `admit.rs` | a lease on a backend with room, or shed |
//! | forward | `forward.rs`, `attempt.rs` | send; try another backend while the client has received nothing |
//! | meter | `pump.rs`, `response_meter.rs` | pass bytes on, measure them, watch both ends |
//! | record | `record.rs` | exactly one record |
//!
//! Nothing here outlives the request: dropping the future returns the lease, closes the upstream connection and writes
//! the record.

pub mod exchange;
pub mod keys;
pub mod routing_table;
pub mod classify;
pub mod incoming;
pub mod record;

mod router;
mod feedback;
mod respond;
mod prepare;
mod admit;
mod attempt;
mod response_meter;
mod pump;
mod forward;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::config::limits::RETRY_AFTER_MIN;
use crate::experiment::Experiments;
use crate::pool::Admission;
use forward::{Attempts, Backends};
use router::Router;
use sluice_core::openai::{Refusal, ShedReason};

pub use exchange::{
    ClientGone, Connection, Downstream, Exchange, ExchangeError, ResponseHead, SendError, Upstream, UpstreamRequest,
};
pub use incoming::IncomingRequest;
pub use record::{Outcome, Record, RecordGuard, Recorder};
pub use respond::refuse;
pub use routing_table::{LearnedState, RoutingTable};

/// The request path and what it needs.
#[derive(Debug)]
pub struct Flow<U, R> {
    admission: Arc<Admission>,
    upstream: U,
    recorder: R,
    experiments: Experiments,
    router: Router,
    closing: AtomicBool,
}

impl<U: Upstream, R: Recorder> Flow<U, R> {
    /// A request path that routes by `table`.
    pub fn new(admission: Arc<Admission>, upstream: U, recorder: R, table: RoutingTable) -> Self {
        Self {
            admission,
            upstream,
            recorder,
            experiments: Experiments::default(),
            router: Router::new(table),
            closing: AtomicBool::new(false),
        }
    }

    /// The routing table in force.
    pub fn routing_table(&self) -> Arc<RoutingTable> {
        self.router.current()
    }

    /// Replaces the routing table. Requests in progress keep the one they started with.
    pub fn set_routing_table(&self, table: RoutingTable) {
        self.router.replace(table);
    }

    /// The owner of capacity.
    pub fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    /// The connections to engines.
    pub fn upstream(&self) -> &U {
        &self.upstream
    }

    /// Where records go.
    pub fn recorder(&self) -> &R {
        &self.recorder
    }

    /// Sheds new requests from now on; requests in progress continue.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    /// Whether [`Flow::close`] was called.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Serves one request to its end.
    pub async fn run<D: Downstream>(&self, mut incoming: Box<IncomingRequest>, down: &mut D) {
        let mut record =
            RecordGuard::new(&self.recorder, Some(incoming.route), Arc::clone(&incoming.request_id), incoming.arrived);
        if let Err(refusal) = self.serve(&mut incoming, down, &mut record).await {
            refuse(down, &refusal, incoming.route.error_format(), &mut record).await;
        }
    }

    /// Every stage up to the response; an error is a refusal that has not been sent.
    async fn serve<D: Downstream>(
        &self,
        incoming: &mut IncomingRequest,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        if self.is_closing() {
            return Err(respond::shed(ShedReason::ShuttingDown, RETRY_AFTER_MIN, record));
        }
        let prepared = prepare::prepare(&self.experiments, incoming, record).await?;
        let backends = Backends { admission: &self.admission, router: &self.router, upstream: &self.upstream };
        Attempts::new(backends, incoming, prepared).run(down, record).await
    }
}
