//! Capacity taken on one backend, between the state behind the lock and a lease; and how waits end.
//!
//! Dropping a grant returns nothing. Only dropping [`super::Lease`] does.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::backend::Progress;
use super::capacity::Allocation;
use super::queue::WaiterId;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::{PromptPrefix, ShedReason, TooLarge};

#[derive(Debug)]
pub(super) struct Grant {
    pub(super) backend: BackendId,
    pub(super) pool: PoolId,
    pub(super) pool_name: Arc<str>,
    pub(super) name: Arc<str>,
    pub(super) address: Arc<Address>,
    pub(super) allocation: Allocation,
    pub(super) progress: Arc<Progress>,
    pub(super) abort: CancellationToken,
    pub(super) prefill_time: Duration,
    pub(super) max_model_len: Option<u64>,
    /// Seconds of large prefills ahead of the request.
    pub(super) ahead: f64,
    pub(super) by_priority: bool,
    /// The hashed beginnings of the prompt.
    pub(super) prefix: Arc<PromptPrefix>,
}

#[derive(Debug)]
pub(super) enum Entered {
    Granted(Grant),
    Queued { id: WaiterId, deadline: Instant },
    Refused(TooLarge),
    Shed(ShedReason),
    Reclassify,
}

#[derive(Debug)]
pub(super) enum WaiterOutcome {
    Granted(Grant),
    /// A reload removed the pool.
    Reclassify,
    /// The engine that the request waited for does not come.
    Shed(ShedReason),
    /// No engine serves the model any more.
    Unserved,
}
