//! The admin port: which clients may use it, which changes they may make, and how long they can
//! keep its connections.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::client::{Response, TIMEOUT, TestClient, change, get, post};
use crate::test_gateway::{TestGateway, eventually, one_pool};

/// The URL of a backend at which no server listens.
const NO_ENGINE: &str = "http://127.0.0.1:9";
/// Maximum duration of a shutdown without requests, with any number of admin connections: twice the
/// 2 s that these connections have to end.
const STOP: Duration = Duration::from_secs(4);

async fn gateway(sets: &[&str]) -> TestGateway {
    TestGateway::over(&[NO_ENGINE.to_owned()], sets).await
}

async fn send(gateway: &TestGateway, request: impl AsRef<[u8]>) -> Response {
    TestClient::to(gateway.admin()).await.request(request).await
}

fn refusal(response: &Response) -> (u16, String) {
    (response.status(), response.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn restart(sets: &[&str]) -> Vec<u8> {
    let set = |set: &&str| set.split_once('=').map(|(flag, value)| (flag.to_owned(), value.into()));
    let set: serde_json::Map<String, serde_json::Value> = sets.iter().filter_map(set).collect();
    let body = serde_json::json!({ "set": set }).to_string();
    post("/admin/backends/only/b0/restart", "x-sluice-admin: 1\r\n", body.as_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_whose_name_resolves_to_this_machine_can_use_nothing() {
    let gateway = gateway(&["server.drain_timeout=1s"]).await;
    let port = gateway.admin().port();
    let as_page = |line: &str| {
        format!(
            "{line} HTTP/1.1\r\nHost: evil.example:{port}\r\nOrigin: http://evil.example:{port}\r\n\
             Sec-Fetch-Site: same-origin\r\nx-sluice-admin: 1\r\nContent-Length: 0\r\n\r\n"
        )
    };
    for line in [
        "POST /admin/backends/only/b0/restart",
        "POST /admin/backends/only/b0/drain",
        "POST /admin/reload",
        "GET /admin/status",
        "GET /metrics",
        "GET /",
    ] {
        let response = send(&gateway, as_page(line)).await;
        assert_eq!(refusal(&response), (403, "unknown_host".to_owned()), "{line}");
        assert!(response.text().contains("[admin] hosts = [\\\"evil.example\\\"]"), "{}", response.text());
    }
    // `/health` accepts any host, because probes use many names and the response reveals nothing.
    assert_eq!(send(&gateway, as_page("GET /health")).await.status(), 200);
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_name_is_accepted() {
    let gateway = gateway(&["admin.hosts=[\"gate.internal\"]"]).await;
    for (host, status) in [("gate.internal", 200), ("GATE.internal:80", 200), ("gate.internal.evil.example", 403)] {
        assert_eq!(
            send(&gateway, format!("GET /metrics HTTP/1.1\r\nhost: {host}\r\n\r\n")).await.status(),
            status,
            "{host}"
        );
    }
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_changes_no_flag_that_can_load_code_unless_the_file_allows_it() {
    let gateway = gateway(&["admin.flags=[\"chat-template\", \"speculative-config.num_speculative_tokens\"]"]).await;
    for set in [
        "middleware=evil.Middleware",
        "tool-parser-plugin=/tmp/x.py",
        "trust-remote-code=true",
        "trust_remote_code=true",
        "hf-overrides={}",
        "load-format=pt",
        "worker-cls=evil.Worker",
        "scheduler_cls=evil.Scheduler",
        "config=/tmp/x.yaml",
        "chat-templat=/tmp/x",
        "middlewar=evil.Middleware",
        "speculative-config.model=/tmp/x",
        "compilation-config.backend=evil.compile",
        "served-model-name=x",
        "api-key=x",
        "some-new-flag=1",
    ] {
        let response = send(&gateway, restart(&["max-num-seqs=8", set])).await;
        assert_eq!(refusal(&response), (403, "flag_not_allowed".to_owned()), "{set}");
        let flag = set.split('=').next().unwrap().replace("_", "-");
        let text = response.text();
        assert!(
            text.contains(&format!("--{flag} ")) && text.contains(&format!("[admin] flags = [\\\"{flag}\\\"]")),
            "{text}"
        );
    }
    // The check of flags accepts these. The restart is refused later, because another program runs
    // the engine.
    for sets in [
        &["max-num-seqs=8", "gpu_memory_utilization=0.8", "no-enable-prefix-caching=true"][..],
        &["chat-template=/srv/x.jinja"],
        &["speculative-config.num_speculative_tokens=2"],
        &[],
    ] {
        assert_eq!(refusal(&send(&gateway, restart(sets)).await), (409, "not_managed".to_owned()), "{sets:?}");
    }
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_keep_neither_probes_nor_scrapes_out() {
    let gateway = gateway(&[]).await;
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(TcpStream::connect(gateway.admin()).await.unwrap());
    }
    let mut kept = TestClient::to(gateway.admin()).await;
    for path in ["/health", "/metrics", "/admin/status"] {
        assert_eq!(kept.request(get(path)).await.status(), 200, "{path}");
        assert_eq!(send(&gateway, get(path)).await.status(), 200, "{path}");
    }
    assert_eq!(timeout(STOP, gateway.stop()).await, Ok(true), "the idle connections held up the shutdown");
}

/// A connection that requests far more than its buffers can hold, and reads nothing.
async fn never_reads(gateway: &TestGateway) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut socket = socket.connect(gateway.admin()).await.unwrap();
    let requests = get("/metrics").repeat(1_000);
    // It suffices to send as many requests as fit into the socket.
    let _ = timeout(Duration::from_millis(200), socket.write_all(requests.as_bytes())).await;
    timeout(TIMEOUT, socket.readable()).await.unwrap().unwrap();
    socket
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_never_read_keep_neither_probes_out_nor_the_gateway_from_stopping() {
    let gateway = gateway(&[]).await;
    let mut stuck = Vec::new();
    for _ in 0..70 {
        stuck.push(never_reads(&gateway).await);
    }
    eventually("a probe is answered", async || {
        let answer = timeout(Duration::from_secs(1), send(&gateway, get("/health"))).await;
        answer.is_ok_and(|answer| answer.status() == 200)
    })
    .await;
    assert_eq!(timeout(STOP, gateway.stop()).await, Ok(true), "a client that does not read held up the shutdown");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_changes_who_may_use_the_port() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    let text = one_pool(&[NO_ENGINE.to_owned()]);
    std::fs::write(&path, &text).unwrap();
    let gateway = TestGateway::from_file(&path).await;
    let load_format = restart(&["load-format=auto"]);
    assert_eq!(send(&gateway, &load_format).await.status(), 403);
    std::fs::write(&path, format!("[admin]\nflags = [\"load-format\"]\n{text}")).unwrap();
    let reloaded = send(&gateway, change("/admin/reload")).await;
    assert!(reloaded.text().contains("admin.flags: [] -> [\\\"load-format\\\"]"), "{}", reloaded.text());
    assert_eq!(send(&gateway, &load_format).await.status(), 409);
    gateway.stop().await;
}
