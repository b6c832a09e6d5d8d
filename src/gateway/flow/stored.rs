//! Requests for `/v1/responses/{id}`: they read, delete or cancel a stored response at the backend
//! that generated it.
//!
//! [`IdCapture`] reads the id from the first bytes of each response, for the table in
//! `response_owners.rs`. A request with an unknown id gets 404 and is sent to no engine: the
//! response was generated through another gateway, too long ago, or before this gateway started.
//!
//! Such a request generates nothing and needs no lease, but counts against the limits of the key.
//! It is sent once, on a new connection. vLLM stores responses only with
//! `VLLM_ENABLE_RESPONSES_API_STORE`; otherwise the client gets the engine's 404 (for DELETE: 405).

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::HeaderValue;
use tokio::time::{Instant, sleep, timeout};

use super::exchange::{ClientGone, Connection, Downstream, Exchange, ResponseHead, Upstream, UpstreamRequest};
use super::incoming::IncomingRequest;
use super::record::{Outcome, RecordGuard, Recorder, Stage, UpstreamFault};
use super::respond::{self, REQUEST_ID};
use super::response_owners::{self, ResponseOwner, ResponseOwners};
use crate::pool::Admission;
use sluice_core::openai::route::{is_response_id, stored_response};
use sluice_core::openai::{EditedBody, Refusal};

/// Bytes at the start of a response that are searched for the id. vLLM writes it within the first
/// hundred bytes.
const ID_WITHIN: usize = 4 << 10;

/// Wraps a client and remembers the id of the response before the client receives it.
pub(super) struct IdCapture<'a, D> {
    down: &'a mut D,
    owners: &'a ResponseOwners,
    key: Option<Arc<str>>,
    /// The owner, between the head of a success and the first bytes of the body.
    owner: Option<ResponseOwner>,
    /// The id, once the owner was remembered.
    id: Option<Arc<str>>,
}

impl<'a, D> IdCapture<'a, D> {
    pub(super) fn new(down: &'a mut D, owners: &'a ResponseOwners, key: Option<Arc<str>>) -> Self {
        Self { down, owners, key, owner: None, id: None }
    }

    /// Notes the number of tokens in the conversation, including this response.
    pub(super) fn note_tokens(&self, tokens: u64) {
        if let Some(id) = &self.id {
            self.owners.note_tokens(id, self.key.as_ref(), tokens);
        }
    }
}

impl<D: Downstream> Downstream for IdCapture<'_, D> {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        let name = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).map(Arc::from);
        if head.status.is_success()
            && let (Some(pool), Some(backend)) = (name(respond::POOL), name(respond::BACKEND))
        {
            self.owner = Some(ResponseOwner { key: self.key.clone(), pool, backend, tokens: 0 });
        }
        self.down.head(head).await
    }

    fn body(&mut self, bytes: Bytes, more: bool) -> impl Future<Output = Result<(), ClientGone>> + Send {
        if let Some(owner) = self.owner.take()
            && let Some(id) = response_id(&bytes)
        {
            self.owners.remember(id, owner, Instant::now());
            self.id = Some(id.into());
        }
        self.down.body(bytes, more)
    }

    fn finish(&mut self) -> impl Future<Output = Result<(), ClientGone>> + Send {
        self.down.finish()
    }

    fn abort(&mut self) {
        self.down.abort();
    }

    fn gone(&mut self) -> impl Future<Output = ()> + Send {
        self.down.gone()
    }
}

/// The id at the start of a response or of a first event.
fn response_id(bytes: &[u8]) -> Option<&str> {
    let near = &bytes[..bytes.len().min(ID_WITHIN)];
    let key = b"\"id\":\"";
    let rest = &near[memchr::memmem::find(near, key)? + key.len()..];
    let id = &rest[..memchr::memchr(b'"', rest)?];
    std::str::from_utf8(id).ok().filter(|id| is_response_id(id.as_bytes()))
}

/// Serves a request that names a stored response. An error is a refusal that has not been sent.
pub(super) async fn serve<U: Upstream, D: Downstream, R: Recorder>(
    owners: &ResponseOwners,
    admission: &Admission,
    upstream: &U,
    incoming: &mut IncomingRequest,
    down: &mut D,
    record: &mut RecordGuard<'_, R>,
) -> Result<(), Refusal> {
    let key = incoming.key.as_ref();
    record.key = key.map(|key| Arc::clone(key.name()));
    record.start_in_flight(super::prepare::start_request(key, incoming.arrived)?);
    let path = incoming.path.split('?').next().unwrap_or_default();
    let (id, _) = stored_response(path).ok_or(Refusal::UnknownRoute { hint: None })?;
    let unknown = || Refusal::UnknownResponse { id: id.to_owned() };
    let (owner, address) = response_owners::locate(owners, admission, id, key).ok_or_else(unknown)?;
    (record.pool, record.backend) = (Some(owner.pool), Some(owner.backend));
    let mut request = UpstreamRequest {
        method: incoming.method.clone(),
        path: std::mem::take(&mut incoming.path),
        headers: std::mem::take(&mut incoming.headers),
        body: EditedBody::default(),
        session: None,
        body_without_arm: None,
    };
    if let Ok(value) = HeaderValue::from_str(&incoming.upstream_id) {
        request.headers.insert(REQUEST_ID, value);
    }
    record.begin_attempt(1, &mut request.headers);
    let first_byte = incoming.routing.first_byte(false, 0);
    let started = async {
        let mut exchange = upstream.send(&address, &request, Connection::New).await.ok()?;
        let head = exchange.head().await.ok()?;
        Some((exchange, head))
    };
    let started = tokio::select! {
        biased;
        started = timeout(first_byte, started) => started,
        () = down.gone() => return Ok(()),
    };
    match started {
        Ok(Some((exchange, head))) => pass_on(exchange, head, incoming.routing.timeouts().idle, down, record).await,
        Ok(None) => {
            record.outcome = Outcome::UpstreamError(UpstreamFault::Broken);
            return Err(Refusal::UpstreamBroke);
        }
        Err(_) => {
            record.outcome = Outcome::Timeout(Stage::FirstByte);
            return Err(Refusal::UpstreamTimeout);
        }
    }
    Ok(())
}

/// Sends the engine's response to the client. It may be a stream with the events of a running
/// response.
async fn pass_on<X: Exchange, D: Downstream, R: Recorder>(
    mut exchange: X,
    mut head: ResponseHead,
    idle: Duration,
    down: &mut D,
    record: &mut RecordGuard<'_, R>,
) {
    respond::add_gateway_headers(&mut head.headers, record);
    let status = head.status;
    record.status = Some(status);
    record.outcome = match status {
        status if status.is_success() => Outcome::Completed,
        status if status.is_client_error() => Outcome::Refused,
        _ => Outcome::UpstreamError(UpstreamFault::Status),
    };
    match copy(&mut exchange, head, idle, down, record).await {
        Ok(()) if exchange.at_end() => exchange.keep_alive().await,
        Ok(()) => {}
        Err(outcome) => {
            record.outcome = outcome;
            down.abort();
        }
    }
}

/// Copies head and body. An error is the outcome of an incomplete response.
async fn copy<X: Exchange, D: Downstream, R: Recorder>(
    exchange: &mut X,
    head: ResponseHead,
    idle: Duration,
    down: &mut D,
    record: &mut RecordGuard<'_, R>,
) -> Result<(), Outcome> {
    let gone = |ClientGone| Outcome::ClientGone;
    down.head(head).await.map_err(gone)?;
    let mut chunk = BytesMut::new();
    loop {
        let more = {
            let mut silence = pin!(sleep(idle));
            tokio::select! {
                biased;
                read = exchange.body(&mut chunk) => read.map_err(|_| Outcome::UpstreamError(UpstreamFault::Broken))?,
                () = down.gone() => return Err(Outcome::ClientGone),
                () = &mut silence => return Err(Outcome::Timeout(Stage::Idle)),
            }
        };
        if !more || exchange.at_end() {
            record.end_in_flight();
        }
        if !more {
            return down.finish().await.map_err(gone);
        }
        down.body(chunk.split().freeze(), exchange.at_end()).await.map_err(gone)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_found_in_bodies_and_first_events() {
        assert_eq!(response_id(br#"{"id":"resp_1","created_at":5,"output":[{"id":"msg_2"}]}"#), Some("resp_1"));
        let event = b"event: response.created\ndata: {\"response\":{\"id\":\"resp_1\",\"created_at\":5}}\n\n";
        assert_eq!(response_id(event), Some("resp_1"));
        assert_eq!(response_id(br#"{"id":"../x"}"#), None);
        assert_eq!(response_id(br#"{"id":"cut off"#), None);
        assert_eq!(response_id(b"{}"), None);
    }
}
