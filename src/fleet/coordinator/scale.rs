//! Makes as many engines of a pool run as autoscaling wants.
//!
//! Called once a second. Engines that serve or will soon serve are available:
//!
//! | available | action |
//! |---|---|
//! | too few | engines that drain for a rest serve again; then resting ones start, in order |
//! | too many not yet serving | the last of them are stopped |
//! | too many serving | the last is drained and stopped, if the others have room ([`preflight`]) |
//!
//! Of a StatefulSet, the pods with the highest numbers go first, in any state, because the set
//! removes these pods. They are drained here, and then the caller lowers the replicas.
//!
//! An engine that an operator drained, that waits for an operator (`Hold`), or that is in backoff
//! is not available. An engine in backoff is stopped when enough others are available. While a
//! rollout waits for room, one more engine is wanted, but a StatefulSet gets no further pod. An
//! engine whose drain takes longer than `fleet.drain` serves on. After the same time again, another
//! engine is tried.
//!
//! [`preflight`]: crate::engine::preflight

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::change::ensure_no_change;
use super::registry::Registry;
use crate::engine::context::EngineContext;
use crate::engine::engine_task::EngineHandle;
use crate::engine::lifecycle::{ChangeRefused, RestartBlocked, Step};
use crate::engine::preflight::check_replacement;
use sluice_config::Target;
use sluice_core::base::BackendId;
use sluice_gateway::pool::Cordon;

/// Pause after an engine could not be stopped.
const RETRY: Duration = Duration::from_secs(3);

/// The state of an engine, as far as it matters for autoscaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// In rotation.
    Serves,
    /// Will serve without an operator; `stoppable`: may be stopped before that.
    Comes { stoppable: bool },
    /// Waits for the next attempt after a failure.
    BacksOff,
    /// Is being drained or stopped, because fewer are wanted.
    Leaves,
    /// Stopped, because fewer are wanted.
    Rests,
    /// Not available: drained by an operator, or waiting for one.
    Away,
}

/// The positions of engines to start and to stop. Serving engines are stopped one at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Decision {
    wake: Vec<usize>,
    rest: Vec<usize>,
}

/// Decides for a pool of which `wanted` engines should run.
fn decide(engines: &[Standing], wanted: usize) -> Decision {
    let at = |is: fn(&Standing) -> bool| (0..engines.len()).filter(|at| is(&engines[*at])).collect::<Vec<usize>>();
    let serving = at(|engine| *engine == Standing::Serves);
    let coming = at(|engine| matches!(engine, Standing::Comes { .. }));
    let available = serving.len() + coming.len();
    if available < wanted {
        let mut asleep = at(|engine| *engine == Standing::Leaves);
        asleep.extend(at(|engine| *engine == Standing::Rests));
        asleep.truncate(wanted - available);
        return Decision { wake: asleep, rest: Vec::new() };
    }
    let mut rest = at(|engine| *engine == Standing::BacksOff);
    let stoppable = at(|engine| *engine == Standing::Comes { stoppable: true });
    rest.extend(stoppable.into_iter().rev().take(available - wanted));
    // An engine that does not serve yet is no reason to stop one that serves.
    rest.extend(serving.iter().rev().take(serving.len().saturating_sub(wanted)));
    Decision { wake: Vec::new(), rest }
}

/// Decides for pods of a StatefulSet: those with numbers below `wanted` should run.
fn decide_pods(pods: &[(u32, Standing)], wanted: usize) -> Decision {
    let at = |is: &dyn Fn(usize, Standing) -> bool| {
        let mut found: Vec<usize> = (0..pods.len()).filter(|at| is(pods[*at].0 as usize, pods[*at].1)).collect();
        found.sort_by_key(|at| std::cmp::Reverse(pods[*at].0));
        found
    };
    let stoppable =
        |standing| matches!(standing, Standing::Serves | Standing::BacksOff | Standing::Comes { stoppable: true });
    Decision {
        wake: at(&|number, standing| number < wanted && matches!(standing, Standing::Leaves | Standing::Rests)),
        rest: at(&|number, standing| number >= wanted && stoppable(standing)),
    }
}

fn pod_number(context: &EngineContext) -> Option<u32> {
    let spec = context.spec();
    let Target::Pod(_, engine) = &spec.target else { return None };
    engine.pod.strip_prefix(&*engine.statefulset)?.strip_prefix('-')?.parse().ok()
}

/// The replicas that the set needs to keep every pod that serves or may have requests.
fn replicas_in_use(engines: &[EngineHandle]) -> u32 {
    let in_use =
        |context: &Arc<EngineContext>| !matches!(context.step(), Step::Idle | Step::Asleep | Step::Hold | Step::Off);
    let contexts = engines.iter().map(|engine| &engine.context).filter(|context| in_use(context));
    contexts.filter_map(|context| Some(pod_number(context)? + 1)).max().unwrap_or(0)
}

fn standing(context: &EngineContext, drained: &BTreeSet<BackendId>) -> Standing {
    let is_drained = drained.contains(&context.spec().backend);
    let state = context.state.lock();
    let life = &state.lifecycle;
    match life.step {
        _ if is_drained || life.leaving => Standing::Away,
        Step::Hold | Step::Off => Standing::Away,
        Step::Idle | Step::Asleep => Standing::Rests,
        Step::Drain | Step::Stop | Step::Sleep if life.resting => Standing::Leaves,
        Step::Backoff => Standing::BacksOff,
        Step::Ramp | Step::Serve if !life.withdrawn => Standing::Serves,
        step => {
            let starts = matches!(step, Step::Start | Step::Adapters | Step::Golden | Step::WarmUp);
            Standing::Comes { stoppable: starts && life.change.is_none() && !life.adopted }
        }
    }
}

/// Whether a change of the engine waits until others can carry the load.
fn lacks_room(context: &EngineContext) -> bool {
    matches!(context.state.lock().lifecycle.blocked, Some(RestartBlocked::Irreplaceable(_)))
}

/// Takes one step for a pool. `wanted` `None`: all engines should run. `may_stop`: serving engines
/// may be stopped now. Returns the fewest replicas to which the StatefulSet, if any, may be
/// reduced.
pub(super) async fn scale(registry: &Registry, pool: &str, wanted: Option<u32>, may_stop: bool) -> u32 {
    let mut engines = registry.engines_of(pool);
    // Engines that share a device take turns, however many are wanted.
    engines.retain(|engine| engine.context.spec().share().is_none());
    if registry.is_closing() {
        return u32::MAX;
    }
    carry_out(registry, pool, &engines, wanted, may_stop).await;
    replicas_in_use(&engines)
}

async fn carry_out(registry: &Registry, pool: &str, engines: &[EngineHandle], wanted: Option<u32>, may_stop: bool) {
    let contexts = || engines.iter().map(|engine| &engine.context);
    if wanted.is_none() && !contexts().any(|context| context.state.lock().lifecycle.resting) {
        return;
    }
    let backends = registry.admission.view().into_iter().flat_map(|pool| pool.backends);
    let drained = backends.filter(|backend| backend.draining).map(|backend| backend.id).collect();
    let standings: Vec<Standing> = contexts().map(|context| standing(context, &drained)).collect();
    let more = usize::from(contexts().any(|context| lacks_room(context)));
    let target = wanted.map_or(engines.len(), |wanted| wanted as usize + more);
    note_returned(registry, pool, engines);
    let numbers: Option<Vec<u32>> = contexts().map(|context| pod_number(context)).collect();
    let Decision { wake, rest } = match numbers {
        Some(numbers) => decide_pods(&numbers.into_iter().zip(standings.iter().copied()).collect::<Vec<_>>(), target),
        None => decide(&standings, target),
    };
    for engine in wake.iter().map(|at| &engines[*at]) {
        let name = &engine.context.spec().name;
        if engine.wake().await.is_ok() {
            tracing::info!(backend = %name, "autoscale: it starts: {target} of {} engines are wanted", engines.len());
            registry.scales().pool(pool).resting.remove(&**name);
        }
    }
    for at in rest {
        let serves = standings[at] == Standing::Serves;
        if serves && (!may_stop || registry.scales().pool(pool).not_before.is_some_and(|at| Instant::now() < at)) {
            break;
        }
        if let Err(why) = rest_one(registry, &engines[at], serves && target > 0).await {
            show_blocked(registry, pool, &engines[at].context, why);
            break;
        }
        let name = &engines[at].context.spec().name;
        tracing::info!(backend = %name, "autoscale: it is stopped: {target} of {} engines are wanted", engines.len());
        let mut scales = registry.scales();
        let known = scales.pool(pool);
        known.why = None;
        known.resting.insert(name.to_string());
    }
    for context in contexts().filter(|context| context.step() == Step::Idle) {
        context.set_detail(format!("stopped: {target} of {} engines wanted", engines.len()));
    }
}

/// Begins to stop one engine. With `carried`, only if other backends can carry the load.
async fn rest_one(registry: &Registry, engine: &EngineHandle, carried: bool) -> Result<(), ChangeRefused> {
    let context = &engine.context;
    let _one_at_a_time = registry.change_lock.lock().await;
    ensure_no_change(registry, None)?;
    if carried {
        check_replacement(&registry.admission, &registry.reported, &context.spec()).await?;
    }
    let serves = context.step().in_rotation();
    engine.rest().await?;
    if serves {
        // Under the lock, so that no other change counts on this engine.
        context.set_cordon(Cordon::Draining);
    }
    Ok(())
}

/// After an engine could not be drained and serves again, the next attempt waits for the length of
/// a drain.
fn note_returned(registry: &Registry, pool: &str, engines: &[EngineHandle]) {
    let mut scales = registry.scales();
    let known = scales.pool(pool);
    for context in engines.iter().map(|engine| &engine.context) {
        let (spec, step) = (context.spec(), context.step());
        if step != Step::Drain && step != Step::Stop && known.resting.remove(&*spec.name) && step.in_rotation() {
            known.not_before = Some(Instant::now() + spec.rules.drain);
        }
    }
}

fn show_blocked(registry: &Registry, pool: &str, context: &Arc<EngineContext>, why: ChangeRefused) {
    let ChangeRefused::Blocked(blocked) = why else { return };
    let mut scales = registry.scales();
    let known = scales.pool(pool);
    known.not_before = Some(Instant::now() + RETRY);
    if !known.why.as_ref().is_some_and(|before| before.is_same_reason(&blocked)) {
        tracing::info!(backend = %context.spec().name, "autoscale: it is not wanted, and is not stopped yet: {blocked}");
        known.why = Some(blocked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use Standing::{Away, BacksOff, Leaves, Rests, Serves};
    const COMES: Standing = Standing::Comes { stoppable: true };
    const KEPT: Standing = Standing::Comes { stoppable: false };

    fn decided(engines: &[Standing], wanted: usize) -> (Vec<usize>, Vec<usize>) {
        let Decision { wake, rest } = decide(engines, wanted);
        (wake, rest)
    }

    #[test]
    fn one_that_drains_serves_again_before_another_one_is_started() {
        assert_eq!(decided(&[Serves, Rests, Leaves], 2), (vec![2], vec![]));
        assert_eq!(decided(&[Serves, Rests, Leaves], 3), (vec![2, 1], vec![]));
        assert_eq!(decided(&[Rests, Rests, Rests], 2), (vec![0, 1], vec![]));
        assert_eq!(decided(&[Serves, COMES, Rests], 2), (vec![], vec![]), "one is on its way");
    }

    #[test]
    fn the_last_are_stopped_first_and_those_that_do_not_serve_before_the_others() {
        assert_eq!(decided(&[Serves, Serves, Serves], 1), (vec![], vec![2, 1]));
        assert_eq!(decided(&[COMES, Serves, COMES], 2), (vec![], vec![2]));
        assert_eq!(decided(&[COMES, Serves, Serves], 1), (vec![], vec![0, 2]));
        assert_eq!(decided(&[Serves, Serves], 0), (vec![], vec![1, 0]));
    }

    #[test]
    fn one_that_comes_is_no_reason_to_stop_one_that_serves() {
        assert_eq!(decided(&[Serves, KEPT], 1), (vec![], vec![]));
        assert_eq!(decided(&[Serves, Serves, KEPT], 2), (vec![], vec![]));
        assert_eq!(decided(&[KEPT, KEPT, KEPT], 1), (vec![], vec![]), "engines that are being taken over");
    }

    #[test]
    fn of_pods_those_with_the_highest_numbers_go_whatever_they_do() {
        let decided = |pods: &[(u32, Standing)], wanted| {
            let Decision { wake, rest } = decide_pods(pods, wanted);
            (wake, rest)
        };
        let pods = [(10, Serves), (2, COMES), (1, Serves), (0, Serves)];
        assert_eq!(decided(&pods, 2), (vec![], vec![0, 1]));
        assert_eq!(decided(&[(1, Serves), (0, Away)], 1), (vec![], vec![0]), "another number does not replace it");
        assert_eq!(decided(&[(1, Leaves), (0, Serves)], 2), (vec![0], vec![]));
        assert_eq!(decided(&[(1, KEPT), (0, Rests)], 1), (vec![1], vec![]));
    }

    #[test]
    fn an_engine_that_is_away_or_fails_is_replaced() {
        assert_eq!(decided(&[Away, Serves, Rests], 2), (vec![2], vec![]));
        assert_eq!(decided(&[BacksOff, Rests], 1), (vec![1], vec![]));
        assert_eq!(decided(&[BacksOff, Serves], 1), (vec![], vec![0]), "it is not needed any more");
        assert_eq!(decided(&[Away, Away], 2), (vec![], vec![]));
        assert_eq!(decided(&[Away, Serves], 1), (vec![], vec![]), "an operator has it");
    }
}
