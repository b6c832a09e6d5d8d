//! Idle connections to engines, kept for the next request.
//!
//! Which connections are kept, and which is given up when there are too many, is left to pingora's pool. The task that
//! watches an idle connection owns it and hands it over to the request that wants it. Why not pingora's connector for this
//! too: there the pool and the task share the connection, and the task unlocks it before it lets go of it. A request that comes
//! between the two finds the connection in use, loses it and opens another one: on two busy cores one request in four.
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

    /// A connection to `peer` that is open.
    pub(super) async fn take(&self, peer: &HttpPeer) -> Option<Stream> {
        let key = peer.reuse_hash();
        loop {
            // An error: it has just been closed. There may be another one.
            let Ok(mut stream) = self.0.get(&key)?.await else { continue };
            if peer.matches_fd(stream.id()) && is_quiet(&mut stream) {
                return Some(stream);
            }
        }
    }

    /// Keeps a connection to `peer` on which no response is outstanding.
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
                    // An error: the request ended before it got the connection, which is closed then.
                    let _ = hand_over.send(stream);
                }
                () = evicted.notified() => {}
                // The engine closed it or sent what was not asked for, or it was idle for too long.
                _ = timeout(limits::UPSTREAM_IDLE, stream.read(&mut byte)) => pool.pop_closed(&meta),
            }
        });
    }
}

/// Whether a connection is open and nothing has arrived on it.
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

    /// A connection as pingora makes it, its peer, and the engine's side.
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
