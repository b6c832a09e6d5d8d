//! An engine's log: a file that the engine writes itself, its last lines in memory, and how far the start is.
//!
//! The engine's output goes straight into a file, not through a pipe of ours: a gateway that is slow or dies must not block
//! or break an engine that serves. The file is followed every [`LOOK_EVERY`].
//!
//! Files: `NAME.log`, and up to [`OLD_FILES`] older ones, `NAME.log.1` the newest. A start begins a new file. A file over
//! [`FILE_MAX`] bytes is copied away and cut to nothing; the engine appends, so it goes on at the new beginning. What it
//! writes between the copy and the cut (microseconds) is lost from the files, not from the lines in memory when they were
//! read before.
//!
//! Bounds: [`LINES_MAX`] lines of [`LINE_MAX`] bytes in memory, [`FILE_MAX`] * ([`OLD_FILES`] + 1) bytes on disk plus what
//! is written between two looks.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::driver::StartProgress;
use sluice_core::vllm::logs::{Follower, Movement, StartPhase};

/// How often the file is looked at.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Lines kept in memory.
pub(super) const LINES_MAX: usize = 1_000;
/// Longest line that is kept, bytes; the rest of it is dropped.
const LINE_MAX: usize = 4_096;
/// A file that is larger is put away.
const FILE_MAX: u64 = 32 << 20;
/// Files that were put away.
const OLD_FILES: u32 = 3;
/// Most that is read in one look; the rest waits for the next.
const READ_MAX: u64 = 4 << 20;

/// The log of one backend's engine, over all its starts.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    progress: watch::Sender<StartProgress>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<String>,
    /// The beginning of a line whose end has not been written yet.
    open: Vec<u8>,
    read_to: u64,
    follower: Follower,
}

impl Log {
    /// The log in `folder` of the backend called `name`, which may hold `/`. Nothing is opened yet.
    pub(super) fn new(folder: &Path, name: &str) -> Self {
        let path = folder.join(format!("{}.log", name.replace('/', ".")));
        Self { path, progress: watch::Sender::new(StartProgress::begin(Instant::now())), state: Mutex::default() }
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Begins anew for a start: older files are put away, memory and progress forgotten. Returns the file to write to.
    pub(super) fn begin(&self) -> io::Result<File> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        if self.path.metadata().is_ok_and(|file| file.len() > 0) {
            self.make_room()?;
            fs::rename(&self.path, self.old(1))?;
        }
        *self.state.lock() = State::default();
        self.progress.send_replace(StartProgress::begin(Instant::now()));
        OpenOptions::new().create(true).append(true).open(&self.path)
    }

    /// Goes on with the file of an engine that runs already. A short one is read again from its beginning, because the
    /// engine may still be starting and its phases say how patient to be; a long one is that of an engine that serves.
    pub(super) fn resume(&self) {
        let length = self.path.metadata().map_or(0, |file| file.len());
        let long = length > READ_MAX;
        let read_to = if long { length - READ_MAX / 16 } else { 0 };
        *self.state.lock() = State { read_to, ..State::default() };
        self.progress.send_replace(StartProgress::begin(Instant::now()));
        if long {
            self.mark_ready();
        }
        self.look();
    }

    /// The engine serves. Its log may not say so: uvicorn's lines can be turned off.
    pub(super) fn mark_ready(&self) {
        self.progress.send_if_modified(|progress| {
            let before = std::mem::replace(&mut progress.phase, StartPhase::Serving);
            if before != StartPhase::Serving {
                progress.phase_since = Instant::now();
            }
            before != StartPhase::Serving
        });
    }

    /// Reads what was written since the last look; whether there was anything.
    pub(super) fn look(&self) -> bool {
        let mut state = self.state.lock();
        let Ok(bytes) = self.read_from(&mut state) else { return false };
        if bytes.is_empty() {
            return false;
        }
        state.open.extend_from_slice(&bytes);
        let open = std::mem::take(&mut state.open);
        let mut rest = &open[..];
        // Bars end with a carriage return and no line feed.
        while let Some(end) = memchr::memchr2(b'\n', b'\r', rest) {
            self.take_in(&mut state, &rest[..end]);
            rest = &rest[end + 1..];
        }
        state.open = rest[..rest.len().min(LINE_MAX)].to_vec();
        drop(state);
        self.put_away_if_large();
        true
    }

    fn read_from(&self, state: &mut State) -> io::Result<Vec<u8>> {
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

    fn take_in(&self, state: &mut State, line: &[u8]) {
        let line = String::from_utf8_lossy(&line[..line.len().min(LINE_MAX)]);
        let line = line.trim_end();
        if line.is_empty() {
            return;
        }
        let movement = state.follower.take_in(line);
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
    }

    /// Copies the file away and cuts it, when it is large. Lines are lost at worst, so errors are only told.
    fn put_away_if_large(&self) {
        if !self.path.metadata().is_ok_and(|file| file.len() > FILE_MAX) {
            return;
        }
        let put_away = || -> io::Result<()> {
            self.make_room()?;
            fs::copy(&self.path, self.old(1))?;
            OpenOptions::new().write(true).open(&self.path)?.set_len(0)?;
            self.state.lock().read_to = 0;
            Ok(())
        };
        if let Err(error) = put_away() {
            tracing::warn!(log = %self.path.display(), %error, "engine's log cannot be rotated");
        }
    }

    /// Frees the name of the newest old file.
    fn make_room(&self) -> io::Result<()> {
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

    /// The last lines, oldest first; an unfinished one counts.
    pub(super) fn tail(&self, lines: usize) -> Vec<String> {
        let state = self.state.lock();
        let open = String::from_utf8_lossy(&state.open).trim_end().to_owned();
        let all: Vec<&String> = state.lines.iter().chain((!open.is_empty()).then_some(&open)).collect();
        all[all.len().saturating_sub(lines)..].iter().map(|line| (*line).clone()).collect()
    }

    /// How far the start is.
    pub(super) fn progress(&self) -> watch::Receiver<StartProgress> {
        self.progress.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn log() -> (tempfile::TempDir, Log) {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(folder.path(), "short/gpu0");
        (folder, log)
    }

    #[test]
    fn lines_come_whole_however_they_are_written() {
        let (_folder, log) = log();
        let mut file = log.begin().unwrap();
        file.write_all(b"one\ntw").unwrap();
        assert!(log.look());
        assert_eq!(log.tail(9), ["one", "tw"]);
        file.write_all(b"o\nbar 1\rbar 2\r").unwrap();
        assert!(log.look());
        assert!(!log.look());
        assert_eq!(log.tail(9), ["one", "two", "bar 1", "bar 2"]);
        assert_eq!(log.tail(1), ["bar 2"]);
    }

    #[test]
    fn a_start_begins_a_new_file_and_keeps_the_old_ones() {
        let (folder, log) = log();
        for start in 0..6 {
            writeln!(log.begin().unwrap(), "start {start}").unwrap();
        }
        log.look();
        assert_eq!(log.tail(9), ["start 5"]);
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!((read("short.gpu0.log.1"), read("short.gpu0.log.3")), ("start 4\n".into(), "start 2\n".into()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
    }

    #[test]
    fn a_large_file_is_cut_and_the_writer_goes_on() {
        let (folder, log) = log();
        let mut file = log.begin().unwrap();
        let line = [b'x'; 1023];
        for _ in 0..=(FILE_MAX / 1024) {
            file.write_all(&line).unwrap();
            file.write_all(b"\n").unwrap();
        }
        while log.look() {}
        file.write_all(b"after\n").unwrap();
        log.look();
        assert_eq!(log.tail(1), ["after"]);
        let size = |name: &str| folder.path().join(name).metadata().unwrap().len();
        assert!(size("short.gpu0.log") < FILE_MAX / 2, "{}", size("short.gpu0.log"));
        assert!(size("short.gpu0.log.1") > FILE_MAX);
        assert_eq!(log.tail(usize::MAX).len(), LINES_MAX);
    }

    #[test]
    fn an_engine_that_is_taken_over_is_in_the_phase_that_its_log_says() {
        let (_folder, log) = log();
        writeln!(log.begin().unwrap(), "old lines\nStarting to load model x...").unwrap();
        let next = Log::new(log.path().parent().unwrap(), "short/gpu0");
        next.resume();
        assert_eq!(next.progress().borrow().phase, StartPhase::LoadingWeights);
        assert_eq!(next.tail(9), ["old lines", "Starting to load model x..."]);
        // It answers and has not said so.
        next.mark_ready();
        assert_eq!(next.progress().borrow().phase, StartPhase::Serving);
        let mut file = log.begin().unwrap();
        (0..=READ_MAX / 1_000).for_each(|_| writeln!(file, "{}", "x".repeat(1_000)).unwrap());
        next.resume();
        assert_eq!(next.progress().borrow().phase, StartPhase::Serving, "nobody writes that much while it starts");
    }

    #[test]
    fn progress_follows_the_lines() {
        let (_folder, log) = log();
        let progress = log.progress();
        let mut file = log.begin().unwrap();
        writeln!(file, "Starting to load model x...").unwrap();
        log.look();
        assert_eq!(progress.borrow().phase, StartPhase::LoadingWeights);
        writeln!(file, "Application startup complete.").unwrap();
        log.look();
        assert_eq!(progress.borrow().phase, StartPhase::Serving);
        log.begin().unwrap();
        assert_eq!(progress.borrow().phase, StartPhase::Launching);
    }
}
