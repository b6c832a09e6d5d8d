//! An order that is in force but could not be saved.
//!
//! It is no success, because the next start of the gateway does not know of it, and no refusal
//! either: the answer says both, with status 500.

use std::path::PathBuf;

/// The order is carried out, and will be lost at the next restart.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the order is carried out, but cannot be saved in {} (fleet.state): {reason}; the next start of the gateway does not \
     know of it; make room or mount the folder, then repeat the order", folder.display()
)]
pub struct UnsavedOrder {
    /// The folder.
    pub folder: PathBuf,
    /// The cause.
    pub reason: String,
}
