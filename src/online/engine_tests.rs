//! The slow layer against a model of a pool: what it changes, when it stops, and that engines end as they were or all alike.

use std::time::Duration;

use crate::arms::Arms;
use crate::change::Stage;
use crate::engine_look::{EngineRules, EngineState, Look, Need, Order, Restarted};
use crate::engine_tuner::{ABSENT, ASK_INTERVAL, CLOSED, EngineTuner, SavedEngines};
use crate::event::{Acting, EventKind};
use crate::flags::{EngineFlag, Flags};
use crate::forecast::{Answer, Forecast, Question};
use crate::window::Score;
use sluice_core::base::Rng;

const SECOND: Duration = Duration::from_secs(1);
const FLAG: EngineFlag = EngineFlag::MaxNumSeqs;
/// What every engine has at first.
const BEFORE: f64 = 8.0;
/// How long a restart takes.
const RESTART: Duration = Duration::from_secs(60);

/// Engines whose requests miss with a probability that depends on their flag.
struct Deployment {
    tuner: EngineTuner,
    engines: Vec<EngineState>,
    arms: Arms,
    now: Duration,
    rng: Rng,
    totals: (f64, f64),
    acting: Acting,
    stands_back: Option<&'static str>,
    waits: Option<&'static str>,
    /// The probability to miss, and to fail, of a request on an engine with that value.
    fares: fn(f64) -> (f64, f64),
    forecast: fn(f64) -> f64,
    /// What comes of a restart with that value.
    restarts: fn(f64) -> Restarted,
    /// The end of a restart, its engine and the value.
    under_way: Option<(Duration, usize, f64)>,
    answer_due: Option<Question>,
    events: Vec<(EventKind, String)>,
    begun: Vec<Duration>,
}

fn helps(value: f64) -> (f64, f64) {
    (if value <= BEFORE { 0.5 } else { 0.05 }, 0.0)
}

fn rules() -> EngineRules {
    EngineRules {
        flags: vec![FLAG],
        missed_for: Duration::from_secs(60),
        restarts_per_hour: 12,
        cool_down: Duration::from_secs(600),
        error_budget: 0.05,
    }
}

impl Deployment {
    fn new(count: usize, fares: fn(f64) -> (f64, f64)) -> Self {
        let engine = |index: usize| EngineState {
            pool: "all".to_owned(),
            backend: format!("e{index}"),
            flags: Some(Flags::from([(FLAG, BEFORE)])),
            serves: true,
            waiting: 0,
        };
        Self {
            tuner: EngineTuner::new(rules()),
            engines: (0..count).map(engine).collect(),
            arms: Arms::default(),
            now: Duration::ZERO,
            rng: Rng::new(1),
            totals: (0.0, 0.0),
            acting: Acting::Acts,
            stands_back: None,
            waits: None,
            fares,
            forecast: |value| helps(value).0,
            restarts: |_| Restarted::Done,
            under_way: None,
            answer_due: None,
            events: Vec::new(),
            begun: Vec::new(),
        }
    }

    fn value(&self, engine: usize) -> f64 {
        self.engines[engine].flags.as_ref().unwrap()[&FLAG]
    }

    fn values(&self) -> Vec<f64> {
        (0..self.engines.len()).map(|engine| self.value(engine)).collect()
    }

    fn give(&mut self, engine: usize, value: f64) {
        self.engines[engine].flags = Some(Flags::from([(FLAG, value)]));
    }

    fn kinds(&self) -> Vec<EventKind> {
        self.events.iter().map(|(kind, _)| *kind).collect()
    }

    fn stage(&self) -> Option<Stage> {
        self.tuner.change().map(|change| change.stage)
    }

    fn belief(&self) -> String {
        self.tuner.report().why
    }

    /// Ten requests; each goes to an engine that serves.
    fn serve(&mut self) {
        let arm_of = |engine: usize| {
            let change = self.tuner.change()?;
            let backend = &self.engines[engine].backend;
            let arm = change.backends.iter().take(2).position(|other| other == backend)?;
            matches!(change.stage, Stage::Copies | Stage::Compared).then_some(1 - arm)
        };
        let serving: Vec<usize> = (0..self.engines.len()).filter(|engine| self.engines[*engine].serves).collect();
        for _ in 0..10 {
            let engine = serving[self.rng.below(serving.len())];
            let (misses, fails) = (self.fares)(self.value(engine));
            let missed = self.rng.unit() < misses;
            let failed = self.rng.unit() < fails;
            if let Some(arm) = arm_of(engine) {
                self.arms.add(arm, (self.now, self.now), f64::from(u8::from(missed || failed)), failed);
            }
            self.totals = (self.totals.0 + 1.0, self.totals.1 + f64::from(u8::from(missed || failed)));
        }
    }

    fn need(&self) -> Need {
        let count = self.engines.len() as f64;
        let loss = self.values().iter().map(|value| (self.fares)(*value).0).sum::<f64>() / count;
        let score = Score { requests: 1_000.0, loss, attainment: 1.0 - loss, rate: 10.0, ..Score::default() };
        Need {
            pools: vec!["all".to_owned()],
            since: (loss > 0.1).then_some(Duration::ZERO),
            score,
            target: 0.99,
            advice: None,
            ..Need::default()
        }
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.second();
        }
    }

    fn run_until(&mut self, stage: Option<Stage>) {
        for _ in 0..7_200 {
            if self.stage() == stage && self.under_way.is_none() {
                return;
            }
            self.second();
        }
        panic!("{stage:?} is not reached: {:?}, {}", self.events, self.belief());
    }

    fn second(&mut self) {
        self.now += SECOND;
        self.serve();
        let needs = [self.need()];
        let mut orders = Vec::new();
        if let Some((_, engine, value)) = self.under_way.take_if(|(end, ..)| self.now >= *end) {
            let outcome = (self.restarts)(value);
            if outcome == Restarted::Done {
                self.give(engine, value);
            }
            self.engines[engine].serves = true;
            orders.extend(self.tuner.restarted(outcome, self.now));
        }
        let look = Look {
            now: self.now,
            engines: &self.engines,
            needs: &needs,
            acting: self.acting,
            stands_back: self.stands_back,
            waits: self.waits,
            arms: &self.arms,
            totals: self.totals,
            horizon: SECOND,
        };
        if let Some(question) = self.answer_due.take() {
            let of = |loss: f64| Forecast { loss, error: 0.0, attainment: 1.0 - loss };
            let now = Some(of((self.forecast)(question.flags[&FLAG])));
            let candidates = question.candidates.iter().map(|(_, to)| Some(of((self.forecast)(*to)))).collect();
            self.tuner.answered(&Answer { now, absence: Some(0.1), candidates }, &look);
        }
        orders.extend(self.tuner.step(&look));
        self.events.extend(self.tuner.take_events().into_iter().map(|event| (event.kind, event.why)));
        for order in orders {
            match order {
                Order::Simulate(question) => self.answer_due = Some(question),
                Order::Experiment => self.arms = Arms::new(self.now),
                Order::Restart { engine, value, .. } => {
                    let backend = engine.strip_prefix("all/").unwrap();
                    let index = self.engines.iter().position(|engine| engine.backend == backend).unwrap();
                    assert!(self.under_way.is_none(), "one restart at a time");
                    self.engines[index].serves = false;
                    self.under_way = Some((self.now + RESTART, index, value));
                    self.begun.push(self.now);
                }
            }
        }
    }
}

#[test]
fn what_helps_reaches_every_engine_one_by_one() {
    let mut pool = Deployment::new(3, helps);
    pool.run(7_200);
    assert_eq!(pool.kinds(), [EventKind::Tried, EventKind::Compared, EventKind::Promoted, EventKind::Kept]);
    assert!(pool.value(0) > BEFORE && pool.values().windows(2).all(|two| two[0] == two[1]), "{:?}", pool.values());
    assert_eq!(pool.begun.len(), 3);
    let change = &pool.tuner.report().changes[0];
    assert!(change.range.0 <= 0.45 && 0.45 <= change.range.1, "{change:?}");
}

#[test]
fn what_makes_no_difference_is_taken_back_and_not_tried_again_for_hours() {
    for seed in 1..=5 {
        let mut pool = Deployment::new(2, |_| (0.5, 0.0));
        pool.rng = Rng::new(seed);
        pool.run(CLOSED.as_secs());
        let undone = pool.events.iter().filter(|(kind, _)| *kind == EventKind::Undone).count();
        let tried = pool.events.iter().filter(|(kind, _)| *kind == EventKind::Tried).count();
        // Four values lie near; forecasts that did not come true are trusted less.
        assert!((1..=4).contains(&tried) && undone == tried, "{:?}", pool.events);
        assert_eq!(pool.values(), [BEFORE; 2]);
        assert!(pool.tuner.frozen().is_none(), "a tie is no failure");
    }
}

#[test]
fn two_changes_that_fail_freeze_it_until_an_operator_resumes_it() {
    type Fault = (fn(f64) -> (f64, f64), fn(f64) -> Restarted);
    let starts: fn(f64) -> Restarted = |_| Restarted::Done;
    let refuses: fn(f64) -> Restarted =
        |value| if value == BEFORE { Restarted::Done } else { Restarted::Failed("out of memory".to_owned()) };
    let faults: [Fault; 2] =
        [(|_| (0.5, 0.0), refuses), (|value| (0.5, if value == BEFORE { 0.0 } else { 0.3 }), starts)];
    for (fares, restarts) in faults {
        let mut pool = Deployment::new(2, fares);
        pool.restarts = restarts;
        pool.run(4 * 3_600);
        assert_eq!(pool.kinds().last(), Some(&EventKind::Frozen), "{:?}", pool.events);
        assert_eq!(pool.kinds().iter().filter(|kind| **kind == EventKind::Undone).count(), 2);
        assert_eq!((pool.values(), pool.engines.iter().all(|engine| engine.serves)), (vec![BEFORE; 2], true));
        let begun = pool.begun.len();
        pool.run(3_600);
        assert_eq!(pool.begun.len(), begun, "frozen");
        assert!(pool.belief().contains("sluice tuner resume"), "{}", pool.belief());
        pool.tuner.thaw();
        pool.fares = helps;
        pool.restarts = starts;
        // What failed stays closed; a value near it is tried.
        pool.run(7_200);
        assert_eq!(pool.kinds().last(), Some(&EventKind::Kept), "{:?}", pool.events);
    }
}

#[test]
fn what_does_harm_is_taken_back_and_later_forecasts_are_trusted_less() {
    let mut pool = Deployment::new(2, |value| (if value == BEFORE { 0.5 } else { 0.9 }, 0.0));
    pool.run(4 * 3_600);
    assert_eq!(pool.kinds(), [EventKind::Tried, EventKind::Compared, EventKind::Undone], "{:?}", pool.events);
    assert_eq!(pool.values(), [BEFORE; 2]);
    assert!(pool.belief().contains("no change of a flag is expected to help"), "{}", pool.belief());
}

#[test]
fn after_a_failure_it_rests() {
    let mut pool = Deployment::new(2, |_| (0.5, 0.0));
    pool.restarts = |value| if value == BEFORE { Restarted::Done } else { Restarted::Failed("no".to_owned()) };
    pool.run(4 * 3_600);
    let [first, second] = pool.begun[..] else { panic!("{:?}", pool.begun) };
    assert!(second - first >= RESTART + rules().cool_down, "{:?}", pool.begun);
}

#[test]
fn a_gateway_that_restarts_takes_back_what_was_tried_and_finishes_what_was_promoted() {
    for stage in [Stage::Canary, Stage::Copies, Stage::Recovery, Stage::Compared, Stage::Promotion, Stage::Return] {
        let mut pool = Deployment::new(3, if stage == Stage::Return { |_| (0.5, 0.0) } else { helps });
        if stage == Stage::Recovery {
            pool.engines[0].waiting = 100;
        }
        while pool.stage() != Some(stage) {
            pool.second();
        }
        // The engine restarts, or is about to: what was ordered is not seen to its end.
        pool.run(1);
        pool.engines[0].waiting = 0;
        if let Some((_, engine, value)) = pool.under_way.take() {
            pool.give(engine, value);
            pool.engines[engine].serves = true;
        }
        let saved = serde_json::to_string(&pool.tuner.saved(pool.now)).unwrap();
        let saved: SavedEngines = serde_json::from_str(&saved).unwrap();
        pool.tuner = EngineTuner::new(rules());
        pool.arms = Arms::default();
        pool.tuner.restore(saved, pool.now);
        pool.fares = |_| (0.0, 0.0);
        pool.run(1_200);
        assert_eq!(pool.stage(), None, "{stage:?}: {:?}", pool.events);
        let all_alike = pool.values().windows(2).all(|two| two[0] == two[1]);
        let is_changed = pool.value(0) != BEFORE;
        assert_eq!((all_alike, is_changed), (true, stage == Stage::Promotion), "{stage:?}: {:?}", pool.values());
        let stood_back = pool.kinds().contains(&EventKind::StoodBack);
        assert_eq!(stood_back, stage != Stage::Promotion, "{stage:?}: {:?}", pool.events);
    }
}

#[test]
fn flags_that_an_operator_gives_an_engine_meanwhile_stay() {
    for theirs in [0, 1] {
        let mut pool = Deployment::new(2, helps);
        pool.run_until(Some(Stage::Compared));
        let canary = pool.tuner.change().unwrap().canary().to_owned();
        let index = pool.engines.iter().position(|engine| engine.backend == canary).unwrap() ^ theirs;
        pool.give(index, 48.0);
        pool.fares = |_| (0.0, 0.0);
        pool.run(300);
        assert_eq!(pool.kinds().last(), Some(&EventKind::StoodBack), "{:?}", pool.events);
        assert_eq!(pool.stage(), None);
        assert_eq!((pool.value(index), pool.value(index ^ 1)), (48.0, BEFORE));
        assert!(pool.tuner.frozen().is_none());
    }
}

#[test]
fn a_reason_to_stand_back_ends_a_change() {
    let reasons: [fn(&mut Deployment); 2] =
        [|pool| pool.stands_back = Some("an operator cordoned e1"), |pool| pool.acting = Acting::Proposes];
    for reason in reasons {
        let mut pool = Deployment::new(2, helps);
        pool.run_until(Some(Stage::Copies));
        reason(&mut pool);
        pool.run(300);
        assert_eq!((pool.stage(), pool.values()), (None, vec![BEFORE; 2]), "{:?}", pool.events);
        assert!(pool.kinds().contains(&EventKind::StoodBack));
        let begun = pool.begun.len();
        pool.run(3_600);
        assert_eq!(pool.begun.len(), begun);
    }
}

#[test]
fn it_waits_for_its_window_and_its_hour() {
    let mut pool = Deployment::new(2, helps);
    pool.waits = Some("until 22:00");
    pool.run(3_600);
    assert!(pool.begun.is_empty() && pool.belief().contains("until 22:00"), "{}", pool.belief());
    pool.waits = None;
    pool.run_until(Some(Stage::Promotion));
    pool.waits = Some("until 22:00");
    let begun = pool.begun.len();
    pool.run(600);
    assert!(pool.begun.len() <= begun + 1, "the next engine waits");
    pool.waits = None;
    pool.run(600);
    assert_eq!(pool.kinds().last(), Some(&EventKind::Kept));

    let mut pool = Deployment::new(5, helps);
    pool.tuner.set_rules(EngineRules { restarts_per_hour: 2, ..rules() });
    pool.run(4 * 3_600);
    assert_eq!((pool.begun.len(), pool.kinds().last()), (5, Some(&EventKind::Kept)));
    assert!(pool.begun.windows(3).all(|three| three[2] - three[0] >= Duration::from_secs(3_600)), "{:?}", pool.begun);
}

#[test]
fn without_leave_to_act_it_proposes_and_an_approval_begins_the_change() {
    for acting in [Acting::Proposes, Acting::WaitsForApproval] {
        let mut pool = Deployment::new(2, helps);
        pool.acting = acting;
        pool.run(3_600);
        assert_eq!(pool.kinds(), [EventKind::Proposed], "said once");
        assert!(pool.begun.is_empty());
        let id = pool.tuner.proposal().unwrap().id;
        assert!(!pool.tuner.approve(id + 1) && pool.tuner.approve(id));
        pool.acting = Acting::WaitsForApproval;
        pool.run(3_600);
        assert_eq!(pool.kinds().last(), Some(&EventKind::Kept));
    }
}

#[test]
fn a_gain_must_pay_for_the_restarts() {
    // The absence of an engine costs 0.1 for 180 s; the load is expected to stay for two hours.
    let mut pool = Deployment::new(2, helps);
    pool.forecast = |value| if value == BEFORE { 0.5 } else { 0.46 };
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("too little"), "{}", pool.belief());
    pool.forecast = |value| if value == BEFORE { 0.05 } else { 0.03 };
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("less than restarts cost"), "{}", pool.belief());
    pool.forecast = |value| if value == BEFORE { 0.5 } else { 0.5 + value };
    pool.run(2 * ASK_INTERVAL.as_secs());
    assert!(pool.begun.is_empty() && pool.belief().contains("no change"), "{}", pool.belief());
    assert!(pool.tuner.proposal().is_none());
}

#[test]
fn a_canary_that_leaves_rotation_is_taken_back() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Copies));
    let canary = pool.tuner.change().unwrap().canary().to_owned();
    let index = pool.engines.iter().position(|engine| engine.backend == canary).unwrap();
    pool.engines[index].serves = false;
    pool.run(ABSENT.as_secs() + 2);
    let (kind, why) = pool.events.last().unwrap();
    assert_eq!((*kind, why.contains("left rotation with it")), (EventKind::Undone, true), "{why}");
    pool.fares = |_| (0.0, 0.0);
    pool.run(120);
    assert_eq!(pool.values(), [BEFORE; 2]);
}

#[test]
fn copies_that_fail_keep_the_engine_from_requests() {
    let mut pool = Deployment::new(2, |value| (0.5, if value == BEFORE { 0.0 } else { 0.2 }));
    pool.run_until(Some(Stage::Copies));
    pool.run_until(Some(Stage::Return));
    assert!(!pool.kinds().contains(&EventKind::Compared), "{:?}", pool.events);
    let (_, why) = pool.events.last().unwrap();
    assert!(why.contains("copies of requests failed"), "{why}");
}

#[test]
fn changes_end_when_their_part_of_the_error_budget_is_used_up() {
    // 10 requests a second for 30 days at 99 %: 259,200 may miss, of which 50 by changes.
    let mut pool = Deployment::new(2, |value| (if value == BEFORE { 0.3 } else { 0.42 }, 0.0));
    pool.tuner.set_rules(EngineRules { error_budget: 50.0 / 259_200.0, ..rules() });
    pool.run(3_600);
    let why = &pool.events.iter().find(|(kind, _)| *kind == EventKind::Undone).unwrap().1;
    assert!(why.contains("error budget"), "{why}");
    assert_eq!(pool.values(), [BEFORE; 2]);
    let begun = pool.begun.len();
    pool.run(2 * 3_600);
    assert_eq!(pool.begun.len(), begun, "{:?}", pool.events);
    assert!(pool.belief().contains("error budget"), "{}", pool.belief());
}

#[test]
fn engines_that_it_cannot_change_safely_are_left_alone() {
    type Case = (&'static str, fn(&mut Deployment));
    let cases: [Case; 4] = [
        ("one engine", |pool| drop(pool.engines.pop())),
        ("are not known", |pool| pool.engines[1].flags = None),
        ("different flags", |pool| pool.give(1, 16.0)),
        ("does not serve", |pool| pool.engines[1].serves = false),
    ];
    for (why, change) in cases {
        let mut pool = Deployment::new(2, |_| (0.5, 0.0));
        change(&mut pool);
        for _ in 0..600 {
            pool.now += SECOND;
            let needs = [Need {
                pools: vec!["all".to_owned()],
                since: Some(Duration::ZERO),
                score: Score { loss: 0.5, rate: 10.0, ..Score::default() },
                ..Need::default()
            }];
            let look = Look {
                now: pool.now,
                engines: &pool.engines,
                needs: &needs,
                acting: Acting::Acts,
                stands_back: None,
                waits: None,
                arms: &pool.arms,
                totals: (0.0, 0.0),
                horizon: SECOND,
            };
            assert_eq!(pool.tuner.step(&look), [], "{why}");
        }
        assert!(pool.belief().contains(why), "{}", pool.belief());
    }
}
