//! Passes tokens from an engine to one response, here and in `sluice lab`.
//!
//! Each choice has one slot, in which tokens that the response has not taken yet are added up, as
//! in vLLM's collector for a slow client. So memory is bounded, the engine never waits, and no
//! token is lost. There is one reader (the response) and one writer (the engine). With a stream
//! interval of n, tokens are delivered n at a time. The first and the last token are delivered at
//! once.

use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use parking_lot::Mutex;

use crate::engine::Timing;
use crate::http::wire::Finish;

/// Progress of a choice since progress was last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// New tokens.
    pub tokens: u32,
    /// Set if the last token is among them.
    pub finish: Option<Finish>,
    /// Prompt tokens found in the prefix cache. Set with the first tokens.
    pub cached: u32,
}

/// Why a response cannot be completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The engine died or was stopped with the server.
    EngineDead,
    /// The engine refused the request.
    Refused(String),
}

#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    progress: Progress,
    begun: bool,
    due: bool,
}

#[derive(Debug, Default)]
struct State {
    choices: Vec<Pending>,
    interval: u32,
    ready: bool,
    timing: Option<Timing>,
    broken: Option<Broken>,
}

/// Passes tokens to one response: a slot for each choice.
#[derive(Debug)]
pub struct OutputCollector {
    state: Mutex<State>,
    reader: AtomicWaker,
}

impl OutputCollector {
    /// A collector for this many choices, whose tokens are delivered `interval` at a time.
    pub fn new(choices: usize, interval: u32) -> Self {
        let state = State { choices: vec![Pending::default(); choices], interval, ..State::default() };
        Self { state: Mutex::new(state), reader: AtomicWaker::new() }
    }

    /// Records the number of a choice's prompt tokens that were found in the prefix cache.
    pub fn admit(&self, choice: usize, cached: u32) {
        if let Some(slot) = self.state.lock().choices.get_mut(choice) {
            slot.progress.cached = cached;
        }
    }

    /// Adds tokens of a step. `finish` comes with the last token. Returns whether the reader has
    /// progress to take.
    pub fn push(&self, choice: usize, tokens: u32, finish: Option<Finish>) -> bool {
        let mut state = self.state.lock();
        let interval = state.interval;
        if let Some(slot) = state.choices.get_mut(choice) {
            slot.progress.tokens += tokens;
            slot.progress.finish = finish;
            slot.due |= !slot.begun || finish.is_some() || slot.progress.tokens >= interval;
            slot.begun = true;
            state.ready |= slot.due;
        }
        state.ready
    }

    /// Records the engine's times of the sequence that ends next.
    pub fn time(&self, timing: Timing) {
        self.state.lock().timing = Some(timing);
    }

    /// The engine's times, if they were recorded.
    pub fn timing(&self) -> Option<Timing> {
        self.state.lock().timing
    }

    pub(crate) fn end(&self, choice: usize, finish: Finish) {
        let mut state = self.state.lock();
        if let Some(slot) = state.choices.get_mut(choice) {
            slot.progress.finish = Some(finish);
            slot.due = true;
            state.ready = true;
        }
    }

    /// Breaks the response off, after the progress so far.
    pub fn fail(&self, broken: Broken) {
        self.state.lock().broken.get_or_insert(broken);
        self.wake();
    }

    /// Wakes the reader. Separate from [`OutputCollector::push`], so that a step's tokens for all
    /// choices leave together.
    pub fn wake(&self) {
        self.reader.wake();
    }

    /// Takes the progress of all choices into `into` (one entry each). If there is none, the caller
    /// is woken when there is some.
    ///
    /// # Errors
    /// Why the response failed, after all progress was taken.
    pub fn poll_take(&self, cx: &mut Context<'_>, into: &mut Vec<Progress>) -> Poll<Result<(), Broken>> {
        self.reader.register(cx.waker());
        let mut state = self.state.lock();
        if state.ready {
            state.ready = false;
            into.clear();
            into.extend(state.choices.iter_mut().map(|slot| match std::mem::take(&mut slot.due) {
                true => std::mem::take(&mut slot.progress),
                false => Progress::default(),
            }));
            return Poll::Ready(Ok(()));
        }
        state.broken.clone().map_or(Poll::Pending, |broken| Poll::Ready(Err(broken)))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn tokens_of_a_slow_reader_are_added_up() {
        let (collector, mut seen) = (OutputCollector::new(2, 1), Vec::new());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(collector.poll_take(&mut cx, &mut seen).is_pending());
        collector.push(1, 1, None);
        collector.push(1, 1, Some(Finish::Length));
        collector.fail(Broken::EngineDead);
        assert!(collector.poll_take(&mut cx, &mut seen).is_ready());
        assert_eq!(seen, [Progress::default(), Progress { tokens: 2, finish: Some(Finish::Length), cached: 0 }]);
        assert_eq!(collector.poll_take(&mut cx, &mut seen), Poll::Ready(Err(Broken::EngineDead)));
    }

    #[test]
    fn an_interval_shows_the_first_the_last_and_every_nth() {
        let (collector, mut seen, mut shown) = (OutputCollector::new(1, 3), Vec::new(), Vec::new());
        let mut cx = Context::from_waker(Waker::noop());
        for token in 1..=9 {
            collector.push(0, 1, (token == 9).then_some(Finish::Stop));
            if collector.poll_take(&mut cx, &mut seen).is_ready() {
                shown.push((token, seen[0].tokens));
            }
        }
        assert_eq!(shown, [(1, 1), (4, 3), (7, 3), (9, 2)]);
    }
}
