//! Commands from the HTTP side to the engine loop.
//!
//! The loop takes them between steps, in order of arrival. The [concurrency
//! limit](super::concurrency_limit) bounds submissions, and each sequence has at most one abort.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::output_collector::OutputCollector;
use crate::engine::{Request, SequenceId};
use crate::http::wire::Finish;
use crate::process::fault::Fault;

/// One choice of a request, on its way to the engine loop.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: Request,
    pub(crate) finish: Finish,
    pub(crate) max_tokens: u32,
    pub(crate) n: u32,
    /// The name of the request in KV events: the header `X-Session-ID`.
    pub(crate) session: Option<Arc<str>>,
}

#[derive(Debug)]
pub(crate) enum Command {
    Submit(Vec<Submission>, Arc<OutputCollector>),
    Abort(Vec<SequenceId>),
    Fault(Fault),
    Control(Control, Option<oneshot::Sender<bool>>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// Stop scheduling. With `abort`, end all sequences first.
    Pause { abort: bool },
    /// Schedule again.
    Resume,
    /// Empty the prefix cache. With `preempt`, preempt the running sequences first.
    ResetPrefixCache { preempt: bool },
    /// Load the adapter with this id. The reply comes when the adapter is loaded.
    LoadAdapter(u16),
    /// Sleep at this level. `None`: wake up.
    Sleep(Option<u8>),
}
