//! `[fleet]`: how engines that we run are started, restarted and healed.
//!
//! Nothing in here matters while no backend has a `launch` table. Which engines there are stands with the backends, which
//! adapters they must have with the models; this is about limits.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// How engines that we run are looked after.
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    /// Folder of the journal, which says after a crash what was under way.
    pub state: PathBuf,
    /// Where engines that are configured without a port get theirs from.
    pub ports: RangeInclusive<u16>,
    /// What becomes of an engine that outlived the gateway that started it.
    pub on_start: OnStart,
    /// What becomes of the engines when the gateway stops.
    pub on_exit: OnExit,
    /// How long a drain may take before the restart is given up.
    pub drain: Duration,
    /// From SIGTERM to SIGKILL, for an engine that carries nothing.
    pub grace: Duration,
    /// Multiplies how long each phase of a start may go without progress.
    pub start_timeout_scale: f64,
    /// Generations that a fresh engine does before it is given requests; 0: none.
    pub warm_up: u32,
    /// How long a fresh engine takes to come to all its slots; 0: at once.
    pub ramp: Duration,
    /// How long new settings must serve before they count as good.
    pub settle: Duration,
    /// Restarts that nobody asked for within `restart_window`, per backend; then it is held.
    pub restarts: u32,
    /// See `restarts`.
    pub restart_window: Duration,
    /// The wait before the first of them; doubles with each.
    pub backoff: Duration,
    /// The longest such wait, at least `backoff`.
    pub backoff_max: Duration,
    /// Share of the slots of the other backends that may be in use for one to be taken out, in `(0, 1]`.
    pub headroom: f64,
}

/// What becomes of an engine that outlived the gateway that started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStart {
    /// It is taken over.
    Adopt,
    /// It is stopped, and a new one started.
    Stop,
}

/// What becomes of the engines when the gateway stops in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExit {
    /// They are stopped.
    Stop,
    /// They go on; the next gateway finds them.
    Keep,
}
