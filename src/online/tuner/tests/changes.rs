//! The tuner of a whole configuration with a change of engines under way. However the change ends,
//! the canary gets the old flags back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::SECOND;
use crate::engines::change::{EngineChange, Stage};
use crate::engines::flags::{EngineFlag, Flags};
use crate::engines::look::{EngineState, Restarted, TunerOrder};
use crate::engines::phase::{EngineTrial, Measure, Phase, Restart, Step};
use crate::engines::proof::Load;
use crate::event::{EventKind, Proposal};
use crate::limits::PoolLimits;
use crate::observe::Observer;
use crate::tuner::Tuner;
use sluice_config::{Config, Pods, TunerMode};
use sluice_core::meter::StreamStats;
use sluice_core::openai::{Route, ShedReason};
use sluice_gateway::flow::{Outcome, Record, RecordGuard, Recorder};

const TEXT: &str = r#"
[slo]
ttft = "1s"
[tuner]
mode = "apply"
flags = ["max-num-seqs"]
[[model]]
name = "m"
[[pool]]
name = "p"
models = ["m"]
[[pool.backend]]
name = "e0"
url = "http://127.0.0.1:1"
[[pool.backend]]
name = "e1"
url = "http://127.0.0.1:2"
"#;

const FLAG: EngineFlag = EngineFlag::MaxNumSeqs;
const BEFORE: f64 = 8.0;
const AFTER: f64 = 2.0 * BEFORE;
const NOW: Duration = Duration::from_secs(1_000);

fn config() -> Config {
    super::config(TEXT)
}

fn engines(values: [f64; 2]) -> Vec<EngineState> {
    let of = |(at, value)| EngineState {
        pool: "p".to_owned(),
        backend: format!("e{at}"),
        flags: Some(Flags::from([(FLAG, value)])),
        serves: true,
        ..EngineState::default()
    };
    (0..).zip(values).map(of).collect()
}

fn at(change: EngineChange, step: Step) -> Phase {
    Phase::Changing(Box::new(EngineTrial::new(change, step)))
}

/// A tuner that compares the control with a canary that runs more sequences.
fn compares(observer: &Observer) -> Tuner {
    let mut tuner = Tuner::new(&config(), observer, Duration::ZERO);
    let change = EngineChange {
        number: 1,
        pool: "p".to_owned(),
        backends: vec!["e0".to_owned(), "e1".to_owned()],
        flag: FLAG,
        from: BEFORE,
        to: AFTER,
        limits: None,
        limits_first: false,
        loss_before: 0.5,
        forecast: None,
        crowded: false,
        changed: vec!["e0".to_owned()],
        proved: Load::new(20, 2_000),
    };
    tuner.engines.phase = at(change, Step::Compared(Measure::at(NOW - SECOND)));
    tuner.step_engines(&engines([AFTER, BEFORE]), None, observer, NOW - SECOND);
    assert_eq!(tuner.engines.stage(), Some(Stage::Compared), "{:?}", tuner.take_events());
    let mut with = config();
    tuner.put(&mut with);
    assert_eq!(with.experiments.len(), 1);
    tuner
}

#[test]
fn what_engines_are_changed_for_is_the_latest_loss() {
    let observer = Observer::default();
    let mut tuner = Tuner::new(&config(), &observer, Duration::ZERO);
    let controller = &mut tuner.groups[0].controller;
    (controller.belief.0.loss, controller.latest_score.loss) = (0.207, 0.002);
    assert_eq!(tuner.needs(&observer)[0].score.loss, 0.002);
}

/// A change whose limits are in force from the beginning.
fn limits_first(tuner: &Tuner) -> EngineChange {
    let limits = PoolLimits { slots: 7, ..tuner.limits().0[0] };
    let change = tuner.engine_change().cloned().unwrap();
    EngineChange { limits: Some(limits), limits_first: true, changed: Vec::new(), ..change }
}

#[test]
fn limits_that_hold_from_the_beginning_of_a_change_are_put_in_force_then_and_end_with_it() {
    let observer = Observer::default();
    let mut tuner = compares(&observer);
    let (change, configured) = (limits_first(&tuner), tuner.limits());
    let proposal = Proposal { id: 1, key: change.key(), values: Default::default(), why: String::new() };
    tuner.engines.proposals.propose(NOW, proposal, change);
    tuner.engines.phase = Phase::Watching { from: NOW };
    assert!(tuner.approve("e1"));
    let orders = tuner.step_engines(&engines([BEFORE; 2]), None, &observer, NOW);
    assert_eq!((orders.contains(&TunerOrder::Configure), tuner.limits().0[0].slots), (true, 7), "{orders:?}");

    let change = EngineChange { changed: Vec::new(), ..tuner.engine_change().unwrap().clone() };
    tuner.engines.phase = at(change, Step::Return(Restart::at(NOW)));
    let orders = tuner.step_engines(&engines([BEFORE; 2]), None, &observer, NOW + SECOND);
    assert_eq!((tuner.engine_change(), orders.contains(&TunerOrder::Configure)), (None, true), "{orders:?}");
    assert_eq!(tuner.limits(), configured);
}

#[test]
fn the_limits_of_a_change_end_when_an_operator_sets_others() {
    let observer = Observer::default();
    let mut tuner = compares(&observer);
    let change = EngineChange { changed: vec!["e0".to_owned()], ..limits_first(&tuner) };
    tuner.engines.phase = at(change, Step::Copies(Measure::at(NOW)));
    let mut other = config();
    other.pools[0].slots = 99;
    tuner.configure(&mut other, &observer, NOW);
    assert_eq!((tuner.limits().0[0].slots, tuner.engines.stage()), (99, Some(Stage::Return)));
}

#[test]
fn what_was_found_does_not_depend_on_the_addresses_of_pods() {
    let observer = Observer::default();
    let pods = |selector: &str| Pods {
        selector: selector.to_owned(),
        port: 8_000,
        namespace: None,
        weight: 1.0,
        api_key: None,
        statefulset: None,
        container: "engine".to_owned(),
        args: BTreeMap::new(),
    };
    let found = |selector: &str, backends: usize| {
        let mut config = config();
        config.pools[0].kubernetes = Some(pods(selector));
        config.pools[0].backends.truncate(backends);
        config
    };
    let context = |config: &Config| Tuner::new(config, &observer, Duration::ZERO).context;
    assert_eq!(context(&found("app=vllm", 2)), context(&found("app=vllm", 0)), "pods come and go");
    assert_ne!(context(&found("app=vllm", 2)), context(&found("app=other", 2)));
    assert_ne!(context(&config()), context(&super::config(&TEXT.replace(":2", ":3"))));
}

/// Name, expected event and action of an end.
type End = (&'static str, EventKind, fn(&mut Tuner, &Observer));

#[test]
fn whatever_ends_a_change_takes_the_engine_back_and_ends_the_comparison() {
    let ends: [End; 4] = [
        ("the tuner is switched off", EventKind::StoodBack, |tuner, observer| {
            let mut config = config();
            config.tuner.mode = TunerMode::Off;
            tuner.configure(&mut config, observer, NOW);
        }),
        ("other limits are configured", EventKind::StoodBack, |tuner, observer| {
            let mut config = config();
            config.pools[0].slots += 1;
            tuner.configure(&mut config, observer, NOW);
        }),
        ("an operator freezes it", EventKind::StoodBack, |tuner, observer| {
            tuner.freeze(Some("by an operator".to_owned()), observer, NOW);
        }),
        ("a guardrail stops the experiment", EventKind::Undone, |tuner, observer| {
            assert_eq!(tuner.experiment_stopped("too many failed", observer, NOW), [TunerOrder::Configure]);
        }),
    ];
    for (what, kind, end) in ends {
        let observer = Observer::default();
        let mut tuner = compares(&observer);
        end(&mut tuner, &observer);
        assert!(tuner.has_work(), "{what}");
        let engines_since = tuner.groups[0].controller.engines_since;
        assert_eq!(engines_since == NOW, kind == EventKind::StoodBack && !what.contains("freezes"), "{what}");
        let mut orders = Vec::new();
        for second in 0..3 {
            let now = NOW + second * SECOND;
            orders.extend(tuner.step_engines(&engines([AFTER, BEFORE]), None, &observer, now));
        }
        let returns = |order: &&TunerOrder| matches!(order, TunerOrder::Restart { engine, flag: FLAG, value, .. } if engine == "p/e0" && *value == BEFORE);
        assert_eq!(orders.iter().filter(returns).count(), 1, "{what}: {orders:?}");
        assert!(tuner.take_events().iter().any(|event| event.kind == kind && event.key.contains(".engine.")), "{what}");
        let mut with = config();
        tuner.put(&mut with);
        assert!(with.experiments.is_empty(), "{what}");
        tuner.restarted(Restarted::Done, &observer, NOW + 60 * SECOND);
        tuner.step_engines(&engines([BEFORE, BEFORE]), None, &observer, NOW + 61 * SECOND);
        assert_eq!(tuner.engine_change(), None, "{what}");
    }
}

struct Recording(Arc<Observer>);

impl Recorder for Recording {
    fn record(&self, record: &Record) {
        self.0.record(record, NOW);
    }
}

#[test]
fn requests_and_misses_of_other_pools_are_not_counted() {
    let second = TEXT[TEXT.find("[[model]]").unwrap()..]
        .replace("\"m\"", "\"n\"")
        .replace("\"p\"", "\"q\"")
        .replace("127.0.0.1", "127.0.0.2");
    let config = super::config(&(TEXT.to_owned() + &second));
    let observer = Arc::new(Observer::default());
    let recorder = Recording(Arc::clone(&observer));
    let tuner = Tuner::new(&config, &observer, Duration::ZERO);
    for (home, outcome) in
        [("p", Outcome::Shed(ShedReason::QueueFull)), ("p", Outcome::Refused), ("q", Outcome::Completed)]
    {
        let route = Some(Route::ChatCompletions);
        let mut record = RecordGuard::new(&recorder, route, "r".into(), tokio::time::Instant::now());
        record.home = Some(home.into());
        record.outcome = outcome;
        record.stats = Some(StreamStats { ttft: Some(Duration::from_millis(1)), ..StreamStats::default() });
    }
    let totals = |pool: &str| {
        let needs = tuner.needs(&observer);
        needs.iter().find(|need| need.pools[0].name == pool).expect("pools of two models are apart").totals
    };
    assert_eq!((totals("p"), totals("q")), ((1.0, 1.0), (1.0, 0.0)));
}
