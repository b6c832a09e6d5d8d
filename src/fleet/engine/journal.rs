//! The journal: each step of an engine is on disk before it begins.
//!
//! A line is JSON, synchronised to the disk. It holds the whole life-cycle state of one engine and
//! the process identity. So after a crash the next gateway needs only the last line of each
//! backend; earlier lines are history for the operator.
//!
//! No line holds a secret: flags such as `api-key` are not settings, and digests are keyed. Lines
//! of an earlier version that hold secrets are rewritten when the journal is opened. A line that a
//! crash cut short is skipped, since the step had not begun.
//!
//! Bounds: two files of [`FILE_BYTES`]. A full file becomes `journal.1.jsonl`; the new one begins
//! with the last line of each backend. A lock ensures that one gateway at a time uses the folder,
//! because two would start engines on the same device.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::lifecycle::Lifecycle;
use crate::driver::{EngineIdentity, EngineSettings};
use crate::state_folder;
use sluice_config::owner::Untrusted;

/// Bytes of a full file, which holds some thousands of steps.
const FILE_BYTES: u64 = 4 << 20;
/// The current file, and the one before it.
const NAMES: [&str; 2] = ["journal.jsonl", "journal.1.jsonl"];
/// A new file has this name until it is complete.
const DRAFT: &str = "journal.tmp";
const LOCK: &str = "lock";
/// How long a released lock may stay taken, because a process that is being spawned shares the lock
/// until its program runs.
const LOCK_WAIT: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The settings of an engine, and the configuration that they come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    #[serde(flatten)]
    pub settings: EngineSettings,
    /// Digest of the engine configuration on which the settings are based. Changes by `set` are
    /// kept on top of this configuration, but a new configuration drops them.
    #[serde(default)]
    pub configured: String,
}

impl Lifecycle<Setup> {
    /// The setup that the engine is being changed to, or runs with.
    pub(crate) fn heads_for(&self) -> &Setup {
        match &self.change {
            Some(change) if change.failed.is_none() => &change.to,
            _ => &self.wanted,
        }
    }
}

/// One line: the step that is about to begin for one backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JournalLine {
    /// RFC 3339 in UTC.
    pub at: String,
    /// `pool/backend`.
    pub backend: String,
    /// The step that begins, and everything that decides the next one.
    #[serde(rename = "life")]
    pub lifecycle: Lifecycle<Setup>,
    /// How a later gateway finds the engine; absent until the engine was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<EngineIdentity>,
    /// How a later gateway finds the engine that sleeps next to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aside: Option<EngineIdentity>,
    /// Digest of program, port, devices and environment.
    #[serde(default)]
    pub identity: String,
    /// Duration of the last start, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_ms: Option<u64>,
    /// Golden prompts, and the texts generated before the last restart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub golden: Vec<(String, String)>,
}

/// Why the journal cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The folder or a file in it cannot be read or written.
    #[error("fleet.state: {path}: {source}; name a folder that the gateway may write to", path = path.display())]
    Unusable {
        /// The folder or file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another user controls the folder or a file in it.
    #[error("fleet.state: {0}")]
    Untrusted(#[from] Untrusted),
    /// Another gateway uses the folder.
    #[error("fleet.state: {path} is used by another running sluice; take over from it (serve --upgrade), stop it, or give this one its own folder", path = path.display())]
    Taken {
        /// The folder.
        path: PathBuf,
    },
}

#[derive(Debug)]
pub(crate) struct Journal {
    folder: PathBuf,
    file: File,
    bytes: u64,
    bytes_max: u64,
    last: BTreeMap<String, JournalLine>,
    lock: File,
    /// Whether the journal was unlocked for another gateway.
    closed: bool,
}

impl Journal {
    /// Opens the journal in `folder` and reads the last line of each backend. Creates a missing
    /// folder.
    ///
    /// # Errors
    /// The folder cannot be used, or is in use.
    pub(crate) fn open(folder: &Path) -> Result<Self, JournalError> {
        Self::open_with(folder, FILE_BYTES, || std::thread::sleep(LOCK_PAUSE))
    }

    /// Calls `pause` between two attempts to lock the folder.
    fn open_with(folder: &Path, bytes_max: u64, pause: impl FnMut()) -> Result<Self, JournalError> {
        let at = |path: PathBuf| move |source| JournalError::Unusable { path, source };
        state_folder::check(folder)?;
        state_folder::open(folder).map_err(at(folder.to_owned()))?;
        let lock_path = folder.join(LOCK);
        let lock = state_folder::options().truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(at(lock_path.clone()))?;
        match take(&lock, pause) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::Taken { path: folder.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(at(lock_path)(source)),
        }
        let mut last = BTreeMap::new();
        let mut had_secrets = false;
        for name in NAMES.iter().rev() {
            let path = folder.join(name);
            had_secrets |= read_into(&path, &mut last).map_err(at(path))?;
        }
        let path = folder.join(NAMES[0]);
        let (file, bytes) = open_at_line_end(&path).map_err(at(path))?;
        let mut journal = Self { folder: folder.to_owned(), file, bytes, bytes_max, last, lock, closed: false };
        if had_secrets {
            let old = folder.join(NAMES[1]);
            journal.rotate().and_then(|()| std::fs::remove_file(&old)).map_err(at(old))?;
        }
        Ok(journal)
    }

    /// The last lines of the journal in a folder, without a lock; none if it cannot be read.
    pub(crate) fn read_last(folder: &Path) -> BTreeMap<String, JournalLine> {
        let mut last = BTreeMap::new();
        for name in NAMES.iter().rev() {
            // The caller only warns, so an unreadable journal counts as empty.
            let _ = read_into(&folder.join(name), &mut last);
        }
        last
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn last(&self) -> &BTreeMap<String, JournalLine> {
        &self.last
    }

    /// Writes a line; it is on the disk when this returns. Blocks for as long as the disk takes.
    ///
    /// # Errors
    /// The disk's error; then the step must not begin.
    pub(crate) fn write(&mut self, record: JournalLine) -> io::Result<()> {
        if self.closed {
            return Err(io::Error::other("another gateway has taken it over"));
        }
        let line = line_of(&record)?;
        if self.bytes + line.len() as u64 > self.bytes_max {
            self.rotate()?;
        }
        if let Err(error) = self.file.write_all(&line).and_then(|()| self.file.sync_data()) {
            // The next line must not continue half a line.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += line.len() as u64;
        self.last.insert(record.backend.clone(), record);
        Ok(())
    }

    /// Unlocks the folder for another gateway; every later write fails.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        if let Err(error) = self.lock.unlock() {
            tracing::error!(folder = %self.folder.display(), %error, "the journal cannot be unlocked");
        }
    }

    /// Forgets a backend that is not configured any more and has no engine: the next file begins
    /// without it.
    pub(crate) fn forget(&mut self, backend: &str) {
        self.last.remove(backend);
    }

    /// Begins a new file with the last lines. At every moment one of the two files has the last
    /// line of each backend.
    fn rotate(&mut self) -> io::Result<()> {
        let draft = self.folder.join(DRAFT);
        let mut file = state_folder::options().write(true).truncate(true).open(&draft)?;
        let mut bytes = 0;
        for record in self.last.values() {
            let line = line_of(record)?;
            file.write_all(&line)?;
            bytes += line.len() as u64;
        }
        file.sync_all()?;
        std::fs::rename(self.folder.join(NAMES[0]), self.folder.join(NAMES[1]))?;
        std::fs::rename(&draft, self.folder.join(NAMES[0]))?;
        File::open(&self.folder)?.sync_all()?;
        (self.file, self.bytes) = (file, bytes);
        Ok(())
    }
}

fn line_of(record: &JournalLine) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

/// Reads the lines of a file into `last`; a later line replaces an earlier one of the same backend.
/// Invalid lines are skipped. Drops secrets, and returns whether there were any.
fn read_into(path: &Path, last: &mut BTreeMap<String, JournalLine>) -> io::Result<bool> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let mut had_secrets = false;
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        match serde_json::from_slice::<JournalLine>(line) {
            Ok(mut record) => {
                had_secrets |= drop_secrets(&mut record.lifecycle);
                last.insert(record.backend.clone(), record);
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a line of the journal cannot be read; left out")
            }
        }
    }
    Ok(had_secrets)
}

fn drop_secrets(life: &mut Lifecycle<Setup>) -> bool {
    let change = life.change.as_mut().into_iter().flat_map(|change| [&mut change.from, &mut change.to]);
    let setups = [&mut life.wanted, &mut life.good].into_iter().chain(change);
    setups.map(|setup| setup.settings.drop_secrets()).fold(false, std::ops::BitOr::bitor)
}

/// Checks that the journal's files in this folder could be opened. Writes, creates and locks
/// nothing.
///
/// # Errors
/// [`JournalError::Unusable`].
pub fn check_journal(folder: &Path) -> Result<(), JournalError> {
    for path in [LOCK, NAMES[0]].map(|name| folder.join(name)) {
        match File::options().read(true).append(true).open(&path) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(JournalError::Unusable { path, source }),
        }
    }
    Ok(())
}

/// Opens a file for appending. If the last line was cut short, ends that line first.
fn open_at_line_end(path: &Path) -> io::Result<(File, u64)> {
    let mut file = state_folder::options().read(true).append(true).open(path)?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    if text.last().is_some_and(|byte| *byte != b'\n') {
        file.write_all(b"\n")?;
        text.push(b'\n');
    }
    Ok((file, text.len() as u64))
}

/// Locks a file. Waits for up to [`LOCK_WAIT`] if the lock is taken.
fn take(lock: &File, mut pause: impl FnMut()) -> Result<(), TryLockError> {
    let until = Instant::now() + LOCK_WAIT;
    loop {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < until => pause(),
            other => return other,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::engine::lifecycle::Step;

    pub(crate) fn record(backend: &str, step: Step) -> JournalLine {
        let mut lifecycle = Lifecycle::new(Setup::default());
        lifecycle.step = step;
        let (at, backend) = ("2026-01-01T00:00:00Z".to_owned(), backend.to_owned());
        let identity = String::new();
        JournalLine { at, backend, lifecycle, trace: None, aside: None, identity, golden: Vec::new(), start_ms: None }
    }

    #[test]
    fn the_last_line_of_each_backend_is_what_the_next_gateway_reads_and_one_that_was_cut_short_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        for (backend, step) in [("p/a", Step::Start), ("p/b", Step::Start), ("p/a", Step::Serve)] {
            journal.write(record(backend, step)).unwrap();
        }
        drop(journal);
        let path = folder.path().join(NAMES[0]);
        let text = std::fs::read(&path).unwrap();
        for missing in 1..40 {
            let mut cut = text.clone();
            cut.truncate(text.len() - missing);
            std::fs::write(&path, &cut).unwrap();
            let mut journal = Journal::open(folder.path()).unwrap();
            // Only the line feed is missing, so the line is whole.
            let expected = if missing == 1 { Step::Serve } else { Step::Start };
            assert_eq!((journal.last()["p/a"].lifecycle.step, journal.last().len()), (expected, 2));
            journal.write(record("p/a", Step::Drain)).unwrap();
            drop(journal);
            assert_eq!(Journal::open(folder.path()).unwrap().last()["p/a"].lifecycle.step, Step::Drain);
        }
    }

    #[test]
    fn two_files_of_bounded_size_hold_the_last_line_of_each_backend_however_much_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let bytes_max = 4_096;
        let mut journal = Journal::open_with(folder.path(), bytes_max, || ()).unwrap();
        journal.write(record("p/quiet", Step::Hold)).unwrap();
        (0..200).for_each(|_| journal.write(record("p/busy", Step::Serve)).unwrap());
        drop(journal);
        for name in NAMES {
            assert!(std::fs::metadata(folder.path().join(name)).unwrap().len() <= bytes_max);
        }
        let journal = Journal::open_with(folder.path(), bytes_max, || ()).unwrap();
        assert_eq!(journal.last()["p/quiet"].lifecycle.step, Step::Hold);
        assert_eq!(journal.last().len(), 2);
    }

    #[test]
    fn secrets_that_an_earlier_version_wrote_are_gone_from_both_files_once_it_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let args = r#"{"args":{"api-key":"S3cret","hf_token":"S3cret","max-num-seqs":40}}"#;
        let line = format!(
            r#"{{"at":"2026-01-01T00:00:00Z","backend":"p/a","life":{{"step":"serve","wanted":{args},"good":{args},
            "change":{{"id":3,"from":{args},"to":{args},"cut":true,"failed":null}},"ended":null,"leaving":false,"why":null,
            "then":"start","restarts":[],"attempts":0}}}}"#
        );
        NAMES.iter().for_each(|name| std::fs::write(folder.path().join(name), line.replace('\n', "")).unwrap());
        let journal = Journal::open(folder.path()).unwrap();
        assert_eq!(journal.last()["p/a"].lifecycle.wanted.settings.int("max-num-seqs"), Some(40));
        for name in NAMES {
            let text = std::fs::read_to_string(folder.path().join(name)).unwrap_or_default();
            assert!(!text.contains("S3cret"), "{name}: {text}");
        }
        drop(journal);
        assert_eq!(Journal::open(folder.path()).unwrap().last().len(), 1);
    }

    #[test]
    fn a_folder_belongs_to_one_gateway_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let first = Journal::open(folder.path()).unwrap();
        let error = Journal::open(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("used by another running sluice") && error.contains("give this one its own folder"),
            "{error}"
        );
        drop(first);
        Journal::open(folder.path()).unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = Journal::open(&file).unwrap_err().to_string();
        assert!(error.contains("name a folder that the gateway may write to"), "{error}");
    }

    #[test]
    fn a_journal_that_others_may_write_to_is_not_read() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAMES[0]);
        std::fs::write(&path, "{}").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let error = Journal::open(folder.path()).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, JournalError::Untrusted(_))
                && text.starts_with("fleet.state: ")
                && text.contains("chmod go-w"),
            "{text}"
        );
        assert!(!folder.path().join(LOCK).exists(), "nothing was begun");
    }

    #[test]
    fn a_line_of_an_earlier_version_is_still_read() {
        let folder = tempfile::tempdir().unwrap();
        let line = r#"{"at":"2026-01-01T00:00:00Z","backend":"p/a","life":{"step":"ramp","wanted":{"args":{"max-num-seqs":40},
            "configured":"c"},"good":{"args":{}},"change":{"id":3,"from":{"args":{}},"to":{"args":{}},"cut":true,"failed":null},
            "ended":{"id":2,"outcome":"rolled_back","why":"x"},"leaving":false,"why":null,"then":"backoff","restarts":[1],
            "attempts":1},"trace":{"by":"command"},"identity":"i"}"#;
        std::fs::write(folder.path().join(NAMES[0]), line.replace('\n', "")).unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        let life = &journal.last()["p/a"].lifecycle;
        assert_eq!((life.step, life.wanted.settings.int("max-num-seqs")), (Step::Ramp, Some(40)));
        assert_eq!((life.change.as_ref().unwrap().id, life.ended.as_ref().unwrap().id), (3, 2));
    }

    #[test]
    fn a_lock_that_a_process_shares_until_it_runs_its_program_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        let mut shared = Some(journal.lock.try_clone().unwrap());
        drop(journal);
        assert!(matches!(Journal::open(folder.path()), Err(JournalError::Taken { .. })), "it stays taken");
        // The spawned process gives up the lock after the first attempt to open the journal.
        Journal::open_with(folder.path(), FILE_BYTES, || drop(shared.take())).expect("it is free soon");
        assert!(shared.is_none(), "there was a second attempt");
    }
}
