//! The driver of an engine that commands of the user's start and stop: systemd, docker, ssh, kubectl, anything.
//!
//! Three commands, each a list of words, no shell:
//! - `start` brings the engine up and returns with status 0. It must not stay in the foreground: `docker run -d`,
//!   `systemctl start`;
//! - `stop` takes it down and returns with status 0 when it is down;
//! - `status` (may be missing) returns 0 while the engine runs, anything else when it does not.
//!
//! Settings reach `start` in two ways. `{args}` as a word of its own becomes the flags, one word each; inside a longer word it
//! becomes the flags quoted for a shell, as `ssh HOST "vllm-up {args}"` needs. And every command finds `SLUICE_BACKEND`,
//! `SLUICE_ARGS` (quoted for a shell) and `SLUICE_ARGS_JSON` in its environment.
//!
//! The status command may fail for reasons of its own (ssh, a daemon that restarts), so an end is believed when it said so
//! [`MISSES`] times in a row, [`STATUS_EVERY`] apart.
//!
//! Bounds: a command gets `control.timeout`, then its process group is killed; [`OUTPUT_MAX`] bytes of its output are
//! kept. Output goes to a file, not a pipe, because a daemon that inherits a pipe would hold it open for ever.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep, timeout};

use super::process::table::{self, MARK, Row};
use crate::driver::{
    AdapterRank, Driver, DriverKind, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, Notice, PortOwner,
    StartProgress, StopRules, Stopped,
};
use crate::launch::{check_values, find_program, words_of};
use sluice_core::vllm::failure::{Exit, FailureClass, diagnose};
use sluice_core::vllm::logs::StartPhase;
use sluice_gateway::config::Control;

/// Output of a command that is kept, bytes.
const OUTPUT_MAX: usize = 64 << 10;
/// How often the status command is run while an end or readiness is waited for.
pub(crate) const STATUS_EVERY: Duration = Duration::from_secs(2);
/// How often in a row it must say that nothing runs before an end is believed.
pub(crate) const MISSES: u32 = 3;
/// What becomes the flags.
const ARGS: &str = "{args}";

/// Runs one backend's engine through commands.
#[derive(Debug)]
pub struct CommandDriver {
    name: String,
    commands: Control,
    output: PathBuf,
    /// Where in that file the words of the last start begin.
    said_from: AtomicU64,
    status_every: Duration,
    /// Whether the engine is thought to be up: started or adopted, not stopped.
    up: Mutex<bool>,
    /// Daemons that `start` left to us: they are our children since their parent ended, and reaped when they end.
    left_to_us: parking_lot::Mutex<HashSet<(i32, u64)>>,
}

impl CommandDriver {
    /// A driver for the backend called `name`, which keeps the output of its commands in `folder`. Runs nothing.
    pub fn new(name: &str, commands: Control, folder: &Path) -> Self {
        let output = folder.join(format!("{}.commands.log", name.replace('/', ".")));
        Self {
            name: name.to_owned(),
            commands,
            // What stands there already was said before this gateway.
            said_from: AtomicU64::new(length(&output)),
            output,
            status_every: STATUS_EVERY,
            up: Mutex::new(false),
            left_to_us: parking_lot::Mutex::default(),
        }
    }

    /// Runs one command to its end.
    async fn run(&self, what: &str, words: &[String], settings: &EngineSettings) -> Result<ExitStatus, EngineFailure> {
        let failed = |cause: String| {
            EngineFailure::new(FailureClass::CommandFailed, format!("{what} command of {}: {cause}", self.name))
        };
        let flags = words_of(settings);
        let quoted = flags.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ");
        let mut argv = Vec::new();
        for word in words {
            match word == ARGS {
                true => argv.extend(flags.iter().cloned()),
                false => argv.push(word.replace(ARGS, &quoted)),
            }
        }
        let program = program(&argv)?;
        let file = self.open_output().map_err(|error| failed(format!("{}: {error}", self.output.display())))?;
        let mut command = tokio::process::Command::new(program);
        command.args(&argv[1..]).env(MARK, self.mark()).env("SLUICE_BACKEND", &self.name).env("SLUICE_ARGS", &quoted);
        command.env("SLUICE_ARGS_JSON", serde_json::to_string(&settings.args).unwrap_or_default());
        let errors = file.try_clone().map_err(|error| failed(error.to_string()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0).kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| failed(format!("{}: {error}", argv[0])))?;
        let group = child.id().and_then(|id| i32::try_from(id).ok());
        let Ok(ended) = timeout(self.commands.timeout, child.wait()).await else {
            if let Some(group) = group {
                // Not reaped yet, so the number is still its own.
                let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            }
            let _ = child.wait().await;
            let limit = self.commands.timeout.as_secs();
            return Err(failed(format!("not done after {limit} s (it must return once its work is done)")));
        };
        self.look_after_daemons();
        ended.map_err(|error| failed(error.to_string()))
    }

    async fn must(&self, what: &str, words: &[String], settings: &EngineSettings) -> Result<(), EngineFailure> {
        let before = length(&self.output);
        let ended = self.run(what, words, settings).await?;
        if ended.success() {
            return Ok(());
        }
        let now = length(&self.output);
        // A file that was begun anew holds this command's words only.
        let said = if now == before { String::new() } else { self.tail(3).join(" | ") };
        let said = if said.is_empty() { "it said nothing" } else { &said };
        let cause = format!("{what} command of {} ended with {ended}: {said}", self.name);
        Err(EngineFailure::new(FailureClass::CommandFailed, cause))
    }

    /// Whether the engine runs; `None` where nothing tells.
    async fn runs(&self) -> Option<bool> {
        if self.commands.status.is_empty() {
            return None;
        }
        self.run("status", &self.commands.status, &EngineSettings::default()).await.ok().map(|ended| ended.success())
    }

    /// The file that commands write to, begun anew when it has grown past [`OUTPUT_MAX`].
    fn open_output(&self) -> io::Result<File> {
        if let Some(folder) = self.output.parent() {
            fs::create_dir_all(folder)?;
        }
        if self.output.metadata().is_ok_and(|file| file.len() > OUTPUT_MAX as u64) {
            fs::remove_file(&self.output)?;
            self.said_from.store(0, Ordering::Relaxed);
        }
        File::options().create(true).append(true).open(&self.output)
    }

    /// The last lines that commands wrote from this byte of the file on.
    fn lines_from(&self, from: u64, lines: usize) -> Vec<String> {
        let bytes = fs::read(&self.output).unwrap_or_default();
        let from = usize::try_from(from).unwrap_or(usize::MAX).max(bytes.len().saturating_sub(OUTPUT_MAX));
        let text = String::from_utf8_lossy(bytes.get(from..).unwrap_or_default());
        let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        all[all.len().saturating_sub(lines)..].iter().map(|line| (*line).to_owned()).collect()
    }

    fn mark(&self) -> String {
        format!("command#{}#{}", std::process::id(), self.name)
    }

    /// Being the reaper of orphans, we are given daemons that `start` leaves behind; those that ended are reaped here.
    fn look_after_daemons(&self) {
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let mark = self.mark();
        let mut ours = self.left_to_us.lock();
        let children: Vec<Row> = table::all().into_iter().filter(|row| row.parent == own).collect();
        ours.retain(|known| children.iter().any(|row| row.identity() == *known));
        for row in children {
            if row.lives() && table::mark_of(row.pid).is_some_and(|found| found == mark) {
                ours.insert(row.identity());
            } else if !row.lives() && ours.remove(&row.identity()) {
                let _ = waitpid(Pid::from_raw(row.pid), Some(WaitPidFlag::WNOHANG));
            }
        }
    }
}

fn length(file: &Path) -> u64 {
    file.metadata().map_or(0, |file| file.len())
}

fn program(argv: &[String]) -> Result<PathBuf, EngineFailure> {
    let word = argv.first().map(String::as_str).unwrap_or_default();
    find_program(word)
        .ok_or_else(|| EngineFailure::new(FailureClass::ProgramMissing, format!("{word}: no such program")))
}

/// A word as a shell reads it back.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,@+%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[async_trait]
impl Driver for CommandDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Command
    }

    async fn check(&self, settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure> {
        for words in [&self.commands.start, &self.commands.stop, &self.commands.status] {
            if !words.is_empty() {
                program(words)?;
            }
        }
        check_values(settings)?;
        let passes = self.commands.start.iter().any(|word| word.contains(ARGS));
        let unseen = !settings.args.is_empty() && !passes;
        let text = "the start command has no {args}: settings reach it through SLUICE_ARGS and SLUICE_ARGS_JSON only";
        Ok(unseen.then(|| Notice(text.to_owned())).into_iter().collect())
    }

    fn adapter_rank(&self, _settings: &EngineSettings) -> AdapterRank {
        AdapterRank::Unknown
    }

    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure> {
        let mut up = self.up.lock().await;
        if *up || self.runs().await == Some(true) {
            let cause = format!("the engine of {} runs already; stop it first", self.name);
            return Err(EngineFailure::new(FailureClass::PortInUse, cause));
        }
        self.said_from.store(length(&self.output), Ordering::Relaxed);
        self.must("start", &self.commands.start, settings).await?;
        *up = true;
        Ok(EngineIdentity::Command)
    }

    async fn find_running(&self) -> Option<EngineIdentity> {
        (self.runs().await == Some(true)).then_some(EngineIdentity::Command)
    }

    async fn adopt(&self, trace: &EngineIdentity) -> Result<bool, EngineFailure> {
        if *trace != EngineIdentity::Command {
            return Err(EngineFailure::new(
                FailureClass::NotOurs,
                format!("{} is run by commands, the trace says otherwise", self.name),
            ));
        }
        let mut up = self.up.lock().await;
        // Without a status command the probe has to tell.
        *up = self.runs().await.unwrap_or(true);
        Ok(*up)
    }

    async fn stop(&self, rules: StopRules) -> Result<Stopped, EngineFailure> {
        let mut up = self.up.lock().await;
        // Many a stop command fails where nothing runs (docker stop, pkill), which is what is wanted.
        if let Err(failure) = self.must("stop", &self.commands.stop, &EngineSettings::default()).await {
            let gone = self.runs().await;
            if gone == Some(true) || gone.is_none() && *up {
                return Err(failure);
            }
            tracing::info!(backend = %self.name, %failure, "the stop command failed, and nothing is known to run");
        }
        let deadline = Instant::now() + rules.grace + rules.kill;
        while self.runs().await == Some(true) {
            if Instant::now() >= deadline {
                let cause = format!("the stop command of {} returned, and its status command says it runs", self.name);
                return Err(EngineFailure::new(FailureClass::CommandFailed, cause));
            }
            sleep(Duration::from_millis(250)).await;
        }
        *up = false;
        Ok(Stopped { exit: None, forced: false, orphans: 0, memory_back: None })
    }

    async fn status(&self) -> EngineStatus {
        let up = *self.up.lock().await;
        match self.runs().await {
            None => EngineStatus::Unknown,
            Some(true) => EngineStatus::Running,
            Some(false) if up => EngineStatus::Ended(Exit::Unseen),
            Some(false) => EngineStatus::Absent,
        }
    }

    async fn wait_for_exit(&self) -> Exit {
        let mut misses = 0;
        loop {
            sleep(self.status_every).await;
            misses = match self.status().await {
                EngineStatus::Ended(exit) if misses + 1 >= MISSES => return exit,
                EngineStatus::Ended(_) => misses + 1,
                EngineStatus::Unknown if self.commands.status.is_empty() => std::future::pending().await,
                _ => 0,
            };
        }
    }

    async fn port_owner(&self) -> PortOwner {
        PortOwner::Unknown
    }

    fn tail(&self, lines: usize) -> Vec<String> {
        self.lines_from(0, lines)
    }

    fn progress(&self) -> Option<watch::Receiver<StartProgress>> {
        None
    }

    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure {
        let said = self.lines_from(self.said_from.load(Ordering::Relaxed), 200);
        EngineFailure::of(diagnose(&said, exit, StartPhase::Launching), exit, StartPhase::Launching)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use sluice_gateway::config::ArgValue;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    /// An "engine" that is a file: start makes it, stop removes it, status looks.
    fn rig(start: &str) -> (tempfile::TempDir, CommandDriver) {
        let folder = tempfile::tempdir().unwrap();
        let up = folder.path().join("up").display().to_string();
        let commands = Control {
            args: BTreeMap::new(),
            start: words(&["sh", "-c", &start.replace("UP", &up), "start", ARGS]),
            stop: words(&["rm", &up]),
            status: words(&["test", "-e", &up]),
            timeout: Duration::from_secs(30),
        };
        let driver = CommandDriver::new("short/gpu0", commands, folder.path());
        (folder, driver)
    }

    fn settings() -> EngineSettings {
        let args = [("max-num-seqs", ArgValue::Int(32)), ("served-model-name", ArgValue::Text("it's".into()))];
        EngineSettings { args: BTreeMap::from(args.map(|(name, value)| (name.to_owned(), value))) }
    }

    #[tokio::test]
    async fn commands_start_and_stop_an_engine_and_get_its_settings() {
        let (folder, driver) = rig("echo \"$@\" >UP; echo \"$SLUICE_BACKEND $SLUICE_ARGS $SLUICE_ARGS_JSON\" >>UP");
        assert_eq!(driver.status().await, EngineStatus::Absent);
        assert_eq!(driver.start(&settings()).await, Ok(EngineIdentity::Command));
        let wanted = "--max-num-seqs=32 --served-model-name=it's\nshort/gpu0 --max-num-seqs=32 \
                      '--served-model-name=it'\\''s' {\"max-num-seqs\":32,\"served-model-name\":\"it's\"}\n";
        assert_eq!(fs::read_to_string(folder.path().join("up")).unwrap(), wanted);
        assert_eq!(
            (driver.status().await, driver.find_running().await),
            (EngineStatus::Running, Some(EngineIdentity::Command))
        );
        assert!(driver.start(&settings()).await.is_err(), "one at a time");
        fs::remove_file(folder.path().join("up")).unwrap();
        assert_eq!(driver.status().await, EngineStatus::Ended(Exit::Unseen));
        fs::write(folder.path().join("up"), "").unwrap();
        driver.stop(StopRules::default()).await.unwrap();
        assert_eq!(driver.status().await, EngineStatus::Absent);
        driver.stop(StopRules::default()).await.expect("rm would fail now: nothing is there");
        assert_eq!(driver.adopt(&EngineIdentity::Command).await, Ok(false));
    }

    #[tokio::test]
    async fn a_command_that_fails_is_told_with_its_output() {
        let (_folder, driver) = rig("echo 'no such image' >&2; exit 125");
        let failure = driver.start(&settings()).await.unwrap_err();
        assert_eq!(failure.class, FailureClass::CommandFailed);
        assert!(failure.to_string().contains("no such image") && failure.to_string().contains("125"), "{failure}");
    }

    #[tokio::test]
    async fn a_command_that_stays_is_ended_with_its_children() {
        let (folder, mut driver) = rig("sleep 600 & echo $! >UP; wait");
        driver.commands.timeout = Duration::from_secs(3);
        let failure = driver.start(&settings()).await.unwrap_err();
        assert!(failure.to_string().contains("it must return"), "{failure}");
        let child: i32 = fs::read_to_string(folder.path().join("up")).unwrap().trim().parse().unwrap();
        // Its signal was sent; on a loaded machine it dies a moment later.
        let deadline = Instant::now() + Duration::from_secs(20);
        while Row::of(child).is_some_and(|row| row.lives()) {
            assert!(Instant::now() < deadline, "it outlived its command");
            sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn an_end_is_believed_when_it_is_said_several_times_in_a_row() {
        let (folder, mut driver) = rig("true");
        let asked = folder.path().join("asked").display().to_string();
        // It says that nothing runs at the third and fourth look, and again from the sixth on.
        let script = format!("echo >>{asked}; n=$(wc -l <{asked}); test $n -lt 3 -o $n -eq 5");
        driver.commands.status = words(&["sh", "-c", &script]);
        driver.status_every = Duration::from_millis(1);
        *driver.up.lock().await = true;
        assert_eq!(driver.wait_for_exit().await, Exit::Unseen);
        assert_eq!(fs::read_to_string(&asked).unwrap().lines().count(), 8);
    }

    #[tokio::test]
    async fn what_was_said_before_the_last_start_is_not_why_it_ended() {
        let (folder, driver) = rig("echo 'ValueError: No available memory for the cache blocks'; touch UP");
        driver.start(&settings()).await.unwrap();
        assert_eq!(driver.diagnose(None).class, FailureClass::NoKvMemory);
        driver.stop(StopRules::default()).await.unwrap();
        let mut commands = driver.commands.clone();
        commands.start = words(&["touch", &folder.path().join("up").display().to_string()]);
        let second = CommandDriver::new("short/gpu0", commands, folder.path());
        second.start(&settings()).await.unwrap();
        assert_eq!((second.diagnose(None).class, second.tail(9).len()), (FailureClass::EngineFailed, 1));
    }

    #[tokio::test]
    async fn what_cannot_work_is_refused_before_anything_runs() {
        let (_folder, mut driver) = rig("true");
        let wrong =
            EngineSettings { args: BTreeMap::from([("max-num-seqs".to_owned(), ArgValue::Text("banana".into()))]) };
        assert_eq!(driver.check(&wrong).await.unwrap_err().class, FailureClass::BadArguments);
        let with = |pairs: &[(&str, i64)]| EngineSettings {
            args: pairs.iter().map(|(name, value)| ((*name).to_owned(), ArgValue::Int(*value))).collect(),
        };
        let none = driver.check(&with(&[("max-num-seqs", 0)])).await.unwrap_err();
        assert!(none.to_string().contains("at least 1"), "{none}");
        let below = with(&[("max_num_batched_tokens", 64), ("max-num-seqs", 128)]);
        assert_eq!(driver.check(&below).await.unwrap_err().class, FailureClass::BadArguments);
        driver.commands.stop = words(&["no-such-program-anywhere"]);
        assert_eq!(driver.check(&settings()).await.unwrap_err().class, FailureClass::ProgramMissing);
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!([quote("a-b=1"), quote(""), quote("a b"), quote("it's")], ["a-b=1", "''", "'a b'", r"'it'\''s'"]);
    }
}
