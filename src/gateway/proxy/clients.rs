//! Limits on the connections of all clients, in total and per address, and on the memory of their request bodies.
//!
//! | limit | key | when exceeded |
//! |---|---|---|
//! | connections | `server.max_connections` | 503 to the first request, then the connection is closed |
//! | connections of one address | `server.max_connections_per_address` | the same |
//! | requests on connections with HTTP/2 | the same two, as if each came on a connection of its own | refused, safe to retry |
//! | connections that are being refused | [`REFUSED_MAX`] | closed at once, and counted |
//! | bytes of bodies | `server.max_body_memory` | 503 |
//!
//! The bytes of a body count from their arrival until they are freed: while the request is read, queued, sent, and may still
//! be retried. A declared size reserves nothing, but a request that declares more than is free is refused. While a body grows,
//! it may be copied to a larger buffer; that copy is not counted. There is at most one per thread at a time. Nor are buffers counted
//! that are kept for later bodies (`spare_buffers.rs`).
//!
//! The address is the peer address of the connection. IPv6 addresses count by their /64 network, because one host can use all
//! addresses of it. The map contains only addresses with open connections.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use super::spare_buffers::SpareBuffers;
use crate::config::Server;
use crate::telemetry::ClientView;

/// Connections over the limit that may wait for their 503 at the same time.
pub(super) const REFUSED_MAX: usize = 1_024;
/// Bodies up to this size may use all of the memory, larger ones only [`LARGE_SHARE`] eighths of it.
const SMALL_BODY: u64 = 1 << 20;
const LARGE_SHARE: u64 = 7;

/// Counts the connections and bodies of all clients, and enforces the limits.
#[derive(Debug, Default)]
pub struct ClientLimits {
    connections_max: AtomicUsize,
    per_address_max: AtomicUsize,
    body_max: AtomicU64,
    body_bytes: AtomicU64,
    dropped: AtomicU64,
    open: Mutex<OpenConnections>,
    spare: SpareBuffers,
}

#[derive(Debug, Default)]
struct OpenConnections {
    /// Connections, and requests on connections with HTTP/2.
    served: usize,
    refused: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl ClientLimits {
    /// The limits of a configuration.
    pub fn new(server: &Server) -> Arc<Self> {
        let limits = Self::default();
        limits.configure(server);
        Arc::new(limits)
    }

    /// Limits that allow bodies of so many bytes together, and no connection.
    #[cfg(test)]
    pub(super) fn of_bodies(bytes: u64) -> Arc<Self> {
        let limits = Self::default();
        limits.body_max.store(bytes, Relaxed);
        Arc::new(limits)
    }

    /// Applies the limits of a newer configuration. Existing connections and bodies stay.
    pub fn configure(&self, server: &Server) {
        self.connections_max.store(server.max_connections, Relaxed);
        self.per_address_max.store(server.connections_per_address(), Relaxed);
        self.body_max.store(server.max_body_memory.0, Relaxed);
    }

    /// The current counts, for metrics.
    pub fn view(&self) -> ClientView {
        let connections = {
            let open = self.open.lock();
            open.served + open.refused
        };
        ClientView {
            connections,
            connections_max: self.connections_max.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
            body_bytes: self.body_bytes.load(Relaxed),
            body_bytes_max: self.body_max.load(Relaxed),
        }
    }

    /// Counts a connection from `address`. `None`: close it at once.
    pub(super) fn connected(self: &Arc<Self>, address: IpAddr) -> Option<CountedConnection> {
        let network = network(address);
        let mut open = self.open.lock();
        let served = self.count(&mut open, network);
        if !served && open.refused >= REFUSED_MAX {
            self.dropped.fetch_add(1, Relaxed);
            return None;
        }
        open.refused += usize::from(!served);
        Some(CountedConnection { limits: Arc::clone(self), network, refused: !served })
    }

    /// Counts a connection or request that is served. False: there are too many.
    fn count(&self, open: &mut OpenConnections, network: IpAddr) -> bool {
        let has_room = open.served < self.connections_max.load(Relaxed);
        let counted = has_room && open.count(network, self.per_address_max.load(Relaxed));
        open.served += usize::from(counted);
        counted
    }

    /// Starts to count a body.
    pub(super) fn body(self: &Arc<Self>) -> CountedBytes {
        CountedBytes { limits: Arc::clone(self), bytes: 0 }
    }
}

impl OpenConnections {
    /// Counts one more connection of a network. False: it is at its limit.
    fn count(&mut self, network: IpAddr, max: usize) -> bool {
        let count = self.by_address.entry(network).or_insert(0);
        if *count >= max {
            return false;
        }
        *count += 1;
        true
    }

    /// Returns what [`ClientLimits::count`] has counted.
    fn release(&mut self, network: IpAddr) {
        self.served -= 1;
        if let Entry::Occupied(mut count) = self.by_address.entry(network) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// A counted connection; dropping it reduces the count.
#[derive(Debug)]
pub(super) struct CountedConnection {
    limits: Arc<ClientLimits>,
    network: IpAddr,
    /// The connection is over the limit: its first request is refused.
    pub(super) refused: bool,
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        let mut open = self.limits.open.lock();
        match self.refused {
            true => open.refused -= 1,
            false => open.release(self.network),
        }
    }
}

impl CountedConnection {
    /// The address for counting: that of the client, or its network.
    pub(super) fn network(&self) -> IpAddr {
        self.network
    }

    /// Counts a request on this connection, where it is one of several. `None`: there are too many.
    pub(super) fn request(&self) -> Option<CountedRequest> {
        let counted = self.limits.count(&mut self.limits.open.lock(), self.network);
        counted.then(|| CountedRequest { limits: Arc::clone(&self.limits), network: self.network })
    }
}

/// A counted request on a connection with HTTP/2; dropping it reduces the count.
#[derive(Debug)]
pub(super) struct CountedRequest {
    limits: Arc<ClientLimits>,
    network: IpAddr,
}

impl Drop for CountedRequest {
    fn drop(&mut self) {
        self.limits.open.lock().release(self.network);
    }
}

/// The counted bytes of one body; dropping it reduces the count.
#[derive(Debug)]
pub(super) struct CountedBytes {
    limits: Arc<ClientLimits>,
    bytes: u64,
}

impl CountedBytes {
    /// Whether this many more bytes would be within the limit now. Does not count them.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.limits.body_bytes.load(Relaxed).saturating_add(bytes) <= self.max(bytes)
    }

    /// The limit on all bodies that applies to a body of `bytes`.
    fn max(&self, bytes: u64) -> u64 {
        let max = self.limits.body_max.load(Relaxed);
        if bytes > SMALL_BODY { max / 8 * LARGE_SHARE } else { max }
    }

    /// Counts more bytes. False: they would exceed the limit.
    pub(super) fn grow(&mut self, by: usize) -> bool {
        let by = by as u64;
        if self.limits.body_bytes.fetch_add(by, Relaxed) + by > self.max(self.bytes + by) {
            self.limits.body_bytes.fetch_sub(by, Relaxed);
            return false;
        }
        self.bytes += by;
        true
    }

    /// An empty buffer for `size` bytes, if one is left over from another body.
    pub(super) fn spare_buffer(&self, size: usize) -> Option<BytesMut> {
        self.limits.spare.take(size)
    }

    /// Returns the body, which counts until its last slice is dropped.
    pub(super) fn keep(self, body: Bytes) -> Bytes {
        Bytes::from_owner(CountedBody { body, _counted: self })
    }

    /// The same for a body in a buffer, which is used again afterwards.
    pub(super) fn keep_buffer(self, buffer: BytesMut) -> Bytes {
        Bytes::from_owner(CountedBuffer { buffer, counted: self })
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.limits.body_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

struct CountedBody {
    body: Bytes,
    /// Dropped after the bytes.
    _counted: CountedBytes,
}

impl AsRef<[u8]> for CountedBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

struct CountedBuffer {
    buffer: BytesMut,
    counted: CountedBytes,
}

impl AsRef<[u8]> for CountedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for CountedBuffer {
    fn drop(&mut self) {
        self.counted.limits.spare.keep(std::mem::take(&mut self.buffer));
    }
}

/// The address for counting: an IPv4 address, or the /64 network of an IPv6 address.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(connections: usize, per_address: usize, body: u64) -> Arc<ClientLimits> {
        let limits = ClientLimits::default();
        limits.connections_max.store(connections, Relaxed);
        limits.per_address_max.store(per_address, Relaxed);
        limits.body_max.store(body, Relaxed);
        Arc::new(limits)
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn connections_are_bounded_in_all_and_by_address() {
        let limits = limits(4, 2, 0);
        let connect = |from: &str| limits.connected(address(from)).unwrap();
        let (first, second) = (connect("10.0.0.1"), connect("::ffff:10.0.0.1"));
        assert!(!first.refused && !second.refused);
        let third = connect("10.0.0.1");
        assert!(third.refused, "two of one address");
        let others = [connect("2001:db8::1"), connect("2001:db8::2:0:0:1")];
        assert!(others.iter().all(|place| !place.refused));
        assert!(connect("10.0.0.2").refused, "four in all");
        drop(first);
        drop(connect("10.0.0.1"));
        assert!(!connect("10.0.0.1").refused, "a place that is returned is free");
        assert_eq!(limits.view().connections, 4);
        drop((second, third, others));
        assert_eq!(limits.view().connections, 0);
        assert!(limits.open.lock().by_address.is_empty());
    }

    #[test]
    fn requests_that_share_a_connection_count_as_connections() {
        let limits = limits(4, 3, 0);
        let connection = limits.connected(address("10.0.0.1")).unwrap();
        let (first, second) = (connection.request().unwrap(), connection.request());
        assert!(second.is_some() && connection.request().is_none(), "three of one address");
        let other = limits.connected(address("10.0.0.2")).unwrap();
        assert!(!other.refused && other.request().is_none(), "four in all");
        assert_eq!(limits.view().connections, 4);
        drop(first);
        assert!(connection.request().is_some(), "a place that is returned is free");
        drop((connection, second, other));
        assert!(limits.view().connections == 0 && limits.open.lock().by_address.is_empty());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let limits = limits(9, 1, 0);
        let _first = limits.connected(address("2001:db8:0:1::1"));
        assert!(limits.connected(address("2001:db8:0:1:ffff::9")).unwrap().refused);
        assert!(!limits.connected(address("2001:db8:0:2::1")).unwrap().refused);
    }

    #[test]
    fn connections_that_are_refused_are_bounded_too() {
        let limits = limits(0, 0, 0);
        let refused: Vec<CountedConnection> =
            (0..REFUSED_MAX).map(|_| limits.connected(address("::1")).unwrap()).collect();
        assert!(refused.iter().all(|place| place.refused));
        assert!(limits.connected(address("::1")).is_none());
        assert_eq!(limits.view().dropped, 1);
        drop(refused);
        assert!(limits.connected(address("::1")).is_some());
        assert!(limits.open.lock().by_address.is_empty(), "the map holds served connections only");
    }

    #[test]
    fn a_body_is_counted_until_its_last_piece_is_dropped() {
        let limits = limits(0, 0, 100);
        let mut counted = limits.body();
        assert!(counted.grow(60) && !counted.grow(41) && counted.grow(40));
        let body = counted.keep(Bytes::from_static(b"a body"));
        let piece = body.slice(2..4);
        drop(body);
        assert_eq!((limits.view().body_bytes, &piece[..]), (100, &b"bo"[..]));
        assert!(!limits.body().grow(1));
        drop(piece);
        assert_eq!(limits.view().body_bytes, 0);
    }

    #[test]
    fn the_buffer_of_a_body_is_used_again_once_its_last_piece_is_dropped() {
        let limits = limits(0, 0, 8 * SMALL_BODY);
        let mut buffer = BytesMut::with_capacity(100_000);
        buffer.extend_from_slice(b"body");
        let mut counted = limits.body();
        assert!(counted.grow(4));
        let body = counted.keep_buffer(buffer);
        let piece = body.slice(1..2);
        drop(body);
        assert!(limits.body().spare_buffer(100_000).is_none() && &piece[..] == b"o");
        drop(piece);
        assert_eq!(limits.body_bytes.load(Relaxed), 0);
        let again = limits.body().spare_buffer(100_000).unwrap();
        assert!(again.is_empty() && again.capacity() == 100_000);
    }

    #[test]
    fn a_declared_size_is_checked_and_not_counted() {
        let limits = limits(0, 0, 8 * SMALL_BODY);
        let mut held = limits.body();
        assert!(held.grow(6 << 20));
        let body = limits.body();
        assert!(body.has_room(1 << 20) && body.has_room(SMALL_BODY) && !body.has_room((1 << 20) + 1));
        assert!(!body.has_room(u64::MAX));
        assert_eq!(limits.view().body_bytes, 6 << 20);
    }

    #[test]
    fn large_bodies_leave_room_for_small_ones() {
        let limits = limits(0, 0, 8 * SMALL_BODY);
        let mut large = limits.body();
        assert!(large.grow(7 << 20));
        assert!(!large.grow(1) && !limits.body().grow((1 << 20) + 1));
        let mut small = limits.body();
        assert!(small.grow(1 << 20) && !limits.body().grow(1));
    }
}
