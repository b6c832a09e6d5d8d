//! `pool.tokens`: a number of tokens, `"auto"`, or `"unlimited"`.
//!
//! With `"auto"`, the gateway learns a limit for each backend from the preemptions of the engine;
//! without preemptions there is no limit. A number is a fixed limit, and the gateway learns none.

use super::file::{Entry, Value};
use super::problem::{Situation, Suggestion};
use super::report::{Names, Report};
use super::setting::Scalar;
use sluice_core::base::Tokens;

const WORDS: [&str; 2] = ["auto", "unlimited"];

/// The limit of outstanding tokens of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenLimit {
    /// Learned from preemptions.
    #[default]
    Auto,
    /// No limit.
    Unlimited,
    /// This many tokens.
    Fixed(Tokens),
}

impl TokenLimit {
    /// The fixed limit.
    pub fn fixed(self) -> Option<Tokens> {
        match self {
            Self::Fixed(tokens) => Some(tokens),
            Self::Auto | Self::Unlimited => None,
        }
    }
}

impl Scalar for TokenLimit {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        match &written.value {
            Value::Text(text) if text == "auto" => Ok(Self::Auto),
            Value::Text(text) if text == "unlimited" => Ok(Self::Unlimited),
            Value::Text(text) if text.starts_with(|first: char| first.is_ascii_alphabetic()) => {
                Err(Situation::UnknownChoice { found: text.clone(), suggestion: Suggestion::for_name(text, WORDS) })
            }
            _ => Tokens::parse(written, report).map(Self::Fixed),
        }
    }

    fn text(&self, names: &Names) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::Unlimited => "unlimited".to_owned(),
            Self::Fixed(tokens) => tokens.text(names),
        }
    }

    fn toml(&self, names: &Names) -> String {
        match self {
            Self::Fixed(tokens) => tokens.toml(names),
            word => super::setting::quote(&word.text(names)),
        }
    }

    /// A word counts as 1, which is within every bound.
    fn magnitude(&self) -> Option<f64> {
        Some(self.fixed().map_or(1.0, |tokens| tokens.0 as f64))
    }
}
