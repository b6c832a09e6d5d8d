//! Why an arm with another model, such as a LoRA adapter, is slow: five known causes in vLLM, found
//! by symptoms.
//!
//! | cause | symptom |
//! |---|---|
//! | slots | more adapters than slots (`--max-loras`), and requests are deferred |
//! | cold loads | more adapters than host memory holds (`--max-cpu-loras`): some are read again |
//! | rank | the engine computes with a larger rank (`--max-lora-rank`) than the adapter's |
//! | kernels | TPOT is certainly worse: LoRA kernels run for all requests of a step |
//! | prefix cache | fewer cached prompt tokens than in the control: adapters share no blocks |
//!
//! The gateway reads the metrics of engines every few seconds (a *look*). Bounds: [`MAX_ENGINES`],
//! [`MAX_NAMES`].

use serde::{Deserialize, Serialize};

use super::ledger::{ArmLedger, Quantity};
use super::plan::ExperimentPlan;
use super::verdict::{Comparison, Conclusion, change, percent};

/// Remembered engines of each arm.
const MAX_ENGINES: usize = 16;
/// Remembered adapters of each engine.
const MAX_NAMES: usize = 64;
/// Looks at an engine before a conclusion.
const LOOKS_MIN: u64 = 10;
/// The cause `slots` needs at least this share of looks with too few slots.
const CROWDED_MIN: f64 = 0.05;
/// Prompts with a known cached share, in each arm, before the prefix cache is judged.
const PROMPTS_MIN: f64 = 100.0;
/// The cause `prefix cache` needs a cached share of prompt tokens that is at least this much below
/// the control's.
const CACHED_MIN: f64 = 0.1;

/// The adapters of an engine at one moment, according to the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineAdapters {
    /// The name of the backend.
    pub backend: String,
    /// Adapters that one step may use (`--max-loras`).
    pub slots: u64,
    /// The most adapters in host memory (`--max-cpu-loras`). `None`: vLLM's default, the number of
    /// slots, is assumed.
    pub host: Option<u64>,
    /// The rank with which the engine computes (`--max-lora-rank`), if known.
    pub rank: Option<u32>,
    /// Adapters with requests that have begun, each with a rank if known. vLLM notes a request at
    /// the first output, so adapters whose requests are all deferred are missing.
    pub in_use: Vec<(String, Option<u32>)>,
    /// Whether requests are deferred; `None`: unknown (old versions of vLLM).
    pub defers: Option<bool>,
}

/// The results of looks at one engine that serves the adapter of an arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineLooks {
    backend: String,
    slots: u64,
    host: Option<u64>,
    rank: Option<u32>,
    own_rank: Option<u32>,
    /// Looks at which the arm's adapter had requests, or requests were deferred while all slots
    /// were in use.
    looks: u64,
    /// Number of looks that found deferred requests while all slots were in use. If the engine does
    /// not say whether it defers, number of looks that found more adapters in use than slots.
    crowded: u64,
    names: Vec<String>,
}

impl EngineLooks {
    /// Adds a look at an engine to `all`, the looks of one arm.
    pub(super) fn note(all: &mut Vec<Self>, adapter: &str, engine: &EngineAdapters) {
        let own = engine.in_use.iter().find(|(name, _)| name == adapter);
        let same = |known: &Self| known.backend == engine.backend;
        // An engine that was restarted with other flags counts as a new engine.
        all.retain(|known| {
            !same(known) || (known.slots, known.host, known.rank) == (engine.slots, engine.host, engine.rank)
        });
        let at = match (all.iter().position(same), own) {
            (Some(at), _) => at,
            (None, Some((_, own_rank))) if all.len() < MAX_ENGINES => {
                let EngineAdapters { backend, slots, host, rank, .. } = engine;
                let (backend, slots, host, rank, own_rank) = (backend.clone(), *slots, *host, *rank, *own_rank);
                all.push(Self { backend, slots, host, rank, own_rank, looks: 0, crowded: 0, names: Vec::new() });
                all.len() - 1
            }
            (None, _) => return,
        };
        let looks = &mut all[at];
        for (name, _) in &engine.in_use {
            if looks.names.len() < MAX_NAMES && !looks.names.contains(name) {
                looks.names.push(name.clone());
            }
        }
        let used = engine.in_use.len() as u64;
        let is_crowded = match engine.defers {
            Some(defers) => defers && used >= engine.slots,
            None => used > engine.slots,
        };
        looks.looks += u64::from(own.is_some() || is_crowded);
        looks.crowded += u64::from(is_crowded);
    }

    fn crowding(&self) -> f64 {
        self.crowded as f64 / self.looks.max(1) as f64
    }
}

/// A known cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The engine has too few adapter slots for one step.
    Slots,
    /// Adapters are read from disk again and again.
    ColdLoads,
    /// The engine computes with a larger rank than the adapter's.
    Rank,
    /// The LoRA kernels make each step longer.
    Kernels,
    /// Prompts are not found in the prefix cache.
    PrefixCache,
}

/// One reason why an arm is slow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The cause.
    pub cause: Cause,
    /// The evidence and the remedy.
    pub sentence: String,
}

/// The causes that are found for an arm, unless it serves the requested model.
pub fn diagnose(
    plan: &ExperimentPlan,
    arms: &[ArmLedger],
    looks: &[EngineLooks],
    comparison: &Comparison,
) -> Vec<Diagnosis> {
    let Some((adapter, _)) = &plan.arms[comparison.arm].model else { return Vec::new() };
    let worst = |looks: &&EngineLooks| (looks.crowding() * 1e6) as u64;
    let found = [
        (Cause::Slots, looks.iter().max_by_key(worst).and_then(slots)),
        (Cause::ColdLoads, looks.iter().find_map(cold_loads)),
        (Cause::Rank, looks.iter().find_map(|looks| rank(looks, adapter))),
        (Cause::Kernels, kernels(plan, comparison)),
        (Cause::PrefixCache, prefix_cache(plan, arms, comparison.arm)),
    ];
    found.into_iter().filter_map(|(cause, sentence)| Some(Diagnosis { cause, sentence: sentence? })).collect()
}

fn slots(looks: &EngineLooks) -> Option<String> {
    let EngineLooks { backend, slots, names, .. } = looks;
    let (used, crowding) = (names.len(), looks.crowding());
    // Requests are also deferred for other reasons, such as a grammar that is compiled.
    (looks.looks >= LOOKS_MIN && crowding >= CROWDED_MIN && used as u64 > *slots).then(|| {
        format!(
            "too few adapter slots: {backend} has max-loras {slots}, and {used} adapters were used on it; in {} of {} scrapes \
             requests were deferred while all slots were in use: those of one adapter wait until another has none left; start it \
             with max-loras {used}, or keep the adapters on engines of their own",
            percent(crowding),
            looks.looks
        )
    })
}

fn cold_loads(looks: &EngineLooks) -> Option<String> {
    let (used, host) = (looks.names.len() as u64, looks.host.unwrap_or(looks.slots));
    let default = if looks.host.is_none() { ", unless its flags say more" } else { "" };
    (looks.looks >= LOOKS_MIN && used > host).then(|| {
        format!(
            "cold loads: {used} adapters were used on {}, which keeps {host} in host memory (max-cpu-loras{default}): one that \
             returns is read from disk while all requests wait; start it with max-cpu-loras {used}",
            looks.backend
        )
    })
}

fn rank(looks: &EngineLooks, adapter: &str) -> Option<String> {
    let (engine, own) = (looks.rank?, looks.own_rank?);
    (engine > own).then(|| {
        format!(
            "rank: {} computes with max-lora-rank {engine} and {adapter} has rank {own}; start it with the largest rank of its adapters",
            looks.backend
        )
    })
}

fn kernels(plan: &ExperimentPlan, comparison: &Comparison) -> Option<String> {
    let tpot = &comparison.findings[Quantity::Tpot as usize];
    (tpot.conclusion == Some(Conclusion::Worse)).then(|| {
        let beside = if plan.arms[comparison.arm].shares_engines(&plan.arms[0]) {
            "; both arms share engines, so requests of the control beside it pay too, and the whole cost is more than this \
             (a pool of its own for the arm shows it)"
        } else {
            ""
        };
        format!(
            "kernels: {}: a step with any adapter runs the adapters' kernels for all of its requests (an H200 was measured at \
             +29 % to +36 %){beside}",
            change(tpot.quantity.label(), &tpot.ratio.change)
        )
    })
}

fn prefix_cache(plan: &ExperimentPlan, arms: &[ArmLedger], arm: usize) -> Option<String> {
    let [control, own] = [0, arm].map(|arm| &arms[arm]);
    let enough = control.cached_prompts >= PROMPTS_MIN && own.cached_prompts >= PROMPTS_MIN;
    let (control, own) = (control.cached_share()?, own.cached_share()?);
    (enough && control - own >= CACHED_MIN).then(|| {
        format!(
            "prefix cache: {} of its prompt tokens were cached, and {} of those of {}: an adapter shares no cached prompts with the base or other adapters",
            percent(own),
            percent(control),
            plan.arms[0].name
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::verdict::compare;
    use crate::experiment::{Ending, ExperimentReport, Experiments, Observation, tests};
    use crate::origin::Origin;

    /// An engine with adapters in use. The arm's adapter is "lora", with rank 16.
    fn engine(backend: &str, slots: u64, host: Option<u64>, in_use: &[&str]) -> EngineAdapters {
        let in_use = in_use.iter().map(|name| ((*name).to_owned(), (*name == "lora").then_some(16))).collect();
        EngineAdapters { backend: backend.to_owned(), slots, host, rank: Some(16), in_use, defers: None }
    }

    fn causes_of(seen: &[EngineAdapters], looks: u64) -> Vec<Diagnosis> {
        let experiments = Experiments::default();
        experiments.configure(&tests::config(&tests::experiment("x", "")));
        assert_eq!(experiments.arm_models().iter().map(|name| &**name).collect::<Vec<_>>(), ["lora"]);
        (0..looks).for_each(|_| experiments.note_adapters(seen));
        let report = ExperimentReport::new(&experiments.find("x").unwrap(), true);
        report.comparisons[0].diagnosis.clone()
    }

    fn kinds(found: &[Diagnosis]) -> Vec<Cause> {
        found.iter().map(|one| one.cause).collect()
    }

    #[test]
    fn too_few_slots_are_named_with_the_engine_and_what_to_set() {
        // As in vLLM, the adapter that waits is not listed, and requests are deferred.
        let of = |slots, names: &[&str], defers| EngineAdapters { defers, ..engine("p/a", slots, Some(4), names) };
        let turns = |slots, defers| [of(slots, &["chat"], defers), of(slots, &["lora"], defers)];
        let found = causes_of(&turns(1, Some(true)), 10);
        assert_eq!(kinds(&found), [Cause::Slots]);
        let said = &found[0].sentence;
        assert!(
            said.contains("p/a has max-loras 1, and 2 adapters were used") && said.contains("max-loras 2"),
            "{said}"
        );
        assert_eq!(causes_of(&turns(1, Some(true)), 4), [], "too few looks");
        assert_eq!(causes_of(&turns(1, Some(false)), 50), [], "none is deferred");
        assert_eq!(causes_of(&turns(2, Some(true)), 50), [], "a slot is free: they are deferred for another reason");
        assert_eq!(causes_of(&[of(1, &["lora"], Some(true))], 50), [], "no other adapter is used");
        assert_eq!(causes_of(&[of(1, &["chat", "other"], Some(true))], 50), [], "not the adapter of the arm");
        // An engine that does not say whether it defers, and lists more adapters than it has slots.
        assert_eq!(kinds(&causes_of(&[of(1, &["chat", "lora"], None)], 10)), [Cause::Slots]);
        assert_eq!(causes_of(&turns(1, None), 50), []);
    }

    #[test]
    fn an_engine_that_is_started_with_other_flags_is_looked_at_anew() {
        let mut looks = Vec::new();
        for _ in 0..50 {
            EngineLooks::note(&mut looks, "lora", &engine("p/a", 1, Some(4), &["chat", "lora"]));
        }
        assert!(slots(&looks[0]).is_some());
        EngineLooks::note(&mut looks, "lora", &engine("p/a", 2, Some(4), &["chat", "lora"]));
        assert_eq!((looks.len(), looks[0].looks, looks[0].crowded), (1, 1, 0));
    }

    #[test]
    fn more_adapters_than_host_memory_keeps_are_read_from_disk_again_and_again() {
        let seen = [&["lora"][..], &["chat"], &["other"]].map(|names| engine("p/a", 2, None, names));
        let found = causes_of(&seen, 10);
        assert_eq!(kinds(&found), [Cause::ColdLoads]);
        let said = &found[0].sentence;
        assert!(
            said.contains("3 adapters were used on p/a, which keeps 2") && said.contains("max-cpu-loras 3"),
            "{said}"
        );
        assert_eq!(causes_of(&seen.map(|engine| EngineAdapters { host: Some(3), ..engine }), 10), []);
    }

    #[test]
    fn a_rank_above_that_of_the_adapter_is_named() {
        let found = causes_of(&[EngineAdapters { rank: Some(64), ..engine("p/a", 2, None, &["lora"]) }], 1);
        assert_eq!(kinds(&found), [Cause::Rank]);
        assert!(found[0].sentence.contains("max-lora-rank 64 and lora has rank 16"), "{}", found[0].sentence);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut looks = Vec::new();
        for number in 0..200 {
            let name = format!("adapter {number}");
            EngineLooks::note(&mut looks, "lora", &engine(&format!("p/{number}"), 1, None, &["lora", &name]));
            EngineLooks::note(&mut looks, "lora", &engine("p/0", 1, None, &["lora", &name]));
        }
        assert_eq!((looks.len(), looks[0].names.len()), (MAX_ENGINES, MAX_NAMES));
    }

    #[test]
    fn slower_tokens_and_a_cold_prefix_cache_are_causes_where_they_are_measured() {
        let experiments = Experiments::default();
        experiments.configure(&tests::config(&tests::experiment("x", "min_effect = 0.01")));
        let x = experiments.find("x").unwrap();
        for number in 0..4_000_usize {
            let arm = number % 2;
            let time = 0.01 * (1.0 + 0.3 * arm as f64) * (1.0 + (number % 7) as f64 / 100.0);
            let observation = Observation {
                origin: Origin::default(),
                blamed: true,
                stratum: 0,
                cell: (number / 2 % 64) as u16,
                values: [Some(time); Quantity::ALL.len()],
                ending: Ending::Completed,
                missed: None,
                fell_back: false,
                cached: Some(if arm == 0 { (60, 100) } else { (10, 100) }),
                answer: Default::default(),
            };
            x.state.observe(&x.plan, arm, &observation);
        }
        let progress = x.state.progress();
        let comparison = &compare(&x.plan, progress.measured())[0];
        let found = diagnose(&x.plan, &progress.arms, &[], comparison);
        assert_eq!(kinds(&found), [Cause::Kernels, Cause::PrefixCache]);
        assert!(found[0].sentence.contains("TPOT +30") && found[0].sentence.contains("share engines"), "{found:?}");
        assert!(found[1].sentence.contains("10.0 % of its prompt tokens were cached, and 60.0 %"), "{found:?}");
    }
}
