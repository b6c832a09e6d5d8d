//! The limits of clients by example; the rule of shares is tested in `shares`.
//!
//! Other tests of `proxy` also use the helpers.

use std::path::Path;
use std::time::Duration;

use tokio::time::timeout;

use super::*;
use sluice_config::{Config, Machine, Surroundings};

pub(in crate::proxy) fn server(sets: &[&str]) -> Server {
    let around = Surroundings { env: &|_| None, folder: Path::new("/").to_owned(), machine: Machine::with_cores(1) };
    let text =
        "[[pool]]\nname = \"p\"\nmodels = [\"*\"]\n[[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:1\"\n";
    let sets: Vec<String> = sets.iter().map(|set| format!("server.{set}")).collect();
    Config::parse(text, "test", &sets, &around).unwrap_or_else(|problems| panic!("{problems}")).config.server
}

/// A connection that counts as one over the limit.
pub(in crate::proxy) fn connection() -> Arc<CountedConnection> {
    let counted = Arc::new(ClientLimits::default()).connected([127, 0, 0, 1].into(), &server(&[]));
    Arc::new(counted.unwrap())
}

fn limits(connections: usize) -> (Arc<ClientLimits>, Server) {
    let server = server(&[&format!("max_connections={connections}")]);
    (ClientLimits::new(&server), server)
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn network_of(text: &str) -> Owner {
    Owner::network(address(text))
}

async fn is_closed(connection: &CountedConnection) -> bool {
    timeout(Duration::ZERO, connection.gave_way()).await.is_ok()
}

#[tokio::test]
async fn one_address_may_have_every_connection_until_another_comes() {
    let (limits, server) = limits(4);
    let connect = |from: &str| limits.connected(address(from), &server).unwrap();
    let held = ["10.0.0.1", "::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1"].map(connect);
    assert!(held.iter().all(|place| !place.refused));
    assert!(held[0].begin(address("10.0.0.1")));
    let other = connect("10.0.0.2");
    assert!(!other.refused && other.begin(address("10.0.0.2")));
    assert!(is_closed(&held[1]).await && !is_closed(&held[2]).await, "the oldest without a request");
    assert_eq!(limits.view().connections_gave_way, 1);
    drop((held, other));
    assert_eq!(limits.view().connections, 0);
}

#[test]
fn connections_with_a_request_leave_a_quarter_to_others() {
    let (limits, server) = limits(4);
    let connect = |from: &str| limits.connected(address(from), &server).unwrap();
    let held = ["10.0.0.1"; 4].map(connect);
    assert_eq!([0, 1, 2, 3].map(|at: usize| held[at].begin(address("10.0.0.1"))), [true, true, true, false]);
    let other = connect("10.0.0.2");
    assert!(!other.refused && other.begin(address("10.0.0.2")));
    assert!(connect("10.0.0.3").refused, "no one is without a request");
}

#[test]
fn the_limit_of_an_address_holds_whatever_is_free() {
    let server = server(&["max_connections=100", "max_connections_per_address=2"]);
    let limits = ClientLimits::new(&server);
    let connect = |from: &str| limits.connected(address(from), &server).unwrap();
    let held = ["2001:db8:0:1::1", "2001:db8:0:1:ffff::9"].map(connect);
    assert!(held.iter().all(|place| !place.refused && place.begin(address("2001:db8:0:1::1"))));
    assert!(connect("2001:db8:0:1::2").refused && !connect("2001:db8:0:2::1").refused);
}

#[test]
fn requests_that_share_a_connection_count_as_connections() {
    let (limits, server) = limits(4);
    let one = address("10.0.0.1");
    let connection = limits.connected(one, &server).unwrap();
    let (first, second) = (connection.request(one).unwrap(), connection.request(one));
    assert!(second.is_some() && connection.request(one).is_none(), "three quarters with one address");
    let other = limits.connected(address("10.0.0.2"), &server).unwrap();
    assert!(!other.refused && other.request(address("10.0.0.2")).is_none(), "four in all");
    assert_eq!(limits.view().connections, 4);
    drop(first);
    assert!(connection.request(one).is_some(), "a place that is returned is free");
    drop((connection, second, other));
    assert_eq!(limits.view().connections, 0);
}

#[tokio::test]
async fn requests_behind_a_trusted_proxy_count_for_the_clients_that_it_names() {
    let server = server(&["max_connections=8", "max_connections_per_address=1", "trusted_proxies=[\"10.0.0.0/8\"]"]);
    let limits = ClientLimits::new(&server);
    let proxy = || limits.connected(address("10.0.0.1"), &server).unwrap();
    let (first, second) = (proxy(), proxy());
    assert!(!first.refused && !second.refused, "the bound is not for proxies");
    assert!(first.begin(address("192.0.2.1")) && !second.begin(address("192.0.2.1")));
    assert!(second.begin(address("192.0.2.2")));
    assert!(!is_closed(&first).await, "it has no request any more");
    let third = proxy();
    assert!(third.begin(address("192.0.2.1")));
    // A PROXY header names the client of the whole connection.
    let named = proxy().named(address("192.0.2.3"), &server).unwrap();
    assert!(!named.refused && named.address() == address("192.0.2.3"));
    assert!(proxy().named(address("192.0.2.3"), &server).unwrap().refused);
    drop((first, second, third, named));
    assert_eq!(limits.view().connections, 0);
}

#[tokio::test]
async fn of_connections_that_are_refused_the_oldest_gives_way() {
    let (limits, server) = (Arc::new(ClientLimits::default()), server(&[]));
    let connect = || limits.connected(address("::1"), &server).unwrap();
    let refused: Vec<CountedConnection> = (0..REFUSED_MAX).map(|_| connect()).collect();
    assert!(refused.iter().all(|place| place.refused));
    let last = connect();
    assert!(last.refused && is_closed(&refused[0]).await && !is_closed(&last).await);
    assert_eq!(limits.view().dropped, 1);
    drop((refused, last));
    assert_eq!(limits.view().connections, 0);
}

#[tokio::test]
async fn a_handshake_always_finds_a_place_who_stops_in_one() {
    let (limits, server) = limits(1_000_000);
    let places = |address: IpAddr| {
        let connection = limits.connected(address, &server).unwrap();
        connection.handshake()
    };
    // First one address takes places, then thousands do.
    let mut held: Vec<Holding> = (0..1_400).map(|_| places(address("10.0.0.1")).unwrap()).collect();
    for number in 0..5_000_u32 {
        let place = places(IpAddr::from((number + 1_000_000).to_be_bytes()));
        held.push(place.unwrap_or_else(|| panic!("handshake {number}")));
        held.retain(|place| {
            let mut cx = Context::from_waker(std::task::Waker::noop());
            place.poll_gave_way(&mut cx).is_pending()
        });
        assert!(limits.view().handshakes as u64 <= HANDSHAKES_MAX);
    }
    drop(held);
    assert_eq!(limits.view().handshakes, 0);
}

#[test]
fn a_body_is_counted_until_its_last_piece_is_dropped() {
    let limits = ClientLimits::of_bodies(114);
    let mut counted = limits.body(network_of("::1"));
    assert!(counted.grow(60) && !counted.grow(55) && counted.grow_to_end(40));
    let body = counted.keep(Bytes::from_static(b"a body"));
    let piece = body.slice(2..4);
    drop(body);
    assert_eq!((limits.view().body_bytes, &piece[..]), (100, &b"bo"[..]));
    assert!(!limits.body(network_of("::1")).grow(15));
    drop(piece);
    assert_eq!(limits.view().body_bytes, 0);
}

#[test]
fn the_buffer_of_a_body_is_used_again_once_its_last_piece_is_dropped() {
    let limits = ClientLimits::of_bodies(8 * SMALL_BODY);
    let body = || limits.body(network_of("::1"));
    let mut buffer = BytesMut::with_capacity(100_000);
    buffer.extend_from_slice(b"body");
    let mut counted = body();
    assert!(counted.grow(4));
    let kept = counted.keep_buffer(buffer);
    let piece = kept.slice(1..2);
    drop(kept);
    assert!(body().spare_buffer(100_000).is_none() && &piece[..] == b"o");
    drop(piece);
    assert_eq!(limits.view().body_bytes, 0);
    let again = body().spare_buffer(100_000).unwrap();
    assert!(again.is_empty() && again.capacity() == 100_000);
}

#[test]
fn a_declared_size_is_checked_and_not_counted() {
    let limits = ClientLimits::of_bodies(8 * SMALL_BODY);
    let mut held = limits.body(network_of("::1"));
    assert!(held.grow(6 << 20));
    let body = limits.body(network_of("::1"));
    assert!(body.has_room(1 << 20) && body.has_room(SMALL_BODY) && !body.has_room((1 << 20) + 1));
    assert!(!body.has_room(u64::MAX));
    assert!(limits.body(network_of("10.0.0.2")).has_room(4 << 20), "the share of another client");
    assert_eq!(limits.view().body_bytes, 6 << 20);
}

#[test]
fn large_bodies_leave_room_for_small_ones() {
    let limits = ClientLimits::of_bodies(8 * SMALL_BODY);
    let body = || limits.body(network_of("::1"));
    let mut large = body();
    assert!(large.grow(7 << 20));
    assert!(!large.grow(1) && !body().grow((1 << 20) + 1));
    let mut small = body();
    assert!(small.grow(1 << 20) && !body().grow(1));
}

#[test]
fn an_unfinished_upload_gives_way_to_another_key_and_a_complete_body_does_not() {
    let limits = ClientLimits::of_bodies(80);
    let body = |key: &str| limits.body(Owner::Key(key.into()));
    let mut complete = body("evil");
    assert!(complete.grow_to_end(40));
    let mut slow: Vec<CountedBytes> = (0..4).map(|_| body("evil")).collect();
    assert!(slow.iter_mut().all(|body| body.grow(10)) && !body("evil").grow(1));
    let mut good = body("good");
    assert!(good.grow(10), "the newest gives way");
    let mut cx = Context::from_waker(std::task::Waker::noop());
    let gone: Vec<bool> = slow.iter().map(|body| body.poll_gave_way(&mut cx).is_ready()).collect();
    assert_eq!(gone, [false, false, false, true]);
    assert!(!good.grow(5) && !slow[3].complete() && !slow[3].grow(1), "its bytes are not returned yet");
    drop(slow.pop());
    assert!(good.grow(5) && good.complete() && complete.complete());
    assert!(slow[2].poll_gave_way(&mut cx).is_ready());
}

#[test]
fn complete_bodies_leave_an_eighth_to_others() {
    let limits = ClientLimits::of_bodies(80);
    let body = |key: &str| limits.body(Owner::Key(key.into()));
    let mut held: Vec<CountedBytes> = (0..7).map(|_| body("evil")).collect();
    assert!(held.iter_mut().all(|body| body.grow_to_end(10)));
    assert!(!body("evil").grow_to_end(10));
    let mut good = body("good");
    assert!(good.grow_to_end(10));
    drop((held, good));
    assert_eq!(limits.view().body_bytes, 0);
}
