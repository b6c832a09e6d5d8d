//! Mistakes in experiments, each reported at the key.
//!
//! The base is two pools that serve two models, and an experiment between these models. Each test
//! changes a few keys of it by `--set`.

use super::problems::one_in;
use super::{TWO_POOLS, read, read_with};

const EXPERIMENT: &str = r#"
[[model]]
name = "lora"
[[experiment]]
name = "x"
models = ["m"]
[[experiment.arm]]
name = "base"
weight = 50
[[experiment.arm]]
name = "new"
weight = 50
model = "lora"
"#;

/// Like `one`, for two pools that serve two models and an experiment.
#[track_caller]
fn one_of_experiment(sets: &[&str], path: &str, part: &str) {
    let text = TWO_POOLS.replace("models = [\"m\"]", "models = [\"m\", \"lora\"]") + EXPERIMENT;
    read(&text).unwrap();
    one_in(&text, sets, path, part);
}

#[test]
fn without_declared_models_none_can_be_named() {
    let pool = "[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n[[pool.backend]]\nname = \"a\"\nurl = \"http://a\"\n";
    one_in(pool, &[], "pool[0].models[0]", "leave models out, or add a [[model]] with this name");
}

#[test]
fn mistakes_in_experiments_are_found_at_their_keys() {
    one_of_experiment(&["experiment.x.arm.new.weight=40"], "experiment[0].arm", "add up to 90;");
    let shadow = "experiment.x.arm.new.shadow={share=0.5}";
    one_of_experiment(&[shadow], "experiment[0].arm[1].weight", "gets copies and no units");
    let no_units = ["experiment.x.arm.base.weight=100", "experiment.x.arm.new.weight=0"];
    one_of_experiment(&no_units, "experiment[0].arm[1].weight", "the arm has no units");
    let control = [
        "experiment.x.arm.base.weight=0",
        "experiment.x.arm.base.shadow={share=0.5}",
        "experiment.x.arm.new.weight=100",
    ];
    one_of_experiment(&control, "experiment[0].arm[0].shadow", "the first arm is the control");
    let endless = [&no_units[..], &["experiment.x.arm.new.shadow={share=0.5,per_second=0}"]].concat();
    one_of_experiment(&endless, "experiment[0].arm[1].shadow.per_second", "0.001");
    one_of_experiment(&["experiment.x.arm=[]"], "experiment[0].arm", "at least two arms");
    one_of_experiment(&["experiment.x.arm.new.name=base"], "experiment[0].arm[1].name", "used twice");
    one_of_experiment(&["experiment.x.arm.new.model=lorra"], "experiment[0].arm[1].model", "did you mean 'lora'?");
    one_of_experiment(&["experiment.x.arm.new.pool=shrt"], "experiment[0].arm[1].pool", "did you mean 'short'?");
    one_of_experiment(&["experiment.x.arm.new.backends=[\"a\"]"], "experiment[0].arm[1].backends", "add pool");
    let pool = "experiment.x.arm.new.pool=short";
    one_of_experiment(
        &[pool, "experiment.x.arm.new.backends=[\"c\"]"],
        "experiment[0].arm[1].backends[0]",
        "did you mean 'a'?",
    );
    let unserved = [
        pool,
        "pool.short.models=[\"m\"]",
        "pool.short.arms_only=true",
        "pool.long.prompt_tokens={}",
        "pool.long.spill=[]",
    ];
    one_of_experiment(&unserved, "experiment[0].arm[1].pool", "does not serve model 'lora'");
    one_of_experiment(&["experiment.x.models=[\"n\"]"], "experiment[0].models[0]", "no model is called 'n'");
    one_of_experiment(&["experiment.x.keys=[\"team\"]"], "experiment[0].keys[0]", "no API key is called 'team'");
    one_of_experiment(&["experiment.x.classes=[\"shrt\"]"], "experiment[0].classes[0]", "did you mean 'short'?");
    one_of_experiment(&["experiment.x.sticky=usr"], "experiment[0].sticky", "did you mean 'user'?");
    one_of_experiment(&["experiment.x.header=a b"], "experiment[0].header", "not the name of a header");
    one_of_experiment(&["experiment.x.begins=tomorrow"], "experiment[0].begins", "is not a time");
    one_of_experiment(&["experiment.x.traffic={from=0.5,to=0.5}"], "experiment[0].traffic", "below traffic.to");
    for step in ["5", "0%", "101%", "5% later", "5% after"] {
        one_of_experiment(
            &[&format!("experiment.x.ramp=[\"{step}\"]")],
            "experiment[0].ramp[0]",
            "not a step of a ramp",
        );
    }
    let steps = "experiment.x.ramp=[\"5%\", \"25% after 1h\", \"20% after 2h\"]";
    one_of_experiment(&[steps], "experiment[0].ramp[2]", "larger share");
}

#[test]
fn two_experiments_that_want_the_same_requests_are_refused() {
    let second = EXPERIMENT.replace("[[model]]\nname = \"lora\"", "").replace("\"x\"", "\"y\"");
    let text = TWO_POOLS.replace("models = [\"m\"]", "models = [\"m\", \"lora\"]") + EXPERIMENT + &second;
    one_in(&text, &[], "experiment[1].traffic", "'x' already has units");
    one_in(&text, &["experiment.y.layer=own"], "experiment[1].layer", "use its layer 'default'");
    let apart = ["experiment.x.traffic.to=0.5", "experiment.y.traffic.from=0.5"];
    read_with(&text, &apart).unwrap();
    read_with(&text, &["experiment.x.classes=[\"short\"]", "experiment.y.classes=[\"long\"]"]).unwrap();
    read_with(&text, &["experiment.y.models=[\"lora\"]"]).unwrap();
}
