//! The operator's view of engines that fail.
//!
//! The log has a bounded number of lines, each with a reason, and the status shows the failures.

use std::path::Path;

use crate::client::{CHAT, STREAMED, TestClient, chat};
use crate::commands::run;
use crate::engine::{Engine, LAST, STREAM, Step, chunk, completion, event, response, send};
use crate::stop::Program;
use crate::test_gateway::one_pool;

/// With these settings probes are frequent, and an ejected backend does not return during the test.
const HEALTH: &str = "[health]\nprobe_interval = \"20ms\"\nejection_base = \"60s\"\n";

async fn serve(folder: &Path, engines: &[&Engine]) -> Program {
    let path = folder.join("sluice.toml");
    let urls: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
    std::fs::write(&path, one_pool(&urls).replace("usage =", "policy = \"round_robin\"\nusage =") + HEALTH).unwrap();
    let mut program = Program::start(&path).await;
    // The first round of probes ends before the gateway serves.
    assert!(program.log.matches("to=\"ready\"").count() == engines.len(), "{}", program.log);
    program.log.clear();
    program
}

async fn status(program: &Program) -> String {
    let (_, out, err) = run(&["status", "--admin", &program.admin.to_string()]).await;
    out + &err
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_streams_of_the_only_backend_are_logged_with_a_bound_and_shown_as_failing() {
    let engine = Engine::always(vec![send(STREAM.to_owned() + &chunk(&event("one"))), Step::Close]).await;
    let folder = tempfile::tempdir().unwrap();
    let mut program = serve(folder.path(), &[&engine]).await;
    for number in 0..13 {
        // Each request has another body, because the gateway refuses a body on which two engines
        // have died.
        let body = STREAMED.replace("hi", &format!("hi {number}"));
        let response = TestClient::to(program.client).await.request(chat(&body)).await;
        assert!(response.text().contains("event: error"), "{}", response.text());
    }
    let shown = status(&program).await;
    assert!(shown.contains("ready: 13 of the last 13 answers failed"), "{shown}");
    engine.set_healthy(false);
    let down = program.line("to=\"down\"").await;
    assert!(down.contains(" WARN ") && down.contains("/health responds with status 503"), "{down}");
    let lines: Vec<&str> = program.log.lines().filter(|line| line.contains("response failed")).collect();
    assert_eq!(lines.len(), 10, "at most ten in a minute: {}", program.log);
    for line in &lines {
        let said = ["WARN", "connection closed early", "backend=\"b0\"", "request_id=\""];
        assert!(said.iter().all(|part| line.contains(part)), "{line}");
    }
    assert!(lines[2].contains("not ejected, because no other one of its pool is ready"), "{}", lines[2]);
    assert!(!program.log.contains("ejected for"), "{}", program.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_ejection_is_logged_with_its_reason() {
    let unfinished = vec![send(STREAM.to_owned() + &chunk(&event("one")) + LAST)];
    let refusing = vec![Step::Send(response(500, "application/json", b"{}"))];
    for (steps, body, reason) in
        [(unfinished, STREAMED, "the stream ended without its end marker"), (refusing, CHAT, "status 500")]
    {
        let (engine, other) = (Engine::always(steps).await, Engine::always(completion()).await);
        let folder = tempfile::tempdir().unwrap();
        let mut program = serve(folder.path(), &[&engine, &other]).await;
        while engine.count() < 3 {
            TestClient::to(program.client).await.request(chat(body)).await;
        }
        let line = program.line("ejected for 60.0 s: failed responses").await;
        assert!(line.contains(" WARN ") && line.contains("backend=\"b0\"") && line.contains(reason), "{line}");
        assert_eq!(program.log.matches(&format!("response failed: {reason}")).count(), 3, "{}", program.log);
    }
}
