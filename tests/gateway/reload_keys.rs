//! Reloads of a configuration with the maximum number of keys.
//!
//! The measurement prints the duration of the longest request during reloads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};

use crate::client::{CHAT, TestClient, change, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, one_pool};

/// The maximum number of keys in a configuration.
const KEYS: usize = 10_000;
/// Reloads during which requests are timed.
const RELOADS: usize = 10;
const RELOAD_MAX: Duration = Duration::from_secs(120);

/// A configuration with [`KEYS`] keys, of which the first has this limit.
fn with_keys(pool: &str, limit: usize) -> String {
    let mut text = pool.to_owned();
    for key in 0..KEYS {
        let digest: String = Sha256::digest(format!("secret-{key}")).iter().map(|byte| format!("{byte:02x}")).collect();
        let limit = if key == 0 { limit } else { 100 };
        text +=
            &format!("[[auth.keys]]\nname = \"k{key}\"\nsha256 = \"{digest}\"\nlimit = {{ in_flight = {limit} }}\n");
    }
    text
}

/// The duration of the longest request while `during` runs, and the number of requests.
async fn longest(gateway: &TestGateway, during: impl AsyncFnOnce()) -> (Duration, u64) {
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..4 {
        let (address, over) = (gateway.address(), Arc::clone(&over));
        clients.spawn(async move {
            let mut client = TestClient::to(address).await;
            let header = format!("authorization: Bearer secret-{number}\r\n");
            let request = post("/v1/chat/completions", &header, CHAT.as_bytes());
            let (mut longest, mut count) = (Duration::ZERO, 0);
            while !over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let response = client.request(&request).await;
                longest = longest.max(begun.elapsed());
                assert_eq!(response.status(), 200, "{}", response.text());
                count += 1;
            }
            (longest, count)
        });
    }
    during().await;
    over.store(true, Ordering::Relaxed);
    let all = clients.join_all().await;
    (all.iter().map(|(longest, _)| *longest).max().unwrap(), all.iter().map(|(_, count)| count).sum())
}

/// Orders a reload and returns the response. In a build that is not optimized this takes seconds.
async fn reload(gateway: &TestGateway) -> String {
    let mut socket = tokio::net::TcpStream::connect(gateway.admin()).await.unwrap();
    let request =
        String::from_utf8(change("/admin/reload")).unwrap().replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    timeout(RELOAD_MAX, socket.read_to_string(&mut response)).await.expect("the reload does not end").unwrap();
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "a measurement, to be read: run it with --ignored on a quiet machine"]
async fn the_longest_request_while_a_configuration_with_10000_keys_is_reloaded() {
    let engine = Engine::always(completion()).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    let pool = one_pool(&[engine.url()]);
    let texts = [with_keys(&pool, 50), with_keys(&pool, 60)];
    std::fs::write(&path, &texts[0]).unwrap();
    let gateway = TestGateway::from_file(&path).await;
    let calm = longest(&gateway, async || tokio::time::sleep(Duration::from_secs(3)).await).await;
    let mut took = Duration::ZERO;
    let busy = longest(&gateway, async || {
        for round in 1..=RELOADS {
            tokio::fs::write(&path, &texts[round % 2]).await.unwrap();
            let begun = Instant::now();
            let response = reload(&gateway).await;
            took = took.max(begun.elapsed());
            assert!(response.contains("auth.keys.k0.limit.in_flight"), "{response}");
        }
    })
    .await;
    println!("longest request: {calm:?} without reloads, {busy:?} with {RELOADS} reloads (the longest took {took:?})");
    gateway.settled().await;
}
