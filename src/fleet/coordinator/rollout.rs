//! Takes one engine over to what a configuration says.
//!
//! A change that only concerns flags is a change like one that somebody asks for, with everything that protects it. Another
//! program, device or environment needs another driver: the old engine leaves, the new one comes in its place. Either waits
//! until the others can carry its load, and the engine shows what it waits for. Ends early, with nothing half done, when a
//! newer configuration is applied.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{EngineSpec, Fleet, RestartError, RestartRequest, reconcile};
use crate::engine::context::EngineContext;
use crate::engine::lifecycle::{ChangeRefused, Outcome, Step};
use crate::engine::preflight::{RestartBlocked, could_run, may_go_now};
use sluice_gateway::pool::Cordon;

/// Between two looks at whether the others can carry it, or whether it serves.
const LOOK: Duration = Duration::from_millis(200);

/// Why an engine was not taken over.
#[derive(Debug)]
pub(super) enum End {
    /// A newer configuration was applied, or the gateway stops.
    Outdated,
    /// It could not be done now, and nothing was touched.
    Again,
    Failed(String),
}

impl<W: Into<String>> From<W> for End {
    fn from(why: W) -> Self {
        Self::Failed(why.into())
    }
}

/// Carries it out, to its end.
pub(super) async fn one(fleet: Arc<Fleet>, number: u64, spec: EngineSpec) -> Result<(), End> {
    let roll = Roll { fleet: &fleet, number };
    let (context, _) = fleet.handle(&spec.name).ok_or("it is gone")?;
    let done = if context.identity == spec.identity {
        roll.change(&context, &spec).await
    } else {
        roll.replace(&context, &spec).await
    };
    if !matches!(done, Err(End::Again)) {
        context.state.lock().waits = None;
    }
    done
}

struct Roll<'f> {
    fleet: &'f Arc<Fleet>,
    number: u64,
}

impl Roll<'_> {
    async fn pause(&self) -> Result<(), End> {
        sleep(LOOK).await;
        if self.fleet.is_outdated(self.number) { Err(End::Outdated) } else { Ok(()) }
    }

    async fn change(&self, context: &EngineContext, spec: &EngineSpec) -> Result<(), End> {
        let serves_it = || context.state.lock().life.heads_for().configured == spec.configured;
        let id = loop {
            // Somebody may have done it by handle meanwhile.
            if serves_it() && context.step().in_rotation() {
                return Ok(());
            }
            let asked = self.fleet.change(&spec.name, spec.setup(), RestartRequest::default(), Some(self.number));
            match asked.await {
                Ok(begun) => break begun.change,
                Err(error @ (RestartError::InvalidSettings(_) | RestartError::NotManaged(_))) => {
                    return Err(error.to_string().into());
                }
                Err(RestartError::Refused(ChangeRefused::Leaving)) => return Err("it is being shut down".into()),
                Err(RestartError::Outdated) => return Err(End::Outdated),
                Err(wait) => note_wait(context, &wait.to_string()),
            }
            self.pause().await?;
        };
        loop {
            let (context, _) = self.fleet.handle(&spec.name).ok_or("it is gone")?;
            let ended = context.state.lock().life.ended.clone().filter(|ended| ended.id >= id);
            match ended.map(|ended| ended.outcome) {
                Some(Outcome::Done) => return Ok(()),
                Some(Outcome::Aborted(why) | Outcome::RolledBack(why) | Outcome::Failed(why) | Outcome::Held(why)) => {
                    return Err(why.into());
                }
                None => self.pause().await?,
            }
        }
    }

    /// Another engine in its place.
    async fn replace(&self, context: &Arc<EngineContext>, spec: &EngineSpec) -> Result<(), End> {
        // What could never start is told while the old one still runs.
        let driver = (self.fleet.maker)(spec);
        could_run(&*driver, spec, &spec.settings).await.map_err(|failure| failure.to_string())?;
        // One that moves gets no requests where it is since the reload: nothing is gained by waiting.
        if context.spec.load().backend == spec.backend {
            self.until_spared(context).await?;
        }
        if !self.fleet.let_go(&spec.name, Some(self.number)) {
            back_in(context);
            return Err(End::Outdated);
        }
        loop {
            self.pause().await?;
            // The reconciler takes the new one on once the old one is gone.
            let Some((context, _)) = self.fleet.handle(&spec.name) else {
                if reconcile::waits_for_a_move(self.fleet, spec) {
                    // Whose turn must come first.
                    return Err(End::Again);
                }
                continue;
            };
            match context.step() {
                _ if !context.state.lock().recovered => {}
                Step::Serve => return Ok(()),
                Step::Hold | Step::Off => return Err(context.state.lock().life.why.clone().unwrap_or_default().into()),
                _ => {}
            }
        }
    }

    /// Returns when it serves nobody and the others can do without it, or when it does not serve anyway.
    async fn until_spared(&self, context: &Arc<EngineContext>) -> Result<(), End> {
        loop {
            match context.step() {
                Step::Serve => match self.spare(context).await {
                    Ok(()) => return Ok(()),
                    Err(wait) => note_wait(context, &wait),
                },
                // Requests run on it, or are about to.
                step @ (Step::Ramp | Step::Drain) => note_wait(context, &ChangeRefused::Busy(step.label()).to_string()),
                _ => return Ok(()),
            }
            self.pause().await?;
        }
    }

    /// Takes it out of rotation and waits until nothing runs on it; back in if that cannot be, or if nobody can stand in.
    /// Where another engine waits for its device, nobody is asked to stand in: requests wait in the queue.
    ///
    /// # Errors
    /// Why not now. It is in rotation as before.
    async fn spare(&self, context: &Arc<EngineContext>) -> Result<(), String> {
        let spec = context.spec.load_full();
        let may_go = async || match reconcile::is_waited_for(self.fleet, context) {
            true => Ok(()),
            false => may_go_now(&self.fleet.admission, &self.fleet.reported, &spec).await,
        };
        {
            let _gate = self.fleet.gate.lock().await;
            if let Some(other) = self.fleet.views().into_iter().find(|view| view.change.is_some()) {
                return Err(RestartError::ChangeInProgress(other.backend).to_string());
            }
            may_go().await.map_err(|not_now| not_now.to_string())?;
            // Before the gate opens, so that nobody else counts on it.
            context.state.lock().spared = true;
            context.set_cordon(Cordon::Draining);
        }
        let emptied = self.emptied(context, spec.rules.drain).await;
        let spared = match emptied {
            Ok(()) => match may_go().await {
                Err(why @ RestartBlocked::NoStandIn(_)) => Err(why.to_string()),
                _ => Ok(()),
            },
            Err(why) => Err(why),
        };
        if spared.is_err() {
            back_in(context);
        }
        spared
    }

    async fn emptied(&self, context: &EngineContext, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        while context.running() > 0 {
            if Instant::now() >= deadline {
                return Err(format!("{} requests were still running after the drain", context.running()));
            }
            self.pause().await.map_err(|_| "the configuration has changed since".to_owned())?;
        }
        Ok(())
    }
}

/// It stays, and is given requests again.
fn back_in(context: &EngineContext) {
    context.state.lock().spared = false;
    if context.step().in_rotation() {
        context.set_cordon(Cordon::Open);
    }
}

/// Shows what a new configuration waits for; said in the log once for each reason.
fn note_wait(context: &EngineContext, why: &str) {
    // Numbers of requests change all the time.
    let words = |text: &str| text.chars().filter(|letter| !letter.is_ascii_digit()).collect::<String>();
    let mut state = context.state.lock();
    let said = state.waits.as_deref().is_some_and(|before| words(before) == words(why));
    state.waits = Some(why.to_owned());
    drop(state);
    if !said {
        tracing::warn!(backend = %context.spec.load().name, "its new configuration waits: {why}");
    }
}
