//! Idle connections to engines.
//!
//! pingora's pool decides which connections are kept. A task owns and watches each idle connection,
//! and sends it to the request that takes it. Why not pingora's connector: there the pool and the
//! task share the connection through a lock and a reference count, so a request that comes after
//! the release of only one drops the connection and opens a new one. On two busy cores that
//! happened to one request in four.
//!
//! Bounds: [`IDLE_MAX`] connections in all, each for [`limits::UPSTREAM_IDLE`].

use std::hash::{BuildHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use foldhash::quality::FixedState;
use pingora_pool::{ConnectionMeta, ConnectionPool};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::connect::EngineStream;
use sluice_config::Address;
use sluice_config::limits;
use sluice_config::tls::ClientTls;

/// The most idle connections; the oldest is closed first.
const IDLE_MAX: usize = 4_096;

pub(super) struct EngineConnection {
    pub(super) stream: EngineStream,
    /// The other end, one of the addresses of the engine's name.
    pub(super) socket: SocketAddr,
    pub(super) key: u64,
    pub(super) reused: bool,
}

/// The key of connections to an engine: name, port and TLS settings.
pub(super) fn key_of(to: &Address) -> u64 {
    let mut hasher = FixedState::default().build_hasher();
    to.authority.hash(&mut hasher);
    to.tls.as_ref().map_or(0, ClientTls::digest).hash(&mut hasher);
    hasher.finish()
}

pub(super) struct IdleConnections(Arc<ConnectionPool<oneshot::Receiver<EngineConnection>>>);

impl std::fmt::Debug for IdleConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdleConnections").finish_non_exhaustive()
    }
}

impl IdleConnections {
    pub(super) fn new() -> Self {
        Self(Arc::new(ConnectionPool::new(IDLE_MAX)))
    }

    /// Takes an open connection whose address `is_current`, and closes others.
    pub(super) async fn take(&self, key: u64, is_current: impl Fn(SocketAddr) -> bool) -> Option<EngineConnection> {
        loop {
            // An error means that this connection was just closed; the next one is tried.
            let Ok(mut idle) = self.0.get(&key)?.await else { continue };
            if is_current(idle.socket) && is_quiet(&mut idle.stream) {
                return Some(EngineConnection { reused: true, ..idle });
            }
        }
    }

    /// Keeps a connection that has no response outstanding.
    pub(super) fn keep(&self, mut connection: EngineConnection) {
        let meta = ConnectionMeta::new(connection.key, descriptor(&connection.stream));
        let (hand_over, taken) = oneshot::channel();
        let (evicted, wanted) = self.0.put(&meta, taken);
        let pool = Arc::clone(&self.0);
        tokio::spawn(async move {
            let mut byte = [0];
            tokio::select! {
                biased;
                Ok(_) = wanted => {
                    // An error means that the request ended before it received the connection,
                    // which is then closed.
                    let _ = hand_over.send(connection);
                }
                () = evicted.notified() => {}
                // The engine closed the connection or sent unexpected bytes, or it was idle for too
                // long.
                _ = timeout(limits::UPSTREAM_IDLE, connection.stream.read(&mut byte)) => pool.pop_closed(&meta),
            }
        });
    }
}

fn descriptor(stream: &EngineStream) -> RawFd {
    match stream {
        EngineStream::Left(plain) => plain.as_raw_fd(),
        EngineStream::Right(secure) => secure.get_ref().0.as_raw_fd(),
    }
}

fn is_quiet(stream: &mut EngineStream) -> bool {
    let mut byte = [0];
    let mut context = Context::from_waker(Waker::noop());
    Pin::new(stream).poll_read(&mut context, &mut ReadBuf::new(&mut byte)).is_pending()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const KEY: u64 = 7;

    /// A connection, and the engine's end of it.
    async fn connected(listener: &TcpListener) -> (EngineConnection, TcpStream) {
        let socket = listener.local_addr().unwrap();
        let stream = EngineStream::Left(TcpStream::connect(socket).await.unwrap());
        let connection = EngineConnection { stream, socket, key: KEY, reused: false };
        (connection, listener.accept().await.unwrap().0)
    }

    async fn take(idle: &IdleConnections) -> Option<EngineConnection> {
        idle.take(KEY, |_| true).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_connection_that_is_kept_is_there_for_the_next_request() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (mut connection, mut engine) = connected(&listener).await;
        let (idle, id) = (IdleConnections::new(), descriptor(&connection.stream));
        for round in 0..5_000 {
            idle.keep(connection);
            connection = take(&idle).await.unwrap_or_else(|| panic!("lost in round {round}"));
        }
        assert_eq!(descriptor(&connection.stream), id);
        connection.stream.write_all(b"x").await.unwrap();
        connection.stream.flush().await.unwrap();
        assert_eq!(engine.read_u8().await.unwrap(), b'x');
        assert!(take(&idle).await.is_none(), "it is in use");
    }

    #[tokio::test]
    async fn a_connection_that_was_closed_or_spoken_on_is_passed_over() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let idle = IdleConnections::new();
        let mut engines = Vec::new();
        for _ in 0..3 {
            let (connection, engine) = connected(&listener).await;
            idle.keep(connection);
            engines.push(engine);
        }
        let mut talking = engines.remove(1);
        talking.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").await.unwrap();
        let mut open = engines.remove(1);
        drop(engines);
        let mut left = take(&idle).await.expect("one is left");
        left.stream.write_all(b"x").await.unwrap();
        left.stream.flush().await.unwrap();
        assert_eq!(open.read_u8().await.unwrap(), b'x');
        assert!(take(&idle).await.is_none());
    }

    #[tokio::test]
    async fn a_connection_to_an_address_that_is_gone_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let idle = IdleConnections::new();
        let (connection, mut engine) = connected(&listener).await;
        idle.keep(connection);
        assert!(idle.take(KEY, |_| false).await.is_none());
        assert_eq!(engine.read(&mut [0]).await.unwrap(), 0, "closed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_not_kept_for_longer_than_engines_keep_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (connection, mut engine) = connected(&listener).await;
        let idle = IdleConnections::new();
        idle.keep(connection);
        assert_eq!(engine.read(&mut [0]).await.unwrap(), 0, "closed");
        assert!(take(&idle).await.is_none());
    }
}
