//! Reads `[[pool]]`. What concerns several pools at once is judged in `across.rs`.
//!
//! Reads every key even when some are wrong, so that one run reports all problems; a pool with an error is left out of the
//! checks across pools.

use super::super::problem::Situation;
use super::super::suggest::Suggestion;
use super::super::{LongPrefix, Model, Policy, Pool, PromptRange, Queue, Slo, defaults};
use super::backend::backends;
use super::model::{Names, scope};
use super::section::{Place, Report, Section};
use super::server::{duration, duration_or_zero, slo};
use super::text::check_name;
use sluice_core::base::{PoolId, Tokens};

/// A pool that has been read, with what is needed to judge it among the others.
pub(super) struct Draft {
    pub(super) pool: Pool,
    /// The pool as a whole.
    pub(super) place: Place,
    /// `spill` with the place of each name.
    pub(super) spill: Vec<(Place, String)>,
    /// The place of each backend's target.
    pub(super) targets: Vec<Place>,
    /// Whether models and range were read without a problem.
    pub(super) sound: bool,
}

const ONE: Tokens = Tokens(1);

/// Pools in the order of the file.
pub(super) fn pools(root: &mut Section<'_>, models: &[Model], general: &Slo, report: &mut Report<'_>) -> Vec<Draft> {
    let place = root.place_of("pool");
    let written = root.sections("pool", defaults::MAX_POOLS, report);
    if written.is_empty() && report.problems.iter().all(|problem| problem.path() != "pool") {
        report.add(&place, Situation::NoPool);
    }
    let mut names = Names::new();
    let mut drafts: Vec<Draft> =
        written.into_iter().map(|section| pool(section, models, general, &mut names, report)).collect();
    resolve_spill(&mut drafts, report);
    drafts
}

fn pool(mut at: Section<'_>, models: &[Model], general: &Slo, names: &mut Names, report: &mut Report<'_>) -> Draft {
    let name: Option<String> = at.required("name", "name the pool, such as \"short\"", report);
    if let Some(name) = &name {
        match check_name(name) {
            Ok(()) => names.claim(name, &at.place_of("name"), report),
            Err(situation) => report.add(&at.place_of("name"), situation),
        }
    }
    let (models, models_sound) = scope(&mut at, "models", models, report);
    let range = range(&mut at, report);
    let limit = |at: &mut Section<'_>, key, report: &mut Report<'_>| {
        at.optional_within(key, ONE..=defaults::MAX_TOKENS, report)
    };
    let (backends, targets) = backends(&mut at, report);
    let pool = Pool {
        name: name.unwrap_or_default(),
        models,
        prompt_tokens: range.unwrap_or(PromptRange { min: Tokens(0), max: None }),
        policy: at.value("policy", defaults::POLICY, report),
        slots: at.within("slots", defaults::SLOTS, 1..=defaults::MAX_SLOTS, report),
        tokens: limit(&mut at, "tokens", report),
        prefill_tokens: limit(&mut at, "prefill_tokens", report),
        long_prefix: long_prefix(&mut at, range, report),
        queue: queue(&mut at, report),
        spill: Vec::new(),
        usage: at.value("usage", defaults::USAGE, report),
        slo: slo(at.section_or_empty("slo", report), Some(general), report),
        backends,
    };
    if pool.policy == Policy::PrefixAffinity {
        report.add(&at.place_of("policy"), Situation::AffinityNotYet);
    }
    let spill = at.texts("spill", defaults::MAX_POOLS, report).unwrap_or_default();
    let place = at.place.clone();
    at.finish(report);
    Draft { pool, place, spill, targets, sound: models_sound && range.is_some() }
}

/// The range, or nothing when it has a problem.
fn range(at: &mut Section<'_>, report: &mut Report<'_>) -> Option<PromptRange> {
    let before = report.problems.len();
    let mut at = at.section_or_empty("prompt_tokens", report);
    let min = at.within("min", Tokens(0), Tokens(0)..=defaults::MAX_TOKENS, report);
    let max = at.optional_within("max", ONE..=defaults::MAX_TOKENS, report);
    if let Some(max) = max.filter(|max| *max <= min) {
        report.add(&at.place, Situation::EmptyRange { min: min.to_string(), max: max.to_string() });
    }
    at.finish(report);
    (report.problems.len() == before).then_some(PromptRange { min, max })
}

fn long_prefix(at: &mut Section<'_>, range: Option<PromptRange>, report: &mut Report<'_>) -> Option<LongPrefix> {
    let mut at = at.section("long_prefix", report)?;
    let threshold = at.required("threshold", "write the prompt length from which a permit is needed", report);
    let slots = at.required("slots", "write how many such prompts may be in prefill at once on a backend", report);
    let bounds = |threshold: &Tokens| (ONE..=defaults::MAX_TOKENS).contains(threshold);
    if let Some(found) = threshold.filter(|threshold| !bounds(threshold)) {
        let (min, max) = (ONE.to_string(), defaults::MAX_TOKENS.to_string());
        report.add(&at.place_of("threshold"), Situation::OutOfRange { found: found.to_string(), min, max });
    }
    let slots_place = at.place_of("slots");
    at.finish(report);
    let (threshold, slots) = (threshold?, slots?);
    let home_to_long = range.is_some_and(|range| range.max.is_none_or(|max| max > threshold));
    if slots == 0 && home_to_long {
        report.add(&slots_place, Situation::LongNeverRuns { threshold: threshold.to_string() });
    }
    Some(LongPrefix { threshold, slots })
}

fn queue(at: &mut Section<'_>, report: &mut Report<'_>) -> Queue {
    let mut at = at.section_or_empty("queue", report);
    let queue = Queue {
        length: at.within("length", defaults::QUEUE_LENGTH, 0..=defaults::MAX_QUEUE_LENGTH, report),
        timeout: duration(&mut at, "timeout", defaults::QUEUE_TIMEOUT, report),
        order: at.value("order", defaults::QUEUE_ORDER, report),
        aging_per_1k_tokens: duration_or_zero(&mut at, "aging_per_1k_tokens", defaults::QUEUE_AGING_PER_1K, report),
    };
    at.finish(report);
    queue
}

/// Turns the names in `spill` into ids, now that all pools have been read.
fn resolve_spill(drafts: &mut [Draft], report: &mut Report<'_>) {
    let names: Vec<String> = drafts.iter().map(|draft| draft.pool.name.clone()).collect();
    for (own, draft) in drafts.iter_mut().enumerate() {
        for (place, name) in &draft.spill {
            let Some(index) = names.iter().position(|known| known == name) else {
                let others = names.iter().enumerate().filter(|(index, _)| *index != own).map(|(_, name)| name.as_str());
                let suggestion = Suggestion::for_name(name, others);
                report.add(place, Situation::UnknownPool { name: name.clone(), suggestion });
                continue;
            };
            let target = PoolId::new(index);
            if index == own {
                report.add(place, Situation::SpillToSelf);
            } else if draft.pool.spill.contains(&target) {
                let first = format!("{}.spill", draft.place.path);
                report.add(place, Situation::Duplicate { name: name.clone(), first });
            } else {
                draft.pool.spill.push(target);
            }
        }
    }
}
