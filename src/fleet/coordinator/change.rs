//! Planned changes: restarts of engines with the same or other settings, one at a time in the whole
//! fleet.
//!
//! Before a change begins, the new settings are checked, and other backends must be able to carry
//! the engine's load ([`preflight`]). Then the engine's own task carries it out.

use std::collections::BTreeMap;

use super::registry::Registry;
use crate::driver::{EngineFailure, EngineSettings};
use crate::engine::context::EngineContext;
use crate::engine::journal::Setup;
use crate::engine::kept::may_keep;
use crate::engine::lifecycle::{ChangeRefused, ChangeRequest, Keep, RestartBlocked};
use crate::engine::preflight;
use sluice_config::{ArgValue, is_secret_arg};

/// Why a restart does not begin. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum RestartError {
    /// The gateway does not run that engine.
    #[error(
        "{0} is not managed by sluice (it has a url, no launch and no control): drain it here, restart it where it runs, \
         then enable it"
    )]
    NotManaged(String),
    /// The requested settings cannot work.
    #[error("these settings would not start: {0}")]
    InvalidSettings(#[from] EngineFailure),
    /// A secret would be shown with the settings and stored in the journal.
    #[error("{0} is a secret, which is set in the configuration only: args.{0} = \"env:NAME\", then reload")]
    Secret(String),
    /// Another change, or too little room on other backends, prevents the restart.
    #[error(transparent)]
    Blocked(#[from] RestartBlocked),
    /// The engine left the configuration, or the gateway stops.
    #[error("it is being shut down")]
    ShuttingDown,
    /// The change cannot be saved, so a restarted gateway would not know it.
    #[error("the change cannot be saved in the journal (fleet.state): {0}; nothing was changed")]
    NotSaved(std::io::Error),
    /// A newer configuration was applied.
    #[error("the configuration has changed since")]
    Outdated,
}

impl From<ChangeRefused> for RestartError {
    fn from(refused: ChangeRefused) -> Self {
        match refused {
            ChangeRefused::Blocked(blocked) => Self::Blocked(blocked),
            ChangeRefused::ShuttingDown => Self::ShuttingDown,
        }
    }
}

/// A restart that an operator requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RestartRequest {
    /// Flags to change; the others stay.
    pub set: BTreeMap<String, ArgValue>,
    /// Drop the flags of earlier changes, and start from the configuration.
    pub reset: bool,
    /// Restart even if no other backend can serve the models, so that requests wait in the queue.
    pub hold: bool,
    /// Cut requests that outlast the drain.
    pub cut: bool,
    /// Set if the tuner requests the restart.
    pub trial: Option<Trial>,
}

/// A restart that the tuner requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// The change may be taken back, until [`Fleet::end_trials`](super::Fleet::end_trials).
    Begin,
    /// It takes a change back. The flags get the values from before; a default may be written out.
    Return,
}

/// A change that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeStarted {
    /// The number of the change: [`EngineView::change`](crate::EngineView::change) until it ends,
    /// then [`EngineView::last_change`](crate::EngineView::last_change).
    pub change: u64,
    /// Warnings about the settings.
    pub notices: Vec<String>,
}

/// Returns once the change has begun.
pub(super) async fn restart(
    registry: &Registry,
    name: &str,
    request: RestartRequest,
) -> Result<ChangeStarted, RestartError> {
    let context = registry.context(name).ok_or_else(|| RestartError::NotManaged(name.to_owned()))?;
    if let Some((flag, _)) = request.set.iter().find(|(flag, value)| is_secret_arg(flag, value)) {
        return Err(RestartError::Secret(flag.clone()));
    }
    let Setup { settings, configured } = if request.reset { context.spec().setup() } else { context.setup() };
    let to = Setup { settings: settings.with(&request.set), configured };
    let to = match request.trial {
        Some(Trial::Return) => kept_as(&context, &request.set, to),
        _ => to,
    };
    let keep = Some(if request.trial.is_some() { Keep::Trial } else { Keep::Settling });
    change(registry, name, ChangeRequest { id: 0, to, cut: request.cut, hold: request.hold, keep }, None).await
}

/// The settings of the old engine that is kept asleep, if they differ from `to` only in flags of
/// `set` which have their defaults there. Otherwise `to`.
fn kept_as(context: &EngineContext, set: &BTreeMap<String, ArgValue>, to: Setup) -> Setup {
    let kept = context.state.lock().lifecycle.kept.as_ref().map(|kept| kept.setup.clone());
    kept.filter(|kept| is_return_to(kept, set, &to)).unwrap_or(to)
}

fn is_return_to(kept: &Setup, set: &BTreeMap<String, ArgValue>, to: &Setup) -> bool {
    let own = kept.settings.with(&BTreeMap::new()).args;
    let is_absent_or_equal = |(name, value): (&String, &ArgValue)| own.get(name).is_none_or(|own| own == value);
    let set = EngineSettings { args: set.clone() }.with(&BTreeMap::new()).args;
    set.iter().all(is_absent_or_equal) && kept.settings.with(&set) == to.settings && kept.configured == to.configured
}

/// Begins a change and numbers it. With a `generation`, only while that configuration is in force.
pub(super) async fn change(
    registry: &Registry,
    name: &str,
    request: ChangeRequest<Setup>,
    generation: Option<u64>,
) -> Result<ChangeStarted, RestartError> {
    let handle = registry.handle(name).ok_or_else(|| RestartError::NotManaged(name.to_owned()))?;
    let spec = handle.context.spec();
    let notices = preflight::check_settings(&*handle.context.driver(), &spec, &request.to.settings).await?;
    let _one_at_a_time = registry.change_lock.lock().await;
    ensure_no_change(registry, None)?;
    if handle.context.step().in_rotation() && !request.hold {
        preflight::check_replacement(&registry.admission, &registry.reported, &spec).await?;
    }
    if generation.is_some_and(|generation| registry.is_outdated(generation)) {
        return Err(RestartError::Outdated);
    }
    // If the journal cannot be written, this shows before the change. If a later write fails, the
    // change fails.
    handle.context.write_journal().await.map_err(RestartError::NotSaved)?;
    let id = registry.next_change();
    let keep = request.keep.filter(|_| request.to != handle.context.setup() && may_keep(&handle.context));
    handle.change(ChangeRequest { id, keep, ..request }).await?;
    Ok(ChangeStarted { change: id, notices: notices.iter().map(ToString::to_string).collect() })
}

/// Checks that no planned change is under way, and that no engine but `own` is being replaced. The
/// caller holds the [lock](Registry::change_lock).
pub(super) fn ensure_no_change(registry: &Registry, own: Option<&str>) -> Result<(), RestartBlocked> {
    let changed = registry.table().views().into_iter().find(|view| view.change.is_some()).map(|view| view.backend);
    let replaced = || registry.replaced().filter(|name| own != Some(&**name)).map(|name| name.to_string());
    changed.or_else(replaced).map_or(Ok(()), |other| Err(RestartBlocked::ChangeInProgress(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_return_of_the_tuner_is_a_return_to_the_kept_engine_even_if_a_flag_had_its_default() {
        let args = |pairs: &[(&str, i64)]| {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), ArgValue::Int(*value))).collect()
        };
        let setup = |pairs: &[(&str, i64)]| Setup {
            settings: EngineSettings { args: args(pairs) },
            configured: "x".to_owned(),
        };
        let of = |kept: &[(&str, i64)], set: &[(&str, i64)], to: &[(&str, i64)]| {
            is_return_to(&setup(kept), &args(set), &setup(to))
        };
        let back = [("max-num-seqs", 64)];
        assert!(of(&[("max-num-seqs", 64), ("seed", 1)], &back, &[("max-num-seqs", 64), ("seed", 1)]));
        assert!(of(&[("max_num_seqs", 64)], &back, &back), "another spelling");
        assert!(of(&[("seed", 1)], &back, &[("max-num-seqs", 64), ("seed", 1)]), "the default");
        assert!(!of(&[("max-num-seqs", 32)], &back, &back), "another value");
        assert!(!of(&[("seed", 1)], &back, &[("max-num-seqs", 64), ("seed", 2)]), "another flag differs");
        let elsewhere = Setup { configured: "y".to_owned(), ..setup(&back) };
        assert!(!is_return_to(&elsewhere, &args(&back), &setup(&back)), "another configuration");
    }
}
