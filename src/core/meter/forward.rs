//! The bytes that a meter passes on for one chunk.
//!
//! Slices of the received chunk, so that forwarding copies nothing. Two pieces without allocation: a chunk out of which
//! part of an event is removed leaves the part before it and the part after it.

use bytes::Bytes;
use smallvec::SmallVec;

/// What goes to the client now: pieces in order, none of them empty.
pub type Forward = SmallVec<[Bytes; 2]>;
