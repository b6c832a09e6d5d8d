//! The times of a sequence that has ended, as the engine measured them.
//!
//! Times are virtual. vLLM shows them with `--enable-per-request-metrics`.

use std::time::Duration;

/// The engine's times of a sequence that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// From the arrival at the engine until the first step.
    pub queue: Duration,
    /// From the first step until the first token.
    pub prefill: Duration,
    /// From the first token to the last one.
    pub decode: Duration,
    /// Generated tokens.
    pub tokens: u32,
}
