//! The description of a reload names the differences and nothing else.
//!
//! Each test compares two configurations that differ in one or two keys, mostly by `--set`, and
//! checks the list of changes. Secrets must be compared and never appear in it.

use super::{TWO_POOLS, read_with, valid};
use crate::Config;
use crate::diff::changes;

fn with(sets: &[&str]) -> Config {
    read_with(TWO_POOLS, sets).unwrap_or_else(|problems| panic!("{problems}")).config
}

fn shown(old: &Config, new: &Config) -> Vec<String> {
    changes(old, new).iter().map(ToString::to_string).collect()
}

#[test]
fn nothing_changes_when_nothing_changed() {
    assert_eq!(changes(&valid(TWO_POOLS), &valid(TWO_POOLS)), vec![]);
}

#[test]
fn limits_and_ranges_are_shown_with_both_values() {
    let sets = [
        "pool.short.slots=8",
        "pool.short.tokens=9k",
        "pool.short.prompt_tokens.max=6k",
        "pool.long.prompt_tokens.min=6k",
    ];
    assert_eq!(
        shown(&with(&[]), &with(&sets)),
        [
            "pool.short.slots: 256 -> 8",
            "pool.short.tokens: \"auto\" -> \"9k\"",
            "pool.short.prompt_tokens.max: \"5k\" -> \"6k\"",
            "pool.long.prompt_tokens.min: \"5k\" -> \"6k\"",
            "class.short.prompt_tokens.max: \"5k\" -> \"6k\"",
            "class.long.prompt_tokens.min: \"5k\" -> \"6k\"",
        ],
        "the derived classes follow"
    );
}

#[test]
fn a_backend_that_moved_is_removed_and_added() {
    let moved = with(&["pool.short.backend.a.url=http://127.0.0.1:9000"]);
    assert_eq!(shown(&with(&[]), &moved), ["pool.short.backend.a: removed", "pool.short.backend.a: added"]);
    let reweighted = with(&["pool.short.backend.a.weight=2"]);
    assert_eq!(shown(&with(&[]), &reweighted), ["pool.short.backend.a.weight: 1.0 -> 2.0"]);
}

#[test]
fn pools_that_come_and_go_are_named() {
    let renamed = with(&["pool.short.name=brief", "pool.long.spill=[\"brief\"]"]);
    assert_eq!(
        shown(&with(&[]), &renamed),
        ["pool.short: removed", "pool.long.spill: [\"short\"] -> [\"brief\"]", "pool.brief: added"]
    );
}

#[test]
fn sockets_need_a_restart_and_other_server_settings_do_not() {
    let moved = with(&["server.listen=127.0.0.1:9999", "server.keepalive=5s", "retry.attempts=3"]);
    assert_eq!(
        shown(&with(&[]), &moved),
        [
            "server.listen: \"127.0.0.1:8080\" -> \"127.0.0.1:9999\"; needs a restart or an upgrade, the running value stays",
            "server.keepalive: \"75s\" -> \"5s\"",
            "retry.attempts: 2 -> 3",
        ]
    );
}

#[test]
fn models_are_compared_by_name_and_not_by_position() {
    let before = valid(&TWO_POOLS.replace("models = [\"m\"]", "models = [\"*\"]"));
    let text = format!("[[model]]\nname = \"n\"\n{}", TWO_POOLS.replace("models = [\"m\"]", "models = [\"*\"]"));
    assert_eq!(shown(&before, &valid(&text)), ["model.n: added"]);
    let first = format!("[[model]]\nname = \"n\"\n{TWO_POOLS}").replace("[\"m\"]", "[\"m\", \"n\"]");
    assert_eq!(
        shown(&with(&[]), &valid(&first)),
        ["model.n: added", r#"pool.short.models: ["m"] -> ["m", "n"]"#, r#"pool.long.models: ["m"] -> ["m", "n"]"#]
    );
}

#[test]
fn a_queue_a_model_and_keys_are_each_one_change() {
    let sets = ["pool.long.queue.length=5", "model.m.aliases=[]", "auth.keys=[{name=\"k\", sha256=\"env:DIGEST\"}]"];
    assert_eq!(
        shown(&with(&[]), &with(&sets)),
        ["auth.keys.k: added", "model.m.aliases: [\"alias\"] -> []", "pool.long.queue.length: 512 -> 5"]
    );
}

#[test]
fn secrets_and_environments_are_compared_and_not_shown() {
    let plain = |token: &str, home: &str| {
        let token = format!("auth.admin_token={token}");
        let launch = format!("pool.long.backend=[{{name=\"b\", launch={{command=[\"x\"], env={{HOME=\"{home}\"}}}}}}]");
        with(&[&token, &launch])
    };
    assert_eq!(
        shown(&plain("one", "here"), &plain("two", "there")),
        [
            "auth.admin_token: changed",
            "pool.long.backend.b.launch.env.HOME: changed; the engine is restarted in its turn"
        ]
    );
}

#[test]
fn secret_flags_and_commands_with_secrets_are_compared_and_not_shown() {
    let plain = |secret: &str| {
        let launch =
            format!("launch={{command=[\"x\", \"--api-key\", \"{secret}\"], args={{hf-token=\"{secret}\", seed=1}}}}");
        with(&[&format!("pool.long.backend=[{{name=\"b\", {launch}}}]")])
    };
    let (one, two) = (plain("one-secret"), plain("two-secret"));
    assert_eq!(
        shown(&one, &two),
        [
            "pool.long.backend.b.launch.command: changed; the engine is restarted in its turn",
            "pool.long.backend.b.launch.args.hf-token: changed; the engine is restarted in its turn"
        ]
    );
    let compared = |config: &Config| config.pools[1].backends[0].target.compared();
    assert!(compared(&one) == compared(&plain("one-secret")) && compared(&one) != compared(&two));
}

#[test]
fn what_needs_a_restart_keeps_its_running_value() {
    let running = with(&["log.level=debug"]);
    let mut new = with(&["server.listen=127.0.0.1:9999", "server.keepalive=5s", "access_log={path=\"-\"}"]);
    new.keep_until_restart(&running);
    assert_eq!(shown(&running, &new), ["server.keepalive: \"75s\" -> \"5s\""]);
}
