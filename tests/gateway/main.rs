//! The gateway over real sockets: what a client and an engine see of it, byte for byte.
//!
//! Each test starts a gateway in this process in front of engines that do exactly what the test says (`engine.rs`), or of
//! simulated ones, and speaks to it through a plain socket (`client.rs`). Its books (`gate.rs`) must be closed afterwards:
//! nothing in flight, nothing waiting, no tokens outstanding.
//!
//! Every wait is for a condition and has a deadline; nothing here sleeps to be on time. By topic: `errors` (the
//! table of answers of our own), `input` (clients that misbehave), `broken` (engines that do), `bodies` (bytes arrive
//! unchanged and at once), `leaving` (clients that go), `failover`, `fleet`, `health`, `reload`, `stop`; and `simulator`
//! (the process that stands in for an engine).

mod client;
mod engine;
mod gate;
#[path = "../common/ports.rs"]
mod ports;

mod bodies;
mod broken;
mod errors;
mod failover;
mod fleet;
mod health;
mod input;
mod leaving;
mod reload;
mod simulator;
mod stop;
