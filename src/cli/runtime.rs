//! The end of a command's runtime.
//!
//! Every command with threads ends its runtime here, so that none ends it in a way that may crash: [`end`] says why.
//! Bounds: [`BLOCKED_MAX`]; a thread that blocks longer is left to the end of the process.

use std::time::Duration;

use tokio::runtime::Runtime;

/// How long the end of the process waits for work on threads that may block: a handler of the admin port whose client has
/// left, the count of a prompt's tokens, the resolution of a name.
const BLOCKED_MAX: Duration = Duration::from_secs(1);

/// Ends a runtime and waits for its threads.
///
/// They are joined, as far as they end in time: glibc's `pthread_detach` reads the descriptor of the thread after it has given
/// it up, so that detaching a thread which ends at that moment (`shutdown_background`) now and then crashes the process.
pub(super) fn end(runtime: Runtime) {
    runtime.shutdown_timeout(BLOCKED_MAX);
}
