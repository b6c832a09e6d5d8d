//! A subscriber of ZMTP 3.0, the protocol of ZeroMQ, over TCP without encryption.
//!
//! vLLM publishes KV events on a PUB socket. Of the protocol, a subscriber needs the greeting, the
//! NULL handshake, one subscription to all topics, and the frames of messages. The crate `zeromq`
//! 0.7 reserves as many bytes as the head of a frame claims; here a message is bounded before it is
//! read.
//!
//! Bounds: [`MESSAGE_MAX`] bytes and [`FRAMES_MAX`] frames of a message.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Largest message. A prompt of a million tokens stores its blocks in about 6 MB.
pub(super) const MESSAGE_MAX: usize = 16 << 20;
const FRAMES_MAX: usize = 8;
const GREETING: usize = 64;
/// Signature, version 3.0, and the mechanism NULL; the rest is zero.
const GREETING_START: &[u8] = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL";
/// The handshake of a subscriber, followed by a subscription to every topic.
const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB";
const SUBSCRIBE: &[u8] = b"\0\x01\x01";

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// A connection to a publisher.
#[derive(Debug)]
pub(super) struct Subscriber<S> {
    stream: S,
    read: BytesMut,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Subscriber<S> {
    /// Shakes hands with the publisher, and subscribes.
    pub(super) async fn new(mut stream: S) -> io::Result<Self> {
        let mut greeting = [0; GREETING];
        greeting[..GREETING_START.len()].copy_from_slice(GREETING_START);
        stream.write_all(&greeting).await?;
        stream.read_exact(&mut greeting).await?;
        if greeting[0] != 0xff || greeting[9] & 1 == 0 || greeting[10] < 3 {
            return Err(invalid("the port does not speak ZMTP 3, so it is not a port of KV events"));
        }
        if !greeting[12..].starts_with(b"NULL\0") {
            return Err(invalid("the publisher wants ZeroMQ security, which vLLM does not have"));
        }
        stream.write_all(READY).await?;
        let mut subscriber = Self { stream, read: BytesMut::new() };
        let ready = subscriber.frame().await?;
        if ready.flags & COMMAND == 0 || !ready.body.starts_with(b"\x05READY") {
            return Err(invalid("the publisher ended the handshake"));
        }
        if !ready.body.windows(3).any(|three| three == b"PUB") {
            return Err(invalid("the port is a ZeroMQ socket that publishes nothing"));
        }
        subscriber.stream.write_all(SUBSCRIBE).await?;
        Ok(subscriber)
    }

    /// The frames of the next message. Cancel safe.
    pub(super) async fn message(&mut self) -> io::Result<Vec<Bytes>> {
        loop {
            if let Some((frames, length)) = whole_message(&self.read)? {
                let whole = self.read.split_to(length).freeze();
                return Ok(frames.into_iter().map(|(start, end)| whole.slice(start..end)).collect());
            }
            self.read_more().await?;
        }
    }

    async fn frame(&mut self) -> io::Result<Frame> {
        loop {
            if let Some((flags, start, end)) = frame(&self.read, 0)? {
                let mut body = self.read.split_to(end).freeze();
                body.advance(start);
                return Ok(Frame { flags, body });
            }
            self.read_more().await?;
        }
    }

    async fn read_more(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.read).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

struct Frame {
    flags: u8,
    body: Bytes,
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The flags, start and end of the frame at `at`; `None`: it is not complete.
fn frame(read: &[u8], at: usize) -> io::Result<Option<(u8, usize, usize)>> {
    let Some((flags, rest)) = read.get(at..).and_then(<[u8]>::split_first) else { return Ok(None) };
    let (length, head) = match flags & LONG {
        0 => (rest.first().map(|length| u64::from(*length)), 2),
        _ => (rest.first_chunk().map(|length| u64::from_be_bytes(*length)), 9),
    };
    let Some(length) = length else { return Ok(None) };
    if length > MESSAGE_MAX as u64 {
        return Err(invalid("a message of KV events is larger than 16 MiB"));
    }
    let (start, end) = (at + head, at + head + length as usize);
    Ok((end <= read.len()).then_some((*flags, start, end)))
}

type Places = Vec<(usize, usize)>;

/// The places of the frames of the first message, and the bytes that it takes. Commands between
/// messages are left out.
fn whole_message(read: &[u8]) -> io::Result<Option<(Places, usize)>> {
    let (mut frames, mut at) = (Places::new(), 0);
    loop {
        let Some((flags, start, end)) = frame(read, at)? else {
            return if read.len() > 2 * MESSAGE_MAX { Err(invalid("a message has no end")) } else { Ok(None) };
        };
        at = end;
        if flags & COMMAND != 0 {
            continue;
        }
        frames.push((start, end));
        if frames.len() > FRAMES_MAX {
            return Err(invalid("a message of KV events has too many frames"));
        }
        if flags & MORE == 0 {
            return Ok(Some((frames, at)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The publisher's side of a handshake, as libzmq 4.3 sends it.
    async fn accept(stream: &mut tokio::io::DuplexStream, kind: &str) {
        let mut greeting = [0; GREETING];
        stream.read_exact(&mut greeting).await.unwrap();
        assert!(greeting.starts_with(GREETING_START));
        greeting[11] = 1;
        stream.write_all(&greeting).await.unwrap();
        let mut ready = vec![0; READY.len()];
        stream.read_exact(&mut ready).await.unwrap();
        assert_eq!(usize::from(ready[1]), ready.len() - 2, "the length of the command");
        let body = [b"\x05READY\x0bSocket-Type\0\0\0\x03", kind.as_bytes()].concat();
        stream.write_all(&[&[COMMAND, body.len() as u8], &body[..]].concat()).await.unwrap();
    }

    async fn connected() -> (Subscriber<tokio::io::DuplexStream>, tokio::io::DuplexStream) {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let (near, ()) = tokio::join!(Subscriber::new(near), accept(&mut far, "PUB"));
        let mut subscription = [0; 3];
        far.read_exact(&mut subscription).await.unwrap();
        assert_eq!(subscription, *SUBSCRIBE);
        (near.unwrap(), far)
    }

    #[tokio::test]
    async fn messages_arrive_whole_however_they_are_cut() {
        let (mut near, mut far) = connected().await;
        let long = vec![7; 1_000];
        let mut sent = b"\x04\x05\x04PING\x01\x01t\x01\x08\0\0\0\0\0\0\0\x05".to_vec();
        sent.extend([&[LONG][..], &1_000_u64.to_be_bytes(), &long].concat());
        sent.extend(b"\0\x01x");
        for byte in &sent[..40] {
            far.write_all(&[*byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        far.write_all(&sent[40..]).await.unwrap();
        let frames = near.message().await.unwrap();
        assert_eq!((&frames[0][..], frames[1][7], &frames[2][..]), (&b"t"[..], 5, &long[..]));
        assert_eq!(near.message().await.unwrap(), [Bytes::from_static(b"x")]);
        drop(far);
        assert_eq!(near.message().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn a_message_that_claims_too_much_is_an_error_before_it_is_read() {
        let many = [MORE, 0].repeat(FRAMES_MAX + 1);
        for claim in [[&[LONG][..], &u64::MAX.to_be_bytes()].concat(), many] {
            let (mut near, mut far) = connected().await;
            far.write_all(&claim).await.unwrap();
            assert_eq!(near.message().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[tokio::test]
    async fn a_port_with_another_protocol_is_named_so() {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        far.write_all(&[b'H'; GREETING]).await.unwrap();
        let why = Subscriber::new(near).await.unwrap_err().to_string();
        assert!(why.contains("not a port of KV events"), "{why}");
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let (near, ()) = tokio::join!(Subscriber::new(near), accept(&mut far, "ROUTER"));
        assert!(near.unwrap_err().to_string().contains("publishes nothing"));
    }
}
