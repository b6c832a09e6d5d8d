//! Computes every second how many engines each pool with an `autoscale` table needs, for the
//! metrics page and, with `apply`, for the fleet.
//!
//! The duration of a start is measured from the first sight of an unused backend or pod until its
//! use. The longest of the last [`STARTS`] counts, because too short an estimate would order
//! engines too late. Durations in the journal take precedence. If several gateways share the
//! engines, all loads are added (`cluster/loads.rs`).
//!
//! After a restart, capacity and load of the previous day are learned anew. Until then the number
//! of engines stays, except that a queue adds engines.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::cluster::{OtherLoad, OtherLoads};
use parking_lot::Mutex;
use sluice_cluster::PoolLoad;
use sluice_config::{Class, Config, Pool, attainment};
use sluice_fleet::discovery::PodsView;
use sluice_fleet::{EngineView, Step};
use sluice_gateway::pool::{Cordon, PoolView};
use sluice_gateway::telemetry::PoolEngines;
use sluice_online::observe::Observer;
use sluice_online::observe::tally::Tally;
use sluice_online::scaler::{Look, Scaler, ScalerRules};

const STARTS: usize = 5;
/// Time after which a starting engine that is not in use is forgotten.
const NEVER: Duration = Duration::from_secs(3_600);

#[derive(Debug, Default)]
pub(crate) struct Demand(Mutex<BTreeMap<String, Scaled>>);

#[derive(Debug)]
struct Scaled {
    scaler: Scaler,
    rules: ScalerRules,
    starts: Starts,
    wanted: u32,
}

#[derive(Debug, Default)]
struct Starts {
    since: BTreeMap<String, Duration>,
    took: VecDeque<Duration>,
}

impl Starts {
    fn see<'a>(&mut self, starting: &[String], in_use: impl Iterator<Item = &'a str>, now: Duration) {
        for name in in_use {
            if let Some(took) = self.since.remove(name).and_then(|since| now.checked_sub(since)) {
                self.took.push_back(took);
                if self.took.len() > STARTS {
                    self.took.pop_front();
                }
            }
        }
        for name in starting {
            self.since.entry(name.clone()).or_insert(now);
        }
        self.since.retain(|name, since| starting.contains(name) && now.saturating_sub(*since) < NEVER);
    }

    fn longest(&self) -> Option<Duration> {
        self.took.iter().max().copied()
    }
}

impl Demand {
    /// Looks at all pools once. Returns the changes of the numbers, in words.
    pub(crate) fn step(
        &self,
        config: &Config,
        view: &[PoolView],
        (engines, pods): (&[EngineView], &[PodsView]),
        (observer, others): (&Observer, Option<&OtherLoads>),
        now: Duration,
    ) -> Vec<String> {
        let mut scaled = self.0.lock();
        scaled.retain(|name, _| config.pools.iter().any(|pool| pool.name == *name && pool.autoscale.is_some()));
        let mut changes = Vec::new();
        for pool in &config.pools {
            let Some(rules) = rules(&config.classes, pool) else { continue };
            let Some(view) = view.iter().find(|view| *view.name == *pool.name) else { continue };
            let engines: Vec<&EngineView> = engines.iter().filter(|engine| is_of(engine, &pool.name)).collect();
            let starting = starting(view, &engines, pods);
            let mut tally = observer.take_tally(&pool.name);
            let other = others.map_or_else(OtherLoad::default, |others| others.take(&pool.name));
            tally.merge(&other.tally);
            let own = scaled.entry(pool.name.clone()).or_insert_with(|| {
                // Requests that ended while another gateway decided are not the load of this
                // second.
                tally = Tally::default();
                Scaled { scaler: Scaler::new(rules), rules, starts: Starts::default(), wanted: 0 }
            });
            let serving = || view.backends.iter().filter(|backend| backend.in_rotation());
            own.starts.see(&starting, serving().map(|backend| &*backend.name), now);
            let recorded = engines.iter().filter_map(|engine| engine.start_seconds).reduce(f64::max);
            let recorded = recorded.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            let cold_start = recorded.or(own.starts.longest()).unwrap_or(rules.cold_start);
            if own.rules != (ScalerRules { cold_start, ..rules }) {
                own.rules = ScalerRules { cold_start, ..rules };
                own.scaler.set_rules(own.rules);
            }
            let wanted = own.scaler.step(
                &Look {
                    ready: serving().count() as u32,
                    starting: starting.len() as u32,
                    queue: view.queue_length + other.queue,
                    in_flight: in_flight(view) + other.in_flight,
                    slots: serving().map(|backend| backend.limits.slots).min().unwrap_or(pool.slots),
                    tally,
                },
                now,
            );
            let before = std::mem::replace(&mut own.wanted, wanted);
            if before != wanted && before > 0 {
                let why = Some(own.scaler.why()).filter(|why| !why.is_empty()).unwrap_or("by min and max");
                changes.push(format!("pool {}: {wanted} engines wanted (were {before}): {why}", pool.name));
            }
        }
        changes
    }

    /// The number of engines that each controlled pool should run; `None`: all engines of the pool.
    /// A pool of pods is left out until the scaler knows its number, after a minute.
    pub(crate) fn targets(&self, config: &Config) -> Vec<(String, Option<u32>)> {
        let scaled = self.0.lock();
        let target = |pool: &Pool| {
            let applied = pool.autoscale.is_some_and(|autoscale| autoscale.apply);
            let own = scaled.get(&pool.name).filter(|_| applied);
            let wanted = own.map(|own| if pool.kubernetes.is_some() { own.scaler.wanted() } else { Some(own.wanted) });
            match wanted {
                None => Some((pool.name.clone(), None)),
                Some(wanted) => wanted.map(|wanted| (pool.name.clone(), Some(wanted))),
            }
        };
        config.pools.iter().filter_map(target).collect()
    }

    /// Forgets all pools, because another gateway publishes from now on.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    pub(crate) fn view(&self) -> Vec<PoolEngines> {
        let scaled = self.0.lock();
        let view = |(pool, own): (&String, &Scaled)| {
            Some(PoolEngines {
                pool: pool.clone(),
                wanted: own.scaler.wanted()?,
                start_seconds: own.rules.cold_start.as_secs_f64(),
            })
        };
        scaled.iter().filter_map(view).collect()
    }
}

pub(super) fn loads(config: &Config, view: &[PoolView], observer: &Observer) -> BTreeMap<String, PoolLoad> {
    let load = |pool: &Pool| {
        let view = view.iter().find(|view| *view.name == *pool.name)?;
        let (queue, in_flight) = (view.queue_length as u64, in_flight(view) as u64);
        Some((pool.name.clone(), PoolLoad { queue, in_flight, ended: observer.ended(&pool.name).sums() }))
    };
    config.pools.iter().filter(|pool| pool.autoscale.is_some()).filter_map(load).collect()
}

fn in_flight(view: &PoolView) -> usize {
    view.backends.iter().map(|backend| backend.used.slots as usize).sum()
}

fn rules(classes: &[Class], pool: &Pool) -> Option<ScalerRules> {
    let autoscale = pool.autoscale?;
    let listed = u32::try_from(pool.backends.len()).unwrap_or(u32::MAX);
    let max = if autoscale.apply && pool.kubernetes.is_none() { autoscale.max.min(listed) } else { autoscale.max };
    Some(ScalerRules {
        min: autoscale.min,
        max,
        attainment: attainment(classes, pool),
        cold_start: autoscale.cold_start,
        down_after: autoscale.down_after,
        idle_after: autoscale.idle_after,
        rate: autoscale.rate,
    })
}

fn is_of(engine: &EngineView, pool: &str) -> bool {
    engine.backend.split_once('/').is_some_and(|(own, _)| own == pool)
}

/// Backends whose engine starts, and pods that are not in use yet. An engine in the step `recover`
/// does not count, because it may be running.
fn starting(view: &PoolView, engines: &[&EngineView], pods: &[PodsView]) -> Vec<String> {
    let step = |name: &str| {
        let own = engines.iter().find(|engine| engine.backend.split_once('/').is_some_and(|(_, own)| own == name));
        own.map(|engine| engine.step.as_str())
    };
    let cordoned = view.backends.iter().filter(|backend| backend.cordon == Cordon::Starting && !backend.removed);
    let cordoned = cordoned.filter(|backend| step(&backend.name) != Some(Step::Recover.label()));
    let mut names: Vec<String> = cordoned.map(|backend| backend.name.to_string()).collect();
    let pods = pods.iter().filter(|pods| *pods.pool == *view.name).flat_map(|pods| &pods.pods);
    for pod in pods.filter(|pod| matches!(&*pod.state, "not_ready" | "cold" | "warming_up")) {
        let is_used = view.backends.iter().any(|backend| *backend.name == *pod.name && backend.in_rotation());
        if !is_used && !names.contains(&pod.name) {
            names.push(pod.name.clone());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use sluice_cluster::Ledger;
    use sluice_config::{Machine, Surroundings};
    use sluice_fleet::discovery::PodView;
    use sluice_gateway::flow::specs;
    use sluice_gateway::pool::Admission;
    use tokio::time::Instant;

    const SECOND: Duration = Duration::from_secs(1);

    fn config(autoscale: &str) -> Config {
        let text = format!(
            "[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\n{autoscale}\n\
             [[pool.backend]]\nname = \"a\"\nlaunch = {{ command = [\"x\"], port = 9 }}\n\
             [[pool.backend]]\nname = \"b\"\nlaunch = {{ command = [\"x\"], port = 10 }}\n"
        );
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        Config::parse(&text, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config
    }

    fn pool(config: &Config) -> Arc<Admission> {
        let rules = specs::health_rules(&config.health);
        let admission = Admission::new(Instant::now(), rules, 1);
        let layout = admission.apply(&specs::pools(config), rules, Instant::now());
        for backend in layout.backends.iter().flatten() {
            admission.record_probe(*backend, true, Instant::now());
        }
        admission
    }

    #[tokio::test]
    async fn a_pool_with_the_table_wants_what_it_has_and_one_without_has_no_metric() {
        let (demand, observer) = (Demand::default(), Observer::default());
        let plain = config("");
        let view = pool(&plain).view();
        demand.step(&plain, &view, (&[], &[]), (&observer, None), SECOND);
        assert_eq!(demand.view(), []);
        let scaled = config("autoscale = { max = 4 }");
        let mut changes = Vec::new();
        for second in 1..=70 {
            assert_eq!(demand.view().is_empty(), second <= 61, "nothing is published in the first minute");
            changes.extend(demand.step(&scaled, &view, (&[], &[]), (&observer, None), second * SECOND));
        }
        let shown = demand.view();
        assert_eq!((shown[0].wanted, &*shown[0].pool, changes.len()), (2, "p", 0));
        let fewer = config("autoscale = { max = 1 }");
        let changes = demand.step(&fewer, &view, (&[], &[]), (&observer, None), 71 * SECOND);
        assert_eq!((demand.view()[0].wanted, changes.len()), (1, 1), "{changes:?}");
        demand.step(&plain, &view, (&[], &[]), (&observer, None), 72 * SECOND);
        assert_eq!(demand.view(), []);
    }

    #[tokio::test]
    async fn the_requests_of_other_gateways_count_as_those_of_this_one() {
        let (demand, observer, others) = (Demand::default(), Observer::default(), OtherLoads::default());
        let scaled = config("slots = 8\nautoscale = { max = 4 }");
        let view = pool(&scaled).view();
        let write = |in_flight: u64, ended: f64| {
            let load = PoolLoad { queue: 0, in_flight, ended: [ended; 6] };
            let entry =
                serde_json::json!({ "beat": 1, "lease_ms": 1, "keeps": true, "backends": {}, "pools": { "p": load } });
            let ledger =
                serde_json::json!({ "version": 1, "begun": "", "writes": 1, "known": [], "gateways": { "b": entry } });
            others.see(&Ledger::parse(ledger.to_string().as_bytes()).unwrap(), "a");
        };
        // Requests from before the first look do not count, because they are not the load of one
        // second.
        write(1, 0.0);
        write(1, 1e9);
        for second in 1..=70 {
            demand.step(&scaled, &view, (&[], &[]), (&observer, Some(&others)), second * SECOND);
        }
        assert_eq!(demand.view()[0].wanted, 2);
        write(20, 1e9);
        for second in 71..=125 {
            demand.step(&scaled, &view, (&[], &[]), (&observer, Some(&others)), second * SECOND);
        }
        assert_eq!(demand.view()[0].wanted, 3, "20 sequences need three engines of 8");
    }

    #[tokio::test]
    async fn engines_to_run_are_those_that_are_found_and_of_one_being_looked_for_nothing_is_known() {
        let (demand, observer) = (Demand::default(), Observer::default());
        let applied = config("autoscale = { apply = true, max = 4 }");
        let admission = pool(&applied);
        let engine = |name: &str, step: Step, start_seconds| EngineView {
            backend: format!("p/{name}"),
            step: step.label().to_owned(),
            start_seconds,
            ..EngineView::default()
        };
        for backend in &admission.view()[0].backends {
            admission.set_cordon(backend.id, Cordon::Starting);
        }
        let step = |b: Step, second: u32| {
            let engines = [engine("a", Step::Adopt, Some(40.0)), engine("b", b, Some(70.0))];
            demand.step(&applied, &admission.view(), (&engines, &[]), (&observer, None), second * SECOND);
            demand.targets(&applied)
        };
        assert_eq!(step(Step::Recover, 1), [("p".to_owned(), Some(1))]);
        assert_eq!(demand.0.lock()["p"].rules.cold_start, 70 * SECOND, "the longest that the journal knows");
        assert_eq!(step(Step::Adopt, 2), [("p".to_owned(), Some(2))]);
        assert_eq!(demand.0.lock()["p"].rules.max, 2, "no more than are listed");
        assert_eq!(demand.targets(&config("autoscale = { max = 4 }")), [("p".to_owned(), None)], "only published");
        assert_eq!(demand.targets(&config("")), [("p".to_owned(), None)]);
    }

    #[tokio::test]
    async fn the_longest_start_that_was_seen_replaces_the_stated_one() {
        let (demand, observer) = (Demand::default(), Observer::default());
        let config = config("autoscale = { max = 4, cold_start = \"3m\" }");
        let admission = pool(&config);
        let pods = |state: &str| {
            let pod = PodView { name: "a".to_owned(), state: state.to_owned(), why: None };
            vec![PodsView { pool: "p".to_owned(), trouble: None, pods: vec![pod] }]
        };
        let a = admission.view()[0].backends[0].id;
        admission.set_cordon(a, Cordon::Down);
        let seen = || demand.0.lock()["p"].rules.cold_start.as_secs_f64();
        demand.step(&config, &admission.view(), (&[], &pods("not_ready")), (&observer, None), 10 * SECOND);
        demand.step(&config, &admission.view(), (&[], &pods("warming_up")), (&observer, None), 11 * SECOND);
        assert_eq!(seen(), 180.0);
        admission.set_cordon(a, Cordon::Open);
        demand.step(&config, &admission.view(), (&[], &pods("in_use")), (&observer, None), 105 * SECOND);
        assert_eq!(seen(), 95.0);
        admission.set_cordon(a, Cordon::Starting);
        demand.step(&config, &admission.view(), (&[], &[]), (&observer, None), 200 * SECOND);
        admission.set_cordon(a, Cordon::Open);
        demand.step(&config, &admission.view(), (&[], &[]), (&observer, None), 230 * SECOND);
        assert_eq!(seen(), 95.0, "the longest one");
    }
}
