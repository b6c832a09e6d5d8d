//! The bytes that a meter passes on for one chunk.
//!
//! The pieces are slices of the received chunk, so forwarding copies nothing. Two pieces fit
//! without allocation: the bytes before and after a removed part of an event.

use bytes::Bytes;
use smallvec::SmallVec;

/// Pieces for the client, in order; none is empty.
pub type Forward = SmallVec<[Bytes; 2]>;
