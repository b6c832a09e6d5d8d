//! The tuner of a whole configuration: one [`Controller`] for each group of pools that serve the
//! same models.
//!
//! When a limit moves, pools of a group take each other's requests, so they are judged together.

mod groups;
pub mod report;
mod view;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::groups::{Group, HORIZON, acting, groups, simulates};
use crate::engines::EngineTuner;
use crate::engines::advice::advice;
use crate::engines::change::{EXPERIMENT, EngineChange};
use crate::engines::flags::{EngineFlag, Flags};
use crate::engines::forecast::EngineAnswer;
use crate::engines::look::{EngineLook, EngineRules, EngineState, Need, PoolNeed, Restarted, TunerOrder};
use crate::engines::saved::SavedEngines;
use crate::event::Event;
use crate::limits::controller::{Action, Controller};
use crate::limits::forecast::{LimitsAnswer, LimitsQuestion};
use crate::limits::{Limits, PoolLimits};
use crate::observe::Observer;
use crate::observe::arms::Arms;
use crate::observe::engines::{EngineFacts, EngineSample, EngineWatch};
use sluice_config::{Config, Pods, Pool, TunerMode};
use sluice_gateway::pool::{PoolView, TrialBound};

/// Tunes the limits of all pools and the flags of their engines.
#[derive(Debug)]
pub struct Tuner {
    pub(crate) mode: TunerMode,
    pub(crate) configured: Limits,
    /// Pools, models, backends and objectives as text, on which found limits depend.
    pub(crate) context: String,
    pub(crate) groups: Vec<Group>,
    pub(crate) engines: EngineTuner,
    /// Flags of all engines when last seen without a change under way.
    flags: BTreeMap<String, Option<Flags>>,
    pub(crate) frozen: Option<String>,
    pub(crate) hindrance: Option<&'static str>,
    observed: Vec<Event>,
}

/// State that survives a restart of the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    context: String,
    configured: Limits,
    kept: Limits,
    frozen: Option<String>,
    #[serde(default)]
    engines: SavedEngines,
}

impl Tuner {
    /// A tuner of the pools of a configuration, which `observer` begins to observe.
    pub fn new(config: &Config, observer: &Observer, now: Duration) -> Self {
        observer.configure(config, now);
        let configured = Limits::of(config);
        let mode = config.tuner.mode;
        let groups =
            groups(&config.pools).into_iter().map(|pools| Group::new(pools, config, &configured, now)).collect();
        let engines = EngineTuner::new(EngineRules::of(config));
        Self {
            mode,
            configured,
            context: context(config),
            groups,
            engines,
            flags: BTreeMap::new(),
            frozen: None,
            hindrance: None,
            observed: Vec::new(),
        }
    }

    /// Prepares a configuration that is about to be in force: puts the limits found so far into it
    /// if nothing that they depend on has changed. Otherwise begins anew.
    pub fn configure(&mut self, config: &mut Config, observer: &Observer, now: Duration) {
        let is_same = self.context == context(config) && self.configured == Limits::of(config);
        self.engines.set_rules(EngineRules::of(config));
        if is_same && config.tuner.mode != TunerMode::Off {
            self.mode = config.tuner.mode;
            self.follow_mode(observer, now);
            self.groups.iter_mut().for_each(|group| group.controller.set_simulates(simulates(config)));
            self.put(config);
        } else {
            self.begin_anew(config, observer, now);
        }
    }

    /// Begins anew. A change of engine flags under way is undone: the changed engines return to the
    /// old flags.
    fn begin_anew(&mut self, config: &Config, observer: &Observer, now: Duration) {
        let mut engines = std::mem::replace(&mut self.engines, EngineTuner::new(EngineRules::of(config)));
        self.engines_ordered(&engines.stand_back("the configuration has changed", now), observer, now);
        engines.forget();
        *self = Self { frozen: self.frozen.take(), engines, ..Self::new(config, observer, now) };
        self.follow_mode(observer, now);
    }

    /// Puts limits and the tuner's experiment into a configuration with the same pools.
    pub fn put(&self, config: &mut Config) {
        self.limits().put(config);
        config.experiments.retain(|experiment| experiment.name != EXPERIMENT);
        let own = self.engines.experiment(config);
        // The tuner's experiment comes first, because a request takes part in the first experiment
        // that it fits.
        config.experiments.splice(0..0, own);
    }

    /// Takes over the state of an earlier gateway. Returns whether pools, limits and objectives are
    /// unchanged. Only then are the found limits taken over.
    pub fn restore(&mut self, saved: Saved, observer: &Observer, now: Duration) -> bool {
        let is_same = saved.context == self.context && saved.configured == self.configured;
        if is_same && self.mode != TunerMode::Off && saved.kept.0.len() == self.configured.0.len() {
            for Group { pools, controller, .. } in &mut self.groups {
                controller.restore(Limits(pools.iter().map(|at| saved.kept.0[*at]).collect()), now);
                observer.begin(pools, now);
            }
        }
        self.frozen = saved.frozen;
        self.engines.restore(saved.engines, is_same, now);
        self.follow_mode(observer, now);
        is_same
    }

    /// The state for a later gateway.
    pub fn saved(&self, now: Duration) -> Saved {
        Saved {
            context: self.context.clone(),
            configured: self.configured.clone(),
            kept: self.gathered(Controller::kept_limits),
            frozen: self.frozen.clone(),
            engines: self.engines.saved(now),
        }
    }

    /// Looks at the pools, once a second. Returns whether other [`limits`](Self::limits) must be
    /// put in force.
    pub fn step(&mut self, view: &[PoolView], observer: &Observer, now: Duration) -> bool {
        if self.mode == TunerMode::Off {
            return false;
        }
        observer.sample(view, now);
        let mut changed = false;
        let changing = self.engines.change().map(|change| change.pool.clone());
        let mut ended = Vec::new();
        for (at, Group { pools, controller, has_objectives, .. }) in self.groups.iter_mut().enumerate() {
            if !*has_objectives {
                continue;
            }
            if changing.as_ref().is_some_and(|pool| controller.names().contains(pool)) {
                controller.pause(now);
                observer.begin(pools, now);
                continue;
            }
            let action = controller.step(now, &observer.window(pools));
            changed |= carry_out(&action, pools, observer, now);
            if action == Action::Renew {
                ended.push(at);
            }
        }
        let observed: Vec<Event> = ended.into_iter().map(|at| self.observed(&self.groups[at], now)).collect();
        self.observed.extend(observed);
        changed
    }

    /// Looks at the engines, after [`step`](Self::step). `waits`: why no engine may be restarted
    /// now.
    pub fn step_engines(
        &mut self,
        engines: &[EngineState],
        waits: Option<&str>,
        observer: &Observer,
        now: Duration,
    ) -> Vec<TunerOrder> {
        let (arms, needs) = (observer.arms(), self.needs(observer));
        let before = self.engines.limits_in_force();
        let mut orders = self.engines.step(&self.look(engines, &needs, waits, &arms, now));
        let others = self.engines.limits_in_force() != before;
        if (self.end_trial(observer, now) || others) && !orders.contains(&TunerOrder::Configure) {
            orders.push(TunerOrder::Configure);
        }
        for Group { controller, .. } in &mut self.groups {
            orders.extend(controller.question(|| observer.recent()).map(TunerOrder::SimulateLimits));
        }
        self.after_engines(engines, orders, observer, now)
    }

    /// Undoes a trial of limits in a pool whose engines begin to change, because that was simulated
    /// without the trial. Returns the same as [`step`](Self::step).
    fn end_trial(&mut self, observer: &Observer, now: Duration) -> bool {
        let Some(pool) = self.engines.change().map(|change| &change.pool) else { return false };
        let tries = |group: &&mut Group| group.controller.names().contains(pool) && group.controller.is_trying();
        let Some(Group { pools, controller, .. }) = self.groups.iter_mut().find(tries) else { return false };
        let action = controller.stand_back(now, "a change of its engines has begun");
        carry_out(&action, pools, observer, now)
    }

    /// Takes the answer about limits. Returns the same as [`step`](Self::step).
    pub fn limits_answered(
        &mut self,
        asked: &LimitsQuestion,
        answer: &LimitsAnswer,
        observer: &Observer,
        now: Duration,
    ) -> bool {
        let of = |group: &&mut Group| group.controller.names() == asked.pools;
        let Some(group) = self.groups.iter_mut().find(of) else { return false };
        let action = group.controller.answered(&asked.candidates, answer, now);
        carry_out(&action, &group.pools, observer, now)
    }

    /// Simulates limits even if the configuration describes no engine.
    pub fn simulate_limits(&mut self) {
        self.groups.iter_mut().for_each(|group| group.controller.set_simulates(true));
    }

    /// Takes the answer about engines. Returns the same as [`step`](Self::step).
    pub fn answered(
        &mut self,
        answer: &EngineAnswer,
        engines: &[EngineState],
        waits: Option<&str>,
        observer: &Observer,
        now: Duration,
    ) -> bool {
        let (arms, needs) = (observer.arms(), self.needs(observer));
        let look = self.look(engines, &needs, waits, &arms, now);
        let before = self.engines.limits_in_force();
        self.engines.answered(answer, &look);
        let others = self.engines.limits_in_force() != before;
        if let Some((pool, limits, why)) = self.engines.suggested.take() {
            for Group { controller, .. } in &mut self.groups {
                if let Some(at) = controller.place_of(&pool) {
                    controller.suggest(at, limits, &why);
                }
            }
        }
        self.end_trial(observer, now) || others
    }

    /// A guardrail or an operator has stopped the experiment.
    pub fn experiment_stopped(&mut self, why: &str, observer: &Observer, now: Duration) -> Vec<TunerOrder> {
        let orders = self.engines.experiment_stopped(why, now);
        self.engines_ordered(&orders, observer, now);
        orders
    }

    /// Takes the result of a restart.
    pub fn restarted(&mut self, outcome: Restarted, observer: &Observer, now: Duration) -> Vec<TunerOrder> {
        let orders = self.engines.restarted(outcome, now);
        self.engines_ordered(&orders, observer, now);
        orders
    }

    /// The change of engines under way.
    pub fn engine_change(&self) -> Option<&EngineChange> {
        self.engines.change()
    }

    /// [`EngineTuner::trials`], in force with the orders of [`step_engines`](Self::step_engines).
    pub fn trials(&self, engines: &[EngineState]) -> Vec<Option<TrialBound>> {
        self.engines.trials(engines)
    }

    /// Makes the observer begin or end the comparison of an experiment that begins or ends.
    fn engines_ordered(&mut self, orders: &[TunerOrder], observer: &Observer, now: Duration) {
        if !orders.contains(&TunerOrder::Configure) {
            return;
        }
        let from = self.engines.compares_from(now);
        observer.compare(from.map(|_| EngineChange::labels()), from.unwrap_or(now));
    }

    fn after_engines(
        &mut self,
        engines: &[EngineState],
        mut orders: Vec<TunerOrder>,
        observer: &Observer,
        now: Duration,
    ) -> Vec<TunerOrder> {
        self.engines_ordered(&orders, observer, now);
        self.adopt(observer, now);
        for order in &mut orders {
            if let TunerOrder::Simulate(question) = order {
                question.requests = observer.recent();
            }
        }
        let of = |engine: &EngineState| (format!("{}/{}", engine.pool, engine.backend), engine.flags.clone());
        let flags: BTreeMap<_, _> = engines.iter().map(of).collect();
        if self.engines.change().is_none() && std::mem::replace(&mut self.flags, flags.clone()) != flags {
            // With other flags, a change that failed may help.
            self.groups.iter_mut().for_each(|group| group.controller.forget_failures());
        }
        orders
    }

    fn look<'a>(
        &self,
        engines: &'a [EngineState],
        needs: &'a [Need],
        waits: Option<&'a str>,
        arms: &'a Arms,
        now: Duration,
    ) -> EngineLook<'a> {
        let horizon = self.groups.iter().map(|group| group.controller.horizon()).max().unwrap_or(HORIZON);
        EngineLook {
            now,
            engines,
            needs,
            acting: acting(if self.frozen.is_some() { TunerMode::Advise } else { self.mode }),
            stands_back: self.hindrance,
            waits,
            arms,
            horizon,
        }
    }

    pub(crate) fn facts(&self, group: &Group) -> Vec<(String, EngineFacts)> {
        let most = |name: &String| self.flags.get(name)?.as_ref()?.get(&EngineFlag::MaxNumSeqs).copied();
        let facts = |name: &String, watch: &EngineWatch| EngineFacts { max_num_seqs: most(name), ..watch.facts() };
        group.engines.iter().map(|(name, watch)| (name.clone(), facts(name, watch))).collect()
    }

    pub(crate) fn needs(&self, observer: &Observer) -> Vec<Need> {
        let need = |group: &Group| {
            let (controller, facts) = (&group.controller, self.facts(group));
            let pool = |at: usize| PoolNeed {
                name: controller.names()[at].clone(),
                in_force: controller.kept_limits().0[at],
                loss: controller.loss_of(at),
                beside: controller.limits_beside(at, &self.configured.0[group.pools[at]]),
            };
            Need {
                pools: controller.places_by_loss().into_iter().map(pool).collect(),
                since: controller.stuck_since(),
                load_since: controller.load_since(),
                limits: controller.kept_limits().clone(),
                score: *controller.latest_score(),
                target: controller.target(),
                totals: observer.totals(controller.names()),
                running_peak: facts.iter().map(|(_, facts)| facts.running_peak).fold(0.0, f64::max),
                advice: advice(controller.experience(), &facts),
            }
        };
        self.groups.iter().filter(|group| group.has_objectives).map(need).collect()
    }

    /// Whether there are objectives (unless the mode is off), or a change of engines.
    pub fn has_work(&self) -> bool {
        let tunes = self.mode != TunerMode::Off && self.groups.iter().any(|group| group.has_objectives);
        tunes || self.engines.change().is_some()
    }

    /// Notes a sample of an engine; `None`: it has no metrics page.
    pub fn note_engine(&mut self, pool: &str, backend: &str, sample: Option<EngineSample>, now: Duration) {
        let of_pool = |group: &&mut Group| group.controller.names().iter().any(|name| name == pool);
        if let Some(group) = self.groups.iter_mut().find(of_pool) {
            group.engines.entry(format!("{pool}/{backend}")).or_default().add(now, sample);
        }
    }

    /// The limits that should be in force.
    pub fn limits(&self) -> Limits {
        let mut all = self.gathered(Controller::limits);
        if let Some((pool, limits)) = self.engines.limits_in_force() {
            let place = |group: &Group| Some(group.pools[group.controller.place_of(&pool)?]);
            // The boundary belongs to both neighbours.
            let put = |own: &mut PoolLimits| *own = PoolLimits { range: own.range, ..limits };
            self.groups.iter().filter_map(place).for_each(|at| put(&mut all.0[at]));
        }
        all
    }

    fn adopt(&mut self, observer: &Observer, now: Duration) {
        let Some((pool, limits)) = self.engines.adopted.take() else { return };
        for Group { pools, controller, .. } in &mut self.groups {
            if let Some(at) = controller.place_of(&pool) {
                carry_out(&controller.adopt(at, limits, now), pools, observer, now);
            }
        }
    }

    fn gathered(&self, of: impl Fn(&Controller) -> &Limits) -> Limits {
        let mut all = self.configured.clone();
        for Group { pools, controller, .. } in &self.groups {
            for (at, limits) in pools.iter().zip(&of(controller).0) {
                all.0[*at] = *limits;
            }
        }
        all
    }

    /// Undoes a trial and makes no changes, for the reason `why`; `None`: resumes. Returns the same
    /// as [`step`](Self::step).
    pub fn freeze(&mut self, why: Option<String>, observer: &Observer, now: Duration) -> bool {
        if why.is_none() {
            self.engines.thaw();
        }
        self.frozen = why;
        self.follow_mode(observer, now)
    }

    /// While there is a reason `why`, makes no changes. Undoes a trial. Returns whether other
    /// [`limits`](Self::limits) must be put in force.
    pub fn hinder(&mut self, why: Option<&'static str>, observer: &Observer, now: Duration) -> bool {
        self.hindrance != why && {
            self.hindrance = why;
            self.follow_mode(observer, now)
        }
    }

    /// Begins anew with the configured limits.
    pub fn reset(&mut self, config: &Config, observer: &Observer, now: Duration) {
        let mut config = config.clone();
        self.configured.put(&mut config);
        let resets = self.resets(now);
        self.begin_anew(&config, observer, now);
        self.observed = resets;
    }

    /// The mode in the configuration in force.
    pub fn mode(&self) -> TunerMode {
        self.mode
    }

    /// Approves a proposal. Returns whether it exists.
    pub fn approve(&mut self, id: &str) -> bool {
        if let Some(number) = id.strip_prefix('e') {
            return number.parse().is_ok_and(|number| self.engines.proposals.approve(number));
        }
        let (group, number) = id.split_once('.').unwrap_or(("1", id));
        let (Ok(group), Ok(number)) = (group.parse::<usize>(), number.parse()) else { return false };
        let group = group.checked_sub(1).and_then(|at| self.groups.get_mut(at));
        group.is_some_and(|group| group.controller.proposals.approve(number))
    }

    fn follow_mode(&mut self, observer: &Observer, now: Duration) -> bool {
        let only_advises = self.frozen.is_some() || self.hindrance.is_some();
        let acting = acting(if only_advises { TunerMode::Advise } else { self.mode });
        let mut changed = false;
        for Group { pools, controller, .. } in &mut self.groups {
            let action = controller.set_acting(acting, now);
            changed |= carry_out(&action, pools, observer, now);
        }
        changed
    }

    /// The events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        let mut events: Vec<Event> = self.groups.iter_mut().flat_map(|group| group.controller.take_events()).collect();
        events.extend(self.engines.take_events());
        events.append(&mut self.observed);
        events
    }
}

/// Begins a window if the action asks for it. Returns whether other limits must be put in force.
fn carry_out(action: &Action, pools: &[usize], observer: &Observer, now: Duration) -> bool {
    if *action != Action::Wait {
        observer.begin(pools, now);
    }
    *action == Action::Apply
}

/// Names, models, backends and objectives of the pools, and classes with own objectives: the best
/// limits depend on them.
fn context(config: &Config) -> String {
    let pool = |pool: &Pool| {
        let backends: Vec<_> = pool.backends.iter().map(|backend| backend.target.endpoint().to_string()).collect();
        // Pods come and go, so their addresses are left out.
        let pods = |pods: &Pods| format!("{} {:?} {} {:?}", pods.selector, pods.namespace, pods.port, pods.statefulset);
        let backends = pool.kubernetes.as_ref().map_or(format!("{backends:?}"), pods);
        format!("{} {:?} {backends} {:?}", pool.name, pool.models, pool.slo)
    };
    let judged = config.classes.iter().filter(|class| !class.slo.objectives().is_empty());
    config.pools.iter().map(pool).chain(judged.map(|class| format!("{class:?}"))).collect::<Vec<_>>().join("\n")
}
