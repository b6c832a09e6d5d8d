//! Computes the tokens that a request has used of the key's limits, from the record.
//!
//! | the request | is charged with |
//! |---|---|
//! | was refused, shed, or left before an engine had it | nothing |
//! | was refused by the engine, or failed there before any output | nothing |
//! | has output, whole or cut | prompt and output, as counted |
//! | lost the client before the first token of a stream | the prompt |
//! | lost the client before a response that is not streamed | the estimate |
//! | is complete, without any count | the estimate |
//!
//! A count is the usage that the engine reports, within bounds (`request_bounds.rs`), or else one
//! token for each event that carried tokens. Cached prompt tokens count in full. Only the last
//! attempt counts, because earlier ones have shown no output, unless the last one continues their
//! stream.

use super::keys::UsedTokens;
use super::record::{Outcome, Record};
use sluice_core::meter::StreamStats;

/// The tokens that `record` shows as used of the key's limits, by the table above.
pub(super) fn used(record: &Record) -> UsedTokens {
    if record.backend.is_none() {
        return UsedTokens::NOTHING;
    }
    let prompt = || record.estimate.map_or(0, |estimate| estimate.tokens);
    let whole = record.outcome == Outcome::Completed;
    let left_body = record.outcome == Outcome::ClientGone && !record.stream;
    match record.stats.as_ref().filter(|stats| has_counts(stats)) {
        _ if matches!(record.outcome, Outcome::Refused | Outcome::Shed(_)) => UsedTokens::NOTHING,
        Some(stats) if !left_body || stats.usage.completion.is_some() => {
            let prompt = stats.usage.prompt.unwrap_or_else(prompt);
            UsedTokens::Counted { prompt, output: stats.generated(), whole }
        }
        _ if whole || left_body => UsedTokens::AsCharged,
        _ if record.outcome == Outcome::ClientGone => UsedTokens::Counted { prompt: prompt(), output: 0, whole: false },
        _ => UsedTokens::NOTHING,
    }
}

/// Tokens of the conversation that the response ends: prompt and output.
pub(super) fn of_conversation(record: &Record) -> u64 {
    let estimate = record.estimate.map_or(0, |estimate| estimate.tokens);
    let (prompt, output) = match &record.stats {
        Some(stats) => (stats.usage.prompt.unwrap_or(estimate), stats.generated()),
        None => (estimate, 0),
    };
    prompt.saturating_add(output)
}

/// Whether tokens were counted, by the engine or by the gateway.
fn has_counts(stats: &StreamStats) -> bool {
    stats.usage.prompt.is_some() || stats.usage.completion.is_some() || stats.token_events > 0
}
