//! The statistics of `vllm bench serve`, computed from records with the same arithmetic.
//!
//! | measure | of each completed request |
//! |---|---|
//! | TTFT | sent to first token event |
//! | TPOT | (E2EL - TTFT) / (output tokens - 1), for 2 or more tokens |
//! | ITL | each gap between token events, so long responses weigh more |
//! | E2EL | sent to last token event |
//!
//! Statistics are computed in seconds from every value and shown in milliseconds. Percentile p of
//! sorted x interpolates linearly between the two values next to position (n - 1) (p / 100),
//! rounded as numpy rounds. Statistics of no values are 0.
//!
//! If a server sends no usage and no tokenizer counts the text, output tokens, their rates and TPOT
//! are unknown: chunks do not count as tokens.
//!
//! Rates are numbers divided by the duration of the whole run, including ramp-up and drain. Goodput
//! counts completed requests that met all objectives. Peaks are the most token *events* in one
//! second, and the most requests in flight during any part of a second, which may be more than at
//! any one time. Only completed requests count, in seconds from the first send.

use crate::result::record::{Outcome, Record, RunConfig, RunResult, Slo};
use sluice_core::stats::percentile;

/// The distribution of one measure, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    sorted: Vec<f64>,
    mean: f64,
    std: f64,
}

impl Distribution {
    /// The distribution of `values`, in any order.
    pub fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>() / count;
        Self { sorted: values, mean, std: variance.sqrt() }
    }

    /// The number of values.
    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// The values, ascending.
    pub fn values(&self) -> &[f64] {
        &self.sorted
    }

    /// The arithmetic mean.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// The standard deviation, with the divisor n.
    pub fn std(&self) -> f64 {
        self.std
    }

    /// The largest value.
    pub fn max(&self) -> f64 {
        self.sorted.last().copied().unwrap_or(0.0)
    }

    /// The middle value, or the mean of the middle two.
    pub fn median(&self) -> f64 {
        let count = self.sorted.len();
        match (count, count % 2) {
            (0, _) => 0.0,
            (_, 1) => self.sorted[count / 2],
            _ => (self.sorted[count / 2 - 1] + self.sorted[count / 2]) / 2.0,
        }
    }

    /// The percentile `p`, limited to 0..=100.
    pub fn percentile(&self, p: f64) -> f64 {
        percentile(&self.sorted, p / 100.0)
    }
}

/// The statistics of a set of requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// Duration by which numbers are divided for rates, seconds.
    pub duration: f64,
    /// Requests sent.
    pub sent: u64,
    /// Requests with a complete response.
    pub completed: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that the client abandoned on purpose.
    pub left: u64,
    /// Requests that were in flight when the run was ended early.
    pub unfinished: u64,
    /// Completed requests that met all objectives.
    pub good: u64,
    /// For each judged request in the order of the records: whether it met the objectives, and the
    /// latency (infinite for a failure).
    pub judgements: Vec<(bool, f64)>,
    /// Prompt tokens of completed requests.
    pub input_tokens: u64,
    /// Requested prompt tokens of completed requests.
    pub asked_tokens: u64,
    /// Known output tokens of completed requests; see [`Metrics::known_output`].
    pub output_tokens: u64,
    /// Completed requests whose output tokens are unknown.
    pub uncounted: u64,
    /// Time to first token.
    pub ttft: Distribution,
    /// Time per output token after the first.
    pub tpot: Distribution,
    /// Gaps between token events.
    pub itl: Distribution,
    /// Time from sending to the last token.
    pub e2el: Distribution,
    /// Waits for `--max-concurrency`.
    pub client_queue: Distribution,
    /// Waits in the gateway's queue, if the gateway reported them.
    pub queue_wait: Distribution,
    /// How late this client sent requests, including requests that failed.
    pub lag: Distribution,
    /// The most token events in one second.
    pub peak_tokens: f64,
    /// The most requests in flight during any part of one second.
    pub peak_requests: u64,
}

impl Metrics {
    /// The statistics of a whole run.
    pub fn of(result: &RunResult) -> Self {
        Self::of_requests(&result.requests, result.duration, &result.config)
    }

    /// The statistics of some requests, as if the run had no others.
    pub fn of_requests<'a>(requests: impl IntoIterator<Item = &'a Record>, duration: f64, config: &RunConfig) -> Self {
        Self::with_slo(requests, duration, |record| config.slo_of(record.class))
    }

    /// The statistics with objectives from `slo`.
    pub fn with_slo<'a, 'b>(
        requests: impl IntoIterator<Item = &'a Record>,
        duration: f64,
        slo: impl Fn(&Record) -> &'b Slo,
    ) -> Self {
        let mut metrics = Self { duration, ..Self::default() };
        let [mut ttft, mut tpot, mut itl, mut e2el, mut client_queue, mut queue_wait, mut lag] =
            [const { Vec::new() }; 7];
        let mut completed = Vec::new();
        for record in requests {
            metrics.sent += 1;
            lag.push(record.lag());
            match record.outcome {
                Outcome::Completed => {}
                Outcome::Failed(_) => metrics.failed += 1,
                Outcome::Left => metrics.left += 1,
                Outcome::Unfinished => metrics.unfinished += 1,
            }
            let good = record.meets(slo(record));
            if record.is_completed() || record.is_failed() {
                metrics.judgements.push((good, if record.is_failed() { f64::INFINITY } else { record.latency }));
            }
            if !record.is_completed() {
                continue;
            }
            metrics.completed += 1;
            metrics.good += u64::from(good);
            metrics.input_tokens += record.prompt_tokens;
            metrics.asked_tokens += record.asked();
            metrics.output_tokens += record.output_tokens.unwrap_or(0);
            metrics.uncounted += u64::from(record.is_uncounted());
            ttft.push(record.ttft);
            tpot.extend(record.tpot());
            itl.extend_from_slice(&record.itls);
            e2el.push(record.latency);
            client_queue.push(record.queued);
            queue_wait.extend(record.queue_wait);
            completed.push(record);
        }
        (metrics.peak_tokens, metrics.peak_requests) = peaks(&completed);
        let [ttft, tpot, itl, e2el, client_queue, queue_wait, lag] =
            [ttft, tpot, itl, e2el, client_queue, queue_wait, lag].map(Distribution::of);
        Self { ttft, tpot, itl, e2el, client_queue, queue_wait, lag, ..metrics }
    }

    /// The measure called `ttft`, `tpot`, `itl` or `e2el`. `None` for another name, and for TPOT if
    /// it is unknown.
    pub fn measure(&self, name: &str) -> Option<&Distribution> {
        match name {
            "ttft" => Some(&self.ttft),
            "tpot" => self.known_tpot(),
            "itl" => Some(&self.itl),
            "e2el" => Some(&self.e2el),
            _ => None,
        }
    }

    /// `count` divided by the duration; 0 if that is 0.
    pub fn per_second(&self, count: u64) -> f64 {
        if self.duration > 0.0 { count as f64 / self.duration } else { 0.0 }
    }

    /// Output tokens of completed requests; `None` if a request has an unknown number.
    pub fn known_output(&self) -> Option<u64> {
        (self.uncounted == 0).then_some(self.output_tokens)
    }

    /// Output tokens per second; `None` as for [`Metrics::known_output`].
    pub fn output_rate(&self) -> Option<f64> {
        self.known_output().map(|tokens| self.per_second(tokens))
    }

    /// Times per output token, if known.
    pub fn known_tpot(&self) -> Option<&Distribution> {
        (self.uncounted == 0 || self.tpot.count() > 0).then_some(&self.tpot)
    }

    /// The most token events in one second; `None` as for [`Metrics::known_output`].
    pub fn known_peak(&self) -> Option<f64> {
        (self.uncounted == 0).then_some(self.peak_tokens)
    }

    /// Requests by which the server is judged, which are completed and failed requests.
    pub fn judged(&self) -> u64 {
        self.completed + self.failed
    }

    /// Share of judged requests that met all objectives; 0 if none was judged.
    pub fn attainment(&self) -> f64 {
        if self.judged() == 0 { 0.0 } else { self.good as f64 / self.judged() as f64 }
    }
}

/// The most token events, and the most requests in flight, in any one second. Seconds are counted
/// from the earliest request.
fn peaks(completed: &[&Record]) -> (f64, u64) {
    let Some(start) = completed.iter().map(|record| record.sent).min_by(f64::total_cmp) else { return (0.0, 0) };
    let end = completed.iter().map(|record| record.sent + record.latency).max_by(f64::total_cmp).unwrap_or(start);
    let seconds = (end - start).max(0.0).ceil() as usize + 1;
    let mut tokens = vec![0u64; seconds];
    // Requests that begin in a second, minus requests that ended in the previous one.
    let mut changes = vec![0i64; seconds + 1];
    for record in completed {
        let mut at = record.sent + record.ttft;
        let mut count = |at: f64| {
            if let Some(bucket) = tokens.get_mut((at - start).max(0.0) as usize) {
                *bucket += 1;
            }
        };
        count(at);
        for gap in &record.itls {
            at += gap;
            count(at);
        }
        let first = ((record.sent - start) as usize).min(seconds - 1);
        let last = ((record.sent + record.latency - start) as usize).min(seconds - 1);
        changes[first] += 1;
        changes[last + 1] -= 1;
    }
    let mut open = 0;
    let mut most = 0;
    for change in changes {
        open += change;
        most = most.max(open);
    }
    (tokens.iter().copied().max().unwrap_or(0) as f64, u64::try_from(most).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{file, vllm_keys};
    use proptest::prelude::*;

    #[test]
    fn percentiles_mean_and_deviation_are_those_of_numpy() {
        // numpy 2.4: percentile(x, p), mean(x), std(x), to the last bit.
        let few = Distribution::of(vec![15.0, 20.0, 35.0, 40.0, 50.0]);
        let expected = [
            (0.0, 15.0),
            (25.0, 20.0),
            (50.0, 35.0),
            (90.0, 46.0),
            (99.0, 49.6),
            (99.9, 49.96000000000001),
            (100.0, 50.0),
        ];
        for (p, value) in expected {
            assert_eq!(few.percentile(p), value, "P{p}");
        }
        assert_eq!((few.mean(), few.std(), few.median()), (32.0, 12.884098726725126, 35.0));
        // [i * i / 7 for i in range(1, 12)], in reverse: the order must not matter.
        let squares = Distribution::of((1..12).rev().map(|i| f64::from(i * i) / 7.0).collect());
        let expected = [
            (12.3, 0.7357142857142859),
            (33.0, 2.6714285714285717),
            (87.5, 13.607142857142858),
            (99.0, 16.985714285714288),
            (99.9, 17.25571428571429),
        ];
        for (p, value) in expected {
            assert_eq!(squares.percentile(p), value, "P{p}");
        }
        assert!((squares.std() - 5.565931353936616).abs() < 1e-12);
        assert_eq!(Distribution::of(vec![4.0, 1.0, 2.0, 3.0]).median(), 2.5);
    }

    #[test]
    fn the_statistics_of_nothing_are_zero() {
        let nothing = Distribution::of(vec![]);
        assert_eq!((nothing.count(), nothing.mean(), nothing.percentile(99.0), nothing.max()), (0, 0.0, 0.0, 0.0));
        assert_eq!((nothing.median(), nothing.std()), (0.0, 0.0));
        assert_eq!(Metrics::of(&RunResult::default()), Metrics::default());
    }

    /// A recorded run of `vllm-rs bench serve` 0.33.0: 80 requests, 26 failures, 9 responses of one
    /// token. The first file has the tool's own numbers, the second those of `calculate_metrics` of
    /// `vllm bench serve` 0.33.0 for the same timings (numpy 2.4.6).
    #[test]
    fn on_recorded_timings_the_arithmetic_is_that_of_the_originals_to_nine_digits() {
        let mut result =
            file::parse(include_bytes!("../../../tests/golden/bench_timings.json"), "golden").unwrap().remove(0);
        let numpy = serde_json::from_str(include_str!("../../../tests/golden/bench_timings.numpy.json")).unwrap();
        let config = &mut result.config;
        config.slo = Slo { ttft: Some(22.0), tpot: Some(5.0), e2el: Some(60.0) };
        config.percentiles = vec![1.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9];
        config.percentile_metrics = ["ttft", "tpot", "itl", "e2el"].map(str::to_owned).to_vec();
        let ours = vllm_keys::vllm_keys(&result, &Metrics::of(&result));
        for (reference, expected) in [("vllm-rs", &result.reported), ("numpy", &numpy)] {
            let mut compared = 0;
            for (key, expected) in expected {
                let (Some(expected), Some(ours)) = (expected.as_f64(), ours.get(key)) else { continue };
                let ours = ours.as_f64().unwrap_or_else(|| panic!("{key}: {ours}"));
                assert!(
                    (ours - expected).abs() <= 1e-9 * expected.abs(),
                    "{reference} {key}: {ours} is not {expected}"
                );
                compared += 1;
            }
            assert!(compared >= 55, "{reference}: only {compared} numbers were compared");
        }
        assert_eq!((ours["completed"].as_u64(), ours["failed"].as_u64()), (Some(54), Some(26)));
    }

    fn completed(sent: f64, ttft: f64, itls: &[f64]) -> Record {
        Record {
            outcome: Outcome::Completed,
            sent,
            ttft,
            itls: itls.to_vec(),
            latency: ttft + itls.iter().sum::<f64>(),
            prompt_tokens: 5,
            output_tokens: Some(itls.len() as u64 + 1),
            ..Record::default()
        }
    }

    fn failed(reason: &str) -> Record {
        Record { outcome: Outcome::Failed(reason.into()), ttft: 9.0, ..Record::default() }
    }

    #[test]
    fn only_completed_requests_enter_latencies_and_only_judged_ones_the_attainment() {
        let slo = Slo { ttft: Some(62.5), ..Slo::default() };
        let left = Record { outcome: Outcome::Left, ..Record::default() };
        let requests = vec![
            completed(0.0, 0.0625, &[0.25, 0.5]),
            failed("status 503"),
            completed(0.0, 0.1875, &[]),
            left,
            Record::default(),
        ];
        let config = RunConfig { slo, ..RunConfig::default() };
        let result = RunResult { requests, duration: 2.0, config, ..RunResult::default() };
        let metrics = Metrics::of(&result);
        assert_eq!((metrics.sent, metrics.completed, metrics.failed), (5, 2, 1));
        assert_eq!((metrics.left, metrics.unfinished, metrics.good), (1, 1, 1));
        assert_eq!((metrics.ttft.mean(), metrics.ttft.count()), (0.125, 2));
        assert_eq!((metrics.itl.mean(), metrics.itl.count()), (0.375, 2));
        assert_eq!((metrics.tpot.mean(), metrics.tpot.count()), (0.375, 1));
        assert_eq!((metrics.input_tokens, metrics.output_tokens), (10, 4));
        assert_eq!(metrics.per_second(metrics.completed), 1.0);
        assert_eq!(metrics.attainment(), 1.0 / 3.0);
    }

    #[test]
    fn peaks_are_counted_in_seconds_from_the_earliest_request() {
        // Seconds begin at 0.9. The first request has tokens at 1.0 and 1.1, in second 0. The
        // second has tokens at 1.5, 2.1 and 2.3, in seconds 0 and 1.
        let requests = [completed(0.9, 0.1, &[0.1]), completed(1.0, 0.5, &[0.6, 0.2])];
        let metrics = Metrics::of_requests(&requests, 2.0, &RunConfig::default());
        assert_eq!((metrics.peak_tokens, metrics.peak_requests), (3.0, 2));
    }

    proptest! {
        #[test]
        fn a_percentile_lies_between_the_ends_and_grows(
            values in proptest::collection::vec(0.0..1e6, 1..50),
            p in 0.0..100.0,
            q in 0.0..100.0,
        ) {
            let of = Distribution::of(values);
            let (low, high) = if p < q { (p, q) } else { (q, p) };
            prop_assert!(of.percentile(0.0) <= of.percentile(low));
            prop_assert!(of.percentile(low) <= of.percentile(high) + 1e-9);
            prop_assert!(of.percentile(high) <= of.max() + 1e-9);
        }
    }
}
