//! Subcommands that talk to a gateway or to its engines.

use std::process::Stdio;

use tokio::process::Command;
use tokio::time::timeout;

use crate::client::TIMEOUT;
use crate::engine::{Engine, completion};
use crate::ports::free_port;
use crate::test_gateway::{TestGateway, one_pool};

pub(crate) fn sluice(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.args(args);
    command
}

pub(crate) async fn output(command: &mut Command) -> (i32, String, String) {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = timeout(2 * TIMEOUT, output).await.expect("the program does not end").expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code().expect("a code"), text(output.stdout), text(output.stderr))
}

pub(crate) async fn run(args: &[&str]) -> (i32, String, String) {
    output(&mut sluice(args)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_asks_every_backend_and_fails_if_one_is_not_as_configured() {
    let (engine, other) = (Engine::always(completion()).await, Engine::always(completion()).await);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sluice.toml");
    std::fs::write(&file, one_pool(&[engine.url(), other.url()])).unwrap();
    let path = file.to_str().unwrap();
    let (code, out, err) = run(&["check", "--probe", path]).await;
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(out.matches("version unknown, serves m").count(), 2, "{out}");
    other.set_models(&["n"]);
    let (code, out, _) = run(&["check", "--probe", "--config", path]).await;
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("ok      only/b0") && out.contains("failed  only/b1"), "{out}");
    assert!(out.contains("does not serve m; it serves n"), "{out}");
    assert!(out.contains("note    pool only: its engines serve different requests: b0 lacks n; b1 lacks m"), "{out}");
    let (code, out, err) = run(&["check", "--probe", "--quiet", path]).await;
    assert_eq!((code, out.lines().count(), err.as_str()), (1, 1, ""), "no note: {out}");
    other.set_healthy(false);
    let (code, out, err) = run(&["check", "--probe", "--quiet", path]).await;
    assert_eq!((code, out.lines().count(), err.as_str()), (1, 1, ""), "{out}");
    assert!(out.contains("/health responds with status 503"), "{out}");
    // Only probes reach an engine, and without --probe nothing does.
    assert_eq!(engine.count() + other.count(), 0);
    std::fs::write(&file, one_pool(&[format!("http://127.0.0.1:{}", free_port())])).unwrap();
    assert_eq!(run(&["check", path]).await.0, 0);
    let (code, out, _) = run(&["check", "--probe", path]).await;
    assert!(code == 1 && out.contains("no connection"), "{out}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_the_version_of_a_real_server_and_leaves_out_engines_of_the_gateway() {
    let sim = crate::health::sim().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sluice.toml");
    let program = env!("CARGO_BIN_EXE_sluice");
    let own =
        format!("[[pool.backend]]\nname = \"own\"\nlaunch = {{ command = [{program:?}, \"sim\", \"m\"], port = 1 }}\n");
    std::fs::write(&file, one_pool(&[format!("http://{}", sim.addr())]) + &own).unwrap();
    let (code, out, err) = run(&["check", "--probe", file.to_str().unwrap()]).await;
    assert_eq!(code, 0, "{out}{err}");
    assert!(out.contains("vLLM 0.32.0, serves m") && out.contains("only/own  not asked"), "{out}");
    sim.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_port_given_as_the_admin_port_is_recognised() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let (client, admin) = (gateway.address().to_string(), gateway.admin().to_string());
    let (code, _, err) = run(&["status", "--admin", &client]).await;
    assert_eq!(code, 1);
    let said = format!("http://{client} is the client port of a gateway; give its admin port");
    assert!(err.starts_with(&said), "{err}");
    assert_eq!(run(&["status", "--admin", &admin]).await.0, 0);
    let port = format!(":{}", gateway.admin().port());
    assert_eq!(run(&["status", "--admin", &port]).await.0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bench_takes_a_base_url_with_v1() {
    let engine = Engine::always(completion()).await;
    for end in ["", "/v1", "/v1/"] {
        let url = format!("{}{end}", engine.url());
        let before = engine.count();
        let args = ["bench", "--backend", "openai-chat", "--base-url", &url, "--model", "m", "--num-prompts", "1"];
        let (_, out, err) = run(&args).await;
        assert!(engine.count() > before, "{end}: {out}{err}");
        let requests = engine.seen();
        let head = &requests.last().unwrap().head;
        assert!(head.starts_with("POST /v1/chat/completions HTTP/1.1"), "{head}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_admin_port_that_other_machines_reach_needs_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sluice.toml");
    std::fs::write(&file, one_pool(&["http://127.0.0.1:9".to_owned()])).unwrap();
    let path = file.to_str().unwrap();
    for command in ["check", "serve"] {
        let (code, _, err) = run(&[command, "--config", path, "--set", "server.admin=:8081"]).await;
        assert_eq!(code, 78, "{err}");
        assert!(err.contains("auth.admin_token: missing, and server.admin (0.0.0.0:8081) is not on loopback"), "{err}");
    }
    let with = ["--set", "server.admin=:8081", "--set", "auth.admin_token=secret"];
    assert_eq!(run(&[&["check", path][..], &with].concat()).await.0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_gateway_of_the_environment_is_asked_unless_a_flag_names_another() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let status = async |args: &[&str]| {
        let admin = format!("http://{}", gateway.admin());
        output(sluice(&[&["status"], args].concat()).env("SLUICE_ADMIN", admin)).await
    };
    let (code, out, _) = status(&[]).await;
    assert!(code == 0 && out.contains("only/b0"), "{code:?} {out}");
    let (code, out, _) = status(&["--admin", &format!("http://127.0.0.1:{}", free_port())]).await;
    assert_eq!((code, out.as_str()), (1, ""));
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_version_is_that_of_the_package_in_both_forms() {
    let (code, out, err) = run(&["version"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with(&format!("sluice {}", env!("CARGO_PKG_VERSION"))) && out.lines().count() == 1, "{out}");
    assert_eq!(run(&["--version"]).await, (0, out, String::new()));
}
