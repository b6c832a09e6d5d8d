//! Two gateways with one configuration in front of the same two simulated engines, and load on
//! both.
//!
//! The first gateway also runs an engine, as only one replica can.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::http::http;
use crate::ports::free_port;
use crate::program::binary;

const DEADLINE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(100);

#[track_caller]
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        sleep(LOOK);
    }
}

pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn spawn(command: &mut Command, install: &str) -> Self {
        Self(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error} ({install})")))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process gets SIGTERM first, so that a gateway stops the engine that it runs.
        let pid = nix::unistd::Pid::from_raw(self.0.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline && matches!(self.0.try_wait(), Ok(None)) {
            sleep(LOOK);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The client keys and their SHA-256. The name of a key is the key itself.
pub(crate) const KEYS: [[&str; 2]; 2] = [
    ["tenant-a", "80a707af7dc77ee1228f9127180f3964835e5beb4c4ab0d812f0fe7593579b3a"],
    ["tenant-b", "df6b6a5f230ea55af66fbc138653f50906674c62e103019d7af1d3bba6862ac2"],
];
/// Headers of a JSON request with the first key.
const JSON: &str = "content-type: application/json\r\nauthorization: Bearer tenant-a\r\n";

fn sluice(args: &[&str]) -> Process {
    let mut command = Command::new(binary());
    Process::spawn(command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()), "cargo build")
}

pub(crate) struct Gateway {
    pub(crate) port: u16,
    pub(crate) admin: u16,
    _process: Process,
    _folder: TempDir,
}

pub(crate) struct Deployment {
    pub(crate) gateways: Vec<Gateway>,
    pub(crate) engines: Vec<Process>,
}

fn config(ports: [u16; 2], engines: [u16; 2], own: bool) -> String {
    let [listen, admin] = ports;
    let [short, long] = engines;
    let limit = "limit = { in_flight = 500, tokens_per_minute = \"100M\" }";
    let keys: String = KEYS
        .iter()
        .map(|[name, digest]| format!("[[auth.keys]]\nname = \"{name}\"\nsha256 = \"{digest}\"\n{limit}\n"))
        .collect();
    let own = if own {
        let command = serde_json::to_string(&binary().to_string_lossy()).unwrap();
        format!(
            "[[model]]\nname = \"o\"\n[[pool]]\nname = \"own\"\nmodels = [\"o\"]\n[[pool.backend]]\nname = \"gpu2\"\n\
             [pool.backend.launch]\ncommand = [{command}, \"sim\", \"o\"]\n"
        )
    } else {
        String::new()
    };
    format!(
        "[server]\nlisten = \"127.0.0.1:{listen}\"\nadmin = \"127.0.0.1:{admin}\"\n\
         [slo]\nttft = \"200ms\"\ntpot = \"100ms\"\n\
         [tracing]\nendpoint = \"http://127.0.0.1:9\"\nmetrics_interval = \"2s\"\n\
         [records]\npath = \"records.jsonl\"\n\
         {keys}[[model]]\nname = \"m\"\n[[model]]\nname = \"n\"\n\
         [[pool]]\nname = \"short\"\nmodels = [\"m\", \"n\"]\nprompt_tokens = {{ max = \"2k\" }}\nslots = 16\ntokens = \"1M\"\n\
         long_prefix = {{ threshold = \"2k\", slots = 1 }}\n\
         [[pool.backend]]\nname = \"gpu0\"\nurl = \"http://127.0.0.1:{short}\"\n\
         [[pool]]\nname = \"long\"\nmodels = [\"m\", \"n\"]\nprompt_tokens = {{ min = \"2k\" }}\nslots = 8\n\
         long_prefix = {{ threshold = \"2k\", slots = 1 }}\nqueue = {{ length = 2, timeout = \"300ms\" }}\nspill = [\"short\"]\n\
         [[pool.backend]]\nname = \"gpu1\"\nurl = \"http://127.0.0.1:{long}\"\n{own}\
         [[experiment]]\nname = \"x\"\nmodels = [\"m\"]\nsticky = \"request\"\n\
         [[experiment.arm]]\nname = \"base\"\nweight = 50\n[[experiment.arm]]\nname = \"new\"\nweight = 50\nmodel = \"n\"\n\
         [[experiment.arm]]\nname = \"shade\"\nmodel = \"n\"\nshadow = {{ share = 0.5 }}\n"
    )
}

impl Gateway {
    fn start(engines: [u16; 2], own: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ports = [free_port(), free_port()];
        let file = folder.path().join("sluice.toml");
        fs::write(&file, config(ports, engines, own)).unwrap();
        let process = sluice(&["serve", "--config", file.to_str().unwrap()]);
        Self { port: ports[0], admin: ports[1], _process: process, _folder: folder }
    }

    fn backends_ready(&self) -> usize {
        let page = http(self.admin, "GET /metrics", "", "").map_or(String::new(), |(_, page)| page);
        let ready = |line: &&str| line.starts_with("sluice_backend_state{") && line.ends_with("state=\"ready\"} 1");
        page.lines().filter(ready).count()
    }

    pub(crate) fn tokenize(&self) {
        let answer = http(self.port, "POST /tokenize", JSON, r#"{"model":"m","prompt":"hello"}"#);
        assert!(matches!(answer, Some((200, _))), "{answer:?}");
    }

    /// Sends requests that the load generator does not send: an unknown model, a rating, a reload.
    pub(crate) fn use_the_rest(&self) {
        let post =
            |path: &str, headers: &str, body: &str| http(self.port, &format!("POST {path}"), headers, body).unwrap().0;
        assert_eq!(post("/v1/completions", JSON, r#"{"model":"unknown","prompt":"hello"}"#), 404);
        let id = format!("{JSON}x-request-id: rated-1\r\n");
        assert_eq!(post("/v1/completions", &id, r#"{"model":"m","prompt":"hello","max_tokens":4}"#), 200);
        let headers = "content-type: application/json\r\nx-sluice-admin: 1\r\n";
        let rated = || http(self.admin, "POST /admin/feedback/rated-1", headers, r#"{"good":true}"#);
        let reload = || http(self.admin, "POST /admin/reload", headers, "");
        assert!(matches!(reload(), Some((200, _))), "{:?}", reload());
        eventually("the answer is rated", || matches!(rated(), Some((200..=299, _))));
    }

    /// Starts load of a key on this gateway for `seconds`, at `rate` requests per second. The load
    /// ends when the process is dropped.
    pub(crate) fn load(&self, key: &str, rate: f64, seconds: u32) -> Process {
        Process::spawn(self.bench_command(key, rate, seconds).stdout(Stdio::null()), "cargo build")
    }

    pub(crate) fn bench(&self, key: &str, rate: f64, seconds: u32) -> serde_json::Value {
        let output = self.bench_command(key, rate, seconds).arg("--json").output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    fn bench_command(&self, key: &str, rate: f64, seconds: u32) -> Command {
        let (url, rate, seconds) = (format!("http://127.0.0.1:{}", self.port), rate.to_string(), seconds.to_string());
        let mut command = Command::new(binary());
        command.args(["bench", "--base-url", &url, "--model", "m", "--request-rate", &rate, "--duration", &seconds]);
        command.args(["--class", "short:weight=6,in=200,out=40", "--class", "long:weight=1,in=12000,out=16"]);
        command.env("OPENAI_API_KEY", key).stdin(Stdio::null()).stderr(Stdio::null());
        command
    }
}

impl Deployment {
    /// Starts everything and waits until all backends are ready.
    pub(crate) fn start() -> Self {
        let ports = [free_port(), free_port()];
        let engines = ports.map(|port| {
            let place = ["--host", "127.0.0.1", "--port", &port.to_string()];
            sluice(&[&["sim", "m"], &place[..], &["--served-model-name", "m", "n"]].concat())
        });
        let gateways = vec![Gateway::start(ports, true), Gateway::start(ports, false)];
        for (gateway, backends) in gateways.iter().zip([3, 2]) {
            eventually("backends are ready", || gateway.backends_ready() == backends);
        }
        Self { gateways, engines: engines.into() }
    }
}
