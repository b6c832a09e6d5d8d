//! Engines of the process driver, as real processes: `sluice sim` in place of `vllm serve`.
//!
//! The tests cover the start until ready, its progress, refusals with their class, an API server
//! that is killed while its engine process holds the device, a server of another process on the
//! same port, and a start that hangs.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use sluice_config::{Address, ArgValue, Endpoint, Launch, Words};
use sluice_core::vllm::failure::{Exit, FailureClass, Retryable};
use sluice_core::vllm::logs::StartPhase;
use sluice_fleet::driver::{Driver, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, PortOwner, StopRules};
use sluice_fleet::{ProcessDriver, Ready, ReadyRules, wait_until_ready};
use tokio::time::timeout;

use crate::ports::free_port;

const TIMEOUT: Duration = Duration::from_secs(90);

struct Rig {
    /// Kept so that the folder exists while the engine may write into it.
    _folder: tempfile::TempDir,
    driver: ProcessDriver,
    port: u16,
    /// Session leaders that were started, to be killed even if the test fails.
    started: Mutex<Vec<i32>>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        for leader in self.started.lock().iter().filter(|leader| !session(**leader).is_empty()) {
            // A process of this session lives, so no other session or group has this id.
            let _ = killpg(Pid::from_raw(*leader), Signal::SIGKILL);
        }
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

impl Rig {
    fn new(flags: &str) -> Self {
        let mut command = vec![env!("CARGO_BIN_EXE_sluice").to_owned()];
        command.extend(words("sim meta-llama/Llama-3.1-8B-Instruct --served-model-name m --sim-speed 1000"));
        command.extend(words(flags));
        Self::of(command, tempfile::tempdir().unwrap())
    }

    fn of(command: Vec<String>, folder: tempfile::TempDir) -> Self {
        let port = free_port();
        let env =
            BTreeMap::from([("VLLM_CACHE_ROOT".to_owned(), folder.path().join("cache").display().to_string().into())]);
        let launch = Launch { env, ..Launch::of(command.into(), port) };
        Self {
            driver: ProcessDriver::new("short/gpu0", launch, &folder.path().join("state")),
            port,
            _folder: folder,
            started: Mutex::default(),
        }
    }

    fn address(&self) -> Address {
        let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port: self.port, prefix: String::new() };
        Address::new(endpoint, None, None)
    }

    async fn start(&self, settings: &EngineSettings) -> EngineIdentity {
        let trace = self.driver.start(settings).await.unwrap_or_else(|failure| panic!("{failure}"));
        self.started.lock().push(leader(&trace));
        trace
    }

    async fn ready(&self, expected: &[&str], rules: ReadyRules) -> Result<Ready, EngineFailure> {
        let expected: Vec<String> = expected.iter().map(|name| (*name).to_owned()).collect();
        let address = self.address();
        let waiting = wait_until_ready(&self.driver, &address, &expected, rules);
        timeout(TIMEOUT, waiting).await.expect("neither ready nor refused")
    }

    async fn stop(&self) -> sluice_fleet::driver::Stopped {
        let rules = StopRules { grace: TIMEOUT, kill: TIMEOUT, memory: Duration::ZERO, ..StopRules::default() };
        self.driver.stop(rules).await.unwrap_or_else(|failure| panic!("{failure}"))
    }

    fn log(&self) -> String {
        self.driver.tail(usize::MAX).join("\n")
    }
}

fn settings(pairs: &[(&str, i64)]) -> EngineSettings {
    EngineSettings { args: pairs.iter().map(|(name, value)| ((*name).to_owned(), ArgValue::Int(*value))).collect() }
}

fn session(leader: i32) -> Vec<i32> {
    let entries =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let of = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
        fields.get(3) == Some(&leader.to_string().as_str()) && fields[0] != "Z"
    };
    entries.filter(of).collect()
}

fn leader(trace: &EngineIdentity) -> i32 {
    let EngineIdentity::Process { pid, .. } = trace else { panic!("{trace:?}") };
    *pid
}

/// A process that sluice did not start, with the command line of an engine.
struct OtherProcess(Child);

impl OtherProcess {
    fn start() -> Self {
        let mut command = Command::new("bash");
        command.args(["-c", "exec -a 'vllm serve meta-llama/x' sleep 3600"]).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn an_engine_becomes_ready_shows_its_phases_and_stops_completely() {
    let rig = Rig::new("");
    let mut progress = rig.driver.progress().unwrap();
    let trace = rig.start(&settings(&[("max-num-seqs", 32)])).await;
    let ready =
        rig.ready(&["m"], ReadyRules::default()).await.unwrap_or_else(|failure| panic!("{failure}\n{}", rig.log()));
    assert_eq!(ready.models, ["m"]);
    assert!(ready.max_model_len.is_some_and(|length| length > 0));
    // The driver reads the log while it probes, so it may read the last line of the log after the
    // first response.
    let serving = progress.wait_for(|progress| progress.phase == StartPhase::Serving);
    tokio::time::timeout(Duration::from_secs(30), serving).await.expect("the log says so").unwrap();
    assert_eq!(rig.driver.port_owner().await, PortOwner::Engine);
    assert!(rig.log().contains("--max-num-seqs=32"), "{}", rig.log());
    assert!(session(leader(&trace)).len() >= 2, "an API server and its engine process");
    let stopped = rig.stop().await;
    assert_eq!((stopped.exit, stopped.forced), (Some(Exit::Code(0)), false), "{}", rig.log());
    assert!(session(leader(&trace)).is_empty());
    assert_eq!((rig.driver.status().await, rig.driver.port_owner().await), (EngineStatus::Absent, PortOwner::Free));
}

#[tokio::test]
async fn a_killed_api_server_leaves_nothing_on_the_device() {
    let mut other_process = OtherProcess::start();
    let device = tempfile::NamedTempFile::new().unwrap();
    let rig = Rig::new(&format!("--sim-device {}", device.path().display()));
    let trace = rig.start(&EngineSettings::default()).await;
    rig.ready(&["m"], ReadyRules::default()).await.unwrap();
    let killed = kill(Pid::from_raw(leader(&trace)), Signal::SIGKILL);
    killed.unwrap();
    assert_eq!(timeout(TIMEOUT, rig.driver.wait_for_exit()).await.unwrap(), Exit::Signal(9));
    assert!(!session(leader(&trace)).is_empty(), "the engine process is an orphan that holds the device");
    assert_eq!(rig.driver.diagnose(Some(Exit::Signal(9))).class, FailureClass::Killed);
    let stopped = rig.stop().await;
    assert!(stopped.orphans >= 1, "{stopped:?}");
    assert!(session(leader(&trace)).is_empty());
    assert!(other_process.lives());
    // The next engine would refuse to start if the device were not free again.
    rig.start(&EngineSettings::default()).await;
    rig.ready(&["m"], ReadyRules::default()).await.unwrap_or_else(|failure| panic!("{failure}\n{}", rig.log()));
    rig.stop().await;
}

#[tokio::test]
async fn a_refusal_has_its_class_its_cause_and_the_length_that_fits() {
    let small = "--sim-gpu rtx3080-10 --quantization fp8 --kv-cache-dtype fp8 --gpu-memory-utilization 0.95";
    let rig = Rig::new(&format!("{small} --max-num-seqs 64 --max-model-len 30576"));
    rig.start(&EngineSettings::default()).await;
    let failure = rig.ready(&["m"], ReadyRules::default()).await.unwrap_err();
    assert_eq!(
        (failure.class, failure.retry()),
        (FailureClass::KvTooSmall, Retryable::Never),
        "{failure}\n{}",
        rig.log()
    );
    assert!(failure.cause.as_deref().is_some_and(|cause| cause.contains("30576")), "{failure}");
    assert_eq!(failure.exit, Some(Exit::Code(1)));
    let fits = failure.suggestion.expect("the length that fits").value;
    rig.stop().await;
    // The engine starts with the value that the refusal suggests.
    rig.start(&settings(&[("max-model-len", fits)])).await;
    let ready =
        rig.ready(&["m"], ReadyRules::default()).await.unwrap_or_else(|failure| panic!("{failure}\n{}", rig.log()));
    assert_eq!(ready.max_model_len, u64::try_from(fits).ok());
    rig.stop().await;
}

#[tokio::test]
async fn a_server_of_another_process_on_the_port_is_never_mistaken_for_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("engine");
    std::fs::write(&script, "#!/bin/sh\nexec sleep 300\n").unwrap();
    make_executable(&script);
    let rig = Rig::of(vec![script.display().to_string()], folder);
    rig.start(&EngineSettings::default()).await;
    let elsewhere = tempfile::tempdir().unwrap();
    let command = words(&format!("{} sim org/m --served-model-name m", env!("CARGO_BIN_EXE_sluice")));
    let launch = Launch::of(Words::from(command), rig.port);
    let other = ProcessDriver::new("other/gpu0", launch, elsewhere.path());
    let theirs = other.start(&EngineSettings::default()).await.unwrap();
    rig.started.lock().push(leader(&theirs));
    wait_until_ready(&other, &rig.address(), &["m".to_owned()], ReadyRules::default()).await.unwrap();
    let failure = rig.ready(&["m"], ReadyRules::default()).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::WrongEngine, "{failure}");
    assert!(failure.cause.as_deref().is_some_and(|cause| cause.contains("pid ")), "{failure}");
    assert!(matches!(rig.driver.port_owner().await, PortOwner::Other(_)));
    rig.stop().await;
    let taken = rig.driver.start(&EngineSettings::default()).await.unwrap_err();
    assert_eq!(taken.class, FailureClass::PortInUse, "{taken}");
    other.stop(StopRules::default()).await.unwrap();
}

fn make_executable(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test]
async fn missing_models_and_starts_without_progress_are_different_failures() {
    let rig = Rig::new("--sim-startup 0");
    rig.start(&EngineSettings::default()).await;
    // Three percent of the time limits of a real start.
    let patient = ReadyRules { start_timeout_scale: 0.03, ..ReadyRules::default() };
    let failure = rig.ready(&["m", "an-adapter"], patient).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::WrongModels, "{failure}\n{}", rig.log());
    assert!(failure.to_string().contains("does not serve an-adapter"), "{failure}");
    rig.stop().await;
    let stuck = Rig::new("--sim-startup 0 --sim-fault slow-start=600");
    let trace = stuck.start(&EngineSettings::default()).await;
    let hasty = ReadyRules { start_timeout_scale: 0.003, ..ReadyRules::default() };
    let failure = stuck.ready(&["m"], hasty).await.unwrap_err();
    assert_eq!((failure.class, failure.retry()), (FailureClass::Timeout, Retryable::Later), "{failure}");
    assert!(failure.to_string().contains("no progress for"), "{failure}");
    stuck.stop().await;
    assert!(session(leader(&trace)).is_empty());
}

#[tokio::test]
async fn an_engine_out_of_memory_under_load_is_reported_as_such() {
    let rig = Rig::new("--sim-fault oom=1");
    rig.start(&EngineSettings::default()).await;
    rig.ready(&["m"], ReadyRules::default()).await.unwrap();
    let body = r#"{"model":"m","prompt":"hello","max_tokens":4000,"ignore_eos":true}"#;
    let ask = || async {
        use tokio::io::AsyncWriteExt;
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", rig.port)).await.unwrap();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    };
    let _requests = [ask().await, ask().await, ask().await];
    let exit = timeout(TIMEOUT, rig.driver.wait_for_exit()).await.expect("the engine survives");
    let failure = rig.driver.diagnose(Some(exit));
    assert_eq!(
        (failure.class, failure.retry()),
        (FailureClass::OutOfMemoryServing, Retryable::Later),
        "{failure}\n{}",
        rig.log()
    );
    rig.stop().await;
}

/// Real vLLM on the CPU: `SLUICE_REAL=$(tests/real/setup) cargo test --test gateway -- --ignored
/// real_vllm`.
#[tokio::test]
#[ignore = "needs a real vLLM: SLUICE_REAL=$(tests/real/setup)"]
async fn a_real_vllm_is_refused_started_and_stopped() {
    let root = std::env::var("SLUICE_REAL").expect("SLUICE_REAL says where tests/real/setup put vLLM");
    let flags = "--served-model-name m --load-format dummy --enforce-eager --seed 0";
    let command = words(&format!("{root}/venv/bin/vllm serve {root}/tiny {flags}"));
    let mut rig = Rig::of(command.clone(), tempfile::tempdir().unwrap());
    let cache = format!("{root}/cache");
    let variables = [
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CACHE_ROOT", &cache),
    ];
    let env = BTreeMap::from(variables.map(|(name, value)| (name.to_owned(), value.to_owned().into())));
    let launch = Launch { env, ..Launch::of(command.into(), rig.port) };
    rig.driver = ProcessDriver::new("short/gpu0", launch, &rig._folder.path().join("state"));
    let mut other_process = OtherProcess::start();
    // Three processes import modules, which takes seconds for each on a busy machine.
    let wait = |expected: Vec<String>| {
        let (driver, address) = (&rig.driver, rig.address());
        async move {
            timeout(4 * TIMEOUT, wait_until_ready(driver, &address, &expected, ReadyRules::default())).await.unwrap()
        }
    };

    // The driver reads the known flags from the engine's help.
    let text = |name: &str, value| EngineSettings { args: BTreeMap::from([(name.to_owned(), value)]) };
    let unknown = rig.driver.check(&text("max-num-sequences", ArgValue::Int(3))).await.unwrap_err();
    assert_eq!(unknown.class, FailureClass::UnknownFlag);
    assert!(unknown.to_string().contains("did you mean max-num-seqs?"), "{unknown}");
    let dropped = rig.driver.check(&text("disable-log-requests", ArgValue::Flag(true))).await.unwrap();
    assert!(dropped[0].to_string().contains("is dropped"), "{dropped:?}");

    // The engine's KV cache is too small for this context length.
    let mut long = settings(&[("max-model-len", 4_000_000)]);
    long.args.insert("hf-overrides".to_owned(), ArgValue::Text(r#"{"max_position_embeddings": 4000000}"#.to_owned()));
    rig.start(&long).await;
    let refusal = wait(vec!["m".to_owned()]).await.unwrap_err();
    println!("{refusal}");
    assert_eq!(
        (refusal.class, refusal.exit),
        (FailureClass::KvTooSmall, Some(Exit::Code(1))),
        "{refusal}\n{}",
        rig.log()
    );
    let fits = refusal.suggestion.expect("the length that fits").value;
    assert!((100_000..4_000_000).contains(&fits), "{fits}");
    rig.stop().await;

    // The suggested value works. `tests/real/fleet` tests the death of an API server.
    long.args.insert("max-model-len".to_owned(), ArgValue::Int(fits));
    let trace = rig.start(&long).await;
    let ready = wait(vec!["m".to_owned()]).await.unwrap_or_else(|failure| panic!("{failure}\n{}", rig.log()));
    println!("ready in {:.1} s with a context of {fits}", ready.took.as_secs_f64());
    assert_eq!(ready.max_model_len, u64::try_from(fits).ok());
    assert_eq!(rig.driver.port_owner().await, PortOwner::Engine);
    let before = session(leader(&trace));
    assert!(before.len() >= 3, "API server, engine, worker: {before:?}");

    // An ordinary stop is quick, and the driver need not force it.
    let stopped = rig.stop().await;
    assert_eq!((stopped.exit, stopped.forced), (Some(Exit::Code(0)), false), "{stopped:?}\n{}", rig.log());
    assert_eq!((rig.driver.status().await, rig.driver.port_owner().await), (EngineStatus::Absent, PortOwner::Free));
    assert!(before.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()), "reaped, not only ended");
    assert!(other_process.lives());
}
