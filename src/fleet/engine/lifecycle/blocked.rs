//! Why an engine cannot be started, changed or replaced now.
//!
//! All these texts are here. They appear in the admin API (`waits`), in the log and in refused
//! restarts, so each names the cause and, if there is one, the remedy.

use super::step::Step;

/// Prevents a start or a planned change. Nothing has changed; it may work later.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RestartBlocked {
    /// Another engine is being changed; only one is at a time in the whole fleet.
    #[error(
        "{0} is being changed, and only one engine is changed at a time: wait until it serves (sluice backend list)"
    )]
    ChangeInProgress(String),
    /// The engine is in a step that cannot be interrupted.
    #[error("it is in step '{}'; wait until it serves (sluice backend list), then try again", .0.label())]
    Busy(Step),
    /// Only this engine serves these models.
    #[error(
        "no other backend in rotation serves {0}; add one, or restart with --hold: requests then wait, as long as the \
         pool's queue allows"
    )]
    NoReplacement(String),
    /// The other backends have too little room.
    #[error(
        "without it {used} of {room} slots would be in use, more than fleet.headroom ({headroom_percent} %) allows; try \
         again with less load, or restart with --hold"
    )]
    NoRoom {
        /// Slots in use plus requests that wait, of all pools concerned.
        used: u64,
        /// Slots of the other backends.
        room: u64,
        /// The share of the slots that may be in use.
        headroom_percent: u32,
    },
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
    /// Another engine, now configured elsewhere, still runs there.
    #[error("{0} has to move first")]
    MustMove(String),
}

impl RestartBlocked {
    /// Whether both name the same reason; only counts may differ.
    pub fn is_same_reason(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::NoRoom { .. }, Self::NoRoom { .. }) | (Self::StillRunning(_), Self::StillRunning(_)) => true,
            _ => self == other,
        }
    }
}
