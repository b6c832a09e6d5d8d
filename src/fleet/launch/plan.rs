//! The plan of a start: the argv and environment of an engine, checked before any engine is
//! stopped.
//!
//! The argv: `launch.command`, the settings as flags in alphabetical order, then `--host 127.0.0.1`
//! and `--port` unless set, and `--enable-sleep-mode` for a vLLM with `share`. If a flag is given
//! twice, argparse takes the last one, so settings override the command.
//!
//! The environment: the gateway's, `launch.env`, and these variables unless `launch.env` sets them:
//! `CUDA_VISIBLE_DEVICES` from `gpu`; `CUDA_DEVICE_ORDER`, because `nvidia-smi` orders devices by
//! bus; `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` from `mps_percent`; `VLLM_ALLOW_RUNTIME_LORA_UPDATING`
//! with `enable-lora`, for adapters at run time (not with several API servers, which would not
//! start). `VLLM_CACHE_ROOT` is made absolute, so that each start finds the compiled graphs of the
//! last one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::effective::EffectiveFlags;
use super::installed_flags::InstalledFlags;
use super::program::{program_of, subcommand};
use super::{by_table, checks, settings_rules};
use crate::driver::{AdapterRank, EngineFailure, EngineSettings, Notice, Redactor, exposed};
use sluice_config::{ArgValue, Launch};
use sluice_core::engines::EngineKind;
use sluice_core::vllm::flags::write;

/// The flag for the order of requests, and the value for priorities.
const SCHEDULING_POLICY: &str = "scheduling-policy";
const PRIORITY: &str = "priority";

/// The effective `--max-lora-rank`; unknown for an engine that is not vLLM.
pub(crate) fn max_adapter_rank(engine: EngineKind, launch: &Launch, settings: &EngineSettings) -> AdapterRank {
    if engine.rules().flags.is_some() {
        return AdapterRank::Unknown;
    }
    EffectiveFlags::new(&launch.command, &exposed(&launch.args, settings).args).adapter_rank()
}

/// The effective `--max-num-seqs` of all data parallel ranks, or the flag of the kind.
pub(crate) fn sequences(engine: EngineKind, launch: &Launch, settings: &EngineSettings) -> Option<i64> {
    if let Some(table) = engine.rules().flags {
        return by_table::sequences(table, launch, settings);
    }
    let flags = EffectiveFlags::new(&launch.command, &exposed(&launch.args, settings).args);
    let ranks = flags.int("data-parallel-size").unwrap_or(1).max(1);
    Some(flags.int("max-num-seqs")?.saturating_mul(ranks))
}

/// The least default of `--gpu-memory-utilization`; later versions have a larger one.
const MEMORY_SHARE: f64 = 0.9;

/// The part of a device's memory that the engine takes; `None`: it is unknown, since a script may
/// set it, or it is set in bytes.
pub(crate) fn memory_share(launch: &Launch, settings: &EngineSettings) -> Option<f64> {
    let flags = EffectiveFlags::new(&launch.command, &exposed(&launch.args, settings).args);
    let is_known = !flags.incomplete && flags.text("kv-cache-memory-bytes").is_none();
    is_known.then(|| flags.float("gpu-memory-utilization").unwrap_or(MEMORY_SHARE))
}

/// The GPUs over which the engine spreads copies or parts of the weights.
pub(crate) fn gpus(launch: &Launch, settings: &EngineSettings) -> u64 {
    let flags = EffectiveFlags::new(&launch.command, &exposed(&launch.args, settings).args);
    let sizes = ["tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"];
    let of = |name: &&str| flags.int(name).and_then(|size| u64::try_from(size).ok()).unwrap_or(1).max(1);
    sizes.iter().map(of).fold(1, u64::saturating_mul)
}

/// Whether two engines with these flags can run next to each other: no flag fixes a port, and there
/// is one rank, because several ranks use fixed ports among themselves.
pub(crate) fn can_run_twice(launch: &Launch, settings: &EngineSettings) -> bool {
    let flags = EffectiveFlags::new(&launch.command, &exposed(&launch.args, settings).args);
    flags.text("port").is_none() && flags.int("data-parallel-size").unwrap_or(1) <= 1
}

/// The flag of an engine that can sleep.
const SLEEP_MODE: &str = "enable-sleep-mode";

/// Whether the engine can sleep, because it has the flag, or because it is a vLLM that gets the
/// flag for a shared device.
pub(crate) fn sleeps(launch: &Launch, settings: &EngineSettings) -> bool {
    let flags = EffectiveFlags::new(&launch.command, &exposed(&launch.args, settings).args);
    flags.on(SLEEP_MODE) || gets_sleep_mode(launch, &flags)
}

/// Whether the gateway adds the flag. A script gets no flag that it may not accept.
fn gets_sleep_mode(launch: &Launch, flags: &EffectiveFlags) -> bool {
    launch.share.is_some() && flags.text(SLEEP_MODE).is_none() && subcommand(&launch.command).is_some()
}

/// Whether the engine schedules by priority; vLLM's default is fcfs. For an unknown program the
/// words of the command count. `false` for other kinds of engines, which do not serve lower numbers
/// first by default.
pub(crate) fn schedules_by_priority(engine: EngineKind, launch: &Launch, settings: &EngineSettings) -> bool {
    if engine.rules().flags.is_some() {
        return false;
    }
    let flags = EffectiveFlags::new(&launch.command, &exposed(&launch.args, settings).args);
    match flags.text(SCHEDULING_POLICY) {
        Some(policy) => policy == PRIORITY,
        None => {
            let (flag, joined) = (format!("--{SCHEDULING_POLICY}"), format!("--{SCHEDULING_POLICY}={PRIORITY}"));
            let pairs = launch.command.windows(2);
            launch.command.contains(&joined) || pairs.into_iter().any(|pair| pair[0] == flag && pair[1] == PRIORITY)
        }
    }
}

/// Checks the settings alone, without program, devices or files: types of known flags, ranges,
/// contradictions.
///
/// # Errors
/// All errors in the settings.
pub fn check_values(engine: EngineKind, settings: &EngineSettings) -> Result<(), EngineFailure> {
    let (args, mut wrong) = (settings.with(&BTreeMap::new()).args, Vec::new());
    if let Some(table) = engine.rules().flags {
        return EngineFailure::joined(by_table::values(engine, table, &args)).map_or(Ok(()), Err);
    }
    let args = settings_rules::flags(args, None, &mut Vec::new(), &mut wrong);
    wrong.extend(checks::values(&EffectiveFlags::new(&[], &args)).err());
    EngineFailure::joined(wrong).map_or(Ok(()), Err)
}

/// A start that passed all checks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LaunchPlan {
    /// Program and arguments; the program as an absolute path.
    pub(crate) argv: Vec<String>,
    /// Variables added to the gateway's environment.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) notices: Vec<Notice>,
}

impl LaunchPlan {
    /// The plan for starting `launch` with `settings`. `known`: the flags of the installed program,
    /// if readable.
    ///
    /// # Errors
    /// All errors, by the keys of the configuration.
    pub(crate) fn new(
        engine: EngineKind,
        launch: &Launch,
        settings: &EngineSettings,
        known: Option<&InstalledFlags>,
    ) -> Result<Self, EngineFailure> {
        let planned = match engine.rules().flags {
            Some(table) => {
                let argv = by_table::argv(engine, table, (launch, settings), known);
                argv.map(|argv| Self { argv, env: environment(launch), notices: Vec::new() })
            }
            None => Self::with_secrets(launch, settings, known),
        };
        // The error quotes refused values.
        planned.map_err(|failure| failure.redacted(&Redactor::of_launch(launch)))
    }

    fn with_secrets(
        launch: &Launch,
        settings: &EngineSettings,
        known: Option<&InstalledFlags>,
    ) -> Result<Self, EngineFailure> {
        // All errors are reported at once, because each attempt may cost the operator a restart.
        let (program, mut wrong) = match program_of(launch) {
            Ok(program) => (program, Vec::new()),
            Err(failure) => (PathBuf::new(), vec![failure]),
        };
        let mut notices = Vec::new();
        let args: BTreeMap<String, ArgValue> = exposed(&launch.args, settings).args;
        let args = settings_rules::flags(args, known, &mut notices, &mut wrong);
        let flags = EffectiveFlags::new(&launch.command, &args);
        let command = EffectiveFlags::new(&launch.command, &BTreeMap::new());
        wrong.extend(settings_rules::command(&command, known).err());
        wrong.extend(checks::contradictions(launch, &args).err());
        wrong.extend(checks::all(launch, &flags));
        if let Some(failure) = EngineFailure::joined(wrong) {
            return Err(failure);
        }
        let mut argv = vec![program.display().to_string()];
        argv.extend(launch.command[1..].iter().cloned());
        argv.extend(write::words(&args));
        if gets_sleep_mode(launch, &flags) {
            argv.push(format!("--{SLEEP_MODE}"));
        }
        if flags.text("host").is_none() {
            argv.extend(["--host".to_owned(), "127.0.0.1".to_owned()]);
        }
        if flags.text("port").is_none() {
            argv.extend(["--port".to_owned(), launch.port.to_string()]);
        }
        Ok(Self { argv, env: environment_of_vllm(launch, &flags), notices })
    }
}

fn environment_of_vllm(launch: &Launch, flags: &EffectiveFlags) -> BTreeMap<String, String> {
    let mut env = environment(launch);
    if flags.on(SLEEP_MODE) || gets_sleep_mode(launch, flags) {
        // vLLM's page for sleep exists only in this mode. The engine listens on loopback, and the
        // gateway passes on no such page.
        env.entry("VLLM_SERVER_DEV_MODE".to_owned()).or_insert_with(|| "1".to_owned());
    }
    if flags.loads_adapters() {
        env.entry("VLLM_ALLOW_RUNTIME_LORA_UPDATING".to_owned()).or_insert_with(|| "1".to_owned());
    }
    env
}

fn environment(launch: &Launch) -> BTreeMap<String, String> {
    let mut env: BTreeMap<String, String> =
        launch.env.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect();
    if let Some(root) = env.get_mut("VLLM_CACHE_ROOT")
        && !root.starts_with('~')
        && let Ok(absolute) = std::path::absolute(&*root)
    {
        *root = absolute.display().to_string();
    }
    if !launch.gpu.is_empty() {
        let list: Vec<String> = launch.gpu.iter().map(ToString::to_string).collect();
        env.entry("CUDA_VISIBLE_DEVICES".to_owned()).or_insert_with(|| list.join(","));
        env.entry("CUDA_DEVICE_ORDER".to_owned()).or_insert_with(|| "PCI_BUS_ID".to_owned());
    }
    if let Some(percent) = launch.mps_percent {
        env.entry("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".to_owned()).or_insert_with(|| percent.to_string());
    }
    env
}
