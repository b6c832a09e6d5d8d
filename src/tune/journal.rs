//! The journal: each trial as a line of JSON, written before the next trial begins.
//!
//! The first line names file, method and seed. A search repeats the same trials when it gets the
//! same outcomes. So a killed tuning begins again with the outcomes of the journal, and only work
//! in progress is lost. With real engines each load of a rate search has a line. Loads after the
//! last trial belong to the trial under way, which continues from there.
//!
//! After a failed write, the torn line is cut off, so that a full disk leaves only whole lines.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::TuneError;
use crate::load_line::LoadLine;
use crate::trial::Trial;
use sluice_bench::search::TrialRecord;
use sluice_config::owner::check_named_file;

/// Version of the format. A journal of another version is refused.
const FORM: u32 = 2;

/// The tuning that a journal belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    form: u32,
    /// The fingerprint of the tuned file.
    pub fingerprint: String,
    /// The method.
    pub method: String,
    /// The seed.
    pub seed: u64,
    #[serde(default)]
    real: bool,
}

impl Header {
    /// The header of a tuning.
    pub fn new(fingerprint: &str, method: &str, seed: u64) -> Self {
        Self { form: FORM, fingerprint: fingerprint.to_owned(), method: method.to_owned(), seed, real: false }
    }

    /// Sets whether the engines are real.
    #[must_use]
    pub fn of_real_engines(self, real: bool) -> Self {
        Self { real, ..self }
    }
}

/// An open journal.
#[derive(Debug)]
pub struct Journal<F = File> {
    path: PathBuf,
    file: F,
    length: u64,
    /// Loads of the trial that was under way.
    loads: Vec<LoadLine>,
}

/// A file, or in tests a storage that fails.
pub trait Storage: Write {
    /// Makes written bytes durable.
    fn sync(&mut self) -> std::io::Result<()>;

    /// Removes all bytes after the first `length`. The next write continues there.
    fn truncate(&mut self, length: u64) -> std::io::Result<()>;
}

impl Storage for File {
    fn sync(&mut self) -> std::io::Result<()> {
        self.sync_data()
    }

    fn truncate(&mut self, length: u64) -> std::io::Result<()> {
        self.set_len(length)?;
        self.seek(SeekFrom::Start(length)).map(drop)
    }
}

impl Journal {
    /// Begins a journal.
    pub fn create(path: &Path, header: &Header) -> Result<Self, TuneError> {
        let file =
            OpenOptions::new().write(true).create_new(true).open(path).map_err(|source| match source.kind() {
                std::io::ErrorKind::AlreadyExists => {
                    unusable(path, "it exists; continue it with --resume, or delete it to begin again".to_owned())
                }
                _ => TuneError::JournalWrite { path: path.to_owned(), source },
            })?;
        let mut journal = Self { path: path.to_owned(), file, length: 0, loads: Vec::new() };
        journal.write(header)?;
        Ok(journal)
    }

    /// Opens a journal to continue it, with the trials in it.
    pub fn resume(path: &Path, header: &Header) -> Result<(Self, Vec<Trial>), TuneError> {
        check_named_file(path).map_err(|untrusted| unusable(path, untrusted.to_string()))?;
        let open = || -> std::io::Result<(File, Vec<u8>)> {
            let mut file = OpenOptions::new().read(true).write(true).open(path)?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok((file, bytes))
        };
        let (file, mut bytes) = open().map_err(|error| unusable(path, format!("{error}; begin without --resume")))?;
        // A torn line may end within a character.
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        let text = String::from_utf8_lossy(&bytes);
        let (trials, loads) = read(&text, header).map_err(|reason| unusable(path, reason))?;
        let mut journal = Self { path: path.to_owned(), file, length: bytes.len() as u64, loads };
        journal.file.truncate(journal.length).map_err(|source| journal.failed(source))?;
        if text.is_empty() {
            // The tuning was killed before the first line was whole.
            journal.write(header)?;
        }
        Ok((journal, trials))
    }
}

fn read(text: &str, header: &Header) -> Result<(Vec<Trial>, Vec<LoadLine>), String> {
    let mut lines = text.lines();
    let Some(first) = lines.next() else { return Ok(Default::default()) };
    let found: Header = serde_json::from_str(first)
        .map_err(|error| format!("line 1 is not its head ({error}); delete it to begin again"))?;
    if let Some(why) = found.differs(header) {
        return Err(format!("{why}; use another journal, or delete it to begin again"));
    }
    let (mut trials, mut loads) = (Vec::new(), Vec::new());
    for (number, line) in (2..).zip(lines) {
        let read = if line.starts_with(LoadLine::BEGINS) {
            serde_json::from_str(line).map(|load| loads.push(load))
        } else {
            loads.clear();
            serde_json::from_str(line).map(|trial| trials.push(trial))
        };
        read.map_err(|error| format!("line {number} is damaged ({error}); remove it and all after it to continue"))?;
    }
    Ok((trials, loads))
}

impl Header {
    fn differs(&self, wanted: &Self) -> Option<String> {
        if self.form != wanted.form {
            Some(format!("its format has version {} and not {}", self.form, wanted.form))
        } else if self.fingerprint != wanted.fingerprint {
            Some("the file has changed since it was begun".to_owned())
        } else if self.method != wanted.method {
            Some(format!("it is of the method {} and not {}", self.method, wanted.method))
        } else if self.real != wanted.real {
            let [engines, others] = if self.real { ["real", "simulated"] } else { ["simulated", "real"] };
            Some(format!("it is of {engines} engines and not of {others} ones"))
        } else {
            (self.seed != wanted.seed).then(|| format!("it is of the seed {} and not {}", self.seed, wanted.seed))
        }
    }
}

impl<F: Storage> Journal<F> {
    /// The error if the next trial of the journal is not the one that is due.
    pub(crate) fn mismatch(&self, found: &str) -> TuneError {
        let reason =
            format!("it has a trial of '{found}' where another one is due, so another version wrote it; delete it");
        unusable(&self.path, reason)
    }

    /// Adds a trial.
    ///
    /// # Errors
    /// The trial cannot be written. The journal keeps its content.
    pub fn append(&mut self, trial: &Trial) -> Result<(), TuneError> {
        self.write(trial)
    }

    /// Adds a load of a rate search.
    ///
    /// # Errors
    /// The load cannot be written. The journal keeps its content.
    pub(crate) fn append_load(&mut self, load: &LoadLine) -> Result<(), TuneError> {
        self.write(load)
    }

    /// Takes the loads of the trial that was under way, if it has the setting `of`. The last load
    /// runs again, because some observations, such as the state of the KV cache, exist only during
    /// a load.
    pub(crate) fn take_loads(&mut self, of: &Value) -> Vec<TrialRecord> {
        let mut loads = std::mem::take(&mut self.loads);
        loads.pop();
        loads.into_iter().map(|line| line.load).filter(|load| load.of == *of).map(|load| load.record).collect()
    }

    fn write(&mut self, line: &impl Serialize) -> Result<(), TuneError> {
        let encoded = serde_json::to_string(line).map_err(|error| self.failed(error.into()))? + "\n";
        let written = self.file.write_all(encoded.as_bytes()).and_then(|()| self.file.sync());
        if let Err(source) = written {
            // If this fails, the next start cuts the torn line off.
            let _ = self.file.truncate(self.length);
            return Err(self.failed(source));
        }
        self.length += encoded.len() as u64;
        Ok(())
    }

    fn failed(&self, source: std::io::Error) -> TuneError {
        TuneError::JournalWrite { path: self.path.clone(), source }
    }
}

fn unusable(path: &Path, reason: String) -> TuneError {
    TuneError::Journal { path: path.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::identity;
    use crate::trial::{Effort, Outcome};
    use proptest::prelude::*;
    use sluice_bench::search::{RatePoint, TrialKind, TrialLoad, TrialReport, TrialStats, TrialVerdict};
    use sluice_config::ArgValue;

    fn trial(seed: u64) -> Trial {
        Trial {
            setting: [("vllm.max-num-seqs".to_owned(), crate::setting::value("64"))].into(),
            effort: Effort::Race(Some(12.5)),
            seed,
            outcome: Outcome::Refused { reason: "zu groß".to_owned(), foreseen: true },
            against: vec![0.5],
            bounded: Vec::new(),
            beside: vec![0.25],
            seconds: 1.5,
            start_seconds: 70.0,
            starts: 1,
            loads: 2,
            requests: 3,
            kv_full: true,
            notes: vec!["a note".to_owned()],
        }
    }

    fn header() -> Header {
        Header::new("abc", "race", 7)
    }

    fn written(count: u64) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, &header()).unwrap();
        (0..count).for_each(|seed| journal.append(&trial(seed)).unwrap());
        (folder, path)
    }

    fn load(rate: f64) -> TrialRecord {
        let estimate = |value| sluice_core::stats::Estimate { value, low: 0.5, high: f64::INFINITY };
        let report = TrialReport {
            load: TrialLoad::Rate(rate),
            kind: TrialKind::Sample,
            verdict: TrialVerdict::Holds,
            requests: 30,
            group: 1,
            attainment: estimate(0.99),
            stats: TrialStats { throughput: estimate(4.0), delivered: 1.0, seconds: 2.5 },
        };
        TrialRecord { report, points: vec![RatePoint { rate, requests: 30.0, misses: 1.0, effect: 1.5 }] }
    }

    #[test]
    fn the_loads_of_the_trial_under_way_are_read_again_but_for_the_last() {
        let (_folder, path) = written(1);
        let mut journal = Journal::resume(&path, &header()).unwrap().0;
        let of = |pool: &str| identity(&[(format!("pool.{pool}.slots"), ArgValue::Int(16))].into());
        let write = |journal: &mut Journal, of: Value, rates: &[f64]| {
            let lines = rates.iter().map(|rate| LoadLine::new(of.clone(), &load(*rate)));
            lines.for_each(|line| journal.append_load(&line).unwrap());
        };
        write(&mut journal, of("a"), &[1.0, 2.0, 3.0]);
        let (mut resumed, trials) = Journal::resume(&path, &header()).unwrap();
        assert_eq!((resumed.take_loads(&of("a")), trials.len()), (vec![load(1.0), load(2.0)], 1));
        assert!(resumed.take_loads(&of("a")).is_empty(), "they are of one trial only");
        assert!(Journal::resume(&path, &header()).unwrap().0.take_loads(&of("b")).is_empty());
        // After the end of the trial, the loads are not used.
        journal.append(&trial(1)).unwrap();
        write(&mut journal, of("c"), &[4.0, 5.0]);
        let (mut resumed, trials) = Journal::resume(&path, &header()).unwrap();
        assert_eq!((resumed.take_loads(&of("c")), trials.len()), (vec![load(4.0)], 2));
        // Earlier versions wrote names, which two settings may share. Such loads run again.
        journal.append(&trial(2)).unwrap();
        write(&mut journal, "slots=16".into(), &[4.0, 5.0]);
        let (mut resumed, trials) = Journal::resume(&path, &header()).unwrap();
        assert_eq!((resumed.take_loads(&of("c")), trials.len()), (vec![], 3));
    }

    #[test]
    fn what_was_written_is_read_again() {
        let (_folder, path) = written(3);
        let (mut journal, trials) = Journal::resume(&path, &header()).unwrap();
        assert_eq!(trials, [trial(0), trial(1), trial(2)]);
        journal.append(&trial(3)).unwrap();
        assert_eq!(Journal::resume(&path, &header()).unwrap().1.len(), 4);
        assert!(Journal::create(&path, &header()).unwrap_err().to_string().contains("--resume"));
    }

    #[test]
    fn a_journal_of_something_else_is_refused_with_the_reason() {
        let (_folder, path) = written(1);
        for (other, reason) in [
            (Header::new("abd", "race", 7), "file has changed"),
            (Header::new("abc", "random", 7), "method race"),
            (Header::new("abc", "race", 8), "seed 7"),
        ] {
            let error = Journal::resume(&path, &other).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let text = std::fs::read_to_string(&path).unwrap().replace("\"seed\":0", "\"seed\":x");
        std::fs::write(&path, text).unwrap();
        assert!(Journal::resume(&path, &header()).unwrap_err().to_string().contains("line 2 is damaged"));
    }

    struct Full {
        bytes: Vec<u8>,
        room: usize,
    }

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let taken = bytes.len().min(self.room - self.bytes.len());
            if taken == 0 {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            self.bytes.extend(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Storage for Full {
        fn sync(&mut self) -> std::io::Result<()> {
            Ok(())
        }

        fn truncate(&mut self, length: u64) -> std::io::Result<()> {
            self.bytes.truncate(length as usize);
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_said_and_leaves_whole_lines() {
        let file = Full { bytes: Vec::new(), room: 700 };
        let mut journal = Journal { path: "j".into(), file, length: 0, loads: Vec::new() };
        journal.write(&header()).unwrap();
        let error = (0..9).find_map(|seed| journal.append(&trial(seed)).err()).unwrap().to_string();
        assert!(error.contains("intact") && error.contains("--resume"), "{error}");
        let text = String::from_utf8(journal.file.bytes).unwrap();
        assert!(text.ends_with('\n') && text.lines().count() > 1);
        assert!(text.lines().skip(1).all(|line| serde_json::from_str::<Trial>(line).is_ok()));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_journal_cut_anywhere_resumes_with_a_beginning_of_its_trials(cut in 0.0..1.0) {
            let (_folder, path) = written(4);
            let bytes = std::fs::read(&path).unwrap();
            let kept = (bytes.len() as f64 * cut) as usize;
            std::fs::write(&path, &bytes[..kept]).unwrap();
            let (mut journal, trials) = Journal::resume(&path, &header()).unwrap();
            let count = trials.len() as u64;
            prop_assert!(trials.iter().zip(0..).all(|(found, seed)| *found == trial(seed)));
            (count..4).for_each(|seed| journal.append(&trial(seed)).unwrap());
            prop_assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }
}
