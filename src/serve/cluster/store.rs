//! The store of the ledger, or of the leader's record: one object, read with a version, and written
//! only over that version.
//!
//! Every call has a deadline well below the lease, which the caller sets. A write without an answer
//! is *unknown*: it may be applied already, later or never. An implementation must not repeat such
//! a write: because of the first attempt, the second one would be refused.

use std::future::Future;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The object; `None`: there is none.
    pub(super) bytes: Option<Vec<u8>>,
    /// The version in the store's format.
    pub(super) version: String,
}

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// The object was written.
    Done,
    /// The object is not the one that was read.
    Refused,
    /// The outcome is unknown, for this reason.
    Unknown(String),
}

/// A store with compare-and-swap of one object. Reads are linearizable: they see every write that
/// was confirmed before.
pub(super) trait Store: Send + Sync + 'static {
    /// The place of the object, for messages.
    fn name(&self) -> String;

    /// Reads the object. The error is a message.
    fn read(&self) -> impl Future<Output = Result<Found, String>> + Send;

    /// Replaces the object if it still has the version of `over`.
    fn write(&self, bytes: Vec<u8>, over: &Found) -> impl Future<Output = Written> + Send;
}
