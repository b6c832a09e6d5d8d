//! Stored responses: which backend made which, and reading, deleting or cancelling them there.
//!
//! An engine keeps the responses of `/v1/responses` in the memory of its process, so `/v1/responses/{id}` must go to the
//! backend that made the response, and only for the key that it was made for. The ids are read from the first bytes of
//! responses as they pass ([`Watched`]). An id that is not known is refused (404) and asked of no engine: it was made
//! through another gateway, too long ago, or before this one started.
//!
//! Such a request generates nothing and waits for no capacity; it counts against its key's limits. It is sent once, on a new
//! connection. Whether the engine stores responses at all is its own matter (vLLM: `VLLM_ENABLE_RESPONSES_API_STORE`): if
//! not, the client gets the engine's 404, as it gets its 405 for a DELETE.
//!
//! Bounds: [`MAX_RESPONSES`] ids for [`LIFETIME`]; the oldest go first. The first key of an id keeps it.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::HeaderValue;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::exchange::{ClientGone, Connection, Downstream, Exchange, ResponseHead, Upstream, UpstreamRequest};
use super::incoming::IncomingRequest;
use super::record::{Outcome, RecordGuard, Recorder, Stage, UpstreamFault};
use super::respond::{self, REQUEST_ID};
use crate::pool::{Address, Admission};
use sluice_core::openai::route::{is_response_id, stored_response};
use sluice_core::openai::{EditedBody, Refusal};

/// Responses whose backend is remembered: about 200 bytes each.
pub(super) const MAX_RESPONSES: usize = 65_536;
/// How long it is remembered.
pub(super) const LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Bytes at the start of a response in which its id is looked for; vLLM's has it in the first hundred.
const ID_WITHIN: usize = 4 << 10;

/// Who made a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Maker {
    /// The name of the client's key, where keys are required.
    pub(super) key: Option<Arc<str>>,
    pub(super) pool: Arc<str>,
    pub(super) backend: Arc<str>,
}

/// The makers of responses, by id.
#[derive(Debug, Default)]
pub(super) struct MadeResponses {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    by_id: HashMap<Arc<str>, Maker>,
    /// Ids in the order in which they were first seen.
    by_age: VecDeque<(Instant, Arc<str>)>,
}

impl MadeResponses {
    fn remember(&self, id: &str, maker: Maker, now: Instant) {
        let mut table = self.table.lock();
        table.forget(now, MAX_RESPONSES - 1);
        match table.by_id.get_mut(id) {
            // An engine may use an id again, since clients can choose it; that does not make it another client's.
            Some(known) if known.key == maker.key => *known = maker,
            Some(_) => {}
            None => {
                let id: Arc<str> = id.into();
                table.by_age.push_back((now, Arc::clone(&id)));
                table.by_id.insert(id, maker);
            }
        }
    }

    fn find(&self, id: &str, key: Option<&Arc<str>>, now: Instant) -> Option<Maker> {
        let mut table = self.table.lock();
        table.forget(now, MAX_RESPONSES);
        table.by_id.get(id).filter(|maker| maker.key.as_ref() == key).cloned()
    }
}

impl Table {
    /// Removes what is too old, and the oldest beyond `most`.
    fn forget(&mut self, now: Instant, most: usize) {
        while let Some((since, _)) = self.by_age.front() {
            if self.by_age.len() <= most && now.saturating_duration_since(*since) < LIFETIME {
                return;
            }
            if let Some((_, id)) = self.by_age.pop_front() {
                self.by_id.remove(&id);
            }
        }
    }
}

/// A client whose response is searched for its id, which is remembered before the client can know it.
pub(super) struct Watched<'a, D> {
    down: &'a mut D,
    made: &'a MadeResponses,
    key: Option<Arc<str>>,
    /// Set between the head of a success and the first bytes of its body.
    maker: Option<Maker>,
}

impl<'a, D> Watched<'a, D> {
    pub(super) fn new(down: &'a mut D, made: &'a MadeResponses, key: Option<Arc<str>>) -> Self {
        Self { down, made, key, maker: None }
    }
}

impl<D: Downstream> Downstream for Watched<'_, D> {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        let name = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).map(Arc::from);
        if head.status.is_success()
            && let (Some(pool), Some(backend)) = (name(respond::POOL), name(respond::BACKEND))
        {
            self.maker = Some(Maker { key: self.key.take(), pool, backend });
        }
        self.down.head(head).await
    }

    fn body(&mut self, bytes: Bytes, last: bool) -> impl Future<Output = Result<(), ClientGone>> + Send {
        if let Some(maker) = self.maker.take()
            && let Some(id) = response_id(&bytes)
        {
            self.made.remember(id, maker, Instant::now());
        }
        self.down.body(bytes, last)
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

/// The id at the start of a response or of its first event.
fn response_id(bytes: &[u8]) -> Option<&str> {
    let near = &bytes[..bytes.len().min(ID_WITHIN)];
    let key = b"\"id\":\"";
    let rest = &near[memchr::memmem::find(near, key)? + key.len()..];
    let id = &rest[..memchr::memchr(b'"', rest)?];
    std::str::from_utf8(id).ok().filter(|id| is_response_id(id.as_bytes()))
}

/// Serves a request that names a stored response; an error is a refusal that has not been sent.
pub(super) async fn serve<U: Upstream, D: Downstream, R: Recorder>(
    made: &MadeResponses,
    admission: &Admission,
    upstream: &U,
    incoming: &mut IncomingRequest,
    down: &mut D,
    record: &mut RecordGuard<'_, R>,
) -> Result<(), Refusal> {
    let key = incoming.key.as_ref();
    record.key = key.map(|key| Arc::clone(key.name()));
    let _in_flight = super::prepare::start_request(key, incoming.arrived)?;
    let path = incoming.path.split('?').next().unwrap_or_default();
    let (id, _) = stored_response(path).ok_or(Refusal::UnknownRoute)?;
    let unknown = || Refusal::UnknownResponse { id: id.to_owned() };
    let maker = made.find(id, record.key.as_ref(), Instant::now()).ok_or_else(unknown)?;
    let address = address_of(admission, &maker).ok_or_else(unknown)?;
    (record.pool, record.backend) = (Some(maker.pool), Some(maker.backend));
    let mut request = UpstreamRequest {
        method: incoming.method.clone(),
        path: std::mem::take(&mut incoming.path),
        headers: std::mem::take(&mut incoming.headers),
        body: EditedBody::default(),
    };
    if let Ok(value) = HeaderValue::from_str(&incoming.upstream_id) {
        request.headers.insert(REQUEST_ID, value);
    }
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

/// Where the maker is reached; `None` when it is no longer configured.
fn address_of(admission: &Admission, maker: &Maker) -> Option<Arc<Address>> {
    let pools = admission.view();
    let pool = pools.iter().find(|pool| pool.name == maker.pool)?;
    let backend = pool.backends.iter().find(|backend| backend.name == maker.backend && !backend.removed)?;
    Some(Arc::clone(&backend.address))
}

/// Sends the engine's response to the client. It may be a stream of the events of a running response.
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
    match copy(&mut exchange, head, idle, down).await {
        Ok(()) if exchange.at_end() => exchange.keep_alive().await,
        Ok(()) => {}
        Err(outcome) => {
            record.outcome = outcome;
            down.abort();
        }
    }
}

/// Copies head and body; an error is the outcome of a response that was cut.
async fn copy<X: Exchange, D: Downstream>(
    exchange: &mut X,
    head: ResponseHead,
    idle: Duration,
    down: &mut D,
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
        if !more {
            return down.finish().await.map_err(gone);
        }
        down.body(chunk.split().freeze(), exchange.at_end()).await.map_err(gone)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maker(key: &str, backend: &str) -> Maker {
        Maker { key: Some(key.into()), pool: "p".into(), backend: backend.into() }
    }

    fn found(made: &MadeResponses, id: &str, key: &str, now: Instant) -> Option<Arc<str>> {
        made.find(id, Some(&key.into()), now).map(|maker| maker.backend)
    }

    #[test]
    fn only_the_key_that_made_a_response_finds_it_and_keeps_it() {
        let (made, now) = (MadeResponses::default(), Instant::now());
        made.remember("r", maker("mine", "b0"), now);
        made.remember("r", maker("theirs", "b1"), now);
        assert_eq!(found(&made, "r", "mine", now).as_deref(), Some("b0"));
        assert_eq!(found(&made, "r", "theirs", now), None);
        assert_eq!(made.find("r", None, now), None);
        made.remember("r", maker("mine", "b1"), now);
        assert_eq!(found(&made, "r", "mine", now).as_deref(), Some("b1"));
    }

    #[test]
    fn responses_are_forgotten_after_their_lifetime_and_the_oldest_beyond_the_bound() {
        let (made, now) = (MadeResponses::default(), Instant::now());
        for number in 0..=MAX_RESPONSES {
            made.remember(&format!("r{number}"), maker("k", "b"), now);
        }
        assert_eq!(found(&made, "r0", "k", now), None);
        assert!(found(&made, "r1", "k", now).is_some());
        assert_eq!(made.table.lock().by_id.len(), MAX_RESPONSES);
        assert_eq!(found(&made, "r1", "k", now + LIFETIME), None);
        assert_eq!(made.table.lock().by_id.len(), 0);
    }

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
