//! The end of a command's runtime.
//!
//! Every command with threads ends the runtime by [`end`], because other ways may crash. Bound:
//! [`BLOCKED_MAX`].

use std::time::Duration;

use tokio::runtime::Runtime;

/// Longest wait for blocking work: a handler of the admin port whose client has left, the count of
/// a prompt's tokens, the resolution of a name.
const BLOCKED_MAX: Duration = Duration::from_secs(1);

/// Ends a runtime and joins the threads that end in time.
///
/// Threads are not detached (`shutdown_background`): glibc's `pthread_detach` reads the thread's
/// descriptor after giving it up, so if the thread ends at that moment, the process may crash.
pub(super) fn end(runtime: Runtime) {
    runtime.shutdown_timeout(BLOCKED_MAX);
}
