//! The tuner of a whole configuration: groups, reloads, and the state that survives a restart.

mod changes;

use std::time::Duration;

use super::Tuner;
use crate::limits::Limits;
use crate::observe::Observer;
use sluice_config::{Config, Machine, Surroundings};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn while_pools_are_compared_nothing_is_changed() {
    let (observer, config) = (Observer::default(), config(TWO_POOLS));
    let mut tuner = Tuner::new(&config, &observer, Duration::ZERO);
    assert!(!tuner.hinder(Some("while pools are compared"), &observer, SECOND), "nothing was being tried");
    assert_eq!(tuner.report().frozen.as_deref(), Some("while pools are compared"));
    assert_eq!(
        tuner.saved(Duration::ZERO),
        Tuner::new(&config, &observer, Duration::ZERO).saved(Duration::ZERO),
        "it does not outlast the gateway"
    );
    tuner.hinder(None, &observer, SECOND);
    assert_eq!(tuner.report().frozen, None);
    let text = TWO_POOLS.replace("ttft = \"1s\"", "");
    let report = Tuner::new(&self::config(&text), &observer, Duration::ZERO).report();
    assert!(report.groups[0].why.contains("[slo]"), "{report:?}");
    let class = "[[class]]\nname = \"short\"\nprompt_tokens = { max = \"5k\" }\nslo = { tpot = \"50ms\" }\n";
    let report = Tuner::new(&self::config(&(text + class)), &observer, Duration::ZERO).report();
    assert!(!report.groups[0].why.contains("[slo]"), "the objectives of a class are enough: {report:?}");
}

fn config(text: &str) -> Config {
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    Config::parse(text, "test", &[], &around).expect("valid").config
}

const TWO_POOLS: &str = r#"
[slo]
ttft = "1s"
[tuner]
mode = "apply"
[[model]]
name = "m"
[[model]]
name = "n"
[[pool]]
name = "short"
models = ["m"]
prompt_tokens = { max = "5k" }
slots = 8
[[pool.backend]]
name = "a"
url = "http://127.0.0.1:9001"
[[pool]]
name = "long"
models = ["m"]
prompt_tokens = { min = "5k" }
[[pool.backend]]
name = "b"
url = "http://127.0.0.1:9002"
[[pool]]
name = "other"
models = ["n"]
[[pool.backend]]
name = "c"
url = "http://127.0.0.1:9003"
"#;

fn with_kept_slots(config: &Config, observer: &Observer, slots: u32) -> Tuner {
    let mut tuner = Tuner::new(config, observer, Duration::ZERO);
    let mut limits = Limits::of(config);
    limits.0[0].slots = slots;
    let mut saved = serde_json::to_value(tuner.saved(Duration::ZERO)).unwrap();
    saved["kept"] = serde_json::to_value(&limits).unwrap();
    assert!(tuner.restore(serde_json::from_value(saved).unwrap(), observer, Duration::ZERO));
    tuner
}

#[test]
fn pools_are_tuned_together_when_they_serve_the_same_models() {
    let (observer, config) = (Observer::default(), config(TWO_POOLS));
    let report = Tuner::new(&config, &observer, Duration::ZERO).report();
    let pools: Vec<_> = report.groups.iter().map(|group| group.pools.join(" ")).collect();
    assert_eq!(pools, ["short long", "other"]);
}

#[test]
fn a_reload_keeps_what_was_found_unless_it_changes_what_the_tuner_began_with() {
    let (observer, before) = (Observer::default(), config(TWO_POOLS));
    let slots_after = |text: String| {
        let mut tuner = with_kept_slots(&before, &observer, 33);
        let mut after = config(&text);
        tuner.configure(&mut after, &observer, SECOND);
        (after.pools[0].slots, tuner.limits().0[0].slots)
    };
    assert_eq!(slots_after(TWO_POOLS.to_owned()), (33, 33));
    assert_eq!(slots_after(TWO_POOLS.replace("apply", "advise")), (33, 33));
    assert_eq!(slots_after(TWO_POOLS.replace("slots = 8", "slots = 9")), (9, 9), "the operator's limits");
    assert_eq!(slots_after(TWO_POOLS.replace("1s", "2s")), (8, 8), "other objectives");
    assert_eq!(slots_after(TWO_POOLS.replace("9002", "9004")), (8, 8), "another engine");
    assert_eq!(slots_after(TWO_POOLS.replace("apply", "off")), (8, 8), "off");
}

#[test]
fn limits_that_were_kept_survive_a_restart_with_the_same_configuration_only() {
    let (observer, before) = (Observer::default(), config(TWO_POOLS));
    let mut tuner = with_kept_slots(&before, &observer, 33);
    tuner.freeze(Some("by an operator".to_owned()), &observer, SECOND);
    let saved = tuner.saved(Duration::ZERO);
    let mut same = Tuner::new(&before, &observer, Duration::ZERO);
    assert!(same.restore(saved.clone(), &observer, Duration::ZERO));
    assert_eq!((same.limits().0[0].slots, same.report().frozen.as_deref()), (33, Some("by an operator")));
    let other = config(&TWO_POOLS.replace("slots = 8", "slots = 7"));
    let mut other = Tuner::new(&other, &observer, Duration::ZERO);
    assert!(!other.restore(saved, &observer, Duration::ZERO));
    assert_eq!(other.limits().0[0].slots, 7);
    let limits = same.report().groups[0].limits.clone();
    assert_eq!((limits.len(), limits[0].key.as_str(), limits[0].configured.as_str()), (1, "pool.short.slots", "8"));
    same.reset(&before, &observer, SECOND);
    assert_eq!((same.limits().0[0].slots, same.report().frozen.is_some()), (8, true));
}

#[test]
fn limits_are_put_into_a_configuration_and_read_from_it() {
    let mut config = config(TWO_POOLS);
    let moved = Limits::of(&config).with_boundary(0, 3_000).expect("a range of each");
    moved.put(&mut config);
    assert_eq!((Limits::of(&config) == moved, config.pools[1].prompt_tokens.min.0), (true, 3_000));
    assert_eq!(Limits::of(&config).with_boundary(0, 0), None, "the first pool would have no lengths");
}
