//! The access log: writes sampled lines about finished requests to a file, without delaying
//! requests.
//!
//! One thread writes a buffer in memory to which lines are appended. The first line wakes the
//! thread, which waits [`LINGER`] for more lines, so that busy traffic costs no system call per
//! request. When the buffer is full, lines are dropped and counted. A hash of the request id
//! selects the sample, so all gateways decide alike.
//!
//! Rotation: before writing, at most once a second, the thread checks that the path still names the
//! open file, so the file may be renamed or removed without a signal. [`AccessLogWriter::reopen`]
//! makes this check at once. If the path cannot be opened, lines still go to the old file.
//!
//! Bounds: [`BUFFER_BYTES`] of waiting lines, and as much being written. Dropping the last clone
//! writes the rest.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::{Condvar, Mutex};
use twox_hash::XxHash3_64;

use super::line::{Shown, line};
use crate::flow::Record;
use sluice_config::{AccessLog, LogTarget};

/// Bytes of waiting lines: about 7,000 lines, half a second at 14,000 requests per second.
const BUFFER_BYTES: usize = 4 << 20;
/// Bytes at which the writer stops waiting for more.
const BATCH_BYTES: usize = 512 << 10;
/// How long the writer waits for more lines.
const LINGER: Duration = Duration::from_millis(100);
const ROTATION_CHECK: Duration = Duration::from_secs(1);
/// The longest time that [`AccessLogWriter::flush`] waits for the disk.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Readable only by the operator and their group, because lines name keys and models.
const FILE_MODE: u32 = 0o640;

/// An error that leaves the gateway without an access log.
#[derive(Debug, thiserror::Error)]
pub enum AccessLogError {
    /// The file cannot be opened for appending.
    #[error("cannot open the {what} {}: {source}; check its path in the configuration and who may write there", path.display())]
    Open {
        /// "access log" or "file of records".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The thread cannot be started.
    #[error("cannot start the thread that writes the {what}: {source}; check the limit on processes (ulimit -u)")]
    Thread {
        /// "access log" or "file of records".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

const ACCESS_LOG: &str = "access log";

/// The access log, or the records. A clone is the same log.
#[derive(Clone)]
pub struct AccessLogWriter {
    running: Arc<Running>,
}

impl std::fmt::Debug for AccessLogWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AccessLogWriter").field("dropped", &self.dropped()).finish_non_exhaustive()
    }
}

struct Running {
    shared: Arc<Shared>,
    sample: Sample,
    shown: Shown,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    idle: Condvar,
    dropped: AtomicU64,
}

#[derive(Default)]
struct State {
    buffer: Vec<u8>,
    lines: u64,
    writing: bool,
    flush_now: bool,
    reopen: bool,
    closing: bool,
}

/// Receiver of batches of lines.
pub(super) trait Output: Send + 'static {
    /// Writes whole lines. After an error, some of them may have been written. `reopen`: the file
    /// must be opened again.
    fn write(&mut self, lines: &[u8], reopen: bool) -> io::Result<()>;
}

impl AccessLogWriter {
    /// Opens the configured log.
    pub fn open(config: &AccessLog) -> Result<Self, AccessLogError> {
        let output: Box<dyn Output> = match &config.path {
            LogTarget::Stderr => Box::new(Stderr),
            LogTarget::File(path) => Box::new(Appended::open(path).map_err(|source| AccessLogError::Open {
                what: ACCESS_LOG,
                path: path.clone(),
                source,
            })?),
        };
        let shown = Shown { client: config.client_address, salt: None };
        Self::with(output, ACCESS_LOG, config.sample, shown)
    }

    /// Writes lines to `output`. `what`: the log's name in messages.
    pub(super) fn with(
        output: Box<dyn Output>,
        what: &'static str,
        sample: f64,
        shown: Shown,
    ) -> Result<Self, AccessLogError> {
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { state, wake: Condvar::new(), idle: Condvar::new(), dropped: AtomicU64::new(0) });
        let writer = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(what.replace(' ', "-"))
            .spawn(move || writer.run(output, what))
            .map_err(|source| AccessLogError::Thread { what, source })?;
        Ok(Self { running: Arc::new(Running { shared, sample: Sample::new(sample), shown, thread: Some(thread) }) })
    }

    /// Takes the line of an ended request, if it is in the sample.
    pub(super) fn write(&self, record: &Record) {
        if self.running.sample.takes(&record.request_id) {
            self.running.shared.append(&line(record, Timestamp::now(), &self.running.shown));
        }
    }

    /// Lines lost so far, because the buffer was full or writing failed.
    pub fn dropped(&self) -> u64 {
        self.running.shared.dropped.load(Ordering::Relaxed)
    }

    /// If the path names another file, makes the thread open it soon, even without new lines.
    pub fn reopen(&self) {
        self.running.shared.state.lock().reopen = true;
        self.running.shared.wake.notify_one();
    }

    /// Waits until all lines taken so far are written, at most 5 s.
    pub fn flush(&self) {
        let shared = &self.running.shared;
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        let mut state = shared.state.lock();
        while !state.buffer.is_empty() || state.writing {
            state.flush_now = true;
            shared.wake.notify_one();
            if shared.idle.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn append(&self, line: &[u8]) {
        let mut state = self.state.lock();
        if state.buffer.len() + line.len() > BUFFER_BYTES {
            drop(state);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let before = state.buffer.len();
        state.buffer.extend_from_slice(line);
        state.lines += 1;
        let wakes = before == 0 || (before < BATCH_BYTES && state.buffer.len() >= BATCH_BYTES);
        drop(state);
        if wakes {
            self.wake.notify_one();
        }
    }

    fn run(&self, mut output: Box<dyn Output>, what: &str) {
        let mut batch = Vec::new();
        let mut failing = false;
        loop {
            let mut state = self.state.lock();
            while state.buffer.is_empty() && !state.closing && !state.reopen {
                self.wake.wait(&mut state);
            }
            if state.buffer.is_empty() && state.closing {
                return;
            }
            if !state.closing && !state.flush_now && !state.reopen && state.buffer.len() < BATCH_BYTES {
                self.wake.wait_for(&mut state, LINGER);
            }
            std::mem::swap(&mut state.buffer, &mut batch);
            let lines = std::mem::take(&mut state.lines);
            let reopen = std::mem::take(&mut state.reopen);
            state.flush_now = false;
            state.writing = true;
            drop(state);
            let written = output.write(&batch, reopen);
            self.account(written, lines, &mut failing, what);
            batch.clear();
            self.state.lock().writing = false;
            self.idle.notify_all();
        }
    }

    /// Counts a failed batch as lost, although some of it may have been written. Warns once until
    /// writing works again.
    fn account(&self, written: io::Result<()>, lines: u64, failing: &mut bool, what: &str) {
        match written {
            Ok(()) => *failing = false,
            Err(error) => {
                self.dropped.fetch_add(lines, Ordering::Relaxed);
                if !std::mem::replace(failing, true) {
                    tracing::warn!(%error, "the {what} cannot be written; lines are dropped until then");
                }
            }
        }
    }
}

/// The sample: request ids whose hash is below the share of all hashes.
struct Sample {
    below: Option<u64>,
}

impl Sample {
    fn new(share: f64) -> Self {
        // The conversion to an integer saturates. A share of 1 takes every hash.
        Self { below: (share < 1.0).then_some((share * u64::MAX as f64) as u64) }
    }

    fn takes(&self, request_id: &str) -> bool {
        self.below.is_none_or(|below| XxHash3_64::oneshot(request_id.as_bytes()) < below)
    }
}

struct Stderr;

impl Output for Stderr {
    fn write(&mut self, lines: &[u8], _: bool) -> io::Result<()> {
        io::stderr().lock().write_all(lines)
    }
}

/// A file to which lines are appended, and which is found again after rotation.
pub(super) struct Appended {
    path: PathBuf,
    pub(super) file: File,
    identity: (u64, u64),
    checked: Instant,
}

impl Appended {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(FILE_MODE).open(path)?;
        let metadata = file.metadata()?;
        let identity = (metadata.dev(), metadata.ino());
        Ok(Self { path: path.to_owned(), file, identity, checked: Instant::now() })
    }

    /// Whether the path names another file by now, or none.
    pub(super) fn moved(&self) -> bool {
        std::fs::metadata(&self.path).map_or(true, |now| (now.dev(), now.ino()) != self.identity)
    }

    /// Opens the path again if it names another file. If that fails, the old file stays open.
    pub(super) fn follow(&mut self) -> io::Result<()> {
        self.checked = Instant::now();
        if self.moved() {
            *self = Self::open(&self.path)?;
        }
        Ok(())
    }

    pub(super) fn is_due(&self) -> bool {
        self.checked.elapsed() >= ROTATION_CHECK
    }
}

impl Output for Appended {
    fn write(&mut self, lines: &[u8], reopen: bool) -> io::Result<()> {
        if reopen || self.is_due() {
            let _ = self.follow();
        }
        self.file.write_all(lines)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::testing::{completed, record};
    use super::*;
    use crate::flow::Outcome;

    /// An output that reports each batch and blocks until the test releases it.
    struct Stuck {
        taken: mpsc::Sender<usize>,
        resume: mpsc::Receiver<io::Result<()>>,
    }

    impl Output for Stuck {
        fn write(&mut self, lines: &[u8], _: bool) -> io::Result<()> {
            let _ = self.taken.send(lines.iter().filter(|byte| **byte == b'\n').count());
            self.resume.recv().unwrap_or(Ok(()))
        }
    }

    fn stuck() -> (AccessLogWriter, mpsc::Receiver<usize>, mpsc::Sender<io::Result<()>>) {
        let ((taken, seen), (go, resume)) = (mpsc::channel(), mpsc::channel());
        (AccessLogWriter::with(Box::new(Stuck { taken, resume }), ACCESS_LOG, 1.0, Shown::default()).unwrap(), seen, go)
    }

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn when_the_disk_blocks_lines_are_dropped_and_counted_and_requests_do_not_wait() {
        let (sink, taken, go) = stuck();
        let record = completed(Duration::from_millis(10), Duration::from_millis(5));
        sink.write(&record);
        assert_eq!(taken.recv_timeout(SOON), Ok(1));
        let each = line(&record, Timestamp::now(), &Shown::default()).len();
        let fit = BUFFER_BYTES / each;
        for _ in 0..fit + 10 {
            sink.write(&record);
        }
        assert_eq!(sink.dropped(), 10);
        go.send(Ok(())).unwrap();
        assert_eq!(taken.recv_timeout(SOON), Ok(fit));
        go.send(Err(io::Error::from(io::ErrorKind::StorageFull))).unwrap();
        sink.flush();
        assert_eq!(sink.dropped(), 10 + fit as u64);
    }

    #[test]
    fn lines_go_to_the_new_file_after_the_old_one_was_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, old) = (folder.path().join("access.log"), folder.path().join("access.log.1"));
        let config = AccessLog { path: LogTarget::File(path.clone()), sample: 1.0, client_address: false };
        let sink = AccessLogWriter::open(&config).unwrap();
        sink.write(&record(Outcome::Completed));
        sink.flush();
        std::fs::rename(&path, &old).unwrap();
        sink.reopen();
        sink.write(&record(Outcome::Refused));
        sink.write(&record(Outcome::Refused));
        drop(sink);
        let count = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
        assert_eq!((count(&old), count(&path)), (1, 2));
    }

    #[test]
    fn the_last_clone_dropped_writes_what_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        let sink = AccessLogWriter::open(&AccessLog {
            path: LogTarget::File(path.clone()),
            sample: 1.0,
            client_address: false,
        })
        .unwrap();
        let other = sink.clone();
        drop(sink);
        other.write(&record(Outcome::Completed));
        drop(other);
        assert_eq!(std::fs::read_to_string(path).unwrap().lines().count(), 1);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_that_says_what_to_check() {
        let config =
            AccessLog { path: LogTarget::File("/nonexistent/access.log".into()), sample: 1.0, client_address: false };
        let error = AccessLogWriter::open(&config).unwrap_err().to_string();
        assert!(error.starts_with("cannot open the access log /nonexistent/access.log: No such file"), "{error}");
    }

    #[test]
    fn the_sample_is_the_configured_share_and_the_same_everywhere() {
        for share in [0.0, 0.1, 1.0] {
            let (sample, other) = (Sample::new(share), Sample::new(share));
            let ids: Vec<String> = (0..20_000).map(|id| format!("req-{id}")).collect();
            let taken = ids.iter().filter(|id| sample.takes(id)).count() as f64 / 20_000.0;
            assert!((taken - share).abs() < 0.01, "{taken} of {share}");
            assert!(ids.iter().all(|id| sample.takes(id) == other.takes(id)));
        }
    }
}
