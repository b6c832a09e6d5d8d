//! A pool whose requests miss with a probability that depends on a flag of their engine. The tuner
//! looks at it every second.

use std::time::Duration;

use crate::engines::EngineTuner;
use crate::engines::change::Stage;
use crate::engines::flags::{EngineFlag, Flags};
use crate::engines::forecast::{CandidateForecast, EngineAnswer, EngineCandidate, EngineQuestion};
use crate::engines::look::{EngineLook, EngineRules, EngineState, Need, PoolNeed, Restarted, TunerOrder};
use crate::engines::proof::Load;
use crate::event::{Acting, EventKind};
use crate::limits::PoolLimits;
use crate::limits::forecast::Forecast;
use crate::observe::arms::Arms;
use crate::observe::window::Score;
use sluice_core::base::Rng;

pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const FLAG: EngineFlag = EngineFlag::MaxNumSeqs;
pub(super) const BEFORE: f64 = 8.0;
pub(super) const LIMITS: PoolLimits =
    PoolLimits { slots: 256, prefill_tokens: Some(4_000), long: Some((5_000, 2)), range: (0, None) };
pub(super) const RESTART: Duration = Duration::from_secs(60);

pub(super) struct Deployment {
    pub(super) tuner: EngineTuner,
    pub(super) engines: Vec<EngineState>,
    pub(super) arms: Arms,
    pub(super) now: Duration,
    pub(super) rng: Rng,
    pub(super) totals: (f64, f64),
    pub(super) acting: Acting,
    pub(super) stands_back: Option<&'static str>,
    pub(super) waits: Option<&'static str>,
    /// Probabilities that a request misses an objective and that it fails, by the flag's value.
    pub(super) fares: fn(f64) -> (f64, f64),
    pub(super) forecast: fn(f64) -> f64,
    pub(super) advice: Option<(EngineFlag, bool, String)>,
    pub(super) restarts: fn(f64) -> Restarted,
    /// The restart under way: when it ends, the engine, and the new value.
    pub(super) under_way: Option<(Duration, usize, f64)>,
    pub(super) answer_due: Option<EngineQuestion>,
    pub(super) events: Vec<(EventKind, String)>,
    pub(super) forecasts: Vec<String>,
    pub(super) begun: Vec<Duration>,
    /// Requests per second.
    pub(super) rate: u32,
    /// Copies in flight on the canary.
    pub(super) at_once: u32,
    /// Whether the canary has stopped serving copies.
    pub(super) hangs: bool,
    /// The tuner's bound on the sequences of each engine.
    pub(super) bounds: Vec<Option<u32>>,
    /// Forecast rise of the loss while one engine is absent.
    pub(super) absence: f64,
    /// [`Self::absence`] once the other engines have the best change.
    pub(super) absence_with: Option<f64>,
    /// [`Self::absence`] under the limits of the best change.
    pub(super) absence_under: Option<f64>,
    pub(super) error: f64,
    pub(super) running_peak: f64,
    /// Limits without which the flag does not help, and the misses that they add on unchanged
    /// engines.
    pub(super) beside: Option<(PoolLimits, f64)>,
    /// Loss of all pools of the group; `None`: the loss of this pool.
    pub(super) loss_of_all: Option<f64>,
    pub(super) limits: PoolLimits,
    /// Whether a pool with fixed engines misses its objectives, too.
    pub(super) another_misses: bool,
}

pub(super) fn helps(value: f64) -> (f64, f64) {
    (if value <= BEFORE { 0.5 } else { 0.05 }, 0.0)
}

pub(super) fn rules() -> EngineRules {
    EngineRules {
        flags: vec![FLAG],
        missed_for: Duration::from_secs(60),
        restarts_per_hour: 12,
        cool_down: Duration::from_secs(600),
        error_budget: 0.05,
    }
}

pub(super) fn need_of(pool: &str, loss: f64, beside: Vec<PoolLimits>) -> PoolNeed {
    PoolNeed { name: pool.to_owned(), in_force: LIMITS, loss, beside }
}

impl Deployment {
    pub(super) fn new(count: usize, fares: fn(f64) -> (f64, f64)) -> Self {
        let engine = |index: usize| EngineState {
            pool: "all".to_owned(),
            backend: format!("e{index}"),
            flags: Some(Flags::from([(FLAG, BEFORE)])),
            serves: true,
            waiting: 0,
            ..EngineState::default()
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
            advice: None,
            restarts: |_| Restarted::Done,
            under_way: None,
            answer_due: None,
            events: Vec::new(),
            forecasts: Vec::new(),
            begun: Vec::new(),
            rate: 10,
            at_once: 20,
            hangs: false,
            bounds: Vec::new(),
            absence: 0.1,
            absence_with: None,
            absence_under: None,
            error: 0.0,
            running_peak: 0.0,
            beside: None,
            loss_of_all: None,
            limits: LIMITS,
            another_misses: false,
        }
    }

    pub(super) fn value(&self, engine: usize) -> f64 {
        self.engines[engine].flags.as_ref().map_or(BEFORE, |flags| flags[&FLAG])
    }

    pub(super) fn values(&self) -> Vec<f64> {
        (0..self.engines.len()).map(|engine| self.value(engine)).collect()
    }

    pub(super) fn give(&mut self, engine: usize, value: f64) {
        self.engines[engine].flags = Some(Flags::from([(FLAG, value)]));
    }

    pub(super) fn kinds(&self) -> Vec<EventKind> {
        self.events.iter().map(|(kind, _)| *kind).collect()
    }

    pub(super) fn stage(&self) -> Option<Stage> {
        self.tuner.stage()
    }

    pub(super) fn belief(&self) -> String {
        self.tuner.belief().to_owned()
    }

    fn serve(&mut self) {
        let stage = self.stage();
        let arm_of = |engine: usize| {
            let change = self.tuner.change()?;
            let backend = &self.engines[engine].backend;
            let arm = change.backends.iter().take(2).position(|other| other == backend)?;
            matches!(stage?, Stage::Copies | Stage::Compared).then_some(1 - arm)
        };
        let serving: Vec<usize> = (0..self.engines.len()).filter(|engine| self.engines[*engine].serves).collect();
        let rate = if serving.is_empty() { 0 } else { self.rate };
        for _ in 0..rate {
            let engine = serving[self.rng.below(serving.len())];
            let (misses, fails) = (self.fares)(self.value(engine));
            let limits = self.tuner.limits_in_force();
            let is_harmed = limits.is_some() && self.value(engine) == BEFORE;
            let misses = misses + self.beside.filter(|_| is_harmed).map_or(0.0, |(_, harm)| harm);
            let missed = self.rng.unit() < misses;
            let failed = self.rng.unit() < fails;
            let copied = stage == Some(Stage::Copies) && (self.hangs || self.at_once == 0);
            if let Some(arm) = arm_of(engine).filter(|arm| !(copied && *arm == 1)) {
                self.arms.add(arm, (self.now, self.now), f64::from(u8::from(missed || failed)), failed);
            }
            self.totals = (self.totals.0 + 1.0, self.totals.1 + f64::from(u8::from(missed || failed)));
        }
    }

    fn load(&mut self) {
        let canary = self.tuner.change().filter(|_| self.stage() == Some(Stage::Copies));
        let canary = canary.map(|change| change.canary().to_owned());
        for engine in &mut self.engines {
            let copies = if canary.as_ref() == Some(&engine.backend) { self.at_once } else { 0 };
            engine.copies = Load::new(copies, u64::from(copies) * 100);
        }
    }

    fn need(&self) -> Need {
        let count = self.engines.len() as f64;
        let loss = self.values().iter().map(|value| (self.fares)(*value).0).sum::<f64>() / count;
        let beside = self.beside.iter().map(|(limits, _)| *limits).collect();
        let of_all = self.loss_of_all.unwrap_or(loss);
        let score = Score { requests: 1_000.0, loss: of_all, attainment: 1.0 - loss, rate: 10.0, ..Score::default() };
        Need {
            pools: vec![PoolNeed { in_force: self.limits, ..need_of("all", loss, beside) }],
            since: (loss > 0.1).then_some(Duration::ZERO),
            score,
            target: 0.99,
            advice: self.advice.clone(),
            running_peak: self.running_peak,
            totals: self.totals,
            ..Need::default()
        }
    }

    pub(super) fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.second();
        }
    }

    pub(super) fn run_until(&mut self, stage: Option<Stage>) {
        for _ in 0..7_200 {
            if self.stage() == stage && self.under_way.is_none() {
                return;
            }
            self.second();
        }
        panic!("{stage:?} is not reached: {:?}, {}", self.events, self.belief());
    }

    /// Runs until a change is at this stage, even during a restart.
    pub(super) fn run_until_begun(&mut self, stage: Stage) {
        while self.stage() != Some(stage) {
            assert!(self.now < 7_200 * SECOND, "{stage:?} is not reached: {:?}, {}", self.events, self.belief());
            self.second();
        }
    }

    pub(super) fn run_until_asked(&mut self) {
        while self.answer_due.is_none() {
            assert!(self.now < 7_200 * SECOND, "nothing is asked: {}", self.belief());
            self.second();
        }
    }

    pub(super) fn second(&mut self) {
        self.now += SECOND;
        self.serve();
        let totals = (1e4 * self.now.as_secs_f64(), 1e4 * self.now.as_secs_f64());
        let mut another = Need { totals, ..self.need() };
        another.pools[0].name = "other".to_owned();
        let needs: Vec<Need> = self.another_misses.then_some(another).into_iter().chain([self.need()]).collect();
        self.load();
        let mut orders = Vec::new();
        if let Some((_, engine, value)) = self.under_way.take_if(|(end, ..)| self.now >= *end) {
            let outcome = (self.restarts)(value);
            if outcome == Restarted::Done {
                self.give(engine, value);
            }
            self.engines[engine].serves = true;
            orders.extend(self.tuner.restarted(outcome, self.now));
        }
        let look = EngineLook {
            now: self.now,
            engines: &self.engines,
            needs: &needs,
            acting: self.acting,
            stands_back: self.stands_back,
            waits: self.waits,
            arms: &self.arms,
            horizon: SECOND,
        };
        if let Some(question) = self.answer_due.take() {
            let of = |loss: f64| Forecast { loss, error: self.error, attainment: 1.0 - loss };
            let now = Some(of((self.forecast)(question.flags[&FLAG])));
            let helps = |one: &EngineCandidate| self.beside.is_none() || one.limits.is_some();
            let value = |one: &EngineCandidate| if helps(one) { one.to } else { BEFORE };
            let harmed = |(_, harm)| of((self.forecast)(BEFORE) + harm);
            let losses = question.candidates.iter().map(|one| (self.forecast)(one.to)).enumerate();
            let best = losses.max_by(|one, other| other.1.total_cmp(&one.1)).map(|(at, _)| at);
            let candidate = |(at, one): (usize, &EngineCandidate)| CandidateForecast {
                forecast: Some(of((self.forecast)(value(one)))),
                unchanged: one.limits.and(self.beside).map(harmed),
                absence_with: self.absence_with.filter(|_| best == Some(at)),
                absence_under: self.absence_under.filter(|_| best == Some(at)),
            };
            let candidates = question.candidates.iter().enumerate().map(candidate).collect();
            let answer = EngineAnswer { now, absence: Some(self.absence), candidates, ..EngineAnswer::default() };
            self.tuner.answered(&answer, &look);
        }
        orders.extend(self.tuner.step(&look));
        let bound = |engine| self.tuner.bound(engine, &self.engines).map(|load| load.sequences);
        self.bounds = self.engines.iter().map(bound).collect();
        let (changes, forecasts): (Vec<_>, Vec<_>) =
            self.tuner.take_events().into_iter().partition(|event| event.kind.is_change());
        self.events.extend(changes.into_iter().map(|event| (event.kind, event.why)));
        self.forecasts.extend(forecasts.into_iter().map(|event| event.why));
        for order in orders {
            match order {
                TunerOrder::Simulate(question) => self.answer_due = Some(question),
                TunerOrder::SimulateLimits(_) => unreachable!("limits are those of the fast layer"),
                TunerOrder::Configure => self.arms = Arms::new(self.now),
                TunerOrder::Restart { engine, value, .. } => {
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
