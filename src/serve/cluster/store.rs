//! The store of the ledger, or of the leader's record: one object, read with a version, and written
//! only over that version.
//!
//! The caller sets each call's deadline, well below the lease. A write without an answer is
//! *unknown*: it may be applied already, later or never. An implementation must not repeat such a
//! write, because the first attempt would make the second one fail.

use std::future::Future;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The object; `None`: there is none.
    pub(super) bytes: Option<Vec<u8>>,
    /// The version, in the store's format.
    pub(super) version: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Written {
    Done,
    /// The object was changed after it was read.
    Refused,
    Unknown(String),
}

/// A store with compare-and-swap of one object. Reads are linearizable.
pub(super) trait Store: Send + Sync + 'static {
    /// The place of the object, for messages.
    fn name(&self) -> String;

    fn read(&self) -> impl Future<Output = Result<Found, String>> + Send;

    /// Writes the object only over the version of `over`.
    fn write(&self, bytes: Vec<u8>, over: &Found) -> impl Future<Output = Written> + Send;
}
