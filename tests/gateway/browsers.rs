//! Web pages of other origins: preflights, and which page may read which response.

use crate::client::{CHAT, Response, chat, get, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};

const PAGE: &str = "https://chat.example.com";
const OTHER: &str = "https://other.example.com";
const ALLOW: &str = "access-control-allow-origin";

fn preflight(path: &str, origin: &str) -> String {
    format!(
        "OPTIONS {path} HTTP/1.1\r\nhost: gate\r\norigin: {origin}\r\naccess-control-request-method: POST\r\n\
         access-control-request-headers: authorization,content-type,x-stainless-os\r\n\r\n"
    )
}

fn from(origin: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: gate\r\norigin: {origin}\r\n\r\n")
}

fn all<'r>(response: &'r Response, name: &str) -> Vec<&'r str> {
    response.head.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
}

async fn with_keys(sets: &[&str]) -> (Engine, TestGateway) {
    let own = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nvary: origin, accept\r\n\
               access-control-allow-origin: https://of-the-engine\r\naccess-control-allow-credentials: true\r\n\
               access-control-expose-headers: x-engine\r\n\r\n{}";
    let engine = Engine::always(vec![crate::engine::send(own.to_owned())]).await;
    let keys = format!("[[auth.keys]]\nname = \"k\"\nsha256 = \"{}\"\n", key_digest("secret"));
    let gateway = TestGateway::from_text(&(one_pool(&[engine.url()]) + &keys), sets).await;
    (engine, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_any_origin_may_use_a_gateway_that_allows_all() {
    let (engine, gateway) = with_keys(&["server.cors=*"]).await;
    let mut client = gateway.client().await;
    for path in ["/v1/chat/completions", "/v1/models", "/v1/unknown"] {
        let response = client.request(preflight(path, PAGE)).await;
        assert_eq!(response.status(), 204, "{path}: without a key, on every path");
        assert_eq!(all(&response, ALLOW), ["*"]);
        assert_eq!(all(&response, "access-control-allow-headers"), ["authorization,content-type,x-stainless-os"]);
        assert!(all(&response, "access-control-allow-methods")[0].contains("POST"));
        assert_eq!(all(&response, "access-control-max-age"), ["600"]);
        assert!(all(&response, "content-length").is_empty() && response.body.is_empty());
    }
    let key = format!("authorization: Bearer secret\r\norigin: {PAGE}\r\n");
    let foreign = format!("authorization: Bearer foreign\r\norigin: {PAGE}\r\n");
    for (request, status) in [
        (post("/v1/chat/completions", &key, CHAT.as_bytes()), 200),
        (post("/v1/chat/completions", &foreign, CHAT.as_bytes()), 401),
        (post("/v1/chat/completions", &key, b"{"), 400),
        (post("/v1/chat/completions", &key, br#"{"model":"x"}"#), 404),
        (post("/v1/unknown", &key, b"{}"), 404),
        (post("/health", &key, b"{}"), 405),
        (from(PAGE, "/v1/models").into(), 401),
        (from(PAGE, "/v1/completions").into(), 405),
        (from(PAGE, "/health").into(), 200),
        (from("null", "/ready").into(), 200),
        (format!("GET /v1/models HTTP/1.1\r\norigin: {PAGE}\r\n\r\n").into(), 400),
        (get("bad request line").replace("host: localhost", "bad header").into(), 400),
    ] {
        let response = gateway.request(&request).await;
        let sent = String::from_utf8_lossy(&request).into_owned();
        assert_eq!((response.status(), all(&response, ALLOW)), (status, vec!["*"]), "{sent}");
        assert!(all(&response, "access-control-allow-credentials").is_empty(), "{sent}");
    }
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_can_read_the_headers_of_the_gateway() {
    let (_engine, gateway) = with_keys(&["server.cors=*"]).await;
    let key = format!("authorization: Bearer secret\r\norigin: {PAGE}\r\n");
    let response = gateway.request(post("/v1/chat/completions", &key, CHAT.as_bytes())).await;
    let exposed = all(&response, "access-control-expose-headers");
    let names: Vec<&str> = exposed[0].split(", ").collect();
    assert!(exposed.len() == 1 && ["retry-after", "x-sluice-error"].iter().all(|name| names.contains(name)));
    let of_gateway = |name: &&str| name.starts_with("x-sluice-") || ["x-request-id", "server-timing"].contains(name);
    for name in response.head.headers.iter().map(|(name, _)| name.as_str()).filter(of_gateway) {
        assert!(names.contains(&name), "{name} is not exposed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_listed_origins_only_their_pages_may_use_it_and_its_policy_replaces_the_engines() {
    let (_engine, gateway) = with_keys(&[r#"server.cors=["https://chat.example.com", "http://localhost:3000"]"#]).await;
    let key = |origin: &str| format!("authorization: Bearer secret\r\norigin: {origin}\r\n");
    for (origin, allowed) in [
        (PAGE, vec![PAGE]),
        ("http://localhost:3000", vec!["http://localhost:3000"]),
        (OTHER, vec![]),
        ("https://chat.example.com.evil.com", vec![]),
        ("http://chat.example.com", vec![]),
        ("null", vec![]),
    ] {
        let response = gateway.request(post("/v1/chat/completions", &key(origin), CHAT.as_bytes())).await;
        assert_eq!((response.status(), all(&response, ALLOW)), (200, allowed.clone()), "{origin}");
        assert_eq!(all(&response, "vary"), ["origin, accept"], "named once");
        assert!(all(&response, "access-control-allow-credentials").is_empty());
        let listed = gateway.request(from(origin, "/v1/models")).await;
        assert_eq!(
            (listed.status(), all(&listed, ALLOW), all(&listed, "vary")),
            (401, allowed.clone(), vec!["Origin"])
        );
        let asked = gateway.request(preflight("/v1/chat/completions", origin)).await;
        assert_eq!(all(&asked, ALLOW), allowed, "{origin}");
        if allowed.is_empty() {
            asked.is(403, "origin_not_allowed");
        } else {
            assert_eq!((asked.status(), all(&asked, "vary")), (204, vec!["Origin"]));
        }
    }
    let two = "authorization: Bearer secret\r\norigin: https://chat.example.com\r\norigin: https://evil.com\r\n";
    assert!(all(&gateway.request(post("/v1/chat/completions", two, CHAT.as_bytes())).await, ALLOW).is_empty());
    let plain = gateway.request(get("/health")).await;
    assert_eq!((all(&plain, ALLOW), all(&plain, "vary")), (vec![], vec!["Origin"]), "a cache must keep them apart");
    gateway.settled().await;
}

/// An engine that allows these origins, as vLLM does with `--allowed-origins`.
async fn allowing(origins: &'static [&'static str]) -> Engine {
    Engine::start(move |_, seen| {
        let origin = seen.header("origin").unwrap_or_default();
        let allow = origins.iter().find(|allowed| **allowed == "*" || **allowed == origin);
        let allow = allow.map_or(String::new(), |allowed| format!("{ALLOW}: {allowed}\r\n"));
        let status = if seen.head.starts_with("POST") || !allow.is_empty() { "200 OK" } else { "400 Bad Request" };
        let kind = "content-type: application/json\r\ncontent-length: 2\r\n";
        vec![crate::engine::send(format!("HTTP/1.1 {status}\r\n{kind}{allow}\r\n{{}}"))]
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_setting_pages_may_use_what_the_engine_allows() {
    let cases: [(&'static [&'static str], Vec<&str>, Vec<&str>); 3] =
        [(&["*"], vec!["*"], vec!["*"]), (&[PAGE], vec![PAGE], vec![]), (&[], vec![], vec![])];
    for (allowed, page, other) in cases {
        let engine = allowing(allowed).await;
        let gateway = TestGateway::over(&[engine.url()], &[]).await;
        for (origin, allow) in [(PAGE, page), (OTHER, other)] {
            let asked = gateway.request(preflight("/v1/chat/completions", origin)).await;
            assert_eq!((asked.status(), all(&asked, ALLOW)), (if allow.is_empty() { 403 } else { 204 }, allow.clone()));
            let header = format!("origin: {origin}\r\n");
            for (request, status) in [
                (post("/v1/chat/completions", &header, CHAT.as_bytes()), 200),
                (from(origin, "/v1/models").into(), 200),
                (post("/v1/chat/completions", &header, b"{"), 400),
                (post("/v1/unknown", &header, b""), 404),
            ] {
                let response = gateway.request(request).await;
                assert_eq!((response.status(), all(&response, ALLOW)), (status, allow.clone()), "{allowed:?} {origin}");
            }
        }
        let asked = engine.seen().iter().filter(|seen| seen.head.starts_with("OPTIONS")).count();
        let wanted = if allowed == ["*"] { 1 } else { 2 };
        assert_eq!(asked, wanted, "an engine is asked once about an origin, and once where it allows all");
        let plain = gateway.request(chat(CHAT)).await;
        assert_eq!(all(&plain, ALLOW).len(), usize::from(allowed == ["*"]), "what an engine always says stays");
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_can_read_that_no_engine_is_there_any_more() {
    let engine = allowing(&[PAGE]).await;
    let gateway = TestGateway::over(&[engine.url()], &["health.probe_interval=20ms"]).await;
    assert_eq!(gateway.request(preflight("/v1/chat/completions", PAGE)).await.status(), 204);
    drop(engine);
    eventually("the engine is missed", async || gateway.state(0) != "ready").await;
    let response = gateway.request(post("/v1/chat/completions", &format!("origin: {PAGE}\r\n"), CHAT.as_bytes())).await;
    assert_eq!((response.status(), all(&response, ALLOW)), (503, vec![PAGE]), "{}", response.text());
    let unknown = gateway.request(preflight("/v1/chat/completions", OTHER)).await;
    unknown.is(403, "origin_not_allowed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_page_of_another_origin_may_use_it_where_the_list_is_empty() {
    let (_engine, gateway) = with_keys(&["server.cors=[]"]).await;
    gateway.request(preflight("/v1/chat/completions", PAGE)).await.is(403, "origin_not_allowed");
    let key = format!("authorization: Bearer secret\r\norigin: {PAGE}\r\n");
    let response = gateway.request(post("/v1/chat/completions", &key, CHAT.as_bytes())).await;
    assert!(response.head.headers.iter().all(|(name, _)| !name.starts_with("access-control-")));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_page_asks_for_is_as_before_and_the_admin_port_has_no_such_headers() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let response = gateway.request(chat(CHAT)).await;
    assert!(response.head.headers.iter().all(|(name, _)| !name.starts_with("access-control-") && name != "vary"));
    // An OPTIONS request that is no preflight is refused like any method that the path does not
    // take.
    for headers in ["", "origin: https://a.example\r\n", "access-control-request-method: POST\r\n"] {
        let request = format!("OPTIONS /v1/completions HTTP/1.1\r\nhost: gate\r\n{headers}\r\n");
        gateway.request(request).await.is(405, "method_not_allowed");
    }
    let mut admin = crate::client::TestClient::to(gateway.admin()).await;
    let page = admin.request(from(PAGE, "/metrics")).await;
    assert!(page.head.headers.iter().all(|(name, _)| !name.starts_with("access-control-")));
    gateway.settled().await;
}
