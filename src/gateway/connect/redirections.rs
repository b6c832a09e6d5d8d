//! Engines that listen on another port than the configured one.
//!
//! A new engine starts next to an old one that is kept asleep, so it needs another port. The
//! configured endpoint remains the identity of the backend; only connections go elsewhere. Without
//! redirections, a look costs one load. Bound: the engines that the gateway starts.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use sluice_config::Address;

/// Ports by the authority of the configured address.
#[derive(Debug, Default)]
pub(super) struct Redirections {
    any: AtomicBool,
    ports: RwLock<HashMap<Arc<str>, u16>>,
}

impl Redirections {
    /// The port to connect to.
    pub(super) fn port(&self, to: &Address) -> u16 {
        let configured = to.endpoint.port;
        if !self.any.load(Ordering::Acquire) {
            return configured;
        }
        self.ports.read().get(&to.authority).copied().unwrap_or(configured)
    }

    /// Sends connections to `port`; the configured port ends the redirection.
    pub(super) fn set(&self, to: &Address, port: u16) {
        let mut ports = self.ports.write();
        match port == to.endpoint.port {
            true => ports.remove(&to.authority),
            false => ports.insert(Arc::clone(&to.authority), port),
        };
        self.any.store(!ports.is_empty(), Ordering::Release);
    }
}
