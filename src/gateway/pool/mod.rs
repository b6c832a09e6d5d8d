//! Pools: which backend a request may use, which requests wait, and which is next.
//!
//! ```text
//!   AdmissionRequest --> Admission (one lock) --> Lease on a backend --first token--> prefill share is returned
//!                             |                                      --drop--------> everything is returned
//!                             +--> Ticket (in the pool's queue) --> Lease, or dropped, or classified again
//! ```
//! The arithmetic of one backend is in [`capacity`], its health in [`health`], the queue in [`queue`], the choice in
//! [`policy`]. `owners.rs` says which key or user is next, `dispatch.rs` which of its requests, and
//! `reservation.rs` how a wide request gets its room. `copies.rs` bounds the room of copies for
//! shadow arms, and `trial.rs` the room of requests on an engine on trial. `foreign.rs` counts the
//! room that other gateways use, and `divided.rs` bounds the room that this gateway may use by a
//! ledger of several gateways. `served.rs`, `known_routes.rs` and `serving.rs` say which engines
//! can serve a request, `adapters.rs` which LoRA adapters have slots, and [`admission`] combines
//! them. No clock and no I/O: the whole folder runs on virtual time in tests,
//! and a property test drives it through any order of entering, leaving, finishing, resizing and draining.

mod settled;
pub mod queue;
mod bill;
pub mod capacity;
mod share_of_prefill;
mod fair_owner;
mod owners;
pub mod spec;
pub mod policy;
mod recent_origins;
pub mod health;
mod served;
mod known_routes;
mod adapters;
mod breaker;
mod fault_report;
mod drain_rate;
mod prefill_rate;
mod request;
mod prefix;
mod engine_load;
mod running_copies;
mod share;
mod trial;
mod engine_work;
mod backend;
mod grant;
mod room;
mod state;
mod ejection;
mod starting;
mod choice;
mod reservation;
mod charging;
mod dispatch;
mod invariants;
mod apply;
mod shared;
pub mod view;
pub mod lease;
pub mod admission;
mod copies;
mod serving;
mod attained;
pub mod foreign;
pub mod divided;

#[cfg(test)]
mod tests;

pub use admission::{Admission, AdmissionDecision};
pub use backend::Cordon;
pub use breaker::RecentAnswers;
pub use capacity::{BackendLimits, CapacityUsage, LongPrefix, Need};
pub use divided::{BackendUse, ShareEnd};
pub use engine_work::{EngineLook, EngineWatch, EngineWork};
pub use fair_owner::{FairOwner, OwnerView};
pub use fault_report::FaultReport;
pub use foreign::Claim;
pub use health::{BackendFault, HealthRules, Phase, RefusedGateway, Spared, Verdict};
pub use lease::{Lease, Ticket, WaitResult};
pub use queue::QueueOrder;
pub use request::AdmissionRequest;
pub use served::{Asks, Facts, Lack, ModelKey, RouteSet, Served, Wants};
pub use share::Share;
pub use spec::{Address, BackendSpec, PoolLayout, PoolRules, PoolSpec};
pub use trial::TrialBound;
pub use view::{BackendView, PoolView, WaitingRequest};
