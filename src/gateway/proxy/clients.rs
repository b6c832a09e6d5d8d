//! Limits on the connections and TLS handshakes of all clients, and on the memory of their request
//! bodies.
//!
//! | resource | size | owner | gives way | without room |
//! |---|---|---|---|---|
//! | connections | `server.max_connections` | network | oldest without a request | 503 |
//! | refused connections | [`REFUSED_MAX`] | network | the oldest | it is closed, and counted |
//! | TLS handshakes | [`HANDSHAKES_MAX`] | network | the oldest | the oldest is closed |
//! | bytes of bodies | `server.max_body_memory` | key, or network | newest incomplete | 503 |
//!
//! A request with HTTP/2 counts as a connection. Without room, a connection gets 503 to the first
//! request and is closed; a request with HTTP/2 gets `REFUSED_STREAM`, after which clients may
//! retry.
//!
//! Resources are shared by the rule in `shares`; `server.max_connections_per_address` is a hard
//! bound on top. Without it, one network may have requests on three quarters of the connections,
//! because a connection with a request does not give way.
//!
//! Bytes of a body count from arrival until they are freed. A declared size reserves nothing, but a
//! request that declares more than it could get is refused. Spare buffers (`spare_buffers.rs`) are
//! not counted, nor one copy per thread while a body moves to a larger buffer.

use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};

use super::spare_buffers::SpareBuffers;
use super::trust::ProxyReports;
use crate::shares::{Demand, GivesWay, Holding, Owner, Shares, network};
use crate::telemetry::ClientView;
use sluice_config::Server;

/// Connections over the limit that may wait for a 503.
pub(super) const REFUSED_MAX: u64 = 1_024;
/// TLS handshakes at once. Each takes up to 40 KB, and an RSA signature of 2,048 bits takes a
/// millisecond of CPU.
const HANDSHAKES_MAX: u64 = 2_048;
/// Bodies up to this many bytes may use all of the memory. Larger bodies leave one of
/// [`BODY_PARTS`] parts free.
const SMALL_BODY: u64 = 1 << 20;
/// One part in this many of the body memory is kept free for small bodies and newcomers.
const BODY_PARTS: u64 = 8;
/// Bodies that declare at most this many bytes (nearly all do) are counted in one sum without
/// owners, while the sum is at most one of [`BRIEF_PARTS`] parts of the memory.
const BRIEF_BODY: u64 = 64 << 10;
const BRIEF_PARTS: u64 = 16;

/// Counts the connections and bodies of all clients, and enforces the limits.
#[derive(Debug)]
pub struct ClientLimits {
    connections: Arc<Shares>,
    refused: Arc<Shares>,
    handshakes: Arc<Shares>,
    bodies: Arc<Shares>,
    brief: BriefBodies,
    per_address_max: AtomicU64,
    dropped: AtomicU64,
    spare: SpareBuffers,
    pub(super) proxies: ProxyReports,
}

#[derive(Debug, Default)]
struct BriefBodies {
    used: AtomicU64,
    /// The memory of all bodies.
    total: AtomicU64,
}

impl BriefBodies {
    /// Counts more bytes next to `others`. Bodies that arrive at the same moment may together
    /// exceed the memory.
    fn take(&self, bytes: u64, others: u64) -> bool {
        let used = self.used.fetch_add(bytes, Relaxed);
        let fits = self.fits(used + bytes, others);
        if !fits {
            self.used.fetch_sub(bytes, Relaxed);
        }
        fits
    }

    fn has_room(&self, bytes: u64, others: u64) -> bool {
        self.fits(self.used.load(Relaxed).saturating_add(bytes), others)
    }

    fn fits(&self, used: u64, others: u64) -> bool {
        let total = self.total.load(Relaxed);
        used <= total / BRIEF_PARTS && used.saturating_add(others) <= total
    }
}

impl Default for ClientLimits {
    /// Allows nothing.
    fn default() -> Self {
        Self {
            connections: Shares::new(GivesWay::Oldest, 0, 0),
            refused: Shares::new(GivesWay::Oldest, REFUSED_MAX, 0),
            handshakes: Shares::new(GivesWay::Oldest, HANDSHAKES_MAX, 0),
            bodies: Shares::new(GivesWay::Newest, 0, 0),
            brief: BriefBodies::default(),
            per_address_max: AtomicU64::new(u64::MAX),
            dropped: AtomicU64::new(0),
            spare: SpareBuffers::default(),
            proxies: ProxyReports::default(),
        }
    }
}

impl ClientLimits {
    /// The limits of a configuration.
    pub fn new(server: &Server) -> Arc<Self> {
        let limits = Self::default();
        limits.configure(server);
        Arc::new(limits)
    }

    #[cfg(test)]
    pub(super) fn of_bodies(bytes: u64) -> Arc<Self> {
        let limits = Self::default();
        limits.bodies.resize(bytes, bytes / BODY_PARTS);
        Arc::new(limits)
    }

    /// Applies the limits of a newer configuration. Existing connections and bodies stay.
    pub fn configure(&self, server: &Server) {
        self.connections.resize(server.max_connections as u64, server.connections_for_others() as u64);
        let hard = server.max_connections_per_address.map_or(u64::MAX, |max| max as u64);
        self.per_address_max.store(hard, Relaxed);
        let bytes = server.max_body_memory.0;
        self.brief.total.store(bytes, Relaxed);
        self.bodies.resize(bytes, bytes / BODY_PARTS);
    }

    /// The current counts, for metrics.
    pub fn view(&self) -> ClientView {
        let (connections, refused) = (self.connections.view(), self.refused.view());
        let (handshakes, bodies) = (self.handshakes.view(), self.bodies.view());
        ClientView {
            connections: (connections.used + refused.used) as usize,
            connections_max: connections.total as usize,
            dropped: self.dropped.load(Relaxed) + refused.gave_way,
            body_bytes: bodies.used + self.brief.used.load(Relaxed),
            body_bytes_max: bodies.total,
            handshakes: handshakes.used as usize,
            connections_gave_way: connections.gave_way,
            handshakes_gave_way: handshakes.gave_way,
            bodies_gave_way: bodies.gave_way,
            proxy_headers_refused: self.proxies.refused(),
            ..ClientView::default()
        }
    }

    /// Counts a connection from `address`; `None`: close it at once.
    pub(super) fn connected(self: &Arc<Self>, address: IpAddr, server: &Server) -> Option<CountedConnection> {
        let is_proxy = server.is_trusted_proxy(address);
        let owner = if is_proxy { Owner::Proxy(network(address)) } else { Owner::network(address) };
        let most = if is_proxy { u64::MAX } else { self.per_address_max.load(Relaxed) };
        let served = self.connections.enter(owner.clone(), Demand { most, ..Demand::of(1) });
        let refused = served.is_none();
        let place = served.or_else(|| self.refused.enter(owner.clone(), Demand::of(1)));
        let Some(place) = place else {
            self.dropped.fetch_add(1, Relaxed);
            return None;
        };
        let is_offered = AtomicBool::new(true);
        Some(CountedConnection { limits: Arc::clone(self), place, owner, address, refused, is_offered })
    }

    /// Closes the largest owner's oldest idle connection, to free a descriptor. Returns whether
    /// there was one.
    pub(super) fn close_one(&self) -> bool {
        self.connections.yield_one()
    }

    #[cfg(test)]
    pub(super) fn end_one_handshake(&self) -> bool {
        self.handshakes.yield_one()
    }

    pub(super) fn body(self: &Arc<Self>, owner: Owner) -> CountedBytes {
        CountedBytes { limits: Arc::clone(self), owner, place: None, bytes: 0, is_brief: false, brief: 0 }
    }
}

/// Counts a connection until it is dropped.
#[derive(Debug)]
pub(super) struct CountedConnection {
    limits: Arc<ClientLimits>,
    place: Holding,
    owner: Owner,
    /// The client, or a trusted proxy that has not named the client.
    address: IpAddr,
    /// Whether the connection is over the limit, so that the first request is refused.
    pub(super) refused: bool,
    /// Whether the connection has no request and may give way.
    is_offered: AtomicBool,
}

impl CountedConnection {
    pub(super) fn limits(&self) -> &Arc<ClientLimits> {
        &self.limits
    }

    /// The address at the other end, or the one that a PROXY header has named.
    pub(super) fn address(&self) -> IpAddr {
        self.address
    }

    /// Counts the connection for the client that a proxy has named; `None`: close it at once.
    pub(super) fn named(self, client: IpAddr, server: &Server) -> Option<Self> {
        let limits = Arc::clone(&self.limits);
        drop(self);
        limits.connected(client, server)
    }

    /// Returns when the connection, which has no request now, must be closed to make room.
    pub(super) async fn gave_way(&self) {
        self.is_offered.store(true, Relaxed);
        poll_fn(|cx| self.place.poll_offered(&self.owner, cx)).await;
    }

    /// Begins a request of `client`, during which the connection does not give way. Returns `false`
    /// if too many connections have requests.
    pub(super) fn begin(&self, client: IpAddr) -> bool {
        if self.refused {
            return false;
        }
        if !self.is_offered.load(Relaxed) {
            return true;
        }
        let begun = if matches!(self.owner, Owner::Proxy(_)) && client != self.address {
            self.place.keep_as(Owner::network(client), self.limits.per_address_max.load(Relaxed))
        } else {
            self.place.keep()
        };
        self.is_offered.store(!begun, Relaxed);
        begun
    }

    /// Counts a request of `client` on a connection that carries several; `None`: there are too
    /// many.
    pub(super) fn request(&self, client: IpAddr) -> Option<Holding> {
        let was_offered = self.is_offered.load(Relaxed);
        if self.refused || was_offered && !self.place.keep() {
            return None;
        }
        let most = self.limits.per_address_max.load(Relaxed);
        let place = self.limits.connections.enter_kept(Owner::network(client), Demand { most, ..Demand::of(1) });
        match &place {
            Some(_) => self.is_offered.store(false, Relaxed),
            // No request has begun, so the connection may give way as before.
            None if was_offered => self.place.offer(&self.owner),
            None => {}
        }
        place
    }

    /// A place for a TLS handshake, if there is one.
    pub(super) fn handshake(&self) -> Option<Holding> {
        self.limits.handshakes.enter(self.owner.clone(), Demand::of(1))
    }
}

/// Counts the bytes of one body until it is dropped.
#[derive(Debug)]
pub(super) struct CountedBytes {
    limits: Arc<ClientLimits>,
    owner: Owner,
    place: Option<Holding>,
    bytes: u64,
    is_brief: bool,
    brief: u64,
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        if self.brief > 0 {
            self.limits.brief.used.fetch_sub(self.brief, Relaxed);
        }
    }
}

impl CountedBytes {
    /// Whether a body of this many bytes could be counted now.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let limits = &self.limits;
        let is_brief = bytes <= BRIEF_BODY && limits.brief.has_room(bytes, limits.bodies.used());
        is_brief || self.limits.bodies.could(&self.owner, self.demand(bytes, bytes))
    }

    /// The demand for `by` bytes of a body that then has `size` bytes.
    fn demand(&self, by: u64, size: u64) -> Demand {
        let max = if size > SMALL_BODY { self.limits.bodies.view().total } else { 0 };
        let brief = self.limits.brief.used.load(Relaxed);
        Demand { spare: brief + max / BODY_PARTS, ..Demand::of(by) }
    }

    /// Counts more bytes of an incomplete body; `false`: there is no room, or the body gave way.
    pub(super) fn grow(&mut self, by: usize) -> bool {
        self.count(by, false)
    }

    pub(super) fn grow_to_end(&mut self, by: usize) -> bool {
        let is_first = self.place.is_none();
        self.count(by, is_first) && (is_first || self.complete())
    }

    pub(super) fn expect(&mut self, size: u64) {
        self.is_brief = size <= BRIEF_BODY;
    }

    fn count(&mut self, by: usize, kept: bool) -> bool {
        let by = by as u64;
        if self.is_brief && self.limits.brief.take(by, self.limits.bodies.used()) {
            self.brief += by;
            return true;
        }
        let demand = self.demand(by, self.bytes + by);
        let grown = match &self.place {
            Some(place) => place.grow(demand),
            None => {
                let enter = if kept { Shares::enter_kept } else { Shares::enter };
                self.place = enter(&self.limits.bodies, self.owner.clone(), demand);
                self.place.is_some()
            }
        };
        self.bytes += if grown { by } else { 0 };
        grown
    }

    /// Notes that the body is complete and does not give way any more. `false`: it gave way before,
    /// or the owner has too much already.
    pub(super) fn complete(&self) -> bool {
        self.place.as_ref().is_none_or(Holding::keep)
    }

    pub(super) fn poll_gave_way(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.as_ref().map_or(Poll::Pending, |place| place.poll_gave_way(cx))
    }

    /// An empty buffer for `size` bytes, if one is left over from another body.
    pub(super) fn spare_buffer(&self, size: usize) -> Option<BytesMut> {
        self.limits.spare.take(size)
    }

    /// Returns the body. The bytes count until the last slice of it is dropped.
    pub(super) fn keep(self, body: Bytes) -> Bytes {
        Bytes::from_owner(CountedBody { body, _counted: self })
    }

    /// The same as [`keep`](Self::keep), for a body in a buffer that is used again afterwards.
    pub(super) fn keep_buffer(self, buffer: BytesMut) -> Bytes {
        Bytes::from_owner(CountedBuffer { buffer, counted: self })
    }
}

struct CountedBody {
    body: Bytes,
    /// The count, dropped after the bytes.
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

#[cfg(test)]
pub(super) mod tests;
