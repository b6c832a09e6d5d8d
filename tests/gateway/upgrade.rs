//! A newer gateway takes over from the running one.
//!
//! Both are separate processes.

use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixDatagram, UnixStream};
use tokio::process::Command;
use tokio::time::timeout;

use crate::client::{CHAT, STREAMED, TIMEOUT, TestClient, chat, get};
use crate::commands::run;
use crate::engine::{Engine, completion, ending, event, gated_stream};
use crate::http2_client;
use crate::stop::Program;
use crate::test_gateway::{eventually, one_pool};

/// A gateway's folder: its configuration, and `.sluice` next to it.
pub(crate) struct Home {
    pub(crate) folder: tempfile::TempDir,
}

impl Home {
    pub(crate) fn over(engine: &Engine, sets: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = one_pool(&[engine.url()]).replace("usage = \"off\"", &format!("usage = \"off\"\n{sets}"));
        std::fs::write(folder.path().join("sluice.toml"), text).unwrap();
        Self { folder }
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.folder.path().join("sluice.toml")
    }

    pub(crate) fn door(&self) -> PathBuf {
        self.folder.path().join(".sluice/upgrade.sock")
    }

    pub(crate) async fn start(&self) -> Program {
        let program = Program::start(&self.config()).await;
        ready(&program).await;
        program
    }
}

async fn ready(program: &Program) {
    let address = program.client;
    let ready = async || TestClient::to(address).await.request(get("/ready")).await.status() == 200;
    eventually("its backend was probed", ready).await;
}

/// Starts a gateway that takes over from `old`; both must have the same addresses.
pub(crate) async fn upgrade(home: &Home, old: &mut Program) -> Program {
    let new = Program::upgrade(&home.config()).serving().await;
    old.line("handed over").await;
    assert_eq!((new.client, new.admin), (old.client, old.admin));
    new
}

async fn is_replaced(home: &Home, mut old: Program) {
    let mut new = upgrade(home, &mut old).await;
    assert_eq!(old.code().await, Some(0), "{}", old.log);
    new.said("the gateway before this one has ended").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_cuts_no_stream_and_closes_connections_with_their_next_response() {
    let engine = Engine::always(gated_stream()).await;
    let home = Home::over(&engine, "");
    let mut old = home.start().await;
    let mut running = TestClient::to(old.client).await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut idle = TestClient::to(old.client).await;
    assert_eq!(idle.request(get("/health")).await.head.header("connection"), Some("keep-alive"));
    let (h2, driver) = http2_client::over(tokio::net::TcpStream::connect(old.client).await.unwrap()).await;
    let mut h2_running = h2.chat(STREAMED).await.head().await.into_body();
    http2_client::until(&mut h2_running, "one").await;

    let mut new = upgrade(&home, &mut old).await;
    let mut later = TestClient::to(new.client).await;
    later.send(chat(STREAMED)).await.until("one").await;
    let status = TestClient::to(new.admin).await.request(get("/admin/status")).await.json();
    assert_eq!(status["pools"][0]["backends"][0]["in_flight"], 1, "only the later one is there: {status}");

    // The old gateway serves one more request on a connection that was open, and then closes it.
    assert_eq!(idle.request(get("/ready")).await.head.header("connection"), Some("close"));
    assert_eq!(idle.closed().await, "");
    for _ in 0..6 {
        engine.open_gate();
    }
    for client in [&mut running, &mut later] {
        let response = client.response().await;
        assert!(response.whole && response.text() == event("one") + &event("two") + &ending(), "{}", response.text());
    }
    assert_eq!(http2_client::rest(h2_running).await, (event("two") + &ending(), None));
    let closed = timeout(TIMEOUT, driver).await.expect("GOAWAY ends the connection").unwrap();
    assert!(closed.is_ok(), "in order: {closed:?}");
    drop(running);
    assert_eq!(old.code().await, Some(0), "{}", old.log);
    new.said("the gateway before this one has ended").await;
    assert_eq!(TestClient::to(new.client).await.request(get("/health")).await.status(), 200);
    assert!(home.door().exists());
    new.signal(Signal::SIGTERM);
    drop(later);
    assert_eq!(new.code().await, Some(0), "{}", new.log);
    assert!(!home.door().exists(), "it leaves no socket behind");
    assert_eq!(engine.left(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limits_hold_across_both_and_what_waits_at_the_old_one_is_served_first() {
    let engine = Engine::always(gated_stream()).await;
    let home = Home::over(&engine, "slots = 1");
    let mut old = home.start().await;
    let mut first = TestClient::to(old.client).await;
    first.send(chat(STREAMED)).await.until("one").await;
    let mut second = TestClient::to(old.client).await;
    second.send(chat(STREAMED)).await;
    let mut clients = vec![first, second];
    let waits = async |program: &Program, what: &str| {
        let admin = program.admin;
        eventually(what, async || {
            let page = TestClient::to(admin).await.request(get("/metrics")).await.text();
            page.contains("sluice_queue_length{pool=\"only\"} 1")
        })
        .await;
    };
    waits(&old, "one waits at the old one").await;
    let new = upgrade(&home, &mut old).await;
    let mut last = TestClient::to(new.client).await;
    last.send(chat(STREAMED)).await;
    waits(&new, "one waits at the new one").await;
    assert_eq!(engine.count(), 1, "the only slot is in use by the old one");
    // The requests run one after the other in their order of arrival, also across the two gateways.
    clients.push(last);
    for (number, client) in clients.iter_mut().enumerate() {
        client.until("one").await;
        assert_eq!(engine.count(), number + 1);
        engine.open_gate();
        engine.open_gate();
        let response = client.response().await;
        assert!(response.whole && response.text().ends_with(&ending()), "{}", response.text());
    }
    drop(clients);
    assert_eq!(old.code().await, Some(0), "{}", old.log);
    assert_eq!(engine.left(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrades_may_follow_one_another_while_requests_run() {
    let engine = Engine::always(gated_stream()).await;
    let home = Home::over(&engine, "slots = 3");
    let mut programs = vec![home.start().await];
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = TestClient::to(programs[0].client).await;
        client.send(chat(STREAMED)).await.until("one").await;
        clients.push(client);
        let old = programs.last_mut().unwrap();
        let new = upgrade(&home, old).await;
        programs.push(new);
    }
    // Each gateway runs one stream, and the last gateway counts the streams of all gateways.
    let mut fourth = TestClient::to(programs[3].client).await;
    fourth.send(chat(STREAMED)).await;
    let admin = programs[3].admin;
    eventually("it waits", async || {
        let page = TestClient::to(admin).await.request(get("/metrics")).await.text();
        page.contains("sluice_queue_length{pool=\"only\"} 1")
    })
    .await;
    assert_eq!(engine.count(), 3);
    for _ in 0..8 {
        engine.open_gate();
    }
    clients.push(fourth);
    for client in &mut clients {
        assert!(client.response().await.whole);
    }
    drop(clients);
    for program in &mut programs[..3] {
        assert_eq!(program.code().await, Some(0), "{}", program.log);
    }
}

pub(crate) async fn say(stream: &mut UnixStream, json: &str) {
    let length = u32::try_from(json.len()).unwrap().to_le_bytes();
    stream.write_all(&[&length[..], json.as_bytes()].concat()).await.unwrap();
}

pub(crate) async fn receive(stream: &mut UnixStream) -> String {
    let read = async {
        let length = stream.read_u32_le().await.unwrap();
        let mut json = vec![0; length as usize];
        stream.read_exact(&mut json).await.unwrap();
        String::from_utf8(json).unwrap()
    };
    timeout(TIMEOUT, read).await.expect("no answer")
}

pub(crate) async fn ask(door: &Path, protocol: u32) -> (UnixStream, String) {
    let mut stream = UnixStream::connect(door).await.unwrap();
    say(&mut stream, &format!("{{\"sluice_upgrade\":{protocol},\"version\":\"9.9\",\"pid\":77}}")).await;
    let answer = receive(&mut stream).await;
    (stream, answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_the_new_one_fails_before_it_serves_the_old_one_goes_on() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let mut old = home.start().await;
    for after_claims in [false, true] {
        let (mut fails, answer) = ask(&home.door(), 1).await;
        assert!(answer.contains("\"accepted\"") && answer.contains("\"clients\""), "{answer}");
        if after_claims {
            let mut byte = [0];
            fails.read_exact(&mut byte).await.unwrap();
            say(&mut fails, "{}").await;
            let claims = receive(&mut fails).await;
            assert!(claims.contains("\"pool\":\"only\",\"backend\":\"b0\""), "{claims}");
        }
        drop(fails);
        old.line("has failed before it served").await;
        let response = TestClient::to(old.client).await.request(chat(CHAT)).await;
        assert_eq!(response.status(), 200, "{}", response.text());
        assert_eq!(response.head.header("connection"), Some("keep-alive"));
    }
    is_replaced(&home, old).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_to_the_new_one_before_it_serves_leaves_the_old_one_in_its_place() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let mut old = home.start().await;
    // The backend accepts and never answers, so that the new gateway waits for its first probe.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let slow = home.folder.path().join("slow.toml");
    let state = home.folder.path().join(".sluice");
    let text = one_pool(&[engine.url(), url]) + &format!("[fleet]\nstate = {:?}\n", state.display().to_string());
    std::fs::write(&slow, text).unwrap();
    let mut new = Program::upgrade(&slow);
    new.line("taking over from the running gateway").await;
    new.signal(Signal::SIGTERM);
    new.line("stopped by a signal before it took over").await;
    assert_eq!(new.code().await, Some(1), "{}", new.log);
    old.line("has failed before it served").await;
    let response = TestClient::to(old.client).await.request(chat(CHAT)).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    is_replaced(&home, old).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_an_operator_drains_stays_out_of_rotation() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let mut old = home.start().await;
    let drain = "POST /admin/backends/only/b0/drain HTTP/1.1\r\nhost: localhost\r\nx-sluice-admin: 1\r\n\r\n";
    assert_eq!(TestClient::to(old.admin).await.request(drain).await.status(), 200);
    let new = Program::upgrade(&home.config()).serving().await;
    old.line("handed over").await;
    let status = TestClient::to(new.admin).await.request(get("/admin/status")).await.text();
    assert!(status.contains("\"state\":\"draining\""), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_upgraded_is_refused_with_what_to_do_and_changes_nothing() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let path = home.config();
    let file = path.to_str().unwrap();
    let args = ["serve", "--upgrade", "--config", file];
    let refused = async |args: &[&str], code: i32, what: &[&str]| {
        let (ended, _, said) = run(args).await;
        assert_eq!(ended, code, "{said}");
        for part in what {
            assert!(said.contains(part), "no '{part}' in: {said}");
        }
    };
    refused(&args, 1, &["no gateway answers at", ".sluice/upgrade.sock", "start without --upgrade"]).await;
    let mut old = home.start().await;
    let other = [&args[..], &["--set", "fleet.state=elsewhere"]].concat();
    refused(&other, 1, &["no gateway answers at", "elsewhere", "set fleet.state to"]).await;
    refused(&["serve", "--upgrade", "--backend", "http://127.0.0.1:9"], 2, &["cannot be used with"]).await;

    let (_, answer) = ask(&home.door(), 2).await;
    assert!(answer.contains("refused") && answer.contains("stop this gateway, then start"), "{answer}");
    old.line("no upgrade: version 9.9 asks to take over in another way").await;

    let (held, _) = ask(&home.door(), 1).await;
    refused(&args, 1, &["the running gateway refuses", "an upgrade is under way (pid 77); try again"]).await;
    drop(held);
    old.line("has failed before it served").await;

    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.clone() + "nonsense = 1\n").unwrap();
    refused(&args, 78, &["nonsense"]).await;
    std::fs::write(&path, text).unwrap();
    // A second gateway with the same folder serves, but cannot be upgraded.
    let mut second = Program::begin(&path);
    second.line("serve --upgrade cannot find this gateway: another running gateway answers").await;
    assert_eq!(TestClient::to(old.client).await.request(chat(CHAT)).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_has_changed_is_opened_anew_and_the_old_one_is_closed() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let mut old = home.start().await;
    let port = crate::ports::free_port();
    let text = std::fs::read_to_string(home.config()).unwrap();
    let text = text.replace("admin = \"127.0.0.1:0\"", &format!("admin = \"127.0.0.1:{port}\""));
    std::fs::write(home.config(), text).unwrap();
    let new = Program::upgrade(&home.config()).serving().await;
    old.line("handed over").await;
    assert_eq!((new.client, new.admin.port()), (old.client, port));
    assert_eq!(old.code().await, Some(0), "{}", old.log);
    eventually("nothing listens there", async || crate::stop::refused(old.admin).await).await;
    assert_eq!(TestClient::to(new.client).await.request(chat(CHAT)).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_opens_the_socket_and_learns_what_happens_and_sigusr2_upgrades() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let notify = home.folder.path().join("notify");
    let systemd = UnixDatagram::bind(&notify).unwrap();
    let port = crate::ports::free_port();
    let text = std::fs::read_to_string(home.config()).unwrap();
    let text = text.replace("listen = \"127.0.0.1:0\"", &format!("listen = \"127.0.0.1:{port}\""));
    std::fs::write(home.config(), text).unwrap();
    // This script acts like systemd: it passes the socket as descriptor 3, and the variables
    // announce the socket.
    let activate = "import os, socket, sys\n\
        opened = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n\
        os.dup2(opened.fileno(), 3)\n\
        os.set_inheritable(3, True)\n\
        os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()))\n\
        os.execv(sys.argv[2], sys.argv[2:])";
    let mut command = Command::new("python3");
    command.args(["-c", activate, &port.to_string(), env!("CARGO_BIN_EXE_sluice"), "serve", "--config"]);
    command.arg(home.config()).env("NOTIFY_SOCKET", &notify);
    let mut old = Program::of(command).serving().await;
    assert!(
        old.log.contains(&format!("server.listen: the socket of systemd at 127.0.0.1:{port} is used")),
        "{}",
        old.log
    );
    assert_eq!(datagram(&systemd).await, "READY=1");
    ready(&old).await;
    assert_eq!(TestClient::to(old.client).await.request(chat(CHAT)).await.status(), 200);

    old.signal(Signal::SIGUSR2);
    // Both gateways write to the same pipe.
    let line = old.line("handed over").await;
    let pid = line.split("pid=").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    assert_eq!(datagram(&systemd).await, format!("MAINPID={pid}"));
    assert_eq!(old.code().await, Some(0), "{}", old.log);
    assert_eq!(TestClient::to(old.client).await.request(chat(CHAT)).await.status(), 200, "the new one serves");
    let new = nix::unistd::Pid::from_raw(pid.parse().unwrap());
    nix::sys::signal::kill(new, Signal::SIGTERM).unwrap();
    assert_eq!(datagram(&systemd).await, "STOPPING=1");
    eventually("nothing listens there", async || crate::stop::refused(old.client).await).await;
}

async fn datagram(socket: &UnixDatagram) -> String {
    let mut bytes = [0; 256];
    let length = timeout(TIMEOUT, socket.recv(&mut bytes)).await.expect("systemd gets no message").unwrap();
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}
