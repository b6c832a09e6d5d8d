//! The coordinator: all engines that the gateway runs, and what concerns them together.
//!
//! At most one planned change is under way in the whole fleet, and it begins only when other backends can carry the engine's
//! load ([`change`]). The [reconciler](reconcile) works towards the configuration in force: it starts engines that are new,
//! stops engines that are no longer configured ([`stop`]), and takes changed engines through a restart one after the other
//! ([`rollout`]). Engines of an earlier gateway that are no longer configured are stopped first ([`leftovers`]). An upgrade
//! gives the engines to the next gateway ([`hand_over`]). Autoscaling says how many engines of a pool run ([`scale`]).
//!
//! All share one [`registry`], whose [table](engine_table) says what is configured, what is managed and what is being
//! stopped. Bounds: one task per configured engine, and one per engine that is being stopped.

mod change;
mod engine_table;
mod fleet;
mod hand_over;
mod leftovers;
mod reconcile;
mod registry;
mod rollout;
mod scale;
mod scales;
mod stop;

pub use change::{ChangeStarted, RestartError, RestartRequest};
pub use engine_table::ExternalBackend;
pub use fleet::{Fleet, LogError};
pub use hand_over::EngineBusy;
pub use leftovers::unattended;
pub use registry::DriverMaker;
