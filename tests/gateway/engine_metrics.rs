//! The metrics of engines that the gateway runs: phase, restarts, crashes and start time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::ports::free_port;
use crate::test_gateway::{TestGateway, eventually_within};

/// Three engines: one that another program runs, one that serves, and one that ends at once.
fn configuration(state: &std::path::Path, external: &str) -> String {
    let engine = |name: &str, command: &str| {
        format!("[[pool.backend]]\nname = \"{name}\"\nlaunch = {{ command = {command}, port = {} }}\n", free_port())
    };
    let sim = env!("CARGO_BIN_EXE_sluice");
    format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[fleet]\nstate = {:?}\nramp = \"0s\"\nwarm_up = 0\n\
         restarts = 2\nbackoff = \"10ms\"\n[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n\
         [[pool.backend]]\nname = \"external\"\nurl = \"{external}\"\n{}{}",
        state.display(),
        engine("serves", &format!("[{sim:?}, \"sim\", \"m\", \"--sim-speed\", \"1000\", \"--sim-startup\", \"0.1\"]")),
        engine("ends", "[\"sh\", \"-c\", \"exit 3\"]"),
    )
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_ends_at_once_is_counted_and_one_that_serves_has_a_start_time() {
    let (folder, begun) = (tempfile::tempdir().unwrap(), now());
    let gateway = TestGateway::from_text(&configuration(folder.path(), "http://127.0.0.1:9"), &[]).await;
    let of = async |family: &str, labels: &[&str]| gateway.metric(&format!("sluice_engine_{family}"), labels).await;
    let (ends, serves) = ("backend=\"ends\"", "backend=\"serves\"");
    eventually_within(Duration::from_secs(60), "one serves, one is given up", async || {
        of("phase", &[serves, "phase=\"serve\""]).await == 1.0 && of("phase", &[ends, "phase=\"hold\""]).await == 1.0
    })
    .await;
    // Two restarts are allowed, so the engine was started and ended three times.
    assert_eq!((of("restarts_total", &[ends]).await, of("crashes_total", &[ends]).await), (2.0, 3.0));
    assert_eq!((of("restarts_total", &[serves]).await, of("crashes_total", &[serves]).await), (0.0, 0.0));
    assert_eq!(of("phase", &[serves]).await, 1.0, "one phase at a time");
    // A start time is relative to the time of the boot, which Linux shows in whole seconds.
    let started = of("start_seconds", &[serves]).await;
    assert!(begun - 2.0 <= started && started <= now() + 2.0, "{begun} {started}");
    let page = gateway.page().await;
    assert!(!page.contains("sluice_engine_start_seconds{backend=\"ends\""), "{page}");
    assert!(!page.lines().any(|line| line.starts_with("sluice_engine_") && line.contains("external")), "{page}");
    gateway.stop().await;
}
