//! Engines that behave badly, as shell scripts.
//!
//! The driver must find, stop and diagnose every engine that it started.

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::{Instant, sleep, timeout};

use std::path::PathBuf;

#[path = "../../../../tests/common/ports.rs"]
mod ports;

use super::*;
use crate::test_programs::write_program;
use ports::free_port;
use sluice_config::ArgValue;
use sluice_core::vllm::failure::Retryable;

/// Long enough for a loaded machine; only a failing test waits that long.
const DEADLINE: Duration = Duration::from_secs(120);

struct Rig {
    folder: tempfile::TempDir,
    driver: ProcessDriver,
    _cleanup: KillOnDrop,
}

/// Kills processes that a failed test left, which are found because their marks begin with the
/// test's folder.
struct KillOnDrop(PathBuf);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let prefix = self.0.display().to_string();
        let marked = |row: &ProcessEntry| table::mark_of(row.pid).is_some_and(|mark| mark.starts_with(&prefix));
        for row in table::all().into_iter().filter(|row| row.is_alive() && marked(row)) {
            let _ = kill(Pid::from_raw(row.pid), Signal::SIGKILL);
        }
    }
}

impl Rig {
    /// A driver whose engine is a script for `bash`, with `$DIR` as the folder.
    fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("engine");
        write_program(&program, &format!("#!/bin/bash\nDIR={}\n{script}\n", folder.path().display()));
        let driver = Self::driver(&folder);
        let _cleanup = KillOnDrop(folder.path().to_owned());
        Self { folder, driver, _cleanup }
    }

    fn driver(folder: &tempfile::TempDir) -> ProcessDriver {
        let program = folder.path().join("engine").display().to_string();
        let launch = Launch::of(vec![program].into(), free_port());
        let mut driver = ProcessDriver::new("short/gpu0", launch, &folder.path().join("state"));
        driver.devices = Devices::new("/nonexistent/nvidia-smi", Vec::new());
        driver
    }

    async fn start(&self) -> i32 {
        let EngineIdentity::Process { pid, .. } = self.driver.start(&EngineSettings::default()).await.unwrap() else {
            panic!()
        };
        pid
    }

    /// The number that the script writes into a file.
    async fn number(&self, name: &str) -> i32 {
        let path = self.folder.path().join(name);
        until(name, || fs::read_to_string(&path).ok()?.strip_suffix('\n')?.parse().ok()).await
    }
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "still not: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

fn is_alive(pid: i32) -> bool {
    ProcessEntry::read(pid).is_some_and(|row| row.is_alive())
}

fn rules(grace: Duration) -> StopRules {
    StopRules { grace, kill: DEADLINE, port: DEADLINE, memory: Duration::ZERO }
}

/// Sleeps without leaving a child behind when the shell gets SIGTERM.
const SERVE: &str = "while :; do sleep 0.05; done";

#[tokio::test]
async fn what_an_engine_prints_of_its_secrets_is_not_quoted() {
    let mut rig = Rig::new("echo \"RuntimeError: no access for $HF_TOKEN with $1\"; exit 3");
    rig.driver.launch.env.insert("HF_TOKEN".to_owned(), "S3cret-token".to_owned().into());
    let key = ArgValue::Secret(vec!["S3cret-key".to_owned().into()]);
    rig.driver.launch.args.insert("api-key".to_owned(), key);
    let mut driver = ProcessDriver::new("short/gpu0", rig.driver.launch.clone(), &rig.folder.path().join("state"));
    driver.devices = Devices::new("/nonexistent/nvidia-smi", Vec::new());
    rig.driver = driver;
    rig.start().await;
    let exit = rig.driver.wait_for_exit().await;
    let said = format!("{} {:?} {:?}", rig.driver.diagnose(Some(exit)), rig.driver.tail(9), rig.driver);
    assert!(said.contains("no access for ******** with --api-key=********") && !said.contains("S3cret"), "{said}");
    rig.driver.stop(StopRules::default()).await.unwrap();
}

#[tokio::test]
async fn an_engine_starts_writes_its_log_and_stops() {
    let rig =
        Rig::new(&format!("trap 'echo bye; exit 0' TERM\necho $$ >$DIR/pid; echo \"$@\"; env >$DIR/env\n{SERVE}"));
    assert_eq!(rig.driver.status().await, EngineStatus::Absent);
    let pid = rig.start().await;
    assert_eq!(rig.number("pid").await, pid);
    assert_eq!(rig.driver.status().await, EngineStatus::Running);
    let row = ProcessEntry::read(pid).unwrap();
    assert_eq!((row.session, row.group), (pid, pid), "a session and a group of its own");
    let line = until("its arguments", || rig.driver.tail(1).pop()).await;
    assert_eq!(line, format!("--host 127.0.0.1 --port {}", rig.driver.launch.port));
    let stopped = rig.driver.stop(rules(DEADLINE)).await.unwrap();
    assert_eq!(stopped, Stopped { exit: Some(Exit::Code(0)), forced: false, orphans: 0, memory_back: None });
    assert_eq!((rig.driver.status().await, ProcessEntry::read(pid)), (EngineStatus::Absent, None));
    assert_eq!(rig.driver.tail(1), ["bye"]);
    assert!(rig.driver.stop(rules(DEADLINE)).await.is_ok(), "a stop may be repeated");
}

#[tokio::test]
async fn one_engine_at_a_time() {
    let rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let pid = rig.start().await;
    let second = rig.driver.start(&EngineSettings::default()).await.unwrap_err();
    assert!(second.to_string().contains(&format!("pid {pid}")), "{second}");
    rig.driver.stop(rules(DEADLINE)).await.unwrap();
}

#[tokio::test]
async fn an_engine_that_ignores_sigterm_is_killed_with_all_it_keeps_starting() {
    let rig = Rig::new("trap '' TERM\necho $$ >$DIR/pid\nwhile :; do sleep 600 & sleep 0.02; done");
    let pid = rig.start().await;
    rig.number("pid").await;
    let stopped = rig.driver.stop(rules(Duration::from_millis(100))).await.unwrap();
    assert_eq!((stopped.exit, stopped.forced), (Some(Exit::Signal(9)), true));
    let left: Vec<ProcessEntry> = table::all().into_iter().filter(|row| row.session == pid && row.is_alive()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A `python3` program that listens on port `$1`, ignores SIGTERM and ends the first thread; the
/// second runs `$2`. In the process table it looks like a killed process whose last thread has not
/// ended.
const HALF_ENDED: &str = r#"
import ctypes, os, platform, signal, socket, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=exec, args=(sys.argv[2], globals())).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"#;

#[tokio::test]
async fn an_engine_whose_first_thread_has_ended_still_runs_and_is_killed() {
    let rig = Rig::new(&format!("exec python3 -c '{HALF_ENDED}' \"$4\" 'time.sleep(600)'"));
    let (pid, port) = (rig.start().await, rig.driver.launch.port);
    let listens = || table::port_owner(port, &HashSet::new()) != PortOwner::Free;
    let half_ended = || ProcessEntry::read(pid).is_some_and(|entry| entry.state == 'Z');
    until("its first thread has ended", || (half_ended() && listens()).then_some(())).await;
    assert!(is_alive(pid) && rig.driver.status().await == EngineStatus::Running);
    let stopped = rig.driver.stop(rules(Duration::from_millis(100))).await.unwrap();
    assert_eq!((stopped.exit, stopped.forced), (Some(Exit::Signal(9)), true));
    assert!(!listens(), "a start would find the port taken");
}

#[tokio::test]
async fn a_stop_waits_until_a_port_that_no_process_shows_is_free() {
    let rig = Rig::new(&format!("echo $$ >$DIR/pid\n{SERVE}"));
    let (pid, port) = (rig.start().await, rig.driver.launch.port);
    rig.number("pid").await;
    // This process keeps the port a moment longer than the engine lives.
    let then =
        format!("while ') Z ' not in open('/proc/{pid}/stat').read(): time.sleep(0.01)\ntime.sleep(0.3)\nos._exit(0)");
    let mut hidden = Command::new("python3").args(["-c", HALF_ENDED, &port.to_string(), &then]).spawn().unwrap();
    until("the port is held", || table::is_held_in_hiding(port).then_some(())).await;
    rig.driver.stop(rules(DEADLINE)).await.unwrap();
    assert_eq!(table::port_owner(port, &HashSet::new()), PortOwner::Free);
    hidden.wait().unwrap();
}

#[tokio::test]
async fn children_that_outlive_a_killed_leader_are_stopped_and_an_unrelated_process_of_the_same_name_is_not() {
    // One child is in the session, one in a separate session, and one in a separate session without
    // the environment.
    let rig = Rig::new(
        "sh -c 'echo $$ >$DIR/near; exec sleep 600' & setsid sh -c 'echo $$ >$DIR/far; exec sleep 600' &\n\
         setsid env -i DIR=$DIR sh -c 'echo $$ >$DIR/bare; exec sleep 600' &\nwait"
            .replace("$DIR/", "'$DIR'/")
            .as_str(),
    );
    let mut unrelated = Command::new("bash")
        .args(["-c", "exec -a 'vllm serve meta-llama/x' sleep 600"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = rig.start().await;
    let children = [rig.number("near").await, rig.number("far").await, rig.number("bare").await];
    assert!(rig.driver.monitor().unwrap().members().len() >= 4);
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    assert_eq!(timeout(DEADLINE, rig.driver.wait_for_exit()).await.unwrap(), Exit::Signal(9));
    assert_eq!(rig.driver.status().await, EngineStatus::Ended(Exit::Signal(9)));
    assert!(children.iter().all(|child| is_alive(*child)), "orphans");
    let stopped = rig.driver.stop(rules(DEADLINE)).await.unwrap();
    assert_eq!((stopped.exit, stopped.orphans), (Some(Exit::Signal(9)), 3));
    assert_eq!(children.map(is_alive), [false; 3]);
    assert!(is_alive(i32::try_from(unrelated.id()).unwrap()));
    unrelated.kill().unwrap();
    unrelated.wait().unwrap();
}

#[tokio::test]
async fn an_end_at_once_is_seen_and_diagnosed() {
    let rig = Rig::new("echo 'vllm: error: unrecognized arguments: --disable-log-requests' >&2; exit 2");
    rig.start().await;
    let exit = timeout(DEADLINE, rig.driver.wait_for_exit()).await.unwrap();
    assert_eq!(exit, Exit::Code(2));
    let failure = rig.driver.diagnose(Some(exit));
    assert_eq!((failure.class, failure.retry()), (FailureClass::UnknownFlag, Retryable::Never), "{failure}");
    rig.driver.stop(rules(DEADLINE)).await.unwrap();
}

#[tokio::test]
async fn a_taken_port_is_reported_before_a_process_starts() {
    let rig = Rig::new("touch $DIR/started");
    let _holder = TcpListener::bind(("127.0.0.1", rig.driver.launch.port)).unwrap();
    let failure = rig.driver.start(&EngineSettings::default()).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::PortInUse);
    assert!(failure.to_string().contains(&format!("pid {}", std::process::id())), "{failure}");
    assert_eq!(rig.driver.status().await, EngineStatus::Absent);
    assert!(matches!(rig.driver.port_owner().await, PortOwner::Other(_)));
    assert!(!rig.folder.path().join("started").exists());
}

#[tokio::test]
async fn a_missing_program_is_reported_before_a_process_starts() {
    let mut rig = Rig::new("");
    rig.driver.launch.command = vec!["vllm-that-is-not-installed".to_owned(), "serve".to_owned()].into();
    let failure = rig.driver.check(&EngineSettings::default()).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::ProgramMissing);
    assert_eq!(rig.driver.start(&EngineSettings::default()).await.unwrap_err(), failure);
}

#[tokio::test]
async fn another_driver_of_the_same_backend_finds_and_adopts_an_engine() {
    let rig = Rig::new(&format!("trap 'exit 7' TERM\necho one; echo $$ >$DIR/pid\n{SERVE}"));
    let trace = rig.driver.start(&EngineSettings::default()).await.unwrap();
    let pid = rig.number("pid").await;
    let Rig { folder, driver, _cleanup } = rig;
    drop(driver);
    assert!(is_alive(pid), "an engine outlives its driver");
    let second = Rig::driver(&folder);
    let EngineIdentity::Process { pid, started, boot, mark, baseline, port: Some(_) } = trace.clone() else { panic!() };
    let without_port = EngineIdentity::Process { pid, started, boot, mark, baseline, port: None };
    assert_eq!(second.find_running(None).await, Some(without_port), "no file says where it listens");
    assert_eq!(second.find_running(Some(&trace)).await, None, "there is no other");
    assert!(second.adopt(&trace).await.unwrap());
    assert_eq!(second.status().await, EngineStatus::Running);
    assert_eq!(second.tail(5), ["one"]);
    assert_eq!(second.stop(rules(DEADLINE)).await.unwrap().exit, Some(Exit::Code(7)));
    assert_eq!(second.find_running(None).await, None);
    assert!(!second.adopt(&trace).await.unwrap(), "gone");
}

#[tokio::test]
async fn an_identity_whose_process_id_was_reused_is_not_adopted() {
    let rig = Rig::new("");
    let own = ProcessEntry::read(i32::try_from(std::process::id()).unwrap()).unwrap();
    let trace = |started, boot| EngineIdentity::Process {
        pid: own.pid,
        started,
        boot,
        mark: "x".to_owned(),
        baseline: None,
        port: None,
    };
    assert!(!rig.driver.adopt(&trace(own.started + 1, table::boot_id())).await.unwrap());
    assert!(!rig.driver.adopt(&trace(own.started, "another boot".to_owned())).await.unwrap());
    assert!(rig.driver.adopt(&EngineIdentity::External).await.is_err());
}

struct Foreign(std::process::Child);

impl Foreign {
    fn start(mark: Option<&str>) -> Self {
        let mut command = Command::new("sleep");
        command.arg("600").stdout(Stdio::null()).envs(mark.map(|mark| (table::MARK, mark)));
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    /// The identity of this process, as a journal would have it.
    async fn identity(&self, mark: &str) -> EngineIdentity {
        // A program that begins gets its name a moment before its environment.
        let has_environment = || {
            let environment = procfs::process::Process::new(self.pid()).and_then(|process| process.environ());
            environment.is_ok_and(|environment| !environment.is_empty())
        };
        let runs = || ProcessEntry::read(self.pid()).filter(|row| row.name == "sleep" && has_environment());
        let started = until("it runs", runs).await.started;
        EngineIdentity::Process {
            pid: self.pid(),
            started,
            boot: table::boot_id(),
            mark: mark.to_owned(),
            baseline: None,
            port: None,
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_forged_journal_neither_adopts_nor_ends_a_process_that_does_not_carry_the_mark() {
    let rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let EngineIdentity::Process { mark, .. } = rig.driver.start(&EngineSettings::default()).await.unwrap() else {
        panic!()
    };
    let second = Rig::driver(&rig.folder);
    // The identity is correct in all points, but the process is no engine. One of the marks even
    // belongs to a running engine.
    let plain = Foreign::start(None);
    for forged in [&mark, "", "x", &format!("{}/state#short/gpu0#1", rig.folder.path().display())] {
        assert!(!second.adopt(&plain.identity(forged).await).await.unwrap(), "{forged}");
    }
    // This mark has the right form, but not the folder's token.
    let guessed = format!("{}/state#short/gpu0#{}.1", rig.folder.path().display(), "0".repeat(16));
    let marked = Foreign::start(Some(&guessed));
    assert!(!second.adopt(&marked.identity(&guessed).await).await.unwrap());
    assert_eq!(second.status().await, EngineStatus::Absent);
    second.stop(rules(DEADLINE)).await.unwrap();
    rig.driver.stop(rules(DEADLINE)).await.unwrap();
    assert_eq!(second.find_running(None).await, None, "a mark without the token is not found");
    assert!(is_alive(plain.pid()) && is_alive(marked.pid()));
}

#[tokio::test]
async fn an_engine_of_an_earlier_version_is_taken_over_by_the_journal_that_describes_it() {
    let rig = Rig::new("");
    let earlier = format!("{}/state#short/gpu0#18c0ffee", rig.folder.path().display());
    let engine = Foreign::start(Some(&earlier));
    let identity = engine.identity(&earlier).await;
    assert_eq!(rig.driver.find_running(None).await, None);
    assert!(rig.driver.adopt(&identity).await.unwrap());
    rig.driver.stop(rules(DEADLINE)).await.unwrap();
    assert!(!is_alive(engine.pid()));
}

#[tokio::test]
async fn a_process_of_another_user_is_not_adopted_whatever_it_carries() {
    if sluice_config::owner::own_user() != 0 {
        return;
    }
    let rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let EngineIdentity::Process { mark, .. } = rig.driver.start(&EngineSettings::default()).await.unwrap() else {
        panic!()
    };
    rig.driver.stop(rules(DEADLINE)).await.unwrap();
    let mut other = Command::new("sleep");
    std::os::unix::process::CommandExt::uid(&mut other, 12_345);
    let other = Foreign(other.arg("600").env(table::MARK, &mark).stdout(Stdio::null()).spawn().unwrap());
    other.identity(&mark).await;
    assert_eq!(rig.driver.find_running(None).await, None);
    assert!(is_alive(other.pid()));
}

#[tokio::test]
async fn orphans_whose_leader_is_gone_are_adopted_and_stopped() {
    let rig = Rig::new("sh -c 'echo $$ >'$DIR'/child; exec sleep 600' &\nwait");
    let trace = rig.driver.start(&EngineSettings::default()).await.unwrap();
    let child = rig.number("child").await;
    let Rig { folder, driver, _cleanup } = rig;
    let leader = driver.monitor().unwrap().identity.leader;
    kill(Pid::from_raw(leader), Signal::SIGKILL).unwrap();
    timeout(DEADLINE, driver.wait_for_exit()).await.unwrap();
    driver.monitor().unwrap().reap_leader();
    drop(driver);
    let second = Rig::driver(&folder);
    assert!(second.adopt(&trace).await.unwrap());
    assert_eq!(second.status().await, EngineStatus::Ended(Exit::Unseen));
    second.stop(rules(DEADLINE)).await.unwrap();
    assert!(!is_alive(child));
}

/// A replacement for `nvidia-smi`, and the file that it prints.
fn smi(rig: &Rig) -> (PathBuf, PathBuf) {
    let (smi, used) = (rig.folder.path().join("smi"), rig.folder.path().join("used"));
    write_program(&smi, &format!("#!/bin/sh\ncat {}\n", used.display()));
    (smi, used)
}

#[tokio::test]
async fn memory_that_does_not_come_back_is_an_error_until_it_does() {
    let mut rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let (smi, used) = smi(&rig);
    fs::write(&used, "77, 100\n").unwrap();
    rig.driver.devices = Devices::new(smi, vec![77]);
    let pid = rig.start().await;
    fs::write(&used, "77, 90000\n").unwrap();
    let failure = rig.driver.stop(rules(DEADLINE)).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::MemoryKept);
    assert!(failure.to_string().contains("90000 MiB in use, 100 before"), "{failure}");
    assert!(!is_alive(pid));
    assert!(rig.driver.start(&EngineSettings::default()).await.is_err(), "no start while memory is in use");
    fs::write(&used, "77, 300\n").unwrap();
    assert_eq!(rig.driver.stop(rules(DEADLINE)).await.unwrap().memory_back, Some(true));
    assert_eq!(rig.driver.status().await, EngineStatus::Absent);
}

#[tokio::test]
async fn memory_that_stays_in_use_fails_the_first_stop_only() {
    let mut rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let (smi, used) = smi(&rig);
    fs::write(&used, "78, 100\n").unwrap();
    rig.driver.devices = Devices::new(smi, vec![78]);
    rig.start().await;
    fs::write(&used, "78, 90000\n").unwrap();
    assert_eq!(rig.driver.stop(rules(DEADLINE)).await.unwrap_err().class, FailureClass::MemoryKept);
    assert_eq!(rig.driver.stop(rules(DEADLINE)).await.unwrap().memory_back, Some(false));
    rig.start().await;
    assert_eq!(rig.driver.stop(rules(DEADLINE)).await.unwrap().memory_back, Some(true), "a new baseline");
}

#[tokio::test]
async fn memory_on_unknown_devices_fails_no_stop() {
    let mut rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let (smi, used) = smi(&rig);
    fs::write(&used, "79, 100\n").unwrap();
    rig.driver.devices = Devices::new(smi, Vec::new());
    rig.start().await;
    fs::write(&used, "79, 90000\n").unwrap();
    let back = rig.driver.stop(rules(DEADLINE)).await.unwrap().memory_back;
    // The engine's devices are unknown, so engines of other tests count, and the result may be
    // unknown.
    assert_ne!(back, Some(true));
    assert_eq!(rig.driver.status().await, EngineStatus::Absent);
}

#[tokio::test]
async fn the_memory_of_an_adopted_engine_is_waited_for() {
    let mut rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let (smi, used) = smi(&rig);
    fs::write(&used, "76, 100\n").unwrap();
    rig.driver.devices = Devices::new(&smi, vec![76]);
    let trace = rig.driver.start(&EngineSettings::default()).await.unwrap();
    let written = serde_json::to_string(&trace).unwrap();
    assert_eq!(serde_json::from_str::<EngineIdentity>(&written).unwrap(), trace, "{written}");
    let Rig { folder, driver, _cleanup } = rig;
    drop(driver);
    let mut second = Rig::driver(&folder);
    second.devices = Devices::new(&smi, vec![76]);
    assert!(second.adopt(&trace).await.unwrap());
    fs::write(&used, "76, 90000\n").unwrap();
    assert_eq!(second.stop(rules(DEADLINE)).await.unwrap_err().class, FailureClass::MemoryKept);
    let old = r#"{"by": "process", "pid": 1, "started": 2, "boot": "b", "mark": "m"}"#;
    assert!(matches!(serde_json::from_str(old).unwrap(), EngineIdentity::Process { baseline: None, .. }));
}

#[tokio::test]
async fn a_second_engine_runs_next_to_the_first_and_each_is_found_and_stopped_alone() {
    let rig = Rig::new(SERVE);
    let first = rig.driver.start(&EngineSettings::default()).await.unwrap();
    let second = rig.driver.beside(free_port()).unwrap();
    assert_ne!((second.port(), second.log_path()), (rig.driver.port(), rig.driver.log_path()));
    let identity = second.start(&EngineSettings::default()).await.unwrap();
    assert!(matches!(identity, EngineIdentity::Process { port, .. } if port == second.port()));
    let _ = second.stop(rules(DEADLINE)).await.unwrap();
    assert_eq!(rig.driver.status().await, EngineStatus::Running);
    assert_eq!(second.find_running(Some(&first)).await, None);
    assert_eq!(second.beside(1).unwrap().log_path(), rig.driver.log_path(), "of two logs in turn");
}
