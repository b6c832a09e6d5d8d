//! A simulated server on virtual time: the API server and the engine.
//!
//! `sluice sim` runs it on the real clock. Tests, `sluice lab` and the calibration run it as fast
//! as possible.

mod front_end;
mod server;

pub use front_end::FrontEnd;
pub use server::{StepEnd, VirtualServer};
