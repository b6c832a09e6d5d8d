//! The settings of an engine: what may change from one start of a backend to the next.
//!
//! Program, port, devices, environment and secret flags such as `api-key` are the backend's
//! configuration and belong to the driver. Settings contain no secrets, because they are shown and
//! written to the journal. Flag names are compared in one spelling ([`dashed`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use sluice_gateway::config::ArgValue;

/// The flags of one start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineSettings {
    /// Flags without leading dashes, as in `launch.args`; `_` in a name is read as `-` (see
    /// [`dashed`]).
    pub args: BTreeMap<String, ArgValue>,
}

/// vLLM's spelling of a flag: `_` becomes `-`, except after a dot, where keys of a JSON value
/// follow.
pub fn dashed(name: &str) -> String {
    match name.split_once('.') {
        Some((flag, keys)) => format!("{}.{keys}", flag.replace('_', "-")),
        None => name.replace('_', "-"),
    }
}

/// The flags of a start: the settings, and the secret flags in the configuration (`secret`) in
/// clear.
pub(crate) fn exposed(secret: &BTreeMap<String, ArgValue>, settings: &EngineSettings) -> EngineSettings {
    let secret = secret.iter().map(|(name, value)| (dashed(name), value.expose())).collect();
    EngineSettings { args: secret }.with(&settings.args)
}

impl EngineSettings {
    /// Removes secrets that an earlier version wrote to the journal. Returns whether there were
    /// any.
    pub(crate) fn drop_secrets(&mut self) -> bool {
        let before = self.args.len();
        self.args.retain(|name, value| !value.is_secret(name));
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
