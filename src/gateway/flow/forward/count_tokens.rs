//! Counts tokens before another engine continues an answer, so that limits and usage count the
//! whole. The gateway asks the engine that continues the answer (`/tokenize`) to count:
//!
//! - The prompt as the client sent it, if the client requested usage: an engine reports the
//!   prompt's tokens at the end of a stream, so the number is lost with an engine that fails. The
//!   prompt that the next engine counts includes the text so far, which may have another number of
//!   tokens in a prompt than in an answer.
//! - The text so far, if the engine did not count it: a busy engine puts several tokens into an
//!   event. The count is used if it is larger than the number of events.
//! - The text so far, if there are stop strings: the count of the engine that failed includes text
//!   that it held back, and the next engine generates this text again.
//!
//! If `/tokenize` does not answer, the numbers are estimates: the prompt of the continuation less
//! the tokens so far, and one token for each event. Bounds: [`TIMEOUT`] of additional pause,
//! [`ANSWER_MAX`] bytes of an answer.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::Method;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::Attempts;
use super::go_on::End;
use crate::flow::continuation::{self, Answer, Identity, Next};
use crate::flow::exchange::{Connection, Exchange, Upstream, UpstreamRequest};
use crate::pool::Lease;
use sluice_config::Address;
use sluice_core::meter::StreamMeter;
use sluice_core::openai::scan::{ScanError, Scanner};

const TIMEOUT: Duration = Duration::from_secs(1);
/// vLLM's answer also lists every token, in about eight bytes.
const ANSWER_MAX: usize = 8 << 20;
/// Members of a chat that change its prompt, and that `/tokenize` does not read.
const UNREAD: [&[u8]; 2] = [b"documents", b"reasoning_effort"];

#[derive(Deserialize)]
struct Tokenized {
    count: u64,
}

/// An answer whose tokens must be counted.
struct Text {
    answer: Answer,
    identity: Identity,
    has_stop: bool,
}

#[derive(serde::Serialize)]
struct ToTokenize<'a> {
    model: &'a RawValue,
    prompt: &'a str,
    add_special_tokens: bool,
}

impl<U: Upstream> Attempts<'_, U> {
    /// Asks the engine that continues the answer to count the tokens of the prompt and of the
    /// answer so far, each only if the count is needed and not known. Returns the end of the answer
    /// if its text has reached `max_tokens`.
    pub(super) async fn count_tokens(&mut self, on: &Lease) -> Option<End> {
        let prompt = self.uncounted_prompt();
        let text = self.uncounted_text();
        let headers = &self.request.headers;
        let upstream = self.backends.upstream;
        let count = async |body: Option<Bytes>| {
            let request = UpstreamRequest {
                method: Method::POST,
                path: "/tokenize".to_owned(),
                headers: headers.clone(),
                body: body?.into(),
                session: None,
                body_without_arm: None,
            };
            timeout(TIMEOUT, count(upstream, on.address(), &request)).await.ok()?
        };
        let body = text.as_ref().and_then(|Text { answer, identity, .. }| to_tokenize(answer, identity));
        let (prompt, tokens) = tokio::join!(count(prompt), count(body));
        let (seam, first) = (self.seam.as_mut()?, self.first.as_mut()?);
        if let Some(prompt) = prompt {
            first.prompt = Some(prompt);
            seam.set_prompt(prompt);
        }
        let Text { mut answer, identity, has_stop } = text?;
        answer.tokens = tokens.filter(|tokens| has_stop || *tokens > answer.tokens)?;
        match continuation::next(self.incoming.route, &first.body.to_bytes(), &answer).ok()? {
            Next::Send(body) => {
                seam.set_spent(&answer);
                self.request.body = body;
                None
            }
            Next::AtLimit(limit) => {
                let prompt = self.unfinished.as_ref()?.meter()?.prompt_tokens().or(first.prompt);
                Some(self.complete(true, self.usage(|| prompt.map(|prompt| (prompt, limit))), &identity))
            }
        }
    }

    /// The request, if its prompt must be counted.
    fn uncounted_prompt(&self) -> Option<Bytes> {
        let is_known = self.seam.as_ref()?.prompt().is_some();
        let body = self.first.as_ref().filter(|_| self.prepared.include_usage && !is_known)?.body.to_bytes();
        is_read_alike(&body).unwrap_or(false).then_some(body)
    }

    /// The answer, if its tokens must be counted.
    fn uncounted_text(&self) -> Option<Text> {
        let route = self.incoming.route;
        let has_stop = continuation::has_stop(route, &self.first.as_ref()?.body.to_bytes());
        let is_known = |meter: &&StreamMeter| meter.has_counted_text() && !has_stop;
        let meter = self.unfinished.as_ref()?.meter().filter(|meter| !is_known(meter))?;
        let answer = Answer::of(meter.kept()?, meter.text_tokens(), route).ok()?;
        let identity = Identity::of(meter.kept()?, route, meter.have_choices_begun()).ok()?;
        (!answer.text.is_empty()).then_some(Text { answer, identity, has_stop })
    }
}

fn to_tokenize(answer: &Answer, identity: &Identity) -> Option<Bytes> {
    let model = serde_json::from_str(identity.model()).ok()?;
    let request = ToTokenize { model, prompt: &answer.text, add_special_tokens: false };
    serde_json::to_vec(&request).ok().map(Bytes::from)
}

/// Whether `/tokenize` reads the same prompt in the body as the route to which the client sent the
/// body.
fn is_read_alike(body: &[u8]) -> Result<bool, ScanError> {
    let mut is_alike = true;
    Scanner::new(body).object(|scanner, key| {
        is_alike &= !UNREAD.contains(&&*key.bytes());
        scanner.skip().map(drop)
    })?;
    Ok(is_alike)
}

async fn count<U: Upstream>(upstream: &U, to: &Address, request: &UpstreamRequest) -> Option<u64> {
    let mut exchange = upstream.send(to, request, Connection::New).await.ok()?;
    let head = exchange.head().await.ok()?;
    let mut answer = BytesMut::new();
    while head.status.is_success() && exchange.body(&mut answer).await.ok()? {
        if answer.len() > ANSWER_MAX {
            return None;
        }
    }
    let tokenized: Tokenized = serde_json::from_slice(&answer).ok()?;
    exchange.keep_alive().await;
    Some(tokenized.count)
}
