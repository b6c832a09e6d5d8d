//! Ends the service of a port, because the gateway stops or another process takes over the socket.
//!
//! The client port and the admin port use this. The owner of a connection watches the signals and
//! decides how to react.

use tokio::sync::watch;

/// Ends the service of a port.
#[derive(Clone, Debug, Default)]
pub struct Ending {
    stop: watch::Sender<bool>,
    hand_over: watch::Sender<bool>,
    closed: watch::Sender<bool>,
}

impl Ending {
    /// Accepts no more connections, and closes connections without a request at once.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Stops accepting connections, because another process accepts them. Open connections go on
    /// (see `listener.rs`). Returns when no more are accepted.
    pub async fn hand_over(&self) {
        self.hand_over.send_replace(true);
        turned(&mut self.closed.subscribe()).await;
    }

    /// Notes that no more connections are accepted.
    pub fn has_closed(&self) {
        self.closed.send_replace(true);
    }

    /// The signals that a connection watches.
    pub fn watch(&self) -> Ends {
        Ends { stop: self.stop.subscribe(), hand_over: self.hand_over.subscribe() }
    }
}

/// The signals for the end of a port's service.
#[derive(Clone, Debug)]
pub struct Ends {
    pub(super) stop: watch::Receiver<bool>,
    hand_over: watch::Receiver<bool>,
}

impl Ends {
    /// Whether the gateway stops.
    pub fn is_stopped(&self) -> bool {
        *self.stop.borrow()
    }

    /// Whether no more connections are accepted.
    pub fn is_closed(&self) -> bool {
        self.is_stopped() || *self.hand_over.borrow()
    }

    /// Returns when the gateway stops.
    pub async fn stopped(&mut self) {
        turned(&mut self.stop).await;
    }

    /// Returns when no more connections are accepted.
    pub async fn closed(&mut self) {
        tokio::select! {
            () = turned(&mut self.stop) => {}
            () = turned(&mut self.hand_over) => {}
        }
    }
}

/// Returns when the signal is set. A separate function, because the guard that `wait_for` returns
/// is not `Send`.
async fn turned(signal: &mut watch::Receiver<bool>) {
    let _ = signal.wait_for(|set| *set).await;
}
