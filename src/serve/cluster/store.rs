//! Where the ledger is, and which gateway leads: one object each, which is read with its version, and written only over the version that was read.
//!
//! Every call has a deadline well below the lease, which the caller sets. A write whose answer is missing is *unknown*: it may have
//! been applied or not, or may still be. An implementation must not repeat such a write: its second attempt would be refused
//! because of its first.

use std::future::Future;

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The object; `None`: there is none.
    pub(super) bytes: Option<Vec<u8>>,
    /// Its version, as the store says it.
    pub(super) version: String,
}

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// It is the state now.
    Done,
    /// The object is another than the one that was read.
    Refused,
    /// The outcome is not known, and why.
    Unknown(String),
}

/// A store with compare-and-swap of one object. Reads are linearizable: they see every write that was confirmed before.
pub(super) trait Store: Send + Sync + 'static {
    /// Where it is, in words.
    fn name(&self) -> String;

    /// Reads the object. An error is in words.
    fn read(&self) -> impl Future<Output = Result<Found, String>> + Send;

    /// Replaces the object if it has this version.
    fn write(&self, bytes: Vec<u8>, over: &Found) -> impl Future<Output = Written> + Send;
}
