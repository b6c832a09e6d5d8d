//! One request and its response on one of pingora's connections.
//!
//! Sending: nearly every request fits the socket at once. While one does not, the connection is read as well, because an
//! engine may respond before it has read the whole body (401, 413) and then close or stop reading. After a response other
//! than a success the rest is not sent (RFC 9112, 9.5); with a success it still is. A connection on which a request was
//! not sent to its end is not used again. A backend that takes no byte for `timeouts.send` is given up.
//! Receiving: everything that has arrived is taken at once and nothing is waited for. The read buffer is as large as
//! what came last, from [`READ_MIN`] to [`READ_MAX`]: 5,000 streams that wait for one token each hold little.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use pingora::protocols::Stream;
use pingora::upstreams::peer::HttpPeer;
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, sleep_until};

use super::super::headers;
use super::connected::Connected;
use super::gunzip::Gunzip;
use super::idle::IdleConnections;
use super::outgoing::Outgoing;
use super::wire::{Framing, WireError, take_head};
use crate::flow::{Exchange, ExchangeError, ResponseHead, UpstreamRequest};
use crate::pool::Address;

/// The least that is read at once: more than any event of one token.
const READ_MIN: usize = 1 << 10;
/// The most that is read at once.
const READ_MAX: usize = 64 << 10;
/// Interim responses (100 Continue and the like) before one response: engines send at most one; a read that never waits
/// would also keep every timer of its task from being looked at.
const INTERIM_MAX: u32 = 64;
/// The most that is gathered into one write to the client.
const COALESCE_MAX: usize = 256 << 10;

/// How far the request was sent.
enum Sending {
    /// To its end.
    Done,
    /// This is left.
    Rest(Box<Outgoing>),
    /// Not to its end, and the rest will not be sent.
    BrokenOff,
}

/// What happens first while a request is being sent.
enum SendEvent {
    /// The request was sent to its end, or the connection takes no more of it.
    Sent(Sending),
    /// This much of a response was read; 0 at the end of the connection.
    Read(std::io::Result<usize>),
    /// The pause may have lasted too long.
    Timer,
}

/// One request and its response.
pub struct EngineExchange {
    stream: Stream,
    peer: Arc<HttpPeer>,
    idle: Arc<IdleConnections>,
    reused: bool,
    connect_time: Duration,
    sending: Sending,
    /// Read and not yet understood.
    input: BytesMut,
    read_size: usize,
    framing: Framing,
    /// Takes the body out of a coding that was not asked for.
    gunzip: Option<Box<Gunzip>>,
    keepalive: bool,
    /// Interim responses so far.
    interim: u32,
    /// The connection has ended, or broke; said once what was read before has been passed on.
    ended: Option<ExchangeError>,
}

impl EngineExchange {
    pub(super) fn new(connected: Connected, idle: Arc<IdleConnections>, connect_time: Duration) -> Self {
        let Connected { peer, stream, reused } = connected;
        Self {
            stream,
            peer,
            idle,
            reused,
            connect_time,
            sending: Sending::BrokenOff,
            input: BytesMut::new(),
            read_size: READ_MIN,
            framing: Framing::UntilClose,
            gunzip: None,
            keepalive: false,
            interim: 0,
            ended: None,
        }
    }

    /// Sends the request, to its end or until the engine responds. A connection that breaks is no error here: the engine
    /// may have responded before it closed.
    pub(super) async fn write(
        &mut self,
        to: &Address,
        request: &UpstreamRequest,
        pause: Duration,
    ) -> Result<(), ExchangeError> {
        let mut outgoing = Outgoing::new(to, request);
        let stream = &mut self.stream;
        match poll_fn(|cx| Poll::Ready(outgoing.poll_send(cx, stream))).await {
            Poll::Ready(sent) => {
                self.sending = Sending::after(sent);
                Ok(())
            }
            // Boxed: only a body that the socket does not take at once pays for it.
            Poll::Pending => Box::pin(self.write_and_read(Box::new(outgoing), pause)).await,
        }
    }

    /// Sends the rest of a request and reads at the same time; returns at the first bytes of a response.
    async fn write_and_read(&mut self, mut outgoing: Box<Outgoing>, pause: Duration) -> Result<(), ExchangeError> {
        let (mut sent, mut taken_at) = (outgoing.sent(), Instant::now());
        let mut timer = pin!(sleep_until(taken_at + pause));
        self.input.reserve(self.read_size);
        loop {
            let (stream, input) = (&mut self.stream, &mut self.input);
            let event = poll_fn(|cx| {
                if let Poll::Ready(result) = outgoing.poll_send(cx, stream) {
                    return Poll::Ready(SendEvent::Sent(Sending::after(result)));
                }
                if sent != outgoing.sent() {
                    (sent, taken_at) = (outgoing.sent(), Instant::now());
                }
                if let Poll::Ready(read) = pin!(stream.read_buf(input)).poll(cx) {
                    return Poll::Ready(SendEvent::Read(read));
                }
                timer.as_mut().poll(cx).map(|()| SendEvent::Timer)
            });
            match event.await {
                SendEvent::Sent(sending) => {
                    self.sending = sending;
                    return Ok(());
                }
                SendEvent::Read(Ok(count @ 1..)) => {
                    self.adapt(count);
                    self.sending = Sending::Rest(outgoing);
                    return Ok(());
                }
                // What this means is decided where the response should be: the connection may be a stale one.
                SendEvent::Read(_) => return Ok(()),
                SendEvent::Timer if taken_at + pause <= Instant::now() => return Err(ExchangeError::NotTaken),
                SendEvent::Timer => timer.as_mut().reset(taken_at + pause),
            }
        }
    }

    /// Waits for bytes; false at the end of the connection.
    async fn fill(&mut self) -> Result<bool, ExchangeError> {
        if self.input.is_empty() && self.input.capacity() > READ_MAX {
            // A buffer that a burst has blown up is let go.
            self.input = BytesMut::new();
        }
        self.input.reserve(self.read_size);
        let Self { stream, input, sending, .. } = self;
        let read = poll_fn(|cx| {
            sending.poll_rest(cx, stream);
            pin!(stream.read_buf(input)).poll(cx)
        });
        match read.await {
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
        let Some(gunzip) = &mut self.gunzip else {
            return self.framing.decode(&mut self.input, into).map_err(malformed);
        };
        self.framing.decode(&mut self.input, &mut gunzip.coded).map_err(malformed)?;
        gunzip.decode(into, COALESCE_MAX).map_err(malformed)
    }

    /// The body was read and decoded to its end.
    fn is_done(&self) -> bool {
        self.framing == Framing::Done && self.gunzip.as_ref().is_none_or(|gunzip| gunzip.is_drained())
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

impl Sending {
    fn after(sent: std::io::Result<()>) -> Self {
        if sent.is_ok() { Self::Done } else { Self::BrokenOff }
    }

    /// Sends more of the rest, if there is one and the socket takes it.
    fn poll_rest(&mut self, cx: &mut Context<'_>, stream: &mut Stream) {
        if let Self::Rest(outgoing) = self
            && let Poll::Ready(sent) = outgoing.poll_send(cx, stream)
        {
            *self = Self::after(sent);
        }
    }

    /// Sends no more.
    fn break_off(&mut self) {
        if !matches!(self, Self::Done) {
            *self = Self::BrokenOff;
        }
    }
}

fn malformed(error: WireError) -> ExchangeError {
    ExchangeError::Malformed(error.to_string())
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
                    if !head.status.is_success() {
                        self.sending.break_off();
                    }
                    let mut map = head.headers;
                    headers::remove_hop_by_hop(&mut map);
                    let mut head = ResponseHead { status: head.status, headers: map };
                    if head.take_gzip() {
                        self.gunzip = Some(Box::new(Gunzip::new()));
                    }
                    return Ok(head);
                }
                self.interim += 1;
                if self.interim > INTERIM_MAX {
                    return Err(ExchangeError::Malformed(format!("more than {INTERIM_MAX} interim responses")));
                }
            }
            let ended = match self.fill().await {
                Ok(true) => continue,
                Ok(false) => ExchangeError::Closed("connection ended before a response".to_owned()),
                Err(error) => error,
            };
            // Only a connection that ends without a byte may be a stale one.
            let silent = self.input.is_empty() && self.interim == 0;
            return Err(if silent { ended } else { ExchangeError::Malformed(ended.to_string()) });
        }
    }

    async fn body(&mut self, into: &mut BytesMut) -> Result<bool, ExchangeError> {
        let before = into.len();
        loop {
            self.decode(into)?;
            if self.is_done() || into.len() > before {
                break;
            }
            if let Some(broken) = self.ended.take() {
                return self.connection_ended(broken);
            }
            if !self.fill().await? {
                return self.connection_ended(ExchangeError::Closed("connection ended inside a response".to_owned()));
            }
        }
        while !self.is_done()
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
        self.is_done() && self.ended.is_none()
    }

    async fn keep_alive(self) {
        let whole = self.is_done() && matches!(self.sending, Sending::Done);
        if whole && self.keepalive && self.input.is_empty() && self.ended.is_none() {
            self.idle.keep(self.stream, &self.peer);
        }
    }
}
