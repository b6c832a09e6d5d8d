//! Passes the progress of one sequence from the engine to the exchange that streams the response.
//!
//! Tokens that the exchange has not taken yet are counted, not queued, as vLLM's output collector
//! does for a slow client, so memory does not grow. With `--stream-interval` n, tokens are
//! delivered n at a time; the first and the last are delivered at once.

use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use parking_lot::Mutex;

/// Progress since it was last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) tokens: u32,
    /// Whether the last token is among them.
    pub(crate) last: bool,
    /// Prompt tokens found in the prefix cache.
    pub(crate) cached: u32,
}

#[derive(Debug, Default)]
struct State {
    progress: Progress,
    begun: bool,
    ready: bool,
    broken: bool,
}

/// Counts the tokens of one sequence until the exchange takes them.
#[derive(Debug)]
pub(crate) struct OutputCollector {
    state: Mutex<State>,
    reader: AtomicWaker,
    interval: u32,
}

impl OutputCollector {
    pub(crate) fn new(interval: u32) -> Self {
        Self { state: Mutex::default(), reader: AtomicWaker::new(), interval }
    }

    /// Records the number of prompt tokens that were cached.
    pub(crate) fn admit(&self, cached: u32) {
        self.state.lock().progress.cached = cached;
    }

    /// Adds a token. Wakes the reader if the tokens must be delivered now.
    pub(crate) fn push(&self, last: bool) {
        let mut state = self.state.lock();
        state.progress.tokens += 1;
        state.progress.last = last;
        if !state.begun || last || state.progress.tokens >= self.interval {
            (state.begun, state.ready) = (true, true);
            drop(state);
            self.reader.wake();
        }
    }

    /// Breaks the stream, because the engine stopped or refused the request.
    pub(crate) fn fail(&self) {
        self.state.lock().broken = true;
        self.reader.wake();
    }

    /// Takes the progress. If there is none, the caller is woken when there is some. `None` if the
    /// stream broke.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>) -> Poll<Option<Progress>> {
        self.reader.register(cx.waker());
        let mut state = self.state.lock();
        if std::mem::take(&mut state.ready) {
            let progress = state.progress;
            (state.progress.tokens, state.progress.last) = (0, false);
            return Poll::Ready(Some(progress));
        }
        if state.broken { Poll::Ready(None) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn an_interval_shows_the_first_the_last_and_every_nth_and_a_break_comes_after_what_was_sent() {
        let (collector, mut shown) = (OutputCollector::new(3), Vec::new());
        let mut cx = Context::from_waker(Waker::noop());
        for token in 1..=9 {
            collector.push(token == 9);
            if let Poll::Ready(Some(seen)) = collector.poll_take(&mut cx) {
                shown.push((token, seen.tokens, seen.last));
            }
        }
        assert_eq!(shown, [(1, 1, false), (4, 3, false), (7, 3, false), (9, 2, true)]);
        let collector = OutputCollector::new(1);
        collector.push(false);
        collector.fail();
        assert!(matches!(collector.poll_take(&mut cx), Poll::Ready(Some(_))));
        assert_eq!(collector.poll_take(&mut cx), Poll::Ready(None));
    }
}
