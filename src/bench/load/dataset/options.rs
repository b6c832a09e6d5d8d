//! How a dataset is to be read: its format, and the options of the user.
//!
//! The defaults of a timed trace are those of `vllm bench serve`. Bounds: nothing here reads a file.

use super::counter::TokenCounter;

/// Which kind of file.
#[derive(Clone, Debug, PartialEq)]
pub enum DatasetFormat {
    /// Conversations.
    ShareGpt,
    /// Prompts of one's own.
    Custom,
    /// BurstGPT.
    BurstGpt,
    /// Azure LLM inference traces of 2023 and 2024.
    Azure,
    /// JSON lines with moments, lengths and names of blocks.
    Timed(TraceKeys),
    /// The gateway's access log.
    AccessLog,
}

/// How a file is to be read.
#[derive(Debug)]
pub struct ReadOptions<'a> {
    /// Counts tokens of texts.
    pub counter: &'a TokenCounter,
    /// This output length for all, whatever the file says.
    pub output: Option<u32>,
    /// At most so many requests (0: all).
    pub limit: usize,
    /// Mix the order of conversations and prompts by this seed. Traces keep theirs.
    pub shuffle: Option<u64>,
    /// What the run sends as `"model"`; other names of an access log become adapters.
    pub model: &'a str,
}

/// How the lines of a timed trace are to be understood.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceKeys {
    /// Key of the moment.
    pub timestamp: String,
    /// Key of the prompt's length.
    pub input: String,
    /// Key of the answer's length.
    pub output: String,
    /// Key of the list of block names; a line may lack it.
    pub hashes: String,
    /// Tokens in a block.
    pub block: u32,
    /// Units of the moment in a second: 1000 for milliseconds.
    pub per_second: f64,
}

impl TraceKeys {
    /// As Mooncake has it: milliseconds, blocks of 512.
    pub fn mooncake() -> Self {
        Self { block: 512, per_second: 1_000.0, ..Self::default() }
    }
}

impl Default for TraceKeys {
    /// As `timed_trace` of `vllm bench serve` has it: seconds, blocks of 16.
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
