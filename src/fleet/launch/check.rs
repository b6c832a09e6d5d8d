//! What vLLM would refuse minutes into a start, found before anything is stopped.
//!
//! Only what is certain is refused: values against each other where both are given (the defaults differ between versions and
//! devices), ranges that no version accepts, files that are not there. Everything else is the engine's to say.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::super::driver::{Failure, LORA_RANK};
use super::flags::before_flags;
use crate::config::{ArgValue, Launch};
use crate::vllm::args::ServeArgs;
use crate::vllm::failure::{Class, Diagnosis, Suggestion};
use crate::vllm::logs::StartPhase;

/// Ranks that vLLM's `--max-lora-rank` accepts, for a suggestion.
const RANKS: &[i64] = &[1, 8, 16, 32, 64, 128, 256, 320, 512];
/// Most that is read of an adapter's configuration.
const ADAPTER_CONFIG_MAX: u64 = 1 << 20;

/// All flags of a start as text: those in the command, then those of the settings, which win.
#[derive(Debug)]
pub(super) struct Flat {
    values: BTreeMap<String, Vec<String>>,
    model: Option<String>,
}

impl Flat {
    pub(super) fn new(command: &[String], args: &BTreeMap<String, ArgValue>) -> Self {
        let mut flat = Self { values: BTreeMap::new(), model: None };
        let before = before_flags(command).map(<[String]>::len);
        if let Some(before) = before {
            flat.take_words(&command[before + 1..]);
        }
        for (name, value) in args {
            let texts = match value {
                ArgValue::Flag(on) => {
                    flat.values.remove(&format!("no-{name}"));
                    vec![on.to_string()]
                }
                ArgValue::Int(number) => vec![number.to_string()],
                ArgValue::Float(number) => vec![number.to_string()],
                ArgValue::Text(text) => vec![text.clone()],
                ArgValue::List(texts) => texts.clone(),
            };
            flat.values.insert(name.clone(), texts);
        }
        flat.model = flat.text("model").map(str::to_owned).or(flat.model);
        flat
    }

    /// Words of a command line. Without a table of which flags take values, a word after a flag is its value; the model
    /// comes first, as in `vllm serve MODEL`.
    fn take_words(&mut self, words: &[String]) {
        let mut at = 0;
        if let Some(model) = words.first().filter(|word| !word.starts_with('-')) {
            self.model = Some(model.clone());
            at = 1;
        }
        while at < words.len() {
            let Some(name) = words[at].strip_prefix("--") else {
                at += 1;
                continue;
            };
            at += 1;
            let (name, attached) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (name, None),
            };
            let mut values: Vec<String> = attached.into_iter().collect();
            while values.is_empty() || name == "lora-modules" || name == "served-model-name" {
                let Some(value) = words.get(at).filter(|word| !word.starts_with("--")) else { break };
                values.push(value.clone());
                at += 1;
            }
            if values.is_empty() {
                values.push("true".to_owned());
            }
            self.values.insert(name.replace('_', "-"), values);
        }
    }

    /// Names of the flags that are there, without dashes.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name)?.last().map(String::as_str)
    }

    pub(super) fn on(&self, name: &str) -> bool {
        self.text(name) == Some("true")
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
pub(super) fn all(launch: &Launch, flat: &Flat) -> Result<(), Failure> {
    ports(launch, flat)?;
    ranges(flat)?;
    together(flat)?;
    devices(launch, flat)?;
    model(flat)?;
    adapters(flat)
}

fn bad(cause: String) -> Result<(), Failure> {
    Err(Failure::new(Class::BadArguments, cause))
}

fn ports(launch: &Launch, flat: &Flat) -> Result<(), Failure> {
    match flat.text("port") {
        Some(port) if port != launch.port.to_string() => {
            bad(format!("--port {port} contradicts launch.port = {}; write it in launch.port only", launch.port))
        }
        _ => Ok(()),
    }
}

fn ranges(flat: &Flat) -> Result<(), Failure> {
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
fn together(flat: &Flat) -> Result<(), Failure> {
    let tokens = flat.int("max-num-batched-tokens");
    if let (Some(tokens), Some(seqs)) = (tokens, flat.int("max-num-seqs"))
        && tokens < seqs
    {
        return bad(format!(
            "max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})"
        ));
    }
    let whole = flat.text("enable-chunked-prefill") == Some("false") || flat.on("no-enable-chunked-prefill");
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

fn devices(launch: &Launch, flat: &Flat) -> Result<(), Failure> {
    let size = |name| flat.int(name).unwrap_or(1).max(1);
    let wanted = size("tensor-parallel-size").saturating_mul(size("pipeline-parallel-size"));
    let given = launch.gpu.len();
    if given > 0 && usize::try_from(wanted).is_ok_and(|wanted| wanted > given) {
        return bad(format!("tensor-parallel-size x pipeline-parallel-size needs {wanted} devices, gpu lists {given}"));
    }
    let mut seen = launch.gpu.clone();
    seen.sort_unstable();
    match seen.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => bad(format!("gpu lists device {} twice", twice[0])),
        None => Ok(()),
    }
}

/// A model given as a path must be there. A name with at most one slash may be one of a hub.
fn model(flat: &Flat) -> Result<(), Failure> {
    let Some(model) = &flat.model else { return Ok(()) };
    let is_path = model.starts_with(['/', '.']) || model.matches('/').count() > 1;
    let path = Path::new(model);
    if !is_path || model.contains("://") || path.is_file() {
        return Ok(());
    }
    if !path.is_dir() {
        return Err(Failure::new(Class::ModelNotFound, format!("there is no model folder {model}")));
    }
    let described = ["config.json", "params.json"].iter().any(|name| path.join(name).exists());
    if described { Ok(()) } else { Err(Failure::new(Class::ModelNotFound, format!("{model} holds no config.json"))) }
}

fn adapters(flat: &Flat) -> Result<(), Failure> {
    let modules = flat.values.get("lora-modules").map(Vec::as_slice).unwrap_or_default();
    if !modules.is_empty() && !flat.on("enable-lora") {
        return bad("lora-modules needs enable-lora = true".to_owned());
    }
    // 16 is vLLM's own default.
    let most = flat.int("max-lora-rank").unwrap_or(LORA_RANK);
    for module in modules {
        let Some((name, path)) = named(module) else {
            return bad(format!("lora-modules: {module:?} is neither NAME=PATH nor JSON with name and path"));
        };
        let path = Path::new(&path);
        if path.is_absolute() && !path.exists() {
            return Err(Failure::new(
                Class::ModelNotFound,
                format!("adapter {name}: there is no folder {}", path.display()),
            ));
        }
        if let Some(rank) = adapter_rank(path).filter(|rank| i64::from(*rank) > most) {
            let cause = format!("adapter {name}: LoRA rank {rank} is greater than max_lora_rank {most}.");
            let fits = RANKS.iter().find(|allowed| **allowed >= i64::from(rank));
            let suggestion = fits.map(|value| Suggestion { flag: "max-lora-rank".to_owned(), value: *value });
            let plain = Diagnosis::plain(Class::LoraRank, Some(cause));
            return Err(Failure::of(Diagnosis { suggestion, ..plain }, None, StartPhase::Launching));
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
