//! The request path: read, estimate, classify, assign, admit, forward, meter, record.
//!
//! [`Flow::run`] takes one completely received request and ends with exactly one record. It knows
//! client and engine only as two traits ([`exchange`]), and time only from tokio's clock, so the
//! same code serves traffic behind pingora and runs in memory on paused time.
//!
//! | stage | file | decides |
//! |---|---|---|
//! | read, authorize | `prepare.rs` | is the request valid, and may this key use the model? |
//! | estimate, classify | `prepare.rs`, `classify.rs` | prompt length? which pools may serve it? |
//! | | `classes.rs` | in which class do its latencies count? |
//! | assign | `assign.rs` | is it in an arm of an experiment? |
//! | | `job.rs` | how much does a job cost, if not tokens? |
//! | | `priority.rs` | how early is it served, here and by the engine? |
//! | | `owner.rs` | whose share of the pool does it use? |
//! | admit | `admit.rs` | which backend serves it (a lease), or is it shed? |
//! | forward | `forward.rs`, `attempt.rs` | send; if need be, try another backend |
//! | | `elsewhere.rs`, `refused_here.rs` | may another backend serve it after this answer? |
//! | | `suspects.rs` | may the body be delivered, after engines died with it? |
//! | meter | `pump.rs`, `response_meter.rs`, `stream_work.rs` | pass bytes on, measure both ends |
//! | | `continuation/`, `forward/go_on.rs` | may another engine continue a broken stream? |
//! | record | `record.rs` | exactly one record |
//!
//! Shadow arms of experiments get copies of requests (`copies.rs`), which no client sees and which
//! give way to requests. Requests that name a stored response instead of a model take a shorter
//! path (`stored.rs`), and so do WebSockets (`tunnel.rs`).
//!
//! Dropping the future of [`Flow::run`] returns the lease, closes the upstream connection and
//! writes the record.

pub mod exchange;
pub mod key_share;
mod key_rate;
mod key_counters;
mod in_flight;
pub mod keys;
pub mod classes;
pub mod routing_table;
pub mod specs;
pub mod classify;
pub mod trace;
pub mod incoming;
mod suspects;
pub mod record;
mod used_tokens;

mod router;
mod request_bounds;
mod feedback;
mod respond;
mod continuation;
mod response_owners;
mod assign;
pub mod owner;
mod copies;
mod priority;
mod job;
mod prepare;
mod admit;
mod faults;
mod refused_here;
mod elsewhere;
mod attempt;
mod response_meter;
mod stream_work;
mod pump;
mod forward;
mod shadow;
mod stored;
mod tunnel;

#[cfg(test)]
mod tests;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;

use crate::pool::{Admission, Lease};
use crate::shares::{GivesWay, Shares};
use continuation::ContinuationLimits;
use copies::CopyQueue;
use forward::{Attempts, Backends};
use response_owners::ResponseOwners;
use router::Router;
use sluice_core::openai::{Refusal, Route};
use stored::IdCapture;
use suspects::Suspects;

pub use exchange::{
    ClientGone, Connection, Downstream, Exchange, ExchangeError, ResponseHead, Upstream, UpstreamRequest,
};
pub use incoming::IncomingRequest;
pub use priority::PRIORITY;
pub use record::{Outcome, Record, RecordGuard, Recorder};
pub use respond::{ERROR_CODE, complete_head, refuse};
pub use routing_table::{LearnedState, RoutingDraft, RoutingTable};
pub use trace::{RequestTrace, Step, StepKind};
pub use tunnel::{TunnelRequest, path_of as tunnel_path};

/// One part in this many of the memory for slow clients is kept free for newcomers.
const RESPONSE_PARTS: u64 = 8;

/// The request path and everything that it needs.
#[derive(Debug)]
pub struct Flow<U, R> {
    admission: Arc<Admission>,
    upstream: U,
    recorder: R,
    router: Router,
    owners: ResponseOwners,
    copies: CopyQueue,
    memory: Arc<Shares>,
    suspects: Arc<Suspects>,
    continuations: Arc<ContinuationLimits>,
    leaving: AtomicBool,
    closing: AtomicBool,
    handed_over: AtomicBool,
    /// Cancelled by [`Flow::abort_all`].
    abort: CancellationToken,
}

impl<U: Upstream, R: Recorder> Flow<U, R> {
    /// A request path that routes by `table`.
    pub fn new(admission: Arc<Admission>, upstream: U, recorder: R, table: RoutingTable) -> Self {
        let memory = table.config.server.max_response_memory.0;
        Self {
            admission,
            upstream,
            recorder,
            router: Router::new(table),
            owners: ResponseOwners::default(),
            copies: CopyQueue::default(),
            memory: Shares::new(GivesWay::Newest, memory, memory / RESPONSE_PARTS),
            suspects: Arc::default(),
            continuations: Arc::default(),
            leaving: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            handed_over: AtomicBool::new(false),
            abort: CancellationToken::new(),
        }
    }

    /// The routing table in force.
    pub fn routing_table(&self) -> Arc<RoutingTable> {
        self.router.current()
    }

    /// Replaces the routing table. Requests in progress keep the table they started with, which
    /// [`Flow::drop_unused_tables`] drops later.
    pub fn set_routing_table(&self, table: RoutingTable) {
        self.router.replace(table);
    }

    /// Whether replaced tables are kept for requests in progress.
    pub fn has_replaced_tables(&self) -> bool {
        self.router.has_retired()
    }

    /// Drops the replaced tables that no request uses any more. Takes milliseconds, so it must not
    /// run on a thread that serves requests.
    pub fn drop_unused_tables(&self) {
        self.router.drop_unused();
    }

    /// Admission, which owns the capacity of the backends.
    pub fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    /// The connections to engines.
    pub fn upstream(&self) -> &U {
        &self.upstream
    }

    /// The memory in which responses wait for slow clients.
    pub fn response_memory(&self) -> &Arc<Shares> {
        &self.memory
    }

    /// Changes the size of the memory in which responses wait for slow clients. Responses that
    /// already wait keep their memory.
    pub fn set_response_memory(&self, bytes: u64) {
        self.memory.resize(bytes, bytes / RESPONSE_PARTS);
    }

    /// Bytes of requests and texts that are kept so that another engine can continue them.
    pub fn kept_for_continuation(&self) -> u64 {
        self.continuations.kept()
    }

    /// Number of stored responses whose owners were forgotten because there were too many.
    pub fn forgotten_responses(&self) -> u64 {
        self.owners.gave_way()
    }

    /// The consumer of the records.
    pub fn recorder(&self) -> &R {
        &self.recorder
    }

    /// Marks the gateway as not ready, so that load balancers send no more requests. Requests that
    /// come are still served.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// Whether [`Flow::leave`] or [`Flow::close`] was called.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire) || self.is_closing()
    }

    /// Sheds new requests from now on. Requests in progress continue. Copies are cut, and no more
    /// are sent.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.admission.close_to_copies();
    }

    /// Whether [`Flow::close`] was called.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Notes that another process accepts connections now. Connections that are open here are
    /// closed with their next response. Copies are cut, and no more are sent.
    pub fn hand_over(&self) {
        self.handed_over.store(true, Ordering::Release);
        self.admission.close_to_copies();
    }

    /// Whether [`Flow::hand_over`] was called.
    pub fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Acquire)
    }

    /// Ends every request that waits or runs. A client whose stream has begun receives an error
    /// event; a client without a response receives a 503.
    pub fn abort_all(&self) {
        // In this order: a request that admission aborts checks `abort` to learn that the gateway
        // stops.
        self.abort.cancel();
        self.admission.abort_all();
    }

    /// Serves one request to the end.
    pub async fn run<D: Downstream>(&self, mut incoming: Box<IncomingRequest>, down: &mut D) {
        let mut record =
            RecordGuard::new(&self.recorder, Some(incoming.route), Arc::clone(&incoming.request_id), incoming.arrived);
        record.upstream_id = Arc::clone(&incoming.upstream_id);
        record.trace = incoming.trace.take();
        record.client = incoming.client;
        record.origin = incoming.origin;
        let served = match incoming.route {
            _ if self.is_closing() => Err(respond::shut_down(&mut record)),
            Route::StoredResponse | Route::CancelResponse => {
                Box::pin(self.serve_stored(&mut incoming, down, &mut record)).await
            }
            Route::Responses => {
                let key = incoming.key.as_ref().map(|key| Arc::clone(key.name()));
                let mut client = IdCapture::new(down, &self.owners, key);
                let served = Box::pin(self.serve(&mut incoming, &mut client, &mut record)).await;
                client.note_tokens(used_tokens::of_conversation(&record));
                served
            }
            _ => self.serve(&mut incoming, down, &mut record).await,
        };
        if let Err(refusal) = served {
            refuse(down, &refusal, incoming.route.error_format(), &mut record).await;
        }
    }

    /// Checks a request for a WebSocket. An error is a refusal that has not been sent.
    pub async fn accept_tunnel(
        &self,
        incoming: &IncomingRequest,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<TunnelRequest, Refusal> {
        match self.is_closing() {
            true => Err(respond::shut_down(record)),
            false => TunnelRequest::accept((&self.owners, &self.admission), incoming, record).await,
        }
    }

    /// Waits for a slot for a WebSocket; `None`: the client has left. An error is a refusal that
    /// has not been sent.
    pub async fn lease_for_tunnel<D: Downstream>(
        &self,
        request: &mut TunnelRequest,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<Option<Lease>, Refusal> {
        request.lease((&self.admission, &self.router, &self.abort), down, record).await
    }

    /// Serves a request that names a stored response. An error is a refusal that has not been sent.
    async fn serve_stored<D: Downstream>(
        &self,
        incoming: &mut IncomingRequest,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        let serving = stored::serve(&self.owners, &self.admission, &self.upstream, incoming, down, record);
        let served = tokio::select! {
            biased;
            served = serving => Some(served),
            () = self.abort.cancelled() => None,
        };
        if let Some(served) = served {
            return served;
        }
        let refusal = respond::shut_down(record);
        match record.status {
            None => Err(refusal),
            Some(_) => {
                down.abort();
                Ok(())
            }
        }
    }

    /// Takes a request through all stages until the response has ended. An error is a refusal that
    /// has not been sent.
    async fn serve<D: Downstream>(
        &self,
        incoming: &mut IncomingRequest,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        let prepared = prepare::prepare((&self.owners, &self.admission), incoming, record).await?;
        Attempts::new(self.backends(), incoming, prepared, record.assigned.as_ref()).run(down, record).await
    }

    /// Serves copies for shadow arms. Requests are copied from this call on, until the future is
    /// dropped. A second call returns a future that ends at once.
    pub fn serve_copies(self: Arc<Self>) -> impl Future<Output = ()> + Send {
        let copies = self.copies.open();
        async move {
            let Some(mut copies) = copies else { return };
            while let Some(copy) = copies.recv().await {
                let flow = Arc::clone(&self);
                tokio::spawn(async move { shadow::serve(flow.backends(), &flow.recorder, &flow.owners, copy).await });
            }
        }
    }

    fn backends(&self) -> Backends<'_, U> {
        let Self { admission, router, upstream, abort, copies, memory, suspects, continuations, .. } = self;
        Backends { admission, router, upstream, abort, copies, memory, suspects, continuations }
    }
}
