//! How to read a dataset: the format and the user's options.
//!
//! Defaults of a timed trace follow `vllm bench serve`.

use super::counter::TokenCounter;

/// The format of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum DatasetFormat {
    /// Conversations.
    ShareGpt,
    /// Custom prompts.
    Custom,
    /// BurstGPT.
    BurstGpt,
    /// Azure LLM inference traces of 2023 and 2024.
    Azure,
    /// JSON lines with times, lengths and names of blocks.
    Timed(TraceKeys),
    /// The gateway's access log.
    AccessLog,
}

/// How to read a file.
#[derive(Debug)]
pub struct ReadOptions<'a> {
    /// The counter of tokens.
    pub counter: &'a TokenCounter,
    /// The output length of all requests, instead of the lengths in the file.
    pub output: Option<u32>,
    /// The most requests that are read; 0 for all.
    pub limit: usize,
    /// Seed for shuffling the requests. Requests of a file with times are not shuffled.
    pub shuffle: Option<u64>,
    /// The run's `"model"`.
    pub model: &'a str,
}

/// The keys and units of a timed trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceKeys {
    /// Key of the arrival time.
    pub timestamp: String,
    /// Key of the prompt's length.
    pub input: String,
    /// Key of the output length.
    pub output: String,
    /// Key of the list of block names; a line may lack it.
    pub hashes: String,
    /// Tokens in a block.
    pub block: u32,
    /// Time units in a second: 1000 for milliseconds.
    pub per_second: f64,
}

impl TraceKeys {
    /// Mooncake: milliseconds, blocks of 512.
    pub fn mooncake() -> Self {
        Self { block: 512, per_second: 1_000.0, ..Self::default() }
    }
}

impl Default for TraceKeys {
    /// The keys of `timed_trace` of `vllm bench serve`: seconds, blocks of 16.
    fn default() -> Self {
        Self {
            timestamp: "timestamp".into(),
            input: "input_length".into(),
            output: "output_length".into(),
            hashes: "hash_ids".into(),
            block: 16,
            per_second: 1.0,
        }
    }
}
