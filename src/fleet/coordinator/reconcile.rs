//! Works towards what the configuration asks for, from whatever is there.
//!
//! One task. It looks at the engines that are kept and at those that were let go, does what can be done now, and looks again
//! when something has changed: so it does not matter in which order reloads, crashes and commands come, and a newer
//! configuration needs no memory of an older one.
//!
//! - An engine that is no longer configured is let go. It drains, stops, and is in the way of whatever would run on its
//!   device, its port or under its name until its end is confirmed. One that cannot be ended stays in the way, is tried again
//!   every [`AGAIN`], and what waits for it says so: two engines must not share a device.
//! - An engine that is configured and not kept is taken on as soon as nothing is in its way.
//! - An engine that heads for something else than the configuration says is changed, one at a time ([`roll`](super::rollout)).
//!   The first that does not come to serve ends that until another configuration is applied; engines that moved to another
//!   place are gone on with, since where they were they get no requests.
//! - A backend that somebody else runs is open, unless an engine of ours still has its place.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::rollout::{self, End};
use super::{EngineHandle, EngineView, Fleet, Wanted};
use crate::driver::StopRules;
use crate::driver::process::is_running;
use crate::engine::context::{EngineContext, EngineSpec};
use crate::engine::lifecycle::Step;
use crate::engine::view;
use sluice_gateway::pool::Cordon;

/// Between two looks while something is on its way.
const LOOK: Duration = Duration::from_millis(200);
/// Between two looks while nothing is: what others did meanwhile is found too.
const IDLE: Duration = Duration::from_secs(5);
/// Between two attempts to end an engine that could not be ended.
pub(super) const AGAIN: Duration = Duration::from_secs(10);

/// What is said of an engine in whose way another one is that the configuration wants elsewhere.
const MOVES: &str = "has to move first";

/// Before an engine is tried again that could not be changed for the moment.
const REST: Duration = Duration::from_secs(3);

/// An engine that was let go and may still run.
#[derive(Debug)]
pub(super) struct Departing {
    name: String,
    /// Absent for one of an earlier gateway, of which no more than the name is known.
    context: Option<Arc<EngineContext>>,
}

impl Departing {
    pub(super) fn of(context: &Arc<EngineContext>) -> Self {
        Self { name: context.spec.load().name.to_string(), context: Some(Arc::clone(context)) }
    }

    pub(super) fn unknown(name: &str) -> Self {
        Self { name: name.to_owned(), context: None }
    }

    pub(super) fn is_unknown(&self, name: &str) -> bool {
        self.context.is_none() && self.name == name
    }

    /// Of whatever shares a device, a port or a name with it. Of an unknown one no device is known, so it is in everybody's
    /// way who does not run already.
    fn is_in_the_way_of(&self, spec: &EngineSpec) -> bool {
        match &self.context {
            Some(context) => context.spec.load().is_in_the_way_of(spec),
            None => self.name == *spec.name || !is_running(&spec.rules.state, &spec.name),
        }
    }

    pub(super) fn view(&self) -> Option<EngineView> {
        self.context.as_deref().map(view::of)
    }

    /// Why something waits for it.
    fn said(&self) -> String {
        let why = self.context.as_ref().and_then(|context| {
            let state = context.state.lock();
            (state.life.step == Step::Hold).then(|| state.life.why.clone().unwrap_or_default())
        });
        match why {
            Some(why) => format!("{} cannot be ended, and may be on its device: {why}", self.name),
            None => format!("{} is on its way out", self.name),
        }
    }
}

/// Who keeps an engine from being started, for people: one that departs, or one that still has to move away itself.
pub(super) fn in_the_way(
    wanted: &Wanted,
    handles: &BTreeMap<String, EngineHandle>,
    departing: &[Departing],
    spec: &EngineSpec,
) -> Option<String> {
    if let Some(other) = departing.iter().find(|other| other.is_in_the_way_of(spec)) {
        return Some(other.said());
    }
    let other = handles.iter().find(|(name, handle)| has_to_move_for(wanted, name, &handle.context, spec));
    other.map(|(name, _)| format!("{name} {MOVES}"))
}

/// Whether a kept engine is where another one is to be, and is itself to be elsewhere. Two that are to share a device do not
/// wait for each other.
fn has_to_move_for(wanted: &Wanted, name: &str, context: &EngineContext, spec: &EngineSpec) -> bool {
    let Some(next) = wanted.engines.iter().find(|wanted| *wanted.name == *name) else { return false };
    let moves = next.identity != context.identity && *spec.name != *name;
    moves && context.spec.load().is_where(spec) && !next.is_where(spec)
}

/// Whether an engine that was let go waits for another one to move, whose turn has to come for that.
pub(super) fn waits_for_a_move(fleet: &Fleet, spec: &EngineSpec) -> bool {
    let (wanted, handles, departing) = (fleet.wanted.lock(), fleet.handles.lock(), fleet.departing.lock());
    in_the_way(&wanted, &handles, &departing, spec).is_some_and(|why| why.ends_with(MOVES))
}

/// Whether a wanted engine waits for this one to move.
pub(super) fn is_waited_for(fleet: &Fleet, context: &EngineContext) -> bool {
    let (wanted, handles) = (fleet.wanted.lock(), fleet.handles.lock());
    let name = context.spec.load().name.to_string();
    let mut missing = wanted.engines.iter().filter(|spec| !handles.contains_key(&*spec.name));
    missing.any(|spec| has_to_move_for(&wanted, &name, context, spec))
}

/// Engines that are configured and wait for others to be gone, and what for.
pub(super) fn waiting(fleet: &Fleet) -> Vec<(String, String)> {
    let (wanted, handles, departing) = (fleet.wanted.lock(), fleet.handles.lock(), fleet.departing.lock());
    let missing = wanted.engines.iter().filter(|spec| !handles.contains_key(&*spec.name));
    let why = |spec: &EngineSpec| in_the_way(&wanted, &handles, &departing, spec);
    missing.filter_map(|spec| Some((spec.name.to_string(), why(spec)?))).collect()
}

/// Places of backends that no keeper looks after.
pub(super) fn tidy(fleet: &Fleet) {
    let (wanted, handles, departing) = (fleet.wanted.lock(), fleet.handles.lock(), fleet.departing.lock());
    for spec in &wanted.engines {
        let kept = handles.get(&*spec.name).is_some_and(|handle| handle.context.spec.load().backend == spec.backend);
        if !kept {
            // Before the prober can find another server on that port.
            fleet.admission.set_cordon(spec.backend, Cordon::Starting);
        }
    }
    for other in &wanted.others {
        let leaving = |departing: &Departing| {
            let context = departing.context.as_ref();
            context.is_some_and(|context| context.spec.load().address.endpoint == other.endpoint)
        };
        let still_ours = departing.iter().any(leaving);
        fleet.admission.set_cordon(other.backend, if still_ours { Cordon::Starting } else { Cordon::Open });
        fleet.admission.set_ceiling(other.backend, None);
    }
}

/// What is being done to changed engines, for one configuration.
#[derive(Debug, Default)]
struct Roll {
    number: u64,
    /// Those that could not be changed.
    failed: BTreeSet<String>,
    /// Those that were. Who has to be changed again has gone back by itself, because it crashed before it settled.
    done: BTreeSet<String>,
    under_way: Option<Turn>,
    /// Nothing is begun before this moment.
    rest: Option<Instant>,
}

/// An engine that is being changed, and for which configuration.
#[derive(Debug)]
struct Turn {
    number: u64,
    name: String,
    task: JoinHandle<Result<(), End>>,
}

pub(super) async fn reconcile(fleet: Arc<Fleet>) {
    let mut roll = Roll::default();
    while !fleet.is_closing() {
        let (number, engines) = {
            let wanted = fleet.wanted.lock();
            (wanted.number, wanted.engines.clone())
        };
        if roll.number != number {
            // What is under way notices by itself.
            (roll.number, roll.failed, roll.done) = (number, BTreeSet::new(), BTreeSet::new());
        }
        let kept: Vec<String> = fleet.handles.lock().keys().cloned().collect();
        for name in kept.iter().filter(|name| !engines.iter().any(|spec| *spec.name == ***name)) {
            fleet.let_go(name, Some(number));
        }
        let mut missing = false;
        for spec in engines.iter().filter(|spec| !kept.contains(&spec.name.to_string())) {
            missing |= !fleet.take_on(&spec.name);
        }
        tidy(&fleet);
        let rolling = roll.go_on(&fleet, &engines).await;
        let pause = if missing || rolling { LOOK } else { IDLE };
        let _ = timeout(pause, fleet.look.notified()).await;
    }
    if let Some(turn) = roll.under_way {
        turn.task.abort();
    }
}

impl Roll {
    /// Whether there is more to do.
    async fn go_on(&mut self, fleet: &Arc<Fleet>, engines: &[EngineSpec]) -> bool {
        if let Some(turn) = self.under_way.take() {
            if !turn.task.is_finished() {
                self.under_way = Some(turn);
                return true;
            }
            let Turn { number, name, task } = turn;
            match task.await {
                // How it went says nothing about the configuration that is in force now.
                _ if number != self.number => {}
                Ok(Ok(())) => {
                    tracing::info!(backend = name, "runs with its new configuration");
                    self.done.insert(name);
                }
                Ok(Err(End::Outdated)) => {}
                Ok(Err(End::Again)) => self.rest = Some(Instant::now() + REST),
                Ok(Err(End::Failed(why))) => {
                    tracing::error!(backend = name, "keeps its old configuration, as do those after it: {why}");
                    self.failed.insert(name);
                }
                Err(error) => {
                    tracing::error!(backend = name, %error, "a change of configuration failed");
                    self.failed.insert(name);
                }
            }
        }
        if self.rest.is_some_and(|until| Instant::now() < until) {
            return true;
        }
        let Some(next) = engines.iter().find(|spec| self.is_due(fleet, spec)) else {
            return engines
                .iter()
                .any(|spec| fleet.handle(&spec.name).is_some_and(|(context, _)| !context.state.lock().recovered));
        };
        if self.done.contains(&*next.name) {
            let name = &next.name;
            tracing::error!(backend = %name, "went back to what was good before; its configuration is not tried again until the next reload");
            self.failed.insert(name.to_string());
            return true;
        }
        let task = fleet.tasks.spawn(rollout::one(Arc::clone(fleet), self.number, next.clone()));
        self.under_way = Some(Turn { number: self.number, name: next.name.to_string(), task });
        true
    }

    /// Whether an engine is to be changed now.
    fn is_due(&self, fleet: &Fleet, spec: &EngineSpec) -> bool {
        let Some((context, _)) = fleet.handle(&spec.name) else { return false };
        let moves = context.spec.load().backend != spec.backend;
        let state = context.state.lock();
        let differs = context.identity != spec.identity || state.life.heads_for().configured != spec.configured;
        let may = if moves { !self.failed.contains(&*spec.name) } else { self.failed.is_empty() };
        state.recovered && differs && may
    }
}

/// The keeper of an engine that was let go has ended. Its engine is gone, or is tried to be ended until it is.
pub(super) async fn see_off(fleet: &Arc<Fleet>, context: &Arc<EngineContext>) {
    let name = context.spec.load().name.to_string();
    while context.step() != Step::Off {
        tracing::error!(
            backend = name,
            "its engine is not known to be gone: {}",
            context.state.lock().life.why.clone().unwrap_or_default()
        );
        sleep(AGAIN).await;
        if fleet.is_closing() {
            break;
        }
        match context.driver.stop(StopRules::default()).await {
            Ok(_) => context.state.lock().life.step = Step::Off,
            Err(failure) => context.state.lock().life.why = Some(failure.to_string()),
        }
        if let Err(error) = context.write().await {
            tracing::error!(backend = name, %error, "the journal cannot be written");
        }
    }
    let again = fleet.wanted.lock().engines.iter().any(|spec| *spec.name == *name);
    if context.step() == Step::Off && !again {
        context.journal.lock().forget(&name);
    }
    let is_it = |departing: &Departing| departing.context.as_ref().is_some_and(|other| Arc::ptr_eq(other, context));
    fleet.departing.lock().retain(|departing| !is_it(departing));
    tidy(fleet);
    fleet.look.notify_one();
}
