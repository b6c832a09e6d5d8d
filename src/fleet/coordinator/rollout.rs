//! Applies a new configuration to one engine.
//!
//! If only flags differ, the engine is restarted as by `sluice backend restart`, with the same
//! checks. Another program, device or environment needs another driver: a new engine replaces the
//! old one. Both wait until other backends can carry the load, and the engine's status shows why.
//! When a newer configuration is applied, the rollout ends early and leaves nothing half done.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::change::{RestartError, change, ensure_no_change};
use super::registry::{Registry, Replacing};
use super::stop::begin_stop;
use crate::engine::context::EngineContext;
use crate::engine::lifecycle::{ChangeRequest, Keep, Outcome, RestartBlocked, Step};
use crate::engine::preflight::{check_replacement, check_settings};
use crate::engine::spec::EngineSpec;
use sluice_gateway::pool::{Cordon, Irreplaceable};

const POLL: Duration = Duration::from_millis(200);

/// Why the configuration was not applied.
#[derive(Debug)]
pub(super) enum RolloutError {
    /// A newer configuration was applied, or the gateway stops.
    Outdated,
    /// Another engine must be changed first. Until then this one does not serve.
    Retry,
    Failed(String),
}

impl RolloutError {
    fn failed(why: impl ToString) -> Self {
        Self::Failed(why.to_string())
    }

    fn gone() -> Self {
        Self::failed("the engine is no longer managed")
    }
}

enum NotWithdrawn {
    Blocked(RestartBlocked),
    Outdated,
}

impl From<RestartBlocked> for NotWithdrawn {
    fn from(blocked: RestartBlocked) -> Self {
        Self::Blocked(blocked)
    }
}

pub(super) async fn roll_out(registry: Arc<Registry>, generation: u64, spec: EngineSpec) -> Result<(), RolloutError> {
    let context = registry.context(&spec.name).ok_or_else(RolloutError::gone)?;
    let rollout = Rollout { registry: &registry, generation };
    let result = if context.identity == spec.identity {
        rollout.change_flags(&context, &spec).await
    } else {
        rollout.replace(&context, &spec).await
    };
    if !matches!(result, Err(RolloutError::Retry)) {
        context.state.lock().lifecycle.unblock();
    }
    result
}

struct Rollout<'r> {
    registry: &'r Arc<Registry>,
    generation: u64,
}

impl Rollout<'_> {
    async fn pause(&self) -> Result<(), RolloutError> {
        sleep(POLL).await;
        if self.registry.is_outdated(self.generation) { Err(RolloutError::Outdated) } else { Ok(()) }
    }

    async fn change_flags(&self, context: &EngineContext, spec: &EngineSpec) -> Result<(), RolloutError> {
        let id = loop {
            // An operator may have made this change already.
            let step = context.step();
            if context.heads_for(&spec.configured) && (step.in_rotation() || step.is_at_rest()) {
                return Ok(());
            }
            let request =
                ChangeRequest { id: 0, to: spec.setup(), cut: false, hold: false, keep: Some(Keep::Settling) };
            match change(self.registry, &spec.name, request, Some(self.generation)).await {
                Ok(started) => break started.change,
                Err(RestartError::Blocked(blocked)) => show_blocked(context, blocked),
                Err(RestartError::Outdated) => return Err(RolloutError::Outdated),
                Err(error) => {
                    context.state.lock().lifecycle.refuse(spec.setup(), error.to_string());
                    return Err(RolloutError::failed(error));
                }
            }
            self.pause().await?;
        };
        loop {
            let context = self.registry.context(&spec.name).ok_or_else(RolloutError::gone)?;
            let ended = context.state.lock().lifecycle.ended.clone().filter(|ended| ended.id >= id);
            match ended.map(|ended| ended.outcome) {
                Some(Outcome::Done) => return Ok(()),
                Some(Outcome::Aborted(why) | Outcome::RolledBack(why) | Outcome::Failed(why) | Outcome::Held(why)) => {
                    return Err(RolloutError::Failed(why));
                }
                None => self.pause().await?,
            }
        }
    }

    /// Stops the old engine and waits until the new one serves.
    async fn replace(&self, context: &EngineContext, spec: &EngineSpec) -> Result<(), RolloutError> {
        // The old engine still runs while the new settings are checked.
        let driver = (self.registry.maker)(spec);
        check_settings(&*driver, spec, &spec.settings).await.map_err(RolloutError::failed)?;
        // If the address changes, the old engine has got no requests since the reload, so waiting
        // is pointless.
        let withdrawn = match context.spec().backend == spec.backend {
            true => self.withdraw_when_possible(context).await?,
            false => None,
        };
        let replacing = match withdrawn {
            Some(replacing) => replacing,
            None => {
                let _one_at_a_time = self.registry.change_lock.lock().await;
                self.registry.replace(&spec.name)
            }
        };
        if !begin_stop(self.registry, &spec.name, Some(self.generation)) {
            drop(replacing);
            reinstate(context);
            return Err(RolloutError::Outdated);
        }
        loop {
            self.pause().await?;
            // The reconciler starts the new engine when the old one is gone.
            let Some(context) = self.registry.context(&spec.name) else {
                if matches!(self.registry.table().blocker(spec), Some(RestartBlocked::MustMove(_))) {
                    return Err(RolloutError::Retry);
                }
                continue;
            };
            match context.step() {
                Step::Serve | Step::Idle => return Ok(()),
                Step::Hold | Step::Off => return Err(RolloutError::Failed(context.why())),
                _ => {}
            }
        }
    }

    /// Returns when the engine has no requests and can be replaced; `None` at once if it does not
    /// serve.
    async fn withdraw_when_possible(&self, context: &EngineContext) -> Result<Option<Replacing<'_>>, RolloutError> {
        loop {
            match context.step() {
                Step::Serve => match self.withdraw(context).await {
                    Ok(replacing) => return Ok(Some(replacing)),
                    Err(NotWithdrawn::Blocked(blocked)) => show_blocked(context, blocked),
                    Err(NotWithdrawn::Outdated) => return Err(RolloutError::Outdated),
                },
                // The engine has requests, or will soon have some.
                step @ (Step::Ramp | Step::Drain) => show_blocked(context, RestartBlocked::Busy(step)),
                _ => return Ok(None),
            }
            self.pause().await?;
        }
    }

    /// Takes the engine out of rotation and waits for the requests to end. If that takes too long,
    /// or other backends fail meanwhile, it returns to rotation.
    async fn withdraw(&self, context: &EngineContext) -> Result<Replacing<'_>, NotWithdrawn> {
        let replacing = {
            let _one_at_a_time = self.registry.change_lock.lock().await;
            ensure_no_change(self.registry, Some(&context.spec().name))?;
            self.check_replacement(context).await?;
            // Withdrawn under the lock, so that no other change counts on this engine.
            context.state.lock().lifecycle.withdraw();
            context.set_cordon(Cordon::Draining);
            self.registry.replace(&context.spec().name)
        };
        let withdrawn = match self.until_empty(context).await {
            Ok(()) => match self.check_replacement(context).await {
                Err(blocked @ RestartBlocked::Irreplaceable(Irreplaceable::Unserved(_))) => Err(blocked.into()),
                _ => Ok(()),
            },
            not_empty => not_empty,
        };
        if withdrawn.is_err() {
            reinstate(context);
        }
        withdrawn.map(|()| replacing)
    }

    /// Checks that other backends can serve the requests. Nothing is checked if another engine
    /// waits for this engine's device. Requests may then wait in the queue.
    async fn check_replacement(&self, context: &EngineContext) -> Result<(), RestartBlocked> {
        if self.registry.table().is_awaited(context) {
            return Ok(());
        }
        check_replacement(&self.registry.admission, &self.registry.reported, &context.spec()).await
    }

    async fn until_empty(&self, context: &EngineContext) -> Result<(), NotWithdrawn> {
        let deadline = Instant::now() + context.spec().rules.drain;
        loop {
            let running = context.running();
            if running == 0 && context.others.have_left(&context.spec().name) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(RestartBlocked::StillRunning(running).into());
            }
            self.pause().await.map_err(|_| NotWithdrawn::Outdated)?;
        }
    }
}

fn reinstate(context: &EngineContext) {
    context.state.lock().lifecycle.reinstate();
    if context.step().in_rotation() {
        context.set_cordon(Cordon::Open);
    }
}

/// Shows why the new configuration waits; logged once per reason.
fn show_blocked(context: &EngineContext, blocked: RestartBlocked) {
    let text = blocked.to_string();
    if context.state.lock().lifecycle.block(blocked) {
        tracing::warn!(backend = %context.spec().name, "its new configuration waits: {text}");
    }
}
