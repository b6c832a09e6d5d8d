//! The composition root: a configuration becomes a running gateway.
//!
//! [`start`] binds both sockets, hands the pools to admission, probes every backend once, and only then
//! serves; a failure on the way leaves nothing behind. The result is a [`Running`] gateway: it reloads,
//! stops in order, and can be one of several in a process, which is how the demo and the tests use it.
//!
//! UpstreamConnector that we run are started beside serving: requests wait for them as the queue allows.
//!
//! Stopping: `/ready` turns 503 and new requests are shed, the client socket closes, what is running
//! or waiting goes on for at most `server.drain_timeout`, then engines stop (`fleet.on_exit`); the admin socket answers until the end.

mod control;
mod engines;
mod local;
mod reload;
pub(crate) mod specs;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::admin;
use crate::config::{Config, OnExit};
use crate::estimate::ExactCounter;
use crate::fleet::{Fleet, JournalError, PortsError, Prober, ReportedModels, unattended};
use crate::flow::{Flow, LearnedState, RoutingTable};
use crate::pool::Admission;
use crate::proxy::{Gateway, ListenError, Listener, UpstreamConnector};
use crate::telemetry::Telemetry;

pub use local::ModelList;
pub use reload::{ReloadError, Source};

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A socket could not be opened.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A tokenizer could not be loaded.
    #[error("model \"{model}\": {source}")]
    Tokenizer {
        /// Whose.
        model: String,
        /// Why.
        source: crate::estimate::ExactError,
    },
    /// The access log could not be opened.
    #[error(transparent)]
    AccessLog(#[from] crate::telemetry::AccessLogError),
    /// The journal of the engines could not be opened.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An engine was left without a port.
    #[error(transparent)]
    Ports(#[from] PortsError),
}

/// Everything a running gateway consists of.
#[derive(Debug)]
pub struct House {
    pub(crate) flow: Arc<Flow<UpstreamConnector, Arc<Telemetry>>>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) learned: LearnedState,
    pub(crate) reported: Arc<ReportedModels>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) config: ArcSwap<Config>,
    pub(crate) source: Source,
    pub(crate) state: parking_lot::Mutex<reload::Loaded>,
    pub(crate) started: Instant,
    pub(crate) last_reload: parking_lot::Mutex<Option<admin::status::LastReload>>,
    /// One reload at a time, from reading the file to its end: the later one is what counts.
    pub(crate) reloading: parking_lot::Mutex<()>,
    /// Backends are to be probed now: a reload may have brought new ones, and requests wait for them.
    pub(crate) probe_now: Notify,
}

/// A gateway that serves.
#[derive(Debug)]
pub struct Running {
    house: Arc<House>,
    client: SocketAddr,
    admin: SocketAddr,
    stop: watch::Sender<bool>,
    end: watch::Sender<bool>,
    serving: JoinHandle<bool>,
    tasks: Vec<JoinHandle<()>>,
}

/// How long the first probe of all backends may hold up the start.
const FIRST_PROBE: Duration = Duration::from_secs(2);

/// Starts a gateway. `source` is where a reload reads the configuration again.
pub async fn start(mut config: Config, source: Source) -> Result<Running, StartError> {
    let now = Instant::now();
    let counters = load_counters(&config)?;
    let listener = Listener::bind(config.server.listen).await?;
    let admin_socket = admin::bind(config.server.admin).await?;
    let admission = Admission::new(now, specs::health_rules(&config.health), seed());
    let reported = Arc::new(ReportedModels::default());
    let fleet = Fleet::new(Arc::clone(&admission), Arc::clone(&reported), Arc::new(engines::driver));
    if engines::any(&config) {
        fleet.open(&config.fleet.state)?;
        engines::settle_ports(&mut config, None)?;
    } else {
        for name in unattended(&config.fleet.state) {
            let state = config.fleet.state.display();
            tracing::warn!(
                "{name}: an engine runs that another gateway started (fleet.state {state}); none is configured here, so it is left alone"
            );
        }
    }
    let config = Arc::new(config);
    let layout = admission.apply(&specs::pools(&config), specs::health_rules(&config.health), now);
    let view = Arc::clone(&admission);
    let telemetry = Telemetry::new(&config, Box::new(move || view.view())).map_err(StartError::AccessLog)?;
    let telemetry = Arc::new(telemetry);
    let learned = LearnedState::default();
    let plan = RoutingTable::new(Arc::clone(&config), &layout, &[], &counters, &learned);
    let engines = UpstreamConnector::new(config.timeouts.connect);
    let flow = Arc::new(Flow::new(Arc::clone(&admission), engines, Arc::clone(&telemetry), plan));
    let (launched, others) = (engines::engines(&config, &layout), engines::external_backends(&config, &layout));
    let (client, admin) = (listener.address(), admin_socket.address());
    let house = Arc::new(House {
        flow,
        admission,
        telemetry,
        learned,
        reported,
        fleet,
        config: ArcSwap::new(config),
        source,
        state: parking_lot::Mutex::new(reload::Loaded::new(layout, counters)),
        started: now,
        last_reload: parking_lot::Mutex::default(),
        reloading: parking_lot::Mutex::default(),
        probe_now: Notify::new(),
    });
    house.fleet.apply(launched, others);
    let mut prober = Prober::new(Arc::clone(&house.admission), Arc::clone(&house.reported));
    let first = tokio::time::timeout(FIRST_PROBE, house.probe(&mut prober)).await;
    tracing::debug!(complete = first.is_ok(), "first probe done");
    let (stop, stopping) = watch::channel(false);
    let (end, ending) = watch::channel(false);
    let gateway = Arc::new(Gateway::new(Arc::clone(&house.flow), ModelList::new(Arc::clone(&house)), seed()));
    let asked = Arc::clone(&house);
    let drain = move || asked.config.load().server.drain_timeout;
    let serving = tokio::spawn(listener.serve(gateway, stopping, drain));
    let tasks = vec![
        tokio::spawn(Arc::clone(&house).keep_probing(prober, ending.clone())),
        tokio::spawn(admin_socket.serve(Arc::clone(&house) as Arc<dyn admin::Control>, ending)),
    ];
    Ok(Running { house, client, admin, stop, end, serving, tasks })
}

impl Running {
    /// Where clients connect.
    pub fn client_address(&self) -> SocketAddr {
        self.client
    }

    /// Where metrics and the admin API are.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// The gateway's parts, for reloading and looking.
    pub fn house(&self) -> &Arc<House> {
        &self.house
    }

    /// Stops in order. Whether everything that was running came to its end in time.
    pub async fn stop(self) -> bool {
        self.house.flow.close();
        self.stop.send_replace(true);
        let orderly = self.serving.await.unwrap_or(false);
        match self.house.config.load().fleet.on_exit {
            OnExit::Stop => self.house.fleet.stop().await,
            OnExit::Keep => self.house.fleet.abandon(),
        }
        self.end.send_replace(true);
        for task in self.tasks {
            let _ = task.await;
        }
        self.house.telemetry.flush();
        orderly
    }
}

impl House {
    /// The owner of capacity.
    pub fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    async fn keep_probing(self: Arc<Self>, mut prober: Prober, mut end: watch::Receiver<bool>) {
        loop {
            let interval = self.config.load().health.probe_interval;
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.probe_now.notified() => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            self.probe(&mut prober).await;
        }
    }

    async fn probe(&self, prober: &mut Prober) {
        let rules = self.config.load().health.clone();
        if prober.probe_all(&rules).await {
            self.replan();
        }
    }
}

fn load_counters(config: &Config) -> Result<Vec<Option<Arc<ExactCounter>>>, StartError> {
    let load = |model: &crate::config::Model| {
        let Some(path) = &model.tokenizer else { return Ok(None) };
        let loaded = ExactCounter::load(path).map(|counter| Some(Arc::new(counter)));
        loaded.map_err(|source| StartError::Tokenizer { model: model.name.clone(), source })
    };
    config.models.iter().map(load).collect()
}

/// A seed for request ids and coins: different in every process, of no value to anybody.
fn seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64 ^ (u64::from(std::process::id()) << 32)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;
    use crate::config::Surroundings;

    /// A gateway in front of an engine that is not there.
    async fn gateway(extra: &str) -> Running {
        let text = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nmax_body = \"1KiB\"\n{extra}\n\
             [[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n\
             [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n"
        );
        let around = Surroundings { env: &|_| None, folder: "/".into(), cores: 1 };
        start(Config::parse(&text, "test", &[], &around).unwrap().config, Source::Fixed).await.unwrap()
    }

    /// Sends a request on its own connection; the connection and the status it got.
    async fn ask(gateway: &Running, request: &str) -> (TcpStream, u16) {
        let mut connection = TcpStream::connect(gateway.client_address()).await.unwrap();
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut got = [0; 12];
        timeout(Duration::from_secs(10), connection.read_exact(&mut got)).await.unwrap().unwrap();
        (connection, std::str::from_utf8(&got[9..]).unwrap().parse().unwrap())
    }

    #[tokio::test]
    async fn an_idle_connection_does_not_hold_up_a_stop() {
        let gateway = gateway("").await;
        let (_idle, status) = ask(&gateway, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert_eq!(status, 200);
        let orderly = timeout(Duration::from_secs(10), gateway.stop()).await;
        assert_eq!(orderly, Ok(true));
    }

    #[tokio::test]
    async fn what_the_gateway_answers_itself_says_what_is_wrong_with_a_request_for_it() {
        let gateway = gateway(
            "[auth]\nkeys = [{ name = \"k\", sha256 = \"2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\" }]",
        )
        .await;
        for (line, want) in [
            ("GET /v1/models", 401),
            ("POST /v1/models", 405),
            ("POST /health", 405),
            ("GET /health", 200),
            ("GET /metrics", 404),
        ] {
            let (_, status) = ask(&gateway, &format!("{line} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
            assert_eq!(status, want, "{line}");
        }
        gateway.stop().await;
    }

    #[tokio::test]
    async fn sizes_are_bounded_whether_they_are_announced_or_not() {
        let gateway = gateway("").await;
        let chunk = "x".repeat(2_000);
        let body = format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n{chunk}\r\n0\r\n\r\n", chunk.len());
        let many = "x: y\r\n".repeat(200);
        let large = format!("x: {}\r\n", "y".repeat(100 << 10));
        for (rest, want) in [(body, 413), (format!("{many}\r\n"), 431), (format!("{large}\r\n"), 431)] {
            let request = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{rest}");
            let (_, status) = ask(&gateway, &request).await;
            assert_eq!(status, want);
        }
        gateway.stop().await;
    }
}
