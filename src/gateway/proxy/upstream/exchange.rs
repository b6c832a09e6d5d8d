//! One request and its answer on one of pingora's connections.
//!
//! Sending: head and body leave in as few writes as the socket takes; a body of up to [`INLINE_BODY`] is put behind the
//! head and both are one write, a longer prompt goes out from where it was received.
//! Receiving: everything that has arrived is taken at once and nothing is waited for. The read buffer is as large as
//! what came last, from [`READ_MIN`] to [`READ_MAX`]: 5,000 streams that wait for one token each hold little.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use pingora::connectors::TransportConnector;
use pingora::protocols::Stream;
use pingora::upstreams::peer::{HttpPeer, Peer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::headers;
use super::connected::Connected;
use super::wire::{Framing, WireError, take_head};
use crate::config::limits;
use crate::flow::{Exchange, ExchangeError, ResponseHead, UpstreamRequest};
use crate::pool::Address;

/// The least that is read at once: more than any event of one token.
const READ_MIN: usize = 1 << 10;
/// The most that is read at once.
const READ_MAX: usize = 64 << 10;
/// Interim answers (100 Continue and the like) before one answer: engines send at most one; a read that never waits
/// would also keep every timer of its task from being looked at.
const INTERIM_MAX: u32 = 64;
/// The most that is gathered into one write to the client.
const COALESCE_MAX: usize = 256 << 10;
/// Pieces of a body up to this size are copied behind what goes before them, so that both are one write.
const INLINE_BODY: usize = 64 << 10;

/// One request and its answer.
pub struct EngineExchange {
    stream: Stream,
    peer: Arc<HttpPeer>,
    connector: Arc<TransportConnector>,
    reused: bool,
    connect_time: Duration,
    /// Read and not yet understood.
    input: BytesMut,
    read_size: usize,
    framing: Framing,
    keepalive: bool,
    /// Interim answers so far.
    interim: u32,
    /// The connection has ended, or broke; said once what was read before has been passed on.
    ended: Option<ExchangeError>,
}

impl EngineExchange {
    pub(super) fn new(connected: Connected, connector: Arc<TransportConnector>, connect_time: Duration) -> Self {
        let Connected { peer, stream, reused } = connected;
        Self {
            stream,
            peer,
            connector,
            reused,
            connect_time,
            input: BytesMut::new(),
            read_size: READ_MIN,
            framing: Framing::UntilClose,
            keepalive: false,
            interim: 0,
            ended: None,
        }
    }

    /// Sends the whole request.
    pub(super) async fn write(&mut self, to: &Address, call: &UpstreamRequest) -> Result<(), ExchangeError> {
        let closed = |error: std::io::Error| ExchangeError::Closed(error.to_string());
        let mut gathered = request_head(to, call);
        for piece in call.body.pieces() {
            if piece.len() <= INLINE_BODY {
                gathered.extend_from_slice(piece);
                continue;
            }
            self.stream.write_all(&gathered).await.map_err(closed)?;
            gathered.clear();
            self.stream.write_all(piece).await.map_err(closed)?;
        }
        self.stream.write_all(&gathered).await.map_err(closed)?;
        self.stream.flush().await.map_err(closed)
    }

    /// Waits for bytes; false at the end of the connection.
    async fn fill(&mut self) -> Result<bool, ExchangeError> {
        if self.input.is_empty() && self.input.capacity() > READ_MAX {
            // A buffer that a burst has blown up is let go.
            self.input = BytesMut::new();
        }
        self.input.reserve(self.read_size);
        match self.stream.read_buf(&mut self.input).await {
            Ok(count) => {
                self.adapt(count);
                Ok(count > 0)
            }
            Err(error) => Err(ExchangeError::Closed(error.to_string())),
        }
    }

    /// Takes bytes that are there already; false when there are none, or no more will come.
    async fn fill_ready(&mut self) -> bool {
        self.input.reserve(self.read_size);
        let (stream, input) = (&mut self.stream, &mut self.input);
        let ready = poll_fn(|cx| {
            let mut reading = pin!(stream.read_buf(input));
            Poll::Ready(match reading.as_mut().poll(cx) {
                Poll::Pending => None,
                Poll::Ready(read) => Some(read),
            })
        });
        match ready.await {
            None => false,
            Some(Ok(0)) => {
                self.ended = Some(ExchangeError::Closed("connection ended".to_owned()));
                false
            }
            Some(Ok(count)) => {
                self.adapt(count);
                true
            }
            Some(Err(error)) => {
                self.ended = Some(ExchangeError::Closed(error.to_string()));
                false
            }
        }
    }

    /// The next read is as large as this one made use of.
    fn adapt(&mut self, count: usize) {
        self.read_size = if count >= self.read_size {
            (self.read_size * 4).min(READ_MAX)
        } else {
            count.next_power_of_two().clamp(READ_MIN, self.read_size)
        };
    }

    /// The last read took all there was room for: there may be more.
    fn may_have_more(&self) -> bool {
        self.input.capacity() == self.input.len()
    }

    fn decode(&mut self, into: &mut BytesMut) -> Result<(), ExchangeError> {
        self.framing.decode(&mut self.input, into).map_err(malformed)
    }

    /// The connection has ended where the framing did not expect it, or just there.
    fn connection_ended(&mut self, broken: ExchangeError) -> Result<bool, ExchangeError> {
        match self.framing {
            Framing::UntilClose => {
                self.framing = Framing::Done;
                Ok(false)
            }
            _ => Err(broken),
        }
    }
}

fn malformed(error: WireError) -> ExchangeError {
    ExchangeError::Malformed(error.to_string())
}

/// The head as it goes over the wire. Values come from parsed headers and from the configuration, so they hold no line ends.
fn request_head(to: &Address, call: &UpstreamRequest) -> BytesMut {
    let inline = if call.body.len() <= INLINE_BODY { call.body.len() } else { 0 };
    let mut head = BytesMut::with_capacity(512 + call.path.len() + inline);
    for part in ["POST ", &to.endpoint.prefix, &call.path, " HTTP/1.1\r\nhost: ", &to.authority, "\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    let own_key = to.api_key.as_ref();
    for (name, value) in &call.headers {
        if own_key.is_some() && name == http::header::AUTHORIZATION {
            continue;
        }
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    if let Some(key) = own_key {
        for part in ["authorization: Bearer ", key.expose(), "\r\n"] {
            head.extend_from_slice(part.as_bytes());
        }
    }
    head.extend_from_slice(b"content-length: ");
    head.put_slice(call.body.len().to_string().as_bytes());
    head.extend_from_slice(b"\r\n\r\n");
    head
}

impl Exchange for EngineExchange {
    fn reused(&self) -> bool {
        self.reused
    }

    fn connect_time(&self) -> Duration {
        self.connect_time
    }

    async fn head(&mut self) -> Result<ResponseHead, ExchangeError> {
        loop {
            while let Some(head) = take_head(&mut self.input).map_err(malformed)? {
                if head.status == http::StatusCode::SWITCHING_PROTOCOLS {
                    return Err(ExchangeError::Malformed("the engine switched protocols".to_owned()));
                }
                // 100 Continue and the like are between the engine and us.
                if !head.status.is_informational() {
                    (self.framing, self.keepalive) = (head.framing, head.keepalive);
                    let mut map = head.headers;
                    headers::remove_hop_by_hop(&mut map);
                    return Ok(ResponseHead { status: head.status, headers: map });
                }
                self.interim += 1;
                if self.interim > INTERIM_MAX {
                    return Err(ExchangeError::Malformed(format!("more than {INTERIM_MAX} interim answers")));
                }
            }
            if !self.fill().await? {
                return Err(ExchangeError::Closed("connection ended before an answer".to_owned()));
            }
        }
    }

    async fn body(&mut self, into: &mut BytesMut) -> Result<bool, ExchangeError> {
        let before = into.len();
        loop {
            self.decode(into)?;
            if self.framing == Framing::Done || into.len() > before {
                break;
            }
            if let Some(broken) = self.ended.take() {
                return self.connection_ended(broken);
            }
            if !self.fill().await? {
                return self.connection_ended(ExchangeError::Closed("connection ended inside an answer".to_owned()));
            }
        }
        while self.framing != Framing::Done
            && self.ended.is_none()
            && into.len() < COALESCE_MAX
            && self.may_have_more()
            && self.fill_ready().await
        {
            // What was gathered before a broken chunk still goes to the client; the next call says what is wrong.
            if let Err(broken) = self.decode(into) {
                self.ended = Some(broken);
                self.framing = Framing::Length(u64::MAX);
                // Nothing behind it can be understood.
                self.input.clear();
            }
        }
        Ok(into.len() > before)
    }

    fn at_end(&self) -> bool {
        self.framing == Framing::Done && self.ended.is_none()
    }

    async fn keep_alive(self) {
        if self.framing == Framing::Done && self.keepalive && self.input.is_empty() && self.ended.is_none() {
            self.connector.release_stream(self.stream, self.peer.reuse_hash(), Some(limits::UPSTREAM_IDLE));
        }
    }
}
