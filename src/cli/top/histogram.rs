//! Histograms of the gateway's metrics page: of all pools together, and of the time between two
//! pages.
//!
//! Values are seconds. A percentile is interpolated within a bucket. Bounds: [`BUCKETS_MAX`]
//! buckets; lines beyond them and unreadable lines are left out.

use sluice_gateway::telemetry::families;

/// Most buckets that are read. The largest family has 30 buckets and the unbounded one.
const BUCKETS_MAX: usize = 64;

pub(super) const MEASURES: [(&str, &str); 4] = [
    ("TTFT", families::TIME_TO_FIRST_TOKEN.name),
    ("ITL", families::INTER_TOKEN_LATENCY.name),
    ("TPOT", families::TIME_PER_OUTPUT_TOKEN.name),
    ("E2EL", families::REQUEST_DURATION.name),
];

/// An upper bound, and the number of values at or below it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bucket {
    bound: f64,
    at_or_below: f64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Histogram {
    buckets: Vec<Bucket>,
}

impl Histogram {
    pub(super) fn parse(page: &str, family: &str) -> Self {
        let mut buckets: Vec<Bucket> = Vec::new();
        for line in page.lines() {
            let labels = line.strip_prefix(family).and_then(|rest| rest.strip_prefix("_bucket{"));
            let Some((bound, count)) = labels.and_then(bucket) else { continue };
            match buckets.binary_search_by(|known| known.bound.total_cmp(&bound)) {
                Ok(at) => buckets[at].at_or_below += count,
                Err(at) if buckets.len() < BUCKETS_MAX => buckets.insert(at, Bucket { bound, at_or_below: count }),
                Err(_) => {}
            }
        }
        Self { buckets }
    }

    pub(super) fn count(&self) -> f64 {
        self.buckets.last().map_or(0.0, |last| last.at_or_below)
    }

    /// The values that were added since `earlier`. After a restart of the gateway, the whole page
    /// counts.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        let before = |bucket: &Bucket| {
            let same = earlier.buckets.iter().find(|other| other.bound.total_cmp(&bucket.bound).is_eq());
            same.map_or(0.0, |same| same.at_or_below)
        };
        if self.buckets.iter().any(|bucket| bucket.at_or_below < before(bucket)) {
            return self.clone();
        }
        let rest = |bucket: &Bucket| Bucket { at_or_below: bucket.at_or_below - before(bucket), ..*bucket };
        Self { buckets: self.buckets.iter().map(rest).collect() }
    }

    /// The value that `share` of the values do not exceed; at most the largest finite bound.
    pub(super) fn percentile(&self, share: f64) -> Option<f64> {
        let wanted = self.count() * share;
        if self.count() <= 0.0 {
            return None;
        }
        let (mut from, mut below) = (0.0, 0.0);
        for bucket in self.buckets.iter().filter(|bucket| bucket.bound.is_finite()) {
            if bucket.at_or_below >= wanted && bucket.at_or_below > below {
                let part = (wanted - below) / (bucket.at_or_below - below);
                return Some(from + part * (bucket.bound - from));
            }
            (from, below) = (bucket.bound, bucket.at_or_below);
        }
        Some(from)
    }

    /// Upper bounds and numbers of values, from the first bucket with values to the last, as at
    /// most `most` bars.
    pub(super) fn bars(&self, most: usize) -> Vec<(f64, u64)> {
        let mut below = 0.0;
        let counted = self.buckets.iter().map(|bucket| {
            let count = bucket.at_or_below - below;
            below = bucket.at_or_below;
            (bucket.bound, count.max(0.0) as u64)
        });
        let counted: Vec<(f64, u64)> = counted.collect();
        let Some(first) = counted.iter().position(|(_, count)| *count > 0) else { return Vec::new() };
        let last = counted.iter().rposition(|(_, count)| *count > 0).unwrap_or(first);
        let shown = &counted[first..=last];
        let each = shown.len().div_ceil(most.max(1));
        let join = |bars: &[(f64, u64)]| (bars[bars.len() - 1].0, bars.iter().map(|(_, count)| count).sum());
        shown.chunks(each).map(join).collect()
    }
}

fn bucket(labels: &str) -> Option<(f64, f64)> {
    let (labels, value) = labels.rsplit_once("} ")?;
    let (_, bound) = labels.rsplit_once("le=\"")?;
    let bound: f64 = bound.split('"').next()?.parse().ok()?;
    // An exemplar or a time may follow a sample.
    let count: f64 = value.split(' ').next()?.parse().ok()?;
    (!bound.is_nan() && count.is_finite() && count >= 0.0).then_some((bound, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# TYPE t histogram\n\
        t_bucket{pool=\"a\",le=\"0.1\"} 5\nt_bucket{pool=\"a\",le=\"1\"} 10\nt_bucket{pool=\"a\",le=\"+Inf\"} 10\nt_sum{pool=\"a\"} 3\n\
        t_bucket{pool=\"b \\\"x\\\"\",le=\"0.1\"} 5\nt_bucket{pool=\"b\",le=\"1\"} 20\nt_bucket{pool=\"b\",le=\"+Inf\"} 30\n\
        t_bucket{le=\"nonsense\"} 7\ntt_bucket{le=\"0.1\"} 100\n";

    #[test]
    fn a_family_is_summed_over_its_labels() {
        let histogram = Histogram::parse(PAGE, "t");
        assert_eq!(histogram.count(), 40.0);
        assert_eq!(histogram.percentile(0.25), Some(0.1));
        assert!((histogram.percentile(0.5).unwrap() - 0.55).abs() < 1e-9, "half way in the second bucket");
        assert_eq!(histogram.percentile(0.99), Some(1.0), "beyond the last bound");
        assert_eq!(histogram.bars(9), [(0.1, 10), (1.0, 20), (f64::INFINITY, 10)]);
        assert_eq!(histogram.bars(2), [(1.0, 30), (f64::INFINITY, 10)]);
        assert_eq!(Histogram::parse(PAGE, "absent").percentile(0.5), None);
    }

    #[test]
    fn the_page_of_a_gateway_has_every_measure() {
        let telemetry = sluice_gateway::telemetry::Telemetry::with(Box::new(Vec::new), None);
        telemetry.record(&sluice_gateway::telemetry::testing::completed(
            std::time::Duration::from_millis(30),
            std::time::Duration::from_millis(6),
        ));
        let page = telemetry.page();
        for (name, family) in MEASURES {
            assert!(Histogram::parse(&page, family).count() > 0.0, "{name}: {page}");
        }
    }

    #[test]
    fn what_was_added_is_the_difference_and_a_new_gateway_begins_again() {
        let earlier = Histogram::parse("t_bucket{le=\"0.1\"} 2\nt_bucket{le=\"+Inf\"} 4\n", "t");
        let later = Histogram::parse("t_bucket{le=\"0.1\"} 3\nt_bucket{le=\"+Inf\"} 8\n", "t");
        assert_eq!(later.since(&earlier).bars(9), [(0.1, 1), (f64::INFINITY, 3)]);
        assert_eq!(earlier.since(&later), earlier);
        assert_eq!(later.since(&Histogram::default()), later);
    }
}
