//! The progress of a load generator on the terminal. If stderr is not a terminal, nothing is shown.
//!
//! Shows a bar, counts of sent, open and failed requests, and from the last ten seconds the
//! completed requests per second and, if there is room, a histogram of TTFT. The lines are redrawn
//! in place every [`REFRESH`].

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Stderr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::terminal::{LiveLines, size};
use sluice_bench::{Distribution, Extent, Progress};

const REFRESH: Duration = Duration::from_millis(200);
const BAR: usize = 20;
const BINS: usize = 8;
const ROWS_MIN: usize = 16;
/// Columns of the histogram that bounds and counts take beside the bars.
const BESIDE_BARS: usize = 28;

type Live = Arc<Mutex<Option<LiveLines<Stderr>>>>;

pub(super) struct Line {
    live: Live,
    task: Option<JoinHandle<()>>,
}

impl Line {
    pub(super) fn start(title: &str, extent: Extent, progress: Arc<Progress>) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self { live: Live::default(), task: None };
        }
        let live: Live = Arc::new(Mutex::new(Some(LiveLines::on(std::io::stderr()))));
        let (title, start, drawn) = (title.to_owned(), Instant::now(), Arc::clone(&live));
        let task = tokio::spawn(async move {
            loop {
                let screen = size();
                let lines = lines(&title, extent, start.elapsed(), &progress, screen);
                match &mut *drawn.lock() {
                    Some(live) => live.draw(&lines, screen),
                    None => return,
                }
                tokio::time::sleep(REFRESH).await;
            }
        });
        Self { live, task: Some(task) }
    }

    pub(super) fn end(self) {
        drop(self);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // The lines are cleared here, because the task might clear them only after the next text
        // has been printed.
        drop(self.live.lock().take());
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

fn lines(
    title: &str,
    extent: Extent,
    elapsed: Duration,
    progress: &Progress,
    (columns, rows): (usize, usize),
) -> Vec<String> {
    let done = (done(extent, elapsed, progress) * BAR as f64) as usize;
    let bar = format!("{}{}", "=".repeat(done), " ".repeat(BAR - done));
    let mut lines = vec![
        format!("{title} [{bar}] {}", position(extent, elapsed, progress)),
        format!("  {}", text(extent, elapsed, progress)),
    ];
    if rows >= ROWS_MIN {
        lines.extend(histogram(progress.recent_ttfts(), columns.saturating_sub(BESIDE_BARS)));
    }
    lines
}

fn done(extent: Extent, elapsed: Duration, progress: &Progress) -> f64 {
    let share = match extent {
        Extent::Lasting(length) => elapsed.as_secs_f64() / length.as_secs_f64().max(f64::MIN_POSITIVE),
        Extent::Requests(count) => progress.ended.load(Relaxed) as f64 / count.max(1) as f64,
    };
    share.clamp(0.0, 1.0)
}

fn position(extent: Extent, elapsed: Duration, progress: &Progress) -> String {
    match extent {
        Extent::Lasting(length) if elapsed > length => "waiting for the last responses".to_owned(),
        Extent::Lasting(length) => format!("{} of {} s", elapsed.as_secs(), length.as_secs()),
        Extent::Requests(count) => format!("{} of {count} requests", progress.ended.load(Relaxed)),
    }
}

fn text(extent: Extent, elapsed: Duration, progress: &Progress) -> String {
    let (sent, failed, open) = (progress.sent.load(Relaxed), progress.failed.load(Relaxed), progress.in_flight());
    let now = progress.now(elapsed);
    let mut text = match extent {
        Extent::Lasting(length) if elapsed > length => format!("{open} of {sent} in flight"),
        _ => format!("{sent} sent, {open} in flight"),
    };
    let _ = write!(text, ", {:.1} req/s", now.rate);
    if let Some(ttft) = now.ttft_p99 {
        let _ = write!(text, ", TTFT P99 {}", ms(ttft));
    }
    if failed > 0 {
        let _ = write!(text, ", {failed} failed");
    }
    text
}

fn ms(seconds: f64) -> String {
    if seconds < 10.0 { format!("{:.0} ms", seconds * 1e3) } else { format!("{seconds:.1} s") }
}

/// Times in seconds, with bars of at most `width` columns. The bounds of all bins have the same
/// ratio, so that a tail has separate rows.
fn histogram(times: Vec<f64>, width: usize) -> Vec<String> {
    let times = Distribution::of(times);
    if times.count() == 0 || width == 0 {
        return Vec::new();
    }
    // The least time is limited, because times of 0 are possible where the clock is coarse.
    let (low, high) = (times.percentile(0.0).max(1e-6), times.max().max(1e-6));
    let ratio = (high / low).powf(1.0 / BINS as f64).max(1.0 + 1e-9);
    let mut counts = [0usize; BINS];
    for time in times.values() {
        let bin = (time.max(low) / low).ln() / ratio.ln();
        counts[(bin as usize).min(BINS - 1)] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(1).max(1);
    let median = times.median();
    let mut lines = vec![format!("  TTFT of the last 10 s: P50 {}, {} requests", ms(median), times.count())];
    for (bin, count) in counts.into_iter().enumerate() {
        let bound = low * ratio.powi(i32::try_from(bin + 1).unwrap_or(i32::MAX));
        // Rounded up, so that a bin with any value has a bar.
        let bar = "■".repeat((count * width).div_ceil(most));
        lines.push(format!("  {:>10} |{bar} {count}", format!("{:.1} ms", bound * 1e3)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_say_what_is_sent_open_and_failed() {
        let progress = Progress::default();
        progress.sent.store(12, Relaxed);
        progress.ended.store(9, Relaxed);
        let lasting = Extent::Lasting(Duration::from_secs(20));
        let shown = |extent, seconds| lines("1 of 3", extent, Duration::from_secs(seconds), &progress, (80, 24));
        assert_eq!(shown(lasting, 5), ["1 of 3 [=====               ] 5 of 20 s", "  12 sent, 3 in flight, 0.0 req/s"]);
        progress.failed.store(1, Relaxed);
        assert_eq!(
            shown(lasting, 21),
            [
                "1 of 3 [====================] waiting for the last responses",
                "  3 of 12 in flight, 0.0 req/s, 1 failed"
            ]
        );
        assert_eq!(
            shown(Extent::Requests(36), 0),
            ["1 of 3 [=====               ] 9 of 36 requests", "  12 sent, 3 in flight, 0.0 req/s, 1 failed"]
        );
    }

    #[test]
    fn the_histogram_shows_body_and_tail_and_counts_every_request() {
        let times: Vec<f64> = (0..90).map(|n| 0.010 + f64::from(n) * 1e-5).chain([1.0; 10]).collect();
        let lines = histogram(times, 40);
        assert_eq!(lines.len(), BINS + 1);
        assert_eq!(lines[0], "  TTFT of the last 10 s: P50 10 ms, 100 requests");
        let counts: Vec<usize> =
            lines[1..].iter().map(|line| line.split(' ').next_back().unwrap().parse().unwrap()).collect();
        assert_eq!((counts[0], counts[BINS - 1], counts.iter().sum::<usize>()), (90, 10, 100));
        let bars: Vec<usize> = lines[1..].iter().map(|line| line.matches('■').count()).collect();
        assert_eq!((bars[0], bars[1], bars[BINS - 1]), (40, 0, 5));
        assert!(lines[BINS].starts_with("   1000.0 ms |■"), "{}", lines[BINS]);
        assert!(lines.iter().all(|line| line.chars().count() < 40 + BESIDE_BARS), "{lines:#?}");
        assert_eq!(histogram(vec![0.0, 0.0], 10).len(), BINS + 1);
        assert_eq!(histogram(vec![], 10), Vec::<String>::new());
    }
}
