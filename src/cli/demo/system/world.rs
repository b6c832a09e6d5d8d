//! One run: engines, gateway, prober, load and faults on one paused clock, and the checks at its end.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use parking_lot::Mutex;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use super::super::arrangement::{Arrangement, MODEL};
use super::super::stage::engine_config;
use super::client::TestClient;
use super::engine::{Engine, Engines};
use crate::base::Rng;
use crate::config::{Config, Machine, Surroundings};
use crate::flow::routing_table::LearnedState;
use crate::flow::{Flow, IncomingRequest, Outcome, Record, Recorder, RoutingTable, specs};
use crate::openai::Route;
use crate::pool::{Admission, CapacityUsage, PoolLayout};

const PORTS: [u16; 2] = [8001, 8002];
/// Requests a second, prompt and output tokens of the short and of the long ones: the demo's.
const KINDS: [(f64, u32, u32); 2] = [(30.0, 200, 128), (2.0, 16_000, 64)];
/// Limit for all requests to end.
const DEADLINE: Duration = Duration::from_secs(3600);

/// What happens in a run. Its random times follow from the seed.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) seed: u64,
    /// How long requests arrive, seconds.
    pub(super) seconds: u64,
    /// Number of faults, at random times in the first third of that.
    pub(super) faults: u32,
    /// Share of the clients that leave, at a random time within two seconds.
    pub(super) leaving: f64,
}

impl Script {
    /// 36 seconds of requests with two faults; one client in twenty leaves.
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, seconds: 36, faults: 2, leaving: 0.05 }
    }
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EndedRequest {
    pub(super) long: bool,
    pub(super) outcome: Outcome,
    /// When it arrived, from the start of the run.
    pub(super) arrived: Duration,
    /// From its arrival.
    pub(super) ttft: Option<Duration>,
    pub(super) total: Duration,
    tokens: usize,
    asked: usize,
    finished: bool,
}

/// A run that has ended.
pub(super) struct FinishedRun {
    pub(super) requests: Vec<EndedRequest>,
    /// When the last fault ended, from the start of the run.
    pub(super) faults_over: Duration,
    flow: Arc<Flow<Engines, Records>>,
    engines: [Arc<Engine>; 2],
}

#[derive(Clone, Default)]
pub(super) struct Records(Arc<Mutex<Vec<Record>>>);

impl Recorder for Records {
    fn record(&self, record: &Record) {
        self.0.lock().push(record.clone());
    }
}

/// Runs a script against an arrangement, on a clock of its own.
pub(super) fn run(arrangement: Arrangement, script: &Script) -> FinishedRun {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async { FinishedRun::raise(arrangement, script.seed).play(script).await })
}

impl FinishedRun {
    fn raise(arrangement: Arrangement, seed: u64) -> Self {
        let urls = PORTS.map(|port| format!("http://127.0.0.1:{port}"));
        let any = "127.0.0.1:0".parse().unwrap();
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        let config = Config::parse(&arrangement.config(&urls, any, any), "test", &[], &around).unwrap().config;
        let config = Arc::new(config);
        let now = Instant::now();
        let rules = specs::health_rules(&config.health);
        let admission = Admission::new(now, rules, seed);
        let layout = admission.apply(&specs::pools(&config), rules, now);
        layout.backends.iter().flatten().for_each(|backend| {
            admission.record_probe(*backend, true, now);
        });
        let args = arrangement.engine_args();
        let engines = [0, 1].map(|index| Engine::new(engine_config(&args[index], seed + index as u64).unwrap()));
        let by_port = PORTS.into_iter().zip(engines.iter().cloned()).collect();
        let plan = RoutingTable::new(Arc::clone(&config), &layout, &[], &[None], &LearnedState::default());
        let upstream = Engines { by_port, open: Arc::default() };
        let flow = Arc::new(Flow::new(admission, upstream, Records::default(), plan));
        for engine in &engines {
            tokio::spawn(Arc::clone(engine).drive());
        }
        tokio::spawn(probe(Arc::clone(&flow), layout, engines.clone()));
        Self { requests: Vec::new(), faults_over: Duration::ZERO, flow, engines }
    }

    async fn play(mut self, script: &Script) -> Self {
        let mut rng = Rng::new(script.seed);
        let begun = Instant::now();
        let faults: Vec<_> = (0..script.faults).map(|_| self.fault(&mut rng, begun, script.seconds)).collect();
        let bodies = KINDS.map(|(_, prompt, output)| {
            let prompt: Vec<String> = (0..prompt).map(|at| (prompt + at).to_string()).collect();
            (prompt.join(","), output)
        });
        let mut asking = JoinSet::new();
        let mut at = Duration::ZERO;
        let rate = KINDS.iter().map(|kind| kind.0).sum::<f64>();
        let mut count = 0;
        loop {
            at += Duration::from_secs_f64(rng.exponential() / rate);
            if at > Duration::from_secs(script.seconds) {
                break;
            }
            let long = rng.unit() * rate < KINDS[1].0;
            let leaves = (rng.unit() < script.leaving).then(|| Duration::from_secs_f64(2.0 * rng.unit()));
            let (prompt, output) = &bodies[usize::from(long)];
            // The first token is the request's own: no two prompts begin alike.
            let body = format!(
                r#"{{"model":"{MODEL}","stream":true,"ignore_eos":true,"max_tokens":{output},"prompt":[{},{prompt}]}}"#,
                1_000_000 + count
            );
            let (flow, arrives, output) = (Arc::clone(&self.flow), begun + at, *output as usize);
            asking.spawn(async move {
                sleep_until(arrives).await;
                let client = ask(&flow, count, body, leaves.map(|after| arrives + after)).await;
                (count, long, output, arrives, client, Instant::now())
            });
            count += 1;
        }
        let mut ended = Vec::new();
        let all = async {
            while let Some(one) = asking.join_next().await {
                ended.push(one.unwrap());
            }
        };
        tokio::time::timeout(DEADLINE, all).await.expect("every request ends");
        for fault in faults {
            let over: Instant = fault.await.unwrap();
            self.faults_over = self.faults_over.max(over - begun);
        }
        // Until the engines have processed the aborts and the last step has ended.
        sleep(Duration::from_secs(5)).await;
        ended.sort_by_key(|one| one.0);
        let mut records = std::mem::take(&mut *self.flow.recorder().0.lock());
        records.sort_by_key(|record| record.request_id.parse::<u64>().unwrap());
        assert_eq!(records.len(), ended.len(), "one record for each request");
        for (record, (number, long, asked, arrives, client, over)) in records.iter().zip(ended) {
            assert_eq!(*record.request_id, *number.to_string());
            self.requests.push(EndedRequest {
                long,
                outcome: record.outcome,
                arrived: arrives - begun,
                ttft: client.first.map(|at| at - arrives),
                total: over - arrives,
                tokens: client.tokens,
                asked,
                finished: client.finished && client.done,
            });
        }
        self
    }

    /// Starts a fault at a random time. Its task returns when the fault has ended.
    fn fault(&self, rng: &mut Rng, begun: Instant, seconds: u64) -> JoinHandle<Instant> {
        let engine = Arc::clone(&self.engines[rng.below(2)]);
        let at = begun + Duration::from_secs_f64(rng.unit() * seconds as f64 / 3.0);
        let lasts = Duration::from_secs_f64(1.0 + 9.0 * rng.unit());
        let kind = rng.below(3);
        tokio::spawn(async move {
            sleep_until(at).await;
            match kind {
                0 => engine.die(),
                1 => engine.hang(),
                _ => engine.stall(lasts),
            }
            sleep(lasts).await;
            match kind {
                0 => engine.restart(),
                1 => engine.resume(),
                _ => {}
            }
            Instant::now()
        })
    }

    /// Checks the invariants: no capacity is held, and a completed response has every token.
    pub(super) fn check(&self) {
        let admission = self.flow.admission();
        assert_eq!(admission.load(), (0, 0));
        assert_eq!(admission.check_invariants(), Ok(()));
        for backend in admission.view().iter().flat_map(|pool| &pool.backends) {
            assert_eq!(backend.used, CapacityUsage::default());
        }
        assert_eq!(*self.flow.upstream().open.lock(), 0, "every exchange was closed");
        self.engines.iter().for_each(|engine| engine.check_empty());
        for request in &self.requests {
            let complete = request.outcome == Outcome::Completed;
            assert_eq!(complete, request.finished, "{request:?}");
            assert!(request.tokens <= request.asked && (!complete || request.tokens == request.asked), "{request:?}");
        }
    }
}

async fn ask(flow: &Flow<Engines, Records>, number: u64, body: String, leaves_at: Option<Instant>) -> TestClient {
    let incoming = IncomingRequest {
        route: Route::Completions,
        method: http::Method::POST,
        path: "/v1/completions".to_owned(),
        headers: HeaderMap::new(),
        content_type: "application/json".to_owned(),
        body: Bytes::from(body),
        arrived: Instant::now(),
        request_id: number.to_string().into(),
        upstream_id: number.to_string().into(),
        routing: flow.routing_table(),
        key: None,
    };
    let mut client = TestClient { leaves_at, ..TestClient::default() };
    flow.run(Box::new(incoming), &mut client).await;
    client
}

/// Does what the gateway's prober does, from the state of the engines.
async fn probe(flow: Arc<Flow<Engines, Records>>, layout: PoolLayout, engines: [Arc<Engine>; 2]) {
    let health = flow.routing_table().config.health.clone();
    let backends: Vec<_> = layout.backends.iter().flatten().copied().collect();
    loop {
        let now = Instant::now();
        let silent = flow.admission().silent_backends(health.stall, now);
        for (backend, engine) in backends.iter().zip(&engines) {
            flow.admission().record_probe(*backend, engine.is_alive(), now);
            if silent.contains(backend) && engine.is_hung() {
                flow.admission().mark_hung(*backend, now);
            }
        }
        sleep(health.probe_interval).await;
    }
}
