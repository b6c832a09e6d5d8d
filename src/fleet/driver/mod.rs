//! The interface between the supervision of an engine and the system that runs it.
//!
//! A [`Driver`] checks settings for one backend's engine. It starts the engine, finds it again,
//! stops it and shows the log. The supervision decides when. Drivers: [`ProcessDriver`] (a child
//! process), [`CommandDriver`] (commands of the operator), `PodDriver` (a pod; cargo feature
//! `kubernetes`) and [`ExternalDriver`] (only a URL: drain and probe). Rules:
//! - [`Driver::check`] reports problems before any stop, and changes nothing.
//! - [`Driver::start`] returns when the engine was started; `fleet::ready` waits for readiness.
//! - A second start is refused until the first engine was stopped.
//! - [`Driver::stop`] is called after the drain, and may be repeated. `Ok` means that no detectable
//!   process is left. A pod is not stopped and only leaves rotation.
//! - After a future was dropped, `status`, `adopt` and `stop` still work.

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
pub use settings::EngineSettings;
pub(crate) use settings::exposed;
