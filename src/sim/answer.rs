//! Answers under way: takes tokens from an outlet and turns them into SSE events or one body.
//!
//! Dropping an answer before its end aborts its sequences in the engine: hyper drops the body of a connection that
//! the client closed, streamed or not, which is the only signal that HTTP/1.1 has.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame};

use super::driver::{Command, Shared};
use super::engine::SequenceId;
use super::outlet::{Broken, Outlet, Progress};
use super::text;
use super::wire::{Envelope, ErrorBody, Finish, Usage};

/// Aborts its sequences when it is dropped before they ended.
#[derive(Debug)]
struct Abort {
    shared: Arc<Shared>,
    ids: Vec<SequenceId>,
}

impl Drop for Abort {
    fn drop(&mut self) {
        self.shared.load.fetch_sub(1, Ordering::Relaxed);
        if !self.ids.is_empty() {
            self.shared.send(Command::Abort(std::mem::take(&mut self.ids)));
        }
    }
}

/// A choice of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    /// Seed of its words.
    pub(super) seed: u64,
    /// Tokens of its prompt.
    pub(super) prompt: u32,
    /// Tokens shown so far.
    shown: u32,
    opened: bool,
    finish: Option<Finish>,
}

impl Choice {
    pub(super) fn new(seed: u64, prompt: u32) -> Self {
        Self { seed, prompt, shown: 0, opened: false, finish: None }
    }

    /// The text of the next `progress.tokens` tokens.
    fn advance(&mut self, progress: Progress, into: &mut String) {
        for position in self.shown..self.shown + progress.tokens {
            let last = position + 1 == self.shown + progress.tokens;
            if !(last && progress.finish == Some(Finish::Stop)) {
                into.push_str(text::word(self.seed, position));
            }
        }
        self.shown += progress.tokens;
        self.finish = self.finish.or(progress.finish);
    }
}

/// An answer under way.
#[derive(Debug)]
pub(super) struct Answer {
    abort: Abort,
    outlet: Arc<Outlet>,
    envelope: Envelope,
    choices: Vec<Choice>,
    /// Tokens of all distinct prompts.
    prompt_tokens: u64,
    news: Vec<Progress>,
    ended: bool,
}

impl Answer {
    pub(super) fn new(
        shared: Arc<Shared>,
        outlet: Arc<Outlet>,
        envelope: Envelope,
        ids: Vec<SequenceId>,
        choices: Vec<Choice>,
        prompt_tokens: u64,
    ) -> Self {
        shared.load.fetch_add(1, Ordering::Relaxed);
        let abort = Abort { shared, ids };
        Self { abort, outlet, envelope, choices, prompt_tokens, news: Vec::new(), ended: false }
    }

    fn usage(&self) -> Usage {
        let completion = self.choices.iter().map(|choice| u64::from(choice.shown)).sum();
        Usage { prompt: self.prompt_tokens, completion }
    }

    fn is_complete(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    /// Renders what is new as events.
    fn render(&mut self) -> String {
        let mut out = String::new();
        let mut text = String::new();
        for (index, (choice, news)) in self.choices.iter_mut().zip(&self.news).enumerate() {
            if news.tokens == 0 {
                continue;
            }
            let prompt = u64::from(choice.prompt);
            if !std::mem::replace(&mut choice.opened, true) {
                self.envelope.role(&mut out, index, Usage { prompt, completion: 0 });
            }
            text.clear();
            choice.advance(*news, &mut text);
            let usage = Usage { prompt, completion: u64::from(choice.shown) };
            self.envelope.content(&mut out, index, &text, news.finish, usage);
        }
        if self.is_complete() {
            self.envelope.end(&mut out, self.usage());
            self.abort.ids.clear();
            self.ended = true;
        }
        out
    }

    /// Waits for the whole answer.
    ///
    /// # Errors
    /// When it breaks on the way.
    pub(super) async fn complete(mut self) -> Result<String, Broken> {
        let mut texts = vec![String::new(); self.choices.len()];
        while !self.is_complete() {
            std::future::poll_fn(|cx| self.outlet.poll_take(cx, &mut self.news)).await?;
            for ((choice, news), text) in self.choices.iter_mut().zip(&self.news).zip(&mut texts) {
                choice.advance(*news, text);
            }
        }
        self.abort.ids.clear();
        let finishes = self.choices.iter().map(|choice| choice.finish.unwrap_or(Finish::Length));
        let choices: Vec<_> = texts.into_iter().zip(finishes).collect();
        Ok(self.envelope.body(&choices, self.usage()))
    }
}

/// A connection that is cut on purpose.
#[derive(Debug, thiserror::Error)]
#[error("the simulated server cuts this stream")]
pub(super) struct Cut;

impl Body for Answer {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let this = &mut *self;
        let cut_at = this.abort.shared.reset_after.load(Ordering::Relaxed);
        if cut_at > 0 && this.choices.iter().any(|choice| choice.shown >= cut_at) {
            return Poll::Ready(Some(Err(Cut)));
        }
        let bytes = match this.outlet.poll_take(cx, &mut this.news) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(())) if this.abort.shared.garbage.load(Ordering::Relaxed) => {
                for (choice, news) in this.choices.iter_mut().zip(&this.news) {
                    choice.advance(*news, &mut String::new());
                }
                this.ended = this.is_complete();
                "data: {\"choices\":[{\"delta\u{0}\u{fffd}}\n\nevent\n:data\n\n".to_owned()
            }
            Poll::Ready(Ok(())) => this.render(),
            Poll::Ready(Err(broken)) => {
                this.ended = true;
                this.abort.ids.clear();
                broken_body(&broken).event()
            }
        };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(bytes)))))
    }
}

/// What the client is told when an answer breaks.
pub(super) fn broken_body(broken: &Broken) -> ErrorBody {
    match broken {
        Broken::EngineDead => ErrorBody::dead(),
        Broken::Refused(message) => ErrorBody::bad_request(None, message.clone()),
    }
}
