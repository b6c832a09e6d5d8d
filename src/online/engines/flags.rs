//! vLLM flags that the tuner changes by restarting engines, and the values that it tries next
//! ([`EngineFlag::near`]).
//!
//! A change concerns one flag, on all engines of a pool.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use sluice_core::vllm::flags::value::FlagValue;

/// A flag, named without dashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineFlag {
    /// Sequences that run at once on an engine.
    MaxNumSeqs,
    /// Tokens in a step.
    MaxNumBatchedTokens,
    /// Most tokens of one prompt in a step; 0: no limit.
    LongPrefillTokenThreshold,
    /// Steps from one prefill to the next while a sequence decodes; 1: no limit. Without data
    /// parallelism, vLLM obeys it since 0.33.
    PrefillScheduleInterval,
    /// Most tokens that a step with a captured CUDA graph can have.
    MaxCudagraphCaptureSize,
    /// Share of the GPU's memory that vLLM uses.
    GpuMemoryUtilization,
}

/// Values of flags.
pub type Flags = BTreeMap<EngineFlag, f64>;

/// Values of `LongPrefillTokenThreshold` above 0.
const PIECES: [f64; 7] = [64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0];
const MEMORY_STEP: f64 = 0.05;

impl EngineFlag {
    /// All flags.
    pub const ALL: [Self; 6] = [
        Self::MaxNumSeqs,
        Self::MaxNumBatchedTokens,
        Self::LongPrefillTokenThreshold,
        Self::PrefillScheduleInterval,
        Self::MaxCudagraphCaptureSize,
        Self::GpuMemoryUtilization,
    ];

    /// The name without dashes.
    pub fn name(self) -> &'static str {
        match self {
            Self::MaxNumSeqs => "max-num-seqs",
            Self::MaxNumBatchedTokens => "max-num-batched-tokens",
            Self::LongPrefillTokenThreshold => "long-prefill-token-threshold",
            Self::PrefillScheduleInterval => "prefill-schedule-interval",
            Self::MaxCudagraphCaptureSize => "max-cudagraph-capture-size",
            Self::GpuMemoryUtilization => "gpu-memory-utilization",
        }
    }

    /// The flag of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|flag| flag.name() == name)
    }

    /// A value as vLLM reads it.
    pub fn written<S>(self, value: f64) -> FlagValue<S> {
        match self {
            Self::GpuMemoryUtilization => FlagValue::Float(value),
            _ => FlagValue::Int(value as i64),
        }
    }

    /// A value, for messages.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::GpuMemoryUtilization => format!("{value:.2}"),
            _ => format!("{value:.0}"),
        }
    }

    /// The values to try: one step up and down, or also two steps where a step is a factor of two.
    pub fn near(self, value: f64) -> Vec<f64> {
        let (values, least, most): (Vec<f64>, f64, f64) = match self {
            Self::MaxNumSeqs => (powers(value), 1.0, 4_096.0),
            Self::MaxNumBatchedTokens => (powers(value), 64.0, 65_536.0),
            Self::PrefillScheduleInterval => (powers(value), 1.0, 8.0),
            Self::MaxCudagraphCaptureSize => (powers(value), 8.0, 4_096.0),
            Self::GpuMemoryUtilization => {
                let step = |by: f64| ((value + by) * 100.0).round() / 100.0;
                (vec![step(-MEMORY_STEP), step(MEMORY_STEP)], 0.3, 0.95)
            }
            Self::LongPrefillTokenThreshold if value <= 0.0 => (PIECES[2..].to_vec(), 0.0, f64::MAX),
            Self::LongPrefillTokenThreshold => {
                let below = PIECES.iter().rev().copied().find(|piece| *piece < value);
                let above = PIECES.iter().copied().find(|piece| *piece > value);
                (below.into_iter().chain(above).chain([0.0]).collect(), 0.0, f64::MAX)
            }
        };
        let mut near: Vec<f64> =
            values.into_iter().filter(|near| (least..=most).contains(near) && *near != value).collect();
        near.dedup();
        near
    }

    /// [`near`](Self::near) where at most `used` sequences ran at once. Lower values of
    /// [`Self::MaxNumSeqs`] are below `used`, because others have no effect.
    pub fn near_used(self, value: f64, used: f64) -> Vec<f64> {
        let mut near = self.near(value);
        if self == Self::MaxNumSeqs && used > 1.0 && used < near.iter().copied().fold(value, f64::min) {
            near.retain(|near| *near > value);
            let most = (used.log2().ceil() - 1.0).exp2();
            near.extend([most / 2.0, most].into_iter().filter(|fewer| *fewer >= 1.0));
        }
        near
    }
}

fn powers(value: f64) -> Vec<f64> {
    [0.25, 0.5, 2.0, 4.0].into_iter().map(|factor| (value * factor).round()).collect()
}

/// The flags with one value changed.
pub fn with(flags: &Flags, flag: EngineFlag, value: f64) -> Flags {
    let mut changed = flags.clone();
    changed.insert(flag, value);
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_near_a_value_are_within_bounds_and_lead_back() {
        assert_eq!(EngineFlag::MaxNumSeqs.near(16.0), [4.0, 8.0, 32.0, 64.0]);
        assert_eq!(EngineFlag::MaxNumSeqs.near(2.0), [1.0, 4.0, 8.0]);
        assert_eq!(EngineFlag::MaxNumSeqs.near_used(1_024.0, 49.0), [2_048.0, 4_096.0, 16.0, 32.0]);
        assert_eq!(EngineFlag::MaxNumSeqs.near_used(1_024.0, 900.0), EngineFlag::MaxNumSeqs.near(1_024.0));
        assert_eq!(EngineFlag::MaxNumSeqs.near_used(16.0, 0.0), EngineFlag::MaxNumSeqs.near(16.0), "nothing is known");
        assert_eq!(
            EngineFlag::MaxNumBatchedTokens.near_used(1_024.0, 4.0),
            EngineFlag::MaxNumBatchedTokens.near(1_024.0)
        );
        assert_eq!(EngineFlag::LongPrefillTokenThreshold.near(0.0), [256.0, 512.0, 1_024.0, 2_048.0, 4_096.0]);
        assert_eq!(EngineFlag::LongPrefillTokenThreshold.near(300.0), [256.0, 512.0, 0.0]);
        assert_eq!(EngineFlag::PrefillScheduleInterval.near(1.0), [2.0, 4.0]);
        assert_eq!(EngineFlag::PrefillScheduleInterval.near(8.0), [2.0, 4.0]);
        assert_eq!(EngineFlag::GpuMemoryUtilization.near(0.92), [0.87]);
        for flag in EngineFlag::ALL {
            assert_eq!(EngineFlag::named(flag.name()), Some(flag));
            assert_eq!(serde_json::to_string(&flag).unwrap(), format!("\"{}\"", flag.name()));
        }
        for flag in [EngineFlag::MaxNumSeqs, EngineFlag::MaxNumBatchedTokens] {
            assert!(flag.near(512.0).iter().all(|near| flag.near(*near).contains(&512.0)));
        }
    }
}
