//! The stream of events over loopback: content, access and bounds.
//!
//! Time is paused in tests that wait for many turns.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant as Clock};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout};

use super::events::STREAMS_MAX;
use super::snapshot::{Frames, KINDS};
use super::tests::{DEADLINE, Served, TOKEN, code, no_changes, send, send_bare, served};
use sluice_config::Secret;
use sluice_gateway::flow::Outcome;
use sluice_gateway::pool::HealthRules;
use sluice_gateway::telemetry::testing;

struct Listener {
    lines: BufReader<TcpStream>,
}

impl Listener {
    async fn open(served: &Served) -> Self {
        let mut socket = TcpStream::connect(&served.address).await.unwrap();
        socket.write_all(request(served).as_bytes()).await.unwrap();
        let mut listener = Self { lines: BufReader::new(socket) };
        let head = listener.line().await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        listener
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        timeout(DEADLINE, self.lines.read_line(&mut line)).await.unwrap().unwrap();
        line
    }

    async fn event(&mut self) -> (String, Value) {
        loop {
            let line = self.line().await;
            assert!(!line.is_empty(), "the stream has ended");
            if let Some(name) = line.strip_prefix("event: ") {
                let data = self.line().await;
                return (name.trim().to_owned(), serde_json::from_str(&data["data: ".len()..]).unwrap());
            }
        }
    }

    async fn named(&mut self, wanted: &str) -> Value {
        loop {
            let (name, data) = self.event().await;
            if name == wanted {
                return data;
            }
        }
    }
}

fn request(served: &Served) -> String {
    format!("GET /admin/events HTTP/1.1\r\nHost: {}\r\n\r\n", served.address)
}

async fn status(served: &Served, headers: &str) -> u16 {
    let mut socket = TcpStream::connect(&served.address).await.unwrap();
    let text = request(served).replace("\r\n\r\n", &format!("\r\n{headers}\r\n"));
    socket.write_all(text.as_bytes()).await.unwrap();
    let mut head = [0; 12];
    timeout(DEADLINE, socket.read_exact(&mut head)).await.unwrap().unwrap();
    std::str::from_utf8(&head[9..]).unwrap().parse().unwrap()
}

fn many_backends(served: &Served, backends: usize) {
    let rules = HealthRules {
        probe_failures: 1,
        request_failures: 3,
        eject_base: Duration::from_secs(1),
        eject_max: Duration::from_secs(30),
        max_ejected: 0.5,
    };
    let pool = |number: usize| {
        let mut spec = testing::spec(&format!("pool-{number}"), "b0", 8_000);
        for backend in 1..20 {
            let port = 8_000 + (number * 20 + backend) as u16;
            spec.backends.extend(testing::spec("", &format!("backend-{backend}"), port).backends);
        }
        spec
    };
    let specs: Vec<_> = (0..backends / 20).map(pool).collect();
    served.control.admission.apply(&specs, rules, Instant::now());
}

#[tokio::test]
async fn a_listener_gets_everything_at_once_and_then_the_status_every_second() {
    let served = served(None, no_changes).await;
    let mut listener = Listener::open(&served).await;
    let mut first = Vec::new();
    for _ in 0..KINDS {
        first.push(listener.event().await);
    }
    first.sort_by(|a, b| a.0.cmp(&b.0));
    let names: Vec<&str> = first.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["hour", "minute", "report", "status"]);
    let [hour, minute, report, status] = [0, 1, 2, 3].map(|at| &first[at].1);
    assert_eq!((&minute["engines"][0]["name"], &minute["keys"][0]["name"]), (&"gpu0".into(), &"key-0".into()));
    assert_eq!((&hour["interval_seconds"], &hour["classes"][0]["class"]), (&60.into(), &"short".into()));
    assert_eq!(report["models"][0]["serving"], serde_json::json!([1, 2]));
    assert_eq!(report["tuner"]["mode"], "approve");
    assert_eq!(report["recent"]["classes"][0]["completed"], 1);
    assert_eq!(report["requests"]["slowest"][0]["request_id"], "req-1");
    assert_eq!(status["pools"][0]["backends"][0]["state"], "ready");
    send(&served, "POST /admin/backends/short/gpu0/drain", "").await;
    let next = listener.named("status").await;
    assert_eq!(next["pools"][0]["backends"][0]["state"], "draining");
    assert!(next["time"].as_str() > status["time"].as_str());
}

#[tokio::test]
async fn events_need_the_token_and_are_not_for_pages_of_other_sites() {
    let locked = served(Some(TOKEN), no_changes).await;
    assert_eq!(status(&locked, "").await, 401);
    assert_eq!(status(&locked, "Authorization: Bearer wrong\r\n").await, 401);
    let token = format!("Authorization: Bearer {TOKEN}\r\n");
    assert_eq!(status(&locked, &token).await, 200);
    let open = served(None, no_changes).await;
    for cross in ["Origin: http://evil.example\r\n", "Sec-Fetch-Site: cross-site\r\n", "Sec-Fetch-Site: same-site\r\n"]
    {
        assert_eq!(status(&open, cross).await, 403, "{cross}");
        assert_eq!(status(&locked, &format!("{token}{cross}")).await, 403, "{cross}");
    }
    assert_eq!(status(&open, "Sec-Fetch-Site: same-origin\r\n").await, 200);
    assert_eq!(send(&open, "HEAD /admin/events", "").await.0, 405);
    assert_eq!(send(&open, "POST /admin/events", "").await.0, 405);
}

#[tokio::test]
async fn a_change_of_the_token_ends_the_streams() {
    let served = served(None, no_changes).await;
    let mut listener = Listener::open(&served).await;
    listener.named("status").await;
    *served.control.token.lock() = Some(Secret::new(TOKEN.to_owned(), None));
    let ended = async {
        // Reads up to the last chunk.
        while listener.line().await != "0\r\n" {}
    };
    timeout(DEADLINE, ended).await.expect("the stream goes on");
    assert_eq!(status(&served, "").await, 401);
}

#[tokio::test]
async fn there_are_not_more_streams_than_the_bound() {
    let served = served(None, no_changes).await;
    let mut open = Vec::new();
    for _ in 0..STREAMS_MAX {
        open.push(Listener::open(&served).await);
    }
    let (refused, head, body) = send_bare(&served, "GET /admin/events", "").await;
    assert_eq!((refused, code(&body).as_str()), (503, "too_many_streams"));
    assert!(head.contains("retry-after: 10"), "{head}");
    open[0].named("status").await;
    assert_eq!(send(&served, "GET /admin/status", "").await.0, 200);
    open.pop();
    let freed = async {
        while status(&served, "").await != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(DEADLINE, freed).await.expect("the place of a listener that left is free");
}

#[tokio::test]
async fn clients_that_never_read_are_dropped() {
    let served = served(None, no_changes).await;
    many_backends(&served, 200);
    let mut stuck = Vec::new();
    for _ in 0..STREAMS_MAX {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4 << 10).unwrap();
        let mut socket = socket.connect(served.address.parse().unwrap()).await.unwrap();
        socket.write_all(request(&served).as_bytes()).await.unwrap();
        timeout(DEADLINE, socket.readable()).await.unwrap().unwrap();
        stuck.push(socket);
    }
    assert_eq!(status(&served, "").await, 503);
    // Each stream holds one turn of events besides the socket's buffers, and is closed ten seconds
    // after these are full.
    tokio::time::pause();
    let mut turns = 0;
    while status(&served, "").await != 200 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        turns += 1;
        assert!(turns < 300, "clients that never read keep all streams");
    }
    assert!(turns >= 9, "the deadline was not awaited: {turns} s");
}

#[tokio::test]
async fn a_stream_does_not_hold_up_a_stop() {
    let served = served(None, no_changes).await;
    let mut listener = Listener::open(&served).await;
    listener.named("status").await;
    served.end.stop();
    timeout(DEADLINE, served.serving).await.expect("the stop waits for the stream").unwrap();
}

#[tokio::test]
async fn events_are_made_once_for_all_and_only_while_there_are_listeners() {
    let served = served(None, no_changes).await;
    let looks = || served.control.looks.load(Ordering::Relaxed);
    assert_eq!(looks(), 0);
    let mut listeners = Vec::new();
    for _ in 0..8 {
        listeners.push(Listener::open(&served).await);
    }
    for listener in &mut listeners {
        listener.named("status").await;
    }
    tokio::time::pause();
    let before = looks();
    for _ in 0..10 {
        listeners[0].named("status").await;
    }
    let made = looks() - before;
    assert!((9..=12).contains(&made), "{made} for ten turns and eight listeners");
    drop(listeners);
    let ended = async {
        loop {
            let before = looks();
            tokio::time::sleep(Duration::from_secs(3)).await;
            if looks() == before {
                return;
            }
        }
    };
    timeout(Duration::from_secs(60), ended).await.expect("events are made for no listener");
}

#[tokio::test]
async fn a_request_is_found_by_its_id_with_the_token() {
    let served = served(Some(TOKEN), no_changes).await;
    let token = format!("Authorization: Bearer {TOKEN}\r\n");
    for locked in ["/admin/requests", "/admin/requests/req-1", "/admin/history"] {
        assert_eq!(send(&served, &format!("GET {locked}"), "").await.0, 401, "{locked}");
        assert_eq!(send(&served, &format!("GET {locked}"), &token).await.0, 200, "{locked}");
    }
    let (_, _, body) = send(&served, "GET /admin/requests/req-1", &token).await;
    let found: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(found["requests"].as_array().map(Vec::len), Some(2), "{body}");
    assert_eq!((&found["requests"][1]["ttft_ms"], &found["requests"][1]["pool"]), (&30.0.into(), &"short".into()));
    let (status, _, body) = send(&served, "GET /admin/requests/r%2F1", &token).await;
    assert_eq!((status, code(&body).as_str()), (404, "no_such_request"));
    assert!(body.contains("x-request-id"), "{body}");
    let (_, _, body) = send(&served, "GET /admin/history", &token).await;
    let history: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(history["hour"]["classes"][0]["completed"], 1, "{body}");
}

/// Prints the size and cost of events of a large gateway: `cargo test --release --lib
/// a_turn_with_200_backends -- --nocapture`.
#[tokio::test]
async fn a_turn_with_200_backends_is_small_enough() {
    let served = served(None, no_changes).await;
    many_backends(&served, 200);
    for number in 0..2_000u64 {
        let pool: Arc<str> = format!("pool-{}", number % 10).into();
        let time = Duration::from_micros(1_000 + number * 977 % 900_000);
        let base = testing::completed(time, time / 50);
        let record = sluice_gateway::flow::Record { home: Some(Arc::clone(&pool)), pool: Some(pool), ..base };
        served.control.telemetry.record(&record);
        served.control.telemetry.record(&testing::record(Outcome::Refused));
    }
    let begun = Clock::now();
    let frames = Frames::default().next(&*served.control, 1);
    let took = begun.elapsed();
    let sizes: Vec<usize> = frames.events.iter().map(|(_, event)| event.len()).collect();
    println!(
        "200 backends in 10 pools, 1,000 keys: status {} B, report {} B, minute {} B, hour {} B, made in {took:?}",
        sizes[0], sizes[1], sizes[2], sizes[3]
    );
    assert!(sizes[0] < 160 << 10, "{sizes:?}");
    assert!(sizes[1..].iter().all(|size| *size < 128 << 10), "{sizes:?}");
}
