//! Capacity taken on one backend, on its way from the state behind the lock to a lease, and the outcome of waiting.
//!
//! Internal to admission: a grant that is dropped does not return anything. Only [`super::Lease`] does.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::backend::Progress;
use super::capacity::Allocation;
use super::queue::WaiterId;
use super::spec::Address;
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::{PromptPrefix, ShedReason, TooLarge};

/// Capacity that was taken on a backend for one request.
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
    /// The context limit of the engine, if it has said it.
    pub(super) max_model_len: Option<u64>,
    /// Seconds of prefill of large prompts that were before it.
    pub(super) ahead: f64,
    /// The engine schedules by priority.
    pub(super) by_priority: bool,
    /// The beginnings of its prompt.
    pub(super) prefix: Arc<PromptPrefix>,
}

/// What became of a request that entered.
#[derive(Debug)]
pub(super) enum Entered {
    Granted(Grant),
    Queued { id: WaiterId, deadline: Instant },
    Refused(TooLarge),
    Shed(ShedReason),
    Reclassify,
}

/// How a waiter's wait ended.
#[derive(Debug)]
pub(super) enum WaiterOutcome {
    Granted(Grant),
    /// A reload removed its pool.
    Reclassify,
    /// The engine that it waited for does not come.
    Shed(ShedReason),
    /// No engine serves its model any more.
    Unserved,
}
