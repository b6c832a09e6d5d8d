//! Why requests miss their objectives, in words, with the evidence and the vLLM flag to change.
//!
//! | observation | reading | direction |
//! |---|---|---|
//! | sequences wait for an adapter slot | adapter slots | `max-loras` up |
//! | preemptions, or sequences wait with a full KV cache | memory | fewer sequences, more memory |
//! | sequences wait at peak running, KV cache has room | sequences | `max-num-seqs` up |
//! | lost in the queue, `max-num-seqs` run, KV cache has room | sequences | `max-num-seqs` up |
//! | lost between tokens | interference of prefills | smaller prefills or steps (*) |
//! | lost on the engine before the first token | prefill | larger steps (*), more engines |
//! | lost in the gateway's queue | the gateway's limits | left to the tuner |
//! | objectives are met, hardly anything runs | idle | nothing |
//!
//! (*) Prefills: `long-prefill-token-threshold`; steps: `max-num-batched-tokens`, larger only if
//! TPOT is met. "Lost": most of the lost time. The first four rows are read from each engine. The
//! others are read from the pools, if no engine has a reading.

use serde::{Deserialize, Serialize};

use super::engines::EngineFacts;
use sluice_core::vllm::metrics::SCHEDULER;

const SAMPLES: usize = 6;
/// From this share of the samples on, an observation is frequent.
pub(crate) const OFTEN: f64 = 0.3;
const PREEMPTIONS: f64 = 1.0;
/// The KV cache has room below this use.
const KV_ROOM: f64 = 0.8;
/// Running sequences count as at the peak from this share of the peak on.
const AT_PEAK: f64 = 0.95;
/// Share of the lost time, or of missing pages, that counts as "most".
const MOST: f64 = 0.5;
/// TPOT has no room if more than this share of requests miss its bound.
const TPOT_MISSED: f64 = 0.01;
/// An engine is idle below this mean number of running sequences.
const HARDLY_ANY: f64 = 1.0;

/// A cause of misses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading {
    /// More adapters are used at once than one step allows.
    AdapterSlots,
    /// The KV cache is too small for the sequences.
    Memory,
    /// The engine could run more sequences at once than it may.
    Sequences,
    /// Prefills slow the decoding of other sequences.
    Interference,
    /// Prefills themselves take long.
    Prefill,
    /// A limit of the gateway holds requests up.
    GatewayLimits,
    /// Objectives are met and hardly anything runs.
    Idle,
    /// The engine's metrics are unknown.
    NoMetrics,
}

/// A reading with its evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The cause.
    pub reading: Reading,
    /// The backends with this cause; empty: the pools as a whole.
    pub backends: Vec<String>,
    /// The observation.
    pub evidence: String,
    /// The recommended change; empty: none.
    pub advice: String,
}

/// How requests of a group of pools fared.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Experience {
    /// Whether objectives are missed by more than chance.
    pub misses: bool,
    /// Shares of the lost time: in the queue, on the engine before the first token, between tokens.
    pub lost: [f64; 3],
    /// Share of the requests with a bound on TPOT that miss it; `None`: no such request.
    pub tpot_missed: Option<f64>,
}

/// All readings, the most specific first. `engines`: the facts by `pool/backend`.
pub fn diagnose(experience: &Experience, engines: &[(String, EngineFacts)]) -> Vec<Diagnosis> {
    let mut found: Vec<Diagnosis> = Vec::new();
    for (name, facts) in engines {
        let Some((reading, evidence, advice)) = of_engine(facts, experience) else { continue };
        match found.iter_mut().find(|known| known.reading == reading) {
            Some(known) => known.backends.push(name.clone()),
            None => found.push(Diagnosis { reading, backends: vec![name.clone()], evidence, advice }),
        }
    }
    let of_engines = found.iter().any(|known| known.reading != Reading::NoMetrics);
    if !of_engines && let Some((reading, evidence, advice)) = of_pools(experience, engines) {
        found.push(Diagnosis { reading, backends: Vec::new(), evidence, advice });
    }
    found.sort_by_key(|known| known.reading);
    found
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn of_engine(facts: &EngineFacts, experience: &Experience) -> Option<(Reading, String, String)> {
    if facts.missing > MOST {
        let evidence = format!("its metrics page is missing or lacks one of vLLM's names: {}", SCHEDULER.join(", "));
        return Some((Reading::NoMetrics, evidence, String::new()));
    }
    if facts.samples < SAMPLES {
        return None;
    }
    let waiting = percent(facts.waiting);
    if facts.deferred >= OFTEN {
        let (slots, used) = facts.adapters.unwrap_or_default();
        let evidence = format!(
            "sequences waited for an adapter slot at {} of the looks; up to {used} adapters had requests, and a step may use {slots}",
            percent(facts.deferred)
        );
        return Some((Reading::AdapterSlots, evidence, format!("raise max-loras above {slots}")));
    }
    if facts.preemptions >= PREEMPTIONS || (facts.waiting >= OFTEN && facts.kv_full >= OFTEN) {
        let evidence = format!(
            "{:.1} preemptions a minute; the KV cache was full at {} of the looks",
            facts.preemptions,
            percent(facts.kv_full)
        );
        let fewer = (facts.running_peak * KV_ROOM).round();
        let advice = format!("lower slots or max-num-seqs to about {fewer}, or raise gpu-memory-utilization");
        return Some((Reading::Memory, evidence, advice));
    }
    let misses = experience.misses;
    let at_peak = facts.running_while_waiting >= AT_PEAK * facts.running_peak;
    if misses && facts.waiting >= OFTEN && at_peak && facts.kv_while_waiting < KV_ROOM {
        let running = facts.running_while_waiting;
        let evidence = format!(
            "sequences waited at {waiting} of the looks while {running:.0} ran, and {} of the KV cache was in use",
            percent(facts.kv_while_waiting)
        );
        return Some((Reading::Sequences, evidence, format!("raise max-num-seqs above {running:.0}")));
    }
    // An engine that the gateway runs gets at most `max-num-seqs` requests. Others wait in the
    // gateway's queue.
    let most = facts.max_num_seqs.filter(|most| facts.running_peak >= AT_PEAK * most && facts.kv_full < OFTEN)?;
    (misses && experience.lost[0] >= MOST).then(|| {
        let evidence = format!(
            "requests wait in the queue while {most:.0} sequences run, and the KV cache was full at {} of the looks",
            percent(facts.kv_full)
        );
        (Reading::Sequences, evidence, format!("raise max-num-seqs above {most:.0}"))
    })
}

fn of_pools(experience: &Experience, engines: &[(String, EngineFacts)]) -> Option<(Reading, String, String)> {
    let [queue, engine, decode] = experience.lost;
    if !experience.misses {
        let known = || engines.iter().filter(|(_, facts)| facts.samples >= SAMPLES);
        let running = known().map(|(_, facts)| facts.running).sum::<f64>() / known().count().max(1) as f64;
        let is_idle = known().next().is_some() && running < HARDLY_ANY;
        return is_idle.then(|| {
            (Reading::Idle, format!("objectives are met, and {running:.1} sequences run at once"), String::new())
        });
    }
    if decode >= MOST {
        let evidence = format!("{} of the lost time is between tokens", percent(decode));
        let advice = "lower long-prefill-token-threshold or max-num-batched-tokens";
        return Some((Reading::Interference, evidence, advice.to_owned()));
    }
    if engine >= MOST {
        let evidence = format!("{} of the lost time is on the engines before the first token", percent(engine));
        return Some((Reading::Prefill, evidence, faster_prefills(experience.tpot_missed)));
    }
    let evidence = format!("{} of the lost time is in the gateway's queue", percent(queue));
    (queue >= MOST).then(|| (Reading::GatewayLimits, evidence, "see the limits that the tuner moves".to_owned()))
}

/// How to shorten prefills. Larger steps, which lengthen TPOT, come first only where TPOT has room.
fn faster_prefills(tpot_missed: Option<f64>) -> String {
    match tpot_missed {
        Some(missed) if missed > TPOT_MISSED => format!(
            "add engines; a larger max-num-batched-tokens would lengthen TPOT, which {} of the requests miss already",
            percent(missed)
        ),
        Some(_) => "raise max-num-batched-tokens, since TPOT is met, or add engines".to_owned(),
        None => {
            "add engines, or raise max-num-batched-tokens, which lengthens TPOT and no objective bounds that".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readings(experience: Experience, engines: &[EngineFacts]) -> Vec<(Reading, usize)> {
        let named: Vec<_> =
            engines.iter().enumerate().map(|(number, facts)| (format!("all/gpu{number}"), *facts)).collect();
        diagnose(&experience, &named).iter().map(|found| (found.reading, found.backends.len())).collect()
    }

    #[test]
    fn each_row_of_the_table_is_recognized() {
        let good = EngineFacts { samples: 60, running: 20.0, running_peak: 40.0, ..EngineFacts::default() };
        let lost =
            |queue, engine, decode| Experience { misses: true, lost: [queue, engine, decode], tpot_missed: None };
        let full = EngineFacts { waiting: 0.8, running_while_waiting: 40.0, kv_while_waiting: 0.4, ..good };
        let engine = lost(0.1, 0.9, 0.0);
        assert_eq!(readings(engine, &[full, full, good]), [(Reading::Sequences, 2)]);
        assert_eq!(readings(Experience::default(), &[full]), [], "sequences that wait do no harm yet");
        let narrow = EngineFacts { max_num_seqs: Some(40.0), ..good };
        assert_eq!(readings(lost(0.9, 0.1, 0.0), &[narrow, narrow]), [(Reading::Sequences, 2)]);
        let wide = EngineFacts { max_num_seqs: Some(256.0), ..good };
        assert_eq!(readings(lost(0.9, 0.1, 0.0), &[wide]), [(Reading::GatewayLimits, 0)]);
        let crowded = EngineFacts { kv_while_waiting: 0.97, kv_full: 0.6, ..full };
        assert_eq!(readings(engine, &[crowded]), [(Reading::Memory, 1)]);
        assert_eq!(readings(engine, &[EngineFacts { preemptions: 4.0, ..good }]), [(Reading::Memory, 1)]);
        let adapters = EngineFacts { deferred: 0.5, adapters: Some((1, 3)), ..full };
        assert_eq!(readings(engine, &[adapters, good]), [(Reading::AdapterSlots, 1)]);
        assert_eq!(readings(engine, &[good]), [(Reading::Prefill, 0)]);
        assert_eq!(readings(lost(0.2, 0.1, 0.7), &[good]), [(Reading::Interference, 0)]);
        assert_eq!(readings(lost(0.9, 0.1, 0.0), &[good]), [(Reading::GatewayLimits, 0)]);
        let idle = EngineFacts { running: 0.2, ..good };
        assert_eq!(readings(Experience::default(), &[idle]), [(Reading::Idle, 0)]);
        assert_eq!(readings(Experience::default(), &[good]), []);
    }

    #[test]
    fn larger_steps_are_advice_only_where_tpot_has_room() {
        let advice = |tpot_missed: Option<f64>| {
            let experience = Experience { misses: true, lost: [0.1, 0.9, 0.0], tpot_missed };
            diagnose(&experience, &[]).remove(0).advice
        };
        assert!(advice(Some(0.0)).starts_with("raise max-num-batched-tokens"));
        assert!(
            advice(Some(0.4)).starts_with("add engines; ") && advice(Some(0.4)).contains("40 % of the requests miss")
        );
        assert!(advice(None).starts_with("add engines, or raise max-num-batched-tokens"));
    }

    #[test]
    fn an_engine_without_metrics_is_named_and_the_others_are_judged() {
        let none = EngineFacts { missing: 1.0, ..EngineFacts::default() };
        let lost = Experience { misses: true, lost: [0.0, 0.0, 1.0], tpot_missed: None };
        assert_eq!(readings(lost, &[none]), [(Reading::Interference, 0), (Reading::NoMetrics, 1)]);
        let young = EngineFacts { samples: 3, preemptions: 100.0, ..EngineFacts::default() };
        assert_eq!(readings(Experience::default(), &[young]), [], "too few samples");
    }
}
