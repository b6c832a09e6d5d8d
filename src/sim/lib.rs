//! A process that behaves like `vllm serve`, without a GPU.
//!
//! ```text
//! socket -> http      -> real_time  -> virtual_server -> engine (step loop)
//!           (routes,     (clock,       (front end)          |
//!           shapes)      inbox)                          machine (roofline,
//!              |            |                                     memory)
//!           validate,    process (flags, faults),
//!           text         observe
//! ```
//!
//! The simulated part is the queueing: requests compete for the token budget of shared steps
//! exactly as in vLLM V1, so routing arrangements differ here for the same reason as on GPUs.
//! Lengths and times are realistic; the text is made up. `machine`, `engine` and `virtual_server`
//! are pure and run on virtual time from a seed. `real_time` ties a virtual server to the clock.
//! `http` speaks vLLM's API.

pub mod calibrate;
pub mod engine;
pub mod http;
pub mod machine;
pub mod observe;
pub mod process;
pub mod real_time;
pub mod text;
mod unix_time;
pub mod validate;
pub mod virtual_server;

pub use self::http::server::{Handle, Snapshot, spawn};
pub use engine::{Content, Engine, EngineConfig, Policy, Request, StepOutcome};
pub use machine::{Constants, CostModel, Gpu, KvBudget, Layout, MemoryError, MemorySettings, Model, Profile};
pub use machine::{ProfileError, StepLoad, kv_budget};
pub use process::config::{Sglang, SimConfig};
pub use process::fault::Fault;
pub use process::refusal::Refusal;
pub use real_time::state::MemoryOrder;
pub use virtual_server::VirtualServer;
