//! Why an engine cannot be started, changed or replaced now.
//!
//! The texts are here and in [`Irreplaceable`]. They appear in the admin API (`waits`), in the log
//! and in refused restarts, so each names the cause and, if there is one, the remedy.

use super::step::Step;
use sluice_gateway::pool::Irreplaceable;

/// Prevents a start or a planned change. Nothing has changed; it may work later.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RestartBlocked {
    /// Another engine is being changed; only one is at a time in the whole fleet.
    #[error(
        "{0} is being changed, and only one engine is changed at a time: wait until it serves (sluice backend list)"
    )]
    ChangeInProgress(String),
    /// The engine is in a step that cannot be interrupted.
    #[error("it is in step '{}'; wait until {} (sluice backend list), then try again", .0.label(), .0.awaited())]
    Busy(Step),
    /// The other backends cannot carry the load.
    #[error(transparent)]
    Irreplaceable(#[from] Irreplaceable),
    /// The drain before a replacement took too long.
    #[error(
        "{0} requests of this gateway, and perhaps some of others, were still running after the drain (fleet.drain)"
    )]
    StillRunning(u32),
    /// An engine with the same device, port or name is being stopped.
    #[error("{0} is being stopped first")]
    Stopping(String),
    /// Another engine cannot be stopped.
    #[error("{backend} cannot be stopped and may still use its device: {why}")]
    CannotStop {
        /// The other engine.
        backend: String,
        /// Why it cannot be stopped.
        why: String,
    },
    /// Another engine, which is now configured elsewhere, still runs in this place.
    #[error("{0} has to move first")]
    MustMove(String),
}

impl RestartBlocked {
    /// Whether both name the same reason. Counts may differ.
    pub fn is_same_reason(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Irreplaceable(Irreplaceable::NoRoom { .. }), Self::Irreplaceable(Irreplaceable::NoRoom { .. }))
            | (Self::StillRunning(_), Self::StillRunning(_)) => true,
            _ => self == other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_engine_says_how_long_to_wait() {
        let said = |step| RestartBlocked::Busy(step).to_string();
        assert!(said(Step::Ramp).contains("'ramp'; wait until its ramp ends (sluice backend list)"));
        assert!(said(Step::Start).contains("'start'; wait until it serves (sluice backend list)"));
    }
}
