//! Rules about experiments: arms that can be served, weights that add up, and one experiment for
//! each request.
//!
//! Two experiments that could both want a request would bias each other. So they must differ in
//! models, keys or classes, or have parts of one layer that do not overlap. As in `rules.rs`, no
//! rule is applied to a value that already has a problem.

use super::auth::Auth;
use super::backend::Backend;
use super::experiment::{Arm, Experiment};
use super::model::{Model, ModelScope};
use super::pool::Pool;
use super::problem::{Situation, Suggestion};
use super::report::{Claimed, Report};
use super::root::Config;
use sluice_core::base::ModelId;

/// The error that rounding may leave in a sum of 100 percent.
const SUM_TOLERANCE: f64 = 0.01;

pub(super) fn check(config: &Config, report: &mut Report<'_>) {
    let mut names = Claimed::default();
    for (index, experiment) in config.experiments.iter().enumerate() {
        let path = format!("experiment[{index}]");
        names.claim(&experiment.name, format!("{path}.name"), report);
        check_keys(experiment, &config.auth, &path, report);
        check_times(experiment, &path, report);
        check_arms(experiment, config, &path, report);
        let first = config.experiments[..index].iter().find(|other| compete(other, experiment));
        if let Some(first) = first.filter(|_| report.is_sound(&format!("{path}.traffic"))) {
            let same_layer = first.layer == experiment.layer;
            let key = if same_layer { "traffic" } else { "layer" };
            let (first, layer) = (first.name.clone(), first.layer.clone());
            let situation =
                if same_layer { Situation::SameTraffic { first } } else { Situation::OtherLayer { first, layer } };
            report.add_at(&format!("{path}.{key}"), situation);
        }
    }
}

fn compete(one: &Experiment, other: &Experiment) -> bool {
    let models = match (&one.models, &other.models) {
        (ModelScope::Only(one), ModelScope::Only(other)) => one.iter().any(|model| other.contains(model)),
        _ => true,
    };
    let traffic = one.traffic.from < other.traffic.to && other.traffic.from < one.traffic.to;
    models
        && meet(&one.keys, &other.keys)
        && meet(&one.classes, &other.classes)
        && (traffic || one.layer != other.layer)
}

/// Whether two lists have an element in common; an empty list means everything.
fn meet<T: PartialEq>(one: &[T], other: &[T]) -> bool {
    one.is_empty() || other.is_empty() || one.iter().any(|item| other.contains(item))
}

fn check_keys(experiment: &Experiment, auth: &Auth, path: &str, report: &mut Report<'_>) {
    for (number, name) in experiment.keys.iter().enumerate() {
        if !auth.keys.iter().any(|key| key.name == *name) {
            let known = auth.keys.iter().map(|key| key.name.as_str());
            let situation =
                Situation::UnknownKeyName { name: name.clone(), suggestion: Suggestion::for_name(name, known) };
            report.add_at(&format!("{path}.keys[{number}]"), situation);
        }
    }
}

fn check_times(experiment: &Experiment, path: &str, report: &mut Report<'_>) {
    let traffic = &experiment.traffic;
    if traffic.from >= traffic.to && report.is_sound(&format!("{path}.traffic")) {
        report.add_at(&format!("{path}.traffic"), Situation::EmptyTraffic);
    }
    for (number, steps) in experiment.ramp.windows(2).enumerate() {
        let at = format!("{path}.ramp[{}]", number + 1);
        if (steps[0].share >= steps[1].share || steps[0].after >= steps[1].after) && report.is_sound(&at) {
            report.add_at(&at, Situation::RampOrder);
        }
    }
}

fn check_arms(experiment: &Experiment, config: &Config, path: &str, report: &mut Report<'_>) {
    let arms = format!("{path}.arm");
    if !report.is_sound(&arms) {
        return;
    }
    if experiment.arms.len() < 2 {
        report.add_at(&arms, Situation::FewArms);
        return;
    }
    let sum: f64 = experiment.arms.iter().map(|arm| arm.weight).sum();
    if (sum - 100.0).abs() > SUM_TOLERANCE {
        report.add_at(&arms, Situation::WeightsSum { sum: sum.to_string() });
    }
    let mut names = Claimed::default();
    for (number, arm) in experiment.arms.iter().enumerate() {
        let path = format!("{arms}[{number}]");
        names.claim(&arm.name, format!("{path}.name"), report);
        check_shadow(arm, number, &path, report);
        check_target(arm, experiment, config, &path, report);
    }
}

/// Checks that an arm has either units or copies, and that the control has units.
fn check_shadow(arm: &Arm, number: usize, path: &str, report: &mut Report<'_>) {
    match arm.shadow {
        Some(_) if arm.weight > 0.0 => report.add_at(&format!("{path}.weight"), Situation::ShadowWeight),
        Some(_) if number == 0 => report.add_at(&format!("{path}.shadow"), Situation::ShadowControl),
        None if arm.weight == 0.0 && report.is_sound(&format!("{path}.weight")) => {
            report.add_at(&format!("{path}.weight"), Situation::NoWeight);
        }
        _ => {}
    }
}

/// Checks that the model, pool and backends of an arm exist and can serve the arm's requests.
fn check_target(arm: &Arm, experiment: &Experiment, config: &Config, path: &str, report: &mut Report<'_>) {
    let model = arm.model.as_deref().map(|name| (name, config.model_named(name)));
    if let Some((name, None)) = model {
        let known = config.models.iter().flat_map(|model| std::iter::once(&model.name).chain(&model.aliases));
        let suggestion = Suggestion::for_name(name, known.map(String::as_str));
        report.add_at(&format!("{path}.model"), Situation::UnknownModel { name: name.to_owned(), suggestion });
        return;
    }
    let Some(name) = &arm.pool else {
        if !arm.backends.is_empty() {
            report.add_at(&format!("{path}.backends"), Situation::BackendsWithoutPool);
        }
        return;
    };
    let Some(pool) = config.pools.iter().find(|pool| pool.name == *name) else {
        let suggestion = Suggestion::for_name(name, config.pools.iter().map(|pool| pool.name.as_str()));
        report.add_at(&format!("{path}.pool"), Situation::UnknownPool { name: name.clone(), suggestion });
        return;
    };
    if let Some(missing) = unserved(pool, model.and_then(|(_, id)| id), &experiment.models, &config.models) {
        let situation = Situation::ArmPoolWithoutModel { pool: name.clone(), model: missing };
        report.add_at(&format!("{path}.pool"), situation);
    }
    check_backends(&arm.backends, &pool.backends, path, report);
}

fn check_backends(named: &[String], backends: &[Backend], path: &str, report: &mut Report<'_>) {
    for (number, name) in named.iter().enumerate() {
        if !backends.iter().any(|backend| backend.name == *name) {
            let suggestion = Suggestion::for_name(name, backends.iter().map(|backend| backend.name.as_str()));
            let situation = Situation::UnknownBackend { name: name.clone(), suggestion };
            report.add_at(&format!("{path}.backends[{number}]"), situation);
        }
    }
}

/// A model that the requests of an arm may have and that the arm's pool does not serve.
fn unserved(pool: &Pool, own: Option<ModelId>, models: &ModelScope, declared: &[Model]) -> Option<String> {
    let ModelScope::Only(served) = &pool.models else { return None };
    let missing = match (own, models) {
        (Some(own), _) => (!served.contains(&own)).then_some(own),
        (None, ModelScope::Only(models)) => models.iter().copied().find(|model| !served.contains(model)),
        (None, ModelScope::All) => (0..declared.len()).map(ModelId::new).find(|model| !served.contains(model)),
    };
    Some(declared[missing?.index()].name.clone())
}
