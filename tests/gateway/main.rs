//! The gateway over real sockets, as seen by a client and an engine, byte for byte.
//!
//! Each test starts a gateway in this process in front of scripted engines (`engine.rs`), or of
//! simulated ones, and connects to it through a plain socket (`client.rs`). Its counters (`gate.rs`) must be 0 afterwards:
//! nothing in flight, nothing waiting, no tokens outstanding.
//!
//! Every wait is for a condition and has a deadline; no test relies on sleeping. By topic: `errors` (the
//! table of the gateway's error responses), `input` (clients that misbehave), `broken` (engines that do), `bodies` (bytes arrive
//! unchanged and at once), `leaving` (clients that go), `failover`, `fleet`, `health`, `reload`, `stop`; and `simulator`
//! (the simulated engine process).

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
