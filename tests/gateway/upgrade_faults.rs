//! Upgrades in which one of the two gateways fails, hangs or gives up.

use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::signal::Signal;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::client::{CHAT, TIMEOUT, TestClient, chat, get};
use crate::engine::{Engine, completion};
use crate::stop::Program;
use crate::test_gateway::eventually;
use crate::upgrade::{Home, ask, receive, say, upgrade};

/// A running gateway that the test imitates.
struct Played {
    door: UnixListener,
    clients: std::net::TcpListener,
}

impl Played {
    fn at(home: &Home) -> Self {
        std::fs::create_dir_all(home.door().parent().unwrap()).unwrap();
        let clients = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let text = std::fs::read_to_string(home.config()).unwrap();
        let listen = format!("listen = \"{}\"", clients.local_addr().unwrap());
        std::fs::write(home.config(), text.replace("listen = \"127.0.0.1:0\"", &listen)).unwrap();
        Self { door: UnixListener::bind(home.door()).unwrap(), clients }
    }

    async fn accept(&self) -> UnixStream {
        let mut stream = timeout(TIMEOUT, self.door.accept()).await.expect("no gateway asks").unwrap().0;
        assert!(receive(&mut stream).await.contains("\"sluice_upgrade\":1"));
        let address = self.clients.local_addr().unwrap();
        let sockets = format!("[{{\"port\":\"clients\",\"address\":\"{address}\"}}]");
        let pid = std::process::id();
        let accepted = format!("{{\"sluice_upgrade\":1,\"version\":\"0\",\"pid\":{pid},\"sockets\":{sockets}}}");
        say(&mut stream, &format!("{{\"accepted\":{accepted}}}")).await;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights = [self.clients.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
        stream.writable().await.unwrap();
        sendmsg(&stream, &[std::io::IoSlice::new(b"F")], &mut control, SendFlags::empty()).unwrap();
        stream
    }
}

const NO_CLAIMS: &str = "{\"claims\":{\"gateways\":1,\"claims\":[]}}";
const WITHDRAWN: &str = "{\"withdrawn\":{\"why\":\"it took too long\"}}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gateways_never_serve_side_by_side_if_the_old_one_goes_on() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let old = Played::at(&home);
    // The new gateway takes too long to say that it is ready, or to read the claims. Meanwhile the
    // old gateway gives up the hand-over and goes on.
    for said in [&[WITHDRAWN][..], &[NO_CLAIMS, WITHDRAWN]] {
        let mut new = Program::upgrade(&home.config());
        let mut stream = old.accept().await;
        assert_eq!(receive(&mut stream).await, "{}");
        for message in said {
            say(&mut stream, message).await;
        }
        drop(stream);
        new.line("the running gateway goes on: it took too long").await;
        assert_eq!(new.code().await, Some(1), "{}", new.log);
        assert!(!new.log.contains("serving clients"), "{}", new.log);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_the_old_one_is_killed_while_it_hands_over_the_new_one_serves() {
    let engine = Engine::always(completion()).await;
    for after_claims in [false, true] {
        let home = Home::over(&engine, "");
        let old = Played::at(&home);
        let new = Program::upgrade(&home.config());
        let mut stream = old.accept().await;
        if after_claims {
            assert_eq!(receive(&mut stream).await, "{}");
            say(&mut stream, NO_CLAIMS).await;
        }
        drop((stream, old));
        let new = new.serving().await;
        let served = async || TestClient::to(new.client).await.request(chat(CHAT)).await.status() == 200;
        eventually("it serves", served).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_new_one_accepts_connections_only_when_the_old_one_accepts_no_more() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let old = Played::at(&home);
    let new = Program::upgrade(&home.config());
    let mut stream = old.accept().await;
    assert_eq!(receive(&mut stream).await, "{}");
    say(&mut stream, NO_CLAIMS).await;
    assert_eq!(receive(&mut stream).await, "{\"backends\":[]}");
    let mut client = TestClient::to(old.clients.local_addr().unwrap()).await;
    client.send(get("/health")).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!client.has_response().await, "the old one may still give up");
    say(&mut stream, NO_CLAIMS).await;
    assert_eq!(client.response().await.status(), 200);
    drop(new.serving().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_visitor_that_says_nothing_does_not_hold_up_an_upgrade() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let _old = home.start().await;
    let (mut new, _) = ask(&home.door(), 1).await;
    let _silent = UnixStream::connect(home.door()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    say(&mut new, "{}").await;
    // The claims come after the byte with which the old gateway sends the descriptors.
    let mut byte = [0];
    tokio::io::AsyncReadExt::read_exact(&mut new, &mut byte).await.unwrap();
    let claims = timeout(Duration::from_secs(3), receive(&mut new)).await.expect("it is held up");
    assert!(claims.contains("\"backend\":\"b0\""), "{claims}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_stops_a_gateway_whose_successor_hangs() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    let mut old = home.start().await;
    let (mut new, _) = ask(&home.door(), 1).await;
    let mut byte = [0];
    tokio::io::AsyncReadExt::read_exact(&mut new, &mut byte).await.unwrap();
    old.signal(Signal::SIGTERM);
    assert_eq!(old.code().await, Some(0), "{}", old.log);
    let said = receive(&mut new).await;
    assert!(said.contains("withdrawn") && said.contains("a signal stops this gateway"), "{said}");
}

/// Replaces the pool of a gateway by a pool with an engine that the gateway runs and whose start
/// takes `startup` seconds. `other` is the rest of the engine's configuration.
fn with_own_engine(home: &Home, startup: &str, other: &str) {
    let port = crate::ports::free_port();
    let text = std::fs::read_to_string(home.config()).unwrap();
    let head = text.split("[[pool]]").next().unwrap();
    let fleet = "[fleet]\nwarm_up = 0\nramp = \"0s\"\n";
    let pool = "[[pool]]\nname = \"own\"\nmodels = [\"*\"]\n[[pool.backend]]\nname = \"e\"\n[pool.backend.launch]\n";
    let program = env!("CARGO_BIN_EXE_sluice");
    let launch = format!(
        "command = [{program:?}, \"sim\", \"m\", \"--host\", \"127.0.0.1\", \"--sim-speed\", \"0.2\", \"--sim-startup\", \"{startup}\"]\nport = {port}\n"
    );
    std::fs::write(home.config(), format!("{head}{fleet}{pool}{launch}{other}")).unwrap();
}

async fn end(mut program: Program) {
    program.signal(Signal::SIGTERM);
    assert_eq!(program.code().await, Some(0), "{}", program.log);
}

fn long_stream(tokens: u32) -> Vec<u8> {
    chat(&format!(
        "{{\"model\":\"m\",\"stream\":true,\"max_tokens\":{tokens},\"ignore_eos\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}]}}"
    ))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_at_the_old_one_for_an_engine_that_starts_is_served_when_it_has() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    with_own_engine(&home, "4", "");
    let mut old = Program::start(&home.config()).await;
    let mut waiting = TestClient::to(old.client).await;
    waiting.send(long_stream(5)).await;
    let new = upgrade(&home, &mut old).await;
    let response = waiting.response().await;
    end(new).await;
    assert!(response.status() == 200 && response.whole, "{}", response.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_no_longer_configured_runs_until_the_old_one_has_ended() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    with_own_engine(&home, "0.1", "");
    let mut old = home.start().await;
    let mut running = TestClient::to(old.client).await;
    running.send(long_stream(150)).await.until("content").await;
    // The same engine under another name and port counts as another engine.
    let text = std::fs::read_to_string(home.config()).unwrap();
    let port = crate::ports::free_port();
    let text: Vec<String> = text
        .replace("name = \"e\"", "name = \"f\"")
        .lines()
        .map(|line| if line.starts_with("port = ") { format!("port = {port}") } else { line.to_owned() })
        .collect();
    std::fs::write(home.config(), text.join("\n")).unwrap();
    let mut new = upgrade(&home, &mut old).await;
    let response = running.response().await;
    let text = response.text();
    assert!(response.whole && text.ends_with("[DONE]\n\n") && !text.contains("error"), "{text}");
    drop(running);
    assert_eq!(old.code().await, Some(0), "{}", old.log);
    new.line("stopped: it ran, and is no longer configured as it was").await;
    end(new).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_of_the_new_one_stops_an_engine_when_the_streams_of_the_old_one_have_ended() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    with_own_engine(&home, "0.1", "");
    let mut old = home.start().await;
    let mut running = TestClient::to(old.client).await;
    running.send(long_stream(150)).await.until("content").await;
    let new = upgrade(&home, &mut old).await;
    // In this time both gateways have exchanged the first and the last claims.
    tokio::time::sleep(Duration::from_millis(200)).await;
    end(new).await;
    let text = running.response().await.text();
    assert!(text.ends_with("[DONE]\n\n") && !text.contains("error"), "{text}");
    drop(running);
    assert_eq!(old.code().await, Some(0), "{}", old.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_goes_on_manages_its_engines_again_however_long_the_journal_was_locked() {
    let engine = Engine::always(completion()).await;
    let home = Home::over(&engine, "");
    with_own_engine(&home, "0.1", "");
    let mut old = home.start().await;
    let (new, _) = ask(&home.door(), 1).await;
    // A new gateway that hangs keeps the lock.
    let lock = std::fs::File::open(home.door().with_file_name("lock")).unwrap();
    eventually("the journal is unlocked", async || lock.try_lock().is_ok()).await;
    drop(new);
    old.line("has failed before it served").await;
    assert!(old.log.contains("another process has locked the journal"), "{}", old.log);
    drop(lock);
    old.line("engines are managed by this gateway again").await;
    old.line("step=\"serve\"").await;
    end(old).await;
}
