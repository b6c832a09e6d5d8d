//! Engines that behave badly, as shell scripts: what is started can always be seen, stopped and diagnosed.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::{Instant, sleep, timeout};

use super::*;
use sluice_core::vllm::failure::Retryable;

/// Long enough for a loaded machine; only a failing test waits that long.
const PATIENCE: Duration = Duration::from_secs(30);

struct Rig {
    folder: tempfile::TempDir,
    driver: ProcessDriver,
    _ends: Ends,
}

/// Ends what was started when its test fails before it has: the marks begin with the folder of the test.
struct Ends(PathBuf);

impl Drop for Ends {
    fn drop(&mut self) {
        let prefix = self.0.display().to_string();
        let marked = |row: &Row| table::mark_of(row.pid).is_some_and(|mark| mark.starts_with(&prefix));
        for row in table::all().into_iter().filter(|row| row.lives() && marked(row)) {
            let _ = kill(Pid::from_raw(row.pid), Signal::SIGKILL);
        }
    }
}

impl Rig {
    /// A driver whose engine is a script for `sh`. `$DIR` is its folder.
    fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("engine");
        fs::write(&program, format!("#!/bin/bash\nDIR={}\n{script}\n", folder.path().display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let driver = Self::driver(&folder);
        let _ends = Ends(folder.path().to_owned());
        Self { folder, driver, _ends }
    }

    fn driver(folder: &tempfile::TempDir) -> ProcessDriver {
        let launch = Launch {
            command: vec![folder.path().join("engine").display().to_string()],
            port: free_port(),
            gpu: Vec::new(),
            env: BTreeMap::new(),
            args: BTreeMap::new(),
        };
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

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "still not: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

fn lives(pid: i32) -> bool {
    Row::of(pid).is_some_and(|row| row.lives())
}

fn rules(grace: Duration) -> StopRules {
    StopRules { grace, kill: PATIENCE, memory: Duration::ZERO }
}

/// Sleeps in the foreground without leaving a child behind when the shell is told to end.
const SERVE: &str = "while :; do sleep 0.05; done";

#[tokio::test]
async fn an_engine_starts_says_something_and_stops() {
    let rig =
        Rig::new(&format!("trap 'echo bye; exit 0' TERM\necho $$ >$DIR/pid; echo \"$@\"; env >$DIR/env\n{SERVE}"));
    assert_eq!(rig.driver.status().await, EngineStatus::Absent);
    let pid = rig.start().await;
    assert_eq!(rig.number("pid").await, pid);
    assert_eq!(rig.driver.status().await, EngineStatus::Running);
    let row = Row::of(pid).unwrap();
    assert_eq!((row.session, row.group), (pid, pid), "a session and a group of its own");
    let said = until("its arguments", || rig.driver.tail(1).pop()).await;
    assert_eq!(said, format!("--host 127.0.0.1 --port {}", rig.driver.launch.port));
    let stopped = rig.driver.stop(rules(PATIENCE)).await.unwrap();
    assert_eq!(stopped, Stopped { exit: Some(Exit::Code(0)), forced: false, orphans: 0, memory_back: None });
    assert_eq!((rig.driver.status().await, Row::of(pid)), (EngineStatus::Absent, None));
    assert_eq!(rig.driver.tail(1), ["bye"]);
    assert!(rig.driver.stop(rules(PATIENCE)).await.is_ok(), "a stop may be repeated");
}

#[tokio::test]
async fn one_engine_at_a_time() {
    let rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let pid = rig.start().await;
    let second = rig.driver.start(&EngineSettings::default()).await.unwrap_err();
    assert!(second.to_string().contains(&format!("pid {pid}")), "{second}");
    rig.driver.stop(rules(PATIENCE)).await.unwrap();
}

#[tokio::test]
async fn an_engine_that_ignores_sigterm_is_killed_with_all_it_keeps_starting() {
    let rig = Rig::new("trap '' TERM\necho $$ >$DIR/pid\nwhile :; do sleep 600 & sleep 0.02; done");
    let pid = rig.start().await;
    rig.number("pid").await;
    let stopped = rig.driver.stop(rules(Duration::from_millis(100))).await.unwrap();
    assert_eq!((stopped.exit, stopped.forced), (Some(Exit::Signal(9)), true));
    let left: Vec<Row> = table::all().into_iter().filter(|row| row.session == pid && row.lives()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn children_that_outlive_a_killed_leader_go_and_a_stranger_of_the_same_name_stays() {
    // One child in the session, one in a session of its own, and one there that has also dropped its environment.
    let rig = Rig::new(
        "sh -c 'echo $$ >$DIR/near; exec sleep 600' & setsid sh -c 'echo $$ >$DIR/far; exec sleep 600' &\n\
         setsid env -i DIR=$DIR sh -c 'echo $$ >$DIR/bare; exec sleep 600' &\nwait"
            .replace("$DIR/", "'$DIR'/")
            .as_str(),
    );
    let mut stranger = Command::new("bash")
        .args(["-c", "exec -a 'vllm serve meta-llama/x' sleep 600"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = rig.start().await;
    let children = [rig.number("near").await, rig.number("far").await, rig.number("bare").await];
    assert!(rig.driver.monitor().unwrap().members().len() >= 4);
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    assert_eq!(timeout(PATIENCE, rig.driver.wait_for_exit()).await.unwrap(), Exit::Signal(9));
    assert_eq!(rig.driver.status().await, EngineStatus::Ended(Exit::Signal(9)));
    assert!(children.iter().all(|child| lives(*child)), "orphans");
    let stopped = rig.driver.stop(rules(PATIENCE)).await.unwrap();
    assert_eq!((stopped.exit, stopped.orphans), (Some(Exit::Signal(9)), 3));
    assert_eq!(children.map(lives), [false; 3]);
    assert!(lives(i32::try_from(stranger.id()).unwrap()));
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[tokio::test]
async fn an_end_at_once_is_seen_and_diagnosed() {
    let rig = Rig::new("echo 'vllm: error: unrecognized arguments: --disable-log-requests' >&2; exit 2");
    rig.start().await;
    let exit = timeout(PATIENCE, rig.driver.wait_for_exit()).await.unwrap();
    assert_eq!(exit, Exit::Code(2));
    let failure = rig.driver.diagnose(Some(exit));
    assert_eq!((failure.class, failure.retry()), (FailureClass::UnknownFlag, Retryable::Never), "{failure}");
    rig.driver.stop(rules(PATIENCE)).await.unwrap();
}

#[tokio::test]
async fn a_taken_port_is_told_before_anything_starts() {
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
async fn a_program_that_is_not_there_is_told_before_anything_starts() {
    let mut rig = Rig::new("");
    rig.driver.launch.command = vec!["vllm-that-is-not-installed".to_owned(), "serve".to_owned()];
    let failure = rig.driver.check(&EngineSettings::default()).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::ProgramMissing);
    assert_eq!(rig.driver.start(&EngineSettings::default()).await.unwrap_err(), failure);
}

#[tokio::test]
async fn another_driver_of_the_same_backend_finds_what_was_left_and_takes_it_over() {
    let rig = Rig::new(&format!("trap 'exit 7' TERM\necho one; echo $$ >$DIR/pid\n{SERVE}"));
    let trace = rig.driver.start(&EngineSettings::default()).await.unwrap();
    let pid = rig.number("pid").await;
    let Rig { folder, driver, _ends } = rig;
    drop(driver);
    assert!(lives(pid), "an engine outlives its driver");
    let second = Rig::driver(&folder);
    assert_eq!(second.find_running().await, Some(trace.clone()));
    assert!(second.adopt(&trace).await.unwrap());
    assert_eq!(second.status().await, EngineStatus::Running);
    assert_eq!(second.tail(5), ["one"]);
    assert_eq!(second.stop(rules(PATIENCE)).await.unwrap().exit, Some(Exit::Code(7)));
    assert_eq!(second.find_running().await, None);
    assert!(!second.adopt(&trace).await.unwrap(), "gone");
}

#[tokio::test]
async fn a_trace_of_another_process_with_the_same_number_is_not_believed() {
    let rig = Rig::new("");
    let own = Row::of(i32::try_from(std::process::id()).unwrap()).unwrap();
    let trace =
        |started, boot| EngineIdentity::Process { pid: own.pid, started, boot, mark: "x".to_owned(), baseline: None };
    assert!(!rig.driver.adopt(&trace(own.started + 1, table::boot())).await.unwrap());
    assert!(!rig.driver.adopt(&trace(own.started, "another boot".to_owned())).await.unwrap());
    assert!(rig.driver.adopt(&EngineIdentity::External).await.is_err());
}

#[tokio::test]
async fn orphans_whose_leader_is_gone_are_taken_over_to_be_stopped() {
    let rig = Rig::new("sh -c 'echo $$ >'$DIR'/child; exec sleep 600' &\nwait");
    let trace = rig.driver.start(&EngineSettings::default()).await.unwrap();
    let child = rig.number("child").await;
    let Rig { folder, driver, _ends } = rig;
    let leader = driver.monitor().unwrap().trace.leader;
    kill(Pid::from_raw(leader), Signal::SIGKILL).unwrap();
    timeout(PATIENCE, driver.wait_for_exit()).await.unwrap();
    driver.monitor().unwrap().reap_leader();
    drop(driver);
    let second = Rig::driver(&folder);
    assert!(second.adopt(&trace).await.unwrap());
    assert_eq!(second.status().await, EngineStatus::Ended(Exit::Unseen));
    second.stop(rules(PATIENCE)).await.unwrap();
    assert!(!lives(child));
}

/// A program in place of `nvidia-smi`, and the file of what it says.
fn smi(rig: &Rig) -> (PathBuf, PathBuf) {
    let (smi, used) = (rig.folder.path().join("smi"), rig.folder.path().join("used"));
    fs::write(&smi, format!("#!/bin/sh\ncat {}\n", used.display())).unwrap();
    fs::set_permissions(&smi, fs::Permissions::from_mode(0o755)).unwrap();
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
    let failure = rig.driver.stop(rules(PATIENCE)).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::MemoryKept);
    assert!(failure.to_string().contains("90000 MiB in use, 100 before"), "{failure}");
    assert!(!lives(pid));
    assert!(rig.driver.start(&EngineSettings::default()).await.is_err(), "nothing new while memory is taken");
    fs::write(&used, "77, 300\n").unwrap();
    assert_eq!(rig.driver.stop(rules(PATIENCE)).await.unwrap().memory_back, Some(true));
    assert_eq!(rig.driver.status().await, EngineStatus::Absent);
}

#[tokio::test]
async fn memory_that_stays_taken_stops_the_first_stop_only() {
    let mut rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let (smi, used) = smi(&rig);
    fs::write(&used, "78, 100\n").unwrap();
    rig.driver.devices = Devices::new(smi, vec![78]);
    rig.start().await;
    fs::write(&used, "78, 90000\n").unwrap();
    assert_eq!(rig.driver.stop(rules(PATIENCE)).await.unwrap_err().class, FailureClass::MemoryKept);
    assert_eq!(rig.driver.stop(rules(PATIENCE)).await.unwrap().memory_back, Some(false));
    rig.start().await;
    assert_eq!(rig.driver.stop(rules(PATIENCE)).await.unwrap().memory_back, Some(true), "a new baseline");
}

#[tokio::test]
async fn memory_on_devices_that_may_be_anybodys_forbids_nothing() {
    let mut rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let (smi, used) = smi(&rig);
    fs::write(&used, "79, 100\n").unwrap();
    rig.driver.devices = Devices::new(smi, Vec::new());
    rig.start().await;
    fs::write(&used, "79, 90000\n").unwrap();
    let back = rig.driver.stop(rules(PATIENCE)).await.unwrap().memory_back;
    // Engines of other tests count too, when devices are not known: then nothing can be told.
    assert_ne!(back, Some(true));
    assert_eq!(rig.driver.status().await, EngineStatus::Absent);
}

#[tokio::test]
async fn an_engine_that_is_taken_over_is_waited_for_with_its_memory() {
    let mut rig = Rig::new(&format!("trap 'exit 0' TERM\n{SERVE}"));
    let (smi, used) = smi(&rig);
    fs::write(&used, "76, 100\n").unwrap();
    rig.driver.devices = Devices::new(&smi, vec![76]);
    let trace = rig.driver.start(&EngineSettings::default()).await.unwrap();
    let written = serde_json::to_string(&trace).unwrap();
    assert_eq!(serde_json::from_str::<EngineIdentity>(&written).unwrap(), trace, "{written}");
    let Rig { folder, driver, _ends } = rig;
    drop(driver);
    let mut second = Rig::driver(&folder);
    second.devices = Devices::new(&smi, vec![76]);
    assert!(second.adopt(&trace).await.unwrap());
    fs::write(&used, "76, 90000\n").unwrap();
    assert_eq!(second.stop(rules(PATIENCE)).await.unwrap_err().class, FailureClass::MemoryKept);
    let old = r#"{"by": "process", "pid": 1, "started": 2, "boot": "b", "mark": "m"}"#;
    assert!(matches!(serde_json::from_str(old).unwrap(), EngineIdentity::Process { baseline: None, .. }));
}
