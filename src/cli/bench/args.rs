//! The flags of `sluice bench`: as in `vllm bench serve` where one exists, with the same default.
//!
//! Intended differences: prompts for completions are token ids, more measures and percentiles are
//! shown, and several servers may be given. Flags about loading a tokenizer are accepted and
//! ignored. `plan` and `requests` check how flags fit together.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};

use super::by_class::ByClass;
use super::find_rate::args::FindRateArgs;
use super::tools::Tool;
use super::values::{ClassSpec, Goodput, RangeRatio, Rate, Steps, pair, share};
use sluice_bench::Length;

const GENERATED: &str = "Generated prompts";
const REPETITION: &str = "Generated prompts of prefix_repetition";
const FILES: &str = "Data sets and traces";
const CONVERSATIONS: &str = "Conversations";
const ADAPTERS: &str = "LoRA adapters";
const CHANGING: &str = "Rates that change";
const SWEEPS: &str = "Sweeps";
const SAVED: &str = "Saved results";

/// Put load on a server and measure latency and throughput as a client
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(super) tool: Option<Tool>,
    #[command(flatten)]
    pub(super) server: ServerArgs,
    #[command(flatten)]
    pub(super) dataset: DatasetArgs,
    #[command(flatten)]
    pub(super) load: LoadArgs,
    #[command(flatten)]
    pub(super) sampling: SamplingArgs,
    #[command(flatten)]
    pub(super) search: FindRateArgs,
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten)]
    pub(super) ignored: IgnoredArgs,
}

/// The API that requests use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    /// Completions
    Vllm,
    /// Completions
    Openai,
    /// Chat completions
    OpenaiChat,
}

impl Backend {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Openai => "openai",
            Self::OpenaiChat => "openai-chat",
        }
    }
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub(super) struct ServerArgs {
    /// The API: completions (vllm, openai) or chat
    #[arg(long, value_enum, default_value = "openai")]
    pub(super) backend: Backend,
    /// Address of the server, with or without /v1; several are used in turn [default:
    /// http://HOST:PORT]
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(super) base_url: Vec<String>,
    /// Host of the server, without --base-url
    #[arg(long, hide_short_help = true, default_value = "127.0.0.1")]
    pub(super) host: String,
    /// Port of the server, without --base-url: the default is the port of vLLM, not of sluice
    #[arg(long, hide_short_help = true, default_value_t = 8000)]
    pub(super) port: u16,
    /// Path of requests [default: the path of the API]
    #[arg(long, hide_short_help = true, value_name = "PATH")]
    pub(super) endpoint: Option<String>,
    /// The "model" to send [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub(super) model: Option<String>,
    /// The "model" to send, if it is not --model
    #[arg(long, hide_short_help = true, value_name = "NAME")]
    pub(super) served_model_name: Option<String>,
    /// Headers to send, KEY=VALUE; a bearer token is taken from OPENAI_API_KEY
    #[arg(long, hide_short_help = true, value_name = "KEY=VALUE", num_args = 1.., value_parser = pair)]
    pub(super) header: Vec<(String, String)>,
    /// Accept any certificate at https addresses
    #[arg(long, hide_short_help = true)]
    pub(super) insecure: bool,
    /// Servers whose /metrics are read during the run [default: --base-url]
    #[arg(long, hide_short_help = true, value_name = "URL", value_delimiter = ',')]
    pub(super) metrics_url: Vec<String>,
    /// Longest wait for the server to respond before the run
    #[arg(long, hide_short_help = true, value_name = "SECONDS", default_value_t = 0.0)]
    pub(super) ready_check_timeout_sec: f64,
    /// A request that takes longer counts as failed
    #[arg(long, hide_short_help = true, value_name = "SECONDS", default_value_t = 21_600.0)]
    pub(super) request_timeout: f64,
}

/// The source of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum DatasetName {
    /// Generated prompts of given lengths
    Random,
    /// Generated prompts, each beginning with one of a few prefixes
    #[value(name = "prefix_repetition")]
    PrefixRepetition,
    /// ShareGPT conversations: a JSON file
    Sharegpt,
    /// Your prompts: JSON lines with "prompt" and "output_tokens"
    Custom,
    /// BurstGPT's CSV, with times
    Burstgpt,
    /// Azure's LLM traces (CSV), with their times
    Azure,
    /// Mooncake's JSON lines, with times and shared prefixes
    Mooncake,
    /// JSON lines like Mooncake's, with configurable units and keys
    #[value(name = "timed_trace")]
    TimedTrace,
    /// The records or the access log of sluice, to replay the traffic ("records" is the same)
    #[value(name = "access_log", alias = "records")]
    AccessLog,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Requests")]
pub(super) struct DatasetArgs {
    /// Source of requests
    #[arg(long, value_enum, default_value = "random")]
    pub(super) dataset_name: DatasetName,
    /// File of the dataset
    #[arg(long, value_name = "FILE")]
    pub(super) dataset_path: Option<PathBuf>,
    /// Prompt length in tokens: 1024, 100-2000 or lognormal:MEDIAN:SIGMA[:MAX]
    #[arg(long, help_heading = GENERATED, value_name = "LENGTH", default_value = "1024", alias = "input-len")]
    pub(super) random_input_len: Length,
    /// Output length in tokens, with the syntax of --random-input-len
    #[arg(long, help_heading = GENERATED, value_name = "LENGTH", default_value = "128")]
    pub(super) random_output_len: Length,
    /// Output length for any dataset
    #[arg(long, hide_short_help = true, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) output_len: Option<u32>,
    /// Vary each length evenly by up to +-RATIO of it; or {"input": R, "output": R}
    #[arg(long, help_heading = GENERATED, hide_short_help = true, value_name = "RATIO", default_value = "0")]
    pub(super) random_range_ratio: RangeRatio,
    /// Tokens that all prompts share, added before the prompt length
    #[arg(long, help_heading = GENERATED, hide_short_help = true, value_name = "TOKENS", default_value_t = 0)]
    pub(super) random_prefix_len: u32,
    /// Share of prompt tokens that the prefix cache should find: that share of each prompt is a
    /// shared prefix
    #[arg(long, help_heading = GENERATED, hide_short_help = true, value_name = "SHARE", value_parser = share)]
    pub(super) prefix_hit_rate: Option<f64>,
    /// Number of different shared prefixes
    #[arg(long, help_heading = GENERATED, hide_short_help = true, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) num_prefixes: u32,
    /// Share of the prompts that have a shared prefix
    #[arg(long, help_heading = GENERATED, hide_short_help = true, value_name = "SHARE", value_parser = share)]
    pub(super) random_cache_hit_fraction: Option<f64>,
    /// Share of a prompt with a shared prefix that is the prefix
    #[arg(long, help_heading = GENERATED, hide_short_help = true, value_name = "SHARE", value_parser = share, requires = "random_cache_hit_fraction")]
    pub(super) random_cache_ratio: Option<f64>,
    /// A class of requests, for a mix: short:weight=15,in=200,out=128,ttft=300; repeat it
    #[arg(long, value_name = "NAME:KEY=VALUE,..")]
    pub(super) class: Vec<ClassSpec>,
    /// Shared tokens of each prompt of prefix_repetition
    #[arg(long, help_heading = REPETITION, hide_short_help = true, value_name = "TOKENS", default_value_t = 256)]
    pub(super) prefix_repetition_prefix_len: u32,
    /// Tokens of each prompt of prefix_repetition that are not shared
    #[arg(long, help_heading = REPETITION, hide_short_help = true, value_name = "TOKENS", default_value_t = 256)]
    pub(super) prefix_repetition_suffix_len: u32,
    /// Number of prefixes of prefix_repetition
    #[arg(long, help_heading = REPETITION, hide_short_help = true, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) prefix_repetition_num_prefixes: u32,
    /// Output tokens of prefix_repetition
    #[arg(long, help_heading = REPETITION, hide_short_help = true, value_name = "TOKENS", default_value_t = 128)]
    pub(super) prefix_repetition_output_len: u32,
    /// Output tokens of sharegpt, instead of the length of each recorded response
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) sharegpt_output_len: Option<u32>,
    /// Output tokens of custom; -1 takes "output_tokens" of each line
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "TOKENS", default_value_t = 256, allow_negative_numbers = true, value_parser = super::values::custom_length)]
    pub(super) custom_output_len: i64,
    /// Keep the order of the file for sharegpt and custom
    #[arg(long, help_heading = FILES, hide_short_help = true)]
    pub(super) disable_shuffle: bool,
    /// Tokens in each block of a timed trace
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) timed_trace_chunk_hash_size: u32,
    /// Seconds in one time unit of a timed trace (0.001 for milliseconds)
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "SECONDS", default_value_t = 1.0)]
    pub(super) timed_trace_sec_multiplier: f64,
    /// Key of a timed trace's arrival time
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "KEY", default_value = "timestamp")]
    pub(super) timed_trace_label_timestamp: String,
    /// Key of a timed trace's prompt length
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "KEY", default_value = "input_length")]
    pub(super) timed_trace_label_input_length: String,
    /// Key of a timed trace's output length
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "KEY", default_value = "output_length")]
    pub(super) timed_trace_label_output_length: String,
    /// Key of a timed trace's block names
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "KEY", default_value = "hash_ids")]
    pub(super) timed_trace_label_hash_ids: String,
    /// The model's tokenizer.json, or the folder of it: makes text prompts exactly as long as asked
    /// for, and counts responses without usage
    #[arg(long, hide_short_help = true, value_name = "PATH")]
    pub(super) tokenizer: Option<PathBuf>,
    /// Prompts of token ids (the default for completions)
    #[arg(long, help_heading = GENERATED, hide_short_help = true, conflicts_with = "prompt_text")]
    pub(super) prompt_token_ids: bool,
    /// Prompts of text (chat always): about one word for each token; exact with --tokenizer
    #[arg(long, help_heading = GENERATED, hide_short_help = true)]
    pub(super) prompt_text: bool,
    /// Token ids that prompts are made of, FIRST-LAST
    #[arg(long, help_heading = GENERATED, hide_short_help = true, value_name = "RANGE", default_value = "1000-7999")]
    pub(super) vocabulary: Length,
    /// Send conversations instead of single requests; --num-prompts is their number
    #[arg(long, help_heading = CONVERSATIONS)]
    pub(super) multi_turn: bool,
    /// Turns of a conversation: 3 or 2-8
    #[arg(long, help_heading = CONVERSATIONS, hide_short_help = true, value_name = "LENGTH", default_value = "3")]
    pub(super) multi_turn_num_turns: Length,
    /// Mean time between a response and the next turn
    #[arg(long, help_heading = CONVERSATIONS, hide_short_help = true, value_name = "MS", default_value_t = 0.0)]
    pub(super) multi_turn_delay_ms: f64,
    /// Tokens added by each later turn [default: the prompt length]
    #[arg(long, help_heading = CONVERSATIONS, hide_short_help = true, value_name = "LENGTH")]
    pub(super) per_turn_input_len: Option<Length>,
    /// LoRA adapters of the requests
    #[arg(long, help_heading = ADAPTERS, value_name = "NAME", num_args = 1..)]
    pub(super) lora_modules: Vec<String>,
    /// How a request's adapter is chosen
    #[arg(long, help_heading = ADAPTERS, hide_short_help = true, value_enum, default_value = "random")]
    pub(super) lora_assignment: LoraAssignment,
    /// Exponent S of the assignment zipf
    #[arg(long, help_heading = ADAPTERS, hide_short_help = true, value_name = "S", default_value_t = 1.0)]
    pub(super) lora_zipf: f64,
    /// Weights of the adapters; one more weight gives the base model a share
    #[arg(long, help_heading = ADAPTERS, hide_short_help = true, value_name = "W", value_delimiter = ',')]
    pub(super) lora_weights: Vec<f64>,
    /// Send the field "user" with one of this many names (user-0, user-1, ..); a conversation keeps
    /// one name
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub(super) users: u32,
    /// Share of clients that leave before the end of their response
    #[arg(long, hide_short_help = true, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(super) leave_share: f64,
}

/// How an adapter is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum LoraAssignment {
    /// All equally likely (or by --lora-weights)
    Random,
    /// One after the other
    RoundRobin,
    /// The k-th in proportion to 1/k^S
    Zipf,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Load")]
pub(super) struct LoadArgs {
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) num_prompts: u64,
    /// Send for this long, instead of a number of requests
    #[arg(long, value_name = "SECONDS", conflicts_with = "num_prompts")]
    pub(super) duration: Option<f64>,
    /// Requests per second; inf sends all at once, or as a closed loop with --max-concurrency
    #[arg(long, value_name = "RATE", default_value = "inf")]
    pub(super) request_rate: Rate,
    /// Shape of the gaps between requests: 1 is Poisson, less is burstier, inf is evenly spaced
    #[arg(long, help_heading = CHANGING, hide_short_help = true, value_name = "SHAPE", default_value = "1")]
    pub(super) burstiness: Rate,
    /// Most requests (or conversations) in flight
    #[arg(long, value_name = "N", alias = "multi-turn-concurrency", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_concurrency: Option<u32>,
    /// Send this many requests at the same time, at --request-rate on average
    #[arg(long, help_heading = CHANGING, hide_short_help = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) burst_size: Option<u32>,
    /// Several rates in turn, each RATExSECONDS: 5x30,20x10,5x30
    #[arg(long, help_heading = CHANGING, hide_short_help = true, value_name = "STEPS", conflicts_with_all = ["burst_size", "duration"])]
    pub(super) rate_steps: Option<Steps>,
    /// Shape of a rate that grows from the first request to the last
    #[arg(long, help_heading = CHANGING, hide_short_help = true, value_enum, requires_all = ["ramp_up_start_rps", "ramp_up_end_rps"])]
    pub(super) ramp_up_strategy: Option<RampStrategy>,
    /// Requests per second at the start of the growing rate
    #[arg(long, help_heading = CHANGING, hide_short_help = true, value_name = "RATE")]
    pub(super) ramp_up_start_rps: Option<f64>,
    /// Requests per second at the end of the growing rate
    #[arg(long, help_heading = CHANGING, hide_short_help = true, value_name = "RATE")]
    pub(super) ramp_up_end_rps: Option<f64>,
    /// Send at the times of the trace (the default for traces)
    #[arg(long, help_heading = FILES, hide_short_help = true, overrides_with = "no_self_timed")]
    pub(super) self_timed: bool,
    /// Ignore the times of a trace and use --request-rate
    #[arg(long, help_heading = FILES, hide_short_help = true)]
    pub(super) no_self_timed: bool,
    /// Replay a trace this many times faster
    #[arg(long, help_heading = FILES, hide_short_help = true, value_name = "X", default_value_t = 1.0)]
    pub(super) trace_speed: f64,
    /// Warm-up requests before the clock starts, up to --max-concurrency at once
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 0)]
    pub(super) num_warmups: u32,
    /// Seed of all randomness
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// One run for each of these values of --max-concurrency
    #[arg(long, help_heading = SWEEPS, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) sweep_max_concurrency: Vec<u32>,
    /// One run for each of these values of --request-rate
    #[arg(long, help_heading = SWEEPS, value_name = "RATE,..", value_delimiter = ',', conflicts_with = "sweep_max_concurrency")]
    pub(super) sweep_request_rate: Vec<Rate>,
    /// In a sweep of concurrency: requests of a run, as a multiple of the run's concurrency
    #[arg(long, help_heading = SWEEPS, hide_short_help = true, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) sweep_num_prompts_factor: Option<u64>,
    /// Empty the server's prefix cache before each run (vLLM in dev mode)
    #[arg(long, hide_short_help = true)]
    pub(super) reset_prefix_cache: bool,
    /// Trace each run with the server's profiler (vLLM with --profiler-config); traced requests
    /// take longer
    #[arg(long, hide_short_help = true, conflicts_with = "find_rate")]
    pub(super) profile: bool,
}

/// How a rate grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum RampStrategy {
    /// By equal steps
    Linear,
    /// By equal factors
    Exponential,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(super) struct SamplingArgs {
    /// Generate to the full length (always on for generated prompts and traces)
    #[arg(long, hide_short_help = true)]
    pub(super) ignore_eos: bool,
    /// Randomness of the choice of tokens; 0: the likeliest token
    #[arg(long, hide_short_help = true, value_name = "T")]
    pub(super) temperature: Option<f64>,
    /// Choose among the likeliest tokens that have this share of the probability together
    #[arg(long, hide_short_help = true, value_name = "P")]
    pub(super) top_p: Option<f64>,
    /// Choose among this many of the likeliest tokens
    #[arg(long, hide_short_help = true, value_name = "K")]
    pub(super) top_k: Option<i64>,
    /// Choose among tokens with at least this share of the likeliest token's probability
    #[arg(long, hide_short_help = true, value_name = "P")]
    pub(super) min_p: Option<f64>,
    /// Penalty for a token, for each time that it was generated
    #[arg(long, hide_short_help = true, value_name = "X")]
    pub(super) frequency_penalty: Option<f64>,
    /// Penalty for a token that was generated at least once
    #[arg(long, hide_short_help = true, value_name = "X")]
    pub(super) presence_penalty: Option<f64>,
    /// Factor against tokens of the prompt and generated tokens
    #[arg(long, hide_short_help = true, value_name = "X")]
    pub(super) repetition_penalty: Option<f64>,
    /// Number of log probabilities per token
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(super) logprobs: Option<u32>,
    /// More fields of the body, as a JSON object
    #[arg(long, hide_short_help = true, value_name = "JSON")]
    pub(super) extra_body: Option<String>,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArgs {
    /// Measures to show
    #[arg(long, hide_short_help = true, value_name = "NAME,..", value_delimiter = ',', default_value = "ttft,tpot,itl,e2el",
          value_parser = ["ttft", "tpot", "itl", "e2el", "client_queue_time"])]
    pub(super) percentile_metrics: Vec<String>,
    /// Percentiles to show
    #[arg(long, hide_short_help = true, value_name = "P,..", value_delimiter = ',', default_value = "50,90,99", value_parser = super::values::percentile)]
    pub(super) metric_percentiles: Vec<f64>,
    /// Objectives in ms: ttft:300 tpot:50 e2el:2000
    #[arg(long, value_name = "KEY:MS", num_args = 1..)]
    pub(super) goodput: Vec<Goodput>,
    /// A class of the gateway by which results are shown, or the gateway's configuration:
    /// short:max=5k, long:min=5k or sluice.toml; repeat it [default: the classes of the gateway at
    /// --metrics-url, otherwise --class, otherwise short and long at 5k]
    #[arg(long, hide_short_help = true, value_name = "NAME:KEY=VALUE,..")]
    pub(super) by_class: Vec<ByClass>,
    /// Print JSON instead of the table
    #[arg(long)]
    pub(super) json: bool,
    /// Save the result as JSON, with the keys of vllm bench serve
    #[arg(long, help_heading = SAVED)]
    pub(super) save_result: bool,
    /// Include the arrays of single requests, and the generated texts
    #[arg(long, help_heading = SAVED, hide_short_help = true)]
    pub(super) save_detailed: bool,
    /// Add the result to the end of the file
    #[arg(long, help_heading = SAVED, hide_short_help = true)]
    pub(super) append_result: bool,
    /// Folder for the result
    #[arg(long, help_heading = SAVED, hide_short_help = true, value_name = "FOLDER")]
    pub(super) result_dir: Option<PathBuf>,
    /// File name of the result [default: from label, load, model and time]
    #[arg(long, help_heading = SAVED, hide_short_help = true, value_name = "FILE")]
    pub(super) result_filename: Option<PathBuf>,
    /// Write the results as an HTML page with plots
    #[arg(long, help_heading = SAVED, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Write one line of CSV for each request
    #[arg(long, help_heading = SAVED, hide_short_help = true, value_name = "FILE")]
    pub(super) csv: Option<PathBuf>,
    /// Your name for the run, saved with the result
    #[arg(long, help_heading = SAVED)]
    pub(super) label: Option<String>,
    /// Additional keys in the result
    #[arg(long, help_heading = SAVED, hide_short_help = true, value_name = "KEY=VALUE", num_args = 1.., value_parser = pair)]
    pub(super) metadata: Vec<(String, String)>,
    /// Show no progress line
    #[arg(long, hide_short_help = true)]
    pub(super) disable_tqdm: bool,
    /// Show the requests without sending them
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// Flags of `vllm bench serve` about tokenizers. `--skip-tokenizer-init` sets `tokenizer_id` to
/// null; the others have no effect.
#[derive(Clone, Debug, Args)]
pub(super) struct IgnoredArgs {
    #[arg(long, hide = true, action = ArgAction::SetTrue)]
    trust_remote_code: bool,
    #[arg(long, hide = true, action = ArgAction::SetTrue)]
    pub(super) skip_tokenizer_init: bool,
    #[arg(long, hide = true)]
    tokenizer_mode: Option<String>,
    #[arg(long, hide = true, action = ArgAction::SetTrue)]
    skip_chat_template: bool,
}
