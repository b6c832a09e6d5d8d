//! The progress of an engine's start, as the log shows it.
//!
//! Drivers that follow a log publish a [`StartProgress`] in a watch channel. The last value stays
//! while the engine serves.

use std::fmt;

use tokio::time::Instant;

use sluice_core::vllm::logs::StartPhase;

/// The state of a start.
#[derive(Clone, Debug)]
pub struct StartProgress {
    /// The phase.
    pub phase: StartPhase,
    /// When the start began.
    pub started: Instant,
    /// When the phase began.
    pub phase_since: Instant,
    /// When the log last showed progress.
    pub moved: Instant,
    /// The log line that last showed progress.
    pub line: String,
}

impl StartProgress {
    /// A start that begins now.
    pub fn begin(now: Instant) -> Self {
        Self { phase: StartPhase::Launching, started: now, phase_since: now, moved: now, line: String::new() }
    }
}

/// For the operator: `compiling, 12 s (41 s in all)`.
impl fmt::Display for StartProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (phase, all) = (self.phase_since.elapsed().as_secs(), self.started.elapsed().as_secs());
        write!(f, "{}, {phase} s ({all} s in all)", self.phase)
    }
}
