//! The simulated machine: GPU and model as data, the time of a step on them, and the size of the KV
//! cache.
//!
//! `gpu`, `model` and `constants` are read from TOML; `profile` combines them. `cost` and `memory`
//! compute times and sizes. Everything is pure arithmetic, except that `preset` reads files of the
//! user.

mod constants;
mod gpu;
pub mod graphs;
mod layout;
pub mod memory;
mod model;
mod preset;
mod profile;
pub mod cost;
#[cfg(test)]
mod tests;

pub use constants::{Constants, Efficiency, FrontEndRates, HostConstants, KernelConstants, StepConstants};
pub use cost::{CostModel, StepLoad};
pub use gpu::{GIB, Gpu};
pub use graphs::{GraphMode, Graphs};
pub use layout::Layout;
pub use memory::{KvBudget, MemoryError, MemorySettings, kv_budget};
pub use model::Model;
pub use preset::ProfileError;
pub use profile::{Memory, PROFILES, Profile, Rates, Shape};
