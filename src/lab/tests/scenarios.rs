//! The simulation matches the scenario: paths, flags, backends, and keys that exclude each other.
//!
//! A key that has no effect is an error.

use std::path::PathBuf;

use super::SMALL;
use crate::{Lab, LabError, LabFile, Scenario, Variant, run, sweep};

/// The setup of the first variant, varied by sweeps of one value.
fn lab(text: &str, sweeps: &[&str]) -> Result<Lab, LabError> {
    let scenario = Scenario { file: LabFile::parse(text, "lab.toml")?, folder: PathBuf::from("/of/the/file") };
    let sweeps: Vec<String> = sweeps.iter().map(|sweep| (*sweep).to_owned()).collect();
    let variants = sweep::vary(&scenario.file.variants(), &sweeps)?;
    scenario.lab(&variants[0])
}

fn error(text: &str, sweeps: &[&str]) -> String {
    lab(text, sweeps).unwrap_err().to_string()
}

#[test]
fn the_path_of_a_gpu_is_relative_to_the_folder_of_the_file() {
    let path = "/of/the/file/gpus/mine.toml";
    for gpu in ["[[engine]]\ngpu = \"gpus/mine.toml\"\n", "[[variant]]\nname = \"a\"\ngpu = \"gpus/mine.toml\"\n"] {
        let error = error(&format!("{SMALL}{gpu}"), &[]);
        assert!(error.contains(path), "{error}");
    }
    let error = error(SMALL, &["gpu=gpus/mine.toml"]);
    assert!(error.contains(path), "{error}");
    let file = LabFile::parse(SMALL, "lab.toml").unwrap();
    let scenario = Scenario { file, folder: "/of/the/file".into() };
    let preset = Variant { gpu: Some("h100-80".to_owned()), ..Variant::default() };
    assert!(scenario.lab(&preset).is_ok());
}

#[test]
fn flags_of_an_engine_that_does_not_exist_are_an_error() {
    let says = "the engine \"gpu9\" belongs to no backend";
    let error_of_sweep = error(SMALL, &["vllm@gpu9.max-num-seqs=1"]);
    assert!(error_of_sweep.contains(says), "{error_of_sweep}");
    let variant = format!("{SMALL}[[variant]]\nname = \"a\"\nengine.gpu9 = {{ max-num-seqs = 1 }}\n");
    assert!(error(&variant, &[]).contains(says), "{}", error(&variant, &[]));
    let first = |sweeps: &[&str]| lab(SMALL, sweeps).unwrap().engines[0].sim.engine.max_num_seqs;
    assert_eq!(first(&["vllm@gpu0.max-num-seqs=1"]), 1);
    let second = lab(SMALL, &["engines=2", "vllm@gpu0-2.max-num-seqs=3"]).unwrap();
    assert_eq!(second.engines[1].sim.engine.max_num_seqs, 3);
    let two = format!("{SMALL}[[engine]]\ncount = 2\n");
    assert_eq!(lab(&two, &["engines=1", "vllm@gpu1.max-num-seqs=3"]).unwrap().engines.len(), 1);
}

#[test]
fn a_later_flag_overrides_an_earlier_one_however_it_is_written() {
    let with = |earlier: &str, later: &str| {
        let text =
            format!("{SMALL}[[engine]]\nargs = {{ {earlier} }}\n[[variant]]\nname = \"a\"\nargs = {{ {later} }}\n");
        let lab = lab(&text, &[]).unwrap_or_else(|error| panic!("{earlier}, {later}: {error}"));
        let engine = &lab.engines[0].sim.engine;
        (engine.prefix_caching, engine.max_num_seqs)
    };
    for (earlier, later, caches) in [
        ("no-enable-prefix-caching = true", "enable-prefix-caching = true", true),
        ("enable-prefix-caching = true", "no-enable-prefix-caching = true", false),
        ("no_enable_prefix_caching = true", "enable_prefix_caching = true", true),
        ("enable-prefix-caching = false", "no-enable-prefix-caching = false", true),
        ("enable-prefix-caching = true", "enable-prefix-caching = false", false),
    ] {
        assert_eq!(with(earlier, later).0, caches, "{earlier}, then {later}");
    }
    assert_eq!(with("max-num-seqs = 7", "max_num_seq = 9").1, 9);
    assert_eq!(with("max_num_seqs = 9", "max-num-seq = 7").1, 7);
}

#[test]
fn the_speed_of_a_trace_is_above_0() {
    for speed in ["-1.0", "0.0", "nan", "inf"] {
        let trace = format!("trace = {{ format = \"records\", path = \"none\", speed = {speed} }}");
        let error = error(&format!("[[traffic]]\n{trace}\n"), &[]);
        assert!(error.contains("a trace with a speed above 0, not"), "{error}");
    }
}

#[test]
fn keys_of_traffic_that_exclude_each_other_are_an_error() {
    let class = "class = [{ name = \"a\", in = 10, out = 2 }]\nsteps = [[2, 5]]";
    for (key, says) in [
        ("rate = 3", "steps or a rate of its own, not both"),
        ("requests = 3", "steps or requests or a duration of its own, not both"),
        ("duration = \"9s\"", "steps or requests or a duration of its own, not both"),
    ] {
        let error = error(&format!("[[traffic]]\n{class}\n{key}\n"), &[]);
        assert!(error.contains(says), "{error}");
    }
    assert!(lab(&format!("duration = \"9s\"\n[[traffic]]\n{class}\n"), &[]).is_ok());
}

#[test]
fn a_trace_is_cut_at_the_duration() {
    let folder = tempfile::tempdir().unwrap();
    let line = |at: u32| {
        format!("{{\"timestamp\": {}, \"input_length\": 64, \"output_length\": 4, \"hash_ids\": [1]}}\n", at * 1_000)
    };
    std::fs::write(folder.path().join("t.jsonl"), (0..20).map(line).collect::<String>()).unwrap();
    let sent = |of_file: &str, of_traffic: &str, speed: &str| {
        let trace = format!("trace = {{ format = \"mooncake\", path = \"t.jsonl\", speed = {speed} }}");
        let file = LabFile::parse(&format!("{of_file}\n[[traffic]]\n{trace}\n{of_traffic}\n"), "lab.toml").unwrap();
        let scenario = Scenario { file, folder: folder.path().to_owned() };
        run(&scenario.lab(&Variant::default()).unwrap(), 1).unwrap().result.requests.len()
    };
    assert_eq!(sent("", "", "1.0"), 20);
    assert_eq!(sent("duration = \"10s\"", "", "1.0"), 10);
    assert_eq!(sent("duration = \"10s\"", "duration = \"5s\"", "1.0"), 5);
    assert_eq!(sent("duration = \"5s\"", "", "2.0"), 10);
    assert_eq!(sent("duration = \"10s\"", "requests = 3", "1.0"), 3);
}
