//! One line on the terminal that shows the progress of a run.
//!
//! It shows how many requests are sent and in flight, how many ended per second and the P99 of their TTFT over the last ten
//! seconds, and failures. It is drawn on stderr, cut to the width of the terminal, and cleared before the result is printed.
//! Bounds: nothing is drawn when stderr is not a terminal.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::bench::{Extent, Progress};

/// Time between two updates.
const REFRESH: Duration = Duration::from_millis(200);

/// The line; cleared on drop.
pub(super) struct ProgressLine {
    bar: ProgressBar,
    task: Option<JoinHandle<()>>,
}

impl ProgressLine {
    /// Begins to show `progress` under `title`.
    pub(super) fn start(title: &str, extent: Extent, progress: Arc<Progress>) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if bar.is_hidden() {
            return Self { bar, task: None };
        }
        bar.set_style(ProgressStyle::with_template("{wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
        let (title, start, shown) = (title.to_owned(), Instant::now(), bar.clone());
        let task = tokio::spawn(async move {
            loop {
                shown.set_message(format!("{title}: {}", text(extent, start.elapsed(), &progress)));
                shown.tick();
                tokio::time::sleep(REFRESH).await;
            }
        });
        Self { bar, task: Some(task) }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.bar.finish_and_clear();
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
