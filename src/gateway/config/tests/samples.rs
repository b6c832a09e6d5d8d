//! The files in `config/` are valid, and the reference is what the definitions say.

use std::path::{Path, PathBuf};

use super::{around, read};
use crate::config::{Config, Loaded, Situation, limits, reference};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join("config")
}

fn sample(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

fn load(name: &str) -> Loaded {
    read(&sample(name)).unwrap_or_else(|problems| panic!("config/{name}: {problems}"))
}

#[test]
fn every_sample_is_valid() {
    let files = folder().read_dir().unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.filter(|name| name.ends_with(".toml")).collect();
    names.sort();
    let expected =
        ["keys.toml", "launch.toml", "lora.toml", "one-pool.toml", "production.toml", "short-long.toml", "sluice.toml"];
    assert_eq!(names, expected);
    for name in names {
        load(&name);
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
fn the_keys_in_force_in_the_reference_have_their_defaults() {
    let pool = "[[model]]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"default\"\n\
                [[pool.backend]]\nname = \"gpu0\"\nurl = \"http://127.0.0.1:8000\"\n";
    let config = read(&reference()).unwrap().config;
    assert_eq!(config, read(pool).unwrap().config);
    assert_eq!(config.models[0].media_part_tokens, limits::MEDIA_PART_TOKENS);
}

#[test]
fn every_example_in_the_reference_can_be_read() {
    // Keys that are commented out have no blank after the "#".
    let in_force = |line: &str| {
        let rest = line.strip_prefix('#').filter(|rest| rest.starts_with(|first: char| !" \n".contains(first)));
        format!("{}\n", rest.unwrap_or(line))
    };
    let text: String = reference().lines().map(in_force).collect();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let problems = Config::parse(&text, "sluice.toml", &[], &around(folder.path())).unwrap_err();
    // All of them together contradict each other in two places.
    let situations: Vec<_> = problems.errors.iter().map(|problem| problem.situation().clone()).collect();
    assert!(matches!(&situations[..], [Situation::Gap { .. }, Situation::UrlAndLaunch]), "{problems}");
}

#[test]
fn the_production_sample_has_nothing_to_warn_about() {
    assert_eq!(load("production.toml").warnings, vec![]);
}

/// The inline forms, all on one page, as people write them in short files.
const INLINE: &str = r#"
[server]
listen = "127.0.0.1:8080"
admin = "127.0.0.1:8081"
max_body = "32MiB"
drain_timeout = "5m"
[auth]
keys = [{ name = "team-a", sha256 = "env:TEAM_A_KEY_SHA256", models = ["*"], priority = 0 }]
admin_token = "env:SLUICE_ADMIN_TOKEN"
[[model]]
name = "llama-3.1-8b"
aliases = ["default"]
tokenizer = "tokenizer.json"
[[pool]]
name = "short"
models = ["llama-3.1-8b"]
prompt_tokens = { max = "5k" }
policy = "least_work"
slots = 64
tokens = "400k"
long_prefix = { threshold = "5k", slots = 1 }
queue = { length = 512, timeout = "20s", order = "shortest_first" }
spill = []
[[pool.backend]]
name = "gpu0"
url = "http://127.0.0.1:8000"
[[pool]]
name = "long"
models = ["llama-3.1-8b"]
prompt_tokens = { min = "5k" }
slots = 16
long_prefix = { threshold = "5k", slots = 2 }
spill = ["short"]
[[pool.backend]]
name = "gpu1"
launch = { command = ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"], port = 8001, gpu = [1], env = { VLLM_CACHE_ROOT = "cache/vllm" }, args = { max-num-seqs = 256, max-num-batched-tokens = 8192 } }
[slo]
ttft = "2s"
tpot = "50ms"
e2el = "13s"
attainment = 0.99
"#;

#[test]
fn every_inline_form_of_the_contract_is_read() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let loaded =
        Config::parse(INLINE, "x", &[], &around(folder.path())).unwrap_or_else(|problems| panic!("{problems}"));
    let ids: Vec<_> = loaded.config.backends().map(|(_, _, backend)| backend.target.endpoint().to_string()).collect();
    assert_eq!(ids, ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]);
    assert_eq!(loaded.warnings, vec![]);
}
