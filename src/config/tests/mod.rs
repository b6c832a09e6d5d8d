//! The configuration as a whole: each problem is found, samples are valid, a printed configuration
//! reads back as the same, and a reload lists the changes.
//!
//! [`Surroundings`] are fixed: four cores and 16 GiB, and the environment variables in
//! [`environment`]. A test that needs files writes them to a temporary folder.

mod advice;
mod changes;
mod classes;
mod copies;
mod cluster;
mod cors;
mod problems;
mod priorities;
mod engines;
mod events;
mod experiments;
mod proxies;
mod ranks;
mod samples;
mod certificates;

use std::path::Path;

use super::{Config, Flags, Loaded, Machine, Problems, Surroundings};

/// SHA-256 of "test", for keys that need a valid digest.
const DIGEST: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

fn environment(name: &str) -> Option<String> {
    match name {
        "DIGEST" | "TEAM_A_KEY_SHA256" => Some(format!("{DIGEST}\n")),
        "BATCH_KEY_SHA256" => Some("ab".repeat(32)),
        "TOKEN" | "OTLP_AUTHORIZATION" | "RECORDS_SALT" | "SLUICE_ADMIN_TOKEN" | "GPU0_API_KEY" => {
            Some("letmein".to_owned())
        }
        "EMPTY" => Some(String::new()),
        "TWO_LINES" => Some("one\ntwo".to_owned()),
        _ => None,
    }
}

fn surroundings(folder: &Path) -> Surroundings<'static> {
    Surroundings { env: &environment, folder: folder.to_owned(), machine: Machine::with_cores(4) }
}

fn read_with(text: &str, sets: &[&str]) -> Result<Loaded, Problems> {
    let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
    Config::parse(text, "test.toml", &sets, &surroundings(Path::new("/nowhere")))
}

fn read(text: &str) -> Result<Loaded, Problems> {
    read_with(text, &[])
}

/// Compares `text` with `tests/golden/NAME.snap`; `INSTA_UPDATE=always cargo test` writes the file.
fn assert_golden(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

fn valid(text: &str) -> Config {
    read(text).unwrap_or_else(|problems| panic!("{problems}")).config
}

/// A valid configuration of two pools, to which tests add mistakes.
const TWO_POOLS: &str = r#"
[[model]]
name = "m"
aliases = ["alias"]
[[pool]]
name = "short"
models = ["m"]
prompt_tokens = { max = "5k" }
[[pool.backend]]
name = "a"
url = "http://127.0.0.1:8000"
[[pool]]
name = "long"
models = ["m"]
prompt_tokens = { min = "5k" }
spill = ["short"]
[[pool.backend]]
name = "b"
url = "http://127.0.0.1:8001"
"#;

#[test]
fn flags_with_long_backends_make_two_pools() {
    let flags = Flags {
        backends: vec!["http://10.0.0.1:8000".into(), "http://10.0.0.2:8000/x".into()],
        long: vec!["http://[::1]:8000".into()],
        threshold: Some(sluice_core::base::Tokens(8_000)),
        listen: Some("0.0.0.0:9000".into()),
        admin: None,
    };
    let loaded = Config::from_flags(&flags, &[], &surroundings(Path::new(""))).unwrap();
    let shown = |pool: &super::Pool| {
        let backends = pool.backends.iter().map(|b| format!("{} at {}", b.name, b.target.endpoint()));
        let permits = pool.long_prefix.map(|long| (long.threshold.to_string(), long.slots));
        format!("{}: {}, {permits:?}, {}", pool.name, pool.prompt_tokens, backends.collect::<Vec<_>>().join(", "))
    };
    assert_eq!(
        loaded.config.pools.iter().map(shown).collect::<Vec<_>>(),
        [
            "short: 0 to 8k, Some((\"8k\", 1)), 10.0.0.1:8000 at http://10.0.0.1:8000, 10.0.0.2:8000 at http://10.0.0.2:8000/x",
            "long: 8k and more, Some((\"8k\", 2)), backend-0 at http://[::1]:8000",
        ]
    );
    assert_eq!(loaded.config.pools[1].spill, [sluice_core::base::PoolId::new(0)]);
    assert_eq!(loaded.origins.of("pool[0].long_prefix.slots"), super::Origin::Flag);
    assert_eq!(loaded.config.server.listen.port(), 9000);
}

#[test]
fn flags_without_long_backends_make_one_pool_for_everything() {
    let flags = Flags { backends: vec!["http://127.0.0.1:8000".into()], ..Flags::default() };
    let config =
        Config::from_flags(&flags, &["pool.default.slots=7".into()], &surroundings(Path::new(""))).unwrap().config;
    assert_eq!((config.pools.len(), config.pools[0].slots), (1, 7));
    assert_eq!(config.pools[0].models, super::ModelScope::All);
}

/// The pools of a sample, without names, models and backends, in which the sample differs from a
/// configuration of flags.
fn arrangement(mut config: super::Config) -> Vec<super::Pool> {
    for pool in &mut config.pools {
        (pool.name, pool.models, pool.backends) = (String::new(), super::ModelScope::All, Vec::new());
    }
    config.pools
}

#[test]
fn flags_make_the_arrangements_of_the_samples() {
    let urls = |at: &[&str]| at.iter().map(|host| format!("http://{host}:8000")).collect::<Vec<_>>();
    for (sample, backends, long) in [("one-pool", &["a", "b"][..], &[][..]), ("short-long", &["a"], &["b"])] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../config/{sample}.toml"));
        let flags = Flags { backends: urls(backends), long: urls(long), ..Flags::default() };
        let made = Config::from_flags(&flags, &[], &surroundings(Path::new(""))).unwrap().config;
        assert_eq!(arrangement(made), arrangement(Config::load(&file, &[]).unwrap().config), "{sample}");
    }
}

#[test]
fn without_a_long_pool_the_threshold_is_that_of_the_permits() {
    let threshold = Some(sluice_core::base::Tokens(2_000));
    let flags = Flags { backends: vec!["http://127.0.0.1:8000".into()], threshold, ..Flags::default() };
    let config = Config::from_flags(&flags, &[], &surroundings(Path::new(""))).unwrap().config;
    assert_eq!(
        config.pools[0].long_prefix.map(|long| (long.threshold.to_string(), long.slots)),
        Some(("2k".into(), 1))
    );
}

#[test]
fn a_flag_that_is_not_a_url_is_reported_at_the_command_line() {
    let flags = Flags { backends: vec!["ftp://gpu0".into(), "gpu1:80".into()], ..Flags::default() };
    let problems = Config::from_flags(&flags, &[], &surroundings(Path::new(""))).unwrap_err();
    assert_eq!(problems.errors.len(), 2);
    assert!(problems.to_string().contains("command line: --backend: 'ftp"), "{problems}");
}

#[test]
fn set_wins_over_the_file_and_is_checked_like_it() {
    let loaded =
        read_with(TWO_POOLS, &["pool.short.slots=32", "pool.long.queue.timeout=5s", "log.level=debug"]).unwrap();
    assert_eq!(loaded.config.pools[0].slots, 32);
    assert_eq!(loaded.origins.of("pool[0].slots"), super::Origin::Set(1));
    let problems = read_with(TWO_POOLS, &["pool.short.slots=0", "nonsense=1", "pool.medium.slots=1"]).unwrap_err();
    assert_eq!(problems.errors.len(), 3, "{problems}");
}

#[test]
fn a_pool_whose_longest_prompt_needs_no_permit_may_have_none() {
    let with = |threshold| {
        let without = format!("pool.short.long_prefix={{threshold={threshold}, slots=0}}");
        read_with(TWO_POOLS, &["pool.short.prompt_tokens.max=5001", "pool.long.prompt_tokens.min=5001", &without])
    };
    // The range ends before `max`.
    assert!(with(5_000).is_ok());
    assert!(with(4_999).unwrap_err().to_string().contains("could never run here"));
}

#[test]
fn a_number_in_set_that_does_not_fit_is_not_read_as_zero() {
    let problems = read_with(TWO_POOLS, &["pool.short.queue.length=99999999999999999999"]).unwrap_err();
    assert!(problems.to_string().contains("expected a whole number"), "{problems}");
}

#[test]
fn objectives_of_a_pool_default_to_the_general_ones() {
    let loaded = read_with(TWO_POOLS, &["slo={ttft=\"2s\", tpot=\"50ms\"}", "pool.short.slo.ttft=1s"]).unwrap();
    let seconds = std::time::Duration::from_secs;
    assert_eq!(
        loaded.config.pools.iter().map(|pool| pool.slo.ttft).collect::<Vec<_>>(),
        [Some(seconds(1)), Some(seconds(2))]
    );
    assert_eq!(loaded.origins.of("pool[0].slo.ttft"), super::Origin::Set(2));
    assert_eq!(loaded.origins.of("pool[0].slo.tpot"), super::Origin::Set(1));
}

#[test]
fn backend_ids_are_consecutive_over_all_pools() {
    let config = valid(TWO_POOLS);
    let numbered: Vec<_> = config.backends().map(|(pool, id, b)| (pool.index(), id.index(), b.name.clone())).collect();
    assert_eq!(numbered, [(0, 0, "a".to_owned()), (1, 1, "b".to_owned())]);
    assert_eq!(config.model_named("alias"), config.model_named("m"));
    assert_eq!(config.pool_named("long").map(sluice_core::base::PoolId::index), Some(1));
}
