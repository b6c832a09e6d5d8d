//! The access log: lines of refused requests, and rotation.
//!
//! The line of a refused request has the path or the model, which are bounded and escaped. SIGUSR1
//! opens the log and the records again.

use serde_json::Value;
use sluice_sim::{Profile, SimConfig};

use crate::client::{CHAT, STREAMED, TestClient, chat, get, post};
use crate::engine::{Engine, Step, response};
use crate::stop::Program;
use crate::test_gateway::{TestGateway, access_log, eventually, one_pool};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_request_shows_its_path_or_model_bounded_and_escaped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let log = format!("access_log={{path=\"{}\"}}", path.display());
    let gateway = TestGateway::over(&["http://127.0.0.1:9".to_owned()], &[&log]).await;
    let long = "x".repeat(1_000);
    gateway.request(post("/v1/nothing?api_key=secret", "", b"{}")).await.is(404, "route_not_found");
    access_log(&path, 1).await;
    gateway.request(post(&format!("/{long}"), "", b"{}")).await.is(404, "route_not_found");
    access_log(&path, 2).await;
    let model = format!("no\\u001b[31m\\n\\u009b{long}");
    let body = format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"private"}}]}}"#);
    gateway.request(chat(&body)).await.is(404, "model_not_found");
    let text = access_log(&path, 3).await;
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["path"], "/v1/nothing", "without its query, which may hold a key");
    assert_eq!(lines[1]["path"].as_str().unwrap().len(), 256);
    let refused = lines[2]["refused_model"].as_str().expect("no model in the line");
    assert!(refused.starts_with("no\u{fffd}[31m\u{fffd}\u{fffd}xxx") && refused.chars().count() == 256, "{refused}");
    assert!(lines[2]["path"].is_null() && lines[2]["model"].is_null() && lines[0]["refused_model"].is_null());
    assert!(!text.contains("secret") && !text.contains("private") && !text.contains('\u{1b}'));
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_refusal_has_its_reason_and_the_client_s_address_is_there_where_it_is_wanted() {
    let engine = Engine::always(vec![Step::Send(response(422, "application/json", b"{}"))]).await;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let log = format!("access_log={{path=\"{}\", client_address=true}}", path("access.log").display());
    let records = format!("records={{path=\"{}\"}}", path("records").display());
    let sets = [&log, &records, "server.max_body=\"1KiB\""];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    gateway.request(chat("{")).await.is(400, "invalid_request");
    access_log(&path("access.log"), 1).await;
    gateway.request(chat(&"x".repeat(2_000))).await.is(413, "body_too_large");
    access_log(&path("access.log"), 2).await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 422);
    access_log(&path("access.log"), 3).await;
    let (http2, _driver) =
        crate::http2_client::over(tokio::net::TcpStream::connect(gateway.address()).await.unwrap()).await;
    assert_eq!(http2.request("POST", "/nope", "{}").await.0, 404);
    let text = access_log(&path("access.log"), 4).await;
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let details: Vec<&str> = lines.iter().map(|line| line["detail"].as_str().unwrap_or_default()).collect();
    assert_eq!(details, ["invalid_request", "body_too_large", "engine_422", "route_not_found"]);
    assert!(lines.iter().all(|line| line["client"] == "127.0.0.1" && line["outcome"] == "refused"), "{text}");
    let text = access_log(&path("records"), 4).await;
    assert!(text.contains("engine_422") && !text.contains("127.0.0.1"), "{text}");
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engines_own_times_are_in_the_log_and_not_in_a_stream_that_asked_for_none() {
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    config.request_metrics = true;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine = sluice_sim::spawn(config, listener).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let log = format!("access_log={{path=\"{}\"}}", path.display());
    let sets = [&log[..], "pool.only.usage=\"final\""];
    let gateway = TestGateway::over(&[format!("http://{}", engine.addr())], &sets).await;
    let stream = gateway.request(chat(STREAMED)).await;
    assert!(stream.status() == 200 && !stream.text().contains("metrics"), "{}", stream.text());
    access_log(&path, 1).await;
    let whole = gateway.request(chat(CHAT)).await;
    assert!(whole.json()["metrics"]["queue_time_ms"].is_number(), "the engine's body is unchanged");
    let text = access_log(&path, 2).await;
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        let [queue, prefill] = ["engine_queue_ms", "engine_prefill_ms"].map(|name| line[name].as_f64().unwrap());
        assert!(queue >= 0.0 && prefill > 0.0, "{text}");
    }
    let parts =
        ["engine_queue_ms", "engine_prefill_ms", "backend_ttft_ms"].map(|name| lines[0][name].as_f64().unwrap());
    assert!(parts[0] + parts[1] <= parts[2] + 1.0, "{parts:?}");
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigusr1_opens_the_access_log_and_the_records_anew_and_does_not_end_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let (config, path) = (folder.path().join("sluice.toml"), folder.path().join("access.log"));
    let old = folder.path().join("access.log.1");
    let [records, moved] = ["records.jsonl", "moved"].map(|name| folder.path().join(name));
    let tables = "[access_log]\npath = \"access.log\"\n[records]\npath = \"records.jsonl\"\n";
    std::fs::write(&config, one_pool(&["http://127.0.0.1:9".to_owned()]) + tables).unwrap();
    let mut program = Program::start(&config).await;
    let request = async |program: &Program| {
        TestClient::to(program.client).await.request(get("/v1/nothing")).await.is(404, "route_not_found");
    };
    request(&program).await;
    access_log(&path, 1).await;
    access_log(&records, 1).await;
    std::fs::rename(&path, &old).unwrap();
    std::fs::rename(&records, &moved).unwrap();
    program.signal(nix::sys::signal::SIGUSR1);
    program.line("are opened anew").await;
    // The new files must exist before the next line is written, so that a rotation need not wait
    // for a request.
    eventually("the new files are there", async || path.exists() && records.exists()).await;
    request(&program).await;
    access_log(&path, 1).await;
    access_log(&records, 1).await;
    assert_eq!([&old, &moved].map(|path| std::fs::read_to_string(path).unwrap().lines().count()), [1, 1]);
    program.signal(nix::sys::signal::SIGTERM);
    assert_eq!(program.code().await, Some(0), "{}", program.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigusr1_is_harmless_without_an_access_log_and_from_the_first_moment_on() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("sluice.toml");
    // The configuration is a pipe. The program opens it first and waits for a writer, so the test
    // knows that the program has begun.
    assert!(std::process::Command::new("mkfifo").arg(&config).status().unwrap().success());
    let text = one_pool(&["http://127.0.0.1:9".to_owned()]);
    let starting = Program::begin(&config);
    let (fifo, pid) = (config.clone(), starting.pid());
    let written = tokio::task::spawn_blocking(move || {
        use std::io::Write as _;
        let mut pipe = std::fs::OpenOptions::new().write(true).open(fifo).unwrap();
        nix::sys::signal::kill(pid, nix::sys::signal::SIGUSR1).unwrap();
        pipe.write_all(text.as_bytes()).unwrap();
    });
    let mut program = starting.serving().await;
    written.await.unwrap();
    program.signal(nix::sys::signal::SIGUSR1);
    program.line("are opened anew").await;
    program.signal(nix::sys::signal::SIGTERM);
    assert_eq!(program.code().await, Some(0), "{}", program.log);
}
