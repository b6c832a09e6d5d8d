//! TLS on both sides.
//!
//! The tests check the connections of clients and engines, the certificates that the gateway
//! trusts, and a change of certificates while it runs.

use std::time::Duration;

use sluice_config::tls::testing::{Authority, Issued};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::client::{CHAT, STREAMED, TIMEOUT, TestClient, chat, get, post};
use crate::commands::{output, sluice};
use crate::engine::{COMPLETION, Engine, STREAM, Step, completion, ending, event, gated_stream, send};
use crate::test_gateway::{TestGateway, eventually, eventually_within, one_pool};
use crate::tunnel::{Files, Tunnel, client, connect, server};

/// Time in which the engine must see that a client has left.
const SOON: Duration = Duration::from_secs(1);

async fn secure(files: &Files, engine: &Engine, sets: &[&str]) -> TestGateway {
    let own = files.server();
    let sets: Vec<&str> = own.iter().map(String::as_str).chain(sets.iter().copied()).collect();
    TestGateway::over(&[engine.url()], &sets).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_over_tls_is_served_as_without() {
    let (files, engine) = (Files::new(), Engine::always(gated_stream()).await);
    let gateway = secure(&files, &engine, &[]).await;
    let tunnel = Tunnel::to(gateway.address(), files.client(&["http/1.1"])).await;
    let mut client = TestClient::to(tunnel.address).await;
    assert_eq!(client.request(get("/health")).await.status(), 200);
    client.send(chat(STREAMED)).await.until("one").await;
    assert!(!client.until("one").await.contains("two"), "passed on at once");
    engine.open_gate();
    client.until("two").await;
    engine.open_gate();
    let response = client.response().await;
    assert!(response.whole && response.text() == event("one") + &event("two") + &ending(), "{}", response.text());
    client.request(post("/v1/nothing", "", b"{}")).await.is(404, "route_not_found");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_is_seen_through_tls() {
    let files = Files::new();
    for steps in [vec![Step::Silence], vec![send(STREAM), Step::Silence], gated_stream()] {
        let streams = steps.len() > 2;
        let engine = Engine::always(steps).await;
        let gateway = secure(&files, &engine, &["pool.only.slots=1"]).await;
        let tunnel = Tunnel::to(gateway.address(), files.client(&[])).await;
        let (mut running, mut waiting) = (TestClient::to(tunnel.address).await, TestClient::to(tunnel.address).await);
        running.send(chat(STREAMED)).await;
        eventually("the engine has it", async || engine.count() == 1).await;
        if streams {
            running.until("one").await;
        }
        waiting.send(chat(STREAMED)).await;
        eventually("one waits", async || gateway.load() == (1, 1)).await;
        drop(waiting);
        eventually_within(SOON, "the queue is left", async || gateway.load() == (1, 0)).await;
        drop(running);
        eventually_within(SOON, "the engine sees it", async || engine.left() == 1).await;
        gateway.settled_within(SOON).await;
        gateway.recorded("client_gone", 2.0).await;
        assert_eq!(engine.count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_and_broken_handshakes_hold_up_no_other_client() {
    let (files, engine) = (Files::new(), Engine::always(completion()).await);
    let gateway = secure(&files, &engine, &["server.header_timeout=1s"]).await;
    let mut silent = Vec::new();
    for index in 0..100 {
        let mut socket = TcpStream::connect(gateway.address()).await.unwrap();
        // The client sends no ClientHello, half of one, or a broken one.
        match index % 3 {
            0 => {}
            1 => socket.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap(),
            _ => socket.write_all(b"GET / HTTP/1.1\r\nhost: gate\r\n\r\n").await.unwrap(),
        }
        silent.push(socket);
    }
    let tunnel = Tunnel::to(gateway.address(), files.client(&[])).await;
    assert_eq!(TestClient::to(tunnel.address).await.request(chat(CHAT)).await.text(), COMPLETION);
    for mut socket in silent {
        let mut rest = Vec::new();
        let ended = timeout(TIMEOUT, socket.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "a handshake has a deadline");
        assert!(!rest.starts_with(b"HTTP"), "no plain text on a port with TLS");
    }
    gateway.settled().await;
    assert!(timeout(TIMEOUT, gateway.stop()).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_certificates_are_required_where_the_configuration_says_so() {
    let (files, engine, other) = (Files::new(), Engine::always(completion()).await, Authority::new());
    let ca = format!("server.tls.client_ca={}", files.path("ca.pem").display());
    let (own, strange) = (files.ca.issue(&["client"]), other.issue(&["client"]));
    let served = async |gateway: &TestGateway, shown: Option<&Issued>| {
        let Ok(mut stream) = connect(gateway.address(), client(&files.ca, shown, &[])).await else { return false };
        let mut answer = [0; 12];
        let asked = stream.write_all(chat(CHAT).as_slice()).await.is_ok();
        asked && timeout(TIMEOUT, stream.read_exact(&mut answer)).await.unwrap().is_ok() && &answer == b"HTTP/1.1 200"
    };
    let required = secure(&files, &engine, &[&ca]).await;
    let optional = secure(&files, &engine, &[&ca, "server.tls.verify_client=optional"]).await;
    for (gateway, without) in [(required, false), (optional, true)] {
        assert!(served(&gateway, Some(&own)).await);
        assert_eq!(served(&gateway, None).await, without);
        assert!(!served(&gateway, Some(&strange)).await);
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_exchanges_the_certificate_under_open_connections() {
    let (files, engine) = (Files::new(), Engine::always(gated_stream()).await);
    let text = one_pool(&[engine.url()]);
    let table = "[server.tls]\ncertificate = \"server.pem\"\nkey = \"server.key\"\n";
    let path = files.path("sluice.toml");
    std::fs::write(&path, format!("{text}{table}")).unwrap();
    let gateway = TestGateway::from_file(&path).await;
    let tunnel = Tunnel::to(gateway.address(), files.client(&[])).await;
    let mut streaming = TestClient::to(tunnel.address).await;
    streaming.send(chat(STREAMED)).await.until("one").await;
    let shown = async |gateway: &TestGateway| {
        let stream = connect(gateway.address(), files.client(&[])).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0].clone()
    };
    let first = shown(&gateway).await;
    assert!(gateway.page().await.contains("sluice_tls_certificate_expiry_timestamp_seconds"));
    let until = gateway.metric("sluice_tls_certificate_expiry_timestamp_seconds", &["server.pem"]).await;
    assert_eq!(until, 2_208_988_800.0, "the year 2040");

    // A reload with a key that does not match the certificate changes nothing, and the response
    // names the reason.
    let renewed = files.ca.issue_until(&["127.0.0.1"], 2041);
    std::fs::write(files.path("server.pem"), &renewed.certificate).unwrap();
    let reload = async || {
        TestClient::to(gateway.admin()).await.request(post("/admin/reload", "x-sluice-admin: 1\r\n", b"")).await
    };
    let refused = reload().await;
    assert_eq!(refused.status(), 422);
    let problems = refused.json()["error"]["problems"].to_string();
    assert!(problems.contains("server.tls.key: the private key does not match the certificate"), "{problems}");
    assert_eq!(shown(&gateway).await, first);

    renewed.write(files.folder.path(), "server");
    let accepted = reload().await;
    assert_eq!(accepted.status(), 200, "{}", accepted.text());
    assert!(accepted.text().contains("server.tls.certificate: changed"), "{}", accepted.text());
    assert_ne!(shown(&gateway).await, first);
    let until = gateway.metric("sluice_tls_certificate_expiry_timestamp_seconds", &["server.pem"]).await;
    assert_eq!(until, 2_240_611_200.0, "the year 2041");
    engine.open_gate();
    engine.open_gate();
    let response = streaming.response().await;
    assert!(response.whole && response.text() == event("one") + &event("two") + &ending(), "{}", response.text());
    assert_eq!(engine.left(), 0);
    gateway.settled().await;
}

fn over_https(url: String, tls: &str) -> String {
    one_pool(&[url]).replacen("usage = \"off\"\n", &format!("usage = \"off\"\ntls = {{ {tls} }}\n"), 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_https_engine_is_used_for_requests_and_probes_and_its_connection_is_kept() {
    let (files, engine) = (Files::new(), Engine::always(completion()).await);
    let front = Tunnel::before(engine.address(), server(&files.ca.issue(&["127.0.0.1"]), None)).await;
    let ca = format!("ca = \"{}\"", files.path("ca.pem").display());
    let gateway = TestGateway::from_text(&over_https(front.https(), &ca), &[]).await;
    assert_eq!(gateway.state(0), "ready", "probed inside TLS");
    for number in 1..=3 {
        assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
        // When the gateway has recorded the request, it has put the connection aside for the next
        // one.
        gateway.recorded("completed", f64::from(number)).await;
    }
    let long = CHAT.replace("hi", &"word ".repeat(400_000));
    assert_eq!(gateway.request(chat(&long)).await.text(), COMPLETION);
    let seen = engine.seen();
    assert_eq!(seen.last().unwrap().body.len(), long.len());
    assert_eq!(seen[0].header("host"), Some(front.address.to_string().as_str()));
    assert!(seen.iter().all(|request| request.connection == seen[0].connection), "one connection for all");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_its_request_to_an_https_engine() {
    let (files, engine) = (Files::new(), Engine::always(gated_stream()).await);
    let front = Tunnel::before(engine.address(), server(&files.ca.issue(&["127.0.0.1"]), None)).await;
    let ca = format!("ca = \"{}\"", files.path("ca.pem").display());
    let gateway = TestGateway::from_text(&over_https(front.https(), &ca), &[]).await;
    let mut client = gateway.client().await;
    client.send(chat(STREAMED)).await.until("one").await;
    drop(client);
    eventually_within(SOON, "the engine sees it", async || engine.left() == 1).await;
    gateway.settled_within(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_cannot_be_trusted_gets_no_request() {
    let (files, other) = (Files::new(), Authority::new());
    std::fs::write(files.path("other.pem"), &other.pem).unwrap();
    files.ca.issue(&["gateway"]).write(files.folder.path(), "own");
    let file = |name: &str| format!("\"{}\"", files.path(name).display());
    let right = format!("ca = {}", file("ca.pem"));
    let shown = format!("{right}, certificate = {}, key = {}", file("own.pem"), file("own.key"));
    let named = files.ca.issue(&["gpu0.internal"]);
    let addressed = files.ca.issue(&["127.0.0.1"]);
    let itself = Issued::self_signed(&["127.0.0.1"]);
    std::fs::write(files.path("itself.pem"), &itself.certificate).unwrap();
    // A case has the engine's certificate, whether the engine requests a client certificate, the
    // `tls` table, and whether the gateway uses the engine.
    let cases = [
        (&addressed, false, right.clone(), true),
        (&addressed, false, format!("ca = {}", file("other.pem")), false),
        (&named, false, right.clone(), false),
        (&named, false, format!("{right}, server_name = \"gpu0.internal\""), true),
        (&named, false, "verify = \"none\"".to_owned(), true),
        (&addressed, true, right.clone(), false),
        (&addressed, true, shown, true),
        (&itself, false, format!("ca = {}", file("itself.pem")), true),
        (&itself, false, right, false),
    ];
    for (index, (certificate, asks, table, used)) in cases.into_iter().enumerate() {
        let engine = Engine::always(completion()).await;
        let front = Tunnel::before(engine.address(), server(certificate, asks.then_some(&files.ca))).await;
        let sets = ["health.probe_interval=20ms", "pool.only.queue.timeout=200ms"];
        let gateway = TestGateway::from_text(&over_https(front.https(), &table), &sets).await;
        let response = gateway.request(chat(CHAT)).await;
        if used {
            assert_eq!(response.text(), COMPLETION, "case {index}");
            assert_eq!(gateway.state(0), "ready", "case {index}");
        } else {
            assert!(matches!(response.status(), 502 | 503), "case {index}: {}", response.text());
            eventually("its probes fail", async || gateway.state(0) != "ready").await;
            assert_eq!(engine.count(), 0, "case {index}: nothing was sent");
        }
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_that_changes_the_trusted_ca_uses_no_connection_made_with_the_old_one() {
    let (files, other, engine) = (Files::new(), Authority::new(), Engine::always(completion()).await);
    let front = Tunnel::before(engine.address(), server(&files.ca.issue(&["127.0.0.1"]), None)).await;
    let path = files.path("sluice.toml");
    let sets = "[health]\nprobe_interval = \"20ms\"\n";
    std::fs::write(&path, over_https(front.https(), "ca = \"ca.pem\"") + sets).unwrap();
    let gateway = TestGateway::from_file(&path).await;
    assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
    std::fs::write(files.path("ca.pem"), &other.pem).unwrap();
    let reloaded =
        TestClient::to(gateway.admin()).await.request(post("/admin/reload", "x-sluice-admin: 1\r\n", b"")).await;
    assert!(reloaded.text().contains("pool.only.tls.ca: changed"), "{}", reloaded.text());
    let response = gateway.request(chat(CHAT)).await;
    assert!(matches!(response.status(), 502 | 503), "{}", response.text());
    assert_eq!(engine.count(), 1);
    std::fs::write(files.path("ca.pem"), &files.ca.pem).unwrap();
    assert_eq!(
        TestClient::to(gateway.admin())
            .await
            .request(post("/admin/reload", "x-sluice-admin: 1\r\n", b""))
            .await
            .status(),
        200
    );
    eventually("it is used again", async || gateway.request(chat(CHAT)).await.status() == 200).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bench_measures_an_https_server_that_it_trusts_or_takes_as_it_is() {
    let (files, sim) = (Files::new(), crate::health::sim().await);
    let own = files.server();
    let sets: Vec<&str> = own.iter().map(String::as_str).collect();
    let gateway = TestGateway::over(&[format!("http://{}", sim.addr())], &sets).await;
    let url = format!("https://{}", gateway.address());
    let bench = async |ca: &str, more: &[&str]| {
        let flags = ["bench", "--base-url", &url, "--num-prompts", "3", "--random-input-len", "5", "--disable-tqdm"];
        let mut command = sluice(&[&flags[..], &["--random-output-len", "2"], more].concat());
        output(command.env("SSL_CERT_FILE", ca).env_remove("SSL_CERT_DIR")).await
    };
    let (known, other) = (files.path("ca.pem"), files.path("other.pem"));
    std::fs::write(&other, Authority::new().pem).unwrap();
    let (code, out, err) = bench(known.to_str().unwrap(), &[]).await;
    assert!(code == 0 && out.contains("Successful requests:                     3"), "{out}{err}");
    let (code, out, err) = bench(other.to_str().unwrap(), &[]).await;
    assert!(code == 1 && err.contains("the TLS handshake with") && err.contains("--insecure"), "{out}{err}");
    let (code, out, err) = bench(other.to_str().unwrap(), &["--insecure"]).await;
    assert!(code == 0 && out.contains("Successful requests:                     3"), "{out}{err}");
    gateway.settled().await;
    sim.kill().await;
}
