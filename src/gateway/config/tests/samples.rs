//! The files in `config/` work, the reference names every key, and the defaults it shows are true.

use std::collections::BTreeSet;
use std::path::Path;

use super::{around, read};
use crate::config::{Config, Loaded, Origin};

fn sample(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join("config").join(name)).unwrap()
}

fn load(name: &str) -> Loaded {
    read(&sample(name)).unwrap_or_else(|problems| panic!("config/{name}: {problems}"))
}

/// The reference with every key that is commented out put in force.
fn complete_reference() -> Loaded {
    let in_force = |line: &str| {
        let rest = line.strip_prefix('#').unwrap_or(line);
        let key =
            rest.starts_with('[') || rest.split(" = ").next().is_some_and(|key| !key.is_empty() && !key.contains(' '));
        let is_key = key && (rest.starts_with('[') || rest.contains(" = "));
        if is_key { format!("{rest}\n") } else { format!("{line}\n") }
    };
    let text: String = sample("sluice.toml").lines().map(in_force).collect();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let loaded = Config::parse(&text, "sluice.toml", &[], &around(folder.path()));
    loaded.unwrap_or_else(|problems| panic!("{problems}\n{text}"))
}

#[test]
fn every_sample_is_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join("config");
    let mut names: Vec<String> =
        folder.read_dir().unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.ends_with(".toml"));
    names.sort();
    assert_eq!(names, ["minimal.toml", "production.toml", "sluice.toml", "two-pools.toml"]);
    for name in names {
        load(&name);
    }
}

#[test]
fn the_production_sample_has_nothing_to_warn_about() {
    assert_eq!(load("production.toml").warnings, vec![]);
}

#[test]
fn the_reference_names_every_known_key() {
    let loaded = complete_reference();
    let generic = |path: &str| -> String {
        let mut inside = false;
        path.chars()
            .filter(|letter| {
                inside = if *letter == '[' { true } else { inside && *letter != ']' };
                !inside && *letter != ']'
            })
            .collect()
    };
    let all: BTreeSet<String> = loaded.origins.iter().map(|(path, _)| generic(path)).collect();
    let written: BTreeSet<String> =
        loaded.origins.iter().filter(|(_, origin)| *origin != Origin::Default).map(|(path, _)| generic(path)).collect();
    let missing: Vec<_> = all.difference(&written).collect();
    assert!(missing.is_empty(), "config/sluice.toml does not mention {missing:?}");
    assert!(all.len() > 80, "the list of known keys is suspiciously short: {}", all.len());
}

#[test]
fn the_defaults_that_the_reference_shows_are_the_defaults() {
    let (reference, minimal) = (load("sluice.toml").config, load("minimal.toml").config);
    assert_eq!(reference.server, minimal.server);
    assert_eq!(reference.timeouts, minimal.timeouts);
    assert_eq!(reference.retry, minimal.retry);
    assert_eq!(reference.health, minimal.health);
    assert_eq!(reference.slo, minimal.slo);
    assert_eq!(reference.log, minimal.log);
    assert_eq!(reference.models[0].media_part_tokens, crate::config::defaults::MEDIA_PART_TOKENS);
    let (shown, real) = (&reference.pools[0], &minimal.pools[0]);
    assert_eq!((shown.policy, shown.slots, shown.usage), (real.policy, real.slots, real.usage));
    assert_eq!((&shown.queue, &shown.slo), (&real.queue, &real.slo));
    assert_eq!(shown.backends[0].weight, real.backends[0].weight);
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
