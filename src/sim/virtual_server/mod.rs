//! One simulated server on virtual time: the API server's thread in front, the engine behind it.
//!
//! The engine loop runs it on the real clock; tests, the demo and the calibration run it as fast as they can.

mod front_end;
mod server;

pub use front_end::FrontEnd;
pub use server::{StepEnd, VirtualServer};
