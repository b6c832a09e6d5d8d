//! A setting: keys and values that differ from the defaults.
//!
//! Keys are as in `sluice lab run --sweep`: `vllm.FLAG` for a flag of all engines,
//! `vllm@BACKEND.FLAG` for one engine, anything else for a key of the gateway. The empty setting is
//! the untuned default.

use std::collections::BTreeMap;

use sluice_config::ArgValue;
use sluice_core::vllm::flags::write;
use sluice_lab::Variant;
use sluice_lab::error::LabError;
use sluice_lab::sweep::{self, flag_of};

/// Keys and values; empty for the defaults.
pub type Setting = BTreeMap<String, ArgValue>;

/// The cost of changing a key, ascending. Costly dimensions vary less often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RestartCost {
    /// A key of the gateway: a reload.
    None,
    /// A flag outside the key of vLLM's compile cache.
    Restart,
    /// A flag that needs a compilation on first use.
    Compile,
}

/// Flags outside the key of vLLM's compile cache (0.33).
const NOT_COMPILED: &str = "api-server-count enable-chunked-prefill enable-prefix-caching enforce-eager gpu-memory-utilization \
    kv-cache-memory-bytes long-prefill-token-threshold long-prefill-token-threshold-adaptive max-cpu-loras \
    max-num-active-seqs max-num-queued-reqs max-num-queued-tokens prefill-schedule-interval \
    scheduler-reserve-full-isl scheduling-policy seed stream-interval watermark";

impl RestartCost {
    /// The cost of changing `key`.
    pub fn of(key: &str) -> Self {
        match flag_of(key) {
            None => Self::None,
            Some((_, flag)) if NOT_COMPILED.split(' ').any(|known| known == flag) => Self::Restart,
            Some(_) => Self::Compile,
        }
    }
}

/// The variant of a scenario with a setting.
pub fn variant(setting: &Setting) -> Result<Variant, LabError> {
    let mut variant = Variant { name: name(setting), ..Variant::default() };
    setting.iter().try_for_each(|(key, value)| sweep::change(&mut variant, key, value))?;
    Ok(variant)
}

/// The vLLM flags of a setting, for all engines, then for single backends.
pub fn flags(setting: &Setting) -> Vec<(Option<String>, String)> {
    let mut flags: Vec<(Option<String>, String)> = setting
        .iter()
        .filter_map(|(key, value)| {
            let (backend, flag) = flag_of(key)?;
            Some((backend.map(str::to_owned), write::words([(flag, value)]).join(" ")))
        })
        .collect();
    flags.sort();
    flags
}

/// A value that differs between settings, for hashes and for the journal.
pub fn identity(setting: &Setting) -> serde_json::Value {
    serde_json::json!(setting)
}

/// The name of a setting in tables: `max-num-seqs=128 pool.all.policy=least_work`, or `defaults`.
/// Keys of the gateway stay whole, because several pools have keys of the same name.
pub fn name(setting: &Setting) -> String {
    if setting.is_empty() {
        return "defaults".to_owned();
    }
    let part = |(key, value): (&String, &ArgValue)| format!("{}={value}", key_name(key));
    setting.iter().map(part).collect::<Vec<_>>().join(" ")
}

/// The name of a key in tables.
pub fn key_name(key: &str) -> String {
    match flag_of(key) {
        Some((None, flag)) => flag.to_owned(),
        Some((Some(backend), flag)) => format!("{backend}:{flag}"),
        None => key.to_owned(),
    }
}

#[cfg(test)]
pub(crate) fn value(text: &str) -> ArgValue {
    ArgValue::read("", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_becomes_a_variant_flags_and_a_name() {
        let pairs =
            [("vllm.max-num-seqs", "64"), ("vllm@gpu1.enforce-eager", "true"), ("pool.all.policy", "least_work")];
        let setting: Setting = pairs.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect();
        let variant = variant(&setting).unwrap();
        assert_eq!(variant.args["max-num-seqs"], ArgValue::Int(64));
        assert_eq!(variant.engine["gpu1"]["enforce-eager"], ArgValue::Flag(true));
        assert_eq!(variant.set, ["pool.all.policy=least_work"]);
        assert_eq!(name(&setting), "pool.all.policy=least_work max-num-seqs=64 gpu1:enforce-eager=true");
        let gpu1 = Some("gpu1".to_owned());
        assert_eq!(flags(&setting), [(None, "--max-num-seqs=64".to_owned()), (gpu1, "--enforce-eager".to_owned())]);
        assert_eq!(name(&Setting::new()), "defaults");
    }

    #[test]
    fn keys_of_the_gateway_cost_nothing_and_compiled_flags_most() {
        assert_eq!(RestartCost::of("pool.all.slots"), RestartCost::None);
        assert_eq!(RestartCost::of("vllm.gpu-memory-utilization"), RestartCost::Restart);
        assert_eq!(RestartCost::of("vllm@gpu0.max-num-seqs"), RestartCost::Compile);
    }
}
