//! The admin port over loopback, with a fake gateway: authorization, responses, refusals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::named::find;
use super::status::{Diagnosis, ModelStatus};
use super::*;
use sluice_config::{Admin, Secret};
use sluice_fleet::{ChangeStarted, LogError, LogLines, RestartError, RestartRequest};
use sluice_gateway::experiment::ExperimentReport;
use sluice_gateway::flow::Outcome;
use sluice_gateway::pool::Admission;
use sluice_gateway::proxy::Ending;
use sluice_gateway::telemetry::{Telemetry, testing};
use sluice_online::findings::{EngineMinute, LastMinute};
use sluice_online::tuner::report::TunerReport;

pub(super) const TOKEN: &str = "open sesame";
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

pub(super) struct Fake {
    pub(super) admission: Arc<Admission>,
    pub(super) telemetry: Telemetry,
    pub(super) token: Mutex<Option<Secret>>,
    reload: fn() -> Result<Vec<String>, ReloadError>,
    panics: AtomicBool,
    pub(super) looks: AtomicUsize,
}

impl Control for Fake {
    fn access(&self) -> Access {
        Access { token: self.token.lock().clone(), admin: Admin::default(), listen: "127.0.0.1:8081".parse().unwrap() }
    }

    fn status(&self) -> Status {
        self.looks.fetch_add(1, Ordering::Relaxed);
        assert!(!self.panics.load(Ordering::Relaxed), "configured to fail");
        let about = About { version: "0.0.0".into(), listen: "127.0.0.1:8080".into(), ..About::default() };
        Status::new(about, &self.admission.view(), &[], &self.telemetry, Instant::now())
    }

    fn telemetry(&self) -> &Telemetry {
        &self.telemetry
    }

    fn diagnosis(&self) -> Diagnosis {
        let minute = |pool: &str, name: String| LastMinute {
            pool: pool.to_owned(),
            name,
            requests: 100,
            tokens: 123_456,
            queue_wait_s: 0.123_456_789,
            engine_ttft_s: Some(0.123_456_789),
            tpot_s: Some(0.012_345_678),
            engine: Some(EngineMinute::default()),
            ..LastMinute::default()
        };
        let view = self.admission.view();
        let engines = view.iter().flat_map(|pool| pool.backends.iter().map(move |one| (&pool.name, &one.name)));
        Diagnosis {
            findings: Vec::new(),
            keys: (0..1_000).map(|number| minute("", format!("key-{number}"))).collect(),
            engines: engines.map(|(pool, name)| minute(pool, name.to_string())).collect(),
            in_flight: Vec::new(),
        }
    }

    fn models(&self) -> Vec<ModelStatus> {
        vec![ModelStatus { name: "m".to_owned(), serving: (1, 2), ..ModelStatus::default() }]
    }

    fn reload(&self) -> Result<Vec<String>, ReloadError> {
        (self.reload)()
    }

    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend> {
        let id = find(&self.admission.view(), pool, backend)?;
        self.admission.set_draining(id, draining);
        Ok(())
    }

    fn engine_log(
        &self,
        pool: &str,
        backend: &str,
        after: Option<u64>,
        most: usize,
    ) -> Result<LogLines, BackendLogError> {
        find(&self.admission.view(), pool, backend)?;
        match pool {
            "short" => Ok(LogLines { lines: vec![format!("from {after:?}, at most {most}")], next: 8, note: None }),
            _ => Err(LogError::NotManaged(format!("{pool}/{backend}")).into()),
        }
    }

    fn engine_kind(&self, _pool: &str, _backend: &str) -> sluice_core::engines::EngineKind {
        sluice_core::engines::EngineKind::Vllm
    }

    fn restart(
        &self,
        pool: &str,
        backend: &str,
        request: RestartRequest,
    ) -> Result<ChangeStarted, BackendRestartError> {
        find(&self.admission.view(), pool, backend)?;
        let name = format!("{pool}/{backend}");
        if request.hold {
            Ok(ChangeStarted { change: 7, notices: vec!["x is dropped".to_owned()] })
        } else {
            Err(RestartError::NotManaged(name).into())
        }
    }
}

impl ExperimentControl for Fake {
    fn experiments(&self) -> Vec<ExperimentReport> {
        vec![]
    }

    fn experiment(&self, name: &str) -> Result<ExperimentReport, ExperimentError> {
        Err(ExperimentError::Unknown { name: name.to_owned(), known: "x".to_owned() })
    }

    fn put_experiment(&self, name: &str, keys: Map<String, Value>) -> Result<ExperimentReport, ExperimentError> {
        match keys.get("weight") {
            Some(_) => Err(ExperimentError::Invalid { problems: vec!["weight: unknown key".to_owned()] }),
            None => self.experiment(name),
        }
    }

    fn rate(&self, request_id: &str, _: bool) -> Result<Arc<str>, ExperimentError> {
        Err(ExperimentError::UnknownRequest(request_id.to_owned()))
    }

    fn remove_experiment(&self, name: &str) -> Result<(), ExperimentError> {
        Err(ExperimentError::Declared { name: name.to_owned() })
    }

    fn order(&self, name: &str, order: Order) -> Result<ExperimentReport, ExperimentError> {
        match order {
            Order::Start => Err(ExperimentError::NotReady { name: name.to_owned(), arm: "b".to_owned() }),
            Order::Stop => self.experiment(name),
            Order::Promote(arm) => {
                Err(ExperimentError::UnknownArm { name: name.to_owned(), arm, known: "a, b".to_owned() })
            }
        }
    }
}

impl TunerControl for Fake {
    fn tuner(&self) -> TunerReport {
        TunerReport { mode: "approve".to_owned(), ..TunerReport::default() }
    }

    fn order_tuner(&self, order: TunerOrder) -> Result<TunerReport, TunerError> {
        match order {
            TunerOrder::Approve(id) => Err(TunerError::UnknownProposal { id, known: String::new() }),
            _ => Ok(self.tuner()),
        }
    }
}

pub(super) struct Served {
    pub(super) address: String,
    pub(super) control: Arc<Fake>,
    pub(super) end: Ending,
    pub(super) serving: JoinHandle<()>,
}

pub(super) async fn served(token: Option<&str>, reload: fn() -> Result<Vec<String>, ReloadError>) -> Served {
    let admission = testing::admission(Instant::now());
    let pools = Arc::clone(&admission);
    let telemetry = Telemetry::with(Box::new(move || pools.view()), None);
    telemetry.record(&testing::completed(Duration::from_millis(30), Duration::from_millis(6)));
    telemetry.record(&testing::record(Outcome::Refused));
    let token = token.map(|token| Secret::new(token.to_owned(), None));
    let (token, panics, looks) = (Mutex::new(token), AtomicBool::new(false), AtomicUsize::new(0));
    let control = Arc::new(Fake { admission, telemetry, token, reload, panics, looks });
    let socket = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = socket.address().to_string();
    let end = Ending::default();
    let serving = tokio::spawn(socket.serve(Arc::clone(&control) as Arc<dyn Control>, end.clone()));
    Served { address, control, end, serving }
}

/// Sends with `x-sluice-admin` and more header lines. Returns status, head and body.
pub(super) async fn send(served: &Served, request: &str, headers: &str) -> (u16, String, String) {
    send_bare(served, request, &format!("x-sluice-admin: 1\r\n{headers}")).await
}

/// [`send`] without `x-sluice-admin`.
pub(super) async fn send_bare(served: &Served, request: &str, headers: &str) -> (u16, String, String) {
    let mut socket = TcpStream::connect(&served.address).await.unwrap();
    let text = format!("{request} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{headers}\r\n", served.address);
    socket.write_all(text.as_bytes()).await.unwrap();
    let mut response = String::new();
    timeout(DEADLINE, socket.read_to_string(&mut response)).await.unwrap().unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), head.to_lowercase(), body.to_owned())
}

pub(super) fn no_changes() -> Result<Vec<String>, ReloadError> {
    Ok(vec![])
}

pub(super) fn code(body: &str) -> String {
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert!(body["error"]["message"].as_str().unwrap().len() > 10);
    body["error"]["code"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_connection_that_waits_too_long_for_its_client_is_closed() {
    let served = served(None, no_changes).await;
    for sent in [&b""[..], b"GET /health HTTP/1.1\r\nhost: "] {
        let mut socket = TcpStream::connect(&served.address).await.unwrap();
        socket.write_all(sent).await.unwrap();
        tokio::time::pause();
        let mut rest = Vec::new();
        let ended = timeout(Duration::from_secs(600), socket.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "{} bytes of a request were sent", sent.len());
        tokio::time::resume();
    }
}

#[tokio::test]
async fn a_client_that_never_reads_does_not_hold_up_a_stop() {
    let served = served(None, no_changes).await;
    let mut socket = TcpStream::connect(&served.address).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", served.address);
    socket.write_all(request.replace("GET /", "GET /ui/overview.js").repeat(1_000).as_bytes()).await.unwrap();
    tokio::time::pause();
    // Paused time advances only when every task waits, which is when 12 MB of responses have filled
    // the buffers.
    tokio::time::sleep(Duration::from_secs(1)).await;
    served.end.stop();
    timeout(Duration::from_secs(5), served.serving).await.expect("the stop waits for the client").unwrap();
}

#[tokio::test]
async fn a_connection_that_is_open_at_a_hand_over_is_served_once_more() {
    let served = served(None, no_changes).await;
    let request = format!("GET /health HTTP/1.1\r\nHost: {}\r\n\r\n", served.address);
    let mut fresh = TcpStream::connect(&served.address).await.unwrap();
    let mut used = TcpStream::connect(&served.address).await.unwrap();
    used.write_all(request.as_bytes()).await.unwrap();
    let mut head = [0; 12];
    used.read_exact(&mut head).await.unwrap();
    served.end.hand_over().await;
    assert!(TcpStream::connect(&served.address).await.is_err(), "no connection is accepted");
    for socket in [&mut used, &mut fresh] {
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut rest = String::new();
        timeout(DEADLINE, socket.read_to_string(&mut rest)).await.unwrap().unwrap();
        assert!(rest.contains("HTTP/1.1 200") && rest.contains("connection: close"), "{rest}");
    }
    timeout(DEADLINE, served.serving).await.expect("the port ends").unwrap();
}

#[tokio::test]
async fn the_page_metrics_and_health_need_no_token_and_the_rest_does() {
    let served = served(Some(TOKEN), no_changes).await;
    for open in ["GET /", "GET /metrics", "GET /health", "HEAD /health", "GET /health?verbose=1"] {
        assert_eq!(send(&served, open, "").await.0, 200, "{open}");
    }
    for locked in ["GET /admin/status", "POST /admin/reload", "POST /admin/backends/short/gpu0/drain"] {
        for headers in ["", "Authorization: Bearer open sesam\r\n", "Authorization: Basic b3BlbiBzZXNhbWU=\r\n"] {
            let (status, head, body) = send(&served, locked, headers).await;
            assert_eq!((status, code(&body).as_str()), (401, "unauthorized"), "{locked}");
            assert!(head.contains("www-authenticate: bearer"));
        }
        assert_eq!(send(&served, locked, &format!("Authorization: Bearer {TOKEN}\r\n")).await.0, 200, "{locked}");
    }
}

#[tokio::test]
async fn the_metrics_page_is_openmetrics_for_clients_that_take_it() {
    let served = served(None, no_changes).await;
    let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
                      text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
    for (accept, open) in [
        (prometheus, true),
        ("text/plain", false),
        ("*/*", false),
        ("application/openmetrics-text;q=0.000, */*", false),
        ("text/plain, application/openmetrics-text; version=1.0.0; Q=0.5", false),
        ("Application/OpenMetrics-Text, text/plain;q=0.9", true),
    ] {
        let (status, head, body) = send(&served, "GET /metrics", &format!("Accept: {accept}\r\n")).await;
        assert_eq!((status, head.contains("application/openmetrics-text; version=1.0.0")), (200, open), "{accept}");
        assert_eq!(body.ends_with("# EOF\n"), open, "{accept}");
    }
}

#[tokio::test]
async fn a_reload_returns_the_changes_or_the_problems() {
    let changed = served(None, || Ok(vec!["pool short: slots: 64 -> 32".to_owned()])).await;
    let (status, _, body) = send(&changed, "POST /admin/reload", "").await;
    assert_eq!((status, body.as_str()), (200, "{\"changes\":[\"pool short: slots: 64 -> 32\"]}\n"));

    let bad = served(None, || Err(ReloadError::Problems(vec!["pool[0].slots: 0 is outside 1 to 65536".into()]))).await;
    let (status, _, body) = send(&bad, "POST /admin/reload", "").await;
    assert_eq!((status, code(&body).as_str()), (422, "invalid_config"));
    assert!(body.contains("\"problems\":[\"pool[0].slots: 0 is outside 1 to 65536\"]"), "{body}");

    let without = served(None, || Err(ReloadError::NoFile)).await;
    let (status, _, body) = send(&without, "POST /admin/reload", "").await;
    assert_eq!((status, code(&body).as_str()), (409, "no_config_file"));
}

#[tokio::test]
async fn draining_and_enabling_show_in_the_status() {
    let served = served(None, no_changes).await;
    let client = AdminClient::new(&served.address, None).unwrap();
    let state = async || client.get::<Status>("/admin/status").await.unwrap().pools[0].backends[0].state.clone();
    assert_eq!(state().await, "ready");
    let _: serde_json::Value = client.post("/admin/backends/short/gpu0/drain").await.unwrap();
    assert_eq!(state().await, "draining");
    let _: serde_json::Value = client.post("/admin/backends/short/gpu0/enable").await.unwrap();
    assert_eq!(state().await, "ready");
    for (path, message) in [
        (
            "/admin/backends/short/gpu7/drain",
            "there is no backend 'gpu7' in pool 'short'; its backends are: gpu0 (sluice explain no_such_backend)",
        ),
        (
            "/admin/backends/shrot/gpu0/drain",
            "there is no pool 'shrot'; pools are: short, long (sluice explain no_such_backend)",
        ),
    ] {
        let refused = client.post::<serde_json::Value>(path).await.unwrap_err();
        assert_eq!(refused.to_string(), message);
    }
}

#[tokio::test]
async fn a_restart_returns_its_number_or_why_it_is_refused() {
    let served = served(None, no_changes).await;
    let path = "POST /admin/backends/short/gpu0/restart";
    let with_body = |body: &str| format!("Content-Length: {}\r\n\r\n{body}", body.len());
    let (status, _, body) = send(&served, path, &with_body(r#"{"set": {"max-num-seqs": 32}, "hold": true}"#)).await;
    assert_eq!(
        (status, body.trim()),
        (202, r#"{"backend":"gpu0","change":7,"notices":["x is dropped"],"pool":"short"}"#)
    );
    let client = AdminClient::new(&served.address, None).unwrap();
    let options = RestartOptions { hold: true, ..RestartOptions::default() };
    assert_eq!(client.restart("short", "gpu0", &options).await.unwrap().change, 7);
    let (status, _, body) = send(&served, path, "").await;
    assert_eq!((status, code(&body).as_str()), (409, "not_managed"));
    assert!(body.contains("drain it here, restart it where it runs"), "{body}");
    for (path, headers) in [
        (path, with_body(r#"{"force": true}"#)),
        (path, with_body("hold")),
        ("POST /admin/backends/short/gpu0/restart?hold", String::new()),
    ] {
        let (status, _, body) = send(&served, path, &headers).await;
        assert_eq!((status, code(&body).as_str()), (400, "bad_request"), "{path} {headers}");
    }
    let (status, _, body) = send(&served, "POST /admin/backends/short/gpu9/restart", "").await;
    assert_eq!((status, code(&body).as_str()), (404, "no_such_backend"));
    assert_eq!(send(&served, "GET /admin/backends/short/gpu0/restart", "").await.0, 405);
}

#[tokio::test]
async fn the_log_of_an_engine_needs_the_token_and_is_bounded() {
    let served = served(Some(TOKEN), no_changes).await;
    let token = format!("Authorization: Bearer {TOKEN}\r\n");
    let path = |rest: &str| format!("GET /admin/backends/{rest}");
    assert_eq!(send(&served, &path("short/gpu0/log"), "").await.0, 401);
    let (status, _, body) = send(&served, &path("short/gpu0/log?lines=5&after=7"), &token).await;
    assert_eq!((status, body.trim()), (200, r#"{"lines":["from Some(7), at most 5"],"next":8}"#));
    for (rest, status, says) in [
        ("short/gpu0/log?lines=1001", 400, "bad_request"),
        ("short/gpu9/log", 404, "no_such_backend"),
        ("long/gpu1/log", 409, "not_managed"),
    ] {
        let (found, _, body) = send(&served, &path(rest), &token).await;
        assert_eq!((found, code(&body).as_str()), (status, says), "{rest}");
    }
    assert_eq!(send(&served, "POST /admin/backends/short/gpu0/log", &token).await.0, 405);
}

#[tokio::test]
async fn a_page_of_another_origin_cannot_change_anything() {
    let served = served(None, no_changes).await;
    let own = format!("Origin: http://{}\r\nSec-Fetch-Site: same-origin\r\n", served.address);
    assert_eq!(send(&served, "POST /admin/reload", &own).await.0, 200);
    for headers in ["Origin: http://evil.example\r\n", "Sec-Fetch-Site: cross-site\r\n", "Origin: null\r\n"] {
        let (status, _, body) = send(&served, "POST /admin/reload", headers).await;
        assert_eq!((status, code(&body).as_str()), (403, "cross_origin"), "{headers}");
    }
}

#[tokio::test]
async fn a_change_without_a_token_needs_the_header_and_with_one_the_token() {
    let open = served(None, no_changes).await;
    let (status, _, body) = send_bare(&open, "POST /admin/reload", "").await;
    assert_eq!((status, code(&body).as_str()), (403, "header_required"));
    assert!(body.contains("curl: -H 'x-sluice-admin: 1'"), "{body}");
    assert_eq!(send_bare(&open, "POST /admin/reload", "X-Sluice-Admin: 1\r\n").await.0, 200);
    assert_eq!(send_bare(&open, "GET /admin/status", "").await.0, 200);
    let locked = served(Some(TOKEN), no_changes).await;
    assert_eq!(send_bare(&locked, "POST /admin/reload", "X-Sluice-Admin: 1\r\n").await.0, 401);
    assert_eq!(send_bare(&locked, "POST /admin/reload", &format!("Authorization: Bearer {TOKEN}\r\n")).await.0, 200);
}

#[tokio::test]
async fn the_status_shows_pools_backends_and_the_last_minute() {
    let served = served(None, no_changes).await;
    let status: Status = AdminClient::new(&served.address, None).unwrap().get("/admin/status").await.unwrap();
    let short = &status.pools[0];
    assert_eq!((short.name.as_str(), short.queue.limit), ("short", Some(512)));
    assert_eq!((short.last_minute.completed, short.last_minute.refused), (1, 1));
    assert!(short.last_minute.ttft_ms.is_some_and(|ttft| (ttft.p50 / 30.0 - 1.0).abs() < 0.05));
    let backend = &short.backends[0];
    assert_eq!((backend.url.as_str(), backend.state.as_str()), ("http://127.0.0.1:8000", "ready"));
    assert_eq!(
        (backend.slots.limit, backend.long_prefills.limit, backend.long_threshold),
        (Some(64), Some(1), Some(5_000))
    );
    assert_eq!(status.pools[1].backends[0].reason.as_deref(), Some("no probe has succeeded yet"));
}

#[tokio::test]
async fn the_page_may_load_nothing_from_elsewhere() {
    let served = served(None, no_changes).await;
    for file in ["/", "/ui/app.js", "/ui/page.css", "/ui/icon.svg"] {
        let (status, head, _) = send(&served, &format!("GET {file}"), "").await;
        assert_eq!(status, 200, "{file}");
        assert!(head.contains("content-security-policy: default-src 'none'") && !head.contains("unsafe"), "{head}");
    }
    for missing in ["/ui/", "/ui/none.js", "/ui/../app.js", "/ui/%2e%2e/app.js", "/ui/index.html", "/ui/app.js/"] {
        assert_eq!(send(&served, &format!("GET {missing}"), "").await.0, 404, "{missing}");
    }
    let evil = "GET /ui/app.js HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    let mut socket = TcpStream::connect(&served.address).await.unwrap();
    socket.write_all(evil.as_bytes()).await.unwrap();
    let mut response = String::new();
    timeout(DEADLINE, socket.read_to_string(&mut response)).await.unwrap().unwrap();
    assert!(response.starts_with("HTTP/1.1 403"), "{response}");
}

#[tokio::test]
async fn a_panic_in_a_handler_is_a_500_and_the_port_keeps_serving() {
    let served = served(None, no_changes).await;
    served.control.panics.store(true, Ordering::Relaxed);
    let (status, _, body) = send(&served, "GET /admin/status", "").await;
    assert_eq!((status, code(&body).as_str()), (500, "internal"));
    served.control.panics.store(false, Ordering::Relaxed);
    assert_eq!(send(&served, "GET /admin/status", "").await.0, 200);
}

#[tokio::test]
async fn errors_of_the_client_say_what_to_do_next() {
    let served = served(Some(TOKEN), no_changes).await;
    let get = async |token| AdminClient::new(&served.address, token).unwrap().get::<Status>("/admin/status").await;
    assert!(get(Some(TOKEN)).await.is_ok());
    let locked = get(None).await.unwrap_err().to_string();
    assert!(locked.contains("pass --token or set SLUICE_ADMIN_TOKEN"), "{locked}");
    let wrong = get(Some("open barley")).await.unwrap_err().to_string();
    assert!(wrong.contains("has another token; correct --token"), "{wrong}");
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let error = AdminClient::new(&unused, None).unwrap().get::<Status>("/admin/status").await.unwrap_err().to_string();
    assert!(error.contains("no response from the admin port") && error.contains("is sluice serve running"), "{error}");
}
