//! Limits that a request can exceed, and the messages about them.
//!
//! Limits count sequences, tokens or requests. A refusal says which limit was exceeded, and what to
//! change or when to try again.

use std::fmt::Display;

/// The unit of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitUnit {
    /// Sequences that the engine runs: prompts times `n`.
    Sequences,
    /// Prompt and output tokens together.
    Tokens,
}

/// A limit that one request exceeds even if no other request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// The unit of the limit.
    pub unit: LimitUnit,
    /// The smallest amount that the request can take.
    pub wanted: u64,
    /// The largest allowed amount.
    pub limit: u64,
}

impl TooLarge {
    pub(super) fn message(self, holder: &str) -> String {
        let Self { unit, wanted, limit } = self;
        match unit {
            LimitUnit::Sequences => format!(
                "the request takes {wanted} sequences at once, but {holder} takes at most {limit}; lower 'n' \
                 or send fewer prompts in one request"
            ),
            LimitUnit::Tokens => format!(
                "the request takes at least {wanted} prompt and output tokens, but {holder} takes at most {limit}; send \
                 shorter or fewer prompts, or lower 'min_tokens' or 'n'"
            ),
        }
    }
}

/// A limit that the requests of an API key exceed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyLimit {
    /// Requests at once.
    InFlight(u64),
    /// Requests per minute.
    RequestRate(u64),
    /// Sequences at once.
    Sequences(u64),
    /// Tokens at once.
    Tokens(u64),
    /// Tokens per minute.
    TokenRate(u64),
    /// Tokens within the last 24 hours.
    DayTokens(u64),
}

impl KeyLimit {
    /// A message with the limit, the key, and the seconds until a retry.
    pub(super) fn message(self, key: impl Display, retry_after: u64) -> String {
        let (most, what) = match self {
            Self::InFlight(most) => (most, "requests at once"),
            Self::RequestRate(most) => (most, "requests per minute"),
            Self::Sequences(most) => (most, "sequences at once"),
            Self::Tokens(most) => (most, "prompt and output tokens at once"),
            Self::TokenRate(most) => (most, "prompt and output tokens per minute"),
            Self::DayTokens(most) => (most, "prompt and output tokens within 24 hours"),
        };
        format!("the API key '{key}' has reached its limit of {most} {what}; try again in {retry_after} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_key_the_limit_and_the_time() {
        assert_eq!(
            KeyLimit::RequestRate(2).message("team-a", 30),
            "the API key 'team-a' has reached its limit of 2 requests per minute; try again in 30 s"
        );
    }
}
