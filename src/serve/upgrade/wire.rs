//! The messages between two gateways in an upgrade, and the transfer of descriptors.
//!
//! A message is a length (4 bytes, little-endian) and JSON. Newer versions may add keys.
//! [`PROTOCOL`] changes if an older version must not ignore a new key. Descriptors travel with one
//! extra byte after [`Answer::Accepted`].

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::UnixStream;

use sluice_gateway::pool::{Cordon, Share};

pub(crate) const PROTOCOL: u32 = 1;
/// Largest message in bytes: some ten thousand backends.
pub(crate) const FRAME_MAX: u32 = 4 << 20;
const DESCRIPTORS_MAX: usize = 8;

/// The new gateway's first message, the same in every version.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) sluice_upgrade: u32,
    pub(crate) version: String,
    pub(crate) pid: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Accepted(Accepted),
    Refused { why: String },
}

/// The running gateway lets the new one start.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Accepted {
    pub(crate) sluice_upgrade: u32,
    pub(crate) version: String,
    pub(crate) pid: u32,
    /// Sockets in the order of the descriptors.
    pub(crate) sockets: Vec<OpenSocket>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OpenSocket {
    pub(crate) port: Port,
    pub(crate) address: Option<SocketAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Port {
    Clients,
    Admin,
    Upgrade,
    /// A kind of socket that only a newer version knows.
    #[serde(other)]
    Unknown,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {}

/// Messages of the old gateway once the new one is ready.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    Claims(Claims),
    /// The old gateway goes on. The new one must not serve.
    Withdrawn {
        why: String,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Claims {
    /// The old gateway and the gateways before it.
    pub(crate) gateways: u32,
    /// Whether a ledger counts the old gateway's use.
    #[serde(default)]
    pub(crate) in_ledger: bool,
    pub(crate) claims: Vec<ClaimedBackend>,
}

/// A backend, by its place in a configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ClaimedBackend {
    pub(crate) pool: String,
    pub(crate) backend: String,
    pub(crate) authority: String,
    /// Whether an operator has taken it out of rotation.
    #[serde(default)]
    pub(crate) draining: bool,
    pub(crate) share: Share,
}

/// The answer to each claim; `None`: the new gateway does not know the backend.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Conceded {
    pub(crate) backends: Vec<Option<ConcededBackend>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ConcededBackend {
    /// The part of the claim that the old gateway may use now.
    pub(crate) share: Share,
    /// Whether the backend may get work from the new gateway, which manages the engine.
    pub(crate) cordon: Cordon,
}

pub(crate) async fn send(stream: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let json = serde_json::to_vec(message)?;
    let length = u32::try_from(json.len()).ok().filter(|length| *length <= FRAME_MAX);
    let length = length.ok_or_else(|| io::Error::other("a message is too long"))?;
    stream.write_all(&[&length.to_le_bytes()[..], &json].concat()).await
}

/// Not cancel safe.
pub(crate) async fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<T> {
    receive_if_open(stream).await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// [`receive`]; `None` if the connection was closed between messages.
pub(crate) async fn receive_if_open<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match stream.read(&mut length[..1]).await {
        Ok(0) => return Ok(None),
        // The other process ended before it had read all messages.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        read => read?,
    };
    stream.read_exact(&mut length[1..]).await?;
    let length = u32::from_le_bytes(length);
    if length > FRAME_MAX {
        return Err(io::Error::other("a message is too long"));
    }
    let mut json = vec![0; length as usize];
    stream.read_exact(&mut json).await?;
    Ok(Some(serde_json::from_slice(&json)?))
}

pub(crate) async fn send_descriptors(stream: &UnixStream, descriptors: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::Error::other("too many descriptors"));
        }
        sendmsg(stream, &[IoSlice::new(b"F")], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    };
    stream.async_io(Interest::WRITABLE, send).await
}

pub(crate) async fn receive_descriptors(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        Ok(rights.flatten().collect())
    };
    stream.async_io(Interest::READABLE, receive).await
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[tokio::test]
    async fn messages_and_descriptors_arrive_in_order() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        send(&mut one, &Answer::Refused { why: "a".repeat(100_000) }).await.unwrap();
        send_descriptors(&one, &[writer.into()]).await.unwrap();
        send(&mut one, &Ready {}).await.unwrap();
        let Answer::Refused { why } = receive(&mut other).await.unwrap() else { panic!("another message") };
        assert_eq!(why.len(), 100_000);
        let mut descriptors = receive_descriptors(&other).await.unwrap();
        let mut writer = std::fs::File::from(descriptors.pop().unwrap());
        assert!(descriptors.is_empty());
        let Ready {} = receive(&mut other).await.unwrap();
        writer.write_all(b"here").unwrap();
        let mut got = [0; 4];
        reader.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"here");
    }

    #[tokio::test]
    async fn a_message_that_is_too_long_is_not_read() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        one.write_all(&(FRAME_MAX + 1).to_le_bytes()).await.unwrap();
        assert!(receive::<Ready>(&mut other).await.unwrap_err().to_string().contains("too long"));
    }
}
