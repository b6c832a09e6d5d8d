//! Pools: who may carry what, who waits, and who is next.
//!
//! ```text
//!   AdmissionRequest --> Admission (one lock) --> Lease on a backend --first token--> prefill share goes back
//!                 |                                      --drop--------> everything goes back
//!                 +--> Ticket (in the pool's queue) --> Lease, or left, or turned away
//! ```
//! The arithmetic of one backend is in [`capacity`], its health in [`health`], the line in
//! [`queue`], the choice in [`policy`]; [`admission`] ties them together. No clock, no I/O: the
//! whole folder runs on virtual time in tests, and a property test drives it through any order of
//! entering, leaving, finishing, resizing and draining.

pub mod admission;
mod backend;
mod breaker;
pub mod capacity;
mod drain_rate;
pub mod health;
pub mod layout;
pub mod lease;
pub mod policy;
pub mod queue;
mod state;
pub mod view;

#[cfg(test)]
mod tests;

pub use admission::{Admission, AdmissionDecision, AdmissionRequest};
pub use backend::Cordon;
pub use capacity::{BackendLimits, CapacityUsage, LongPrefix, Need};
pub use health::{BackendFault, HealthRules, Phase};
pub use layout::{Address, BackendSpec, PoolLayout, PoolRules, PoolSpec};
pub use lease::{Lease, Ticket, WaitResult};
pub use queue::QueueOrder;
pub use view::{BackendView, PoolView};
