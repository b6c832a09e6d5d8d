//! Bounds of continuation: the memory for requests and texts that are kept, and the tokens that are
//! prefilled again.
//!
//! Memory is counted and not allocated here. A stream without room is served as usual and not
//! continued. Both counters are for all clients together, because continuations are rare.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The most bytes of requests and texts that are kept for all streams together.
const MEMORY_MAX: u64 = 256 << 20;
/// The most bytes of a request that is kept. The prompts of longer requests take seconds to prefill
/// again.
const REQUEST_MAX: usize = 4 << 20;
/// The most bytes of text that are kept of one stream.
pub(in crate::flow) const TEXT_MAX: usize = 256 << 10;
/// Step by which the memory of a text grows, bytes.
const STEP: u64 = 8 << 10;
/// Tokens that may be prefilled again within [`WINDOW`], over all requests: enough for all requests
/// of two engines with 250 requests of 8,000 tokens each.
const TOKENS_MAX: f64 = 4_000_000.0;
const WINDOW: Duration = Duration::from_secs(60);

/// The counters of one request path.
#[derive(Debug, Default)]
pub(in crate::flow) struct ContinuationLimits {
    kept: AtomicU64,
    /// Tokens that count now, and the time of that count.
    prefilled: Mutex<(f64, Option<Instant>)>,
}

/// Memory that one stream has; returned by drop.
#[derive(Debug)]
pub(in crate::flow) struct KeptMemory {
    limits: Arc<ContinuationLimits>,
    bytes: u64,
    /// Bytes of text for which there is memory.
    text: u64,
}

impl ContinuationLimits {
    /// Memory for a request of `bytes`, and for the beginning of a text. `None`: there is no room.
    pub(in crate::flow) fn keep(self: &Arc<Self>, bytes: usize) -> Option<KeptMemory> {
        if bytes > REQUEST_MAX {
            return None;
        }
        let bytes = bytes as u64 + STEP;
        self.take(bytes).then(|| KeptMemory { limits: Arc::clone(self), bytes, text: STEP })
    }

    pub(in crate::flow) fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let is_over = self.kept.fetch_add(bytes, Ordering::Relaxed) + bytes > MEMORY_MAX;
        if is_over {
            self.kept.fetch_sub(bytes, Ordering::Relaxed);
        }
        !is_over
    }

    /// Whether this many tokens may be prefilled again now. If so, they count.
    pub(in crate::flow) fn may_prefill(&self, tokens: u64, now: Instant) -> bool {
        let mut prefilled = self.prefilled.lock();
        let (counted, since) = *prefilled;
        let passed = since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let left = (counted - TOKENS_MAX * passed.as_secs_f64() / WINDOW.as_secs_f64()).max(0.0);
        let is_allowed = left + tokens as f64 <= TOKENS_MAX;
        *prefilled = (if is_allowed { left + tokens as f64 } else { left }, Some(now));
        is_allowed
    }
}

impl KeptMemory {
    pub(in crate::flow) fn covered(&self) -> usize {
        self.text as usize
    }

    /// Takes memory for a text of `bytes`. False: there is no room.
    pub(in crate::flow) fn cover(&mut self, bytes: usize) -> bool {
        while self.text < bytes as u64 {
            if !self.limits.take(STEP) {
                return false;
            }
            (self.text, self.bytes) = (self.text + STEP, self.bytes + STEP);
        }
        true
    }
}

impl Drop for KeptMemory {
    fn drop(&mut self) {
        self.limits.kept.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_returned() {
        let limits = Arc::new(ContinuationLimits::default());
        let mut one = limits.keep(1_000).unwrap();
        assert!(one.cover(20_000));
        assert_eq!(limits.kept(), 1_000 + 3 * STEP);
        assert!(limits.keep(REQUEST_MAX + 1).is_none());
        let many: Vec<KeptMemory> = std::iter::from_fn(|| limits.keep(REQUEST_MAX)).collect();
        assert_eq!(many.len() as u64, MEMORY_MAX / (REQUEST_MAX as u64 + STEP));
        assert!(limits.kept() <= MEMORY_MAX && !one.cover(4 << 20), "a text gets no memory that is not there");
        drop((one, many));
        assert_eq!(limits.kept(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_bounded_within_a_minute() {
        let (limits, start) = (ContinuationLimits::default(), Instant::now());
        assert!(limits.may_prefill(4_000_000, start) && !limits.may_prefill(1, start));
        assert!(!limits.may_prefill(2_100_000, start + WINDOW / 2), "a refused one does not count");
        assert!(limits.may_prefill(2_000_000, start + WINDOW / 2));
        assert!(limits.may_prefill(2_000_000, start + WINDOW));
    }
}
