//! `[[model]]`, and all lists of model names.
//!
//! A pool or a key may name only declared models (or `"*"`), because a pool for a misspelt model
//! would get no requests. The position of a model in the file is the [`ModelId`].

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::file::Entry;
use super::key::KeySpec;
use super::limits;
use super::problem::{Situation, Suggestion};
use super::report::{Names, Place, Report};
use super::setting::{Setting, Shown, elements, list, quote};
use super::table::table;
use super::value::check_model_name;
use sluice_core::base::{ModelId, Tokens};

table! {
    /// A model name that clients may send. LoRA adapters are models too.
    pub struct Model {
        /// Model name that clients send as "model", and by which the backends know the model.
        pub name: String = required("write what clients send as \"model\"").check(check_model_name).example("llama-3.1-8b");
        /// Other names that clients may send for the model, such as ["default"].
        pub aliases: Vec<String> = default("[]").check(check_model_name).at_most(limits::MAX_ALIASES);
        /// A tokenizer.json with which the gateway counts prompts exactly near a boundary between
        /// pools.
        pub tokenizer: Option<PathBuf> = optional("lengths are estimated from bytes").example("tokenizer.json");
        /// Prompt tokens assumed for each image, audio or video part. A small image has 256 tokens,
        /// a large one 1,600.
        pub media_part_tokens: Tokens = default("1k").within("0", limits::TOKENS);
        /// Folder of a LoRA adapter, if the model is one. Engines that the gateway runs load it,
        /// also after a restart; other engines (`url`) load it when an arm of an experiment has the
        /// model.
        pub adapter: Option<PathBuf> = optional("no adapter, or loaded without the gateway").example("adapters/sql");
        /// Prompts that check a restarted engine, if the gateway runs it. Their greedy completions
        /// (16 tokens) must be the same before and after the restart; otherwise the engine returns
        /// to the previous settings.
        pub golden: Vec<String> = default("[]").at_most(limits::MAX_GOLDEN);
    }
}

/// The models to which something applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelScope {
    /// `"*"`: every declared model, and any other model that the backends report.
    All,
    /// Only these models; at least one, in order of the configuration, without repetition.
    Only(Vec<ModelId>),
}

impl ModelScope {
    /// Whether a declared model is included.
    pub fn includes(&self, model: ModelId) -> bool {
        match self {
            Self::All => true,
            Self::Only(models) => models.contains(&model),
        }
    }
}

impl Setting for ModelScope {
    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let mut names = Vec::new();
        for (place, element) in elements(written, place, key, report)? {
            names.extend(<String as Setting>::read(element, &place, key, report).map(|name| (place, name)));
        }
        let star = names.iter().any(|(_, name)| name == "*");
        if names.is_empty() {
            report.add(place, Situation::NoModels);
        } else if star && names.len() > 1 {
            report.add(place, Situation::StarAndNames);
        }
        let mut found = Vec::new();
        let mut seen = BTreeMap::new();
        for (place, name) in names.iter().filter(|(_, name)| name != "*") {
            match report.names.models.iter().position(|known| known.contains(name)) {
                Some(index) => match seen.insert(index, place.path.clone()) {
                    Some(first) => report.add(place, Situation::Duplicate { name: name.clone(), first }),
                    None => found.push(ModelId::new(index)),
                },
                None => report.add(place, unknown(name, &report.names)),
            }
        }
        // If a name is wrong, the intended models are unknown, and rules about models leave the
        // pool out.
        Some(if star || !report.is_sound(&place.path) { Self::All } else { Self::Only(found) })
    }

    fn show(&self, names: &Names) -> Shown {
        Shown::Value(match self {
            Self::All => "[\"*\"]".to_owned(),
            Self::Only(models) => {
                let name =
                    |model: &ModelId| names.models[model.index()].first().map_or_else(String::new, |name| quote(name));
                list(&models.iter().map(name).collect::<Vec<_>>())
            }
        })
    }
}

fn unknown(name: &str, names: &Names) -> Situation {
    if names.models.is_empty() {
        return Situation::NoModelDeclared { name: name.to_owned() };
    }
    let known = names.models.iter().flatten().map(String::as_str);
    Situation::UnknownModel { name: name.to_owned(), suggestion: Suggestion::for_name(name, known) }
}
