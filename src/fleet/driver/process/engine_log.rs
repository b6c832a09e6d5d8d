//! An engine's log: a file that the engine writes, the last lines in memory, and the progress of
//! the start.
//!
//! Output goes into a file, not a pipe, because a slow or crashed gateway must not block or break a
//! serving engine. The file is read every [`READ_INTERVAL`].
//!
//! A start begins a new `NAME.log`. Up to [`OLD_FILES`] older ones are kept; `NAME.log.1` is the
//! newest. A file over [`FILE_MAX`] bytes is copied and truncated. The engine appends, so it
//! continues at the beginning of the file. Output between copy and truncation (microseconds) is
//! lost from the files. Only the gateway's user can read the files, since an engine may print
//! secrets. Secrets are masked in the lines in memory, which are shown.
//!
//! Bounds: [`LINES_MAX`] lines of [`LINE_MAX`] bytes in memory, and [`FILE_MAX`] * ([`OLD_FILES`] +
//! 1) bytes on disk, plus the output between two reads.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::driver::{LogLines, Redactor, StartProgress};
use crate::state_folder;
use sluice_core::vllm::logs::{FORM, LogForm, Movement, StartFollower, StartPhase};

pub(super) const READ_INTERVAL: Duration = Duration::from_millis(100);
pub(super) const LINES_MAX: usize = 1_000;
/// Bytes kept of a line; the rest is dropped.
const LINE_MAX: usize = 4_096;
/// A file of more bytes is rotated.
const FILE_MAX: u64 = 32 << 20;
const OLD_FILES: u32 = 3;
/// Most bytes read at once; the rest waits for the next read.
const READ_MAX: u64 = 4 << 20;

/// The log of one backend's engine, across all starts.
#[derive(Debug)]
pub(super) struct EngineLog {
    path: PathBuf,
    form: &'static LogForm,
    redactor: Redactor,
    progress: watch::Sender<StartProgress>,
    state: Mutex<ReadState>,
}

#[derive(Debug, Default)]
struct ReadState {
    lines: VecDeque<String>,
    /// The beginning of an incomplete line.
    unfinished: Vec<u8>,
    /// Lines read since the gateway started, across all starts.
    count: u64,
    read_to: u64,
    follower: StartFollower,
    /// Bytes of the weights on one GPU.
    weights: Option<u64>,
}

/// The words before the size of the weights in a line of vLLM: `Model loading took 14.99 GiB memory
/// and ...`.
const WEIGHTS: &str = "Model loading took ";

impl EngineLog {
    /// The log in `folder` of the backend `name`, which may contain `/`. Opens nothing.
    pub(super) fn new(folder: &Path, name: &str, redactor: Redactor) -> Self {
        let path = folder.join(format!("{}.log", name.replace('/', ".")));
        let progress = watch::Sender::new(StartProgress::begin(Instant::now()));
        Self { path, form: &FORM, redactor, progress, state: Mutex::default() }
    }

    /// The same log of an engine that writes lines of this form.
    pub(super) fn of_form(mut self, form: &'static LogForm) -> Self {
        self.form = form;
        self.restart_reading(0);
        self
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Prepares a start: rotates the old file and resets lines and progress. Returns the new file.
    pub(super) fn begin(&self) -> io::Result<File> {
        if let Some(folder) = self.path.parent() {
            state_folder::open(folder)?;
        }
        if self.path.metadata().is_ok_and(|file| file.len() > 0) {
            self.shift_old_files()?;
            fs::rename(&self.path, self.old(1))?;
        }
        self.restart_reading(0);
        self.progress.send_replace(StartProgress::begin(Instant::now()));
        state_folder::options().append(true).open(&self.path)
    }

    /// Continues with the file of a running engine. A short file is read from the beginning,
    /// because the engine may still be starting, and the phase decides the time limits. An engine
    /// with a long file is taken to serve.
    pub(super) fn resume(&self) {
        let length = self.path.metadata().map_or(0, |file| file.len());
        let long = length > READ_MAX;
        let read_to = if long { length - READ_MAX / 16 } else { 0 };
        self.restart_reading(read_to);
        self.progress.send_replace(StartProgress::begin(Instant::now()));
        if long {
            self.mark_ready();
            // The lines of the start are at the beginning, unless the file was rotated since.
            let mut head = Vec::new();
            let read = File::open(&self.path).and_then(|file| file.take(READ_MAX / 16).read_to_end(&mut head));
            if read.is_ok() {
                self.state.lock().weights = String::from_utf8_lossy(&head).lines().find_map(weights_in);
            }
        }
        self.read_new();
    }

    /// Forgets the lines in memory. Line numbers continue, so that a reader also sees the next
    /// start.
    fn restart_reading(&self, read_to: u64) {
        let mut state = self.state.lock();
        let follower = StartFollower::new(self.form);
        *state = ReadState { count: state.count, read_to, follower, ..ReadState::default() };
    }

    /// Records that the engine serves. The log may not show it: uvicorn's lines can be turned off.
    pub(super) fn mark_ready(&self) {
        self.progress.send_if_modified(|progress| {
            let before = std::mem::replace(&mut progress.phase, StartPhase::Serving);
            if before != StartPhase::Serving {
                progress.phase_since = Instant::now();
            }
            before != StartPhase::Serving
        });
    }

    /// Reads new output; returns whether there was any.
    pub(super) fn read_new(&self) -> bool {
        let mut state = self.state.lock();
        let Ok(bytes) = self.read_bytes(&mut state) else { return false };
        if bytes.is_empty() {
            return false;
        }
        state.unfinished.extend_from_slice(&bytes);
        let unfinished = std::mem::take(&mut state.unfinished);
        let mut rest = &unfinished[..];
        // Progress bars end with a carriage return and no line feed.
        while let Some(end) = memchr::memchr2(b'\n', b'\r', rest) {
            self.add_line(&mut state, &rest[..end]);
            rest = &rest[end + 1..];
        }
        state.unfinished = rest[..rest.len().min(LINE_MAX)].to_vec();
        drop(state);
        self.rotate_if_large();
        true
    }

    fn read_bytes(&self, state: &mut ReadState) -> io::Result<Vec<u8>> {
        let mut file = File::open(&self.path)?;
        let length = file.metadata()?.len();
        if length < state.read_to {
            state.read_to = 0;
        }
        let mut bytes = Vec::new();
        if length > state.read_to {
            file.seek(SeekFrom::Start(state.read_to))?;
            state.read_to += file.take(READ_MAX).read_to_end(&mut bytes)? as u64;
        }
        Ok(bytes)
    }

    fn add_line(&self, state: &mut ReadState, line: &[u8]) {
        let line = self.redactor.apply(String::from_utf8_lossy(line));
        let line = line[..line.floor_char_boundary(LINE_MAX)].trim_end();
        if line.is_empty() {
            return;
        }
        state.weights = state.weights.max(weights_in(line));
        let movement = state.follower.add_line(line);
        if movement != Movement::None {
            let now = Instant::now();
            self.progress.send_modify(|progress| {
                progress.moved = now;
                line.clone_into(&mut progress.line);
                if let Movement::Phase(phase) = movement
                    && phase > progress.phase
                {
                    progress.phase = phase;
                    progress.phase_since = now;
                }
            });
        }
        if state.lines.len() == LINES_MAX {
            state.lines.pop_front();
        }
        state.lines.push_back(line.to_owned());
        state.count += 1;
    }

    /// Copies and truncates a large file. Errors are only logged: at worst lines are lost.
    fn rotate_if_large(&self) {
        if !self.path.metadata().is_ok_and(|file| file.len() > FILE_MAX) {
            return;
        }
        let rotate = || -> io::Result<()> {
            self.shift_old_files()?;
            fs::copy(&self.path, self.old(1))?;
            OpenOptions::new().write(true).open(&self.path)?.set_len(0)?;
            self.state.lock().read_to = 0;
            Ok(())
        };
        if let Err(error) = rotate() {
            tracing::warn!(log = %self.path.display(), %error, "cannot rotate the engine's log");
        }
    }

    /// Renames the rotated files, so that the newest name is free.
    fn shift_old_files(&self) -> io::Result<()> {
        for age in (1..OLD_FILES).rev() {
            if self.old(age).exists() {
                fs::rename(self.old(age), self.old(age + 1))?;
            }
        }
        Ok(())
    }

    fn old(&self, age: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{age}"));
        name.into()
    }

    /// Bytes of the weights on one GPU; `None`: the log does not show them.
    pub(super) fn weights(&self) -> Option<u64> {
        self.state.lock().weights
    }

    /// The last lines, oldest first, including an incomplete one.
    pub(super) fn tail(&self, lines: usize) -> Vec<String> {
        let state = self.state.lock();
        let unfinished = self.redactor.apply(String::from_utf8_lossy(&state.unfinished)).trim_end().to_owned();
        let all: Vec<&String> = state.lines.iter().chain((!unfinished.is_empty()).then_some(&unfinished)).collect();
        all[all.len().saturating_sub(lines)..].iter().map(|line| (*line).clone()).collect()
    }

    /// At most `most` complete lines from number `after` on, beginning with the oldest in memory.
    /// Without `after`, or with a number of another gateway, returns the last lines.
    pub(super) fn lines(&self, after: Option<u64>, most: usize) -> LogLines {
        let state = self.state.lock();
        let kept = state.lines.len();
        let oldest = state.count - kept as u64;
        let skipped = match after.filter(|after| *after <= state.count) {
            Some(after) => usize::try_from(after.saturating_sub(oldest)).unwrap_or(kept),
            None => kept.saturating_sub(most),
        };
        let lines: Vec<String> = state.lines.iter().skip(skipped).take(most).cloned().collect();
        LogLines { next: oldest + (skipped + lines.len()) as u64, lines, note: None }
    }

    pub(super) fn progress(&self) -> watch::Receiver<StartProgress> {
        self.progress.subscribe()
    }
}

fn weights_in(line: &str) -> Option<u64> {
    let (number, rest) = line.split_once(WEIGHTS)?.1.split_once(' ')?;
    let unit = match rest.get(..3)?.trim_end() {
        "GiB" | "GB" => (1u64 << 30) as f64,
        _ => return None,
    };
    let bytes = number.parse::<f64>().ok()? * unit;
    (bytes >= 0.0 && bytes < u64::MAX as f64).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn log() -> (tempfile::TempDir, EngineLog) {
        let folder = tempfile::tempdir().unwrap();
        let log = EngineLog::new(folder.path(), "short/gpu0", Redactor::default());
        (folder, log)
    }

    #[test]
    fn lines_are_read_whole_however_they_are_written() {
        let (_folder, log) = log();
        let mut file = log.begin().unwrap();
        file.write_all(b"one\ntw").unwrap();
        assert!(log.read_new());
        assert_eq!(log.tail(9), ["one", "tw"]);
        file.write_all(b"o\nbar 1\rbar 2\r").unwrap();
        assert!(log.read_new());
        assert!(!log.read_new());
        assert_eq!(log.tail(9), ["one", "two", "bar 1", "bar 2"]);
        assert_eq!(log.tail(1), ["bar 2"]);
    }

    #[test]
    fn a_reader_who_follows_gets_each_line_once_over_a_restart_too() {
        let (_folder, log) = log();
        let write = |file: &mut File, from: usize, to: usize| {
            (from..to).for_each(|n| writeln!(file, "line {n}").unwrap());
            write!(file, "unfinished").unwrap();
            log.read_new();
        };
        write(&mut log.begin().unwrap(), 0, 5);
        let last = log.lines(None, 2);
        assert_eq!((last.lines, last.next), (vec!["line 3".to_owned(), "line 4".to_owned()], 5));
        assert_eq!(log.lines(Some(5), 9), LogLines { next: 5, ..LogLines::default() });
        write(&mut log.begin().unwrap(), 5, 8);
        let next = log.lines(Some(5), 2);
        assert_eq!((next.lines, next.next), (vec!["line 5".to_owned(), "line 6".to_owned()], 7));
        assert_eq!(log.lines(Some(7), 9).lines, ["line 7"]);
        // Numbers of an earlier gateway, and lines no longer in memory.
        assert_eq!(log.lines(Some(99), 1).lines, ["line 7"]);
        assert_eq!(log.lines(Some(0), 1).lines, ["line 5"]);
    }

    #[test]
    fn a_start_begins_a_new_file_and_keeps_the_old_ones() {
        let (folder, log) = log();
        for start in 0..6 {
            writeln!(log.begin().unwrap(), "start {start}").unwrap();
        }
        log.read_new();
        assert_eq!(log.tail(9), ["start 5"]);
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!((read("short.gpu0.log.1"), read("short.gpu0.log.3")), ("start 4\n".into(), "start 2\n".into()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
    }

    #[test]
    fn a_large_file_is_truncated_and_the_writer_continues() {
        let (folder, log) = log();
        let mut file = log.begin().unwrap();
        let line = [b'x'; 1023];
        for _ in 0..=(FILE_MAX / 1024) {
            file.write_all(&line).unwrap();
            file.write_all(b"\n").unwrap();
        }
        while log.read_new() {}
        file.write_all(b"after\n").unwrap();
        log.read_new();
        assert_eq!(log.tail(1), ["after"]);
        let size = |name: &str| folder.path().join(name).metadata().unwrap().len();
        assert!(size("short.gpu0.log") < FILE_MAX / 2, "{}", size("short.gpu0.log"));
        assert!(size("short.gpu0.log.1") > FILE_MAX);
        assert_eq!(log.tail(usize::MAX).len(), LINES_MAX);
    }

    #[test]
    fn an_adopted_engine_is_in_the_phase_that_its_log_shows() {
        let (_folder, log) = log();
        writeln!(log.begin().unwrap(), "old lines\nStarting to load model x...").unwrap();
        let next = EngineLog::new(log.path().parent().unwrap(), "short/gpu0", Redactor::default());
        next.resume();
        assert_eq!(next.progress().borrow().phase, StartPhase::LoadingWeights);
        assert_eq!(next.tail(9), ["old lines", "Starting to load model x..."]);
        // The engine is ready, but the log does not show it.
        next.mark_ready();
        assert_eq!(next.progress().borrow().phase, StartPhase::Serving);
        let mut file = log.begin().unwrap();
        (0..=READ_MAX / 1_000).for_each(|_| writeln!(file, "{}", "x".repeat(1_000)).unwrap());
        next.resume();
        assert_eq!(next.progress().borrow().phase, StartPhase::Serving, "no start writes that much");
    }

    #[test]
    fn progress_follows_the_lines() {
        let (_folder, log) = log();
        let progress = log.progress();
        let mut file = log.begin().unwrap();
        writeln!(file, "Starting to load model x...").unwrap();
        log.read_new();
        assert_eq!(progress.borrow().phase, StartPhase::LoadingWeights);
        writeln!(file, "Application startup complete.").unwrap();
        log.read_new();
        assert_eq!(progress.borrow().phase, StartPhase::Serving);
        log.begin().unwrap();
        assert_eq!(progress.borrow().phase, StartPhase::Launching);
    }

    #[test]
    fn the_size_of_the_weights_is_known_from_the_start_even_if_the_log_is_long() {
        let (_folder, log) = log();
        assert_eq!(log.weights(), None);
        let mut file = log.begin().unwrap();
        file.write_all(b"(EngineCore pid=1) INFO Model loading took 15.05 GiB memory and 0.4 seconds\n").unwrap();
        log.read_new();
        let weights = (15.05 * f64::from(1 << 30)) as u64;
        assert_eq!(log.weights(), Some(weights));
        file.write_all(&vec![b'\n'; READ_MAX as usize + 1]).unwrap();
        log.resume();
        assert_eq!(log.weights(), Some(weights), "another gateway reads the end, and looks at the beginning");
        log.begin().unwrap();
        assert_eq!(log.weights(), None, "another start");
        for line in [
            "Model loading took",
            "Model loading took x GiB",
            "Model loading took 3 seconds",
            "Model loading took -1 GB",
        ] {
            assert_eq!(weights_in(line), None, "{line}");
        }
    }
}
