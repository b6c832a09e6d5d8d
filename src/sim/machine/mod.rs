//! The simulated machine: GPU and model as data, how long a step takes on them, and how much memory the KV cache gets.
//!
//! `gpu`, `model` and `constants` are read from TOML; `profile` combines them; `cost` and `memory` are formulas over the
//! result. All of it is pure arithmetic on sizes and counts, except that `preset` reads files that the user names.

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
pub use graphs::Graphs;
pub use layout::Layout;
pub use memory::{KvBudget, MemoryError, MemorySettings, kv_budget};
pub use model::Model;
pub use preset::ProfileError;
pub use profile::{Memory, PROFILES, Profile, Rates, Shape};
