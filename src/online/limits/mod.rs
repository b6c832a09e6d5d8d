//! The limits that the controller moves, one set for each pool, and how they enter a configuration.
//!
//! The pools' ranges continue to cover every prompt length.

pub mod moves;
pub mod forecast;
pub mod controller;
mod choice;
mod view;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use sluice_config::{Config, LongPrefix, Pool};
use sluice_core::base::Tokens;

/// Lower and upper bound of each limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitRange {
    /// Sequences in flight on a backend.
    pub slots: (u32, u32),
    /// Prefill permits of a backend.
    pub permits: (u32, u32),
    /// The prompt length above which a permit is needed.
    pub threshold: (u64, u64),
    /// Prompt tokens in prefill on a backend.
    pub prefill_tokens: (u64, u64),
    /// The prompt length that separates two pools.
    pub boundary: (u64, u64),
}

impl Default for LimitRange {
    fn default() -> Self {
        Self {
            slots: (16, 4_096),
            permits: (1, 64),
            threshold: (128, 1 << 20),
            prefill_tokens: (1_024, 1 << 20),
            boundary: (64, 1 << 20),
        }
    }
}

/// A limit that can be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knob {
    /// `pool.slots`.
    Slots,
    /// `pool.long_prefix.slots`.
    Permits,
    /// `pool.long_prefix.threshold`.
    Threshold,
    /// `pool.prefill_tokens`.
    PrefillTokens,
    /// `pool.prompt_tokens`: the end of one pool's range and the start of the next.
    Boundary,
}

impl Knob {
    /// All knobs.
    pub const ALL: [Self; 5] = [Self::Slots, Self::Permits, Self::Threshold, Self::PrefillTokens, Self::Boundary];

    /// The key of the configuration, after `pool.NAME.`.
    pub fn key(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::Permits => "long_prefix.slots",
            Self::Threshold => "long_prefix.threshold",
            Self::PrefillTokens => "prefill_tokens",
            Self::Boundary => "prompt_tokens.max",
        }
    }
}

/// The limits of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolLimits {
    /// Sequences in flight on each backend.
    pub slots: u32,
    /// Prompt tokens in prefill on each backend; `None`: no limit.
    pub prefill_tokens: Option<u64>,
    /// Length above which prompts need a permit, and the permits of each backend; `None`: no
    /// permits.
    pub long: Option<(u64, u32)>,
    /// Prompt lengths of the pool: from, and to (not included).
    pub range: (u64, Option<u64>),
}

impl PoolLimits {
    /// Threshold and permits, if they may be moved. With 0 permits the operator keeps long prompts
    /// away.
    pub fn permits(&self) -> Option<(u64, u32)> {
        self.long.filter(|(_, permits)| *permits > 0)
    }

    /// Puts the limits into the configuration of a pool.
    pub fn put(&self, pool: &mut Pool) {
        pool.slots = self.slots;
        pool.prefill_tokens = self.prefill_tokens.map(Tokens);
        pool.long_prefix = self.long.map(|(threshold, slots)| LongPrefix { threshold: Tokens(threshold), slots });
        pool.prompt_tokens.min = Tokens(self.range.0);
        pool.prompt_tokens.max = self.range.1.map(Tokens);
    }

    /// Differences from `now`: `slots 64 (now 16), prefill_tokens none (now 8192)`.
    pub fn differences(&self, now: &Self) -> String {
        let differs = |knob: &Knob| self.show(*knob) != now.show(*knob);
        let show = |knob: Knob| format!("{} {} (now {})", knob.key(), self.show(knob), now.show(knob));
        Knob::ALL.into_iter().filter(differs).map(show).collect::<Vec<_>>().join(", ")
    }

    /// The value of a knob; `u64::MAX` if the pool has no such limit.
    pub(crate) fn value(&self, knob: Knob) -> u64 {
        match knob {
            Knob::Slots => self.slots.into(),
            Knob::Permits => self.long.map_or(u64::MAX, |(_, permits)| permits.into()),
            Knob::Threshold => self.long.map_or(u64::MAX, |(threshold, _)| threshold),
            Knob::PrefillTokens => self.prefill_tokens.unwrap_or(u64::MAX),
            Knob::Boundary => self.range.1.unwrap_or(u64::MAX),
        }
    }

    /// The value of a knob, for messages.
    pub fn show(&self, knob: Knob) -> String {
        let tokens = |tokens: Option<u64>| tokens.map_or_else(|| "none".to_owned(), |count| Tokens(count).to_string());
        match knob {
            Knob::Slots => self.slots.to_string(),
            Knob::Permits => self.long.map_or_else(|| "none".to_owned(), |(_, permits)| permits.to_string()),
            Knob::Threshold => tokens(self.long.map(|(threshold, _)| threshold)),
            Knob::PrefillTokens => tokens(self.prefill_tokens),
            Knob::Boundary => tokens(self.range.1),
        }
    }
}

/// Limits of several pools, in the order of the configuration or of the group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits(pub Vec<PoolLimits>);

impl Limits {
    /// The limits of a configuration.
    pub fn of(config: &Config) -> Self {
        let pool = |pool: &Pool| PoolLimits {
            slots: pool.slots,
            prefill_tokens: pool.prefill_tokens.map(|tokens| tokens.0),
            long: pool.long_prefix.map(|long| (long.threshold.0, long.slots)),
            range: (pool.prompt_tokens.min.0, pool.prompt_tokens.max.map(|max| max.0)),
        };
        Self(config.pools.iter().map(pool).collect())
    }

    /// Puts the limits into a configuration with the same pools.
    pub fn put(&self, config: &mut Config) {
        config.pools.iter_mut().zip(&self.0).for_each(|(pool, limits)| limits.put(pool));
    }

    /// Moves the boundary at the upper end of `pool`, for every pool that ends or begins there.
    /// `None`: a range would become empty.
    pub fn with_boundary(&self, pool: usize, to: u64) -> Option<Self> {
        let from = self.0[pool].range.1?;
        let mut moved = self.clone();
        for limits in &mut moved.0 {
            if limits.range.1 == Some(from) {
                limits.range.1 = Some(to);
            }
            if limits.range.0 == from {
                limits.range.0 = to;
            }
        }
        let holds = moved.0.iter().all(|limits| limits.range.1.is_none_or(|max| limits.range.0 < max));
        holds.then_some(moved)
    }
}
