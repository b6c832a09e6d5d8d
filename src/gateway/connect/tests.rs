//! The connector with a scripted resolver.
//!
//! Tested on paused time with scripted attempts, and with sockets on several loopback addresses.

use std::collections::VecDeque;
use std::io;

use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::{Instant, advance, sleep};

use super::*;
use sluice_config::Endpoint;

const LIMIT: Duration = Duration::from_secs(2);

/// A resolver that gives each of `answers` in turn, and repeats the last one.
#[derive(Debug, Default)]
struct Scripted {
    answers: Mutex<VecDeque<Result<Vec<SocketAddr>, &'static str>>>,
    asked: Mutex<u32>,
    /// If set, each answer waits for this.
    gate: Option<Notify>,
}

#[derive(Clone, Debug)]
struct TestResolver(Arc<Scripted>);

impl Resolve for TestResolver {
    async fn resolve(&self, _: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
        *self.0.asked.lock() += 1;
        if let Some(gate) = &self.0.gate {
            gate.notified().await;
        }
        let mut answers = self.0.answers.lock();
        let answer = if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() };
        answer.map_err(io::Error::other)
    }
}

fn sockets(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| SocketAddr::new(text.parse().unwrap(), 80)).collect()
}

fn address(host: &str, port: u16) -> Address {
    let endpoint = Endpoint { https: false, host: host.to_owned(), port, prefix: String::new() };
    Address::new(endpoint, None, None)
}

fn connector<const N: usize>(
    answers: [Result<Vec<SocketAddr>, &'static str>; N],
) -> (Connector<TestResolver>, Arc<Scripted>) {
    let scripted = Arc::new(Scripted { answers: Mutex::new(answers.into()), ..Scripted::default() });
    (Connector::new(TestResolver(Arc::clone(&scripted))), scripted)
}

/// Connects while only the addresses of `alive` work and all others refuse. Returns the address,
/// and the addresses that were tried.
async fn connect_to(
    connector: &Connector<TestResolver>,
    alive: &[&str],
) -> (Result<String, ConnectError>, Vec<String>) {
    let tried = Mutex::new(Vec::new());
    let (alive, to) = (sockets(alive), address("engine", 80));
    let connected = connector.connect_by_name(&to, LIMIT, |socket| {
        tried.lock().push(socket.ip().to_string());
        let works = alive.contains(&socket);
        async move { if works { Ok(()) } else { Err(ConnectError::Tcp("refused".to_owned())) } }
    });
    let connected = connected.await.map(|(socket, ())| socket.ip().to_string());
    (connected, tried.into_inner())
}

#[tokio::test(start_paused = true)]
async fn the_next_address_takes_over_and_the_dead_one_is_not_first_again() {
    let (connector, _) = connector([Ok(sockets(&["::1", "127.0.0.1"]))]);
    let (connected, tried) = connect_to(&connector, &["127.0.0.1"]).await;
    assert_eq!((connected.unwrap().as_str(), tried.len()), ("127.0.0.1", 2));
    let (_, tried) = connect_to(&connector, &["127.0.0.1"]).await;
    assert_eq!(tried, ["127.0.0.1"]);
    // The address that worked dies, and the other one comes up.
    let (connected, tried) = connect_to(&connector, &["::1"]).await;
    assert_eq!((connected.unwrap().as_str(), tried.len()), ("::1", 2));
    let (_, tried) = connect_to(&connector, &["::1"]).await;
    assert_eq!(tried, ["::1"]);
}

#[tokio::test(start_paused = true)]
async fn a_name_is_resolved_once_in_a_while_and_not_per_connection() {
    let (connector, resolver) = connector([Ok(sockets(&["10.0.0.1"])), Ok(sockets(&["10.0.0.2"]))]);
    let to = address("engine", 80);
    for _ in 0..50 {
        assert_eq!(connect_to(&connector, &["10.0.0.1", "10.0.0.2"]).await.0.unwrap(), "10.0.0.1");
        assert!(connector.is_current(&to, sockets(&["10.0.0.1"])[0]));
    }
    assert_eq!(*resolver.asked.lock(), 1);
    advance(Duration::from_secs(11)).await;
    // The first use starts a query in the background; after the answer, idle connections to the old
    // address are not used.
    assert_eq!(connect_to(&connector, &["10.0.0.1", "10.0.0.2"]).await.0.unwrap(), "10.0.0.1");
    sleep(Duration::from_millis(1)).await;
    assert_eq!(*resolver.asked.lock(), 2);
    assert_eq!(connect_to(&connector, &["10.0.0.1", "10.0.0.2"]).await.0.unwrap(), "10.0.0.2");
    assert!(!connector.is_current(&to, sockets(&["10.0.0.1"])[0]));
    assert!(connector.is_current(&to, sockets(&["10.0.0.2"])[0]));
}

#[tokio::test(start_paused = true)]
async fn a_name_whose_addresses_all_fail_is_resolved_at_once() {
    let (connector, resolver) = connector([Ok(sockets(&["10.0.0.1"])), Ok(sockets(&["10.0.0.1", "10.0.0.9"]))]);
    assert!(connect_to(&connector, &["10.0.0.1"]).await.0.is_ok());
    advance(Duration::from_secs(2)).await;
    let (connected, tried) = connect_to(&connector, &["10.0.0.9"]).await;
    assert_eq!(connected.unwrap(), "10.0.0.9");
    assert_eq!(tried, ["10.0.0.1", "10.0.0.9"]);
    // While nothing works, the resolver is queried at most once a second.
    let before = *resolver.asked.lock();
    for _ in 0..100 {
        assert!(connect_to(&connector, &[]).await.0.is_err());
        advance(Duration::from_millis(20)).await;
    }
    let asked = *resolver.asked.lock() - before;
    assert!((1..=3).contains(&asked), "{asked} questions in 2 s");
}

#[tokio::test(start_paused = true)]
async fn a_name_without_an_address_is_an_error_until_it_has_one() {
    let (connector, _) = connector([Err("Name or service not known"), Ok(vec![]), Ok(sockets(&["10.0.0.1"]))]);
    let error = connect_to(&connector, &["10.0.0.1"]).await.0.unwrap_err();
    assert_eq!(error.to_string(), "cannot resolve engine: Name or service not known");
    assert!(connect_to(&connector, &["10.0.0.1"]).await.0.is_err(), "not asked again at once");
    advance(Duration::from_millis(1_100)).await;
    let error = connect_to(&connector, &["10.0.0.1"]).await.0.unwrap_err();
    assert_eq!(error.to_string(), "cannot resolve engine: the name has no address");
    advance(Duration::from_millis(1_100)).await;
    assert_eq!(connect_to(&connector, &["10.0.0.1"]).await.0.unwrap(), "10.0.0.1");
}

#[tokio::test(start_paused = true)]
async fn addresses_outlive_a_resolver_that_fails_but_not_for_ever() {
    let (connector, _) = connector([Ok(sockets(&["10.0.0.1"])), Err("try again later")]);
    for _ in 0..5 {
        assert!(connect_to(&connector, &["10.0.0.1"]).await.0.is_ok());
        advance(Duration::from_secs(11)).await;
        sleep(Duration::from_millis(1)).await;
    }
    advance(Duration::from_secs(11)).await;
    let error = connect_to(&connector, &["10.0.0.1"]).await.0.unwrap_err();
    assert_eq!(error.to_string(), "cannot resolve engine: try again later");
}

#[tokio::test(start_paused = true)]
async fn requests_share_one_question_and_a_slow_resolver_ends_with_the_limit() {
    let scripted = Scripted { gate: Some(Notify::new()), ..Scripted::default() };
    scripted.answers.lock().push_back(Ok(sockets(&["127.0.0.1"])));
    let scripted = Arc::new(scripted);
    let connector = Arc::new(Connector::new(TestResolver(Arc::clone(&scripted))));
    let begun = Instant::now();
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let connector = Arc::clone(&connector);
            tokio::spawn(async move { connector.connect(&address("engine", 80), LIMIT).await.map(|_| ()) })
        })
        .collect();
    for waiter in waiting {
        assert_eq!(waiter.await.unwrap(), Err(ConnectError::Timeout));
    }
    assert!(begun.elapsed() < LIMIT + Duration::from_millis(100));
    assert_eq!(*scripted.asked.lock(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_error_names_the_first_addresses_of_many() {
    let many: Vec<SocketAddr> = (0..200_u8).map(|last| SocketAddr::from(([10, 0, 0, last], 80))).collect();
    let (connector, _) = connector([Ok(many)]);
    let error = connect_to(&connector, &[]).await.0.unwrap_err().to_string();
    assert!(error.starts_with("none of 128 addresses works: 10.0.0.0: refused; "), "{error}");
    assert!(error.len() < 200, "{error}");
}

#[tokio::test]
async fn sockets_on_several_loopback_addresses() {
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), port);
    let (connector, _) = connector([Ok(vec![at("::1"), at("127.0.0.1"), at("127.0.0.2")])]);
    let (socket, stream) = connector.connect(&address("engine", port), LIMIT).await.unwrap();
    assert_eq!(socket, at("127.0.0.2"));
    let mut engine = listener.accept().await.unwrap().0;
    drop(stream);
    assert_eq!(engine.read(&mut [0]).await.unwrap(), 0);
    drop(listener);
    let error = connector.connect(&address("engine", port), LIMIT).await.unwrap_err();
    assert!(error.to_string().starts_with("none of 3 addresses works: 127.0.0.2: Connection refused"), "{error}");
    let error = connector.connect(&address("127.0.0.1", port), LIMIT).await.unwrap_err();
    assert_eq!(error.to_string(), "Connection refused (os error 111)");
}

#[tokio::test]
async fn connections_go_to_the_port_on_which_the_engine_listens_now() {
    let (first, second) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let port = |of: &TcpListener| of.local_addr().unwrap().port();
    let (connector, _) = connector([Err("there is no name")]);
    let to = address("127.0.0.1", port(&first));
    let (old, _) = connector.connect(&to, LIMIT).await.unwrap();
    assert_eq!(old.port(), port(&first));
    connector.redirect(&to, port(&second));
    assert!(!connector.is_current(&to, old), "an idle connection to the old engine");
    let (new, _) = connector.connect(&to, LIMIT).await.unwrap();
    assert_eq!(new.port(), port(&second));
    assert!(connector.is_current(&to, new));
    let other = address("127.0.0.1", port(&second));
    assert!(connector.is_current(&other, new), "another backend is not redirected");
    connector.redirect(&to, port(&first));
    assert!(connector.is_current(&to, old) && !connector.is_current(&to, new));
}
