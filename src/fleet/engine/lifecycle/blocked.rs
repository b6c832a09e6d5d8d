//! Why an engine cannot be started, changed or replaced now: what is in its way.
//!
//! The one place for these texts. They are shown in the admin API (`waits`), in the log and as the reason of a refused
//! restart, so each names the cause and, where there is one, the remedy.

use super::step::Step;

/// What is in the way of a start or of a planned change. Nothing was touched; the same may work later.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RestartBlocked {
    /// One planned change at a time in the whole fleet.
    #[error(
        "{0} is being changed, and only one engine is changed at a time: wait until it serves (sluice backend list)"
    )]
    ChangeInProgress(String),
    /// Its own life cycle is in a step that cannot be interrupted.
    #[error("it is in step '{}'; wait until it serves (sluice backend list), then try again", .0.label())]
    Busy(Step),
    /// Names that only this engine serves.
    #[error(
        "no other backend in rotation serves {0}; add one, or restart with --hold: requests then wait, as long as the \
         pool's queue allows"
    )]
    NoReplacement(String),
    /// The other backends are too full.
    #[error(
        "without it {used} of {room} slots would be in use, more than fleet.headroom ({headroom_percent} %) allows; try \
         again with less load, or restart with --hold"
    )]
    NoRoom {
        /// Slots in use and requests waiting, all together.
        used: u64,
        /// Slots of the other backends.
        room: u64,
        /// The share that may be in use.
        headroom_percent: u32,
    },
    /// The drain before a replacement took too long.
    #[error(
        "{0} requests of this gateway, and perhaps some of others, were still running after the drain (fleet.drain)"
    )]
    StillRunning(u32),
    /// Another engine on its device, on its port or under its name is being stopped.
    #[error("{0} is being stopped first")]
    Stopping(String),
    /// Another engine cannot be stopped.
    #[error("{backend} cannot be stopped and may still use its device: {why}")]
    CannotStop {
        /// That engine.
        backend: String,
        /// Why not.
        why: String,
    },
    /// Another engine that is configured elsewhere now still runs there.
    #[error("{0} has to move first")]
    MustMove(String),
}

impl RestartBlocked {
    /// Whether both are the same situation, with other counts at most.
    pub fn is_same_reason(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::NoRoom { .. }, Self::NoRoom { .. }) | (Self::StillRunning(_), Self::StillRunning(_)) => true,
            _ => self == other,
        }
    }
}
