//! The effect of each flag of `vllm serve`, and whether a client of the admin API may change it.
//!
//! `flag_effect.txt` lists every flag of `flags.txt` once. Only flags of the scheduler and of
//! memory are tunable, because at worst the engine does not start. A flag that is not in the list
//! is not tunable. Neither is an abbreviation, because another version of vLLM may expand it
//! differently.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::flags::table;

labels! {
    /// The part of an engine that a flag affects.
    #[derive(Hash)]
    pub enum FlagEffect {
        /// Sizes, limits and orders of the scheduler.
        Scheduling = "scheduling",
        /// The amount and the use of memory.
        Memory = "memory",
        /// The flag can load code.
        Code = "code",
        /// The flag names files or models.
        Files = "files",
        /// The addresses on which the engine listens and to which it connects.
        Network = "network",
        /// Rights of clients, and disclosure of their requests.
        Exposure = "exposure",
        /// Devices, processes and hosts.
        Placement = "placement",
        /// Kernels and communication.
        Kernels = "kernels",
        /// The content of responses.
        Answers = "answers",
        /// Logs and metrics of the engine.
        Observation = "observation",
        /// The flag is not in the list.
        Unknown = "unknown",
    }
}

impl FlagEffect {
    /// The effect of a flag, written in full without leading dashes: `max-num-seqs`,
    /// `no-enable-prefix-caching`, `compilation-config.mode`.
    pub fn of(written: &str) -> Self {
        let flag = written.split_once('.').map_or(written, |(flag, _)| flag);
        let Some(flag) = table::exact(flag) else { return Self::Unknown };
        effects().get(flag).copied().unwrap_or(Self::Unknown)
    }

    /// Whether a client of the admin API may change such a flag without further configuration.
    pub fn is_tunable(self) -> bool {
        matches!(self, Self::Scheduling | Self::Memory)
    }

    /// A predicate for a message, to follow the name of the flag.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Scheduling => "changes scheduling",
            Self::Memory => "changes the use of memory",
            Self::Code => "can load code",
            Self::Files => "names files or models",
            Self::Network => "changes what the engine listens on or connects to",
            Self::Exposure => "changes what clients may do or what is revealed of their requests",
            Self::Placement => "changes devices, processes or hosts",
            Self::Kernels => "changes kernels or communication",
            Self::Answers => "changes what the model answers",
            Self::Observation => "changes the logs or metrics of the engine",
            Self::Unknown => "is not a flag of vLLM that this gateway knows by this name",
        }
    }
}

/// The list as (flag, effect).
fn list() -> impl Iterator<Item = (&'static str, FlagEffect)> {
    let lines = include_str!("flag_effect.txt").lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(':')).flat_map(|(word, flags)| {
        let effect = FlagEffect::ALL.into_iter().find(|effect| effect.label() == word);
        let effect = effect.unwrap_or(FlagEffect::Unknown);
        flags.split_whitespace().map(move |flag| (flag, effect))
    })
}

fn effects() -> &'static HashMap<&'static str, FlagEffect> {
    static EFFECTS: OnceLock<HashMap<&'static str, FlagEffect>> = OnceLock::new();
    EFFECTS.get_or_init(|| list().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_has_one_effect() {
        let mut known: Vec<&str> = table::table().iter().map(|flag| flag.name).collect();
        let mut listed: Vec<&str> = list().map(|(flag, _)| flag).collect();
        known.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, known);
        assert!(list().all(|(_, effect)| effect != FlagEffect::Unknown), "a word is misspelt");
    }

    #[test]
    fn only_flags_of_scheduling_and_memory_are_tunable() {
        for tunable in ["max-num-seqs", "gpu-memory-utilization", "no-enable-prefix-caching", "kv-cache-dtype"] {
            assert!(FlagEffect::of(tunable).is_tunable(), "{tunable}");
        }
        for (flag, effect) in [
            ("middleware", FlagEffect::Code),
            ("trust-remote-code", FlagEffect::Code),
            ("no-trust-remote-code", FlagEffect::Code),
            ("tool-parser-plugin", FlagEffect::Code),
            ("hf-overrides", FlagEffect::Code),
            ("load-format", FlagEffect::Code),
            ("worker-cls", FlagEffect::Code),
            ("scheduler-cls", FlagEffect::Code),
            ("speculative-config.model", FlagEffect::Code),
            ("compilation-config.backend", FlagEffect::Code),
            ("chat-template", FlagEffect::Files),
            ("config", FlagEffect::Files),
            ("host", FlagEffect::Network),
            ("api-key", FlagEffect::Exposure),
        ] {
            assert_eq!(FlagEffect::of(flag), effect, "{flag}");
        }
    }

    #[test]
    fn an_abbreviation_or_a_flag_of_another_program_is_unknown() {
        for flag in ["middlewar", "max-num-se", "sim-speed", "", "-", ".", "max_num_seqs "] {
            assert_eq!(FlagEffect::of(flag), FlagEffect::Unknown, "{flag}");
        }
    }
}
