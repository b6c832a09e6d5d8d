//! The content of records, and rotation, which must not lose or tear a line.
//!
//! Files are so small that a few lines fill them.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use super::super::testing::completed;
use super::*;
use crate::flow::Record;
use sluice_core::openai::prefix::Beginning;
use sluice_core::openai::{EngineTimes, PromptPrefix};

fn prefix() -> PromptPrefix {
    let beginnings = [7, 8].map(|hash| Beginning { hash, end: 512 }).into_iter().collect();
    PromptPrefix { beginnings, bytes: 1_100 }
}

/// Files of 1,000 bytes, of which `files` full ones are kept.
fn config(path: &Path, files: u32) -> Records {
    let max_size = sluice_core::base::ByteSize(1_000);
    Records { path: path.to_owned(), max_size, files, sample: 1.0, client_address: false, salt: None }
}

/// The names of all files, and their lines. Checks that no file is too long or ends within a line.
fn lines(folder: &Path) -> (Vec<String>, Vec<String>) {
    let mut names: Vec<String> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let mut all = Vec::new();
    for name in &names {
        let text = fs::read_to_string(folder.join(name)).unwrap();
        assert!(text.len() <= 1_000 && text.ends_with('\n'), "{name}: {text}");
        all.extend(text.lines().map(str::to_owned));
    }
    (names, all)
}

#[test]
fn hashes_are_equal_for_the_same_key_only() {
    let (one, other) = (Salt::of([1; 32]), Salt::of([2; 32]));
    let hashes = one.hashes(&prefix());
    assert_eq!(hashes, one.hashes(&prefix()));
    assert!(hashes.iter().all(|hash| hash.len() == 16) && hashes[0] != hashes[1]);
    assert!(other.hashes(&prefix()).iter().all(|hash| !hashes.contains(hash)));
    assert!(!hashes.contains(&format!("{:016x}", 7)));
    let start = |salt: Option<&str>| {
        let salt = salt.map(|text| text.to_owned().into());
        Salt::new(&Records { salt, ..config(Path::new("x"), 1) }).unwrap().hashes(&prefix())
    };
    assert_ne!(start(None), start(None), "without a salt each start has its own");
    assert_eq!(start(Some("of all gateways")), start(Some("of all gateways")));
    assert_ne!(start(Some("of all gateways")), start(Some("of another")));
}

#[test]
fn rotation_loses_and_tears_no_line_and_keeps_to_its_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let mut files = RotatedFile::open(&config(&path, 60)).unwrap();
    let line = |number: usize| format!("{number:04} {}", "x".repeat(number * 4 % 300));
    for number in 0..40 {
        files.write((line(2 * number) + "\n" + &line(2 * number + 1) + "\n").as_bytes(), false).unwrap();
    }
    let (names, mut all) = lines(folder.path());
    all.sort();
    assert_eq!(all, (0..80).map(line).collect::<Vec<_>>());
    assert!(names.len() > 4, "{names:?}");
    // Another start continues the file, and keeps fewer files. The surplus files are removed at the
    // next rotation.
    let before = fs::metadata(&path).unwrap().len();
    let mut files = RotatedFile::open(&config(&path, 1)).unwrap();
    files.write(b"more\n", false).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), before + 5);
    files.write(&[vec![b'y'; 998], b"\n".to_vec()].concat(), false).unwrap();
    assert_eq!(lines(folder.path()).0, ["records.jsonl", "records.jsonl.1"]);
    assert!(fs::read_to_string(folder.path().join("records.jsonl.1")).unwrap().ends_with("more\n"));
}

#[test]
fn without_full_files_that_are_kept_the_file_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let mut files = RotatedFile::open(&config(&path, 0)).unwrap();
    files.write(&[b'x'; 900], false).unwrap();
    files.write(&[b'y'; 300], false).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [b'y'; 300]);
}

#[test]
fn several_gateways_on_one_path_lose_no_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let mut gateways = [0, 1].map(|_| RotatedFile::open(&config(&path, 90)).unwrap());
    for number in 0..100 {
        gateways[number % 2].write(format!("{number:099}\n").as_bytes(), false).unwrap();
    }
    let (names, all) = lines(folder.path());
    assert_eq!(all.into_iter().collect::<BTreeSet<_>>().len(), 100);
    assert_eq!(names.len(), 10, "each renames a full file once");
}

#[test]
fn a_line_that_was_cut_off_by_a_crash_stays_the_last_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    fs::write(&path, "whole\n{\"time\":").unwrap();
    let mut files = RotatedFile::open(&config(&path, 3)).unwrap();
    files.write(b"next\n", false).unwrap();
    files.write(b"and on\n", false).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "next\nand on\n");
    assert_eq!(fs::read_to_string(folder.path().join("records.jsonl.1")).unwrap(), "whole\n{\"time\":");
}

#[test]
fn a_file_that_was_renamed_is_opened_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (path, away) = (folder.path().join("records.jsonl"), folder.path().join("away"));
    let mut files = RotatedFile::open(&config(&path, 1)).unwrap();
    files.write(b"one\n", false).unwrap();
    fs::rename(&path, &away).unwrap();
    files.write(&[], true).unwrap();
    assert!(path.exists(), "at once, whether there is a line or not");
    files.write(b"two\n", false).unwrap();
    assert_eq!([&away, &path].map(|path| fs::read_to_string(path).unwrap()), ["one\n", "two\n"]);
}

/// `/dev/full` is a disk that is always full.
#[test]
fn a_full_disk_drops_records_and_counts_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let writer = open(&config(&path, 1)).unwrap();
    writer.write(&completed(Duration::from_millis(30), Duration::from_millis(6)));
    writer.flush();
    assert_eq!(writer.dropped(), 1);
}

/// A stream of which the engine reported its own times.
fn measured_by_engine() -> Record {
    let mut record = completed(Duration::from_millis(30), Duration::from_millis(6));
    let times = EngineTimes { queue: Duration::from_millis(12), prefill: Duration::from_micros(16_500) };
    record.stats.as_mut().unwrap().times = Some(times);
    record
}

#[test]
fn the_engines_times_count_only_if_one_engine_served_the_request() {
    let of = |record: Record| record.engine_times().map(|times| times.queue);
    assert_eq!(of(measured_by_engine()), Some(Duration::from_millis(12)));
    assert_eq!(of(Record { continued: 1, ..measured_by_engine() }), None);
}

#[test]
fn a_record_has_hashes_and_nothing_that_says_who_or_what() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let writer = open(&config(&path, 1)).unwrap();
    let record = measured_by_engine();
    writer.write(&Record {
        request_id: "private-1".into(),
        upstream_id: "private-2".into(),
        key: Some("private-3".into()),
        path: Some("private-4".into()),
        refused_model: Some("private-5".into()),
        prefix: Some(prefix().into()),
        ..record
    });
    writer.flush();
    let text = fs::read_to_string(&path).unwrap();
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(!text.contains("private"), "{text}");
    assert_eq!((line["version"].as_u64(), line["prompt_bytes"].as_u64()), (Some(1), Some(1_100)));
    assert_eq!(line["prefix"].as_array().map(Vec::len), Some(2));
    assert_eq!(line["backend_ttft_ms"], 30.0);
    assert_eq!([&line["engine_queue_ms"], &line["engine_prefill_ms"]], [12.0, 16.5]);
    // A key that the access log gains later may identify a client; it must be listed here to enter
    // records.
    let known = "version time route model pool home class backend arm fell_back_from copy stream estimate_tokens estimate_how \
                 prompt_tokens completion_tokens token_events cached_tokens queue_ms connect_ms ttft_ms backend_ttft_ms \
                 engine_queue_ms engine_prefill_ms tpot_ms \
                 e2el_ms total_ms status outcome detail retries slo_met prompt_bytes prefix";
    let known: BTreeSet<&str> = known.split_whitespace().collect();
    let unknown: Vec<&String> = line.as_object().unwrap().keys().filter(|key| !known.contains(key.as_str())).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o007, 0, "other users cannot read it");
}
