//! Copies of requests for the shadow arms of experiments.
//!
//! A copy begins when the original has a lease, and runs in a separate task (`shadow.rs`): the
//! response is read, measured for the arm and dropped. A copy takes the path of every request, with
//! these differences:
//!
//! - It is sent once, only to a backend with room that no request needs, and is cut as soon as a
//!   request needs that room (`pool/copies.rs`).
//! - It counts against no limit of the client's key, and the gateway learns nothing from it about
//!   prompts and engines.
//! - The record is marked as a copy, which has separate metrics and access log lines.
//! - A copy that was not sent, was cut, or was refused by gateway or engine is not measured.
//!
//! Requests of `/v1/responses` are not copied, because the engine would store a second response.
//! Bounds: the budgets of the arms; [`WAITING_MAX`] copies that wait. Bodies are shared with the
//! originals.

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::incoming::IncomingRequest;
use crate::experiment::{Assigned, CopyInFlight};
use sluice_core::openai::Route;

/// The most copies that wait for their task; further ones are dropped.
const WAITING_MAX: usize = 1_024;

#[derive(Debug)]
pub(super) struct PendingCopy {
    pub(super) incoming: Box<IncomingRequest>,
    pub(super) in_flight: CopyInFlight,
}

pub(super) type PendingCopies = SmallVec<[PendingCopy; 1]>;

/// The queue of copies for the task that serves them, if there is one.
#[derive(Debug, Default)]
pub(super) struct CopyQueue(OnceLock<mpsc::Sender<PendingCopy>>);

impl CopyQueue {
    /// Returns the receiver of all later copies. `None` if there is one already.
    pub(super) fn open(&self) -> Option<mpsc::Receiver<PendingCopy>> {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        self.0.set(sender).is_ok().then_some(receiver)
    }

    /// Copies a request for the shadow arms of the experiment that the request is in.
    pub(super) fn copies_of(&self, incoming: &IncomingRequest, assigned: Option<&Assigned>) -> PendingCopies {
        let is_copied = incoming.route.generates() && incoming.route != Route::Responses && !incoming.route.is_job();
        let Some(assigned) = assigned.filter(|_| is_copied && self.0.get().is_some()) else {
            return PendingCopies::new();
        };
        let copies = assigned.copies(&incoming.upstream_id, Instant::now());
        copies.map(|(arm, in_flight)| PendingCopy { incoming: Box::new(copy(incoming, arm)), in_flight }).collect()
    }

    /// Hands the copies to the serving task. Copies for which the queue has no room are dropped.
    pub(super) fn send(&self, copies: &mut PendingCopies) {
        if let Some(sender) = self.0.get() {
            copies.drain(..).for_each(|copy| drop(sender.try_send(copy)));
        }
    }
}

fn copy(incoming: &IncomingRequest, arm: Assigned) -> IncomingRequest {
    let id: Arc<str> = format!("{}-{}", incoming.upstream_id, arm.arm().name).into();
    IncomingRequest {
        route: incoming.route,
        method: incoming.method.clone(),
        path: incoming.path.clone(),
        headers: incoming.headers.clone(),
        priority: incoming.priority,
        content_type: incoming.content_type.clone(),
        body: incoming.body.clone(),
        arrived: Instant::now(),
        request_id: Arc::clone(&incoming.request_id),
        upstream_id: id,
        trace: None,
        routing: Arc::clone(&incoming.routing),
        client: incoming.client,
        origin: incoming.origin,
        key: incoming.key.clone(),
        no_continue: true,
        copy_for: Some(arm),
    }
}
