//! Secrets of engines. The test plants them in every place that can hold one, and then searches for
//! them in everything that the gateway prints, serves and stores.
//!
//! The simulated engine must get the secrets, because otherwise there would be nothing to hide. A
//! gateway that is started again must recognise the engine without having stored the secrets.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{SIGHUP, SIGKILL, SIGTERM};

use crate::client::{TestClient, get};
use crate::ports::free_port;
use crate::stop::Program;
use crate::test_gateway::eventually_within;

/// Text that every planted secret contains.
const PLANTED: &str = "S3cretPlant";
/// Environment variables of the gateway to which the configuration refers.
const ENV: [(&str, &str); 2] = [("SLUICE_TEST_API", "S3cretPlant-api"), ("SLUICE_TEST_ENV", "S3cretPlant-env")];
/// Time limit of a start of the simulated engine on a busy machine.
const START: Duration = Duration::from_secs(60);

struct Rig {
    folder: tempfile::TempDir,
    config: PathBuf,
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sluice.toml");
        let text = format!(
            r#"[server]
listen = "127.0.0.1:0"
admin = "127.0.0.1:0"
[log]
level = "debug"
[fleet]
state = "state"
ramp = "0s"
warm_up = 0
[[model]]
name = "m"
[[pool]]
name = "p"
models = ["m"]
[[pool.backend]]
name = "a"
api_key = "env:SLUICE_TEST_API"
[pool.backend.launch]
command = [{:?}, "sim", "org/model", "--served-model-name", "m", "--sim-speed", "1000", "--hf-token", "S3cretPlant-cmd"]
port = {}
[pool.backend.launch.env]
PLAIN_TOKEN = "S3cretPlant-plain"
REFERRED = "env:SLUICE_TEST_ENV"
FROM_FILE = "file:secret.txt"
[pool.backend.launch.args]
api-key = "env:SLUICE_TEST_API"
max-num-seqs = 32
"#,
            env!("CARGO_BIN_EXE_sluice"),
            free_port()
        );
        std::fs::write(&config, text).unwrap();
        std::fs::write(folder.path().join("secret.txt"), "S3cretPlant-file\n").unwrap();
        Self { folder, config }
    }

    fn run(&self, words: &[&str]) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_sluice")).args(words).envs(ENV).output().unwrap();
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// The id of the engine's session leader, from the journal; `None` before the engine serves.
    fn engine(&self) -> Option<i32> {
        let journal = std::fs::read_to_string(self.state().join("journal.jsonl")).ok()?;
        let last: serde_json::Value = serde_json::from_str(journal.lines().last()?).ok()?;
        (last["life"]["step"] == "serve").then(|| last["trace"]["pid"].as_i64()?.try_into().ok())?
    }

    async fn serving(&self) -> i32 {
        eventually_within(START, "the engine serves", async || self.engine().is_some()).await;
        self.engine().unwrap()
    }
}

#[track_caller]
fn clean(what: &str, text: &str) {
    assert!(!text.contains(PLANTED), "a secret in {what}:\n{text}");
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

fn lives(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z"))
}

async fn page(admin: std::net::SocketAddr, path: &str) -> String {
    TestClient::to(admin).await.request(get(path)).await.text()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_of_engines_reach_the_engine_and_nothing_else() {
    let rig = Rig::new();
    let checked = rig.run(&["check", "--config", rig.config.to_str().unwrap()]);
    clean("check", &checked);
    for shown in [
        "api-key = \"env:SLUICE_TEST_API\"",
        "REFERRED = \"env:SLUICE_TEST_ENV\"",
        "PLAIN_TOKEN = \"********\"",
        "\"--hf-token\", \"********\"",
        ": ok",
    ] {
        assert!(checked.contains(shown), "no {shown} in\n{checked}");
    }

    let mut program = Program::start_in(&rig.config, &ENV).await;
    let engine = rig.serving().await;
    let environment = std::fs::read_to_string(format!("/proc/{engine}/environ")).unwrap();
    for variable in ["PLAIN_TOKEN=S3cretPlant-plain", "REFERRED=S3cretPlant-env", "FROM_FILE=S3cretPlant-file"] {
        assert!(environment.split('\0').any(|found| found == variable), "{variable}: {environment}");
    }
    let command = std::fs::read_to_string(format!("/proc/{engine}/cmdline")).unwrap();
    assert!(command.contains("--api-key=S3cretPlant-api") && command.contains("S3cretPlant-cmd"), "{command}");

    let admin = format!("http://{}", program.admin);
    for path in ["/admin/status", "/metrics"] {
        clean(path, &page(program.admin, path).await);
    }
    for words in [&["backend", "list"][..], &["backend", "list", "--wide"], &["backend", "list", "--json"], &["status"]]
    {
        clean(&words.join(" "), &rig.run(&[words, &["--admin", &admin]].concat()));
    }
    let refused = rig.run(&["backend", "restart", "a", "--set", "api-key=S3cretPlant-new", "--admin", &admin]);
    clean("a refusal", &refused);

    program.signal(SIGHUP);
    program.line("reloaded: nothing changed").await;
    std::fs::write(rig.folder.path().join("secret.txt"), "S3cretPlant-changed").unwrap();
    program.signal(SIGHUP);
    let change = program.line("FROM_FILE: changed").await;
    assert!(change.contains("the engine is restarted in its turn"), "{change}");
    std::fs::write(rig.folder.path().join("secret.txt"), "S3cretPlant-file").unwrap();
    program.signal(SIGHUP);
    program.line("FROM_FILE: changed").await;

    // A gateway that is started again finds that the engine's configuration has not changed,
    // although no secret is on disk.
    program.signal(SIGKILL);
    program.code().await;
    program.rest().await;
    clean("the log", &program.log);
    let mut next = Program::start_in(&rig.config, &ENV).await;
    let serves = async || page(next.admin, "/admin/status").await.contains(r#""step":"serve""#);
    eventually_within(START, "it is taken over", serves).await;
    assert!(lives(engine), "the engine was replaced: {}", next.log);
    next.signal(SIGTERM);
    assert_eq!(next.code().await, Some(0), "{}", next.log);
    next.rest().await;
    clean("the log", &next.log);
    assert!(next.log.contains("continues what an earlier gateway began"), "{}", next.log);
    assert!(!lives(engine), "the engine was not stopped");

    assert_eq!(mode(&rig.state()), 0o700);
    for entry in std::fs::read_dir(rig.state()).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
        clean(&path.display().to_string(), &String::from_utf8_lossy(&std::fs::read(&path).unwrap()));
    }
}
