//! Requests over sockets on several loopback addresses, between which a resolver of the test moves
//! one name, with and without idle connections.

use std::io;
use std::net::SocketAddr;

use bytes::BytesMut;
use http::Method;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;
use crate::flow::Exchange;
use sluice_config::{Config, Endpoint, Machine, Surroundings};

#[derive(Clone, Debug, Default)]
struct TestResolver(Arc<Mutex<Vec<SocketAddr>>>);

impl Resolve for TestResolver {
    async fn resolve(&self, _: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
        Ok(self.0.lock().clone())
    }
}

/// An engine that answers each request with the address of its socket, and keeps connections open.
fn serve(listener: TcpListener) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((mut socket, _)) = listener.accept().await {
            connections.spawn(async move {
                let ip = socket.local_addr().unwrap().ip().to_string();
                let mut read = [0; 4_096];
                while socket.read(&mut read).await.is_ok_and(|count| count > 0) {
                    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{ip}", ip.len());
                    if socket.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    })
}

struct Rig {
    engines: UpstreamConnector<TestResolver>,
    resolver: TestResolver,
    to: Address,
    port: u16,
}

impl Rig {
    fn new(port: u16) -> Self {
        let endpoint = Endpoint { https: false, host: "engine".to_owned(), port, prefix: String::new() };
        let to = Address::new(endpoint, None, None);
        let resolver = TestResolver::default();
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        let text = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:1\"\n";
        let config = Config::parse(text, "test", &[], &around).unwrap().config;
        let engines = UpstreamConnector::over(Arc::new(Connector::new(resolver.clone())), &config.timeouts);
        Self { engines, resolver, to, port }
    }

    fn resolves_to(&self, ips: &[&str]) {
        *self.resolver.0.lock() = ips.iter().map(|ip| self.at(ip)).collect();
    }

    fn at(&self, ip: &str) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), self.port)
    }

    async fn ask(&self) -> Result<(String, bool), ExchangeError> {
        let request = UpstreamRequest { method: Method::GET, path: "/".to_owned(), ..UpstreamRequest::default() };
        let mut connection = Connection::Any;
        loop {
            let mut exchange = self.engines.send(&self.to, &request, connection).await?;
            match exchange.head().await {
                // The connection was closed before; like `flow`, repeats the request on a new one.
                Err(ExchangeError::Closed(_)) if exchange.reused() => connection = Connection::New,
                Err(error) => return Err(error),
                Ok(_) => {
                    let mut body = BytesMut::new();
                    while exchange.body(&mut body).await? {}
                    let reused = exchange.reused();
                    exchange.keep_alive().await;
                    return Ok((String::from_utf8(body.to_vec()).unwrap(), reused));
                }
            }
        }
    }
}

#[tokio::test]
async fn requests_go_to_the_address_that_works_and_to_the_other_one_when_it_dies() {
    let one = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let rig = Rig::new(one.local_addr().unwrap().port());
    rig.resolves_to(&["::1", "127.0.0.1", "127.0.0.2", "127.0.0.3"]);
    let one = serve(one);
    assert_eq!(rig.ask().await.unwrap(), ("127.0.0.2".to_owned(), false));
    assert_eq!(rig.ask().await.unwrap(), ("127.0.0.2".to_owned(), true));
    let _other = serve(TcpListener::bind(rig.at("127.0.0.3")).await.unwrap());
    one.abort();
    let _ = one.await;
    assert_eq!(rig.ask().await.unwrap(), ("127.0.0.3".to_owned(), false));
}

#[tokio::test]
async fn an_idle_connection_does_not_pin_an_address_that_the_name_has_no_more() {
    let one = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let rig = Rig::new(one.local_addr().unwrap().port());
    rig.resolves_to(&["127.0.0.2"]);
    let _one = serve(one);
    let _other = serve(TcpListener::bind(rig.at("127.0.0.3")).await.unwrap());
    assert_eq!(rig.ask().await.unwrap(), ("127.0.0.2".to_owned(), false));
    rig.resolves_to(&["127.0.0.3"]);
    // The old engine still runs and the connection is open, but the name is due to be resolved
    // again.
    rig.engines.connector.distrust(&rig.to);
    let deadline = Instant::now() + Duration::from_secs(60);
    while rig.ask().await.unwrap().0 != "127.0.0.3" {
        assert!(Instant::now() < deadline, "still served by the old address");
    }
}

#[tokio::test]
async fn an_address_without_an_engine_says_so_once() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let rig = Rig::new(free);
    rig.resolves_to(&["127.0.0.1"]);
    let error = rig.ask().await.unwrap_err();
    assert_eq!(error.to_string(), "no connection: Connection refused (os error 111)");
}
