//! The keys about kinds of engines.
//!
//! The tests cover unknown kinds, paths that a pool cannot name, and defaults of a kind.

use super::problems::one_in;
use super::read_with;
use crate::diff;
use sluice_core::engines::EngineKind;

const SERIAL: &str = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"only\"\nmodels = [\"m\"]\nengine = \"serial\"\n\
    [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:1\"\n";

#[track_caller]
fn one(sets: &[&str], path: &str, part: &str) {
    one_in(SERIAL, sets, path, part);
}

#[test]
fn an_unknown_kind_is_an_error() {
    one(&["pool.only.engine=sglan"], "pool[0].engine", "did you mean 'sglang'?");
    one(&["pool.only.engine=tgi"], "pool[0].engine", "known: auto, vllm, sglang, ");
}

#[test]
fn a_pool_names_only_paths_with_one_spelling_that_are_no_other_route() {
    for path in [
        "synthesize",
        "/",
        "/a/../b",
        "/a//b",
        "/a/",
        "/a%2Fb",
        "/a?b",
        "/health",
        "/v1/models",
        "/v1/models/x",
        "/v1/chat/completions",
        "/v2/models/a/infer",
        "/v2/models/a/load",
    ] {
        one(&[&format!("pool.only.routes=[\"{path}\"]")], "pool[0].routes[0]", "is no path that a pool can name");
    }
    one(&["pool.only.routes=[\"/a\"]", "pool.only.engine=openai"], "pool[0].routes", "engine = \"serial\"");
    one(&["pool.only.routes=[\"/a\"]", "pool.only.models=[\"*\"]"], "pool[0].routes", "exactly one model");
    one(&["pool.only.routes=[\"/a\", \"/a\"]"], "pool[0].routes[1]", "/a");
    one(&["pool.only.cost={ per = 0.0 }"], "pool[0].cost.per", "is outside");
}

#[test]
fn the_kind_gives_the_default_of_slots() {
    let slots = |sets: &[&str]| read_with(SERIAL, sets).unwrap().config.pools[0].slots;
    assert_eq!(slots(&[]), 1);
    assert_eq!(slots(&["pool.only.slots=4"]), 4);
    assert_eq!(slots(&["pool.only.engine=triton"]), 256);
}

#[test]
fn several_pools_name_one_triton_for_different_models() {
    let two = |engine: &str, second: &str| {
        let pool = |name: &str, model: &str| {
            format!(
                "[[pool]]\nname = \"{name}\"\nmodels = [{model}]\nengine = \"{engine}\"\n[[pool.backend]]\nname = \"a\"\n\
                 url = \"http://127.0.0.1:1\"\n"
            )
        };
        format!("[[model]]\nname = \"x\"\n[[model]]\nname = \"y\"\n{}{}", pool("one", "\"x\""), pool("two", second))
    };
    assert!(read_with(&two("triton", "\"y\""), &[]).is_ok(), "each model has limits of its own");
    for text in [two("triton", "\"x\", \"y\""), two("openai", "\"y\"")] {
        let refused = read_with(&text, &[]).err().map(|problems| problems.to_string()).unwrap_or_default();
        assert!(refused.contains("is already backend 'one/a'"), "{refused}");
    }
}

#[test]
fn a_found_kind_is_put_only_where_the_file_leaves_it_open_and_the_gateway_starts_no_engine() {
    let open = SERIAL.replace("engine = \"serial\"\n", "");
    let started = "\n[[pool.backend]]\nname = \"b\"\nlaunch = { command = [\"vllm\", \"serve\", \"m\"] }\n";
    for (text, sets, kind) in [
        (open.clone(), &[][..], EngineKind::Triton),
        (open.clone(), &["pool.only.engine=auto"], EngineKind::Triton),
        (open.clone(), &["pool.only.engine=vllm"], EngineKind::Vllm),
        (open + started, &[], EngineKind::Vllm),
        (SERIAL.to_owned(), &[], EngineKind::Serial),
    ] {
        let mut config = read_with(&text, sets).unwrap().config;
        let changes = config.put_engines(|pool| (pool == "only").then_some(EngineKind::Triton));
        let pool = &config.pools[0];
        assert_eq!((*pool.engine, pool.backends[0].engine), (kind, kind), "{text} {sets:?}");
        assert_eq!(changes.is_empty(), kind != EngineKind::Triton);
        assert_eq!(config.put_engines(|_| Some(kind)), [], "nothing changes twice");
    }
}

#[test]
fn the_resolved_configuration_leaves_the_kind_open() {
    let text = SERIAL.replace("engine = \"serial\"\n", "");
    let read = |text: &str| read_with(text, &[]).unwrap();
    let mut loaded = read(&text);
    loaded.config.put_engines(|_| Some(EngineKind::Sglang));
    let changes = diff::changes(&read(&text).config, &loaded.config);
    assert!(changes.is_empty(), "a reload of the same file changes nothing: {changes:?}");
}
