//! The flag that a diagnosis asks to change, and the direction, for deployments that cannot be
//! simulated.
//!
//! Where a KV cache is often full, more sequences are never advised.

use super::flags::EngineFlag;
use crate::observe::diagnosis::{Experience, OFTEN, Reading, diagnose};
use crate::observe::engines::EngineFacts;

/// The flag, whether to raise it, and why. `facts`: by `pool/backend`.
pub fn advice(experience: &Experience, facts: &[(String, EngineFacts)]) -> Option<(EngineFlag, bool, String)> {
    // An occasional preemption costs little.
    let is_full = facts.iter().any(|(_, facts)| facts.kv_full >= OFTEN);
    let of = |reading: Reading| match reading {
        Reading::Memory => is_full.then_some((EngineFlag::MaxNumSeqs, false)),
        Reading::Sequences => Some((EngineFlag::MaxNumSeqs, true)),
        Reading::Interference => Some((EngineFlag::LongPrefillTokenThreshold, false)),
        Reading::Prefill => Some((EngineFlag::MaxNumBatchedTokens, true)),
        Reading::AdapterSlots | Reading::GatewayLimits | Reading::Idle | Reading::NoMetrics => None,
    };
    diagnose(experience, facts).into_iter().find_map(|found| {
        let (flag, up) = of(found.reading)?;
        Some((flag, up, format!("{}: {}", found.evidence, found.advice)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_sequences_help_while_the_memory_has_room() {
        let experience = Experience { misses: true, lost: [0.9, 0.1, 0.0], tpot_missed: None };
        let facts = EngineFacts { samples: 60, running_peak: 2.0, max_num_seqs: Some(2.0), ..EngineFacts::default() };
        let of = |facts| advice(&experience, &[("p/a".to_owned(), facts)]).map(|(flag, up, _)| (flag, up));
        assert_eq!(of(facts), Some((EngineFlag::MaxNumSeqs, true)));
        let full = EngineFacts { kv_full: 0.9, preemptions: 5.0, ..facts };
        assert_eq!(of(full), Some((EngineFlag::MaxNumSeqs, false)));
        assert_eq!(of(EngineFacts { kv_full: 0.03, ..full }), None, "now and then");
        assert_eq!(of(EngineFacts { max_num_seqs: Some(64.0), ..facts }), None, "a limit of the gateway");
    }
}
