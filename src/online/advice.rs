//! Which flag a diagnosis speaks for, and in which direction.
//!
//! It decides where nothing can be simulated, and it forbids more sequences where the memory is full. Engines that the gateway runs
//! get no more requests than `max-num-seqs`: then requests wait in the gateway's queue, and not on the engine.

use crate::diagnosis::{Experience, Reading, diagnose};
use crate::engine_look::EngineState;
use crate::engines::EngineFacts;
use crate::flags::EngineFlag;

/// An engine runs as many sequences as it may from this share on.
const FULL: f64 = 0.95;
/// Share of the lost time that is mostly in the queue.
const IN_QUEUE: f64 = 0.5;
/// Share of the looks at which the KV cache is full too often.
const KV_OFTEN: f64 = 0.3;

/// The flag, whether up, and why. `facts`: what the engines of the pools show, by `pool/backend`.
pub fn advice(
    experience: &Experience,
    facts: &[(String, EngineFacts)],
    engines: &[EngineState],
) -> Option<(EngineFlag, bool, String)> {
    let of = |reading: Reading| match reading {
        Reading::Memory => Some((EngineFlag::MaxNumSeqs, false)),
        Reading::Sequences => Some((EngineFlag::MaxNumSeqs, true)),
        Reading::Interference => Some((EngineFlag::LongPrefillTokenThreshold, false)),
        Reading::Prefill => Some((EngineFlag::MaxNumBatchedTokens, true)),
        Reading::AdapterSlots | Reading::GatewayLimits | Reading::Idle | Reading::NoMetrics => None,
    };
    let found = diagnose(experience, facts).into_iter().find_map(|found| {
        let (flag, up) = of(found.reading)?;
        Some((flag, up, format!("{}: {}", found.evidence, found.advice)))
    });
    let is_full = |(name, facts): &(String, EngineFacts)| {
        let own = engines.iter().find(|engine| format!("{}/{}", engine.pool, engine.backend) == *name);
        let most = own.and_then(|engine| engine.flags.as_ref()).and_then(|flags| flags.get(&EngineFlag::MaxNumSeqs));
        most.is_some_and(|most| facts.running_peak >= *most * FULL && facts.kv_full < KV_OFTEN)
    };
    let in_queue = experience.lost[0] >= IN_QUEUE;
    let full = (in_queue && !facts.is_empty() && facts.iter().all(is_full)).then(|| {
        let why = "requests wait in the queue while as many run as max-num-seqs allows, and the KV cache has room";
        (EngineFlag::MaxNumSeqs, true, why.to_owned())
    });
    found.or(full)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::Flags;

    #[test]
    fn requests_that_wait_in_the_queue_for_full_engines_speak_for_more_sequences() {
        let experience = Experience { misses: true, lost: [0.9, 0.1, 0.0] };
        let engine = |most: f64| EngineState {
            pool: "p".into(),
            backend: "a".into(),
            flags: Some(Flags::from([(EngineFlag::MaxNumSeqs, most)])),
            serves: true,
            waiting: 0,
        };
        let facts = EngineFacts { samples: 60, running: 2.0, running_peak: 2.0, ..EngineFacts::default() };
        let shown = [("p/a".to_owned(), facts)];
        let of = |most: f64, shown| advice(&experience, shown, &[engine(most)]).map(|(flag, up, _)| (flag, up));
        assert_eq!(of(2.0, &shown), Some((EngineFlag::MaxNumSeqs, true)));
        assert_eq!(of(64.0, &shown), None, "they are not full");
        let full = [("p/a".to_owned(), EngineFacts { kv_full: 0.9, preemptions: 5.0, ..facts })];
        assert_eq!(of(2.0, &full), Some((EngineFlag::MaxNumSeqs, false)), "the memory is");
    }
}
