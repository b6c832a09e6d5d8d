//! Resources that clients share. A client may have all of a resource while it is alone. It keeps no
//! other client out, however much it takes.

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

use crate::client::{CHAT, TestClient, chat, get, post};
use crate::engine::{COMPLETION, Engine, completion};
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};
use crate::tunnel::{Files, Tunnel};

/// Number of TLS handshakes that stop in the middle. Both ends of each connection are open files of
/// the test, which may have 1,024.
const STOPPED: usize = 280;

async fn two_keys(engine: &Engine, sets: &[&str]) -> TestGateway {
    let keys =
        ["loud", "quiet"].map(|key| format!("[[auth.keys]]\nname = \"{key}\"\nsha256 = \"{}\"\n", key_digest(key)));
    TestGateway::from_text(&(one_pool(&[engine.url()]) + &keys.concat()), sets).await
}

/// Begins an upload with a key. It sends a head that announces `announced` bytes, and then `sent`
/// bytes of the body.
async fn begin(gateway: &TestGateway, key: &str, announced: usize, sent: usize) -> TestClient {
    let mut client = gateway.client().await;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\nauthorization: Bearer {key}\r\n\
         content-length: {announced}\r\n\r\n"
    );
    client.send([head.into_bytes(), vec![b' '; sent]].concat()).await;
    client
}

fn quiet_chat() -> Vec<u8> {
    post("/v1/chat/completions", "authorization: Bearer quiet\r\n", CHAT.as_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_uploads_of_one_key_give_way_to_another_key_the_newest_first() {
    const PART: usize = 512 << 10;
    let engine = Engine::always(completion()).await;
    let gateway =
        two_keys(&engine, &["server.max_body_memory=4MiB", "server.max_body=2MiB", "server.body_timeout=10m"]).await;
    let counted = async || gateway.metric("sluice_body_bytes", &[]).await;
    // While the key is alone, its uploads may fill the memory to the last byte.
    let mut held = Vec::new();
    for number in 1..=8 {
        // Each upload declares more bytes than it sends. The last one declares as many as are free.
        let (declared, sent) = if number < 8 { (PART + 100, PART) } else { (PART, PART - 1) };
        held.push(begin(&gateway, "loud", declared, sent).await);
        let all = (number - 1) * PART + sent;
        eventually("it is counted", async || counted().await == all as f64).await;
    }
    begin(&gateway, "loud", 100, 1).await.response().await.is(503, "body_memory_full");
    // Another key is served, because the newest upload gives way.
    for _ in 0..3 {
        assert_eq!(gateway.request(quiet_chat()).await.text(), COMPLETION);
    }
    held.pop().unwrap().response().await.is(503, "body_memory_full");
    gateway.counts("sluice_shares_gave_way_total", "resource=\"body_memory\"", 1.0).await;
    let mut oldest = held.swap_remove(0);
    oldest.send([b' '; 100]).await;
    oldest.response().await.is(400, "invalid_request");
    drop((held, oldest));
    eventually("all is returned", async || counted().await == 0.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_address_may_have_every_connection_until_another_comes() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.max_connections=16"]).await;
    let connections = async || gateway.metric("sluice_client_connections", &[]).await;
    let mut held = Vec::new();
    for number in 1..=16 {
        let mut client = gateway.client().await;
        assert_eq!(client.request(chat(CHAT)).await.status(), 200);
        held.push(client);
        eventually("it is open", async || connections().await == f64::from(number)).await;
    }
    let mut other = TestClient::between("127.0.0.2:0".parse().unwrap(), gateway.address()).await;
    assert_eq!(other.request(get("/health")).await.status(), 200);
    // The gateway closed the connection that was idle for longest for the newcomer, and serves the
    // other connections.
    assert_eq!(held.remove(0).closed().await, "");
    for client in &mut held {
        assert_eq!(client.request(chat(CHAT)).await.status(), 200);
    }
    gateway.counts("sluice_shares_gave_way_total", "resource=\"connections\"", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_stop_cost_no_one_a_handshake() {
    let (files, engine) = (Files::new(), Engine::always(completion()).await);
    let own = files.server();
    let mut sets: Vec<&str> = own.iter().map(String::as_str).collect();
    sets.push("server.header_timeout=10m");
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    let mut stopped = Vec::new();
    for _ in 0..STOPPED {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut socket: TcpStream = socket.connect(gateway.address()).await.unwrap();
        socket.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
        stopped.push(socket);
    }
    let handshakes = async || gateway.metric("sluice_tls_handshakes", &[]).await;
    eventually("all have begun", async || handshakes().await == STOPPED as f64).await;
    let tunnel = Tunnel::to(gateway.address(), files.client(&[])).await;
    assert_eq!(TestClient::to(tunnel.address).await.request(chat(CHAT)).await.text(), COMPLETION);
    drop((stopped, tunnel));
    eventually("all are returned", async || handshakes().await == 0.0).await;
    gateway.settled().await;
}
