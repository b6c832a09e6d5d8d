//! The driver of an engine that the operator's commands start and stop (systemd, docker, ssh, ..).
//!
//! Three commands, each a list of words that no shell interprets:
//! - `start` starts the engine and exits with 0. It must not stay in the foreground: `docker run
//!   -d`, `systemctl start`.
//! - `stop` stops the engine and exits with 0 when it is stopped.
//! - `status` (optional) exits with 0 while the engine runs, else with any other status. It may
//!   also fail for other reasons (ssh, a daemon that restarts). So the engine counts as ended only
//!   after [`ENDED_READINGS`] failures in a row, [`STATUS_INTERVAL`] apart.
//!
//! `{args}` as a word becomes the flags, one word each; within a word it becomes the flags quoted
//! for a shell, as `ssh HOST "vllm-up {args}"` needs. Every command also gets `SLUICE_BACKEND`,
//! `SLUICE_ARGS` (quoted for a shell) and `SLUICE_ARGS_JSON`.
//!
//! Bounds: a command takes at most `control.timeout`; then the process group is killed. An output
//! file larger than [`OUTPUT_MAX`] is cut to half of that. The size is checked every
//! [`OUTPUT_CHECK`] while a command runs, and every [`STATUS_INTERVAL`] while the engine runs.

use std::collections::HashSet;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::process::table::{self, MARK, ProcessEntry, ProcessId};
use super::running_commands::{self, RunningCommand};
use crate::driver::{
    Driver, DriverKind, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, LogLines, Notice, Redactor,
    StopRules, Stopped, exposed,
};
use crate::launch::{check_values, find_program};
use crate::state_folder;
use sluice_config::Control;
use sluice_core::engines::EngineKind;
use sluice_core::vllm::failure::{Exit, FailureClass, diagnose_by};
use sluice_core::vllm::logs::StartPhase;

/// The size, bytes, above which the output file is cut. At most this much of it is read.
const OUTPUT_MAX: usize = 64 << 10;
/// Time between checks of the size of the output file while a command runs.
const OUTPUT_CHECK: Duration = Duration::from_millis(500);
/// Bytes shown of a line; the rest is left out.
const LINE_MAX: usize = 4_096;
/// Time between status commands while readiness or the end of the engine is awaited.
pub(crate) const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// Status commands in a row that must fail before the engine counts as ended.
pub(crate) const ENDED_READINGS: u32 = 3;
/// The placeholder for the flags.
const ARGS_PLACEHOLDER: &str = "{args}";

/// Controls one backend's engine through commands.
#[derive(Debug)]
pub struct CommandDriver {
    name: String,
    engine: EngineKind,
    commands: Control,
    redactor: Redactor,
    output: PathBuf,
    /// Where the output of the last start begins in the file.
    start_offset: AtomicU64,
    status_interval: Duration,
    /// Whether the engine was started or adopted, and not stopped.
    up: Mutex<bool>,
    /// Daemons that `start` left behind. They became children of the gateway when their parent
    /// ended, so the gateway must reap them.
    daemons: parking_lot::Mutex<HashSet<ProcessId>>,
}

impl CommandDriver {
    /// A driver for the backend `name`, with the output of the commands in `folder`. Runs nothing.
    pub fn new(name: &str, commands: Control, folder: &Path) -> Self {
        Self::of_kind(EngineKind::default(), name, commands, folder)
    }

    /// [`new`](Self::new) for an engine of this kind.
    pub fn of_kind(engine: EngineKind, name: &str, commands: Control, folder: &Path) -> Self {
        let output = folder.join(format!("{}.commands.log", name.replace('/', ".")));
        Self {
            name: name.to_owned(),
            engine,
            redactor: Redactor::of_commands(&commands),
            commands,
            // Output that is already in the file comes from an earlier gateway.
            start_offset: AtomicU64::new(length(&output)),
            output,
            status_interval: STATUS_INTERVAL,
            up: Mutex::new(false),
            daemons: parking_lot::Mutex::default(),
        }
    }

    /// Runs one command to the end. The output goes to a file, because a daemon would hold a pipe
    /// open forever.
    async fn run(
        &self,
        purpose: &str,
        words: &[String],
        settings: &EngineSettings,
    ) -> Result<ExitStatus, EngineFailure> {
        let failed = |cause: String| {
            EngineFailure::new(FailureClass::CommandFailed, format!("{purpose} command of {}: {cause}", self.name))
        };
        let flags = settings.words_of(self.engine);
        let quoted = flags.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ");
        let mut argv = Vec::new();
        for word in words {
            match word == ARGS_PLACEHOLDER {
                true => argv.extend(flags.iter().cloned()),
                false => argv.push(word.replace(ARGS_PLACEHOLDER, &quoted)),
            }
        }
        let program = program(purpose, &argv)?;
        let file = self.open_output().map_err(|error| failed(format!("{}: {error}", self.output.display())))?;
        let mut command = Command::new(program);
        command.args(&argv[1..]).env(MARK, self.mark()).env("SLUICE_BACKEND", &self.name).env("SLUICE_ARGS", &quoted);
        command.env("SLUICE_ARGS_JSON", serde_json::to_string(&settings.args).unwrap_or_default());
        let errors = file.try_clone().map_err(|error| failed(error.to_string()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0).kill_on_drop(true);
        let spawned = RunningCommand::spawn(&mut command).map_err(|error| failed(format!("{}: {error}", argv[0])))?;
        let (mut child, running) = spawned;
        let ended = async {
            tokio::select! {
                ended = child.wait() => ended,
                never = self.keep_output_bounded() => match never {},
            }
        };
        let Ok(ended) = timeout(self.commands.timeout, ended).await else {
            if let Some(group) = running.group() {
                // The command is not reaped yet, so no other process has the id.
                let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            }
            let _ = child.wait().await;
            let limit = self.commands.timeout.as_secs();
            return Err(failed(format!(
                "still running after {limit} s; it must exit once the engine is started or stopped"
            )));
        };
        drop(running);
        self.reap_daemons();
        ended.map_err(|error| failed(error.to_string()))
    }

    /// Runs one command. If it fails, the error has the last lines of output.
    async fn run_successfully(
        &self,
        purpose: &str,
        words: &[String],
        settings: &EngineSettings,
    ) -> Result<(), EngineFailure> {
        let _ = self.bound_output();
        let before = length(&self.output);
        let ended = self.run(purpose, words, settings).await?;
        if ended.success() {
            return Ok(());
        }
        let now = length(&self.output);
        let output = if now == before { String::new() } else { self.tail(3).join(" | ") };
        let output = if output.is_empty() { "it printed nothing" } else { &output };
        let cause = format!("{purpose} command of {} ended with {ended}: {output}", self.name);
        Err(EngineFailure::new(FailureClass::CommandFailed, cause))
    }

    /// Whether the engine runs; `None` if there is no status command or it could not run.
    async fn is_running(&self) -> Option<bool> {
        if self.commands.status.is_empty() {
            return None;
        }
        self.run("status", &self.commands.status, &EngineSettings::default()).await.ok().map(|ended| ended.success())
    }

    fn open_output(&self) -> io::Result<File> {
        if let Some(folder) = self.output.parent() {
            state_folder::open(folder)?;
        }
        self.bound_output()?;
        state_folder::options().append(true).open(&self.output)
    }

    /// If the output file is larger than [`OUTPUT_MAX`], cuts it to the last lines of half that
    /// size. A daemon that has the file open continues after these lines. Its output during the
    /// cut may be lost.
    fn bound_output(&self) -> io::Result<()> {
        let before = length(&self.output);
        if before <= OUTPUT_MAX as u64 {
            return Ok(());
        }
        let (_, last) = self.read_from(|length| length.saturating_sub(OUTPUT_MAX as u64 / 2))?;
        let kept = memchr::memchr(b'\n', &last).map_or(&last[..], |end| &last[end + 1..]);
        let mut file = state_folder::options().append(true).open(&self.output)?;
        file.set_len(0)?;
        file.write_all(kept)?;
        let cut = before.saturating_sub(kept.len() as u64);
        let start = self.start_offset.load(Ordering::Relaxed);
        self.start_offset.store(start.saturating_sub(cut), Ordering::Relaxed);
        Ok(())
    }

    async fn keep_output_bounded(&self) -> Infallible {
        loop {
            sleep(OUTPUT_CHECK).await;
            let _ = self.bound_output();
        }
    }

    /// Reads at most [`OUTPUT_MAX`] bytes of the output file, and returns the offset at which they
    /// begin. `place` computes this offset from the length of the file.
    fn read_from(&self, place: impl FnOnce(u64) -> u64) -> io::Result<(u64, Vec<u8>)> {
        let mut file = File::open(&self.output)?;
        let from = place(file.metadata()?.len());
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(OUTPUT_MAX as u64).read_to_end(&mut bytes)?;
        Ok((from, bytes))
    }

    /// The last lines in the file from byte `from` on.
    fn lines_from(&self, from: u64, lines: usize) -> Vec<String> {
        let read = self.read_from(|length| from.max(length.saturating_sub(OUTPUT_MAX as u64)));
        let (_, bytes) = read.unwrap_or_default();
        let text = self.redactor.apply(String::from_utf8_lossy(&bytes));
        let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        all[all.len().saturating_sub(lines)..].iter().map(|line| (*line).to_owned()).collect()
    }

    /// At most `most` whole lines from byte `after` on, or the last lines without `after`, and the
    /// offset at which the lines end. Reads at most [`OUTPUT_MAX`] bytes, and from the beginning if
    /// the file is now shorter than `after`.
    fn whole_lines(&self, after: Option<u64>, most: usize) -> (Vec<String>, u64) {
        let read = self.read_from(|length| {
            let last = length.saturating_sub(OUTPUT_MAX as u64);
            after.map_or(last, |after| if after > length { 0 } else { after })
        });
        let (from, bytes) = read.unwrap_or_default();
        let mut ends: Vec<usize> = memchr::memchr_iter(b'\n', &bytes).map(|end| end + 1).collect();
        if ends.is_empty() && bytes.len() == OUTPUT_MAX {
            ends.push(bytes.len());
        }
        let skipped = if after.is_some() { 0 } else { ends.len().saturating_sub(most) };
        let taken = most.min(ends.len() - skipped);
        let begin = if skipped == 0 { 0 } else { ends[skipped - 1] };
        let end = if taken == 0 { begin } else { ends[skipped + taken - 1] };
        let text = self.redactor.apply(String::from_utf8_lossy(&bytes[begin..end]));
        let lines = text.lines().map(|line| line[..line.floor_char_boundary(LINE_MAX)].to_owned());
        (lines.collect(), from + end as u64)
    }

    fn mark(&self) -> String {
        format!("command#{}#{}", std::process::id(), self.name)
    }

    /// Reaps ended daemons of `start`, which became children of this process because it reaps
    /// orphans.
    fn reap_daemons(&self) {
        let own = table::own_pid();
        let mark = self.mark();
        let mut daemons = self.daemons.lock();
        let running = running_commands::all();
        let is_orphan = |row: &ProcessEntry| row.parent == own && !running.contains(&row.pid);
        let children: Vec<ProcessEntry> = table::all().into_iter().filter(is_orphan).collect();
        daemons.retain(|known| children.iter().any(|row| row.id() == *known));
        for row in children {
            if row.is_alive() && table::mark_of(row.pid).is_some_and(|found| found == mark) {
                daemons.insert(row.id());
            } else if !row.is_alive() && daemons.remove(&row.id()) {
                let _ = waitpid(Pid::from_raw(row.pid), Some(WaitPidFlag::WNOHANG));
            }
        }
    }
}

fn length(file: &Path) -> u64 {
    file.metadata().map_or(0, |file| file.len())
}

fn program(purpose: &str, argv: &[String]) -> Result<PathBuf, EngineFailure> {
    let word = argv.first().map(String::as_str).unwrap_or_default();
    let missing = || EngineFailure::program_missing(&format!("control.{purpose}"), word, "no such program");
    find_program(word).ok_or_else(missing)
}

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
        let Control { start, stop, status, .. } = &self.commands;
        for (purpose, words) in [("start", start), ("stop", stop), ("status", status)] {
            if !words.is_empty() {
                program(purpose, words)?;
            }
        }
        let settings = &exposed(&self.commands.args, settings);
        check_values(self.engine, settings).map_err(|failure| failure.redacted(&self.redactor))?;
        let has_placeholder = self.commands.start.iter().any(|word| word.contains(ARGS_PLACEHOLDER));
        let unused = !settings.args.is_empty() && !has_placeholder;
        let text =
            "the start command has no {args}: it gets the settings only through SLUICE_ARGS and SLUICE_ARGS_JSON";
        Ok(unused.then(|| Notice(text.to_owned())).into_iter().collect())
    }

    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure> {
        let mut up = self.up.lock().await;
        if *up || self.is_running().await == Some(true) {
            let cause = format!("the engine of {} runs already; stop it first", self.name);
            return Err(EngineFailure::new(FailureClass::PortInUse, cause));
        }
        self.start_offset.store(length(&self.output), Ordering::Relaxed);
        let settings = exposed(&self.commands.args, settings);
        self.run_successfully("start", &self.commands.start, &settings).await?;
        *up = true;
        Ok(EngineIdentity::Command)
    }

    async fn find_running(&self, _except: Option<&EngineIdentity>) -> Option<EngineIdentity> {
        (self.is_running().await == Some(true)).then_some(EngineIdentity::Command)
    }

    async fn adopt(&self, trace: &EngineIdentity) -> Result<bool, EngineFailure> {
        if *trace != EngineIdentity::Command {
            return Err(EngineFailure::new(
                FailureClass::NotOurs,
                format!("{} is controlled by commands, but the journal describes another kind of engine", self.name),
            ));
        }
        let mut up = self.up.lock().await;
        // Without a status command only the probe shows whether the engine runs.
        *up = self.is_running().await.unwrap_or(true);
        Ok(*up)
    }

    async fn stop(&self, rules: StopRules) -> Result<Stopped, EngineFailure> {
        let mut up = self.up.lock().await;
        // Many stop commands (docker stop, pkill) fail if no engine runs, which is the desired
        // state.
        if let Err(failure) = self.run_successfully("stop", &self.commands.stop, &EngineSettings::default()).await {
            let gone = self.is_running().await;
            if gone == Some(true) || gone.is_none() && *up {
                return Err(failure);
            }
            tracing::info!(backend = %self.name, %failure, "the stop command failed, but no engine is known to run");
        }
        let deadline = Instant::now() + rules.grace + rules.kill;
        while self.is_running().await == Some(true) {
            if Instant::now() >= deadline {
                let cause = format!(
                    "the stop command of {} succeeded, but its status command reports that the engine runs",
                    self.name
                );
                return Err(EngineFailure::new(FailureClass::CommandFailed, cause));
            }
            sleep(Duration::from_millis(250)).await;
        }
        *up = false;
        Ok(Stopped { exit: None, forced: false, orphans: 0, memory_back: None })
    }

    async fn status(&self) -> EngineStatus {
        let up = *self.up.lock().await;
        match self.is_running().await {
            None => EngineStatus::Unknown,
            Some(true) => EngineStatus::Running,
            Some(false) if up => EngineStatus::Ended(Exit::Unseen),
            Some(false) => EngineStatus::Absent,
        }
    }

    async fn wait_for_exit(&self) -> Exit {
        let mut ended_readings = 0;
        loop {
            sleep(self.status_interval).await;
            // The engine may also write to the file.
            let _ = self.bound_output();
            ended_readings = match self.status().await {
                EngineStatus::Ended(exit) if ended_readings + 1 >= ENDED_READINGS => return exit,
                EngineStatus::Ended(_) => ended_readings + 1,
                _ => 0,
            };
        }
    }

    fn tail(&self, lines: usize) -> Vec<String> {
        self.lines_from(0, lines)
    }

    /// The output of the commands, and of the engine if `start` leaves it the same file. Lines are
    /// numbered by bytes of the file.
    fn log_lines(&self, after: Option<u64>, most: usize) -> Option<LogLines> {
        let (lines, next) = self.whole_lines(after, most);
        let start = self.commands.start.join(" ");
        let note = format!(
            "{} is started by commands, and this is what they print; the log of its engine is where this one writes it: {}",
            self.name,
            self.redactor.apply(start)
        );
        Some(LogLines { lines, next, note: Some(note) })
    }

    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure {
        let output = self.lines_from(self.start_offset.load(Ordering::Relaxed), 200);
        let diagnosis = diagnose_by(self.engine.rules().log, &output, exit, StartPhase::Launching);
        EngineFailure::of(diagnosis, exit, StartPhase::Launching)
    }
}

#[cfg(test)]
mod tests;
