//! The flags that an engine would start with, from all sources.
//!
//! Sources are the `--config` file, `launch.command` and the settings. Checks need the resulting
//! value, not the source. A script as the command, or an unreadable file, may set more flags. Then
//! the value of an absent flag is unknown.

use std::collections::BTreeMap;

use super::config_file;
use super::program::subcommand;
use crate::driver::AdapterRank;
use sluice_config::ArgValue;
use sluice_core::vllm::args::ServeArgs;
use sluice_core::vllm::flags::parse::{CommandLine, FlagValues};
use sluice_core::vllm::flags::table::setting;
use sluice_core::vllm::flags::value::finite;

/// vLLM's default of `--max-lora-rank`.
pub(super) const DEFAULT_LORA_RANK: i64 = 16;

/// All flags of a start as text. Settings override the command, which overrides the `--config`
/// file.
#[derive(Debug)]
pub(super) struct EffectiveFlags {
    values: FlagValues,
    /// The long names in the command as written, without dashes.
    written: Vec<String>,
    pub(super) model: Option<String>,
    /// Whether a script, or an unreadable file, may set other flags.
    pub(super) incomplete: bool,
}

impl EffectiveFlags {
    pub(super) fn new(command: &[String], args: &BTreeMap<String, ArgValue>) -> Self {
        let subcommand = subcommand(command).map(<[String]>::len);
        let line = subcommand.map(|words| CommandLine::parse(&command[words + 1..])).unwrap_or_default();
        let mut settings = FlagValues::new();
        for (name, value) in args {
            let (name, on) = setting(name);
            let texts = match value {
                ArgValue::Flag(said) => vec![(*said == on).to_string()],
                value => value.texts(),
            };
            settings.insert(name, texts);
        }
        let named = settings.get("config").or_else(|| line.values.get("config")).and_then(|path| path.last());
        let file = named.map(|path| config_file::read(path));
        // A script may set anything.
        let incomplete = matches!(file, Some(None)) || subcommand.is_none();
        let mut values = file.flatten().unwrap_or_default();
        // A model on the command line overrides the model in the file.
        let of = |values: &FlagValues| values.get("model").and_then(|names| names.last()).cloned();
        let model = of(&settings).or_else(|| of(&line.values)).or(line.positional).or_else(|| of(&values));
        values.extend(line.values);
        values.extend(settings);
        Self { values, written: line.written, model, incomplete }
    }

    /// The names of flags in the command, without dashes.
    pub(super) fn written(&self) -> impl Iterator<Item = &str> {
        self.written.iter().map(String::as_str)
    }

    pub(super) fn list(&self, name: &str) -> &[String] {
        self.values.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name)?.last().map(String::as_str)
    }

    pub(super) fn on(&self, name: &str) -> bool {
        self.text(name) == Some("true")
    }

    /// The number of vLLM's API server processes: as set, else one for each engine between which
    /// vLLM balances requests. Always 1 with `enable-elastic-ep`.
    fn api_servers(&self) -> i64 {
        let outside = ["data-parallel-external-lb", "data-parallel-multi-port-external-lb"];
        let hybrid = self.on("data-parallel-hybrid-lb") || self.text("data-parallel-start-rank").is_some();
        if self.on("enable-elastic-ep") {
            return 1;
        }
        let balanced = || match self.text("data-parallel-rank").is_some() || outside.iter().any(|name| self.on(name)) {
            true => Some(1),
            false if hybrid => self.int("data-parallel-size-local"),
            false => self.int("data-parallel-size"),
        };
        self.int("api-server-count").or_else(balanced).unwrap_or(1)
    }

    /// Whether adapters can be loaded at run time. vLLM allows that with one API server only.
    pub(super) fn loads_adapters(&self) -> bool {
        self.on("enable-lora") && self.api_servers() <= 1
    }

    /// The largest rank of adapters that can be loaded at run time.
    pub(super) fn adapter_rank(&self) -> AdapterRank {
        let servers = self.api_servers();
        match (self.on("enable-lora"), self.int("max-lora-rank")) {
            (false, _) if self.incomplete => AdapterRank::Unknown,
            (false, _) => AdapterRank::None("enable-lora is not set; set args.enable-lora = true".to_owned()),
            (true, _) if servers > 1 => AdapterRank::None(format!(
                "vLLM loads adapters at run time only with a single API server, and these settings start {servers}; \
                 set args.api-server-count = 1"
            )),
            (true, Some(rank)) => AdapterRank::UpTo(rank),
            (true, None) if self.incomplete => AdapterRank::Unknown,
            (true, None) => AdapterRank::UpTo(DEFAULT_LORA_RANK),
        }
    }

    /// A whole number, with a unit if vLLM takes one; `auto` is -1. `None` for other text, which
    /// other checks report.
    pub(super) fn int(&self, name: &str) -> Option<i64> {
        let text = self.text(name)?;
        ServeArgs::parse(&["m", &format!("--{name}={text}")]).ok()?.int(name)
    }

    pub(super) fn float(&self, name: &str) -> Option<f64> {
        finite(self.text(name)?)
    }
}
