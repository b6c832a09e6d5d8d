//! The tokenizers of the models.
//!
//! A reload loads a tokenizer again, because the file may have changed, and passes on the learned
//! cost of the model's template. Bound: all counters of a process share one limit on concurrent
//! counts.

use std::sync::Arc;

use super::StartError;
use sluice_config::Config;
use sluice_gateway::estimate::ExactCounter;

/// One counter for each model, in the order of the configuration.
pub(crate) type Counters = Vec<Option<Arc<ExactCounter>>>;

/// Loads the tokenizers, in the order of the models. `running`: the configuration in force with its
/// counters.
pub(crate) fn load_counters(config: &Config, running: Option<(&Config, &Counters)>) -> Result<Counters, StartError> {
    let known = || running.into_iter().flat_map(|(config, counters)| config.models.iter().zip(counters));
    let permits = known().find_map(|(_, counter)| Some(counter.as_ref()?.permits()));
    let permits = permits.unwrap_or_else(ExactCounter::new_permits);
    let load = |model: &sluice_config::Model| {
        let Some(path) = &model.tokenizer else { return Ok(None) };
        let loaded = ExactCounter::load(path, Arc::clone(&permits))
            .map_err(|source| StartError::Tokenizer { model: model.name.clone(), source })?;
        let before = known().find(|(one, _)| one.name == model.name && one.tokenizer == model.tokenizer);
        Ok(Some(Arc::new(match before.and_then(|(_, counter)| counter.as_deref()) {
            Some(before) => loaded.continuing(before),
            None => loaded,
        })))
    };
    config.models.iter().map(load).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use sluice_config::{Machine, Surroundings};

    #[test]
    fn counters_share_a_bound_and_a_reload_keeps_what_was_learned() {
        let config = |models: &[&str]| {
            let model =
                |name| format!("[[model]]\nname = \"{name}\"\ntokenizer = \"tests/fixtures/tiny/tokenizer.json\"\n");
            let text = models.iter().map(model).collect::<String>();
            let pool = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n";
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
            let around = Surroundings { env: &|_| None, folder, machine: Machine::with_cores(1) };
            Config::parse(&(text + pool), "test", &[], &around).unwrap().config
        };
        let (first, second) = (config(&["a", "b"]), config(&["c", "b"]));
        let before = load_counters(&first, None).unwrap();
        let after = load_counters(&second, Some((&first, &before))).unwrap();
        let counters: Vec<_> = before.iter().chain(&after).flatten().collect();
        assert_eq!(counters.len(), 4);
        assert!(counters.iter().all(|one| Arc::ptr_eq(&one.permits(), &counters[0].permits())));
        assert!(after[1].as_ref().unwrap().has_template_of(before[1].as_ref().unwrap()));
        assert!(!after[0].as_ref().unwrap().has_template_of(before[0].as_ref().unwrap()));
    }
}
