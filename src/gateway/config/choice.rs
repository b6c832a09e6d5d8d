//! Closed sets of words: which texts a key takes, in one table per type.
//!
//! Reading, the list in an error message, and writing a configuration back all use the same table, so
//! a policy cannot exist in one of them only. An unknown word is an error, never a default.

use super::{LogFormat, LogLevel, OnExit, OnStart, Order, Policy, UsageInjection};

/// A type whose values are words of the configuration.
pub trait Choice: Copy + PartialEq + 'static {
    /// Every value with its word, in the order in which they are listed to people.
    const WORDS: &'static [(&'static str, Self)];

    /// The word for this value.
    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, value)| *value == self).map_or("", |(word, _)| word)
    }

    /// The value that `word` stands for.
    fn from_word(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|(_, value)| *value)
    }
}

impl Choice for Policy {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("least_work", Self::LeastWork),
        ("two_choices", Self::TwoChoices),
        ("round_robin", Self::RoundRobin),
        ("prefix_affinity", Self::PrefixAffinity),
    ];
}

impl Choice for Order {
    const WORDS: &'static [(&'static str, Self)] = &[("fifo", Self::Fifo), ("shortest_first", Self::ShortestFirst)];
}

impl Choice for UsageInjection {
    const WORDS: &'static [(&'static str, Self)] =
        &[("final", Self::Final), ("continuous", Self::Continuous), ("off", Self::Off)];
}

impl Choice for OnStart {
    const WORDS: &'static [(&'static str, Self)] = &[("adopt", Self::Adopt), ("stop", Self::Stop)];
}

impl Choice for OnExit {
    const WORDS: &'static [(&'static str, Self)] = &[("stop", Self::Stop), ("keep", Self::Keep)];
}

impl Choice for LogLevel {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];
}

impl Choice for LogFormat {
    const WORDS: &'static [(&'static str, Self)] = &[("text", Self::Text), ("json", Self::Json)];
}
