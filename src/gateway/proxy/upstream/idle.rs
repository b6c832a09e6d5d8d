//! Idle connections to engines.
//!
//! No task waits for a connection: a request takes the one that was kept last, and checks that it
//! is open and silent. While there are idle connections, a task closes the old ones, at most
//! [`SWEEP`] late. Why not pingora's connector: there the pool and a task for each
//! connection share it through a lock and a reference count, so a request that comes when only one
//! of them has released the connection drops it and opens a new one. On two busy cores that
//! happened to one request in four.
//!
//! Bounds: [`IDLE_MAX`] connections in all, each for [`limits::UPSTREAM_IDLE`] and [`SWEEP`].

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use foldhash::quality::FixedState;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Instant, sleep};

use crate::connect::EngineStream;
use sluice_config::Address;
use sluice_config::limits;
use sluice_config::tls::ClientTls;

/// The most idle connections; the oldest is closed first.
const IDLE_MAX: usize = 4_096;

/// Interval at which connections that are too old are looked for.
const SWEEP: Duration = Duration::from_millis(500);

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

struct IdleConnection {
    connection: EngineConnection,
    since: Instant,
}

impl IdleConnection {
    fn is_old(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= limits::UPSTREAM_IDLE
    }
}

struct IdleTable {
    /// By key, the oldest first.
    lists: HashMap<u64, VecDeque<IdleConnection>, FixedState>,
    count: usize,
    most: usize,
    /// Whether [`sweep`] runs.
    is_swept: bool,
}

pub(super) struct IdleConnections(Arc<Mutex<IdleTable>>);

impl std::fmt::Debug for IdleConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdleConnections").finish_non_exhaustive()
    }
}

impl IdleConnections {
    pub(super) fn new() -> Self {
        Self::at_most(IDLE_MAX)
    }

    fn at_most(most: usize) -> Self {
        Self(Arc::new(Mutex::new(IdleTable { lists: HashMap::default(), count: 0, most, is_swept: false })))
    }

    /// Takes an open connection whose address `is_current`, and closes others before it.
    pub(super) fn take(&self, key: u64, is_current: impl Fn(SocketAddr) -> bool) -> Option<EngineConnection> {
        loop {
            let IdleConnection { mut connection, since } = self.0.lock().pop(key)?;
            let is_young = since.elapsed() < limits::UPSTREAM_IDLE;
            if is_young && is_current(connection.socket) && is_quiet(&mut connection.stream) {
                return Some(EngineConnection { reused: true, ..connection });
            }
        }
    }

    /// Keeps a connection that has no response outstanding.
    pub(super) fn keep(&self, connection: EngineConnection) {
        let mut table = self.0.lock();
        let removed = table.push(IdleConnection { connection, since: Instant::now() });
        let is_swept = std::mem::replace(&mut table.is_swept, true);
        drop(table);
        // Closed without the lock.
        drop(removed);
        if !is_swept {
            tokio::spawn(sweep(Arc::clone(&self.0)));
        }
    }
}

/// Closes the connections that are too old, until none is left.
async fn sweep(table: Arc<Mutex<IdleTable>>) {
    loop {
        sleep(SWEEP).await;
        let mut table = table.lock();
        let removed = table.remove_old(Instant::now());
        table.is_swept = table.count > 0;
        let is_over = !table.is_swept;
        drop(table);
        drop(removed);
        if is_over {
            return;
        }
    }
}

impl IdleTable {
    /// Adds a connection. Returns the oldest one if there are too many.
    fn push(&mut self, idle: IdleConnection) -> Option<IdleConnection> {
        let removed = if self.count < self.most { None } else { self.pop_oldest() };
        self.lists.entry(idle.connection.key).or_default().push_back(idle);
        self.count += 1;
        removed
    }

    fn pop(&mut self, key: u64) -> Option<IdleConnection> {
        let idle = self.lists.get_mut(&key)?.pop_back()?;
        self.count -= 1;
        Some(idle)
    }

    fn pop_oldest(&mut self) -> Option<IdleConnection> {
        let first = |list: &VecDeque<IdleConnection>| list.front().map(|idle| idle.since);
        let lists = self.lists.values_mut().filter(|list| !list.is_empty());
        let idle = lists.min_by_key(|list| first(list))?.pop_front()?;
        self.count -= 1;
        Some(idle)
    }

    /// Removes the connections that are too old.
    fn remove_old(&mut self, now: Instant) -> Vec<IdleConnection> {
        let mut removed = Vec::new();
        for list in self.lists.values_mut() {
            let old = list.iter().take_while(|idle| idle.is_old(now)).count();
            removed.extend(list.drain(..old));
        }
        self.lists.retain(|_, list| !list.is_empty());
        self.count -= removed.len();
        removed
    }
}

fn is_quiet(stream: &mut EngineStream) -> bool {
    let mut byte = [0];
    let mut context = Context::from_waker(Waker::noop());
    Pin::new(stream).poll_read(&mut context, &mut ReadBuf::new(&mut byte)).is_pending()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
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

    fn plain(connection: &EngineConnection) -> &TcpStream {
        let EngineStream::Left(plain) = &connection.stream else { panic!("TLS") };
        plain
    }

    fn port(connection: &EngineConnection) -> u16 {
        plain(connection).local_addr().unwrap().port()
    }

    fn take(idle: &IdleConnections) -> Option<EngineConnection> {
        idle.take(KEY, |_| true)
    }

    #[tokio::test]
    async fn a_connection_that_is_kept_is_there_for_the_next_request() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (mut connection, mut engine) = connected(&listener).await;
        let (idle, id) = (IdleConnections::new(), port(&connection));
        for round in 0..5_000 {
            idle.keep(connection);
            connection = take(&idle).unwrap_or_else(|| panic!("lost in round {round}"));
        }
        assert_eq!(port(&connection), id);
        connection.stream.write_all(b"x").await.unwrap();
        connection.stream.flush().await.unwrap();
        assert_eq!(engine.read_u8().await.unwrap(), b'x');
        assert!(take(&idle).is_none(), "it is in use");
    }

    #[tokio::test]
    async fn a_connection_that_was_closed_or_spoken_on_is_passed_over() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let idle = IdleConnections::new();
        let (open, mut engine) = connected(&listener).await;
        idle.keep(open);
        let (talked_to, mut talking) = connected(&listener).await;
        talking.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").await.unwrap();
        let (closed, ended) = connected(&listener).await;
        drop(ended);
        for connection in [talked_to, closed] {
            plain(&connection).readable().await.unwrap();
            idle.keep(connection);
        }
        let mut left = take(&idle).expect("one is left");
        left.stream.write_all(b"x").await.unwrap();
        left.stream.flush().await.unwrap();
        assert_eq!(engine.read_u8().await.unwrap(), b'x');
        assert!(take(&idle).is_none());
    }

    #[tokio::test]
    async fn a_connection_to_an_address_that_is_gone_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let idle = IdleConnections::new();
        let (connection, mut engine) = connected(&listener).await;
        idle.keep(connection);
        assert!(idle.take(KEY, |_| false).is_none());
        assert_eq!(engine.read(&mut [0]).await.unwrap(), 0, "closed");
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_connection_gives_way_when_there_are_too_many() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let idle = IdleConnections::at_most(2);
        let mut ports = Vec::new();
        for key in [1, 2, 1] {
            tokio::time::advance(Duration::from_millis(1)).await;
            let (connection, _) = connected(&listener).await;
            ports.push(port(&connection));
            idle.0
                .lock()
                .push(IdleConnection { connection: EngineConnection { key, ..connection }, since: Instant::now() });
        }
        let mut table = idle.0.lock();
        let mut left = |key| table.pop(key).map(|idle| port(&idle.connection));
        assert_eq!([left(1), left(1), left(2), left(2)], [Some(ports[2]), None, Some(ports[1]), None]);
        assert_eq!(table.count, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_not_kept_for_longer_than_engines_keep_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (connection, mut engine) = connected(&listener).await;
        let idle = IdleConnections::new();
        idle.keep(connection);
        assert_eq!(engine.read(&mut [0]).await.unwrap(), 0, "closed");
        assert!(take(&idle).is_none());
    }
}
