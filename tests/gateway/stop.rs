//! Start and graceful stop, in this process and as a program, and the exit codes.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::timeout;

use crate::client::{CHAT, Client, STREAMED, TIMEOUT, chat, get};
use crate::engine::{COMPLETION, Engine, completion, ending, event, gated_stream};
use crate::gate::{Gate, eventually, one_pool};

async fn refused(address: SocketAddr) -> bool {
    tokio::net::TcpStream::connect(address).await.is_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_lets_streams_finish_and_accepts_no_requests() {
    let engine = Engine::always(gated_stream()).await;
    let gate = Gate::over(&[engine.url()], &["pool.only.slots=1"]).await;
    let mut running = gate.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut waiting = gate.client().await;
    waiting.send(chat(STREAMED)).await;
    eventually("one waits", async || gate.load() == (1, 1)).await;
    let (address, admin) = (gate.address(), gate.admin());
    let stopping = gate.begin_stop();
    eventually("no connection is taken", async || refused(address).await).await;
    // The admin port still serves metrics.
    let page = Client::to(admin).await.ask(get("/metrics")).await.text();
    assert!(page.contains("sluice_in_flight"));
    assert!(!stopping.is_finished());
    for _ in 0..4 {
        engine.open_gate();
    }
    for client in [&mut running, &mut waiting] {
        let response = client.response().await;
        assert!(response.whole && response.text() == event("one") + &event("two") + &ending(), "{}", response.text());
        client.closed().await;
    }
    assert!(timeout(TIMEOUT, stopping).await.expect("the stop does not end").unwrap());
    assert!(refused(admin).await);
    assert_eq!(engine.left(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_do_not_hold_up_a_stop() {
    let engine = Engine::always(completion()).await;
    let gate = Gate::over(&[engine.url()], &[]).await;
    let mut used = gate.client().await;
    assert_eq!(used.ask(chat(CHAT)).await.text(), COMPLETION);
    let mut fresh = gate.client().await;
    eventually("the gateway has taken it", async || gate.ask(get("/health")).await.status() == 200).await;
    let stopping = gate.begin_stop();
    assert!(timeout(Duration::from_secs(2), stopping).await.expect("idle connections hold up the stop").unwrap());
    assert_eq!(used.closed().await, "");
    assert_eq!(fresh.closed().await, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_takes_too_long_is_reported() {
    let engine = Engine::always(gated_stream()).await;
    let gate = Gate::over(&[engine.url()], &["server.drain_timeout=100ms"]).await;
    let mut client = gate.client().await;
    client.send(chat(STREAMED)).await.until("one").await;
    assert!(!timeout(TIMEOUT, gate.stop()).await.expect("the stop does not end"));
}

/// The program, running.
struct Program {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
    log: String,
    client: SocketAddr,
    admin: SocketAddr,
}

impl Program {
    async fn start(config: &std::path::Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_sluice"))
            .arg("serve")
            .arg("--config")
            .arg(config)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stderr.take().unwrap()).lines();
        let nowhere: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let mut program = Self { child, said, log: String::new(), client: nowhere, admin: nowhere };
        program.client = program.address("serving clients on http://").await;
        program.admin = program.address("live page on http://").await;
        program
    }

    /// Reads the log up to a line with `text`, which is returned.
    async fn line(&mut self, text: &str) -> String {
        loop {
            let next = timeout(TIMEOUT, self.said.next_line()).await;
            let line = next.unwrap_or_else(|_| panic!("no '{text}' in:\n{}", self.log)).unwrap();
            let line = line.unwrap_or_else(|| panic!("ended without '{text}':\n{}", self.log));
            self.log += &line;
            self.log.push('\n');
            if line.contains(text) {
                return line;
            }
        }
    }

    async fn address(&mut self, before: &str) -> SocketAddr {
        let line = self.line(before).await;
        line.rsplit("http://").next().unwrap().trim().parse().unwrap()
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id().unwrap()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    async fn code(&mut self) -> Option<i32> {
        timeout(TIMEOUT, self.child.wait()).await.expect("the program does not end").unwrap().code()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program_reloads_on_sighup_and_ends_with_0_on_sigterm_when_its_streams_have_ended() {
    let engine = Engine::always(gated_stream()).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    let text = one_pool(&[engine.url()]);
    std::fs::write(&path, &text).unwrap();
    let mut program = Program::start(&path).await;
    let mut client = Client::to(program.client).await;
    client.send(chat(STREAMED)).await.until("one").await;

    std::fs::write(&path, text.replace("usage = \"off\"", "usage = \"off\"\nslots = 7")).unwrap();
    program.signal(nix::sys::signal::SIGHUP);
    assert!(program.line("reloaded: ").await.contains("slots"), "{}", program.log);
    let page = Client::to(program.admin).await.ask(get("/metrics")).await.text();
    assert!(page.contains("sluice_slots{backend=\"b0\",pool=\"only\"} 7"), "{page}");
    std::fs::write(&path, "nonsense").unwrap();
    program.signal(nix::sys::signal::SIGHUP);
    program.line("reload failed, the configuration is unchanged").await;

    program.signal(nix::sys::signal::SIGTERM);
    program.line("stopping").await;
    eventually("no connection is taken", async || refused(program.client).await).await;
    engine.open_gate();
    engine.open_gate();
    let response = client.response().await;
    assert!(response.whole && response.text().ends_with(&ending()), "{}", response.text());
    assert_eq!(program.code().await, Some(0), "{}", program.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_the_program_at_once_with_1() {
    let engine = Engine::always(gated_stream()).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    std::fs::write(&path, one_pool(&[engine.url()])).unwrap();
    let mut program = Program::start(&path).await;
    let mut client = Client::to(program.client).await;
    client.send(chat(STREAMED)).await.until("one").await;
    program.signal(nix::sys::signal::SIGINT);
    program.line("stopping").await;
    eventually("the first signal has stopped the listener", async || refused(program.client).await).await;
    program.signal(nix::sys::signal::SIGINT);
    assert_eq!(program.code().await, Some(1), "{}", program.log);
    assert!(!client.response().await.whole);
    eventually("the engine is left", async || engine.left() == 1).await;
}

/// Runs the program to its end: exit code and stderr.
async fn run(args: &[&str]) -> (Option<i32>, String) {
    let child = Command::new(env!("CARGO_BIN_EXE_sluice"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let output = timeout(TIMEOUT, child.wait_with_output()).await.expect("the program does not end").unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_ends_the_program_with_1_and_a_message() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for taken in ["--listen", "--admin"] {
        let other = if taken == "--listen" { "--admin" } else { "--listen" };
        let args = ["serve", "--backend", "http://127.0.0.1:9", taken, &address, other, "127.0.0.1:0"];
        let (code, said) = run(&args).await;
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(&address) && said.contains("in use") && !said.contains("panicked"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_configuration_is_78_and_wrong_usage_is_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    std::fs::write(&path, "[server]\nlisten = \"nowhere\"\nlissten = 1\n").unwrap();
    let file = path.to_str().unwrap();
    let (code, said) = run(&["serve", "--config", file]).await;
    assert_eq!(code, Some(78), "{said}");
    assert!(said.contains("server.listen") && said.contains("lissten") && said.contains("pool"), "all at once: {said}");
    assert_eq!(run(&["check", "--config", file]).await.0, Some(78));
    assert_eq!(run(&["serve", "--config", "/does/not/exist.toml"]).await.0, Some(78));
    for args in [&["serve"][..], &["serve", "--config"], &["serve", "--bogus"], &["bogus"], &[]] {
        let (code, said) = run(args).await;
        assert_eq!(code, Some(2), "{args:?}: {said}");
        assert!(said.contains("Usage") || said.contains("--help"), "{said}");
    }
}
