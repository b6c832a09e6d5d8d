//! Reads `[[model]]`, and lists of model names wherever they stand.
//!
//! A name that nothing declares is refused with the nearest one that exists: a pool for a misspelt model would be a pool
//! that nobody reaches.

use std::collections::BTreeMap;

use super::super::problem::Situation;
use super::super::suggest::Suggestion;
use super::super::{Model, ModelScope, defaults};
use super::section::{Place, Report, Section};
use super::text::{check_model_name, path_in};
use sluice_core::base::{ModelId, Tokens};

/// Names seen so far, with the path of each.
pub(super) struct Names(BTreeMap<String, String>);

impl Names {
    pub(super) fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Takes a name, or reports that it is taken already.
    pub(super) fn claim(&mut self, name: &str, place: &Place, report: &mut Report<'_>) {
        if let Some(first) = self.0.get(name) {
            report.add(place, Situation::Duplicate { name: name.to_owned(), first: first.clone() });
        } else {
            self.0.insert(name.to_owned(), place.path.clone());
        }
    }
}

/// Models in the order of the file.
pub(super) fn models(root: &mut Section<'_>, report: &mut Report<'_>) -> Vec<Model> {
    let mut names = Names::new();
    let sections = root.sections("model", defaults::MAX_MODELS, report);
    sections.into_iter().map(|section| model(section, &mut names, report)).collect()
}

fn model(mut at: Section<'_>, names: &mut Names, report: &mut Report<'_>) -> Model {
    let name: Option<String> = at.required("name", "write what clients send as \"model\"", report);
    if let Some(name) = &name {
        check_and_claim(name, &at.place_of("name"), names, report);
    }
    let aliases = at.texts("aliases", defaults::MAX_ALIASES, report).unwrap_or_default();
    for (place, alias) in &aliases {
        check_and_claim(alias, place, names, report);
    }
    let tokenizer = at.optional("tokenizer", report).map(|path: String| path_in(&report.around.folder, &path));
    if let Some(path) = tokenizer.as_ref().filter(|path| !path.is_file()) {
        report.add(&at.place_of("tokenizer"), Situation::FileMissing { path: path.display().to_string() });
    }
    let media_part_tokens =
        at.within("media_part_tokens", defaults::MEDIA_PART_TOKENS, Tokens(0)..=defaults::MAX_TOKENS, report);
    let adapter = at.optional("adapter", report).map(|path: String| path_in(&report.around.folder, &path));
    let golden = at.texts("golden", defaults::MAX_GOLDEN, report).unwrap_or_default();
    at.finish(report);
    let golden = golden.into_iter().map(|(_, prompt)| prompt).collect();
    let aliases = aliases.into_iter().map(|(_, alias)| alias).collect();
    Model { name: name.unwrap_or_default(), aliases, tokenizer, media_part_tokens, adapter, golden }
}

fn check_and_claim(name: &str, place: &Place, names: &mut Names, report: &mut Report<'_>) {
    match check_model_name(name) {
        Ok(()) => names.claim(name, place, report),
        Err(situation) => report.add(place, situation),
    }
}

/// The models that the list at `key` names. Absent: all. The second value is false when the list had a
/// problem, so that nothing should be concluded from it.
pub(super) fn scope(
    at: &mut Section<'_>,
    key: &'static str,
    models: &[Model],
    report: &mut Report<'_>,
) -> (ModelScope, bool) {
    let before = report.problems.len();
    let most = defaults::MAX_MODELS + defaults::MAX_ALIASES;
    let Some(names) = at.texts(key, most, report) else {
        return (ModelScope::All, report.problems.len() == before);
    };
    let star = names.iter().any(|(_, name)| name == "*");
    if names.is_empty() {
        report.add(&at.place_of(key), Situation::NoModels);
    } else if star && names.len() > 1 {
        report.add(&at.place_of(key), Situation::StarAndNames);
    }
    let mut found = Vec::new();
    let mut seen = BTreeMap::new();
    for (place, name) in names.iter().filter(|(_, name)| name != "*") {
        match models.iter().position(|model| model.name == *name || model.aliases.contains(name)) {
            Some(index) => match seen.insert(index, place.path.clone()) {
                Some(first) => report.add(place, Situation::Duplicate { name: name.clone(), first }),
                None => found.push(ModelId::new(index)),
            },
            None => report.add(place, unknown(name, models)),
        }
    }
    let fine = report.problems.len() == before;
    (if star || !fine { ModelScope::All } else { ModelScope::Only(found) }, fine)
}

fn unknown(name: &str, models: &[Model]) -> Situation {
    let known = models.iter().flat_map(|model| std::iter::once(&model.name).chain(&model.aliases));
    Situation::UnknownModel { name: name.to_owned(), suggestion: Suggestion::for_name(name, known.map(String::as_str)) }
}
