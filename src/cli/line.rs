//! One line on the terminal with the progress of a load generator; nothing when stderr is not a terminal.
//!
//! It shows how many requests were sent and are in flight, and, over the last ten seconds, completed requests per second
//! and P99 of TTFT; also failures. The line is cleared at the end, so that only the result stays on the screen.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::bench::{Extent, Progress};

/// How often the line is updated.
const REFRESH: Duration = Duration::from_millis(200);
/// The title, a bar of 20 columns, and the text.
const TEMPLATE: &str = "{prefix} [{bar:20}] {wide_msg}";

/// The line; cleared when ended or dropped.
pub(super) struct Line {
    bar: ProgressBar,
    task: Option<JoinHandle<()>>,
}

impl Line {
    /// Starts to show `progress` under `title`.
    pub(super) fn start(title: &str, extent: Extent, progress: Arc<Progress>) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if bar.is_hidden() {
            return Self { bar, task: None };
        }
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
        bar.set_style(style.progress_chars("=> "));
        bar.set_prefix(title.to_owned());
        let (shown, start) = (bar.clone(), Instant::now());
        let task = tokio::spawn(async move {
            loop {
                let (position, length) = position(extent, start.elapsed(), &progress);
                shown.set_length(length);
                shown.set_position(position);
                shown.set_message(text(extent, start.elapsed(), &progress));
                tokio::time::sleep(REFRESH).await;
            }
        });
        Self { bar, task: Some(task) }
    }

    /// Clears the line.
    pub(super) fn end(self) {
        drop(self);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            self.bar.finish_and_clear();
        }
    }
}

/// How much of the run is done: milliseconds, or requests.
fn position(extent: Extent, elapsed: Duration, progress: &Progress) -> (u64, u64) {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    match extent {
        Extent::Lasting(length) => (millis(elapsed.min(length)), millis(length)),
        Extent::Requests(count) => (progress.ended.load(Relaxed), count),
    }
}

fn text(extent: Extent, elapsed: Duration, progress: &Progress) -> String {
    let (sent, ended) = (progress.sent.load(Relaxed), progress.ended.load(Relaxed));
    let failed = match progress.failed.load(Relaxed) {
        0 => String::new(),
        failed => format!(", {failed} failed"),
    };
    let open = sent.saturating_sub(ended);
    let now = progress.now(elapsed);
    let mut recent = format!(", {:.1} req/s", now.rate);
    if let Some(ttft) = now.ttft_p99 {
        recent.push_str(&format!(", TTFT P99 {:.0} ms", ttft * 1e3));
    }
    let failed = format!("{recent}{failed}");
    match extent {
        Extent::Lasting(length) if elapsed > length => format!("waiting for the last {open} of {sent}{failed}"),
        Extent::Lasting(length) => {
            let (now, all) = (elapsed.as_secs(), length.as_secs());
            format!("{now} of {all} s, {sent} sent, {open} in flight{failed}")
        }
        Extent::Requests(count) => format!("{sent} of {count} sent, {open} in flight{failed}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_sent_open_and_failed() {
        let progress = Progress::default();
        progress.sent.store(12, Relaxed);
        progress.ended.store(9, Relaxed);
        let lasting = Extent::Lasting(Duration::from_secs(20));
        assert_eq!(text(lasting, Duration::from_secs(3), &progress), "3 of 20 s, 12 sent, 3 in flight, 0.0 req/s");
        progress.failed.store(1, Relaxed);
        assert_eq!(
            text(lasting, Duration::from_secs(21), &progress),
            "waiting for the last 3 of 12, 0.0 req/s, 1 failed"
        );
        assert_eq!(
            text(Extent::Requests(40), Duration::ZERO, &progress),
            "12 of 40 sent, 3 in flight, 0.0 req/s, 1 failed"
        );
    }
}
