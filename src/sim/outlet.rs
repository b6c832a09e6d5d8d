//! The way of tokens from the driver to one HTTP answer.
//!
//! A slot per choice, not a queue: tokens that the answer has not taken yet are added up, as vLLM's collector merges
//! outputs of a client that falls behind. So memory is bounded by the number of choices, the driver never waits, and
//! nothing is lost. One reader (the answer), one writer (the driver).

use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::wire::Finish;

/// What happened to a choice since the answer last looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Tokens generated since.
    pub(super) tokens: u32,
    /// Set when the last one was among them.
    pub(super) finish: Option<Finish>,
}

/// Why an answer will never be complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// The engine died, or was stopped with the server: the same to whoever waits.
    EngineDead,
    /// The engine refused the request when it got there.
    Refused(String),
}

#[derive(Debug, Default)]
struct State {
    choices: Vec<Progress>,
    ready: bool,
    broken: Option<Broken>,
    reader: Option<Waker>,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Outlet(Mutex<State>);

impl Outlet {
    /// An outlet for this many choices.
    pub(super) fn new(choices: usize) -> Self {
        Self(Mutex::new(State { choices: vec![Progress::default(); choices], ..State::default() }))
    }

    /// Adds one token to a choice.
    pub(super) fn push(&self, choice: usize, finish: Option<Finish>) {
        let mut state = self.0.lock();
        if let Some(slot) = state.choices.get_mut(choice) {
            slot.tokens += 1;
            slot.finish = finish;
            state.ready = true;
        }
    }

    /// Ends the answer early.
    pub(super) fn fail(&self, broken: Broken) {
        self.0.lock().broken.get_or_insert(broken);
        self.wake();
    }

    /// Wakes the answer; separate from [`Outlet::push`] so that a step's tokens for all choices leave together.
    pub(super) fn wake(&self) {
        let waker = self.0.lock().reader.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes what is new into `into` (one entry per choice), or registers the reader.
    pub(super) fn poll_take(&self, cx: &mut Context<'_>, into: &mut Vec<Progress>) -> Poll<Result<(), Broken>> {
        let mut state = self.0.lock();
        if state.ready {
            state.ready = false;
            into.clear();
            into.extend(state.choices.iter_mut().map(std::mem::take));
            return Poll::Ready(Ok(()));
        }
        if let Some(broken) = &state.broken {
            return Poll::Ready(Err(broken.clone()));
        }
        if !state.reader.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.reader = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_slow_reader_are_added_up() {
        let (outlet, mut seen) = (Outlet::new(2), Vec::new());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(outlet.poll_take(&mut cx, &mut seen).is_pending());
        outlet.push(1, None);
        outlet.push(1, Some(Finish::Length));
        outlet.fail(Broken::EngineDead);
        assert!(outlet.poll_take(&mut cx, &mut seen).is_ready());
        assert_eq!(seen, [Progress::default(), Progress { tokens: 2, finish: Some(Finish::Length) }]);
        assert_eq!(outlet.poll_take(&mut cx, &mut seen), Poll::Ready(Err(Broken::EngineDead)));
    }
}
