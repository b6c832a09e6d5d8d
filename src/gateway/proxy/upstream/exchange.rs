//! One request and its response on a connection to an engine.
//!
//! Nearly every request fits into the socket buffer at once. Otherwise the connection is read while
//! the rest is sent, because an engine may respond before it has read the whole body (401, 413) and
//! then close or stop reading. After an error response the rest of the request is not sent (RFC
//! 9112, 9.5). After a success it is. A connection with an incomplete request is not reused. If the
//! backend accepts no byte for `timeouts.send`, the attempt fails.
//!
//! A read takes all bytes that have arrived, and does not wait for more. The read buffer adapts to
//! the last read, so that 5,000 streams that wait for tokens use little memory.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, sleep_until};

use super::super::headers;
use super::gunzip::Gunzip;
use super::idle::{EngineConnection, IdleConnections};
use super::outgoing::Outgoing;
use super::wire::{Framing, WireError, take_head};
use crate::connect::EngineStream;
use crate::flow::{Exchange, ExchangeError, ResponseHead, UpstreamRequest};
use sluice_config::Address;

/// Smallest size of a read, in bytes; larger than any event of one token.
const READ_MIN: usize = 1 << 10;
/// Largest size of a read, in bytes.
const READ_MAX: usize = 64 << 10;
/// The most interim responses (such as 100 Continue); engines send at most one. An endless sequence
/// would keep the task busy, so that no timer fires.
const INTERIM_MAX: u32 = 64;
/// The most bytes of one write to the client.
const COALESCE_MAX: usize = 256 << 10;

enum Sending {
    Done,
    /// Sent in part; the rest will be sent.
    Rest(Box<Outgoing>),
    /// Sent in part; the rest will not be sent.
    BrokenOff,
}

enum SendEvent {
    Sent(Sending),
    /// Bytes of a response; 0 at the end of the connection.
    Read(std::io::Result<usize>),
    /// The time since the engine last accepted bytes may be too long.
    Timer,
}

/// One request and its response.
pub struct EngineExchange {
    connection: EngineConnection,
    idle: Arc<IdleConnections>,
    connect_time: Duration,
    sending: Sending,
    input: BytesMut,
    read_size: usize,
    framing: Framing,
    /// Set if the engine compressed the body without being asked.
    gunzip: Option<Box<Gunzip>>,
    keepalive: bool,
    interim: u32,
    /// An error that is returned only after the bytes that were read before it.
    ended: Option<ExchangeError>,
}

impl EngineExchange {
    pub(super) fn new(connection: EngineConnection, idle: Arc<IdleConnections>, connect_time: Duration) -> Self {
        Self {
            connection,
            idle,
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

    /// Sends the request until it is complete or the engine responds. A failed write is no error
    /// here, because the engine may have responded before.
    pub(super) async fn write(
        &mut self,
        to: &Address,
        request: &UpstreamRequest,
        pause: Duration,
    ) -> Result<(), ExchangeError> {
        let mut outgoing = Outgoing::new(to, request);
        let stream = &mut self.connection.stream;
        match poll_fn(|cx| Poll::Ready(outgoing.poll_send(cx, stream))).await {
            Poll::Ready(sent) => {
                self.sending = Sending::after(sent);
                Ok(())
            }
            // Boxed: a body that is sent at once needs no room for this state.
            Poll::Pending => Box::pin(self.write_and_read(Box::new(outgoing), pause)).await,
        }
    }

    /// Sends the rest of a request and reads at the same time, until the first bytes of a response.
    async fn write_and_read(&mut self, mut outgoing: Box<Outgoing>, pause: Duration) -> Result<(), ExchangeError> {
        let (mut sent, mut taken_at) = (outgoing.sent(), Instant::now());
        let mut timer = pin!(sleep_until(taken_at + pause));
        self.input.reserve(self.read_size);
        loop {
            let (stream, input) = (&mut self.connection.stream, &mut self.input);
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
                // `head` decides whether this is an error, because the connection may be stale.
                SendEvent::Read(_) => return Ok(()),
                SendEvent::Timer if taken_at + pause <= Instant::now() => return Err(ExchangeError::NotTaken),
                SendEvent::Timer => timer.as_mut().reset(taken_at + pause),
            }
        }
    }

    /// Waits for bytes; `false`: the connection has ended.
    async fn fill(&mut self) -> Result<bool, ExchangeError> {
        if self.input.is_empty() && self.input.capacity() > READ_MAX {
            // Frees a buffer that has grown during a burst.
            self.input = BytesMut::new();
        }
        self.input.reserve(self.read_size);
        let Self { connection: EngineConnection { stream, .. }, input, sending, .. } = self;
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

    /// Reads bytes that have already arrived; `false`: there are none.
    async fn fill_ready(&mut self) -> bool {
        self.input.reserve(self.read_size);
        let (stream, input) = (&mut self.connection.stream, &mut self.input);
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
                // A connection that broke is not the end of a body without a length.
                if self.framing == Framing::UntilClose {
                    self.framing = Framing::Length(u64::MAX);
                }
                false
            }
        }
    }

    fn adapt(&mut self, count: usize) {
        self.read_size = if count >= self.read_size {
            (self.read_size * 4).min(READ_MAX)
        } else {
            count.next_power_of_two().clamp(READ_MIN, self.read_size)
        };
    }

    fn may_have_more(&self) -> bool {
        self.input.capacity() == self.input.len()
    }

    fn decode(&mut self, into: &mut BytesMut) -> Result<(), ExchangeError> {
        let Some(gunzip) = &mut self.gunzip else {
            // Before each wait for the engine.
            if self.input.is_empty() {
                return Ok(());
            }
            return self.framing.decode(&mut self.input, into).map_err(malformed);
        };
        self.framing.decode(&mut self.input, &mut gunzip.coded).map_err(malformed)?;
        gunzip.decode(into, COALESCE_MAX).map_err(malformed)
    }

    fn is_done(&self) -> bool {
        self.framing == Framing::Done && self.gunzip.as_ref().is_none_or(|gunzip| gunzip.is_drained())
    }

    /// Handles the end of the connection: the regular end of a body without a length, or the error
    /// `broken`.
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

    fn poll_rest(&mut self, cx: &mut Context<'_>, stream: &mut EngineStream) {
        if let Self::Rest(outgoing) = self
            && let Poll::Ready(sent) = outgoing.poll_send(cx, stream)
        {
            *self = Self::after(sent);
        }
    }

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
        self.connection.reused
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
            // A connection is stale only if it ends without a single byte.
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
            // Bytes before a malformed chunk are still forwarded; the next call returns the error.
            if let Err(broken) = self.decode(into) {
                self.ended = Some(broken);
                self.framing = Framing::Length(u64::MAX);
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
            self.idle.keep(self.connection);
        }
    }
}
