//! `lab.toml`: a scenario as a file.
//!
//! ```toml
//! config = "../one-pool.toml"                 # the gateway's configuration; or its text as `gateway`; or neither: one pool
//! seeds = 5                                   # runs of each variant
//! duration = "60s"                            # of traffic that does not say its own
//! measures = ["short.ttft.p99"]               # what is compared; see `measure`
//!
//! [[engine]]                                  # of the backends named here, or of all others
//! backend = ["gpu0", "gpu1"]
//! gpu = "h200"                                # a preset of the simulator or the path of one, and so is the model
//! model = "llama-3.1-8b"
//! args = { max-num-seqs = 256 }               # flags of vLLM; they replace those in the configuration
//! change = [{ at = "20s", slower = 3.0 }]     # or stop = true, start = true
//!
//! [[traffic]]
//! class = [{ name = "short", rate = 30, in = 200, out = 128 }, { name = "long", rate = 2, in = 16000, out = 64 }]
//!
//! [[variant]]                                 # compared with each other
//! name = "round robin"
//! set = ["pool.all.policy=round_robin"]       # as --set of `sluice serve`
//!
//! [[expect]]                                  # ranges that a test asserts
//! measure = "short.ttft.p99"
//! max = 100
//!
//! [plan]                                      # what `sluice lab plan` looks for
//! candidate = [{ name = "H200, fp8", gpu = "h200", args = { quantization = "fp8" } }]
//! ```
//!
//! Unknown keys are errors. Paths begin at the folder of the file. `scenario` turns a file into a [`Lab`](crate::Lab).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::error::LabError;
use sluice_bench::Length;
use sluice_core::base::Period;
use sluice_gateway::config::ArgValue;

/// A whole file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabFile {
    /// Its title in tables and pages.
    #[serde(default)]
    pub title: String,
    /// The file of the gateway's configuration.
    pub config: Option<PathBuf>,
    /// The text of the gateway's configuration.
    pub gateway: Option<String>,
    /// Changes to it, as `--set` makes them.
    #[serde(default)]
    pub set: Vec<String>,
    /// Number of runs of each variant.
    #[serde(default = "one")]
    pub seeds: u64,
    /// How long traffic lasts that does not say itself.
    pub duration: Option<Period>,
    /// What is compared.
    #[serde(default)]
    pub measures: Vec<String>,
    /// Engines.
    #[serde(default)]
    pub engine: Vec<EngineTable>,
    /// Kinds of traffic.
    pub traffic: Vec<TrafficTable>,
    /// Variants; none: only the file itself.
    #[serde(default)]
    pub variant: Vec<Variant>,
    /// Ranges that a test asserts.
    #[serde(default)]
    pub expect: Vec<Expectation>,
    /// What `plan` looks for.
    #[serde(default)]
    pub plan: PlanTable,
}

/// What a planner looks for: the fewest GPUs of each kind with which the objectives of all classes hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlanTable {
    /// Requests of each class that must meet all their objectives, per cent. Default 99.
    pub attainment: f64,
    /// Multiples of the traffic. Default 1 and 2.
    pub load: Vec<f64>,
    /// The most engines that are tried. Default 256.
    pub most: u32,
    /// What could be bought. Default: the engines as the file describes them.
    pub candidate: Vec<CandidateTable>,
}

impl Default for PlanTable {
    fn default() -> Self {
        Self { attainment: 99.0, load: vec![1.0, 2.0], most: 256, candidate: Vec::new() }
    }
}

/// A kind of engine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CandidateTable {
    /// Its name in tables.
    pub name: String,
    /// The GPU. Default: as the file says.
    pub gpu: Option<String>,
    /// Flags of vLLM, such as `quantization` and `tensor-parallel-size`.
    #[serde(default)]
    pub args: BTreeMap<String, ArgValue>,
}

fn one() -> u64 {
    1
}

/// Engines that are alike.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineTable {
    /// Their backends; none: all that no other table names.
    #[serde(default)]
    pub backend: Vec<String>,
    /// How many, where there is no configuration that names them. Default 1.
    pub count: Option<u32>,
    /// The GPU: a preset of the simulator, or the path of its file. Default `h200`.
    pub gpu: Option<String>,
    /// The model, likewise. Default `llama-3.1-8b`.
    pub model: Option<String>,
    /// Flags of vLLM.
    #[serde(default)]
    pub args: BTreeMap<String, ArgValue>,
    /// What happens to them during a run.
    #[serde(default)]
    pub change: Vec<ChangeTable>,
}

/// Something that happens to engines.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeTable {
    /// When, from the start of the run.
    pub at: Period,
    /// From then on everything takes so many times as long as usual.
    pub slower: Option<f64>,
    /// They stop.
    #[serde(default)]
    pub stop: bool,
    /// They start again.
    #[serde(default)]
    pub start: bool,
}

/// One kind of traffic.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrafficTable {
    /// The model that requests name. Default: the first of the configuration.
    pub model: Option<String>,
    /// `completions` (default) or `chat`.
    pub api: Option<String>,
    /// Kinds of requests.
    #[serde(default)]
    pub class: Vec<ClassTable>,
    /// Recorded requests instead of classes.
    pub trace: Option<TraceTable>,
    /// Requests (or conversations) per second, where the classes give none.
    pub rate: Option<f64>,
    /// Shape of the gaps: 1 is Poisson, less is burstier.
    pub burstiness: Option<f64>,
    /// So many at once.
    pub burst: Option<u32>,
    /// Pairs of a rate and seconds, in turn: `[[32, 20], [320, 2], [32, 20]]`.
    #[serde(default)]
    pub steps: Vec<(f64, f64)>,
    /// A fixed number in flight instead of a rate.
    pub concurrency: Option<u32>,
    /// How many requests (or conversations).
    pub requests: Option<u64>,
    /// How long they are sent.
    pub duration: Option<Period>,
    /// Conversations instead of single requests.
    pub conversation: Option<ConversationTable>,
    /// LoRA adapters.
    pub adapters: Option<AdaptersTable>,
    /// Share of clients that leave before the end.
    #[serde(default)]
    pub leave: f64,
}

/// One kind of request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassTable {
    /// Its name in reports.
    pub name: String,
    /// Requests per second. All classes of a traffic give a rate, or none does.
    pub rate: Option<f64>,
    /// Share of the requests, relative to the other classes. Default 1.
    pub weight: Option<f64>,
    /// Prompt length: `200`, `"100-300"` or `"lognormal:MEDIAN:SIGMA[:MAX]"`.
    #[serde(rename = "in")]
    pub prompt: LengthText,
    /// Output length.
    #[serde(rename = "out")]
    pub output: LengthText,
    /// Tokens before the prompt that requests share: a system prompt.
    pub prefix: Option<u32>,
    /// Share of the prompt that is a shared prefix, instead.
    pub prefix_share: Option<f64>,
    /// Number of different shared prefixes. Default 1.
    pub prefixes: Option<u32>,
    /// Objective: time to first token.
    pub ttft: Option<Period>,
    /// Objective: time per output token.
    pub tpot: Option<Period>,
    /// Objective: from the request to the last token.
    pub e2el: Option<Period>,
}

/// Conversations.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversationTable {
    /// Turns of each.
    pub turns: LengthText,
    /// Tokens that the user adds from the second turn on. Default: the class's prompt length.
    pub later: Option<LengthText>,
    /// Mean time between a response and the next turn. Default none.
    pub think: Option<Period>,
}

/// A mix of LoRA adapters. Without weights, each is as likely as any other.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptersTable {
    /// Their names.
    pub names: Vec<String>,
    /// The k-th in proportion to 1 / k^zipf.
    pub zipf: Option<f64>,
    /// A weight for each, and optionally one for the base model.
    #[serde(default)]
    pub weights: Vec<f64>,
}

/// Recorded requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceTable {
    /// `access_log` (of this gateway), `azure`, `burstgpt`, `mooncake`, `sharegpt` or `custom`.
    pub format: String,
    /// The file.
    pub path: PathBuf,
    /// Replays it so many times faster. Default 1.
    pub speed: Option<f64>,
    /// The most requests taken of it. Default all.
    pub limit: Option<usize>,
}

/// A change to the file that gives a variant.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// Its name in tables.
    pub name: String,
    /// Changes to the gateway's configuration.
    #[serde(default)]
    pub set: Vec<String>,
    /// Flags of all engines.
    #[serde(default)]
    pub args: BTreeMap<String, ArgValue>,
    /// Flags of the engines of single backends.
    #[serde(default)]
    pub engine: BTreeMap<String, BTreeMap<String, ArgValue>>,
    /// The GPU of all engines.
    pub gpu: Option<String>,
    /// Number of engines, where there is no configuration that names them.
    pub count: Option<u32>,
    /// Traffic is so many times as much.
    pub load: Option<f64>,
}

/// A range in which the mean over all seeds must lie.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// Of which variant. Default: the first.
    pub variant: Option<String>,
    /// What.
    pub measure: String,
    /// Relative to this variant: 0.8 is 20 % less than it has.
    pub than: Option<String>,
    /// Lower end.
    pub min: Option<f64>,
    /// Upper end.
    pub max: Option<f64>,
}

/// A length as a number or a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthText(pub Length);

impl<'de> Deserialize<'de> for LengthText {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u32),
            Text(String),
        }
        let text = match Written::deserialize(from)? {
            Written::Number(number) => number.to_string(),
            Written::Text(text) => text,
        };
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

/// The name of the only variant of a file that has none.
pub const AS_WRITTEN: &str = "as written";

impl LabFile {
    /// Reads the text of a file called `name`.
    ///
    /// # Errors
    /// What is wrong, with the line or the key.
    pub fn parse(text: &str, name: &str) -> Result<Self, LabError> {
        let wrong = |reason: String| LabError::File { path: name.to_owned(), reason };
        let table = toml::Deserializer::parse(text).map_err(|error| wrong(error.to_string().trim_end().to_owned()))?;
        serde_path_to_error::deserialize(table).map_err(|error| {
            let (path, inner) = (error.path().to_string(), error.into_inner());
            wrong(format!("{path}: {}", inner.message()))
        })
    }

    /// The variants to run: those of the file, or the file alone.
    pub fn variants(&self) -> Vec<Variant> {
        match self.variant.is_empty() {
            true => vec![Variant { name: AS_WRITTEN.to_owned(), ..Variant::default() }],
            false => self.variant.clone(),
        }
    }
}
