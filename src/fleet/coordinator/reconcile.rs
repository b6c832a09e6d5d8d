//! Works towards the configuration in force, from any state.
//!
//! One task compares the configured engines with the managed ones, does what is possible now, and
//! looks again after a change. So reloads, crashes and commands may come in any order.
//!
//! - An engine that is no longer configured is stopped ([`stop`](super::stop)).
//! - A configured engine without a task is started as soon as no other engine blocks it.
//! - Engines that run with another configuration are changed, one at a time
//!   ([`rollout`](super::rollout)). After a failure no more engines are changed until the next
//!   configuration, except engines that moved to another address, because the old address gets no
//!   requests.
//! - An external backend is open, unless an engine of the gateway still has its address.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::registry::Registry;
use super::rollout::{RolloutError, roll_out};
use super::stop::begin_stop;
use crate::engine::lifecycle::Step;
use crate::engine::spec::EngineSpec;

/// Pause between two looks while work is under way.
const BUSY: Duration = Duration::from_millis(200);
/// Pause between two looks otherwise. Engines may change by themselves.
const IDLE: Duration = Duration::from_secs(5);
/// Pause before a rollout that must be repeated.
const RETRY: Duration = Duration::from_secs(3);

/// Runs until the fleet is closed.
pub(super) async fn reconcile(registry: Arc<Registry>) {
    let mut rollouts = Rollouts::default();
    while !registry.is_closed() {
        let (generation, engines, managed) = {
            let table = registry.table();
            let managed: BTreeSet<String> = table.managed.keys().cloned().collect();
            (table.wanted.generation, table.wanted.engines.clone(), managed)
        };
        rollouts.set_generation(generation);
        for name in managed.iter().filter(|name| !engines.iter().any(|spec| *spec.name == ***name)) {
            begin_stop(&registry, name, Some(generation));
        }
        let mut waiting = false;
        for spec in engines.iter().filter(|spec| !managed.contains(&*spec.name)) {
            waiting |= registry.start_engine(&spec.name).is_some();
        }
        registry.update_cordons();
        let rolling = rollouts.advance(&registry, &engines).await;
        let pause = if waiting || rolling { BUSY } else { IDLE };
        let _ = timeout(pause, registry.wake.notified()).await;
    }
    if let Some(turn) = rollouts.under_way {
        turn.task.abort();
    }
}

#[derive(Debug, Default)]
struct Rollouts {
    generation: u64,
    failed: BTreeSet<String>,
    /// Engines that were changed. If one is due for a change again, it crashed early and went back
    /// to the old settings.
    done: BTreeSet<String>,
    under_way: Option<Turn>,
    /// The next rollout does not begin earlier.
    not_before: Option<Instant>,
}

#[derive(Debug)]
struct Turn {
    generation: u64,
    name: String,
    task: JoinHandle<Result<(), RolloutError>>,
}

impl Rollouts {
    /// If the configuration is newer, forgets the results for the older one. A rollout under way
    /// ends by itself.
    fn set_generation(&mut self, generation: u64) {
        if self.generation != generation {
            self.generation = generation;
            self.failed.clear();
            self.done.clear();
        }
    }

    /// Finishes a rollout that has ended, and begins the next one. Returns whether there is more to
    /// do.
    async fn advance(&mut self, registry: &Arc<Registry>, engines: &[EngineSpec]) -> bool {
        if let Some(turn) = self.under_way.take() {
            if !turn.task.is_finished() {
                self.under_way = Some(turn);
                return true;
            }
            self.finish(turn).await;
        }
        if self.not_before.is_some_and(|moment| Instant::now() < moment) {
            return true;
        }
        // Stopped engines are changed first, so that they can serve with the new flags while others
        // are replaced.
        let serves =
            |spec: &&EngineSpec| registry.context(&spec.name).is_some_and(|context| !context.step().is_at_rest());
        let Some(next) = engines.iter().filter(|spec| self.is_due(registry, spec)).min_by_key(serves) else {
            let recovering =
                |spec: &EngineSpec| registry.context(&spec.name).is_some_and(|context| context.step() == Step::Recover);
            return engines.iter().any(recovering);
        };
        let name = next.name.to_string();
        if self.done.contains(&name) {
            tracing::error!(
                backend = name,
                "crashed and returned to its last good settings; its configuration is not tried again until the next reload"
            );
            self.failed.insert(name);
            return true;
        }
        let task = registry.tasks.spawn(roll_out(Arc::clone(registry), self.generation, next.clone()));
        self.under_way = Some(Turn { generation: self.generation, name, task });
        true
    }

    async fn finish(&mut self, Turn { generation, name, task }: Turn) {
        let result = task.await;
        if generation != self.generation {
            return;
        }
        match result {
            Ok(Ok(())) => {
                tracing::info!(backend = name, "runs with its new configuration");
                self.done.insert(name);
            }
            Ok(Err(RolloutError::Outdated)) => {}
            Ok(Err(RolloutError::Retry)) => self.not_before = Some(Instant::now() + RETRY),
            Ok(Err(RolloutError::Failed(why))) => {
                tracing::error!(backend = name, "keeps its old configuration, as do those after it: {why}");
                self.failed.insert(name);
            }
            Err(error) => {
                tracing::error!(backend = name, %error, "the rollout of its configuration failed");
                self.failed.insert(name);
            }
        }
    }

    fn is_due(&self, registry: &Registry, spec: &EngineSpec) -> bool {
        let Some(context) = registry.context(&spec.name) else { return false };
        let differs = context.identity != spec.identity || !context.heads_for(&spec.configured);
        let moves = context.spec().backend != spec.backend;
        let allowed = if moves { !self.failed.contains(&*spec.name) } else { self.failed.is_empty() };
        context.step() != Step::Recover && differs && allowed
    }
}
