//! Buffers of long bodies that are used again.
//!
//! The allocator returns a freed buffer to the system within milliseconds. The next body of 400 KB
//! then pays a hundred page faults, which cost more than reading the prompt.
//!
//! Bounds: [`SIZES`], [`KEPT_MAX`]. A body takes a spare buffer only in place of a new one, and
//! only if it is at most a quarter larger, so a declared size that is never sent takes hardly more
//! memory.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use bytes::BytesMut;
use parking_lot::Mutex;

/// Sizes of kept buffers, in bytes. Shorter buffers are not kept, because the allocator keeps their
/// memory. Longer ones are rare.
const SIZES: RangeInclusive<usize> = 64 << 10..=1 << 20;
/// Bytes of all kept buffers, in addition to buffers in use.
const KEPT_MAX: usize = 8 << 20;

#[derive(Debug, Default)]
pub(super) struct SpareBuffers(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    buffers: VecDeque<BytesMut>,
    bytes: usize,
}

impl SpareBuffers {
    /// An empty buffer for a body of `size` bytes, if one is kept.
    pub(super) fn take(&self, size: usize) -> Option<BytesMut> {
        if !SIZES.contains(&size) {
            return None;
        }
        let mut kept = self.0.lock();
        let fits = |buffer: &BytesMut| (size..=size + size / 4).contains(&buffer.capacity());
        let at = kept.buffers.iter().rposition(fits)?;
        let buffer = kept.buffers.swap_remove_back(at)?;
        kept.bytes -= buffer.capacity();
        Some(buffer)
    }

    /// Keeps the buffer of a body that has ended, and frees the oldest ones if there are too many.
    pub(super) fn keep(&self, mut buffer: BytesMut) {
        buffer.clear();
        let capacity = buffer.capacity();
        if !SIZES.contains(&capacity) {
            return;
        }
        let mut kept = self.0.lock();
        kept.bytes += capacity;
        kept.buffers.push_back(buffer);
        while kept.bytes > KEPT_MAX {
            let oldest = kept.buffers.pop_front().map_or(0, |oldest| oldest.capacity());
            kept.bytes -= oldest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(size: usize) -> BytesMut {
        let mut buffer = BytesMut::with_capacity(size);
        buffer.resize(size, 1);
        buffer
    }

    #[test]
    fn a_buffer_is_given_to_bodies_that_nearly_fill_it() {
        let spare = SpareBuffers::default();
        spare.keep(filled(400_000));
        assert!(spare.take(400_001).is_none() && spare.take(319_999).is_none());
        let buffer = spare.take(320_000).unwrap();
        assert!(buffer.is_empty() && buffer.capacity() == 400_000);
        assert!(spare.take(320_000).is_none(), "it is in use");
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_newest_stays() {
        let spare = SpareBuffers::default();
        for size in [1 << 10, 2 << 20] {
            spare.keep(filled(size));
        }
        assert_eq!(spare.0.lock().bytes, 0, "too short and too long");
        (0..100).for_each(|n| spare.keep(filled(300_000 + n)));
        let kept = spare.0.lock();
        assert!(kept.bytes <= KEPT_MAX && kept.bytes > KEPT_MAX - 400_000, "{}", kept.bytes);
        assert_eq!(kept.bytes, kept.buffers.iter().map(BytesMut::capacity).sum::<usize>());
        assert_eq!(kept.buffers.back().map(BytesMut::capacity), Some(300_099));
    }
}
