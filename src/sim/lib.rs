//! A process that behaves like `vllm serve` on a GPU that is not there.
//!
//! ```text
//! socket -> server (HTTP, SSE, vLLM's shapes) -> driver (real clock) -> lane (front end) -> engine (step loop)
//!                                                                                            cost (roofline)
//! ```
//!
//! The queueing is the point: requests compete for the token budget of shared steps, exactly as in vLLM V1, so
//! that routing arrangements differ here for the reason they differ on GPUs. The text is made up, the lengths and
//! times are not. `engine`, `cost` and `lane` are pure and run on virtual time from a seed; `driver` ties a lane to
//! the clock; `server` speaks HTTP.

mod anthropic;
mod answer;
pub mod api;
mod choice;
pub mod config;
pub mod cost;
mod driver;
pub mod engine;
pub mod fault;
pub mod fit;
mod format;
pub mod front_end;
mod gate;
mod generate;
pub mod lane;
pub mod log;
mod logprobs;
pub mod memory;
mod models;
mod outlet;
mod page;
pub mod profile;
pub mod refusal;
mod requests;
mod responses;
mod routes;
mod script;
pub mod server;
#[cfg(test)]
mod server_tests;
pub mod startup;
mod stats;
mod template;
pub mod text;
pub mod vocabulary;
pub mod wire;

pub use config::SimConfig;
pub use cost::{CostModel, StepLoad};
pub use engine::{Content, Engine, EngineConfig, Policy, Request, StepOutcome};
pub use fault::Fault;
pub use lane::Lane;
pub use memory::{KvBudget, MemoryError, MemorySettings, kv_budget};
pub use profile::{Constants, Gpu, Layout, Model, Profile, ProfileError};
pub use refusal::Refusal;
pub use server::{Handle, Snapshot, spawn};
