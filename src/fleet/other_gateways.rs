//! Other gateways before the same engines: an engine is stopped in order only when they have stopped sending requests to it.

use std::collections::BTreeSet;

use parking_lot::Mutex;

/// What is known of them. Until the first note there are none.
#[derive(Debug, Default)]
pub struct OtherGateways(Mutex<Option<BTreeSet<String>>>);

impl OtherGateways {
    /// There are other gateways. To these backends (`pool/backend`), which this gateway has closed, they send nothing any more, and
    /// nothing of theirs runs there.
    pub fn note(&self, left: BTreeSet<String>) {
        *self.0.lock() = Some(left);
    }

    /// Whether none of them has a request on this backend, or will have.
    pub fn have_left(&self, backend: &str) -> bool {
        self.0.lock().as_ref().is_none_or(|left| left.contains(backend))
    }
}
