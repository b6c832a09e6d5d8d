//! The interface between the supervision of an engine and whatever runs the engine.
//!
//! A [`Driver`] controls one backend's engine: it checks settings, starts the engine, finds it again after a restart of the
//! gateway, stops it and shows its log. It makes no decisions: when to drain, restart or give up is up to the supervision.
//! There are four: [`ProcessDriver`] (a child process of the gateway), [`CommandDriver`] (start, stop and status commands
//! of the operator: systemd, docker, ssh), `PodDriver` (a pod of a StatefulSet, with the cargo feature `kubernetes`) and
//! [`ExternalDriver`] (only a URL: drain and probe, never restart).
//!
//! Rules for every driver:
//! - [`Driver::check`] reports problems before anything is stopped, and changes nothing;
//! - [`Driver::start`] returns when the engine was started, not when it is ready: `fleet::ready` waits for readiness, in
//!   the same way for all drivers;
//! - at most one engine at a time: a second start is refused until the first engine was stopped;
//! - [`Driver::stop`] returns `Ok` only when no process of the engine that the driver can detect is left; it may be repeated. A pod
//!   is let go instead, since its platform starts it again and gives no device to two;
//! - after a future was dropped, `status`, `adopt` and `stop` still work.
//!
//! Draining is not part of a driver: requests end before [`Driver::stop`] is called.

mod running_commands;
mod command;
mod external;
mod failure;
mod identity;
mod interface;
#[cfg(feature = "kubernetes")]
mod kubernetes;
pub(crate) mod process;
mod progress;
mod redact;
mod settings;

pub use command::CommandDriver;
pub(crate) use command::{ENDED_READINGS, STATUS_INTERVAL};
pub use external::ExternalDriver;
pub use failure::{EngineFailure, Notice};
pub use identity::EngineIdentity;
pub use interface::{
    AdapterRank, Driver, DriverKind, EngineStatus, LogLines, PortOwner, SharedDriver, StopRules, Stopped,
};
#[cfg(feature = "kubernetes")]
pub use kubernetes::PodDriver;
pub use process::ProcessDriver;
pub use progress::StartProgress;
pub(crate) use redact::Redactor;
pub(crate) use settings::exposed;
pub use settings::{EngineSettings, dashed};
