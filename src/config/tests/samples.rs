//! Shipped and printed configurations.
//!
//! Samples must be valid, the reference is generated from the definitions, and a printed
//! configuration reads back as the same.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use sluice_core::engines::EngineKind;

use super::{read, read_with, surroundings, valid};
use crate::tls::testing::Authority;
use crate::{Config, Loaded, Resolved, Situation, Target, limits, reference};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join("config")
}

fn sample(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

fn load(name: &str) -> Loaded {
    let folder = with_files();
    // The folder `/var/log/sluice` of an installed service does not exist here.
    let text = sample(name).replace("/var/log/sluice", &folder.path().display().to_string());
    let loaded = Config::parse(&text, name, &[], &surroundings(folder.path()));
    loaded.unwrap_or_else(|problems| panic!("config/{name}: {problems}"))
}

/// A folder with the certificates and adapters that samples and examples name.
fn with_files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for adapter in ["adapters/sql", "adapters/support"] {
        std::fs::create_dir_all(folder.path().join(adapter)).unwrap();
    }
    std::fs::create_dir(folder.path().join("tls")).unwrap();
    for name in ["server", "clients", "engines", "gateway", "collector"] {
        Authority::new().issue(&["a"]).write(&folder.path().join("tls"), name);
    }
    folder
}

#[test]
fn every_sample_is_valid() {
    let files = folder().read_dir().unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.filter(|name| name.ends_with(".toml")).collect();
    names.sort();
    let expected = [
        "copies.toml",
        "experiment.toml",
        "keys.toml",
        "launch.toml",
        "lora.toml",
        "one-pool.toml",
        "production.toml",
        "share.toml",
        "short-long.toml",
        "sluice.toml",
        "tls.toml",
    ];
    assert_eq!(names, expected);
    for name in names {
        load(&name);
    }
}

#[test]
fn there_is_a_sample_of_every_kind_of_engine() {
    let mut kinds = vec![EngineKind::Vllm];
    for file in folder().join("engines").read_dir().unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let config = load(&format!("engines/{name}")).config;
        let pool = &config.pools[0];
        assert_eq!(pool.backends[0].engine, *pool.engine, "{name}");
        assert_eq!(name, format!("{}.toml", pool.engine.label().replace('.', "-")));
        kinds.push(*pool.engine);
    }
    assert!(EngineKind::ALL.iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
    let serial = load("engines/serial.toml").config;
    assert!(serial.pools.iter().all(|pool| pool.slots == 1), "the default of a serial worker");
}

#[test]
fn the_sample_for_slurm_is_valid_and_has_its_commands() {
    let config = load("slurm/sluice.toml").config;
    let backends = &config.pools[0].backends;
    assert_eq!(backends.len(), 2);
    for backend in backends {
        let Target::Control(_, control) = &backend.target else { panic!("{} has no commands", backend.name) };
        for words in [&control.start, &control.stop, &control.status] {
            let program = words[0].strip_prefix("/etc/sluice/").expect("the folder that the file says to copy");
            assert!(folder().join(program).is_file(), "config/{program} is missing");
        }
    }
}

/// `SLUICE_UPDATE=1 cargo test` writes the file.
#[test]
fn the_reference_is_generated_from_the_definitions() {
    if std::env::var_os("SLUICE_UPDATE").is_some() {
        std::fs::write(folder().join("sluice.toml"), reference()).unwrap();
    }
    assert!(sample("sluice.toml") == reference(), "config/sluice.toml is out of date; run SLUICE_UPDATE=1 cargo test");
}

#[test]
fn keys_that_the_reference_sets_have_their_defaults() {
    let pool = "[[model]]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"default\"\n\
                [[pool.backend]]\nname = \"gpu0\"\nurl = \"http://127.0.0.1:8000\"\n";
    let config = read(&reference()).unwrap().config;
    assert_eq!(config, read(pool).unwrap().config);
    assert_eq!(config.models[0].media_part_tokens, limits::MEDIA_PART_TOKENS);
}

#[test]
fn every_example_in_the_reference_can_be_read() {
    // A commented-out key has no space after its "#"; text has one.
    let uncommented = |line: &str| {
        let rest = line.strip_prefix('#').filter(|rest| rest.starts_with(|first: char| !" \n".contains(first)));
        format!("{}\n", rest.unwrap_or(line))
    };
    let text: String = reference().lines().map(uncommented).collect();
    let folder = with_files();
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let problems = Config::parse(&text, "sluice.toml", &[], &surroundings(folder.path())).unwrap_err();
    // Some examples exclude each other; there must be no other problems.
    let situations = problems.errors.iter().map(|problem| problem.situation().clone());
    let situations = situations.filter(|one| *one != Situation::RanksOfPods);
    // Either the rule about `pool.kubernetes` or the missing feature is reported; the two errors
    // are at different places of the file.
    let (of_pods, others): (Vec<_>, Vec<_>) =
        situations.partition(|one| matches!(one, Situation::PodsAndBackends | Situation::WithoutKubernetes));
    assert_eq!(of_pods.len(), 1, "{problems}");
    assert!(
        matches!(
            &others[..],
            [
                Situation::Gap { .. },
                Situation::TlsWithoutHttps,
                Situation::UrlAndLaunch,
                Situation::TlsWithoutHttps,
                Situation::TwoStores,
                Situation::TlsWithoutHttps,
                Situation::FewArms,
                // One is the rule about `[tracing]`, the other the missing feature.
                Situation::TlsWithoutHttps | Situation::WithoutTracing
            ]
        ),
        "{problems}"
    );
}

#[test]
fn the_production_sample_has_no_warnings() {
    assert_eq!(load("production.toml").warnings, vec![]);
}

/// A valid file with the given choices; its pools cover all prompt lengths.
fn file(cuts: &[u64], slots: u32, micros: u64, words: (usize, usize, usize), name: &str) -> String {
    let policy = ["least_work", "two_choices", "round_robin", "fewest_requests"][words.0];
    let order = ["fifo", "shortest_first"][words.1];
    let usage = ["final", "continuous", "off"][words.2];
    let quoted = toml::Value::from(name).to_string();
    let mut text = format!(
        "[server]\ndrain_timeout = \"{micros}us\"\n[auth]\nadmin_token = \"env:TOKEN\"\n\
         [[auth.keys]]\nname = \"k\"\nsha256 = \"env:DIGEST\"\nmodels = [{quoted}]\nlimit = {{ in_flight = {slots} }}\n\
         [slo]\nttft = \"{micros}us\"\nattainment = 0.5{slots}1\n[access_log]\npath = \"-\"\n[[model]]\nname = {quoted}\n"
    );
    let mut bounds = cuts.to_vec();
    bounds.sort_unstable();
    bounds.dedup();
    for (index, end) in bounds.iter().map(Some).chain([None]).enumerate() {
        let min = if index == 0 { 0 } else { bounds[index - 1] };
        let max = end.map_or(String::new(), |end| format!(", max = {end}"));
        let spill = if index > 0 { "\"p0\"" } else { "" };
        text += &format!(
            "[[pool]]\nname = \"p{index}\"\nmodels = [{quoted}]\nprompt_tokens = {{ min = {min}{max} }}\n\
             slots = {slots}\npolicy = \"{policy}\"\nusage = \"{usage}\"\nspill = [{spill}]\ntokens = {slots}\n\
             queue = {{ order = \"{order}\", timeout = \"{micros}us\" }}\nlong_prefix = {{ threshold = {slots}, slots = 1 }}\n\
             [[pool.backend]]\nname = \"b\"\nurl = \"http://h{index}:8000/p\"\nweight = 0.{slots}1\napi_key = \"env:TOKEN\"\n\
             [[pool.backend]]\nname = \"c\"\nlaunch = {{ command = [\"x\", {quoted}], port = {port}, gpu = [1, 2], \
             env = {{ {quoted} = \"env:TOKEN\" }}, args = {{ a = {slots}, b = true, c = 1.5, d = {quoted}, e = [{quoted}] }} }}\n\
             [[pool.backend]]\nname = \"d\"\nurl = \"http://d{index}:1\"\ncontrol = {{ start = [\"up\", {quoted}], stop = [\"down\"], \
             status = [{quoted}], timeout = \"{micros}us\", args = {{ a = {slots}, e = [{quoted}] }} }}\n",
            port = 20_000 + index
        );
    }
    text
}

proptest! {
    #[test]
    fn a_printed_configuration_reads_back_as_the_same(
        cuts in prop::collection::vec(1u64..1_000_000, 0..6),
        slots in 1u32..65_536,
        micros in 1u64..1_000_000_000_000,
        words in (0usize..4, 0usize..2, 0usize..3),
        name in "[a-zA-Z0-9äß/._ \"\\\\#=-]{0,20}x",
    ) {
        prop_assume!(name.trim() == name);
        let loaded = read(&file(&cuts, slots, micros, words, &name)).map_err(|problems| TestCaseError::fail(problems.to_string()))?;
        let plain = loaded.config.to_string();
        prop_assert_eq!(&valid(&plain), &loaded.config);
        let annotated = Resolved { config: &loaded.config, origins: Some(&loaded.origins) }.to_string();
        prop_assert_eq!(&valid(&annotated), &loaded.config);
    }

    #[test]
    fn reading_never_panics_whatever_the_file(text in "(\\[\\[?(pool|server|auth|model)(\\.backend|\\.queue|\\.keys)?\\]?\\]\n|(name|slots|url|models|spill|keys|tokens) = (\"[a-z:/*]{0,6}\"|-?[0-9]{1,21}|\\[\\]|\\[\"[*a]\"\\]|\\{\\}|1e400|nan|2020-01-01)\n){0,12}") {
        let _ = read(&text);
    }

    #[test]
    fn reading_never_panics_whatever_is_set(text in "[a-z0-9.\\[\\]\"= {}]{0,30}") {
        let _ = read_with(super::TWO_POOLS, &[&text]);
    }
}

#[test]
fn a_resolved_configuration_is_printed_as_by_sluice_check() {
    let loaded = read_with(super::TWO_POOLS, &["pool.short.slots=32"]).unwrap();
    let shown = Resolved { config: &loaded.config, origins: Some(&loaded.origins) }.to_string();
    super::assert_golden("config_resolved", &shown);
}
