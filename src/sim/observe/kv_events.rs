//! KV events as vLLM publishes them (`--kv-events-config`): a PUB socket of ZeroMQ.
//!
//! Each data-parallel rank publishes on a separate port. A message has a topic, a number that
//! counts from 0, and a batch of events in msgpack, as vLLM 0.32 encodes them. Content of a block
//! is a number here, so token ids are made from the hash: equal blocks have equal ids. Without
//! `replay_endpoint`: a subscriber that comes late or is slow misses messages.
//!
//! Bounds: [`BUFFERED`] messages wait for a slow subscriber; older ones are dropped, as by vLLM.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use crate::engine::{BLOCK_TOKENS, BlockChange, SequenceId};
use crate::unix_time::unix_seconds;

const BUFFERED: usize = 10_000;
/// Token ids are below this number.
const IDS: u64 = 8_000;
const GREETING: usize = 64;
const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";
/// Flags of a frame: another one follows; the length has 8 bytes.
const MORE: u8 = 1;
const LONG: u8 = 2;

/// The publisher of one rank. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Publisher {
    rank: usize,
    number: u64,
    messages: broadcast::Sender<Arc<[u8]>>,
    accepting: JoinHandle<()>,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Publisher {
    /// Publishes the events of rank `rank` on `port` plus the rank, as vLLM does.
    pub(crate) fn bind(ip: IpAddr, port: u16, rank: usize) -> std::io::Result<Self> {
        let port = port.saturating_add(u16::try_from(rank).unwrap_or(u16::MAX));
        let listener = std::net::TcpListener::bind(SocketAddr::new(ip, port))?;
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let (messages, _) = broadcast::channel(BUFFERED);
        let accepting = tokio::spawn(accept(listener, messages.clone()));
        Ok(Self { rank, number: 0, messages, accepting })
    }

    /// The messages, as subscribers get them.
    pub(crate) fn messages(&self) -> broadcast::Sender<Arc<[u8]>> {
        self.messages.clone()
    }

    /// Publishes one message, if there are changes. `session`: the name of the request that a
    /// sequence belongs to.
    pub(crate) fn publish(&mut self, changes: &[BlockChange], session: impl Fn(SequenceId) -> Option<Arc<str>>) {
        if changes.is_empty() {
            return;
        }
        let batch = batch(changes, self.rank, session);
        let mut message = vec![MORE, 0, MORE, 8];
        message.extend(self.number.to_be_bytes());
        message.push(LONG);
        message.extend((batch.len() as u64).to_be_bytes());
        message.extend(batch);
        self.number += 1;
        // Without a subscriber, the message is dropped.
        let _ = self.messages.send(message.into());
    }
}

async fn accept(listener: TcpListener, messages: broadcast::Sender<Arc<[u8]>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let messages = messages.clone();
        tokio::spawn(async move { send(stream, messages).await });
    }
}

/// Shakes hands with a subscriber, and sends it the messages from its subscription on.
async fn send(mut stream: TcpStream, messages: broadcast::Sender<Arc<[u8]>>) -> std::io::Result<()> {
    let mut greeting = [0; GREETING];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    stream.read_exact(&mut greeting).await?;
    stream.write_all(READY).await?;
    // READY, then the subscription. Short frames: flags, length, body.
    for _ in 0..2 {
        let mut head = [0; 2];
        stream.read_exact(&mut head).await?;
        stream.read_exact(&mut vec![0; usize::from(head[1])]).await?;
    }
    let mut messages = messages.subscribe();
    let (mut reader, mut writer) = stream.into_split();
    loop {
        let mut ignored = [0; 64];
        tokio::select! {
            message = messages.recv() => match message {
                Ok(message) => writer.write_all(&message).await?,
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            },
            read = reader.read(&mut ignored) => if read? == 0 {
                return Ok(());
            },
        }
    }
}

/// A batch in msgpack.
fn batch(changes: &[BlockChange], rank: usize, session: impl Fn(SequenceId) -> Option<Arc<str>>) -> Vec<u8> {
    let mut out = vec![0x93, 0xcb];
    out.extend(unix_seconds().to_be_bytes());
    array(&mut out, changes.len());
    for change in changes {
        match change {
            BlockChange::Stored { id, parent, hashes } => {
                let session = session(*id);
                map(&mut out, "BlockStored", if session.is_some() { 11 } else { 10 });
                hash_list(&mut out, hashes);
                text(&mut out, "parent_block_hash");
                match parent {
                    Some(parent) => number(&mut out, *parent),
                    None => out.push(0xc0),
                }
                text(&mut out, "token_ids");
                array(&mut out, hashes.len() * BLOCK_TOKENS as usize);
                for hash in hashes {
                    (0..BLOCK_TOKENS).for_each(|place| number(&mut out, (hash >> place) % IDS));
                }
                text(&mut out, "block_size");
                number(&mut out, BLOCK_TOKENS.into());
                for absent in ["lora_id", "lora_name"] {
                    text(&mut out, absent);
                    out.push(0xc0);
                }
                of_group(&mut out);
                text(&mut out, "kv_cache_spec_kind");
                text(&mut out, "full_attention");
                if let Some(session) = session {
                    text(&mut out, "session_id");
                    text(&mut out, &session);
                }
            }
            BlockChange::Removed(hash) => {
                map(&mut out, "BlockRemoved", 4);
                hash_list(&mut out, &[*hash]);
                of_group(&mut out);
            }
            BlockChange::Cleared => map(&mut out, "AllBlocksCleared", 1),
        }
    }
    number(&mut out, rank as u64);
    out
}

/// Begins a map of `members` members, of which the first is the type.
fn map(out: &mut Vec<u8>, kind: &str, members: u8) {
    out.push(0x80 | members);
    text(out, "type");
    text(out, kind);
}

fn of_group(out: &mut Vec<u8>) {
    text(out, "medium");
    text(out, "GPU");
    text(out, "group_idx");
    number(out, 0);
}

fn hash_list(out: &mut Vec<u8>, hashes: &[u64]) {
    text(out, "block_hashes");
    array(out, hashes.len());
    hashes.iter().for_each(|hash| number(out, *hash));
}

fn array(out: &mut Vec<u8>, length: usize) {
    out.push(0xdd);
    out.extend((length as u32).to_be_bytes());
}

fn number(out: &mut Vec<u8>, number: u64) {
    match u8::try_from(number) {
        Ok(small) if small < 0x80 => out.push(small),
        _ => {
            out.push(0xcf);
            out.extend(number.to_be_bytes());
        }
    }
}

/// A text of at most 255 bytes; longer ones, which only a client can send, are cut.
fn text(out: &mut Vec<u8>, text: &str) {
    let cut = (0..=text.len().min(255)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    out.extend([0xd9, cut as u8]);
    out.extend(&text.as_bytes()[..cut]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::vllm::kv_events::{KvEvent, Stored, read_batch, session_name};

    #[test]
    fn a_batch_is_read_as_a_batch_of_vllm() {
        let hashes = vec![u64::MAX, 5];
        let changes = [
            BlockChange::Stored { id: 1, parent: None, hashes: hashes.clone() },
            BlockChange::Stored { id: 2, parent: Some(5), hashes: vec![7] },
            BlockChange::Removed(5),
            BlockChange::Cleared,
        ];
        let named = |id| (id == 1).then(|| session_name(3).into());
        let stored = |hashes, parent, session| {
            KvEvent::Stored(Stored { hashes, parent, block_size: 16, group: Some(0), is_partial: false, session })
        };
        assert_eq!(
            read_batch(&batch(&changes, 1, named)).unwrap(),
            [
                stored(hashes, None, Some(3)),
                stored(vec![7], Some(5), None),
                KvEvent::Removed { hashes: vec![5], group: Some(0) },
                KvEvent::Cleared
            ]
        );
    }
}
