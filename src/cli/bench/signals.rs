//! The signals that end a run early: Ctrl-C and SIGTERM.
//!
//! After a signal the run prints and saves the result so far. Meanwhile a second signal is ignored.

use tokio::signal::unix::{Signal, SignalKind, signal};

pub(in crate::cli) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    pub(in crate::cli) fn listen() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    pub(in crate::cli) async fn received(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
