//! Finds settings that vLLM would refuse minutes into a start, before any engine is stopped.
//!
//! Only certain errors are refused: two set values that contradict each other, values that no
//! version accepts, and missing files. Defaults do not count, because they differ between versions
//! and devices. The engine reports all other errors.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::effective::{DEFAULT_LORA_RANK, EffectiveFlags};
use super::program::subcommand;
use crate::driver::EngineFailure;
use sluice_config::{ArgValue, Launch};
use sluice_core::vllm::failure::{Diagnosis, FailureClass, FlagSuggestion};
use sluice_core::vllm::flags::parse::CommandLine;
use sluice_core::vllm::logs::StartPhase;

/// Values of vLLM's `--max-lora-rank`, for a suggestion.
const RANKS: &[i64] = &[1, 8, 16, 32, 64, 128, 256, 320, 512];
const ADAPTER_CONFIG_MAX: u64 = 1 << 20;

pub(super) fn all(launch: &Launch, flags: &EffectiveFlags) -> Vec<EngineFailure> {
    let checked = [
        ports(launch, flags),
        ranges(flags),
        combinations(flags),
        devices(launch, flags),
        model(flags),
        adapters(flags),
    ];
    checked.into_iter().filter_map(Result::err).collect()
}

/// The checks that need only values, for all drivers.
pub(super) fn values(flags: &EffectiveFlags) -> Result<(), EngineFailure> {
    ranges(flags)?;
    combinations(flags)
}

/// Refuses a setting that is given in two places, because vLLM would silently use one of them or
/// none.
pub(super) fn contradictions(launch: &Launch, args: &BTreeMap<String, ArgValue>) -> Result<(), EngineFailure> {
    if launch.command.iter().any(|word| word.starts_with("--config=")) {
        return bad("vLLM ignores --config=FILE in launch.command; write --config and the file as two words".to_owned());
    }
    let Some(before) = subcommand(&launch.command) else { return Ok(()) };
    let line = CommandLine::parse(&launch.command[before.len() + 1..]);
    let model = line.positional.as_ref().or_else(|| line.values.get("model")?.last());
    // Of two models the server module takes the last. `vllm serve` treats the first --model like
    // the positional model.
    let serves = before.last().is_some_and(|verb| verb == "serve" || verb == "sim");
    match (args.contains_key("model"), model) {
        (true, Some(model)) if serves => {
            bad(format!("args.model is set, and launch.command names {model} already; set the model in one of the two"))
        }
        _ => Ok(()),
    }
}

fn bad(cause: String) -> Result<(), EngineFailure> {
    Err(EngineFailure::new(FailureClass::BadArguments, cause))
}

fn ports(launch: &Launch, flags: &EffectiveFlags) -> Result<(), EngineFailure> {
    if let Some(name) = ["ssl-keyfile", "ssl-certfile", "uds"].into_iter().find(|name| flags.text(name).is_some()) {
        return bad(format!(
            "the gateway connects to 127.0.0.1:{} with plain HTTP; remove {name} (TLS is for the gateway's own listener)",
            launch.port
        ));
    }
    match flags.text("port") {
        Some(port) if launch.port == 0 => {
            bad(format!("--port {port} is set, and launch.port is 0, a free port; set the port in launch.port only"))
        }
        Some(port) if port != launch.port.to_string() => {
            bad(format!("--port {port} contradicts launch.port = {}; set the port in launch.port only", launch.port))
        }
        _ => Ok(()),
    }
}

fn ranges(flags: &EffectiveFlags) -> Result<(), EngineFailure> {
    let least_one =
        ["max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size", "pipeline-parallel-size", "max-loras"];
    for name in least_one {
        if let Some(value) = flags.int(name).filter(|value| *value < 1) {
            return bad(format!("{name} = {value} must be at least 1"));
        }
    }
    if let Some(length) = flags.int("max-model-len").filter(|length| *length < 1 && *length != -1) {
        return bad(format!("max-model-len = {length} must be at least 1, or auto"));
    }
    if let Some(share) = flags.float("gpu-memory-utilization").filter(|share| !(*share > 0.0 && *share <= 1.0)) {
        return bad(format!("gpu-memory-utilization = {share} must be above 0 and at most 1"));
    }
    Ok(())
}

/// Checks values that depend on each other in vLLM.
fn combinations(flags: &EffectiveFlags) -> Result<(), EngineFailure> {
    let tokens = flags.int("max-num-batched-tokens");
    if let (Some(tokens), Some(seqs)) = (tokens, flags.int("max-num-seqs"))
        && tokens < seqs
    {
        return bad(format!(
            "max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})"
        ));
    }
    let whole = flags.text("enable-chunked-prefill") == Some("false");
    if let (true, Some(tokens), Some(length)) = (whole, tokens, flags.int("max-model-len"))
        && tokens < length
    {
        return bad(format!(
            "without chunked prefill max-num-batched-tokens ({tokens}) must be at least max-model-len ({length})"
        ));
    }
    if flags.on("data-parallel-multi-port-external-lb") {
        return bad(
            "data-parallel-multi-port-external-lb serves each rank at a port of its own, and the gateway uses one port \
             of an engine; leave it out and set pool.backend.ranks to data-parallel-size, or start the server yourself \
             and list one backend with url for each port"
                .to_owned(),
        );
    }
    if let (Some(slots), Some(kept)) = (flags.int("max-loras"), flags.int("max-cpu-loras"))
        && kept < slots
    {
        return bad(format!("max-cpu-loras ({kept}) must be at least max-loras ({slots})"));
    }
    Ok(())
}

/// Flags whose product is the number of devices.
const SIZES: [&str; 4] =
    ["tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size", "data-parallel-size"];

/// Devices that the engine needs on this host; `None` if it may use other hosts.
fn devices_needed(flags: &EffectiveFlags) -> Option<i64> {
    let size = |name| flags.int(name).unwrap_or(1).max(1);
    let elsewhere = flags.text("distributed-executor-backend").is_some_and(|by| !matches!(by, "mp" | "uni" | "None"));
    let balanced_outside =
        ["data-parallel-external-lb", "data-parallel-hybrid-lb", "data-parallel-multi-port-external-lb"];
    let one_of_many = ["data-parallel-rank", "data-parallel-start-rank", "data-parallel-address"];
    if size("nnodes") > 1 || elsewhere || flags.text("data-parallel-backend") == Some("ray") {
        return None;
    }
    let engines = match flags.int("data-parallel-size-local") {
        Some(local) => local.max(1),
        None if balanced_outside.iter().any(|name| flags.on(name)) => 1,
        None if one_of_many.iter().any(|name| flags.text(name).is_some()) => 1,
        None => size("data-parallel-size"),
    };
    Some(SIZES[..3].iter().map(|name| size(name)).fold(engines, i64::saturating_mul))
}

fn devices(launch: &Launch, flags: &EffectiveFlags) -> Result<(), EngineFailure> {
    let given = launch.gpu.len();
    let wanted = devices_needed(flags);
    if given > 0 && wanted.is_some_and(|wanted| usize::try_from(wanted).is_ok_and(|wanted| wanted > given)) {
        let sizes = SIZES.map(|name| flags.int(name).filter(|size| *size > 1).map(|size| format!("{name} {size}")));
        let sizes = sizes.into_iter().flatten().collect::<Vec<_>>().join(" x ");
        return bad(format!("{sizes} needs {} devices, gpu lists {given}", wanted.unwrap_or_default()));
    }
    distinct_devices(launch)
}

/// Refuses a device that is listed twice.
pub(super) fn distinct_devices(launch: &Launch) -> Result<(), EngineFailure> {
    let mut seen: Vec<_> = launch.gpu.iter().collect();
    seen.sort_unstable();
    match seen.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => bad(format!("gpu lists device {} twice", twice[0])),
        None => Ok(()),
    }
}

/// A model path must exist. A name with at most one slash may be on a hub.
fn model(flags: &EffectiveFlags) -> Result<(), EngineFailure> {
    let Some(model) = &flags.model else { return Ok(()) };
    let is_path = model.starts_with(['/', '.']) || model.matches('/').count() > 1;
    let path = Path::new(model);
    if !is_path || model.contains("://") || path.is_file() {
        return Ok(());
    }
    if !path.is_dir() {
        return Err(EngineFailure::new(
            FailureClass::ModelNotFound,
            format!("the model folder {model} does not exist"),
        ));
    }
    let described = flags.text("hf-config-path").is_some() || flags.incomplete;
    let described = described || ["config.json", "params.json"].iter().any(|name| path.join(name).exists());
    if described {
        Ok(())
    } else {
        Err(EngineFailure::new(
            FailureClass::ModelNotFound,
            format!("the model folder {model} contains no config.json"),
        ))
    }
}

fn adapters(flags: &EffectiveFlags) -> Result<(), EngineFailure> {
    let modules = flags.list("lora-modules");
    if !modules.is_empty() && !flags.on("enable-lora") && !flags.incomplete {
        return bad("lora-modules needs enable-lora = true".to_owned());
    }
    let most = match flags.int("max-lora-rank") {
        None if flags.incomplete => i64::MAX,
        most => most.unwrap_or(DEFAULT_LORA_RANK),
    };
    for module in modules {
        let Some((name, path)) = named(module) else {
            return bad(format!("lora-modules: {module:?} is neither NAME=PATH nor JSON with name and path"));
        };
        let path = Path::new(&path);
        if path.is_absolute() && !path.exists() {
            return Err(EngineFailure::new(
                FailureClass::ModelNotFound,
                format!("adapter {name}: the folder {} does not exist", path.display()),
            ));
        }
        if let Some(rank) = adapter_rank(path).filter(|rank| i64::from(*rank) > most) {
            let cause = format!("adapter {name}: LoRA rank {rank} is greater than max_lora_rank {most}.");
            let fits = RANKS.iter().find(|allowed| **allowed >= i64::from(rank));
            let suggestion = fits.map(|value| FlagSuggestion { flag: "max-lora-rank".to_owned(), value: *value });
            let plain = Diagnosis::plain(FailureClass::LoraRank, Some(cause));
            return Err(EngineFailure::of(Diagnosis { suggestion, ..plain }, None, StartPhase::Launching));
        }
    }
    Ok(())
}

/// The name and path in an entry of `--lora-modules`.
fn named(module: &str) -> Option<(String, String)> {
    if module.trim_start().starts_with('{') {
        let json: serde_json::Value = serde_json::from_str(module).ok()?;
        let text = |key: &str| json.get(key)?.as_str().map(str::to_owned);
        return text("name").zip(text("path"));
    }
    module.split_once('=').map(|(name, path)| (name.to_owned(), path.to_owned()))
}

/// The rank in the `adapter_config.json` of a folder; `None` if it cannot be read.
pub fn adapter_rank(folder: &Path) -> Option<u32> {
    let file = folder.join("adapter_config.json");
    if file.metadata().ok()?.len() > ADAPTER_CONFIG_MAX {
        return None;
    }
    let config: serde_json::Value = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    config.get("r")?.as_u64()?.try_into().ok()
}
