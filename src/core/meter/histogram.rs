//! The inter-token latencies of one stream, as a row of counters.
//!
//! A stream may have thousands of gaps. Counting each gap in a shared histogram would cost a lock
//! or an atomic operation per token. So each stream counts in a row of its own, without allocation;
//! the row is added to the shared metric once, when the stream ends.
//!
//! Bounds are in seconds, upper and inclusive as in Prometheus, from 0.5 ms to 10 s. They are
//! densest from 3 to 20 ms: an 8B model on a fast GPU makes a token in 4 to 15 ms, and a step that
//! includes a prefill takes 15 to 60 ms. The bins of `hdrhistogram` would take kilobytes of heap
//! per stream and miss these bounds.

use std::time::Duration;

/// Upper bounds of the buckets, seconds. One more counter, without an upper bound, follows.
pub const ITL_BUCKETS_SECONDS: [f64; 30] = [
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.010, 0.011, 0.012, 0.014, 0.016, 0.018,
    0.020, 0.025, 0.030, 0.040, 0.050, 0.075, 0.100, 0.150, 0.250, 0.500, 1.0, 2.5, 5.0, 10.0,
];

/// Counts of gaps by length.
#[derive(Clone, Debug, PartialEq)]
pub struct ItlHistogram {
    counts: [u32; ITL_BUCKETS_SECONDS.len() + 1],
    sum: f64,
    max: f64,
}

impl Default for ItlHistogram {
    fn default() -> Self {
        Self { counts: [0; ITL_BUCKETS_SECONDS.len() + 1], sum: 0.0, max: 0.0 }
    }
}

impl ItlHistogram {
    /// Counts `tokens` gaps of `gap` each.
    pub fn record(&mut self, gap: Duration, tokens: u32) {
        if gap.is_zero() {
            // The events arrived in one chunk, as most events do under load.
            self.counts[0] = self.counts[0].saturating_add(tokens);
            return;
        }
        let seconds = gap.as_secs_f64();
        let bucket = ITL_BUCKETS_SECONDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket] = self.counts[bucket].saturating_add(tokens);
        self.sum += seconds * f64::from(tokens);
        self.max = self.max.max(seconds);
    }

    /// Gaps in each bucket (not cumulated). The last counter is for gaps over the largest bound.
    pub fn counts(&self) -> &[u32; ITL_BUCKETS_SECONDS.len() + 1] {
        &self.counts
    }

    /// The number of all gaps.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// The sum of all gaps, seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum
    }

    /// The longest gap, seconds.
    pub fn max_seconds(&self) -> f64 {
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_ascend_and_are_inclusive() {
        assert!(ITL_BUCKETS_SECONDS.windows(2).all(|pair| pair[0] < pair[1]));
        let mut histogram = ItlHistogram::default();
        histogram.record(Duration::from_millis(10), 1);
        let bucket = ITL_BUCKETS_SECONDS.iter().position(|bound| *bound == 0.010).unwrap();
        assert_eq!(histogram.counts()[bucket], 1);
        histogram.record(Duration::from_secs(11), 2);
        assert_eq!(histogram.counts().last(), Some(&2));
        assert_eq!(histogram.count(), 3);
        assert!((histogram.sum_seconds() - 22.01).abs() < 1e-9);
        assert_eq!(histogram.max_seconds(), 11.0);
    }
}
