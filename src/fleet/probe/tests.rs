//! The prober against engines on loopback.
//!
//! Some tests are about the state that the prober keeps between rounds.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use sluice_config::{Endpoint, Policy};
use sluice_core::openai::Route;
use sluice_gateway::pool::{
    AdmissionDecision, AdmissionRequest, BackendLimits, BackendSpec, HealthRules, Lack, Lease, Need, PoolRules,
    PoolSpec, QueueOrder,
};

const RULES: HealthRules = HealthRules {
    probe_failures: 2,
    request_failures: 3,
    eject_base: Duration::from_secs(1),
    eject_max: Duration::from_secs(30),
    max_ejected: 0.5,
};

fn spec(ports: &[u16]) -> PoolSpec {
    let limits = BackendLimits { slots: 4, tokens: None, prefill_tokens: None, long_prefix: None };
    let backend = |port: &u16| {
        let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port: *port, prefix: String::new() };
        let address = Arc::new(Address::new(endpoint, None, None));
        BackendSpec { name: port.to_string().into(), address, weight: 1.0 }
    };
    let rules = PoolRules {
        policy: Policy::LeastWork,
        limits,
        queue_length: 8,
        queue_timeout: Duration::from_secs(20),
        hold: None,
        order: QueueOrder::FIFO,
        by_priority: None,
    };
    PoolSpec { name: "p".into(), rules, backends: ports.iter().map(backend).collect(), spill: vec![] }
}

fn prober(ports: &[u16]) -> Prober {
    let now = Instant::now();
    let admission = Admission::new(now, RULES, 1);
    admission.apply(&[spec(ports)], RULES, now);
    Prober::new(admission, Arc::default())
}

/// An engine that lists a model at every path. A `mute` engine sends nothing.
async fn engine(mute: bool) -> u16 {
    engine_with("200 OK", mute).await
}

/// As [`engine`], with this status for `/v1/models`.
async fn engine_with(status: &'static str, mute: bool) -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = socket.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut connection, _)) = socket.accept().await {
            if !mute {
                let mut request = [0; 1024];
                let length = connection.read(&mut request).await.unwrap_or(0);
                let status = if request[..length].starts_with(b"GET /v1/models") { status } else { "200 OK" };
                let list = r#"{"data":[{"id":"m"}]}"#;
                let response = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{list}", list.len());
                let _ = connection.write_all(response.as_bytes()).await;
            }
            open.push(connection);
        }
    });
    port
}

fn rules() -> Health {
    let second = Duration::from_secs(1);
    Health {
        probe_interval: second,
        probe_timeout: second,
        failures: 3,
        ejection_base: second,
        ejection_max: second,
        max_ejected: 0.5,
        stall: 30 * second,
    }
}

#[tokio::test]
async fn an_engine_that_refuses_the_probe_s_credentials_is_left_out_unless_clients_bring_their_own() {
    for (forwards_keys, state) in [(false, "ejected"), (true, "ready")] {
        let mut prober = prober(&[engine(false).await, engine_with("401 Unauthorized", false).await]);
        prober.forwards_keys = forwards_keys;
        // In the first round the other engine may not be ready yet.
        for _ in 0..2 {
            prober.probe_all(&rules()).await;
        }
        let view = &prober.admission.view()[0].backends[1];
        assert_eq!((view.state(), view.refused.is_some()), (state, !forwards_keys));
    }
}

#[tokio::test]
async fn a_change_of_names_in_a_cancelled_round_is_returned_by_the_next() {
    let mut prober = prober(&[engine(false).await, engine(true).await]);
    let rules = rules();
    let reported = Arc::clone(&prober.reported);
    let learned = async {
        while reported.names().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = prober.probe_all(&rules) => panic!("the mute engine delays the round"),
        () = learned => {}
    }
    assert!(prober.probe_all(&rules).await);
    assert!(!prober.probe_all(&rules).await);
}

#[tokio::test]
async fn a_result_is_dropped_when_another_backend_has_the_id() {
    let mut prober = prober(&[1]);
    let old = prober.admission.view()[0].backends[0].clone();
    prober.states.entry(old.id).or_default();
    for port in [2, 3] {
        prober.admission.apply(&[spec(&[port])], RULES, Instant::now());
    }
    let new = prober.admission.view()[0].backends[0].clone();
    assert_eq!(new.id, old.id, "ids are reused");
    let result = ProbeResult {
        id: old.id,
        name: old.name,
        address: old.address,
        begun: Instant::now(),
        up: Ok(()),
        models: None,
        routes: None,
        kind: None,
        cache_tokens: None,
        adapter_slots: None,
        slots: None,
        ranks: Vec::new(),
        activity: None,
    };
    prober.apply(result, Duration::ZERO);
    assert_eq!(prober.admission.view()[0].backends[0].phase, Phase::Starting);
}

fn lease(admission: &Arc<Admission>) -> Lease {
    let request = AdmissionRequest::new(
        1,
        admission.view()[0].id,
        Need { slots: 1, prompt_tokens: 1, output_tokens: 1 },
        Instant::now(),
    );
    match admission.enter(request) {
        AdmissionDecision::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_routes_of_an_engine_are_read_again_after_a_later_refusal_but_not_at_once() {
    let mut prober = prober(&[engine(false).await]);
    let due = |prober: &Prober| prober.admission.view()[0].backends[0].routes_due;
    prober.probe_all(&rules()).await;
    let lease = lease(&prober.admission);
    let refuse = |at| lease.refused_by_engine(Lack::Route(Route::Embeddings), at);
    refuse(Instant::now());
    assert!(due(&prober));
    prober.probe_all(&rules()).await;
    assert!(!due(&prober), "this engine does not say; it was asked");
    // The refusal has expired, and the engine refuses again.
    let later = Instant::now() + 2 * MODELS_INTERVAL;
    prober.admission.record_probe(lease.backend(), true, later);
    refuse(Instant::now());
    prober.probe_all(&rules()).await;
    assert!(due(&prober), "not twice in so short a time");
    prober.states.values_mut().for_each(|state| state.routes_at = None);
    prober.probe_all(&rules()).await;
    assert!(!due(&prober));
}

/// A Triton: it has no health page of another kind. Each path that was asked for is sent.
async fn triton() -> (u16, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = socket.local_addr().unwrap().port();
    let (paths, asked) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = socket.accept().await {
            let mut request = [0; 1024];
            let length = connection.read(&mut request).await.unwrap_or(0);
            let text = String::from_utf8_lossy(&request[..length]).into_owned();
            let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
            let (status, body) = match path.as_str() {
                "/v2" => ("200 OK", r#"{"name":"triton"}"#),
                "/v2/health/ready" => ("200 OK", ""),
                _ => ("404 Not Found", ""),
            };
            let _ = paths.send(path);
            let response = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let _ = connection.write_all(response.as_bytes()).await;
        }
    });
    (port, asked)
}

#[tokio::test]
async fn a_server_without_the_health_page_of_its_pool_is_asked_for_its_kind_but_not_at_every_probe() {
    let (port, mut asked) = triton().await;
    let mut prober = prober(&[port]);
    prober.probe_all(&rules()).await;
    let view = prober.admission.view();
    assert!(std::mem::take(&mut prober.kinds_changed), "the reader is informed");
    assert_eq!(prober.kinds.of_pools(&view), [("p".to_owned(), EngineKind::Triton)].into());
    let news = prober.kinds.news(&view);
    assert!(
        news.len() == 1 && news[0].0 == format!("p/{port}") && news[0].1.contains("engine = \"triton\""),
        "{news:?}"
    );
    assert!(prober.kinds.news(&view).is_empty(), "once");
    while asked.try_recv().is_ok() {}
    prober.probe_all(&rules()).await;
    assert_eq!(asked.try_recv().as_deref(), Ok("/health"));
    assert!(asked.try_recv().is_err(), "the kind is known for a while");
    assert!(!prober.kinds_changed);
}

#[tokio::test]
async fn an_engine_that_is_up_is_asked_for_its_kind_once() {
    let mut prober = prober(&[engine(false).await]);
    for _ in 0..2 {
        prober.probe_all(&rules()).await;
        assert!(prober.kinds.of_pools(&prober.admission.view()).is_empty(), "no answer is certain");
        let state = prober.states.values().next().unwrap();
        assert!(state.is_kind_known && !prober.kinds_changed);
    }
}

#[test]
fn an_engine_has_stalled_when_nothing_changes_for_long_enough() {
    let limit = Duration::from_secs(10);
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let stalled = |readings: &[(u64, Activity)]| {
        let mut state = ProbeState::default();
        readings.iter().map(|(second, activity)| state.has_stalled(*activity, limit, at(*second))).collect::<Vec<_>>()
    };
    let same = Activity::Counters(WorkCounters { progress: 5.0, kv_usage: 0.5 });
    assert_eq!(stalled(&[(0, same), (2, same), (10, same)]), [false, false, true]);
    let prefilling = Activity::Counters(WorkCounters { progress: 5.0, kv_usage: 0.6 });
    assert_eq!(stalled(&[(0, same), (9, prefilling), (18, prefilling), (19, prefilling)]), [false, false, false, true]);
    assert_eq!(
        stalled(&[(0, Activity::NoResponse), (10, same)]),
        [false, false],
        "one missing response proves nothing"
    );
    assert_eq!(stalled(&[(0, same), (10, Activity::NoResponse)]), [false, true]);
    assert_eq!(stalled(&[(0, Activity::NoCounters), (60, Activity::NoCounters)]), [false, false]);
}
