//! What vLLM would refuse minutes into a start, found before anything is stopped.
//!
//! Only what is certain is refused: values against each other where both are given (the defaults differ between versions and
//! devices), ranges that no version accepts, files that are not there. Everything else is the engine's to say.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::flags::before_flags;
use super::words::{self, Values, Words};
use crate::driver::{AdapterRank, EngineFailure, LORA_RANK};
use sluice_core::vllm::args::ServeArgs;
use sluice_core::vllm::failure::{Diagnosis, FailureClass, FlagSuggestion};
use sluice_core::vllm::logs::StartPhase;
use sluice_gateway::config::{ArgValue, Launch};

/// Ranks that vLLM's `--max-lora-rank` accepts, for a suggestion.
const RANKS: &[i64] = &[1, 8, 16, 32, 64, 128, 256, 320, 512];
/// Most that is read of an adapter's configuration.
const ADAPTER_CONFIG_MAX: u64 = 1 << 20;

/// All flags of a start as text: those of a file of settings, then those in the command, then those of the settings; the
/// later win.
#[derive(Debug)]
pub(super) struct Flat {
    values: Values,
    /// The long names in the command as they were written, without dashes.
    written: Vec<String>,
    model: Option<String>,
    /// Whether more may be set than is seen: in a file that cannot be read from here, or by a script.
    unseen: bool,
}

impl Flat {
    pub(super) fn new(command: &[String], args: &BTreeMap<String, ArgValue>) -> Self {
        let before = before_flags(command).map(<[String]>::len);
        let words = before.map(|before| Words::read(&command[before + 1..])).unwrap_or_default();
        let mut settings = Values::new();
        for (name, value) in args {
            let (name, on) = words::setting(name);
            let texts = match value {
                ArgValue::Flag(said) => vec![(*said == on).to_string()],
                ArgValue::Int(number) => vec![number.to_string()],
                ArgValue::Float(number) => vec![number.to_string()],
                ArgValue::Text(text) => vec![text.clone()],
                ArgValue::List(texts) => texts.clone(),
            };
            settings.insert(name, texts);
        }
        let named = settings.get("config").or_else(|| words.values.get("config")).and_then(|path| path.last());
        let file = named.map(|path| words::file(path));
        // A script may set anything.
        let unseen = matches!(file, Some(None)) || before.is_none();
        let mut values = file.flatten().unwrap_or_default();
        // A model that is named in the words beats that of the file.
        let of = |values: &Values| values.get("model").and_then(|names| names.last()).cloned();
        let model = of(&settings).or_else(|| of(&words.values)).or(words.positional).or_else(|| of(&values));
        values.extend(words.values);
        values.extend(settings);
        Self { values, written: words.written, model, unseen }
    }

    /// Names of the flags in the command, without dashes.
    pub(super) fn written(&self) -> impl Iterator<Item = &str> {
        self.written.iter().map(String::as_str)
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name)?.last().map(String::as_str)
    }

    pub(super) fn on(&self, name: &str) -> bool {
        self.text(name) == Some("true")
    }

    /// How many processes of vLLM answer HTTP: as set, else one for each engine that this one balances between.
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

    /// Whether adapters can be loaded while it serves, which vLLM refuses to more than one API server.
    pub(super) fn loads_adapters(&self) -> bool {
        self.on("enable-lora") && self.api_servers() <= 1
    }

    /// The largest rank of an adapter that can be loaded while it serves.
    pub(super) fn adapter_rank(&self) -> AdapterRank {
        let servers = self.api_servers();
        match (self.on("enable-lora"), self.int("max-lora-rank")) {
            (false, _) if self.unseen => AdapterRank::Unknown,
            (false, _) => AdapterRank::None("enable-lora is not set; set args.enable-lora = true".to_owned()),
            (true, _) if servers > 1 => AdapterRank::None(format!(
                "vLLM loads adapters while it serves with one API server only, and would start {servers}; \
                 set args.api-server-count = 1"
            )),
            (true, Some(rank)) => AdapterRank::UpTo(rank),
            (true, None) if self.unseen => AdapterRank::Unknown,
            (true, None) => AdapterRank::UpTo(LORA_RANK),
        }
    }

    /// A whole number, with a unit where vLLM takes one; `auto` is -1. Unreadable text is none: its type is checked elsewhere.
    pub(super) fn int(&self, name: &str) -> Option<i64> {
        let text = self.text(name)?;
        ServeArgs::parse(&["m", &format!("--{name}={text}")]).ok()?.int(name)
    }

    fn float(&self, name: &str) -> Option<f64> {
        self.text(name)?.parse().ok()
    }
}

/// All checks.
pub(super) fn all(launch: &Launch, flat: &Flat) -> Result<(), EngineFailure> {
    ports(launch, flat)?;
    values(flat)?;
    devices(launch, flat)?;
    model(flat)?;
    adapters(flat)
}

/// Checks of the values alone, whoever starts the engine.
pub(super) fn values(flat: &Flat) -> Result<(), EngineFailure> {
    ranges(flat)?;
    together(flat)
}

/// Refuses what is written in two places of which vLLM would silently take one, or none.
pub(super) fn written(launch: &Launch, args: &BTreeMap<String, ArgValue>) -> Result<(), EngineFailure> {
    if launch.command.iter().any(|word| word.starts_with("--config=")) {
        return bad(
            "vLLM does not see --config=FILE in launch.command; write --config and the file as two words".to_owned()
        );
    }
    let Some(before) = before_flags(&launch.command) else { return Ok(()) };
    let own = Words::read(&launch.command[before.len() + 1..]);
    let model = own.positional.as_ref().or_else(|| own.values.get("model")?.last());
    // The server's own module takes the last of two; `vllm serve` makes the first --model the positional one.
    let serves = before.last().is_some_and(|verb| verb == "serve" || verb == "sim");
    match (args.contains_key("model"), model) {
        (true, Some(model)) if serves => {
            bad(format!("model is set, and launch.command names {model} already; name the model in one of the two"))
        }
        _ => Ok(()),
    }
}

fn bad(cause: String) -> Result<(), EngineFailure> {
    Err(EngineFailure::new(FailureClass::BadArguments, cause))
}

fn ports(launch: &Launch, flat: &Flat) -> Result<(), EngineFailure> {
    if let Some(name) = ["ssl-keyfile", "ssl-certfile", "uds"].into_iter().find(|name| flat.text(name).is_some()) {
        return bad(format!(
            "the gateway speaks plain HTTP to 127.0.0.1:{}; remove {name} (TLS belongs between clients and the gateway)",
            launch.port
        ));
    }
    match flat.text("port") {
        Some(port) if port != launch.port.to_string() => {
            bad(format!("--port {port} contradicts launch.port = {}; write it in launch.port only", launch.port))
        }
        _ => Ok(()),
    }
}

fn ranges(flat: &Flat) -> Result<(), EngineFailure> {
    let least_one =
        ["max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size", "pipeline-parallel-size", "max-loras"];
    for name in least_one {
        if let Some(value) = flat.int(name).filter(|value| *value < 1) {
            return bad(format!("{name} = {value} must be at least 1"));
        }
    }
    if let Some(length) = flat.int("max-model-len").filter(|length| *length < 1 && *length != -1) {
        return bad(format!("max-model-len = {length} must be at least 1, or auto"));
    }
    if let Some(share) = flat.float("gpu-memory-utilization").filter(|share| !(*share > 0.0 && *share <= 1.0)) {
        return bad(format!("gpu-memory-utilization = {share} must be above 0 and at most 1"));
    }
    Ok(())
}

/// Values that vLLM checks against each other.
fn together(flat: &Flat) -> Result<(), EngineFailure> {
    let tokens = flat.int("max-num-batched-tokens");
    if let (Some(tokens), Some(seqs)) = (tokens, flat.int("max-num-seqs"))
        && tokens < seqs
    {
        return bad(format!(
            "max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})"
        ));
    }
    let whole = flat.text("enable-chunked-prefill") == Some("false");
    if let (true, Some(tokens), Some(length)) = (whole, tokens, flat.int("max-model-len"))
        && tokens < length
    {
        return bad(format!(
            "without chunked prefill max-num-batched-tokens ({tokens}) must be at least max-model-len ({length})"
        ));
    }
    if let (Some(slots), Some(kept)) = (flat.int("max-loras"), flat.int("max-cpu-loras"))
        && kept < slots
    {
        return bad(format!("max-cpu-loras ({kept}) must be at least max-loras ({slots})"));
    }
    Ok(())
}

/// Flags that multiply to the number of devices.
const SIZES: [&str; 4] =
    ["tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size", "data-parallel-size"];

/// Devices that an engine needs on this host; `None` where others may lend some.
fn wanted_here(flat: &Flat) -> Option<i64> {
    let size = |name| flat.int(name).unwrap_or(1).max(1);
    let elsewhere = flat.text("distributed-executor-backend").is_some_and(|by| !matches!(by, "mp" | "uni" | "None"));
    let balanced_outside =
        ["data-parallel-external-lb", "data-parallel-hybrid-lb", "data-parallel-multi-port-external-lb"];
    let one_of_many = ["data-parallel-rank", "data-parallel-start-rank", "data-parallel-address"];
    if size("nnodes") > 1 || elsewhere || flat.text("data-parallel-backend") == Some("ray") {
        return None;
    }
    let engines = match flat.int("data-parallel-size-local") {
        Some(local) => local.max(1),
        None if balanced_outside.iter().any(|name| flat.on(name)) => 1,
        None if one_of_many.iter().any(|name| flat.text(name).is_some()) => 1,
        None => size("data-parallel-size"),
    };
    Some(SIZES[..3].iter().map(|name| size(name)).fold(engines, i64::saturating_mul))
}

fn devices(launch: &Launch, flat: &Flat) -> Result<(), EngineFailure> {
    let given = launch.gpu.len();
    let wanted = wanted_here(flat);
    if given > 0 && wanted.is_some_and(|wanted| usize::try_from(wanted).is_ok_and(|wanted| wanted > given)) {
        let sizes = SIZES.map(|name| flat.int(name).filter(|size| *size > 1).map(|size| format!("{name} {size}")));
        let sizes = sizes.into_iter().flatten().collect::<Vec<_>>().join(" x ");
        return bad(format!("{sizes} needs {} devices, gpu lists {given}", wanted.unwrap_or_default()));
    }
    let mut seen = launch.gpu.clone();
    seen.sort_unstable();
    match seen.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => bad(format!("gpu lists device {} twice", twice[0])),
        None => Ok(()),
    }
}

/// A model given as a path must be there. A name with at most one slash may be one of a hub.
fn model(flat: &Flat) -> Result<(), EngineFailure> {
    let Some(model) = &flat.model else { return Ok(()) };
    let is_path = model.starts_with(['/', '.']) || model.matches('/').count() > 1;
    let path = Path::new(model);
    if !is_path || model.contains("://") || path.is_file() {
        return Ok(());
    }
    if !path.is_dir() {
        return Err(EngineFailure::new(FailureClass::ModelNotFound, format!("there is no model folder {model}")));
    }
    let described = flat.text("hf-config-path").is_some() || flat.unseen;
    let described = described || ["config.json", "params.json"].iter().any(|name| path.join(name).exists());
    if described {
        Ok(())
    } else {
        Err(EngineFailure::new(FailureClass::ModelNotFound, format!("{model} holds no config.json")))
    }
}

fn adapters(flat: &Flat) -> Result<(), EngineFailure> {
    let modules = flat.values.get("lora-modules").map(Vec::as_slice).unwrap_or_default();
    if !modules.is_empty() && !flat.on("enable-lora") && !flat.unseen {
        return bad("lora-modules needs enable-lora = true".to_owned());
    }
    let most = match flat.int("max-lora-rank") {
        None if flat.unseen => i64::MAX,
        most => most.unwrap_or(LORA_RANK),
    };
    for module in modules {
        let Some((name, path)) = named(module) else {
            return bad(format!("lora-modules: {module:?} is neither NAME=PATH nor JSON with name and path"));
        };
        let path = Path::new(&path);
        if path.is_absolute() && !path.exists() {
            return Err(EngineFailure::new(
                FailureClass::ModelNotFound,
                format!("adapter {name}: there is no folder {}", path.display()),
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

/// Name and path of an entry of `--lora-modules`.
fn named(module: &str) -> Option<(String, String)> {
    if module.trim_start().starts_with('{') {
        let json: serde_json::Value = serde_json::from_str(module).ok()?;
        let text = |key: &str| json.get(key)?.as_str().map(str::to_owned);
        return text("name").zip(text("path"));
    }
    module.split_once('=').map(|(name, path)| (name.to_owned(), path.to_owned()))
}

/// The rank of the adapter in a folder, from its `adapter_config.json`; `None` when there is none to read.
pub fn adapter_rank(folder: &Path) -> Option<u32> {
    let file = folder.join("adapter_config.json");
    if file.metadata().ok()?.len() > ADAPTER_CONFIG_MAX {
        return None;
    }
    let config: serde_json::Value = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    config.get("r")?.as_u64()?.try_into().ok()
}
