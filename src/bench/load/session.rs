//! Settings of conversations: the number of turns, their lengths, and the time between them.
//!
//! Turn t of conversation s is request number s * [`MAX_TURNS`] + t. The user's message is a pure
//! function of the seed and that number. Later turns may have a separate prompt length, but have
//! the output length of the class.

use crate::error::BenchError;
use crate::load::body::PromptTokens;
use crate::load::length::Length;
use crate::load::workload::Workload;

/// The most turns of one conversation.
pub const MAX_TURNS: u32 = 1_000;

/// Settings of conversations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sessions {
    /// Turns of each conversation.
    pub turns: Length,
    /// Tokens that the user adds in a later turn; `None`: the prompt length of the class.
    pub later: Option<Length>,
    /// Mean time from a response to the next turn, seconds. The time is exponentially distributed.
    pub think: f64,
}

impl Sessions {
    /// Checks the settings.
    pub fn check(&self) -> Result<(), BenchError> {
        let bad = |what| Err(BenchError::BadSessions(what));
        let most = match self.turns {
            Length::Exactly(turns) | Length::Between { max: turns, .. } | Length::LogNormal { max: turns, .. } => turns,
        };
        if !self.turns.is_possible() || most > MAX_TURNS {
            return bad("from 1 to 1000 turns");
        }
        if self.later.is_some_and(|later| !later.is_possible()) {
            return bad("at least 1 token in each turn");
        }
        if self.think.is_finite() && self.think >= 0.0 { Ok(()) } else { bad("a think time of 0 or more") }
    }
}

impl Workload {
    /// The workload with text prompts, which conversations need.
    #[must_use]
    pub fn with_text_prompts(self) -> Self {
        match self.tokens {
            PromptTokens::Ids(_) => Self { tokens: PromptTokens::Words, ..self },
            PromptTokens::Words | PromptTokens::Exact(_) => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_sessions_are_refused() {
        let fine = Sessions { turns: Length::Exactly(3), later: None, think: 1.0 };
        assert_eq!(fine.check(), Ok(()));
        for bad in [
            Sessions { turns: Length::Exactly(1_001), ..fine },
            Sessions { later: Some(Length::Exactly(0)), ..fine },
            Sessions { think: f64::NAN, ..fine },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
