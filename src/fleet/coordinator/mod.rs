//! The coordinator: everything that concerns the engines of the gateway together.
//!
//! At most one planned change is under way in the whole fleet, and only if other backends can carry
//! the engine's load ([`change`]). The [reconciler](reconcile) works towards the configuration in
//! force: it starts new engines, stops removed ones ([`stop`]), and restarts changed ones, one at a
//! time ([`rollout`]). Before that, engines of an earlier gateway that are no longer configured are
//! stopped ([`leftovers`]). An upgrade gives the engines to the next gateway ([`hand_over`]).
//! Autoscaling sets how many engines of a pool run ([`scale`]). Engines that share a device take
//! turns ([`sharing`]).
//!
//! All these parts share one [`registry`] with the [table](engine_table) of engines. Bounds: one
//! task per configured engine, and one per engine that is being stopped.

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
mod sharing;
mod stop;
mod turns;

pub use change::{ChangeStarted, RestartError, RestartRequest, Trial};
pub use engine_table::ExternalBackend;
pub use fleet::{Fleet, LogError};
pub use hand_over::EngineBusy;
pub use leftovers::unattended;
pub use registry::DriverMaker;
