//! Copies of requests for the shadow arms of experiments.
//!
//! A copy begins when its original has a lease, and runs in a task of its own (`shadow.rs`): its response is read, measured for its
//! arm and dropped. It takes the path of every request, with these differences:
//!
//! - it is sent only where there is room beside all requests, once, and is cut as soon as a request needs that room
//!   (`pool/copies.rs`);
//! - it counts against no limit of the client's key, and nothing is learned from it about prompts and engines;
//! - its record is marked as that of a copy, which has metrics and lines of the access log of its own;
//! - what was not sent or was cut is not measured, and neither is what the gateway or the engine refused.
//!
//! A request of `/v1/responses` is not copied: its response is stored, and the copy's would be another one.
//!
//! Bounds: the budgets of the arms; [`WAITING_MAX`] copies that wait for their task. Their bodies are shared with the originals.

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::incoming::IncomingRequest;
use crate::experiment::{Assigned, CopyInFlight};
use sluice_core::openai::Route;

/// Copies that wait for their task, at most; further ones are dropped.
const WAITING_MAX: usize = 1_024;

/// A copy that has not begun.
#[derive(Debug)]
pub(super) struct PendingCopy {
    pub(super) incoming: Box<IncomingRequest>,
    pub(super) in_flight: CopyInFlight,
}

/// The copies of one request.
pub(super) type PendingCopies = SmallVec<[PendingCopy; 1]>;

/// Where copies go: to the task that serves them, if there is one.
#[derive(Debug, Default)]
pub(super) struct CopyQueue(OnceLock<mpsc::Sender<PendingCopy>>);

impl CopyQueue {
    /// The receiver of all copies from now on. `None` if there is one already.
    pub(super) fn open(&self) -> Option<mpsc::Receiver<PendingCopy>> {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        self.0.set(sender).is_ok().then_some(receiver)
    }

    /// Copies a request for the shadow arms of its experiment.
    pub(super) fn copies_of(&self, incoming: &IncomingRequest, assigned: Option<&Assigned>) -> PendingCopies {
        let is_copied = incoming.route.generates() && incoming.route != Route::Responses;
        let Some(assigned) = assigned.filter(|_| is_copied && self.0.get().is_some()) else {
            return PendingCopies::new();
        };
        let copies = assigned.copies(&incoming.upstream_id, Instant::now());
        copies.map(|(arm, in_flight)| PendingCopy { incoming: Box::new(copy(incoming, arm)), in_flight }).collect()
    }

    /// Lets copies begin.
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
        copy_for: Some(arm),
    }
}
