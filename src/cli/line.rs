//! One line on the terminal that says what a load generator is doing; nothing when stderr is not a terminal.
//!
//! How much is sent and in flight, how many requests ended per second and the P99 of their TTFT, both over the last ten
//! seconds, and failures.
//!
//! Redrawn in place a few times a second and wiped before the table is printed, so that what is left on the screen (and
//! whatever is piped) is the result alone.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::bench::{Extent, Progress};

/// How often the line is written again.
const REFRESH: Duration = Duration::from_millis(200);
/// Goes to the first column and clears the line.
const CLEAR: &str = "\r\x1b[K";

/// The line; cleared when ended or dropped.
pub(super) struct Line {
    task: Option<JoinHandle<()>>,
}

impl Line {
    /// Begins to show `progress` under `title`.
    pub(super) fn start(title: &str, extent: Extent, progress: Arc<Progress>) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self { task: None };
        }
        let (title, start) = (title.to_owned(), Instant::now());
        let task = tokio::spawn(async move {
            loop {
                // A terminal that cannot be written to is no reason to stop.
                let now = text(extent, start.elapsed(), &progress);
                let _ = write!(std::io::stderr(), "{CLEAR}{title}: {now}");
                tokio::time::sleep(REFRESH).await;
            }
        });
        Self { task: Some(task) }
    }

    /// Takes the line away.
    pub(super) fn end(self) {
        drop(self);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            let _ = write!(std::io::stderr(), "{CLEAR}");
        }
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
