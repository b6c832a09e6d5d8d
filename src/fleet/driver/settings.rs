//! The settings of an engine: what may change from one start of a backend to the next.
//!
//! Program, port, devices, environment and secret flags such as `api-key` are the backend's
//! configuration and belong to the driver. Settings contain no secrets, because they are shown and
//! written to the journal. Flag names are compared in one spelling ([`dashed`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use sluice_config::{ArgValue, is_secret_arg};
use sluice_core::engines::EngineKind;
use sluice_core::vllm::flags::parse::CommandLine;
use sluice_core::vllm::flags::table::dashed;
use sluice_core::vllm::flags::write;

/// The flags of one start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineSettings {
    /// Flags without leading dashes, as in `launch.args`; `_` in a name is read as `-` (see
    /// [`dashed`]).
    pub args: BTreeMap<String, ArgValue>,
}

/// The flags of a start: the settings, and in clear text the `secret` flags of the configuration.
pub(crate) fn exposed(secret: &BTreeMap<String, ArgValue>, settings: &EngineSettings) -> EngineSettings {
    let secret = secret.iter().map(|(name, value)| (dashed(name), value.expose())).collect();
    EngineSettings { args: secret }.with(&settings.args)
}

impl EngineSettings {
    /// The settings in the arguments of a running engine, in any spelling that vLLM accepts.
    pub fn of_words(words: &[String]) -> Self {
        Self { args: CommandLine::parse(words).settings() }
    }

    /// The words of a command line of vLLM.
    pub fn words(&self) -> Vec<String> {
        write::words(&self.args)
    }

    pub(crate) fn words_of(&self, engine: EngineKind) -> Vec<String> {
        let Some(table) = engine.rules().flags else { return self.words() };
        let mut words = Vec::new();
        self.args.iter().for_each(|(name, value)| table.write(name, value, &mut words));
        words
    }

    /// Removes secrets that an earlier version wrote to the journal. Returns whether there were
    /// any.
    pub(crate) fn drop_secrets(&mut self) -> bool {
        let before = self.args.len();
        self.args.retain(|name, value| !is_secret_arg(name, value));
        self.args.len() != before
    }

    /// A copy with some flags changed; `-` and `_` in names are equal.
    pub fn with(&self, changes: &BTreeMap<String, ArgValue>) -> Self {
        let all = self.args.iter().chain(changes);
        Self { args: all.map(|(name, value)| (dashed(name), value.clone())).collect() }
    }

    /// The value of a flag that is a whole number: `int("max-num-seqs")`.
    pub fn int(&self, flag: &str) -> Option<i64> {
        let wanted = dashed(flag);
        let (_, value) = self.args.iter().find(|(name, _)| dashed(name) == wanted)?;
        match value {
            ArgValue::Int(number) => Some(*number),
            _ => None,
        }
    }
}
