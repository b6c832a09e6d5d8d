//! Idle connections to engines.
//!
//! pingora's pool decides which connections are kept. Each idle connection is owned by a task that watches it, and is sent to
//! the request that takes it. Why not pingora's connector, which does the same: there the pool and the task share the
//! connection through a lock and a reference count. The task releases the lock before its reference. A request that takes the
//! connection in between fails to get sole ownership, drops it and opens a new one. On two busy cores that happened to one
//! request in four.
//!
//! Bounds: [`IDLE_MAX`] connections in all, each for [`limits::UPSTREAM_IDLE`].

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use pingora::protocols::Stream;
use pingora::upstreams::peer::{HttpPeer, Peer};
use pingora_pool::{ConnectionMeta, ConnectionPool};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::config::limits;

/// Idle connections in all; the oldest is closed first.
const IDLE_MAX: usize = 4_096;

/// Idle connections of all engines.
pub(super) struct IdleConnections(Arc<ConnectionPool<oneshot::Receiver<Stream>>>);

impl IdleConnections {
    pub(super) fn new() -> Self {
        Self(Arc::new(ConnectionPool::new(IDLE_MAX)))
    }

    /// Takes an open connection to `peer`.
    pub(super) async fn take(&self, peer: &HttpPeer) -> Option<Stream> {
        let key = peer.reuse_hash();
        loop {
            // On error this connection has just been closed; try the next one.
            let Ok(mut stream) = self.0.get(&key)?.await else { continue };
            if peer.matches_fd(stream.id()) && is_quiet(&mut stream) {
                return Some(stream);
            }
        }
    }

    /// Keeps a connection to `peer` that has no response outstanding.
    pub(super) fn keep(&self, mut stream: Stream, peer: &HttpPeer) {
        let meta = ConnectionMeta::new(peer.reuse_hash(), stream.id());
        let (hand_over, taken) = oneshot::channel();
        let (evicted, wanted) = self.0.put(&meta, taken);
        let pool = Arc::clone(&self.0);
        tokio::spawn(async move {
            let mut byte = [0];
            tokio::select! {
                biased;
                Ok(_) = wanted => {
                    // On error the request ended before it received the connection, which is then closed.
                    let _ = hand_over.send(stream);
                }
                () = evicted.notified() => {}
                // The engine closed it or sent unexpected bytes, or it was idle for too long.
                _ = timeout(limits::UPSTREAM_IDLE, stream.read(&mut byte)) => pool.pop_closed(&meta),
            }
        });
    }
}

/// Whether a connection is open and no bytes have arrived on it.
fn is_quiet(stream: &mut Stream) -> bool {
    let mut byte = [0];
    let mut context = Context::from_waker(Waker::noop());
    Pin::new(stream).poll_read(&mut context, &mut ReadBuf::new(&mut byte)).is_pending()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A connection opened by pingora, its peer, and the engine's end of it.
    async fn connected(listener: &TcpListener) -> (Stream, HttpPeer, TcpStream) {
        let peer = HttpPeer::new(listener.local_addr().unwrap(), false, String::new());
        let stream = pingora::connectors::TransportConnector::new(None).new_stream(&peer).await.unwrap();
        (stream, peer, listener.accept().await.unwrap().0)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_connection_that_is_kept_is_there_for_the_next_request() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (mut stream, peer, mut engine) = connected(&listener).await;
        let (idle, id) = (IdleConnections::new(), stream.id());
        for round in 0..5_000 {
            idle.keep(stream, &peer);
            stream = idle.take(&peer).await.unwrap_or_else(|| panic!("lost in round {round}"));
        }
        assert_eq!(stream.id(), id);
        stream.write_all(b"x").await.unwrap();
        assert_eq!(engine.read_u8().await.unwrap(), b'x');
        assert!(idle.take(&peer).await.is_none(), "it is in use");
    }

    #[tokio::test]
    async fn a_connection_that_was_closed_or_spoken_on_is_passed_over() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let idle = IdleConnections::new();
        let mut engines = Vec::new();
        for _ in 0..3 {
            let (stream, peer, engine) = connected(&listener).await;
            idle.keep(stream, &peer);
            engines.push((peer, engine));
        }
        let (peer, mut talking) = engines.remove(1);
        talking.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").await.unwrap();
        let (_, open) = engines.remove(1);
        drop(engines);
        let stream = idle.take(&peer).await.expect("one is left");
        let own = TcpStream::peer_addr(&open).unwrap();
        assert_eq!(stream.get_socket_digest().unwrap().local_addr().unwrap().as_inet(), Some(&own));
        assert!(idle.take(&peer).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_not_kept_for_longer_than_engines_keep_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (stream, peer, mut engine) = connected(&listener).await;
        let idle = IdleConnections::new();
        idle.keep(stream, &peer);
        assert_eq!(engine.read(&mut [0]).await.unwrap(), 0, "closed");
        assert!(idle.take(&peer).await.is_none());
    }
}
