//! Input of the engine: limits, named as vLLM's flags, and the sequences to generate.
//!
//! The limits default to vLLM's for GPUs of 70 GiB and more, except `max_num_seqs` (256, the
//! default on smaller GPUs) and `num_blocks` (an H200 with an 8B model). A simulated server takes
//! both from its profile.

use std::time::Duration;

use super::content::Content;
use super::id::SequenceId;
use super::speculation::Speculation;

/// Order of admission: `--scheduling-policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// In order of arrival. The last running sequence is preempted.
    #[default]
    Fcfs,
    /// Lower `priority` first, then earlier arrival, then lower id. The running sequence with the
    /// highest priority value is preempted; of several, the one that arrived last.
    Priority,
}

/// Limits of the engine, named as vLLM's flags.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Maximum sequences in the running list.
    pub max_num_seqs: u32,
    /// Admission stops at this many running sequences, if it is lower than `max_num_seqs`.
    pub max_num_active_seqs: Option<u32>,
    /// Token budget of a step.
    pub max_num_batched_tokens: u32,
    /// Maximum tokens of one request in a step while there are other requests; 0 means no limit.
    pub long_prefill_token_threshold: u32,
    /// Raises the threshold to the budget divided by the number of running and waiting requests.
    pub long_prefill_token_threshold_adaptive: bool,
    /// While a sequence decodes, the next prefill comes this many steps after the last step that
    /// carried prefill, or at once if the last admission left requests waiting for room. 1 turns
    /// this off. Before 0.33, the flag had an effect only with data parallelism of
    /// mixture-of-experts models.
    pub prefill_schedule_interval: u32,
    /// Whether a prompt may be split over steps.
    pub chunked_prefill: bool,
    /// Whether the whole prompt, not only the first chunk, must fit into the free blocks before
    /// admission.
    pub scheduler_reserve_full_isl: bool,
    /// Whether blocks are kept and found by their content.
    pub prefix_caching: bool,
    /// KV blocks, the null block included.
    pub num_blocks: u32,
    /// Share of all blocks that admission keeps free while a sequence runs, rounded down to whole
    /// blocks.
    pub watermark: f64,
    /// Order of admission.
    pub policy: Policy,
    /// Maximum distinct adapters in the running list. 0 if LoRA is off. Then no request may name an
    /// adapter.
    pub max_loras: u32,
    /// Adapters in host memory; at least `max_loras`.
    pub max_cpu_loras: u32,
    /// Whether each step is planned one step ahead.
    pub async_scheduling: bool,
    /// Speculative decoding.
    pub speculation: Option<Speculation>,
    /// Record the changes of the prefix cache.
    pub kv_events: bool,
    /// Seed of the step jitter.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_active_seqs: None,
            max_num_batched_tokens: 8192,
            long_prefill_token_threshold: 0,
            long_prefill_token_threshold_adaptive: false,
            prefill_schedule_interval: 1,
            chunked_prefill: true,
            scheduler_reserve_full_isl: true,
            prefix_caching: true,
            num_blocks: 57_301,
            watermark: 0.0,
            policy: Policy::Fcfs,
            max_loras: 0,
            max_cpu_loras: 0,
            async_scheduling: true,
            speculation: None,
            kv_events: false,
            seed: 0,
        }
    }
}

/// The parts of the engine that are paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pause {
    /// No part: the engine runs.
    #[default]
    No,
    /// Admission: running sequences continue, no other sequence starts.
    Admission,
    /// Admission and running sequences.
    All,
}

/// One sequence to generate. A request with `n` choices is `n` sequences.
#[derive(Clone, Debug)]
pub struct Request {
    /// Id of the sequence.
    pub id: SequenceId,
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u32,
    /// Tokens to generate, at least 1.
    pub output_tokens: u32,
    /// The LoRA adapter, if any.
    pub adapter: Option<u16>,
    /// `priority` of the request; lower goes first. Only used with [`Policy::Priority`].
    pub priority: i64,
    /// Time of arrival on the caller's clock. Decides between equal priorities.
    pub arrived: Duration,
    /// Whether the sequence ends with a stop token and not at the token limit. Asynchronous
    /// scheduling cannot foresee a stop token, so the next step computes one more token, which is
    /// discarded.
    pub stops: bool,
    /// Content of the blocks, for the prefix cache.
    pub content: Content,
    /// Anything else that the blocks depend on (`cache_salt`, images). Sequences with different
    /// salts share no block.
    pub salt: u64,
    /// Whether the prompt came as text, which the API server must tokenize.
    pub text: bool,
    /// Index of this choice among the `n` choices of the prompt. The API server reads a prompt
    /// once.
    pub choice: u32,
    /// Whether the sequence ignores cached blocks (as with `prompt_logprobs`). Other sequences may
    /// still share its blocks.
    pub skip_cached: bool,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            id: 0,
            prompt_tokens: 1,
            output_tokens: 1,
            adapter: None,
            priority: 0,
            arrived: Duration::ZERO,
            stops: false,
            content: Content::Own,
            salt: 0,
            text: false,
            choice: 0,
            skip_cached: false,
        }
    }
}

impl Request {
    /// A sequence that shares no content with others, with defaults for the rest.
    pub fn new(id: SequenceId, prompt_tokens: u32, output_tokens: u32) -> Self {
        Self { id, prompt_tokens, output_tokens, ..Self::default() }
    }
}

/// Why a request cannot enter the engine.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("the sequence needs {needed} KV blocks and the engine has {usable}; lower max_tokens or --max-model-len")]
    NeverFits { needed: u32, usable: u32 },
    #[error("the prompt has {prompt} tokens and a step takes {budget} without chunked prefill; raise the budget")]
    PromptOverBudget { prompt: u32, budget: u32 },
}
