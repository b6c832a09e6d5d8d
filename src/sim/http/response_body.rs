//! The body of a generating response: takes tokens from a collector and writes SSE events or one
//! JSON body.
//!
//! Dropping the body early aborts the sequences. hyper drops it when the client closes the
//! connection, which is how HTTP/1.1 cancels a request. A stream without new tokens gets keep-alive
//! comments if configured.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame};
use tokio::time::Sleep;

use crate::engine::SequenceId;
use crate::http::choice::Choice;
use crate::http::error_body::ErrorBody;
use crate::http::response_writer::ResponseWriter;
use crate::http::wire::{Finish, UsageCounts};
use crate::real_time::command::Command;
use crate::real_time::output_collector::{Broken, OutputCollector, Progress};
use crate::real_time::rank::Rank;
use crate::real_time::state::ServerState;

/// Aborts the sequences when it is dropped before they ended.
#[derive(Debug)]
struct Abort {
    shared: Arc<ServerState>,
    rank: Arc<Rank>,
    ids: Vec<SequenceId>,
}

impl Drop for Abort {
    fn drop(&mut self) {
        self.shared.load.fetch_sub(1, Ordering::Relaxed);
        if !self.ids.is_empty() {
            self.rank.send(Command::Abort(std::mem::take(&mut self.ids)));
        }
    }
}

#[derive(Debug)]
pub(crate) struct ResponseBody {
    abort: Abort,
    collector: Arc<OutputCollector>,
    format: ResponseWriter,
    choices: Vec<Choice>,
    /// Tokens of all prompts. A prompt with several choices counts once.
    prompt_tokens: u64,
    news: Vec<Progress>,
    keep_alive: Option<(Duration, Pin<Box<Sleep>>)>,
    ended: bool,
    /// Whether the connection must be closed once the bytes written so far are sent.
    breaking_off: bool,
}

impl ResponseBody {
    pub(crate) fn new(
        (shared, rank): (Arc<ServerState>, Arc<Rank>),
        collector: Arc<OutputCollector>,
        format: ResponseWriter,
        ids: Vec<SequenceId>,
        choices: Vec<Choice>,
        prompt_tokens: u64,
    ) -> Self {
        shared.load.fetch_add(1, Ordering::Relaxed);
        let every = shared.config.keep_alive.map(|every| every.div_f64(shared.config.speed));
        let abort = Abort { shared, rank, ids };
        let keep_alive = every.map(|every| (every, Box::pin(tokio::time::sleep(every))));
        Self {
            abort,
            collector,
            format,
            choices,
            prompt_tokens,
            news: Vec::new(),
            keep_alive,
            ended: false,
            breaking_off: false,
        }
    }

    fn usage(&self) -> UsageCounts {
        let completion = self.choices.iter().map(|choice| u64::from(choice.tokens())).sum();
        let cached = self.choices.first().map_or(0, |choice| u64::from(choice.cached()));
        let cached = (self.abort.shared.config.prompt_details && cached > 0).then_some(cached);
        // vLLM shows times of requests with one choice only.
        let timing = if self.choices.len() == 1 { self.collector.timing() } else { None };
        UsageCounts { prompt: self.prompt_tokens, completion, cached, timing }
    }

    fn is_complete(&self) -> bool {
        self.choices.iter().all(Choice::is_complete)
    }

    fn render(&mut self) -> String {
        let mut out = String::new();
        for (index, (choice, news)) in self.choices.iter_mut().zip(&self.news).enumerate() {
            if news.tokens == 0 && news.finish.is_none() {
                continue;
            }
            let prompt = u64::from(choice.prompt_tokens());
            if choice.open() {
                self.format.open(&mut out, index, choice, UsageCounts { prompt, ..UsageCounts::default() });
            }
            let piece = choice.advance(*news, true);
            let usage = UsageCounts { prompt, completion: u64::from(choice.tokens()), ..UsageCounts::default() };
            self.format.content(&mut out, index, &piece, usage);
        }
        if self.is_complete() {
            let usage = self.usage();
            let finish = self.choices.first().and_then(Choice::finish);
            self.format.end(&mut out, usage, finish.unwrap_or(Finish::Length));
            self.abort.ids.clear();
            self.ended = true;
        }
        out
    }

    pub(crate) async fn complete(mut self) -> Result<String, Broken> {
        while !self.is_complete() {
            std::future::poll_fn(|cx| self.collector.poll_take(cx, &mut self.news)).await?;
            for (choice, news) in self.choices.iter_mut().zip(&self.news) {
                choice.record(*news);
            }
        }
        self.abort.ids.clear();
        let usage = self.usage();
        let choices: Vec<_> = self.choices.iter_mut().map(Choice::whole).collect();
        Ok(self.format.body(&choices, usage))
    }

    /// A comment, if nothing was sent for the keep-alive interval.
    fn poll_keep_alive(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        let Some((every, sleep)) = &mut self.keep_alive else { return Poll::Pending };
        if sleep.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        sleep.as_mut().reset(tokio::time::Instant::now() + *every);
        Poll::Ready(Bytes::from_static(b": keep-alive\n\n"))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the simulated server breaks off this stream")]
pub(crate) struct Disconnect;

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Disconnect;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Disconnect>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let this = &mut *self;
        let break_off_at = this.abort.shared.reset_after.load(Ordering::Relaxed);
        if break_off_at > 0 && this.choices.iter().any(|choice| choice.tokens() >= break_off_at) {
            if std::mem::replace(&mut this.breaking_off, true) {
                return Poll::Ready(Some(Err(Disconnect)));
            }
            // hyper flushes its buffer only if the body is pending. The body is polled again at
            // once.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let bytes = match this.collector.poll_take(cx, &mut this.news) {
            Poll::Pending => return this.poll_keep_alive(cx).map(|comment| Some(Ok(Frame::data(comment)))),
            Poll::Ready(Ok(())) if this.abort.shared.garbage.load(Ordering::Relaxed) => {
                for (choice, news) in this.choices.iter_mut().zip(&this.news) {
                    choice.record(*news);
                }
                this.ended = this.is_complete();
                "data: {\"choices\":[{\"delta\u{0}\u{fffd}}\n\nevent\n:data\n\n".to_owned()
            }
            Poll::Ready(Ok(())) => this.render(),
            Poll::Ready(Err(broken)) => {
                this.ended = true;
                this.abort.ids.clear();
                this.format.error(&broken_body(&broken))
            }
        };
        if let Some((every, sleep)) = &mut this.keep_alive {
            sleep.as_mut().reset(tokio::time::Instant::now() + *every);
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(bytes)))))
    }
}

pub(crate) fn broken_body(broken: &Broken) -> ErrorBody {
    match broken {
        Broken::EngineDead => ErrorBody::dead(),
        Broken::Refused(message) => ErrorBody::bad_request(None, message.clone()),
    }
}
