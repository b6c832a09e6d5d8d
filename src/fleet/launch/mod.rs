//! From the configuration of a backend and its settings to the words of a command, checked before anything is stopped.
//!
//! The words: `launch.command`, then the settings as flags in alphabetical order, then `--host 127.0.0.1` and `--port` unless
//! they are there. Argparse lets the last of two equal flags win, so settings override the command. A setting that is `true`
//! becomes `--name`, one that is `false` `--no-name`, a list `--name a b`, anything else `--name=value`. One key of a flag
//! that takes JSON (`compilation-config.mode`) always becomes `--name=value`, the value as JSON. `config` becomes two words,
//! because vLLM looks for the word `--config` before it reads anything.
//!
//! The environment: the gateway's, then `launch.env`, then what follows from the rest unless it is written there:
//! `CUDA_VISIBLE_DEVICES` from `gpu`, and `CUDA_DEVICE_ORDER`, because `nvidia-smi` counts devices by their place on the bus;
//! `VLLM_ALLOW_RUNTIME_LORA_UPDATING` with `enable-lora`, because adapters are loaded at run time (vLLM does not start with
//! it and more than one API server). `VLLM_CACHE_ROOT` is made absolute, so that every start finds the compiled graphs of the last one.
//!
//! A flag that the installed vLLM does not know ends the process with status 2, minutes after the old one was stopped. So the
//! program is asked for its flags once ([`Flags`]); an unknown flag is refused here, with the name that comes closest, and
//! one that was removed because it no longer changes anything is dropped with a notice.

pub(crate) mod check;
mod flags;
mod rules;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::driver::{AdapterRank, EngineFailure, EngineSettings, Notice, dashed};
use sluice_core::vllm::failure::FailureClass;
use sluice_gateway::config::{ArgValue, Launch};

pub use check::adapter_rank;
pub(crate) use flags::{Flags, Known};

/// `--max-lora-rank`, wherever it is written.
pub(crate) fn rank_of_adapters(launch: &Launch, settings: &EngineSettings) -> AdapterRank {
    let args = settings.with(&BTreeMap::new()).args;
    check::Flat::new(&launch.command, &args).adapter_rank()
}

/// `--max-num-seqs` of all data parallel ranks together, wherever it is written.
pub(crate) fn sequences(launch: &Launch, settings: &EngineSettings) -> Option<i64> {
    let args = settings.with(&BTreeMap::new()).args;
    let flat = check::Flat::new(&launch.command, &args);
    let ranks = flat.int("data-parallel-size").unwrap_or(1).max(1);
    Some(flat.int("max-num-seqs")?.saturating_mul(ranks))
}

/// A start that was found in order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LaunchPlan {
    /// Program and arguments; the program as an absolute path.
    pub(crate) argv: Vec<String>,
    /// Added to the gateway's environment.
    pub(crate) env: BTreeMap<String, String>,
    /// What is worth telling.
    pub(crate) notices: Vec<Notice>,
}

impl LaunchPlan {
    /// The plan for starting `launch` with `settings`. `known`: the flags of the installed program, where it could be asked.
    ///
    /// # Errors
    /// What is wrong, in the words of the user's keys. Nothing was changed.
    pub(crate) fn new(
        launch: &Launch,
        settings: &EngineSettings,
        known: Option<&Known>,
    ) -> Result<Self, EngineFailure> {
        let program = program_of(launch)?;
        let mut notices = Vec::new();
        let args: BTreeMap<String, ArgValue> = settings.with(&BTreeMap::new()).args;
        let args = rules::flags(args, known, &mut notices)?;
        let all = check::Flat::new(&launch.command, &args);
        rules::command(&check::Flat::new(&launch.command, &BTreeMap::new()), known)?;
        check::written(launch, &args)?;
        check::all(launch, &all)?;
        let mut argv = vec![program.display().to_string()];
        argv.extend(launch.command[1..].iter().cloned());
        args.iter().for_each(|(name, value)| write(name, value, &mut argv));
        if all.text("host").is_none() {
            argv.extend(["--host".to_owned(), "127.0.0.1".to_owned()]);
        }
        if all.text("port").is_none() {
            argv.extend(["--port".to_owned(), launch.port.to_string()]);
        }
        Ok(Self { argv, env: environment(launch, &all), notices })
    }
}

/// The flags that settings become.
pub(crate) fn words_of(settings: &EngineSettings) -> Vec<String> {
    let mut words = Vec::new();
    settings.args.iter().for_each(|(name, value)| write(&dashed(name), value, &mut words));
    words
}

/// Whether each setting is of the type that its flag takes, where the flag is one that we know, in its range, and in
/// agreement with the others: all that can be told without knowing the program, the devices and the files.
pub(crate) fn check_values(settings: &EngineSettings) -> Result<(), EngineFailure> {
    let args = rules::flags(settings.with(&BTreeMap::new()).args, None, &mut Vec::new())?;
    check::values(&check::Flat::new(&[], &args))
}

fn write(name: &str, value: &ArgValue, argv: &mut Vec<String>) {
    let is_key = name.contains('.');
    match value {
        ArgValue::Flag(on) if is_key => argv.push(format!("--{name}={on}")),
        ArgValue::List(texts) if is_key => argv.push(format!("--{name}={}", json(texts))),
        ArgValue::Text(text) if name == "config" => argv.extend(["--config".to_owned(), text.clone()]),
        ArgValue::Flag(true) => argv.push(format!("--{name}")),
        ArgValue::Flag(false) => argv.push(format!("--no-{name}")),
        ArgValue::Int(number) => argv.push(format!("--{name}={number}")),
        ArgValue::Float(number) => argv.push(format!("--{name}={number}")),
        ArgValue::Text(text) => argv.push(format!("--{name}={text}")),
        ArgValue::List(texts) => {
            argv.push(format!("--{name}"));
            argv.extend(texts.iter().cloned());
        }
    }
}

/// Texts as a list of JSON, those that are numbers or truths as such.
fn json(texts: &[String]) -> serde_json::Value {
    let plain =
        |text: &String| serde_json::from_str(text).ok().filter(|v: &serde_json::Value| v.is_number() || v.is_boolean());
    texts.iter().map(|text| plain(text).unwrap_or_else(|| text.as_str().into())).collect()
}

fn environment(launch: &Launch, all: &check::Flat) -> BTreeMap<String, String> {
    let mut env = launch.env.clone();
    if let Some(root) = env.get_mut("VLLM_CACHE_ROOT")
        && !root.starts_with('~')
        && let Ok(absolute) = std::path::absolute(&*root)
    {
        *root = absolute.display().to_string();
    }
    if !launch.gpu.is_empty() {
        let list: Vec<String> = launch.gpu.iter().map(u16::to_string).collect();
        env.entry("CUDA_VISIBLE_DEVICES".to_owned()).or_insert_with(|| list.join(","));
        env.entry("CUDA_DEVICE_ORDER".to_owned()).or_insert_with(|| "PCI_BUS_ID".to_owned());
    }
    if all.loads_adapters() {
        env.entry("VLLM_ALLOW_RUNTIME_LORA_UPDATING".to_owned()).or_insert_with(|| "1".to_owned());
    }
    env
}

fn program_of(launch: &Launch) -> Result<PathBuf, EngineFailure> {
    let word = launch.command.first().map(String::as_str).unwrap_or_default();
    // A PATH that the engine is given is the one its program is looked for in, as a shell would.
    let path = launch.env.get("PATH").cloned();
    let found = match &path {
        Some(path) => find_in(word, path),
        None => find_program(word),
    };
    found.ok_or_else(|| {
        let place = if word.contains('/') { "is not a program that can be run" } else { "is not in PATH" };
        EngineFailure::new(FailureClass::ProgramMissing, format!("{word} {place}"))
    })
}

/// Where a program is: a word with a slash as it stands, any other in the gateway's `PATH`.
pub(crate) fn find_program(word: &str) -> Option<PathBuf> {
    find_in(word, &std::env::var("PATH").unwrap_or_default())
}

fn find_in(word: &str, path: &str) -> Option<PathBuf> {
    if word.is_empty() {
        return None;
    }
    if word.contains('/') {
        return std::path::absolute(word).ok().filter(|path| runs(path));
    }
    std::env::split_paths(path).map(|folder| folder.join(word)).find(|path| runs(path))
}

/// Whether a path is a file that somebody may execute.
fn runs(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests;
