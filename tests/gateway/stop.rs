//! Start, graceful stop and exit codes of a gateway, in this process and as a program.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::{Instant, timeout};

use crate::client::{CHAT, STREAMED, TIMEOUT, TestClient, chat, get};
use crate::commands::run;
use crate::engine::{COMPLETION, Engine, completion, ending, event, gated_stream};
use crate::test_gateway::{TestGateway, eventually, one_pool};

/// Whether no server listens at the address. A socket that the kernel has connected to itself does
/// not count.
pub(crate) async fn refused(address: SocketAddr) -> bool {
    match tokio::net::TcpStream::connect(address).await {
        Ok(connection) => connection.local_addr().unwrap() == address,
        Err(_) => true,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_lets_streams_finish_and_accepts_no_requests() {
    let engine = Engine::always(gated_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.slots=1"]).await;
    let mut running = gateway.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut waiting = gateway.client().await;
    waiting.send(chat(STREAMED)).await;
    eventually("one waits", async || gateway.load() == (1, 1)).await;
    let (address, admin) = (gateway.address(), gateway.admin());
    let stopping = gateway.begin_stop();
    eventually("no connection is taken", async || refused(address).await).await;
    let page = TestClient::to(admin).await.request(get("/metrics")).await.text();
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
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut used = gateway.client().await;
    assert_eq!(used.request(chat(CHAT)).await.text(), COMPLETION);
    let mut fresh = gateway.client().await;
    eventually("the gateway has taken it", async || gateway.request(get("/health")).await.status() == 200).await;
    let stopping = gateway.begin_stop();
    assert!(timeout(Duration::from_secs(2), stopping).await.expect("idle connections hold up the stop").unwrap());
    assert_eq!(used.closed().await, "");
    assert_eq!(fresh.closed().await, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_never_end_do_not_hold_up_a_stop() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.drain_timeout=5m"]).await;
    let whole = chat(CHAT);
    let chunks = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n";
    let mut clients = Vec::new();
    for part in [&whole[..20], &whole[..whole.len() - 1], chunks] {
        let mut client = gateway.client().await;
        client.send(part).await;
        clients.push(client);
    }
    eventually("the gateway has taken them", async || gateway.request(get("/health")).await.status() == 200).await;
    let (stopping, begun) = (gateway.begin_stop(), Instant::now());
    assert_eq!(clients[0].closed().await, "", "half a head");
    for client in &mut clients[1..] {
        assert!(client.response().await.is(503, "shutting_down").head.retry_after() >= 1);
        // The gateway closes the connection even if the client goes on sending.
        while client.try_send([b'x'; 100]).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
    assert!(timeout(TIMEOUT, stopping).await.expect("half requests hold up the stop").unwrap());
    // If the gateway did not stop, a refused client could go on sending for 5 s.
    assert!(begun.elapsed() < Duration::from_secs(4), "it took {:?}", begun.elapsed());
    assert_eq!(engine.count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_takes_too_long_is_reported() {
    let engine = Engine::always(gated_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.drain_timeout=100ms"]).await;
    let mut client = gateway.client().await;
    client.send(chat(STREAMED)).await.until("one").await;
    assert!(!timeout(TIMEOUT, gateway.stop()).await.expect("the stop does not end"));
}

pub(crate) struct Program {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
    pub(crate) log: String,
    pub(crate) client: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Program {
    pub(crate) async fn start(config: &std::path::Path) -> Self {
        Self::start_in(config, &[]).await
    }

    pub(crate) async fn start_in(config: &std::path::Path, env: &[(&str, &str)]) -> Self {
        Self::begin_with(&["--config", config.to_str().unwrap()], env).serving().await
    }

    pub(crate) fn upgrade(config: &std::path::Path) -> Self {
        Self::begin_with(&["--upgrade", "--config", config.to_str().unwrap()], &[])
    }

    /// Begins a start, which [`Program::serving`] waits for.
    pub(crate) fn begin(config: &std::path::Path) -> Self {
        Self::begin_with(&["--config", config.to_str().unwrap()], &[])
    }

    fn begin_with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.arg("serve").args(args).envs(env.iter().copied());
        Self::of(command)
    }

    /// Begins a start with a command that is the program or becomes the program (`exec`).
    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap()).lines();
        let nowhere: SocketAddr = "127.0.0.1:0".parse().unwrap();
        Self { child, said, log: String::new(), client: nowhere, admin: nowhere }
    }

    pub(crate) async fn serving(mut self) -> Self {
        self.client = self.address("serving clients on http://").await;
        self.admin = self.address("live page on http://").await;
        self
    }

    pub(crate) async fn line(&mut self, text: &str) -> String {
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

    /// Reads the log up to a line with `text`, unless such a line was read before.
    pub(crate) async fn said(&mut self, text: &str) {
        if !self.log.contains(text) {
            self.line(text).await;
        }
    }

    async fn address(&mut self, before: &str) -> SocketAddr {
        let line = self.line(before).await;
        line.rsplit("http://").next().unwrap().trim().parse().unwrap()
    }

    pub(crate) fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(i32::try_from(self.child.id().unwrap()).unwrap())
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(self.pid(), signal).unwrap();
    }

    pub(crate) async fn rest(&mut self) {
        while let Ok(Ok(Some(line))) = timeout(TIMEOUT, self.said.next_line()).await {
            self.log += &line;
            self.log.push('\n');
        }
    }

    pub(crate) async fn code(&mut self) -> Option<i32> {
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
    let mut client = TestClient::to(program.client).await;
    client.send(chat(STREAMED)).await.until("one").await;

    std::fs::write(&path, text.replace("usage = \"off\"", "usage = \"off\"\nslots = 7")).unwrap();
    program.signal(nix::sys::signal::SIGHUP);
    assert!(program.line("reloaded: ").await.contains("slots"), "{}", program.log);
    let page = TestClient::to(program.admin).await.request(get("/metrics")).await.text();
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
async fn a_lame_duck_serves_new_clients_while_it_is_not_ready_until_a_second_signal() {
    let engine = Engine::always(gated_stream()).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    std::fs::write(&path, one_pool(&[engine.url()]).replace("[[model]]", "lame_duck = \"5m\"\n[[model]]")).unwrap();
    let mut program = Program::start(&path).await;
    let address = program.client;
    let ready = async || TestClient::to(address).await.request(get("/ready")).await.status();
    eventually("its backend was probed", async || ready().await == 200).await;
    let mut running = TestClient::to(address).await;
    running.send(chat(STREAMED)).await.until("one").await;
    program.signal(nix::sys::signal::SIGTERM);
    program.line("stopping in 300s: /ready is 503, requests are still served").await;
    assert_eq!(ready().await, 503);
    assert_eq!(TestClient::to(program.client).await.request(get("/health")).await.status(), 200);
    let mut new = TestClient::to(program.client).await;
    new.send(chat(STREAMED)).await.until("one").await;
    let status = TestClient::to(program.admin).await.request(get("/admin/status")).await.text();
    assert!(status.contains("\"leaving\":true,\"shutting_down\":false"), "{status}");
    program.signal(nix::sys::signal::SIGINT);
    program.line("stopping: no new requests").await;
    for _ in 0..4 {
        engine.open_gate();
    }
    for client in [&mut running, &mut new] {
        let response = client.response().await;
        assert!(response.whole && response.text().ends_with(&ending()), "{}", response.text());
    }
    assert_eq!(program.code().await, Some(0), "{}", program.log);
    program.rest().await;
    assert!(program.log.contains("stopped") && !program.log.contains("cut"), "{}", program.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_sigterms_at_once_are_one_and_a_later_one_is_a_second() {
    let engine = Engine::always(gated_stream()).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    std::fs::write(&path, one_pool(&[engine.url()])).unwrap();
    let mut program = Program::start(&path).await;
    let mut client = TestClient::to(program.client).await;
    client.send(chat(STREAMED)).await.until("one").await;
    let begun = std::time::Instant::now();
    program.signal(nix::sys::signal::SIGTERM);
    program.line("stopping: no new requests").await;
    program.signal(nix::sys::signal::SIGTERM);
    // A second signal counts only if it comes a second or more after the first. Until then the
    // stream goes on.
    let pid = program.pid();
    let again = tokio::spawn(async move {
        while nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM).is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    program.line("second signal: requests are cut").await;
    again.abort();
    assert!(begun.elapsed() >= Duration::from_secs(1), "cut after {:?}", begun.elapsed());
    assert!(client.response().await.text().contains("event: error"));
    program.line("stopped; 1 request that still ran was cut").await;
    assert_eq!(program.code().await, Some(1), "{}", program.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_cuts_streams_with_an_error_event_and_kills_engines_that_do_not_end() {
    let engine = Engine::always(gated_stream()).await;
    let mut rig = StubbornEngine::start(&engine).await;
    let mut client = TestClient::to(rig.program.client).await;
    client.send(chat(STREAMED)).await.until("one").await;
    rig.program.signal(nix::sys::signal::SIGINT);
    rig.program.line("stopping").await;
    eventually("the first signal has stopped the listener", async || refused(rig.program.client).await).await;
    rig.program.signal(nix::sys::signal::SIGINT);
    let response = client.response().await;
    assert!(response.text().contains("event: error"), "{}", response.text());
    eventually("the engine is left", async || engine.left() == 1).await;
    assert_eq!(rig.program.code().await, Some(1), "{}", rig.program.log);
    assert!(!rig.lives(), "the engine that ignores SIGTERM is left running");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_third_signal_ends_the_program_at_once_and_says_which_engines_it_leaves() {
    let engine = Engine::always(completion()).await;
    let mut rig = StubbornEngine::start(&engine).await;
    for said in ["stopping", "second signal: engines are killed soon"] {
        rig.program.signal(nix::sys::signal::SIGINT);
        rig.program.line(said).await;
    }
    rig.program.signal(nix::sys::signal::SIGINT);
    let left = format!("left running: only/own (pid {})", rig.pid);
    rig.program.line(&left).await;
    assert_eq!(rig.program.code().await, Some(1), "{}", rig.program.log);
    assert!(rig.lives());
}

/// The program with two engines. One is scripted. The program runs the other, which never serves
/// and ignores SIGTERM.
struct StubbornEngine {
    program: Program,
    pid: i32,
    _folder: tempfile::TempDir,
}

impl StubbornEngine {
    async fn start(engine: &Engine) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (path, pid) = (folder.path().join("sluice.toml"), folder.path().join("pid"));
        let script = format!("trap '' TERM; echo $$ >{0}.new; mv {0}.new {0}; exec sleep 600", pid.display());
        let own = format!(
            "[[pool.backend]]\nname = \"own\"\n[pool.backend.launch]\ncommand = [\"sh\", \"-c\", \"{script}\"]\n\
             port = {}\n[fleet]\nstate = \"state\"\n",
            crate::ports::free_port()
        );
        std::fs::write(&path, one_pool(&[engine.url()]) + &own).unwrap();
        let program = Program::start(&path).await;
        let read = || std::fs::read_to_string(&pid).ok()?.trim().parse().ok();
        eventually("the engine has written its pid", async || read().is_some()).await;
        let rig = Self { program, pid: read().unwrap(), _folder: folder };
        eventually("the shell has become sleep", async || rig.lives()).await;
        rig
    }

    fn lives(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.contains("(sleep)") && !stat.contains(") Z")
    }
}

impl Drop for StubbornEngine {
    fn drop(&mut self) {
        if self.lives() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid), nix::sys::signal::SIGKILL);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_ends_the_program_with_1_and_a_message() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for taken in ["--listen", "--admin"] {
        let other = if taken == "--listen" { "--admin" } else { "--listen" };
        let args = ["serve", "--backend", "http://127.0.0.1:9", taken, &address, other, "127.0.0.1:0"];
        let (code, _, said) = run(&args).await;
        assert_eq!(code, 1, "{said}");
        assert!(said.contains(&address) && said.contains("in use") && !said.contains("panicked"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_configuration_is_78_and_wrong_usage_is_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    std::fs::write(&path, "[server]\nlisten = \"nowhere\"\nlissten = 1\n").unwrap();
    let file = path.to_str().unwrap();
    let (code, _, said) = run(&["serve", "--config", file]).await;
    assert_eq!(code, 78, "{said}");
    assert!(said.contains("server.listen") && said.contains("lissten") && said.contains("pool"), "all at once: {said}");
    assert_eq!(run(&["check", "--config", file]).await.0, 78);
    assert_eq!(run(&["serve", "--config", "/does/not/exist.toml"]).await.0, 78);
    for args in [&["serve"][..], &["serve", "--config"], &["serve", "--bogus"], &["bogus"], &[]] {
        let (code, _, said) = run(args).await;
        assert_eq!(code, 2, "{args:?}: {said}");
        assert!(said.contains("Usage") || said.contains("--help"), "{said}");
    }
}
