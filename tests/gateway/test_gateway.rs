//! A gateway in this process, started from the text of a configuration, and checks of its counters.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};
use sluice_config::{Config, Surroundings};
use sluice_serve::{Running, Source};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::client::{Response, TIMEOUT, TestClient, get};

const LOOK: Duration = Duration::from_millis(5);

pub(crate) struct TestGateway {
    running: Running,
    /// Folder from which relative paths start if the configuration has no file.
    _folder: Option<TempDir>,
}

/// A configuration with one pool, `only`, for model `m`. Its backends are at `urls` and are called
/// `b0`, `b1`, ...
pub(crate) fn one_pool(urls: &[String]) -> String {
    let mut text = String::from(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[[model]]\nname = \"m\"\naliases = [\"alias\"]\n\
         [[pool]]\nname = \"only\"\nmodels = [\"m\"]\nusage = \"off\"\n",
    );
    for (index, url) in urls.iter().enumerate() {
        text += &format!("[[pool.backend]]\nname = \"b{index}\"\nurl = \"{url}\"\n");
    }
    text
}

/// The SHA-256 of a client's key in hexadecimal, as in the configuration.
pub(crate) fn key_digest(key: &str) -> String {
    Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl TestGateway {
    /// A gateway with one pool; `sets` are values of `--set`.
    pub(crate) async fn over(urls: &[String], sets: &[&str]) -> Self {
        Self::from_text(&one_pool(urls), sets).await
    }

    pub(crate) async fn from_text(text: &str, sets: &[&str]) -> Self {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let folder = tempfile::tempdir().unwrap();
        let around = Surroundings::of_process(folder.path());
        let loaded = Config::parse(text, "test", &sets, &around).unwrap_or_else(|problems| panic!("{problems}"));
        Self { running: sluice_serve::start(loaded.config, Source::Fixed).await.unwrap(), _folder: Some(folder) }
    }

    pub(crate) async fn from_file(path: &Path) -> Self {
        let loaded = Config::load(path, &[]).unwrap_or_else(|problems| panic!("{problems}"));
        let source = Source::File { path: path.to_owned(), sets: Vec::new() };
        Self { running: sluice_serve::start(loaded.config, source).await.unwrap(), _folder: None }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.running.client_address()
    }

    pub(crate) fn admin(&self) -> SocketAddr {
        self.running.admin_address()
    }

    pub(crate) async fn client(&self) -> TestClient {
        TestClient::to(self.address()).await
    }

    pub(crate) async fn request(&self, request: impl AsRef<[u8]>) -> Response {
        self.client().await.request(request).await
    }

    pub(crate) fn load(&self) -> (usize, usize) {
        self.running.app().admission().load()
    }

    /// Slots in use on the first backend of the first pool.
    pub(crate) fn slots(&self) -> u32 {
        self.running.app().admission().view()[0].backends[0].used.slots
    }

    /// Slots of the first backend of the first pool.
    pub(crate) fn slots_limit(&self) -> u32 {
        self.running.app().admission().view()[0].backends[0].limits.slots
    }

    /// The state of a backend of the first pool.
    pub(crate) fn state(&self, backend: usize) -> &'static str {
        self.running.app().admission().view()[0].backends[backend].phase.label()
    }

    pub(crate) async fn page(&self) -> String {
        TestClient::to(self.admin()).await.request(get("/metrics")).await.text()
    }

    /// The sum of a metric's samples whose labels include all of `labels`.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        sum(&self.page().await, name, labels)
    }

    /// Waits until a counter has this value, because the gateway records a request only after it
    /// has sent the response.
    pub(crate) async fn counts(&self, name: &str, label: &str, value: f64) {
        let what = format!("{name}{{{label}}} is {value}");
        eventually(&what, async || self.metric(name, &[label]).await == value).await;
    }

    pub(crate) async fn recorded(&self, outcome: &str, value: f64) {
        self.counts("sluice_requests_total", &format!("outcome=\"{outcome}\""), value).await;
    }

    /// Waits at most `within` until all slots and tokens are released and the invariants of
    /// admission hold.
    pub(crate) async fn settled_within(&self, within: Duration) {
        let deadline = Instant::now() + within;
        loop {
            let page = self.page().await;
            let gauges =
                ["sluice_in_flight", "sluice_outstanding_tokens", "sluice_prefill_tokens", "sluice_queue_length"];
            let held: Vec<(&str, f64)> = gauges.map(|name| (name, sum(&page, name, &[]))).into();
            gauges.iter().for_each(|name| assert!(page.contains(name), "no metric {name}"));
            let books = self.running.app().admission().check_invariants();
            if books.is_ok() && self.load() == (0, 0) && held.iter().all(|(_, value)| *value == 0.0) {
                return;
            }
            assert!(Instant::now() < deadline, "still held: {held:?}, {books:?}, {:?}", self.load());
            sleep(LOOK).await;
        }
    }

    /// [`Self::settled_within`] with [`TIMEOUT`].
    pub(crate) async fn settled(&self) {
        self.settled_within(TIMEOUT).await;
    }

    /// Stops the gateway. Returns whether all requests ended in time.
    pub(crate) async fn stop(self) -> bool {
        self.running.stop().await == 0
    }

    /// Begins a graceful stop: new requests are refused. The handle resolves when the running
    /// requests have ended.
    pub(crate) fn begin_stop(self) -> tokio::task::JoinHandle<bool> {
        tokio::spawn(async { self.running.stop().await == 0 })
    }
}

fn sum(page: &str, name: &str, labels: &[&str]) -> f64 {
    let samples = page.lines().filter(|line| {
        let behind = line.strip_prefix(name).and_then(|rest| rest.chars().next());
        matches!(behind, Some('{' | ' ')) && labels.iter().all(|label| line.contains(label))
    });
    samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// Waits until `condition` holds; `what` is in the panic message.
pub(crate) async fn eventually(what: &str, condition: impl AsyncFnMut() -> bool) {
    eventually_within(TIMEOUT, what, condition).await;
}

/// Waits until the access log has this many lines, and returns the log. The gateway writes a line
/// after it has sent the response. So the lines of several connections come in any order, unless
/// the test waits for each line.
pub(crate) async fn access_log(path: &Path, lines: usize) -> String {
    let text = || std::fs::read_to_string(path).unwrap_or_default();
    eventually("the requests are logged", async || text().matches('\n').count() == lines).await;
    text()
}

pub(crate) async fn eventually_within(within: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !condition().await {
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        sleep(LOOK).await;
    }
}
