//! Checks that every request has exactly one home, and that the pools to which the home pool spills
//! can serve the request.
//!
//! For each declared model, the ranges of the pools that serve it must cover every prompt length
//! exactly once: sorted by begin, each range must begin where the previous range ends. The ranges
//! of the pools with `"*"` must do so too, for models that are not declared. Two pools may spill to
//! each other, because a request spills at most once.
//!
//! Pools that only arms of experiments name are left out. So are pools whose models or range have a
//! problem, because their coverage is unknown.

use std::collections::BTreeSet;

use super::model::{Model, ModelScope};
use super::pool::{Pool, PromptRange};
use super::problem::Situation;
use super::report::{Place, Report};
use super::root::Config;
use sluice_core::base::{ModelId, Tokens};

/// A pool with the path, and whether models and range are free of problems.
struct CoveringPool<'c> {
    pool: &'c Pool,
    path: String,
    sound: bool,
}

pub(super) fn check(config: &Config, report: &mut Report<'_>) {
    let candidate = |(index, pool)| {
        let path = format!("pool[{index}]");
        let sound = ["models", "prompt_tokens"]
            .iter()
            .all(|key| report.is_sound(&format!("{path}.{key}")) && !report.is_misspelt(&path, key));
        CoveringPool { pool, path, sound }
    };
    let candidates: Vec<CoveringPool<'_>> = config.pools.iter().enumerate().map(candidate).collect();
    let all_sound = candidates.iter().all(|candidate| candidate.sound);
    // If several models are served by the same pools, they have the same gaps, which are reported
    // once.
    let mut judged = BTreeSet::new();
    for (index, model) in config.models.iter().enumerate() {
        let serves = |pool: &Pool| !pool.arms_only && pool.models.includes(ModelId::new(index));
        if all_sound && !config.pools.iter().any(serves) {
            let path = format!("model[{index}]");
            let origin = report.origins.of(&format!("{path}.name"));
            report.add(&Place { path, origin }, Situation::UnreachableModel { model: model.name.clone() });
        }
        check_cover(&format!("model '{}'", model.name), &candidates, serves, &mut judged, report);
    }
    let open = |pool: &Pool| !pool.arms_only && pool.models == ModelScope::All;
    check_cover("models of pools with \"*\"", &candidates, open, &mut judged, report);
    for candidate in candidates.iter().filter(|candidate| candidate.sound) {
        check_spill(&config.models, candidate, &candidates, report);
    }
}

/// Reports gaps and overlaps of the ranges for one model, at the pool that could be changed.
fn check_cover(
    model: &str,
    candidates: &[CoveringPool<'_>],
    serves: impl Fn(&Pool) -> bool,
    judged: &mut BTreeSet<Vec<usize>>,
    report: &mut Report<'_>,
) {
    let serving: Vec<usize> = (0..candidates.len()).filter(|index| serves(candidates[*index].pool)).collect();
    let mut sorted: Vec<&CoveringPool<'_>> = serving.iter().map(|index| &candidates[*index]).collect();
    if sorted.is_empty() || sorted.iter().any(|candidate| !candidate.sound) || !judged.insert(serving) {
        return;
    }
    sorted.sort_by_key(|candidate| candidate.pool.prompt_tokens.min);
    let gap = |min, max| Situation::Gap { model: model.to_owned(), gap: PromptRange { min, max }.to_string() };
    let mut covered = Some(Tokens(0));
    let mut last = sorted[0];
    for candidate in sorted {
        let range = candidate.pool.prompt_tokens;
        match covered {
            Some(end) if end < range.min => report.add(&range_place(candidate, report), gap(end, Some(range.min))),
            Some(end) if end == range.min => {}
            end => {
                let until = [end, range.max].into_iter().flatten().min();
                let overlap = PromptRange { min: range.min, max: until }.to_string();
                let (first, second) = (last.pool.name.clone(), candidate.pool.name.clone());
                let situation = Situation::Overlap { model: model.to_owned(), overlap, first, second };
                report.add(&range_place(candidate, report), situation);
            }
        }
        if covered.is_some_and(|end| range.max.is_none_or(|max| max > end)) {
            (covered, last) = (range.max, candidate);
        }
    }
    if let Some(end) = covered {
        report.add(&range_place(last, report), gap(end, None));
    }
}

/// The place of a pool's range in the file. If the range was not written, it is the place of the
/// pool.
fn range_place(candidate: &CoveringPool<'_>, report: &Report<'_>) -> Place {
    report.place(&format!("{}.prompt_tokens", candidate.path))
}

/// Checks that the pools to which a pool spills serve all models of that pool.
fn check_spill(models: &[Model], from: &CoveringPool<'_>, candidates: &[CoveringPool<'_>], report: &mut Report<'_>) {
    for to in from.pool.spill.iter().map(|id| &candidates[id.index()]).filter(|to| to.sound) {
        let missing = match (&from.pool.models, &to.pool.models) {
            (_, ModelScope::All) => None,
            (ModelScope::All, ModelScope::Only(_)) => Some("all models (\"*\")".to_owned()),
            (ModelScope::Only(own), ModelScope::Only(_)) => own
                .iter()
                .find(|model| !to.pool.models.includes(**model))
                .map(|model| format!("model '{}'", models[model.index()].name)),
        };
        if let Some(model) = missing {
            let list = format!("{}.spill", from.path);
            let index = report.position(&list, &to.pool.name).unwrap_or_default();
            let situation = Situation::SpillWithoutModel { to: to.pool.name.clone(), model };
            report.add_at(&format!("{list}[{index}]"), situation);
        }
    }
}
