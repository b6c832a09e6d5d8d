//! The base of sluice: units, statistics, the wire formats of OpenAI and vLLM, and the meter.
//!
//! Nothing here reads a clock, a socket, a file or global randomness: time and chance are
//! parameters. The load generator and the simulator use this crate and none of the gateway's state,
//! so that they check the gateway from outside.

#[macro_use]
pub mod base;
pub mod stats;
pub mod openai;
pub mod vllm;
pub mod engines;
pub mod meter;
