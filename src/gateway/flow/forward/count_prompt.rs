//! Counts the tokens of the prompt as the client sent it, for the usage of a continued answer.
//!
//! An engine reports the prompt's tokens at the end of a stream, so an engine that fails takes the
//! number with it. The prompt that the next engine reports has the text so far in it, and this text
//! may be other tokens as a part of a prompt than it was as an answer. So the next engine is asked
//! (`/tokenize`) before it continues an answer whose usage the client requested.
//!
//! Without an answer the number is an estimate: the second prompt less the tokens so far. Bounds:
//! [`TIMEOUT`] of additional pause, [`ANSWER_MAX`] bytes of an answer.

use std::time::Duration;

use bytes::BytesMut;
use http::Method;
use serde::Deserialize;
use tokio::time::timeout;

use super::Attempts;
use crate::flow::exchange::{Connection, Exchange, Upstream, UpstreamRequest};
use crate::pool::Lease;
use sluice_config::Address;
use sluice_core::openai::scan::{ScanError, Scanner};

const TIMEOUT: Duration = Duration::from_secs(1);
/// vLLM lists every token behind the count: some eight bytes for each.
const ANSWER_MAX: usize = 8 << 20;
/// Members of a chat that change its prompt, and that `/tokenize` does not read.
const UNREAD: [&[u8]; 2] = [b"documents", b"reasoning_effort"];

#[derive(Deserialize)]
struct Tokenized {
    count: u64,
}

impl<U: Upstream> Attempts<'_, U> {
    /// Asks the engine that continues the answer, if the client needs the number and it is unknown.
    pub(super) async fn count_prompt(&mut self, on: &Lease) {
        let (Some(seam), Some(first)) = (&mut self.seam, &mut self.first) else { return };
        if !self.prepared.include_usage || seam.prompt().is_some() {
            return;
        }
        let body = first.body.to_bytes();
        if !is_read_alike(&body).unwrap_or(false) {
            return;
        }
        let request = UpstreamRequest {
            method: Method::POST,
            path: "/tokenize".to_owned(),
            headers: self.request.headers.clone(),
            body: body.into(),
            body_without_arm: None,
        };
        let counted = timeout(TIMEOUT, count(self.backends.upstream, on.address(), &request)).await;
        if let Ok(Some(count)) = counted {
            first.prompt = Some(count);
            seam.set_prompt(count);
        }
    }
}

/// Whether `/tokenize` reads the same prompt in the body as the route that it was sent to.
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
