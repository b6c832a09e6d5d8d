//! Starts a gateway.
//!
//! [`start`] binds both sockets, applies the pools, starts the engines, probes every backend once,
//! and then serves. A step that fails releases everything that earlier steps took. A gateway that
//! takes over ([`start_with`]) serves once the engines are adopted and the other gateway has
//! claimed the capacity that it still uses.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::app::App;
use crate::cluster::{self, Cluster, Divided};
use crate::core::{Core, Loaded, Source, StartError, load_counters};
use crate::experiments::{self, Added, restore_added};
use crate::leading::{Deciders, stand_for_election};
use crate::local::ModelList;
#[cfg(feature = "kubernetes")]
use crate::pods;
use crate::running::Running;
use crate::tuner::TunerState;
use crate::upgrade::{Opened, Port, Predecessor};
use crate::{certificates, engines};
use sluice_config::Config;
use sluice_fleet::{Fleet, Prober, ReportedModels, Step, unattended};
use sluice_gateway::flow::{Flow, LearnedState, RoutingTable, specs};
use sluice_gateway::pool::Admission;
use sluice_gateway::proxy::{ClientLimits, Ending, Gateway, ListenError, Listener, ProxyFlow, UpstreamConnector};
use sluice_gateway::telemetry::{ClientView, ClusterMetrics, Telemetry};

/// Time limit of the first round of probes.
const FIRST_PROBE: Duration = Duration::from_secs(2);

/// Longest wait for the adoption of engines at a takeover. After it, the gateway serves, and
/// requests wait for the engines.
const ADOPTION_MAX: Duration = Duration::from_secs(10);
const ADOPTION_LOOK: Duration = Duration::from_millis(20);

/// Starts a gateway. A reload reads the configuration from `source`.
pub async fn start(config: Config, source: Source) -> Result<Running, StartError> {
    start_with(config, source, Opened::default()).await
}

/// [`start`] with open sockets, and perhaps in place of another gateway.
pub async fn start_with(mut config: Config, source: Source, opened: Opened) -> Result<Running, StartError> {
    let Opened { sockets, mut predecessor } = opened;
    let now = Instant::now();
    let added = match &source {
        Source::File { path, sets } => restore_added(&mut config, path, sets),
        Source::Fixed => Added::default(),
    };
    let counters = load_counters(&config, None)?;
    let listener = client_socket(sockets.client, config.server.listen).await?;
    let admin_socket = admin_socket(sockets.admin, config.server.admin).await?;
    let sockets = descriptors(&listener, &admin_socket, &config)?;
    let admission = Admission::new(now, specs::health_rules(&config.health), seed());
    // The gateway joins before it has a backend, because no backend may get a request without a
    // share.
    let (id, learned, reported) = (seed(), LearnedState::default(), Arc::<ReportedModels>::default());
    let fleet = Fleet::new(Arc::clone(&admission), Arc::clone(&reported), Arc::new(engines::driver));
    let (keys, lead, others) = (&learned.key_usage, &fleet.lead(), &fleet.others());
    let divided = Divided { admission: &admission, keys, lead, others };
    let cluster = config.cluster.as_ref().map(|cluster| Cluster::join(cluster, divided, id, predecessor.is_some()));
    let leader = config.cluster.as_ref().and_then(|cluster| cluster::leader(cluster, fleet.lead(), id));
    // An elected leader opens the journal once it leads.
    if leader.is_none() {
        open_journal(&mut config, &fleet)?;
    }
    certificates::warn(&config);
    let tuner = TunerState::new(&mut config, now, fleet.lead());
    let config = Arc::new(config);
    let layout = admission.apply(&specs::pools(&config), specs::health_rules(&config.health), now);
    let view = Arc::clone(&admission);
    let telemetry = Arc::new(Telemetry::new(&config, Box::new(move || view.view()))?);
    let state = config.fleet.state.clone();
    experiments::restore(&learned.experiments, &state);
    learned.experiments.wait_for_models();
    let routing = RoutingTable::new(Arc::clone(&config), &layout, &[], &counters, &learned);
    let upstream = UpstreamConnector::new(&config.timeouts);
    let flow = Arc::new(Flow::new(Arc::clone(&admission), upstream, Arc::clone(&telemetry), routing));
    let clients = ClientLimits::new(&config.server);
    show_clients(&telemetry, &clients, &flow);
    let core = Arc::new(Core {
        flow,
        admission,
        fleet,
        telemetry,
        config: ArcSwap::new(config),
        source,
        learned,
        reported,
        kinds: Arc::default(),
        clients,
        started: now,
        cluster: cluster.as_ref().map(Cluster::view),
        leader,
        acts: Mutex::default(),
        loaded: Mutex::new(Loaded { layout: layout.clone(), counters }),
        replacing: Mutex::default(),
        loading: Mutex::default(),
        probe_now: Notify::new(),
    });
    let app = App::new(core, tuner, added);
    show_on_metrics_page(&app);
    if predecessor.is_some() {
        app.core.fleet.serves_beside_another(app.core.config.load().fleet.drain);
    }
    let engines = app.core.apply_engines(&app.core.config.load(), &layout);
    let prober = first_probe(&app).await;
    if let Some(predecessor) = &mut predecessor
        && let Err(error) = take_place(predecessor, &app, cluster.as_ref(), engines).await
    {
        app.core.fleet.abandon();
        if let Some(cluster) = cluster {
            cluster.end().await;
        }
        return Err(error);
    }
    Ok(serve(app, prober, (listener, admin_socket), sockets, predecessor, cluster))
}

fn open_journal(config: &mut Config, fleet: &Fleet) -> Result<(), StartError> {
    if engines::any(config) {
        fleet.open(&config.fleet.state)?;
        engines::settle_ports(config, None, true)?;
    } else {
        warn_about_unattended(config);
    }
    Ok(())
}

async fn first_probe(app: &Arc<App>) -> Prober {
    let mut prober = Prober::new(Arc::clone(&app.core.admission), Arc::clone(&app.core.reported));
    prober.kinds = Arc::clone(&app.core.kinds);
    let first = tokio::time::timeout(FIRST_PROBE, app.core.probe(&mut prober)).await;
    tracing::debug!(complete = first.is_ok(), "first probe done");
    prober
}

/// Takes the place of the previous gateway, which then claims the capacity that it still uses.
async fn take_place(
    predecessor: &mut Predecessor,
    app: &App,
    cluster: Option<&Cluster>,
    engines: usize,
) -> Result<(), StartError> {
    let adopted = tokio::time::timeout(ADOPTION_MAX, adoption(app, engines)).await;
    tracing::debug!(complete = adopted.is_ok(), "engines adopted");
    if let Some(cluster) = cluster
        && !cluster.has_share().await
    {
        return Err(StartError::NoShare { why: cluster.view().status().why.unwrap_or_default() });
    }
    Ok(predecessor.confirm(&app.core.admission).await?)
}

fn serve(
    app: Arc<App>,
    prober: Prober,
    (listener, admin_socket): (Listener, sluice_admin::Socket),
    sockets: Vec<(Port, SocketAddr, OwnedFd)>,
    predecessor: Option<Predecessor>,
    cluster: Option<Cluster>,
) -> Running {
    let (client, admin) = (listener.address(), admin_socket.address());
    let (end, stop_tasks) = watch::channel(false);
    let [ending, admin_ending] = [(); 2].map(|()| Ending::default());
    let models = Box::new(ModelList::new(Arc::clone(&app.core)));
    let gateway = Arc::new(Gateway::new(Arc::clone(&app.core.flow), models, Arc::clone(&app.core.clients), seed()));
    let serving = tokio::spawn(listener.serve(gateway, ending.clone(), Box::pin(app.core.fleet.fast_shutdown())));
    let tasks = vec![
        tokio::spawn(Arc::clone(&app.core).keep_probing(prober, stop_tasks.clone())),
        tokio::spawn(Arc::clone(&app.core).keep_watching_silent_streams(stop_tasks.clone())),
        tokio::spawn(Arc::clone(&app.core).keep_following_kv_events(stop_tasks.clone())),
        tokio::spawn(Arc::clone(&app.findings).run(stop_tasks.clone())),
        tokio::spawn(app.core.keep_serving_copies(stop_tasks.clone())),
        #[cfg(feature = "kubernetes")]
        pods::start(Arc::clone(&app.core), Arc::clone(&app.pods), stop_tasks.clone()),
        tokio::spawn(admin_socket.serve(Arc::clone(&app) as Arc<dyn sluice_admin::Control>, admin_ending.clone())),
    ];
    let leading = stand_for_election(&app);
    let deciders = leading.is_none().then(|| Deciders::begin(&app));
    let draining = predecessor.as_ref().map_or_else(Arc::default, Predecessor::gateways);
    let predecessor = predecessor.map(|one| {
        let app = Arc::clone(&app);
        tokio::spawn(async move {
            one.follow(Arc::clone(&app.core.admission)).await;
            app.core.fleet.serves_alone();
        })
    });
    let taking_back = None;
    Running {
        app,
        client,
        admin,
        ending,
        admin_ending,
        end,
        serving,
        tasks,
        deciders,
        leading,
        taking_back,
        sockets,
        predecessor,
        cluster,
        draining,
    }
}

async fn client_socket(opened: Option<TcpListener>, address: SocketAddr) -> Result<Listener, ListenError> {
    match opened {
        Some(socket) => Listener::inherited(socket).map_err(|source| ListenError { address, source }),
        None => Listener::bind(address).await,
    }
}

async fn admin_socket(opened: Option<TcpListener>, address: SocketAddr) -> Result<sluice_admin::Socket, ListenError> {
    match opened {
        Some(socket) => sluice_admin::Socket::inherited(socket).map_err(|source| ListenError { address, source }),
        None => sluice_admin::bind(address).await,
    }
}

fn descriptors(
    listener: &Listener,
    admin: &sluice_admin::Socket,
    config: &Config,
) -> Result<Vec<(Port, SocketAddr, OwnedFd)>, ListenError> {
    let failed = |address| move |source| ListenError { address, source };
    let (clients, operators) = (config.server.listen, config.server.admin);
    Ok(vec![
        (Port::Clients, clients, listener.descriptor().map_err(failed(clients))?),
        (Port::Admin, operators, admin.descriptor().map_err(failed(operators))?),
    ])
}

/// Waits until no engine of the previous gateway is on the way into rotation.
async fn adoption(app: &App, engines: usize) {
    let steps = [Step::Recover, Step::Adopt, Step::Wake, Step::Adapters, Step::Golden, Step::WarmUp].map(Step::label);
    loop {
        let views = app.core.fleet.views();
        if views.len() >= engines && !views.iter().any(|view| steps.contains(&&*view.step)) {
            return;
        }
        tokio::time::sleep(ADOPTION_LOOK).await;
    }
}

/// The flow holds the telemetry, so the telemetry has only a weak reference to the flow.
fn show_clients(telemetry: &Telemetry, clients: &Arc<ClientLimits>, flow: &Arc<ProxyFlow>) {
    let (counted, memory) = (Arc::clone(clients), Arc::clone(flow.response_memory()));
    let flow = Arc::downgrade(flow);
    telemetry.show_clients(move || {
        let waiting = memory.view();
        let (response_bytes, response_bytes_max) = (waiting.used, waiting.total);
        let responses_gave_way = flow.upgrade().map_or(0, |flow| flow.forgotten_responses());
        ClientView { response_bytes, response_bytes_max, responses_gave_way, ..counted.view() }
    });
}

/// The app holds the telemetry, so the telemetry has only weak references to the app.
fn show_on_metrics_page(app: &Arc<App>) {
    let shown = Arc::downgrade(app);
    let work = |app: Arc<App>| app.core.flow.routing_table().keys.work(&app.core.admission.view());
    app.core.telemetry.show_key_work(move || shown.upgrade().map_or_else(Vec::new, work));
    let shown = Arc::downgrade(app);
    app.core.telemetry.show_experiments(move || shown.upgrade().map_or_else(Vec::new, |app| app.experiments.active()));
    let shown = Arc::downgrade(app);
    let view = move || shown.upgrade().map_or_else(Default::default, |app| app.tuner.state.view());
    app.core.telemetry.show_tuner(view, app.tuner.state.observe());
    let keys = Arc::clone(&app.core.learned.key_usage);
    app.core.telemetry.show_keys(move || keys.tokens(Instant::now()));
    let keys = Arc::clone(&app.core.learned.key_usage);
    app.core.telemetry.show_keys_in_flight(move || keys.in_flight());
    let shown = Arc::downgrade(app);
    let pages = |app: Arc<App>| app.findings.engine_pages();
    app.core.telemetry.show_engine_pages(move || shown.upgrade().map_or_else(Vec::new, pages));
    let shown = Arc::downgrade(app);
    let names = |app: Arc<App>| app.findings.all();
    app.core.telemetry.show_findings(move || {
        let all = shown.upgrade().map_or_else(Vec::new, names);
        all.into_iter().map(|finding| [finding.cause.label().to_owned(), finding.pool, finding.subject]).collect()
    });
    let shown = Arc::downgrade(app);
    app.core.telemetry.show_pool_engines(move || shown.upgrade().map_or_else(Vec::new, |app| app.scaler.view()));
    let shown = Arc::downgrade(app);
    let view = move || shown.upgrade().map_or_else(Vec::new, |app| engines::metrics(&app.core.fleet.views()));
    app.core.telemetry.show_engines(Step::ALL.map(Step::label).to_vec(), view);
    if let Some(cluster) = app.core.cluster.clone() {
        let shown = Arc::downgrade(app);
        cluster.show_loads(Box::new(move || shown.upgrade().map_or_else(Default::default, |app| app.scaler.loads())));
        let leader = app.core.leader.clone();
        app.core.telemetry.show_cluster(move || ClusterMetrics {
            leader: leader.as_ref().map(|leader| leader.metrics()),
            ..cluster.metrics()
        });
    }
}

fn warn_about_unattended(config: &Config) {
    for name in unattended(&config.fleet.state) {
        let state = config.fleet.state.display();
        tracing::warn!(
            "{name}: an engine that another gateway started is running (fleet.state {state}); this configuration runs no engines, so it is left alone"
        );
    }
}

/// A seed for request ids and random choices, different in every process. Not secret.
fn seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64 ^ (u64::from(std::process::id()) << 32)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;
    use sluice_config::{Machine, Surroundings};

    async fn gateway(extra: &str) -> Running {
        let text = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nmax_body = \"1KiB\"\n{extra}\n\
             [[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n\
             [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n"
        );
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        start(Config::parse(&text, "test", &[], &around).unwrap().config, Source::Fixed).await.unwrap()
    }

    /// Sends a request on a new connection. Returns the connection and the status.
    async fn send(gateway: &Running, request: &str) -> (TcpStream, u16) {
        let mut connection = TcpStream::connect(gateway.client_address()).await.unwrap();
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut got = [0; 12];
        timeout(Duration::from_secs(10), connection.read_exact(&mut got)).await.unwrap().unwrap();
        (connection, std::str::from_utf8(&got[9..]).unwrap().parse().unwrap())
    }

    #[tokio::test]
    async fn a_reload_without_a_file_is_refused_and_not_shown_as_a_failed_one() {
        let gateway = gateway("").await;
        let refused = gateway.app().reloader.run().unwrap_err().to_string();
        assert!(refused.ends_with("start it with sluice serve FILE"), "{refused}");
        assert!(gateway.app().reloader.history.lock().last.is_none());
        gateway.stop().await;
    }

    #[tokio::test]
    async fn an_idle_connection_does_not_hold_up_a_stop() {
        let gateway = gateway("").await;
        let (_idle, status) = send(&gateway, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert_eq!(status, 200);
        let cut = timeout(Duration::from_secs(10), gateway.stop()).await;
        assert_eq!(cut, Ok(0));
    }

    #[tokio::test]
    async fn routes_of_the_gateway_itself_check_key_and_method() {
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
            let (_, status) = send(&gateway, &format!("{line} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
            assert_eq!(status, want, "{line}");
        }
        gateway.stop().await;
    }

    #[tokio::test]
    async fn bodies_and_headers_over_the_limit_are_refused() {
        let gateway = gateway("").await;
        let chunk = "x".repeat(2_000);
        let body = format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n{chunk}\r\n0\r\n\r\n", chunk.len());
        let many = "x: y\r\n".repeat(200);
        let large = format!("x: {}\r\n", "y".repeat(100 << 10));
        for (rest, want) in [(body, 413), (format!("{many}\r\n"), 431), (format!("{large}\r\n"), 431)] {
            let request = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{rest}");
            let (_, status) = send(&gateway, &request).await;
            assert_eq!(status, want);
        }
        gateway.stop().await;
    }

    async fn engine_with_changing_models() -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            for number in 0.. {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut request = [0; 4096];
                let _ = socket.read(&mut request).await;
                let body = format!(r#"{{"object":"list","data":[{{"id":"model-{number}"}}]}}"#);
                let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
                let _ = socket.write_all((head + &body).as_bytes()).await;
            }
        });
        address
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_configuration_that_code_applies_is_marked_with_its_title() {
        let gateway = gateway("").await;
        let app = gateway.app();
        let titles =
            || app.reloader.history.lock().applied(Instant::now()).into_iter().map(|one| one.title).collect::<Vec<_>>();
        assert!(titles().is_empty());
        for number in 0..40 {
            app.reloader.apply_titled(Config::clone(&app.core.config.load()), &format!("number {number}")).unwrap();
        }
        let titles = titles();
        assert_eq!((titles.len(), titles[31].as_deref()), (32, Some("number 39")), "the newest are kept, oldest first");
        gateway.stop().await;
    }

    #[tokio::test]
    async fn a_routing_table_is_rebuilt_on_a_thread_that_serves_no_requests() {
        let engine = engine_with_changing_models().await;
        let text = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[[pool]]\nname = \"p\"\n\
             [[pool.backend]]\nname = \"a\"\nurl = \"http://{engine}\"\n"
        );
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        let config = Config::parse(&text, "test", &[], &around).unwrap().config;
        let gateway = start(config, Source::Fixed).await.unwrap();
        let (app, known) = (Arc::clone(&gateway.app().core), gateway.app().core.reported.names());
        let beats = Arc::new(AtomicU64::new(0));
        let heart = Arc::clone(&beats);
        let heart = tokio::spawn(async move {
            loop {
                heart.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        let (locked, is_locked) = tokio::sync::oneshot::channel();
        // Holds the lock, so that the rebuild blocks until other tasks have run on this runtime's
        // only thread.
        let holder = std::thread::spawn(move || {
            let _loaded = app.loaded.lock();
            locked.send(()).unwrap();
            let deadline = std::time::Instant::now() + Duration::from_secs(10);
            let reaches = |reached: &dyn Fn() -> bool| {
                while !reached() && std::time::Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
                reached()
            };
            let changed = reaches(&|| app.reported.names() != known);
            let seen = beats.load(Ordering::Relaxed);
            changed && reaches(&|| beats.load(Ordering::Relaxed) > seen + 20)
        });
        is_locked.await.unwrap();
        let app = Arc::clone(&gateway.app().core);
        let mut prober = Prober::new(Arc::clone(&app.admission), Arc::clone(&app.reported));
        app.probe(&mut prober).await;
        assert!(holder.join().unwrap(), "no other task ran while the routing table waited to be rebuilt");
        heart.abort();
        gateway.stop().await;
    }
}
