//! The part of a run in which the load was steady, and the statistics of that part.
//!
//! Rates over a whole run include ramp-up and drain. So a window is cut out:
//!
//! - Closed loop with concurrency C, or all requests at once with a limit C: from the first to the
//!   last time with at least [`THRESHOLD`] of C in flight, as in `vllm-rs bench serve`.
//! - Open loop: from the end of the warm-up until the last send. MSER (White 1997) finds that end:
//!   with x the mean requests in flight in n = [`SLOTS`] slots, it is the slot d in the first half
//!   that minimises sum((x_i - mean_d)^2) / (n - d)^2 over the slots from d on.
//!
//! Rates count completions and output tokens in the window, where `vllm-rs` counts chunks.
//! Latencies are of requests sent in the window. If the number of requests in flight keeps growing,
//! latencies depend on the length of the run, and a warning says so.

use serde::{Deserialize, Serialize};

use crate::result::metrics::{Distribution, Metrics};
use crate::result::record::{Record, RunConfig, RunResult};

/// Share of the concurrency that must be in flight in the window.
pub const THRESHOLD: f64 = 0.95;
/// Slots over which requests in flight of an open loop are averaged.
pub const SLOTS: usize = 100;
/// A window shorter than this, or than a tenth of the run, gets a note; seconds.
pub const SHORT: f64 = 10.0;
/// The fewest requests that can show growth.
const TREND_REQUESTS: usize = 50;

/// A steady window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// Start, seconds from the start of the run.
    pub start_s: f64,
    /// End, seconds from the start of the run.
    pub end_s: f64,
    /// Length, seconds.
    pub duration_s: f64,
    /// Concurrency of a closed loop; `None` for an open loop.
    pub target_concurrency: Option<u32>,
    /// The most requests in flight at one time.
    pub observed_peak: u64,
    /// Completed requests sent in the window.
    pub requests_started_in_window: u64,
    /// Requests completed in the window.
    pub requests_completed_in_window: u64,
    /// All requests of the run.
    pub requests_total: u64,
    /// A note if the window is short.
    pub warning: Option<String>,
}

/// The steady window of a run, with statistics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steady {
    /// The window.
    pub window: Window,
    /// Requests completed in the window, per second.
    pub request_throughput: f64,
    /// Prompt tokens of completed requests sent in the window, per second.
    pub input_throughput: f64,
    /// Output tokens in the window, per second. A request's tokens are spread evenly over its token
    /// events.
    pub output_throughput: Option<f64>,
    /// Statistics of completed requests sent in the window.
    pub metrics: Metrics,
}

/// The steady window of a run; `None` for recorded and changing rates. (Measured over the whole
/// run, N requests at rate r to a perfect server have a throughput of only N / (N/r + last
/// latency).)
pub fn steady(result: &RunResult) -> Option<Steady> {
    let changes = changes(&result.requests);
    let closed = result.config.max_concurrency.filter(|_| is_closed(&result.config));
    let (start, end) = match closed {
        Some(streams) => closed_window(&changes, streams)?,
        None if result.config.request_rate.is_some() => open_window(result, &changes)?,
        None => return None,
    };
    let length = end - start;
    if length <= 0.0 {
        return None;
    }
    // In a closed loop, the window ends when the load falls, so that moment is outside. In an open
    // loop, it ends with a send, which is inside.
    let inside = |moment: f64| start <= moment && (moment < end || (closed.is_none() && moment <= end));
    let completed = || result.requests.iter().filter(|record| record.is_completed());
    let started = completed().filter(|record| inside(record.sent));
    let tokens = completed().map(|record| {
        let share = events(record).filter(|at| inside(*at)).count() as f64 / (record.itls.len() + 1) as f64;
        record.output_tokens.map(|tokens| tokens as f64 * share)
    });
    let tokens: Option<f64> = tokens.sum();
    let done = completed().filter(|record| inside(record.sent + record.latency)).count() as u64;
    let metrics = Metrics::of_requests(started, length, &result.config);
    let short = length < SHORT.max(result.duration / 10.0);
    let note = format!("only {length:.1} s were steady ({:.0} %)", 100.0 * length / result.duration);
    let window = Window {
        start_s: start,
        end_s: end,
        duration_s: length,
        target_concurrency: closed,
        observed_peak: peak(&changes),
        requests_started_in_window: metrics.sent,
        requests_completed_in_window: done,
        requests_total: result.requests.len() as u64,
        warning: short.then_some(note),
    };
    Some(Steady {
        window,
        request_throughput: done as f64 / length,
        input_throughput: metrics.input_tokens as f64 / length,
        output_throughput: tokens.map(|tokens| tokens.abs() / length),
        metrics,
    })
}

/// Whether a new request was sent whenever one had ended.
fn is_closed(config: &RunConfig) -> bool {
    config.request_rate.is_none() && config.ramp.is_none() && matches!(&*config.arrival, "" | "closed loop" | "at once")
}

/// The mean requests in flight in the first and last third of the steady window of an open loop, if
/// they kept growing.
pub fn growth(result: &RunResult) -> Option<(f64, f64)> {
    result.config.request_rate?;
    let changes = changes(&result.requests);
    let (start, end) = open_window(result, &changes)?;
    if result.requests.len() < TREND_REQUESTS {
        return None;
    }
    let third = (end - start) / 3.0;
    let levels = levels(&changes, start, end);
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len().max(1) as f64;
    let (first, last) = (mean(&levels[..SLOTS / 3]), mean(&levels[SLOTS - SLOTS / 3..]));
    // The mean must grow by more than half, and by more than five standard deviations of a Poisson
    // distribution.
    let grown = third > 0.0 && last > first * 1.5 && last - first > 5.0 * first.max(1.0).sqrt();
    grown.then_some((first, last))
}

/// Changes of the number of requests in flight: time and new number.
pub fn changes(requests: &[Record]) -> Vec<(f64, i64)> {
    let mut changes: Vec<(f64, i64)> = Vec::with_capacity(requests.len() * 2);
    for record in requests {
        changes.push((record.sent, 1));
        // A completed request ends with the last token, because a closed loop sends the next
        // request just after it, before the stream ends.
        let end = if record.is_completed() { record.sent + record.latency } else { record.ended };
        changes.push((end.max(record.sent), -1));
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let mut open = 0;
    for change in &mut changes {
        open += change.1;
        change.1 = open;
    }
    changes
}

fn peak(changes: &[(f64, i64)]) -> u64 {
    changes.iter().map(|(_, open)| u64::try_from(*open).unwrap_or(0)).max().unwrap_or(0)
}

fn closed_window(changes: &[(f64, i64)], streams: u32) -> Option<(f64, f64)> {
    let enough = (THRESHOLD * f64::from(streams)).ceil() as i64;
    let first = changes.iter().find(|(_, open)| *open >= enough)?.0;
    let last = changes.iter().rposition(|(_, open)| *open >= enough)?;
    Some((first, changes.get(last + 1).map_or(first, |(at, _)| *at)))
}

fn open_window(result: &RunResult, changes: &[(f64, i64)]) -> Option<(f64, f64)> {
    let end = result.requests.iter().map(|record| record.sent).max_by(f64::total_cmp)?;
    let levels = levels(changes, 0.0, end);
    let (mut best, mut cut) = (f64::INFINITY, 0);
    for start in 0..SLOTS / 2 {
        let rest = &levels[start..];
        let of = Distribution::of(rest.to_vec());
        let error = of.std().powi(2) / rest.len() as f64;
        if error < best {
            (best, cut) = (error, start);
        }
    }
    Some((end * cut as f64 / SLOTS as f64, end))
}

/// Mean requests in flight in [`SLOTS`] equal slots of a part of the run.
pub fn levels(changes: &[(f64, i64)], from: f64, to: f64) -> Vec<f64> {
    let mut levels = vec![0.0; SLOTS];
    let width = (to - from) / SLOTS as f64;
    if width <= 0.0 {
        return levels;
    }
    for (index, (at, open)) in changes.iter().enumerate() {
        let until = changes.get(index + 1).map_or(to, |(next, _)| *next).min(to);
        let at = at.max(from);
        let first = (((at - from) / width).max(0.0) as usize).min(SLOTS);
        for (slot, level) in levels.iter_mut().enumerate().skip(first) {
            let (begin, end) = (from + width * slot as f64, from + width * (slot + 1) as f64);
            let overlap = end.min(until) - begin.max(at);
            if overlap <= 0.0 && begin >= until {
                break;
            }
            *level += *open as f64 * overlap.max(0.0) / width;
        }
    }
    levels
}

fn events(record: &Record) -> impl Iterator<Item = f64> + '_ {
    let first = record.sent + record.ttft;
    std::iter::once(first).chain(record.itls.iter().scan(first, |at, gap| {
        *at += gap;
        Some(*at)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{Outcome, Ramp};

    fn record(index: u64, sent: f64, latency: f64) -> Record {
        let outcome = Outcome::Completed;
        let ended = sent + latency;
        Record {
            index,
            sent,
            ended,
            latency,
            ttft: latency / 2.0,
            itls: vec![latency / 2.0],
            outcome,
            prompt_tokens: 10,
            output_tokens: Some(2),
            ..Record::default()
        }
    }

    fn run(requests: Vec<Record>, config: RunConfig) -> RunResult {
        let duration = requests.iter().map(|record| record.ended).fold(0.0, f64::max);
        RunResult { requests, duration, config, ..RunResult::default() }
    }

    #[test]
    fn a_closed_loop_is_steady_while_its_streams_are_busy() {
        // The streams from second 0 to 4 and from 1 to 5 overlap; the third is nearly alone.
        let requests = vec![record(0, 0.0, 4.0), record(1, 1.0, 4.0), record(2, 4.5, 2.0)];
        let result = run(requests, RunConfig { max_concurrency: Some(2), ..RunConfig::default() });
        let steady = steady(&result).unwrap();
        assert_eq!((steady.window.start_s, steady.window.end_s), (1.0, 5.0));
        assert_eq!(steady.window.requests_started_in_window, 2);
        assert_eq!(steady.window.requests_completed_in_window, 1);
        assert_eq!(steady.request_throughput, 0.25);
        assert_eq!(steady.input_throughput, 5.0);
        // Token events at 2, 3 and 4 are inside; 5, 5.5 and 6.5 are not.
        assert_eq!(steady.output_throughput, Some(0.75));
        assert!(steady.window.warning.unwrap().contains("only 4.0 s"));
    }

    #[test]
    fn a_limit_on_changing_or_recorded_arrivals_makes_no_closed_loop() {
        let requests = || vec![record(0, 0.0, 4.0), record(1, 1.0, 4.0), record(2, 4.5, 2.0)];
        let window = |arrival: &str, ramp: Option<Ramp>| {
            let config =
                RunConfig { arrival: arrival.to_owned(), ramp, max_concurrency: Some(2), ..RunConfig::default() };
            steady(&run(requests(), config)).map(|steady| steady.window.target_concurrency)
        };
        for arrival in ["", "closed loop", "at once"] {
            assert_eq!(window(arrival, None), Some(Some(2)), "{arrival}");
        }
        for arrival in ["ramp", "steps", "recorded", "mixed"] {
            assert_eq!(window(arrival, None), None, "{arrival}");
        }
        assert_eq!(window("", Some(Ramp { strategy: "linear".to_owned(), start: 1.0, end: 9.0 })), None);
    }

    #[test]
    fn an_open_loop_is_steady_after_its_warm_up_until_the_last_request_was_sent() {
        // 200 requests are in flight from second 20 on.
        let requests: Vec<Record> = (0..2_000).map(|i| record(i, i as f64 / 10.0, 20.0)).collect();
        let result = run(requests, RunConfig { request_rate: Some(10.0), ..RunConfig::default() });
        let steady = steady(&result).unwrap();
        assert!((18.0..24.0).contains(&steady.window.start_s), "{:?}", steady.window);
        assert_eq!(steady.window.end_s, 199.9);
        assert!((steady.request_throughput - 10.0).abs() < 0.2, "{}", steady.request_throughput);
        assert!(Metrics::of(&result).per_second(2_000) < 9.1);
        assert_eq!(growth(&result), None);
    }

    #[test]
    fn a_growing_queue_is_detected() {
        let requests: Vec<Record> = (0..600).map(|i| record(i, i as f64 / 10.0, 1.0 + i as f64 / 10.0)).collect();
        let result = run(requests, RunConfig { request_rate: Some(10.0), ..RunConfig::default() });
        let (first, last) = growth(&result).unwrap();
        assert!(last > first * 1.5, "{first} {last}");
    }

    #[test]
    fn levels_are_time_averages() {
        let changes = changes(&[record(0, 0.0, 1.0), record(1, 0.5, 1.5)]);
        let levels = levels(&changes, 0.0, 2.0);
        assert!((levels[0] - 1.0).abs() < 1e-9 && (levels[30] - 2.0).abs() < 1e-9 && (levels[90] - 1.0).abs() < 1e-9);
        assert!((levels.iter().sum::<f64>() / SLOTS as f64 - 1.25).abs() < 1e-9);
    }

    /// A run of `vllm-rs bench serve` 0.33.0 with a concurrency of 8. That tool counts requests in
    /// flight during the run, so the ends of the window differ by microseconds. It counts chunks,
    /// of which 14 held two tokens.
    #[test]
    fn the_window_of_a_closed_loop_is_that_of_vllm_rs() {
        let text = include_bytes!("../../../tests/golden/bench_closed_loop.json");
        let result = crate::result::file::parse(text, "golden").unwrap().remove(0);
        let (ours, theirs) = (steady(&result).unwrap(), &result.reported["steady_state"]);
        let near = |ours: f64, theirs: &serde_json::Value, tolerance: f64| {
            let theirs = theirs.as_f64().unwrap();
            assert!((ours - theirs).abs() <= tolerance * theirs.abs(), "{ours} is not {theirs}");
        };
        let window = &theirs["window"];
        assert_eq!(window["observed_peak"], ours.window.observed_peak);
        assert_eq!(window["requests_started_in_window"], ours.window.requests_started_in_window);
        assert_eq!(window["requests_completed_in_window"], ours.window.requests_completed_in_window);
        near(ours.window.duration_s, &window["duration_s"], 1e-3);
        near(ours.request_throughput, &theirs["request_throughput"], 1e-3);
        near(ours.input_throughput, &theirs["input_throughput"], 1e-3);
        let tokens: u64 = result.requests.iter().filter_map(|record| record.output_tokens).sum();
        let chunks: usize = result.requests.iter().map(|record| record.itls.len() + 1).sum();
        assert_eq!((tokens, chunks), (1920, 1906));
        let of_chunks = ours.output_throughput.unwrap() * chunks as f64 / tokens as f64;
        near(of_chunks, &theirs["output_throughput"], 2e-3);
        near(ours.metrics.ttft.mean() * 1e3, &theirs["mean_ttft_ms"], 1e-9);
        near(ours.metrics.tpot.mean() * 1e3, &theirs["mean_tpot_ms"], 1e-9);
        near(ours.metrics.ttft.percentile(99.0) * 1e3, &theirs["percentiles_ttft_ms"][2][1], 1e-9);
    }

    #[test]
    fn an_empty_run_has_no_steady_window() {
        let config = RunConfig { max_concurrency: Some(4), ..RunConfig::default() };
        assert_eq!(steady(&run(vec![], config.clone())), None);
        assert_eq!(steady(&run(vec![record(0, 0.0, 1.0)], config)), None);
    }
}
