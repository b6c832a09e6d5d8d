//! Bounds within which the usage that an engine reports is believed.
//!
//! Reported tokens charge limits, metrics and estimates, so a broken or hostile engine must not be
//! able to report arbitrary numbers. A number outside the bounds is dropped, and the gateway's own
//! count takes its place: one token for each event with tokens, or one for each [`BYTES_PER_TOKEN`]
//! bytes of a body's output. The bounds are wide enough for every engine that counts correctly:
//! - Fewest completion tokens: one for each [`LONGEST_TOKEN`] bytes of output, because vocabularies
//!   have tokens of 128 blanks, or one for each [`EVENTS_PER_TOKEN`] events with output if that is
//!   more.
//! - Most completion tokens: the output that the request permits, or one token for each byte or
//!   event of output if that is more. Bytes alone give no upper bound, because special tokens and
//!   hidden reasoning add no bytes.
//! - Prompt tokens: bounds that the caller derives from the bytes of the request.

use crate::openai::TokenUsage;

/// Bytes of the longest token in JSON: 128 characters, each with a backslash.
pub const LONGEST_TOKEN: u64 = 256;
/// Largest number of events with output into which one token may be cut.
pub const EVENTS_PER_TOKEN: u64 = 8;
/// Bytes of output per token if no better value is known, as for English text in today's
/// vocabularies.
pub const BYTES_PER_TOKEN: u64 = 4;

/// The bounds for one response. By default every number is within the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageBounds {
    /// Fewest prompt tokens.
    pub prompt_min: u64,
    /// Most prompt tokens.
    pub prompt_max: u64,
    /// Most completion tokens of all sequences together, unless the output has more bytes.
    pub completion_max: u64,
    /// Whether the engine generated all of the output. False with `echo`, when the response repeats
    /// the prompt.
    pub output_is_generated: bool,
}

/// Output that the gateway has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenOutput {
    /// Bytes of the output as they were written.
    pub bytes: u64,
    /// Events that carried output.
    pub events: u64,
}

impl Default for UsageBounds {
    fn default() -> Self {
        Self { prompt_min: 0, prompt_max: u64::MAX, completion_max: u64::MAX, output_is_generated: false }
    }
}

impl UsageBounds {
    /// Filters a report while the response goes on. A low completion count is not dropped, because
    /// it may still rise.
    pub fn so_far(&self, reported: TokenUsage, seen: SeenOutput) -> TokenUsage {
        let prompt = reported.prompt.filter(|tokens| (self.prompt_min..=self.prompt_max).contains(tokens));
        let most = self.completion_max.max(seen.bytes).max(seen.events);
        // The cached part of a prompt count is dropped if the prompt count is dropped.
        let cached = reported.cached.filter(|_| prompt.is_some() || reported.prompt.is_none());
        TokenUsage {
            prompt,
            completion: reported.completion.filter(|tokens| *tokens <= most),
            cached: cached.map(|tokens| tokens.min(prompt.unwrap_or(self.prompt_max))),
        }
    }

    /// Filters the last report, after the gateway has seen all output.
    pub fn at_end(&self, reported: TokenUsage, seen: SeenOutput) -> TokenUsage {
        let usage = self.so_far(reported, seen);
        let least = match self.output_is_generated {
            true => (seen.bytes / LONGEST_TOKEN).max(seen.events / EVENTS_PER_TOKEN),
            false => 0,
        };
        TokenUsage { completion: usage.completion.filter(|tokens| *tokens >= least), ..usage }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: UsageBounds =
        UsageBounds { prompt_min: 2, prompt_max: 1_000, completion_max: 100, output_is_generated: true };

    fn usage(prompt: u64, completion: u64, cached: u64) -> TokenUsage {
        TokenUsage { prompt: Some(prompt), completion: Some(completion), cached: Some(cached) }
    }

    #[test]
    fn numbers_within_the_bounds_are_unchanged_and_others_are_dropped() {
        let seen = SeenOutput { bytes: 40, events: 9 };
        for honest in [usage(5, 9, 0), usage(1_000, 100, 1_000), usage(2, 1, 1)] {
            assert_eq!(BOUNDS.at_end(honest, seen), honest);
        }
        assert_eq!(
            BOUNDS.at_end(usage(1 << 40, 9, 8), seen),
            TokenUsage { completion: Some(9), ..TokenUsage::default() }
        );
        assert_eq!(BOUNDS.at_end(usage(5, 1 << 40, 0), seen).completion, None);
        assert_eq!(BOUNDS.at_end(usage(1, 9, 0), seen).prompt, None);
        assert_eq!(BOUNDS.at_end(usage(5, 0, 0), seen).completion, None, "nine events are more than no token");
        assert_eq!(BOUNDS.so_far(usage(5, 0, 0), seen).completion, Some(0), "it may still come");
        assert_eq!(BOUNDS.at_end(usage(5, 9, 800), seen).cached, Some(5));
    }

    #[test]
    fn more_output_than_permitted_was_generated_all_the_same() {
        let seen = SeenOutput { bytes: 4_000, events: 900 };
        assert_eq!(BOUNDS.at_end(usage(5, 950, 0), seen).completion, Some(950));
        assert_eq!(BOUNDS.at_end(usage(5, 15, 0), seen).completion, None);
        let echo = UsageBounds { output_is_generated: false, ..BOUNDS };
        assert_eq!(echo.at_end(usage(5, 1, 0), seen).completion, Some(1), "the rest is the prompt");
        assert_eq!(UsageBounds::default().at_end(usage(1 << 60, 0, 1), seen), usage(1 << 60, 0, 1));
    }
}
