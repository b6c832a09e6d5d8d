//! The file format of scenarios.
//!
//! ```toml
//! config = "../one-pool.toml"       # the gateway's configuration, or inline as `gateway`;
//!                                   # without both: one pool
//! seeds = 5                         # runs of each variant
//! duration = "60s"                  # default for every [[traffic]]
//! measures = ["short.ttft.p99"]     # the numbers to compare; see `measure`
//!
//! [[engine]]
//! backend = ["gpu0", "gpu1"]        # default: all backends that no other [[engine]] names
//! gpu = "h200"                      # a preset of the simulator, or the path of a profile
//! model = "llama-3.1-8b"            # also a preset or a path
//! args = { max-num-seqs = 256 }     # flags of vLLM; they override flags in the configuration
//! change = [{ at = "20s", slower = 3.0 }]   # or stop, start, hang, resume = true, stall = "300ms"
//!
//! [[traffic]]
//! class = [
//!   { name = "short", rate = 30, in = 200, out = 128 },
//!   { name = "long", rate = 2, in = 16000, out = 64 },
//! ]
//!
//! [[variant]]                       # variants are compared with the first one
//! name = "round robin"
//! set = ["pool.all.policy=round_robin"]     # like --set of `sluice serve`
//!
//! [autoscale]                       # starts and stops engines; also in a variant. See `autoscale`
//! policy = "predicted"              # or fixed, queue, in_flight, busy
//! min = 1
//!
//! [[expect]]                        # a range that `sluice lab run` and tests check
//! measure = "short.ttft.p99"
//! max = 100
//!
//! [plan]                            # for `sluice lab plan`
//! candidate = [{ name = "H200, fp8", gpu = "h200", args = { quantization = "fp8" } }]
//! ```
//!
//! Unknown keys are errors. Paths are relative to the folder of the file. `scenario` turns a file
//! into a [`Lab`](crate::Lab).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::autoscale_rules::Autoscale;
use crate::error::LabError;
use sluice_bench::Length;
use sluice_config::ArgValue;
use sluice_core::base::Period;

/// A scenario file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabFile {
    /// Title of the table and of the HTML page.
    #[serde(default)]
    pub title: String,
    /// Path of the gateway's configuration.
    pub config: Option<PathBuf>,
    /// The gateway's configuration, inline.
    pub gateway: Option<String>,
    /// Changes to the configuration: `KEY=VALUE`, like `--set` of `sluice serve`.
    #[serde(default)]
    pub set: Vec<String>,
    /// Number of runs of each variant, at least 1.
    #[serde(default = "one")]
    pub seeds: u64,
    /// Duration of each traffic that does not set one.
    pub duration: Option<Period>,
    /// Time after which a client without a complete response gives up; the request has then failed.
    /// Default: it waits.
    pub client_timeout: Option<Period>,
    /// Names of the measures to compare.
    #[serde(default)]
    pub measures: Vec<String>,
    /// Engines.
    #[serde(default)]
    pub engine: Vec<EngineTable>,
    /// Kinds of traffic.
    pub traffic: Vec<TrafficTable>,
    /// Variants. Without any, only the file itself is run.
    #[serde(default)]
    pub variant: Vec<Variant>,
    /// Ranges in which results must lie.
    #[serde(default)]
    pub expect: Vec<Expectation>,
    /// Settings of `sluice lab plan`.
    #[serde(default)]
    pub plan: PlanTable,
    /// Starts and stops engines during a run. Default: all engines run all the time.
    pub autoscale: Option<Autoscale>,
}

/// Settings of the planner, which searches for the fewest GPUs of each candidate with which all
/// classes meet their objectives.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlanTable {
    /// Share of the requests of each class that must meet all their objectives, per cent. Default
    /// 99.
    pub attainment: f64,
    /// Factors by which the traffic is multiplied. Default 1 and 2.
    pub load: Vec<f64>,
    /// Maximum number of engines that are tried. Default 256.
    pub max_engines: u32,
    /// Kinds of engine to choose from. Default: the engines of the file.
    pub candidate: Vec<CandidateTable>,
}

impl Default for PlanTable {
    fn default() -> Self {
        Self { attainment: 99.0, load: vec![1.0, 2.0], max_engines: 256, candidate: Vec::new() }
    }
}

/// A kind of engine that the planner considers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CandidateTable {
    /// Name in tables.
    pub name: String,
    /// The GPU. Default: the GPU of the file's engines.
    pub gpu: Option<String>,
    /// Flags of vLLM, such as `quantization` and `tensor-parallel-size`.
    #[serde(default)]
    pub args: BTreeMap<String, ArgValue>,
}

fn one() -> u64 {
    1
}

/// Engines with the same settings.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineTable {
    /// Names of the backends. Default: all backends that no other table names. With a configuration
    /// of the gateway, at most one table may use the default.
    #[serde(default)]
    pub backend: Vec<String>,
    /// Number of engines. Only in a file without a configuration of the gateway. Default 1.
    pub count: Option<u32>,
    /// The GPU: a preset of the simulator, or the path of a profile. Default `h200`.
    pub gpu: Option<String>,
    /// The CPU of the machine: a preset of the simulator, or the path of a file of `sluice sim
    /// fit`. Default `busy`.
    pub host: Option<String>,
    /// The model: a preset or the path of a file. Default `llama-3.1-8b`.
    pub model: Option<String>,
    /// Flags of vLLM.
    #[serde(default)]
    pub args: BTreeMap<String, ArgValue>,
    /// Share of drafts that are accepted up to each position, with speculative decoding in `args`:
    /// `vllm:spec_decode_num_accepted_tokens_per_pos` over `vllm:spec_decode_num_drafts`. Default:
    /// 0.7 for each position after the one before it, a guess.
    #[serde(default)]
    pub acceptance: Vec<f64>,
    /// Changes during a run.
    #[serde(default)]
    pub change: Vec<ChangeTable>,
}

/// A change of engines during a run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeTable {
    /// Time of the change, from the start of the run.
    pub at: Period,
    /// From now on every operation takes this many times as long.
    pub slower: Option<f64>,
    /// The engines stop.
    #[serde(default)]
    pub stop: bool,
    /// The engines start again.
    #[serde(default)]
    pub start: bool,
    /// The engines hang: they accept requests and generate nothing.
    #[serde(default)]
    pub hang: bool,
    /// The engines continue after a hang.
    #[serde(default)]
    pub resume: bool,
    /// Everything that the engines do next is delayed by this time.
    pub stall: Option<Period>,
}

/// One kind of traffic.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrafficTable {
    /// The model that requests name. Default: the first model of the configuration.
    pub model: Option<String>,
    /// `completions` (default) or `chat`.
    pub api: Option<String>,
    /// Kinds of requests.
    #[serde(default)]
    pub class: Vec<ClassTable>,
    /// Recorded requests instead of classes.
    pub trace: Option<TraceTable>,
    /// Requests (or conversations) per second, unless the classes have rates.
    pub rate: Option<f64>,
    /// Shape of the gamma-distributed gaps between arrivals: 1 is Poisson, less is burstier.
    pub burstiness: Option<f64>,
    /// Requests arrive in bursts of this size.
    pub burst: Option<u32>,
    /// Rates that follow one another, as pairs of a rate and its duration in seconds: `[[32, 20],
    /// [320, 2], [32, 20]]`. The durations determine how long requests arrive.
    #[serde(default)]
    pub steps: Vec<(f64, f64)>,
    /// Closed loop: a fixed number of requests in flight instead of a rate.
    pub concurrency: Option<u32>,
    /// Number of requests (or conversations).
    pub requests: Option<u64>,
    /// Time during which requests arrive. A trace with times is cut at the end of this time.
    /// Default: the duration of the file; without one, the whole trace, or 60 s.
    pub duration: Option<Period>,
    /// Conversations instead of single requests.
    pub conversation: Option<ConversationTable>,
    /// LoRA adapters.
    pub adapters: Option<AdaptersTable>,
    /// The tenant that sends the requests: the value of the header `x-tenant`, for `queue.fair = {
    /// header = "x-tenant" }`.
    pub tenant: Option<String>,
    /// Share of clients that disconnect before the end of the response, 0 to 1.
    #[serde(default)]
    pub leave: f64,
}

/// One kind of request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassTable {
    /// Name in reports. Measures treat classes of the same name as one. The name `all` means all
    /// requests.
    pub name: String,
    /// Requests per second. Either all classes of a traffic have a rate, or none.
    pub rate: Option<f64>,
    /// Share of the requests, relative to the other classes. Default 1.
    pub weight: Option<f64>,
    /// Prompt length: `200`, `"100-300"` or `"lognormal:MEDIAN:SIGMA[:MAX]"`.
    #[serde(rename = "in")]
    pub prompt: LengthText,
    /// Output length.
    #[serde(rename = "out")]
    pub output: LengthText,
    /// Tokens of a shared prefix that is added before the prompt, such as a system prompt.
    pub prefix: Option<u32>,
    /// Share of the prompt that is a shared prefix, 0 to 1. An alternative to `prefix`.
    pub prefix_share: Option<f64>,
    /// Number of different shared prefixes. Default 1.
    pub prefixes: Option<u32>,
    /// Objective: time to first token.
    pub ttft: Option<Period>,
    /// Objective: time per output token.
    pub tpot: Option<Period>,
    /// Objective: time from the request to the last token.
    pub e2el: Option<Period>,
}

/// Conversations.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversationTable {
    /// Turns of a conversation.
    pub turns: LengthText,
    /// Tokens that the user adds from the second turn on. Default: the prompt length of the class.
    pub later: Option<LengthText>,
    /// Mean time between a response and the next turn. Default 0.
    pub think: Option<Period>,
}

/// A mix of LoRA adapters. Without `zipf` and weights, all are equally likely.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptersTable {
    /// Names of the adapters.
    pub names: Vec<String>,
    /// Exponent of Zipf's law: the k-th adapter is used in proportion to 1 / k^zipf.
    pub zipf: Option<f64>,
    /// A weight for each adapter, and optionally one more for the base model.
    #[serde(default)]
    pub weights: Vec<f64>,
}

/// Recorded requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceTable {
    /// `access_log` or `records` (of this gateway), `azure`, `burstgpt`, `mooncake`, `sharegpt` or
    /// `custom`.
    pub format: String,
    /// The file.
    pub path: PathBuf,
    /// Replays the trace this many times faster. Default 1.
    pub speed: Option<f64>,
    /// Maximum number of requests read from the trace. Default: all.
    pub limit: Option<usize>,
}

/// A variant: a name and changes to the file.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// Name in tables.
    pub name: String,
    /// Path of another configuration of the gateway, for the same engines.
    pub config: Option<PathBuf>,
    /// The text of another configuration of the gateway, instead of `config`.
    pub gateway: Option<String>,
    /// Changes to the gateway's configuration.
    #[serde(default)]
    pub set: Vec<String>,
    /// Flags of all engines.
    #[serde(default)]
    pub args: BTreeMap<String, ArgValue>,
    /// Flags of the engine of one backend, by the backend's name.
    #[serde(default)]
    pub engine: BTreeMap<String, BTreeMap<String, ArgValue>>,
    /// The GPU of all engines: a preset, or a path that is relative to the folder of the file.
    pub gpu: Option<String>,
    /// Number of engines of the only pool. Backends are removed, or copied in turn.
    pub count: Option<u32>,
    /// Factor by which rates and concurrency are multiplied.
    pub load: Option<f64>,
    /// Replaces the autoscaler of the file.
    pub autoscale: Option<Autoscale>,
}

/// A range in which the mean of a measure over all seeds must lie.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// Name of the variant. Default: the first.
    pub variant: Option<String>,
    /// The measure.
    pub measure: String,
    /// If set, the range applies to the ratio to this variant's value: 0.8 means 20 % less.
    pub relative_to: Option<String>,
    /// Lower bound.
    pub min: Option<f64>,
    /// Upper bound.
    pub max: Option<f64>,
}

/// A length, written as a number or as a text.
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

/// The name of the file itself if it has no variants.
pub const AS_WRITTEN: &str = "as written";

impl LabFile {
    /// Parses the text of a file called `name`.
    pub fn parse(text: &str, name: &str) -> Result<Self, LabError> {
        let invalid = |reason: String| LabError::File { path: name.to_owned(), reason };
        let table =
            toml::Deserializer::parse(text).map_err(|error| invalid(error.to_string().trim_end().to_owned()))?;
        Self::read(table, name)
    }

    /// As [`LabFile::parse`], for the tables that a file of another kind shares with this one.
    pub fn of_table(table: toml::Table, name: &str) -> Result<Self, LabError> {
        Self::read(table, name)
    }

    /// Reads a file and checks the rules that hold for every use of it.
    fn read<'de, D: serde::Deserializer<'de, Error = toml::de::Error>>(from: D, name: &str) -> Result<Self, LabError> {
        let invalid = |reason: String| LabError::File { path: name.to_owned(), reason };
        let file: Self = serde_path_to_error::deserialize(from).map_err(|error| {
            let (path, inner) = (error.path().to_string(), error.into_inner());
            invalid(format!("{path}: {}", inner.message()))
        })?;
        match file.seeds {
            0 => Err(invalid("seeds: 0 runs of each variant; give 1 or more".to_owned())),
            _ => Ok(file),
        }
    }

    /// The variants to run: the variants of the file, or the file itself.
    pub fn variants(&self) -> Vec<Variant> {
        match self.variant.is_empty() {
            true => vec![Variant { name: AS_WRITTEN.to_owned(), ..Variant::default() }],
            false => self.variant.clone(),
        }
    }
}
