//! `sluice sim` as a supervisor sees it: exit codes, log, children, device, shutdown.
//!
//! Each process has a separate folder for its cache and its device. Dropping the handle ends the
//! process.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::ports::free_port;

const DEADLINE: Duration = Duration::from_secs(30);

/// Whether a process is gone or a zombie. It may be a zombie because another test made this process
/// a child subreaper, which may not have reaped its orphans yet.
fn has_ended(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])))
}

fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(began.elapsed() < DEADLINE, "after {DEADLINE:?} still not: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.arg("sim").args(args).env("VLLM_CACHE_ROOT", folder).stdin(Stdio::null());
    command
}

fn refused(args: &[&str]) -> (i32, String) {
    let folder = TempDir::new().unwrap();
    let Output { status, stdout, stderr } = command(folder.path(), args).output().unwrap();
    let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    (status.code().unwrap_or(-1), text)
}

pub(crate) struct Sim {
    child: Child,
    port: u16,
    folder: TempDir,
}

impl Sim {
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::serving("m", args)
    }

    /// A server of this model: a name, or a folder with a tokenizer.
    pub(crate) fn serving(model: &str, args: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let port = free_port();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let mut command = command(folder.path(), &[model, "--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(args).stdout(log.try_clone().unwrap()).stderr(log);
        let sim = Self { child: command.spawn().unwrap(), port, folder };
        until("healthy", || sim.get("/health").starts_with("HTTP/1.1 200").then_some(()));
        sim
    }

    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// A response as text; empty when no process listens.
    fn get(&self, path: &str) -> String {
        self.send(&format!("GET {path} HTTP/1.1\r\nhost: sim\r\nconnection: close\r\n\r\n")).unwrap_or_default()
    }

    fn post(&self, path: &str, body: &str) -> std::io::Result<String> {
        let length = body.len();
        self.send(&format!(
            "POST {path} HTTP/1.1\r\nhost: sim\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        ))
    }

    fn send(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.address(), DEADLINE)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    fn exit_code(&mut self) -> Option<i32> {
        until("ended", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // A graceful stop is needed, because otherwise the engine process would not end with the
        // server.
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
        let began = Instant::now();
        while self.child.try_wait().is_ok_and(|status| status.is_none()) && began.elapsed() < DEADLINE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn children(parent: u32) -> Vec<(i32, String)> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let below = pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().map(str::to_owned);
        fields.collect::<Vec<_>>().get(1).is_some_and(|field| *field == parent.to_string())
    });
    let named = |pid: i32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        (pid, line.trim_end_matches('\0').to_owned())
    };
    below.map(named).collect()
}

#[test]
fn unknown_and_removed_flags_exit_with_2() {
    for (args, words) in [
        (&["m", "--what", "3"][..], "vllm: error: unrecognized arguments: --what 3"),
        (
            &["m", "--swap-space", "4", "--disable-log-requests"],
            "unrecognized arguments: --swap-space 4 --disable-log-requests",
        ),
        (&["m", "--port", "http"], "vllm serve: error: argument --port: invalid int value: 'http'"),
        (&["m", "--sim-gpu", "b300"], "argument --sim-gpu: "),
        (&["m", "--sim-model", "gpt-9"], "argument --sim-model: "),
        (&["m", "--sim-fault", "explode"], "'explode' is not a fault; write hang"),
    ] {
        let (code, text) = refused(args);
        assert_eq!(code, 2, "{args:?}: {text}");
        assert!(text.contains(words), "{args:?}: {text}");
    }
}

#[test]
fn a_start_that_vllm_refuses_exits_with_1_and_its_message() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (args, words) in [
        (&["m", "--max-num-batched-tokens", "64", "--max-num-seqs", "128"][..], "max_num_batched_tokens (64) must be"),
        (&["m", "--host", "127.0.0.1", "--port", &port], "OSError: [Errno 98] Address already in use"),
        (
            &["meta-llama/Llama-3.1-8B", "--sim-gpu", "rtx3080-10", "--max-model-len", "30576"],
            "the estimated maximum model length is",
        ),
        (&["m", "--sim-gpu", "l4", "--gpu-memory-utilization", "0.7"], "No available memory for the cache blocks"),
        (&["m", "--num-gpu-blocks-override", "10"], "(131072), (16.0 GiB KV cache is needed"),
    ] {
        let (code, text) = refused(args);
        assert_eq!(code, 1, "{args:?}: {text}");
        assert!(text.contains(words), "{args:?}: {text}");
    }
}

#[test]
fn the_second_start_reuses_the_compiled_graph() {
    let folder = TempDir::new().unwrap();
    let start = |flags: &[&str]| {
        let port = free_port().to_string();
        let mut child = command(folder.path(), &["m", "--host", "127.0.0.1", "--port", &port])
            .args(flags)
            .args(["--sim-startup", "0.1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let address = format!("127.0.0.1:{port}");
        until("listening", || TcpStream::connect(&address).ok());
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        child.wait().unwrap();
        text
    };
    assert!(start(&[]).contains("Compiling a graph for compile range (1, 8192)"));
    assert!(
        start(&["--gpu-memory-utilization", "0.8"]).contains("Directly load the compiled graph(s) for compile range")
    );
    assert!(start(&["--max-num-seqs", "64"]).contains("Compiling a graph"));
}

#[test]
fn a_terminated_server_cuts_its_streams_and_ends_its_engine() {
    let mut sim = Sim::start(&[]);
    let children = children(sim.child.id());
    let names: Vec<&str> = children.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names, ["VLLM::EngineCore"]);
    let body = r#"{"prompt":"x","max_tokens":8000,"ignore_eos":true,"stream":true}"#;
    std::thread::scope(|scope| {
        let stream = scope.spawn(|| sim.post("/v1/completions", body).unwrap());
        until("it runs", || {
            sim.get("/metrics").contains("num_requests_running{engine=\"0\",model_name=\"m\"} 1.0").then_some(())
        });
        sim.signal(Signal::SIGTERM);
        assert!(stream.join().unwrap().contains("EngineCore encountered an issue."));
    });
    assert_eq!(sim.exit_code(), Some(0));
    assert!(sim.log().contains("[shutdown] API server: stopping engine client mode=abort timeout=0s"));
    assert!(!Path::new(&format!("/proc/{}/stat", children[0].0)).exists());
}

#[test]
fn a_shutdown_with_a_timeout_lets_streams_end() {
    let mut sim = Sim::start(&["--shutdown-timeout", "20"]);
    let body = r#"{"prompt":"x","max_tokens":200,"ignore_eos":true,"stream":true}"#;
    std::thread::scope(|scope| {
        let stream = scope.spawn(|| sim.post("/v1/completions", body).unwrap());
        until("it runs", || {
            sim.get("/metrics").contains("num_requests_running{engine=\"0\",model_name=\"m\"} 1.0").then_some(())
        });
        sim.signal(Signal::SIGTERM);
        until("draining", || sim.log().contains("draining in-flight requests count=1 timeout=20s").then_some(()));
        // While the server drains, it refuses the request. Afterwards it does not accept the
        // connection.
        let late = sim.post("/v1/completions", r#"{"prompt":"x"}"#).unwrap_or_default();
        assert!(late.is_empty() || late.contains("cannot schedule new futures after shutdown"), "{late}");
        let text = stream.join().unwrap();
        assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("data: [DONE]"), "{text}");
    });
    assert_eq!(sim.exit_code(), Some(0));
}

#[test]
fn a_killed_parent_leaves_an_engine_that_holds_the_device() {
    let folder = TempDir::new().unwrap();
    let device = folder.path().join("gpu0").display().to_string();
    let on_device = ["--sim-device", &device];
    let mut sim = Sim::start(&[&on_device[..], &["--sim-orphan", "600"]].concat());
    let orphan = children(sim.child.id())[0].0;
    sim.signal(Signal::SIGKILL);
    sim.exit_code();
    let port = free_port().to_string();
    let args = [&["m", "--host", "127.0.0.1", "--port", &port][..], &on_device].concat();
    let (code, text) = refused(&args);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("ValueError: Free memory on device cuda:0 ("), "{text}");
    kill(Pid::from_raw(orphan), Signal::SIGKILL).unwrap();
    until("the device is free", || Sim::start_on(&on_device));
}

impl Sim {
    /// Starts an engine with these flags. `None` if the device is in use.
    fn start_on(on_device: &[&str]) -> Option<()> {
        let folder = TempDir::new().unwrap();
        let port = free_port();
        let mut command = command(folder.path(), &["m", "--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(on_device).args(["--sim-startup", "0"]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut sim = Self { child: command.spawn().unwrap(), port, folder };
        until("it serves or ends", || match sim.child.try_wait().unwrap() {
            Some(_) => Some(None),
            None => sim.get("/health").starts_with("HTTP/1.1 200").then_some(Some(())),
        })
    }
}

/// `tests/soak` kills engines at any time, even between the start of the second process and its
/// first instruction.
#[test]
fn an_engine_whose_parent_was_killed_before_it_ran_ends_too() {
    let mut engine = Command::new(env!("CARGO_BIN_EXE_sluice"))
        .envs([("SLUICE_SIM_PROCESS", "engine"), ("SLUICE_SIM_PARENT", "0"), ("SLUICE_SIM_ORPHAN", "0")])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("it ends", || engine.try_wait().unwrap());
}

#[test]
fn a_killed_engine_ends_the_server() {
    let mut sim = Sim::start(&["--tensor-parallel-size", "2"]);
    let engine = children(sim.child.id())[0].0;
    let workers: Vec<_> = until("workers", || Some(children(engine as u32)).filter(|found| found.len() == 2));
    assert!(workers.iter().all(|(_, name)| name.starts_with("VLLM::Worker_TP")), "{workers:?}");
    kill(Pid::from_raw(engine), Signal::SIGKILL).unwrap();
    until("it says so", || sim.get("/health").starts_with("HTTP/1.1 503").then_some(()));
    assert_eq!(sim.exit_code(), Some(0));
    until("the workers are gone", || workers.iter().all(|(pid, _)| has_ended(*pid)).then_some(()));
}

#[test]
fn too_much_load_crashes_the_engine_when_memory_is_short() {
    let mut sim = Sim::start(&["--sim-fault", "oom=2"]);
    std::thread::scope(|scope| {
        let body = r#"{"prompt":"x","n":4,"max_tokens":2000,"ignore_eos":true}"#;
        scope.spawn(|| sim.post("/v1/completions", body).unwrap_or_default());
    });
    assert_eq!(sim.exit_code(), Some(0));
    assert!(sim.log().contains("torch.OutOfMemoryError: CUDA out of memory."));
}
