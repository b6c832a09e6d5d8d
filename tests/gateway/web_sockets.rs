//! WebSockets (`/v1/realtime`): a tunnel that holds a slot, counts bytes, and ends within bounds.
//!
//! The engine is a socket that answers the handshake and then behaves as a [`Part`] says. Frames
//! are written by hand. The gateway does not read their payloads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::client::TIMEOUT;
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};

const AGREED: &str = "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\
                      sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// How an engine behaves in the handshake and after it.
#[derive(Clone, Copy)]
enum Part {
    /// Sends back each byte.
    Echo,
    Flood,
    Silent,
    /// Ends the connection after a whole frame (`whole`), or after half a frame.
    Ends {
        whole: bool,
    },
    Refuses,
    /// Closes the connection instead of answering the handshake.
    HangsUp,
    /// While the flag is set, as [`Part::HangsUp`]; after that, answers the handshake and sends
    /// nothing.
    HangsUpWhile(&'static AtomicBool),
}

async fn read_head(socket: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(TIMEOUT, socket.read_u8()).await.expect("no head").unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Starts an engine. The heads of its requests come through the channel.
async fn engine(part: Part) -> (String, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (heads, received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let heads = heads.clone();
            tokio::spawn(async move {
                let mut first = [0; 14];
                if socket.peek(&mut first).await.is_err() || !first.starts_with(b"GET /v1/realti") {
                    // This request is a probe.
                    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
                    return drop(socket.write_all(answer.as_bytes()).await);
                }
                let _ = heads.send(read_head(&mut socket).await);
                if matches!(part, Part::Refuses) {
                    let answer = "HTTP/1.1 403 Forbidden\r\ncontent-length: 5\r\n\r\nno!no";
                    return drop(socket.write_all(answer.as_bytes()).await);
                }
                match part {
                    Part::HangsUp => return,
                    Part::HangsUpWhile(flag) if flag.load(Ordering::SeqCst) => return,
                    _ => {}
                }
                socket.write_all(AGREED.as_bytes()).await.unwrap();
                play(part, socket).await;
            });
        }
    });
    (url, received)
}

async fn play(part: Part, mut socket: TcpStream) {
    let mut piece = vec![0; 4_096];
    match part {
        Part::Echo => {
            while let Ok(count) = socket.read(&mut piece).await
                && count > 0
                && socket.write_all(&piece[..count]).await.is_ok()
            {}
        }
        Part::Flood => while socket.write_all(&piece).await.is_ok() {},
        Part::Ends { whole } => drop(socket.write_all(if whole { b"\x81\x02hi" } else { b"\x81\x09hi" }).await),
        Part::Silent | Part::HangsUpWhile(_) => while socket.read(&mut piece).await.is_ok_and(|count| count > 0) {},
        Part::Refuses | Part::HangsUp => {}
    }
}

/// Starts an engine that leaves each socket to the test after the handshake.
async fn handed() -> (String, tokio::sync::mpsc::UnboundedReceiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sockets, received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let head = read_head(&mut socket).await;
            let is_socket = head.starts_with("GET /v1/realtime");
            let answer = if is_socket { AGREED } else { "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}" };
            socket.write_all(answer.as_bytes()).await.unwrap();
            if is_socket {
                let _ = sockets.send(socket);
            }
        }
    });
    (url, received)
}

async fn open(gateway: &TestGateway, target: &str, more: &str) -> (TcpStream, String) {
    let mut socket = TcpStream::connect(gateway.address()).await.unwrap();
    let head = format!(
        "GET {target} HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    let answer = read_head(&mut socket).await;
    (socket, answer)
}

/// Reads all bytes until the end of the connection.
async fn rest(mut socket: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = timeout(TIMEOUT, socket.read_to_end(&mut bytes)).await.expect("the gateway does not end it");
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_pass_in_both_directions_and_the_tunnel_holds_a_slot_until_it_ends() {
    let (url, mut heads) = engine(Part::Echo).await;
    let gateway = TestGateway::over(&[url], &["pool.0.slots=1"]).await;
    let (mut socket, answer) = open(&gateway, "/v1/realtime?model=alias&x=1", "").await;
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    let lower = answer.to_ascii_lowercase();
    for header in ["upgrade: websocket", "sec-websocket-accept: s3pplmb", "x-sluice-backend: b0"] {
        assert!(lower.contains(header), "{header} is not in {answer}");
    }
    let head = heads.recv().await.unwrap().to_ascii_lowercase();
    assert!(head.starts_with("get /v1/realtime?model=m&x=1 http/1.1\r\n"), "the alias is replaced: {head}");
    for header in
        ["upgrade: websocket", "connection: upgrade", "sec-websocket-key: dghlihn", "sec-websocket-version: 13"]
    {
        assert!(head.contains(header), "{header} is not in {head}");
    }
    for size in [1, 1_000, 100_000] {
        let sent: Vec<u8> = (0..size).map(|byte| byte as u8).collect();
        let mut echoed = vec![0; size];
        let (mut read, mut write) = socket.split();
        let (received, wrote) = tokio::join!(read.read_exact(&mut echoed), write.write_all(&sent));
        assert!(received.is_ok() && wrote.is_ok() && echoed == sent, "{size} bytes");
    }
    assert_eq!((gateway.slots(), gateway.load()), (1, (1, 0)));
    for direction in ["to_engine", "to_client"] {
        gateway.counts("sluice_tunnel_bytes_total", &format!("direction=\"{direction}\""), 101_001.0).await;
    }
    let second = tokio::spawn({
        let address = gateway.address();
        async move {
            let mut socket = TcpStream::connect(address).await.unwrap();
            let head =
                "GET /v1/realtime?model=m HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n";
            socket.write_all(head.as_bytes()).await.unwrap();
            read_head(&mut socket).await
        }
    });
    eventually("the second one waits", async || gateway.load() == (1, 1)).await;
    drop(socket);
    assert!(second.await.unwrap().starts_with("HTTP/1.1 101 "), "it gets the slot of the first");
    gateway.settled_within(TIMEOUT).await;
    gateway.recorded("completed", 2.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_is_cut_and_silent_and_long_tunnels_end() {
    let (url, _heads) = engine(Part::Flood).await;
    let gateway = TestGateway::over(&[url], &["timeouts.send=300ms"]).await;
    let (socket, _) = open(&gateway, "/v1/realtime?model=m", "").await;
    gateway.recorded("client_gone", 1.0).await;
    gateway.settled_within(TIMEOUT).await;
    drop(socket);
    for set in ["timeouts.realtime_idle=200ms", "timeouts.realtime=200ms"] {
        let (url, _heads) = engine(Part::Silent).await;
        let gateway = TestGateway::over(&[url], &[set]).await;
        let (socket, _) = open(&gateway, "/v1/realtime?model=m", "").await;
        assert_eq!(rest(socket).await, [0x88, 2, 0x03, 0xe9], "{set}: 1001");
        gateway.recorded("timeout", 1.0).await;
        gateway.settled_within(TIMEOUT).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_ends_without_a_closing_frame_gets_one_only_between_frames() {
    for (whole, closing) in [(true, &b"\x81\x02hi\x88\x02\x03\xf4"[..]), (false, &b"\x81\x09hi"[..])] {
        let (url, _heads) = engine(Part::Ends { whole }).await;
        let gateway = TestGateway::over(&[url], &[]).await;
        let (socket, _) = open(&gateway, "/v1/realtime?model=m", "").await;
        assert_eq!(rest(socket).await, closing);
        gateway.settled_within(TIMEOUT).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_backend_is_replaced_and_an_answer_is_final() {
    let (url, mut heads) = engine(Part::Echo).await;
    let closed = "http://127.0.0.1:9".to_owned();
    let sets = ["pool.0.policy=round_robin", "health.probe_interval=1h", "health.failures=100"];
    let gateway = TestGateway::over(&[closed, url], &sets).await;
    for _ in 0..2 {
        let (socket, answer) = open(&gateway, "/v1/realtime?model=m", "").await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        heads.recv().await.unwrap();
        drop(socket);
    }
    let (url, mut heads) = engine(Part::Refuses).await;
    let (other, mut others) = engine(Part::Echo).await;
    let gateway = TestGateway::over(&[url, other], &["pool.0.policy=round_robin"]).await;
    let mut refused = 0;
    for _ in 0..2 {
        let (socket, answer) = open(&gateway, "/v1/realtime?model=m", "").await;
        if answer.starts_with("HTTP/1.1 403 ") {
            assert_eq!(rest(socket).await, b"no!no");
            refused += 1;
        }
    }
    assert_eq!((refused, heads.len(), others.len()), (1, 1, 1), "each was asked once");
    assert!(heads.try_recv().is_ok() && others.try_recv().is_ok());
    gateway.settled_within(TIMEOUT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_needs_a_key_a_model_and_the_upgrade() {
    let (url, mut heads) = engine(Part::Echo).await;
    let key = format!("auth.keys=[{{ name = \"a\", sha256 = \"{}\", models = [\"m\"] }}]", key_digest("sk"));
    let gateway = TestGateway::from_text(&one_pool(&[url]), &[&key]).await;
    let bearer = "authorization: Bearer sk\r\n";
    for (target, more, status) in [
        ("/v1/realtime?model=m", "", "401"),
        ("/v1/realtime?model=none", bearer, "404"),
        ("/v1/realtime/x?model=m", bearer, "501"),
        ("/v1/chat/completions", bearer, "501"),
        ("/v1/realtime", bearer, "101"),
    ] {
        let (_socket, answer) = open(&gateway, target, more).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{target}: {answer}");
    }
    let head = heads.recv().await.unwrap();
    assert!(head.contains("?model=m ") && !head.contains("sk"), "the only model, and no key: {head}");
    let plain =
        gateway.request("GET /v1/realtime?model=m HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk\r\n\r\n").await;
    assert_eq!(plain.status(), 400);
    assert!(plain.text().contains("is a WebSocket"));
    let post = "POST /v1/realtime HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(gateway.request(post).await.status(), 405);
    gateway.settled_within(TIMEOUT).await;
}

/// The drain waits for an open WebSocket until the deadline. Then the client gets a closing frame.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_stops_closes_sockets_after_its_deadline() {
    let (url, _heads) = engine(Part::Silent).await;
    let gateway = TestGateway::over(&[url], &["server.drain_timeout=500ms"]).await;
    let (socket, _) = open(&gateway, "/v1/realtime?model=m", "").await;
    eventually("it is open", async || gateway.load() == (1, 0)).await;
    let (_, bytes) = tokio::join!(timeout(TIMEOUT, gateway.stop()), rest(socket));
    assert_eq!(bytes, [0x88, 2, 0x03, 0xf4], "1012");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_socket_is_no_hung_engine() {
    let (url, _heads) = engine(Part::Silent).await;
    let sets = ["pool.0.deadline=200ms", "health.stall=200ms", "health.probe_interval=50ms"];
    let gateway = TestGateway::over(&[url], &sets).await;
    let (socket, _) = open(&gateway, "/v1/realtime?model=m", "").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((gateway.load(), gateway.state(0)), ((1, 0), "ready"));
    drop(socket);
    gateway.settled_within(TIMEOUT).await;
}

/// A server may decode the names in a query, or take the last of several values. So the engine must
/// get one `model`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_query_names_one_model_however_it_is_written() {
    let (url, mut heads) = engine(Part::Silent).await;
    let gateway = TestGateway::over(&[url], &[]).await;
    for query in ["model=alias&mod%65l=other&x=1", "mod%65l=alias&model=other&x=1"] {
        let (_socket, answer) = open(&gateway, &format!("/v1/realtime?{query}"), "").await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{query}: {answer}");
        let head = heads.recv().await.unwrap();
        assert!(head.starts_with("GET /v1/realtime?model=m&x=1 "), "{query}: {head}");
    }
}

/// An engine that breaks handshakes is ejected, although its `/health` says 200.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_breaks_handshakes_is_ejected_and_one_that_makes_them_is_not() {
    for (part, ejected) in [(Part::HangsUp, 1.0), (Part::Silent, 0.0), (Part::Refuses, 0.0)] {
        // The only backend of a pool would not be ejected for a broken response.
        let ((url, _heads), (other, _other)) = (engine(part).await, engine(Part::Silent).await);
        let gateway = TestGateway::over(&[url, other], &["pool.only.policy=round_robin"]).await;
        for _ in 0..16 {
            drop(open(&gateway, "/v1/realtime?model=m", "").await);
        }
        gateway.settled_within(TIMEOUT).await;
        let state = gateway.metric("sluice_backend_state", &["backend=\"b0\"", "state=\"ejected\""]).await;
        assert_eq!(state, ejected);
    }
}

/// The sockets stay open during the test, so only the handshake can be the success that ends the
/// probation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handshake_ends_the_probation_of_an_engine_while_the_socket_is_open() {
    static BROKEN: AtomicBool = AtomicBool::new(true);
    let ((url, _heads), (other, _other)) = (engine(Part::HangsUpWhile(&BROKEN)).await, engine(Part::Silent).await);
    let sets = ["pool.only.policy=round_robin", "health.probe_interval=20ms", "health.ejection_base=50ms"];
    let gateway = TestGateway::over(&[url, other], &sets).await;
    eventually("it is ejected", async || {
        drop(open(&gateway, "/v1/realtime?model=m", "").await);
        gateway.state(0) != "ready"
    })
    .await;
    BROKEN.store(false, Ordering::SeqCst);
    eventually("it is on probation", async || gateway.state(0) == "probation").await;
    let mut sockets = Vec::new();
    eventually("it gets a socket", async || {
        let (socket, answer) = open(&gateway, "/v1/realtime?model=m", "").await;
        sockets.push(socket);
        answer.to_ascii_lowercase().contains("x-sluice-backend: b0")
    })
    .await;
    assert_eq!(gateway.state(0), "ready", "the handshake alone decides");
    assert_eq!(gateway.load().0, sockets.len(), "all sockets are open");
    drop(sockets);
    gateway.settled_within(TIMEOUT).await;
}

/// The bytes that the reader takes before it stops. They are so many pieces that a gateway with a
/// fair order also reads from the other side meanwhile.
const TAKEN: usize = 2 << 20;

/// The loud side sends without a pause, until its reader stops. A gateway that always serves the
/// loud side first would then be stuck, and never read the quiet side.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_side_that_always_sends_does_not_hold_up_the_bytes_of_the_other() {
    for client_is_loud in [true, false] {
        let (url, mut sockets) = handed().await;
        let gateway = TestGateway::over(&[url], &[]).await;
        let (client, _) = open(&gateway, "/v1/realtime?model=m", "").await;
        let engine = timeout(TIMEOUT, sockets.recv()).await.expect("no handshake").unwrap();
        let (loud, mut quiet) = if client_is_loud { (client, engine) } else { (engine, client) };
        let piece = vec![0; 64 << 10];
        let mut full = 0;
        eventually("all buffers on the way are full", async || {
            full = if loud.try_write(&piece).is_err() { full + 1 } else { 0 };
            full > 20
        })
        .await;
        quiet.write_all(b"tick").await.unwrap();
        let (mut replies, mut flood) = loud.into_split();
        let flood = tokio::spawn(async move { while flood.write_all(&piece).await.is_ok() {} });
        let (mut taken, mut some) = (0, vec![0; 64 << 10]);
        while taken < TAKEN {
            taken += timeout(TIMEOUT, quiet.read(&mut some)).await.expect("nothing comes").unwrap();
        }
        let mut tick = [0; 4];
        let read = timeout(TIMEOUT, replies.read_exact(&mut tick)).await;
        read.expect("the loud side holds up the quiet one").unwrap();
        assert_eq!(&tick, b"tick");
        flood.abort();
    }
}
