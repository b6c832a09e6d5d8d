//! The settings of an engine: what may change from one start of a backend to the next.
//!
//! Everything else (program, port, devices, environment) is the backend's configuration and belongs to its driver. So do
//! secret flags such as `api-key`: settings are written to the journal and shown, and hold no secrets. Flag names are
//! compared in one spelling only, which [`dashed`] makes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use sluice_gateway::config::ArgValue;

/// The flags that one start of an engine gets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineSettings {
    /// Flags of the engine without their dashes, as in `launch.args`; `_` in a name is read as `-` (see [`dashed`]).
    pub args: BTreeMap<String, ArgValue>,
}

/// The spelling of a flag that vLLM registers: `_` becomes `-`, except after a dot, where keys of a JSON value follow.
pub fn dashed(name: &str) -> String {
    match name.split_once('.') {
        Some((flag, keys)) => format!("{}.{keys}", flag.replace('_', "-")),
        None => name.replace('_', "-"),
    }
}

/// The flags of a start: the secret ones of the configuration (`secret`) in clear, and the settings.
pub(crate) fn exposed(secret: &BTreeMap<String, ArgValue>, settings: &EngineSettings) -> EngineSettings {
    let secret = secret.iter().map(|(name, value)| (dashed(name), value.expose())).collect();
    EngineSettings { args: secret }.with(&settings.args)
}

impl EngineSettings {
    /// Takes out the secrets that an earlier version wrote to the journal. Whether there were any.
    pub(crate) fn drop_secrets(&mut self) -> bool {
        let before = self.args.len();
        self.args.retain(|name, value| !value.is_secret(name));
        self.args.len() != before
    }

    /// A copy with some flags changed. A flag is matched whether it is written with `-` or `_`.
    pub fn with(&self, changes: &BTreeMap<String, ArgValue>) -> Self {
        let all = self.args.iter().chain(changes);
        Self { args: all.map(|(name, value)| (dashed(name), value.clone())).collect() }
    }

    /// The value of a flag that is set to a whole number: `int("max-num-seqs")`.
    pub fn int(&self, flag: &str) -> Option<i64> {
        let wanted = dashed(flag);
        let (_, value) = self.args.iter().find(|(name, _)| dashed(name) == wanted)?;
        match value {
            ArgValue::Int(number) => Some(*number),
            _ => None,
        }
    }
}
