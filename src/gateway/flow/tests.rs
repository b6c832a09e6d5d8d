//! The path of a request against scripted engines, in memory, on paused time.
//!
//! Most tests use one pool of two engines ([`TestFlow::new`]). After each request,
//! [`TestFlow::idle`] checks that no capacity is held and no connection is open.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::*;
use crate::flow::record::{RetryReason, Stage, UpstreamFault};
use crate::origin::Origin;
use crate::pool::{BackendSpec, HealthRules, PoolRules, PoolSpec, QueueOrder};
use sluice_config::{Address, Config, Machine, Surroundings};
use sluice_core::openai::ShedReason;

mod engines;

mod arms;
mod backends;
mod abort;
mod edges;
mod first_token;
mod slow_client;
mod priority;
mod elsewhere;
mod not_served;
mod deaths;
mod continued;
mod continued_messages;
mod moved;
mod key_limits;

use engines::{BUSY, DONE, Engines, GIVEN_UP, LAST, ROLE, Script, USAGE, WORD, good};

/// A client that records what it receives, and may disconnect.
#[derive(Default)]
struct TestClient {
    head: Option<ResponseHead>,
    body: Vec<u8>,
    /// For each piece of the body, whether the gateway announced that more follows.
    announced: Vec<bool>,
    finished: bool,
    aborted: bool,
    leaves_at: Option<Instant>,
}

impl Downstream for TestClient {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        assert!(self.head.replace(head).is_none(), "one head per response");
        Ok(())
    }

    async fn body(&mut self, bytes: Bytes, more: bool) -> Result<(), ClientGone> {
        self.body.extend_from_slice(&bytes);
        self.announced.push(more);
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        self.finished = true;
        Ok(())
    }

    fn abort(&mut self) {
        self.aborted = true;
    }

    async fn gone(&mut self) {
        match self.leaves_at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }
}

#[derive(Clone, Default)]
struct Records(Arc<Mutex<Vec<Record>>>, Arc<Mutex<Vec<[Arc<str>; 2]>>>);

impl Recorder for Records {
    fn record(&self, record: &Record) {
        self.0.lock().push(record.clone());
    }

    fn attempt_failed(&self, on: &[Arc<str>; 2]) {
        self.1.lock().push(on.clone());
    }
}

struct TestFlow {
    flow: Flow<Engines, Records>,
    records: Records,
    origin: Origin,
}

const PORTS: [u16; 2] = [7001, 7002];

impl TestFlow {
    /// One pool of two engines; requests go to the first one if it is free.
    fn new(first: Vec<Script>, second: Vec<Script>) -> Self {
        Self::with(first, second, "")
    }

    fn with(first: Vec<Script>, second: Vec<Script>, extra: &str) -> Self {
        Self::of(config_of("p", extra), &LearnedState::default(), first, second)
    }

    /// Like `new`, with a configuration of one pool and the state that outlives a reload.
    fn of(config: Arc<Config>, learned: &LearnedState, first: Vec<Script>, second: Vec<Script>) -> Self {
        let now = Instant::now();
        let admission = Admission::new(now, RULES, 1);
        let layout = admission.apply(&[pool_of(&config)], RULES, now);
        for backend in &layout.backends[0] {
            admission.record_probe(*backend, true, now);
        }
        let records = Records::default();
        let engines = Engines::default();
        *engines.scripts.lock() = vec![(PORTS[0], first.into()), (PORTS[1], second.into())];
        let plan = RoutingTable::new(config, &layout, &[], &[None], learned);
        let flow = Flow::new(admission, engines, records.clone(), plan);
        Self { flow, records, origin: Origin::default() }
    }

    async fn request(&self, body: &'static str) -> (TestClient, Record) {
        self.request_as(body, TestClient::default()).await
    }

    async fn request_as(&self, body: &'static str, mut client: TestClient) -> (TestClient, Record) {
        self.flow.run(self.incoming(body), &mut client).await;
        let mut records = self.records.0.lock();
        assert_eq!(records.len(), 1, "exactly one record");
        let record = records.pop().unwrap();
        self.idle();
        (client, record)
    }

    fn incoming(&self, body: &'static str) -> Box<IncomingRequest> {
        Box::new(IncomingRequest {
            route: sluice_core::openai::Route::ChatCompletions,
            method: http::Method::POST,
            path: "/v1/chat/completions".to_owned(),
            headers: HeaderMap::new(),
            priority: None,
            content_type: "application/json".to_owned(),
            body: Bytes::from_static(body.as_bytes()),
            arrived: Instant::now(),
            request_id: "req".into(),
            upstream_id: "req".into(),
            trace: None,
            routing: self.flow.routing_table(),
            client: None,
            origin: self.origin,
            key: None,
            no_continue: false,
            copy_for: None,
        })
    }

    fn set_attempts(&self, attempts: u32) {
        let mut config = Config::clone(&self.flow.routing_table().config);
        config.retry.attempts = attempts;
        self.configure(config);
    }

    fn configure(&self, config: Config) {
        let layout = self.flow.admission().apply(&[pool_of(&config)], RULES, Instant::now());
        self.flow.set_routing_table(RoutingTable::new(
            Arc::new(config),
            &layout,
            &[],
            &[None],
            &LearnedState::default(),
        ));
    }

    /// Checks that no capacity is held and no connection is open.
    fn idle(&self) {
        assert_eq!(self.flow.admission().load(), (0, 0));
        assert_eq!(self.flow.admission().check_invariants(), Ok(()));
        for backend in &self.flow.admission().view()[0].backends {
            assert_eq!(backend.used, crate::pool::CapacityUsage::default());
        }
        assert_eq!(*self.flow.upstream().open.lock(), 0, "every exchange was closed");
    }

    fn asked(&self) -> Vec<(u16, String)> {
        self.flow.upstream().calls.lock().iter().map(|(port, id, _)| (*port, id.clone())).collect()
    }
}

const EJECTED: Duration = Duration::from_secs(5);
const RULES: HealthRules =
    HealthRules { probe_failures: 3, request_failures: 3, eject_base: EJECTED, eject_max: EJECTED, max_ejected: 0.5 };

fn config_of(pool: &str, extra: &str) -> Arc<Config> {
    let text = format!(
        "[[model]]\nname = \"m\"\naliases = [\"alias\"]\n[[pool]]\nname = \"{pool}\"\nmodels = [\"m\"]\n{extra}\n\
         [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:7001\"\nweight = 1000.0\n\
         [[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:7002\"\n\
         [retry]\ncontinue = \"failures\"\n"
    );
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    Arc::new(Config::parse(&text, "test", &[], &around).unwrap().config)
}

fn pool_of(config: &Config) -> PoolSpec {
    let pool = &config.pools[0];
    let (limits, queue_length, queue_timeout) = (routing_table::limits_of(pool), pool.queue.length, pool.queue.timeout);
    let rules = PoolRules {
        policy: pool.policy,
        limits,
        queue_length,
        queue_timeout,
        hold: None,
        order: QueueOrder::FIFO,
        by_priority: None,
    };
    let backends = pool.backends.iter().map(spec_of).collect();
    PoolSpec { name: pool.name.as_str().into(), rules, backends, spill: vec![] }
}

fn spec_of(backend: &sluice_config::Backend) -> BackendSpec {
    let address = Address::new(backend.target.endpoint(), None, backend.api_key.clone());
    BackendSpec { name: backend.name.as_str().into(), address: Arc::new(address), weight: backend.weight }
}

const STREAM: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
const PLAIN: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;

#[tokio::test(start_paused = true)]
async fn a_stream_passes_metered_and_without_the_usage_we_asked_for() {
    let test = TestFlow::new(vec![good()], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(String::from_utf8(client.body).unwrap(), [ROLE, WORD, LAST, DONE].concat());
    assert!(client.finished && !client.aborted);
    assert_eq!(record.outcome, Outcome::Completed);
    let stats = record.stats.unwrap();
    assert_eq!((stats.ttft, stats.e2el), (Some(Duration::from_millis(10)), Some(Duration::from_millis(15))));
    assert_eq!(stats.tpot, Some(Duration::from_millis(5)));
    assert_eq!(stats.usage.prompt, Some(9));
    let sent = test.flow.upstream().calls.lock()[0].2.clone();
    let sent: serde_json::Value = serde_json::from_slice(&sent).unwrap();
    assert_eq!(sent["stream_options"]["include_usage"], true);
    let head = client.head.unwrap();
    assert_eq!(head.headers["x-sluice-backend"], "a");
    assert_eq!(head.headers["x-sluice-pool"], "p");
    assert_eq!(head.headers["x-request-id"], "req");
}

#[tokio::test(start_paused = true)]
async fn an_alias_is_renamed_on_its_way_and_unknown_models_are_not_found() {
    let test = TestFlow::new(vec![Script::Json(200, "{}")], vec![good()]);
    test.request(r#"{"model":"alias","messages":[]}"#).await;
    assert_eq!(test.flow.upstream().calls.lock()[0].2, r#"{"model":"m","messages":[]}"#);
    let (client, record) = test.request(r#"{"model":"unknown","messages":[]}"#).await;
    assert_eq!(client.head.unwrap().status, StatusCode::NOT_FOUND);
    assert_eq!(record.outcome, Outcome::Refused);
}

#[tokio::test(start_paused = true)]
async fn what_fails_before_the_first_byte_is_served_by_the_other_backend_under_a_fresh_id() {
    let failing = [
        (Script::NoConnection, RetryReason::Connect),
        (Script::CloseBeforeHead, RetryReason::Broken),
        (Script::Json(503, "{}"), RetryReason::Status),
        (Script::Json(502, "{}"), RetryReason::Status),
        (Script::Stream(vec![(0, BUSY)], true), RetryReason::InStream),
        (Script::Stream(vec![(0, GIVEN_UP)], true), RetryReason::InStream),
        (Script::Stream(vec![], false), RetryReason::Broken),
        (Script::NeverAnswers, RetryReason::Timeout),
    ];
    for (script, reason) in failing {
        let test = TestFlow::new(vec![script], vec![good()]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!(record.outcome, Outcome::Completed, "{reason:?}");
        assert_eq!(record.retries.as_slice(), [reason]);
        assert_eq!(record.backend.as_deref(), Some("b"));
        assert!(client.finished);
        assert_eq!(test.asked(), [(7001, "req".to_owned()), (7002, "req-r2".to_owned())]);
    }
}

#[tokio::test(start_paused = true)]
async fn when_no_backend_takes_over_the_client_gets_the_cause() {
    let cases = [
        (Script::NoConnection, 502, Outcome::UpstreamError(UpstreamFault::Connect)),
        (Script::CloseBeforeHead, 502, Outcome::UpstreamError(UpstreamFault::Broken)),
        (Script::NeverAnswers, 504, Outcome::Timeout(Stage::FirstByte)),
        (Script::Json(503, "{\"error\":\"busy\"}"), 503, Outcome::UpstreamError(UpstreamFault::Status)),
    ];
    for (script, status, outcome) in cases {
        let test = TestFlow::new(vec![script.clone()], vec![script]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!(client.head.unwrap().status, status);
        assert_eq!(record.outcome, outcome);
        assert_eq!(record.status.unwrap(), status);
        if status == 503 {
            assert_eq!(client.body, b"{\"error\":\"busy\"}", "the engine's own words");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_4xx_is_the_clients_and_is_neither_retried_nor_held_against_the_backend() {
    let test = TestFlow::new(vec![Script::Json(400, "{\"error\":{}}")], vec![good()]);
    for _ in 0..10 {
        let (client, record) = test.request(PLAIN).await;
        assert_eq!(client.head.unwrap().status, 400);
        assert_eq!((record.outcome, record.retries.len()), (Outcome::Refused, 0));
    }
    assert_eq!(test.flow.admission().view()[0].backends[0].state(), "ready");
}

#[tokio::test(start_paused = true)]
async fn a_dead_reused_connection_is_replaced_on_the_same_backend() {
    let test = TestFlow::new(vec![Script::StaleConnection], vec![Script::NoConnection]);
    let (_, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::Completed);
    assert_eq!(record.retries.as_slice(), [RetryReason::StaleConnection]);
    assert_eq!(record.backend.as_deref(), Some("a"));
    assert_eq!(test.flow.admission().view()[0].backends[0].state(), "ready");
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_breaks_ends_with_an_error_event_and_is_never_retried() {
    for in_order in [false, true] {
        let test = TestFlow::new(vec![Script::Stream(vec![(1, ROLE), (1, WORD)], in_order)], vec![good()]);
        let (client, record) = test.request(STREAM).await;
        let text = String::from_utf8(client.body).unwrap();
        assert!(text.starts_with(&[ROLE, WORD].concat()), "{text}");
        assert!(text.contains("event: error") && !text.contains("[DONE]"), "{text}");
        assert!(client.aborted && !client.finished);
        assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::Broken));
        assert_eq!(test.asked().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn silence_inside_a_stream_ends_it() {
    let test = TestFlow::new(vec![Script::Stream(vec![(1, WORD), (3_600_000, LAST)], true)], vec![good()]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(record.outcome, Outcome::Timeout(Stage::Idle));
    assert!(client.aborted);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_frees_everything_wherever_it_was() {
    let slow = || vec![Script::Stream(vec![(100, WORD), (100, WORD), (100, LAST), (0, DONE)], true)];
    for after in [50, 150, 250] {
        let test = TestFlow::new(slow(), slow());
        let client =
            TestClient { leaves_at: Some(Instant::now() + Duration::from_millis(after)), ..TestClient::default() };
        let (client, record) = test.request_as(STREAM, client).await;
        assert_eq!(record.outcome, Outcome::ClientGone, "after {after} ms");
        assert_eq!(client.head.is_some(), after > 100);
    }
    let waiting = TestFlow::with(vec![Script::NeverAnswers], vec![Script::NeverAnswers], "slots = 1");
    let held: Vec<_> = (0..2).map(|_| hold(&waiting)).collect();
    let mut client =
        TestClient { leaves_at: Some(Instant::now() + Duration::from_millis(50)), ..TestClient::default() };
    waiting.flow.run(waiting.incoming(STREAM), &mut client).await;
    assert_eq!(waiting.records.0.lock()[0].outcome, Outcome::ClientGone);
    assert_eq!(waiting.flow.admission().load(), (2, 0), "it left the line");
    drop(held);
    waiting.idle();
}

fn hold(test: &TestFlow) -> crate::pool::Lease {
    let ask = crate::pool::AdmissionRequest::new(
        test.flow.routing_table().layout,
        test.flow.routing_table().pools[0].id,
        crate::pool::Need { slots: 1, prompt_tokens: 1, output_tokens: 1 },
        Instant::now(),
    );
    match test.flow.admission().enter(ask) {
        crate::pool::AdmissionDecision::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_too_long_or_finds_the_queue_full_is_shed_with_retry_after() {
    let test = TestFlow::with(vec![good()], vec![good()], "slots = 1\nqueue = { length = 1, timeout = \"2s\" }");
    let held: Vec<_> = (0..2).map(|_| hold(&test)).collect();
    let mut client = TestClient::default();
    let begun = Instant::now();
    test.flow.run(test.incoming(STREAM), &mut client).await;
    assert_eq!(begun.elapsed().as_secs(), 2);
    let head = client.head.unwrap();
    assert_eq!(head.status, 503);
    assert!(head.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(head.headers["x-sluice-error"], "queue_timeout");
    assert_eq!(test.records.0.lock()[0].outcome, Outcome::Shed(ShedReason::QueueTimeout));
    drop(held);
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn the_prefill_share_goes_back_at_the_first_token_or_when_an_unstreamed_prefill_should_be_over() {
    let slow = Script::Stream(vec![(100, WORD), (1_000, LAST), (0, DONE)], true);
    let test = TestFlow::new(vec![slow], vec![good()]);
    let watch = || test.flow.admission().view()[0].backends[0].used.prefill_tokens;
    let mut client = TestClient::default();
    let watching = async {
        sleep(Duration::from_millis(50)).await;
        assert!(watch() > 0);
        sleep(Duration::from_millis(100)).await;
        assert_eq!(watch(), 0);
    };
    tokio::join!(test.flow.run(test.incoming(STREAM), &mut client), watching);
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_pool_a_reload_has_removed_waits_for_the_plan_that_follows() {
    let test = TestFlow::new(vec![good()], vec![good()]);
    let config = config_of("q", "");
    let layout = test.flow.admission().apply(&[pool_of(&config)], RULES, Instant::now());
    let reload = async {
        test.flow.set_routing_table(RoutingTable::new(config, &layout, &[], &[None], &LearnedState::default()))
    };
    let ((_, record), ()) = tokio::join!(test.request(STREAM), reload);
    assert_eq!((record.outcome, record.pool.as_deref()), (Outcome::Completed, Some("q")));
    assert_eq!(record.home, record.pool, "it did not spill");
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_closes_sheds_what_is_new() {
    let test = TestFlow::new(vec![good()], vec![good()]);
    test.flow.close();
    let (client, record) = test.request(STREAM).await;
    assert_eq!(client.head.unwrap().status, 503);
    assert_eq!(record.outcome, Outcome::Shed(ShedReason::ShuttingDown));
}
