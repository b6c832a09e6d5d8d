//! A store for the gateways under test: a small part of etcd's JSON API in this process, or a real
//! etcd.
//!
//! The store in this process can be slow, silent or wrong ([`Mood`]); the real one is the program
//! in `SLUICE_ETCD`, or `etcd`.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use crate::gateways::exchange;
use crate::ports::free_port;

const LEDGER: &str = "sluice-ledger";

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Mood {
    #[default]
    Well,
    /// It accepts connections and does not answer.
    Silent,
    /// It answers after this time.
    Slow(Duration),
    /// It makes the write, but does not answer.
    Forgets,
    /// It answers with text that no etcd would send.
    Garbage,
}

#[derive(Debug, Default)]
struct State {
    revision: u64,
    /// Value and revision of each key; the key is in base64.
    values: BTreeMap<String, (Vec<u8>, u64)>,
    mood: Mood,
}

impl State {
    fn put(&mut self, key: String, value: Vec<u8>) {
        self.revision += 1;
        self.values.insert(key, (value, self.revision));
    }
}

#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) url: String,
    state: Arc<Mutex<State>>,
}

impl Fake {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { revision: 1, ..State::default() }));
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            loop {
                let Ok((socket, _)) = listener.accept().await else { continue };
                let state = Arc::clone(&shared);
                let answer = service_fn(move |request| answer(Arc::clone(&state), request));
                tokio::spawn(async move {
                    let _ =
                        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), answer).await;
                });
            }
        });
        Self { url, state }
    }

    pub(crate) fn set(&self, mood: Mood) {
        self.state.lock().mood = mood;
    }

    pub(crate) fn value(&self) -> Option<Value> {
        self.value_of(LEDGER)
    }

    pub(crate) fn value_of(&self, key: &str) -> Option<Value> {
        let state = self.state.lock();
        serde_json::from_slice(&state.values.get(&STANDARD.encode(key))?.0).ok()
    }

    /// Writes the ledger, as another program would.
    pub(crate) fn put(&self, value: &[u8]) {
        self.put_at(LEDGER, value);
    }

    /// Writes the value of a key, as another program would.
    pub(crate) fn put_at(&self, key: &str, value: &[u8]) {
        let mut state = self.state.lock();
        state.put(STANDARD.encode(key), value.to_owned());
    }
}

async fn answer(state: Arc<Mutex<State>>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mood = state.lock().mood;
    match mood {
        Mood::Silent => std::future::pending().await,
        Mood::Slow(time) => sleep(time).await,
        Mood::Garbage => return Ok(Response::new(Full::new(Bytes::from("<html>welcome</html>")))),
        Mood::Well | Mood::Forgets => {}
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let answer = if path == "/v3/kv/range" { range(&state.lock(), &body) } else { txn(&mut state.lock(), &body) };
    if mood == Mood::Forgets && path == "/v3/kv/txn" {
        std::future::pending::<()>().await;
    }
    Ok(Response::new(Full::new(Bytes::from(answer.to_string()))))
}

fn range(state: &State, body: &Value) -> Value {
    let header = json!({ "revision": state.revision.to_string() });
    match state.values.get(body["key"].as_str().unwrap_or_default()) {
        None => json!({ "header": header }),
        Some((value, revision)) => json!({
            "header": header,
            "kvs": [{ "mod_revision": revision.to_string(), "value": STANDARD.encode(value) }],
            "count": "1",
        }),
    }
}

fn txn(state: &mut State, body: &Value) -> Value {
    let compared = body["compare"][0]["mod_revision"].as_str().unwrap_or("none");
    let key = body["compare"][0]["key"].as_str().unwrap_or_default();
    let now = state.values.get(key).map_or(0, |(_, revision)| *revision);
    let mut answer = json!({ "header": { "revision": state.revision.to_string() } });
    if compared == now.to_string() {
        let value = body["success"][0]["request_put"]["value"].as_str().unwrap_or_default();
        state.put(key.to_owned(), STANDARD.decode(value).unwrap_or_default());
        answer["succeeded"] = json!(true);
    }
    answer
}

pub(crate) struct Real {
    pub(crate) url: String,
    peer: String,
    folder: TempDir,
    child: Option<Child>,
}

impl Real {
    pub(crate) async fn start() -> Self {
        let [url, peer] = [(); 2].map(|()| format!("http://127.0.0.1:{}", free_port()));
        let mut etcd = Self { url, peer, folder: tempfile::tempdir().unwrap(), child: None };
        etcd.run().await;
        etcd
    }

    /// Starts etcd and waits until it answers. A second start finds the data of the first one on
    /// disk.
    pub(crate) async fn run(&mut self) {
        let program = std::env::var_os("SLUICE_ETCD").map_or_else(|| PathBuf::from("etcd"), PathBuf::from);
        let mut command = Command::new(program);
        command.arg("--data-dir").arg(self.folder.path());
        for (flag, value) in [
            ("--listen-client-urls", self.url.clone()),
            ("--advertise-client-urls", self.url.clone()),
            ("--listen-peer-urls", self.peer.clone()),
            ("--initial-advertise-peer-urls", self.peer.clone()),
            ("--initial-cluster", format!("default={}", self.peer)),
        ] {
            command.arg(flag).arg(value);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        self.child = Some(command.spawn().expect("etcd (set SLUICE_ETCD to the program)"));
        let (address, begun) = (self.url.trim_start_matches("http://").to_owned(), Instant::now());
        while tokio::net::TcpStream::connect(&address).await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "etcd does not start");
            sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn value_of(&self, key: &str) -> Option<Value> {
        let body = json!({ "key": STANDARD.encode(key) }).to_string();
        let request = format!(
            "POST /v3/kv/range HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let port = self.url.rsplit(':').next()?.parse().ok()?;
        let answer = exchange(port, &request).await?;
        let answer: Value = serde_json::from_str(&answer[answer.find('{')?..=answer.rfind('}')?]).ok()?;
        serde_json::from_slice(&STANDARD.decode(answer["kvs"][0]["value"].as_str()?).ok()?).ok()
    }

    pub(crate) async fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill().await;
        }
    }
}
