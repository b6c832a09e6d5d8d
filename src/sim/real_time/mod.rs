//! A virtual server on the real clock: the task that owns it, and what that task shares with the HTTP side.
//!
//! Commands go in through an inbox, tokens come out through one outlet per request. The limit on concurrent sequences
//! bounds both.

pub(crate) mod driver;
pub(crate) mod gate;
pub(crate) mod outlet;
