//! Pools: which backend a request may use, which requests wait, and which is next.
//!
//! ```text
//! AdmissionRequest --> Admission (one lock) --> Lease --first token--> prefill share is returned
//!                           |                         --drop---------> everything is returned
//!                           +--> Ticket (in the pool's queue) --> Lease, dropped, or reclassified
//! ```
//!
//! | subject | file |
//! |---|---|
//! | capacity and health of one backend | [`capacity`], [`health`] |
//! | order of waiters, next owner, next request | [`queue`], `owners.rs`, `dispatch.rs` |
//! | room for a request that fits nowhere yet | `reservation.rs` |
//! | choice of a backend | `choice.rs`, [`policy`] |
//! | limits, ceilings, trials, shares | `bounds.rs` |
//! | copies for shadow arms | `copies.rs` |
//! | whether a backend may leave service | [`replacement`] |
//! | ranks of one server | `ranks.rs` |
//! | prefix caches, estimated or by events | `prefix.rs`, `cache_events.rs`, `event_reports.rs` |
//! | capacity used by other gateways, shares by a ledger | `foreign.rs`, `divided.rs` |
//! | which engines can serve a request | `served.rs`, `known_routes.rs`, `serving.rs` |
//! | LoRA adapters with slots | `adapters.rs` |
//!
//! [`admission`] combines them. The folder reads no clock and does no I/O, so tests run it on
//! virtual time, and a property test drives it through any order of entering, leaving, finishing,
//! resizing and draining.

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
mod cache_events;
mod engine_load;
mod running_copies;
mod share;
mod bounds;
mod engine_work;
mod liveness;
mod service;
mod known_engine;
mod backend;
mod grant;
mod room;
mod state;
mod ranks;
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
pub mod replacement;
pub mod lease;
pub mod admission;
mod event_reports;
mod copies;
mod serving;
mod attained;
pub mod foreign;
mod decoding;
pub mod divided;

#[cfg(test)]
mod tests;

pub use admission::Admission;
pub use bounds::{Bound, LearnedTokens, TrialBound};
pub use breaker::RecentAnswers;
pub use cache_events::{CacheNews, EventsState, EventsView, ServedPrompt};
pub use capacity::{BackendLimits, CapacityUsage, LongPrefix, Need};
pub use decoding::DecodeSums;
pub use divided::{BackendUse, ShareEnd};
pub use engine_work::{EngineCounters, EngineWork, SilenceWatch};
pub use fair_owner::{FairOwner, OwnerView};
pub use fault_report::FaultReport;
pub use foreign::Claim;
pub use grant::{AdmissionDecision, WaitResult};
pub use health::{BackendFault, HealthRules, Phase, RefusedGateway, Spared, Verdict};
pub use lease::{Lease, Ticket};
pub use queue::QueueOrder;
pub use replacement::{Irreplaceable, Replacement};
pub use request::AdmissionRequest;
pub use served::{Asks, Facts, Lack, ModelKey, RouteSet, Served, Wants};
pub use service::Cordon;
pub use share::Share;
pub use spec::{BackendSpec, PoolLayout, PoolRules, PoolSpec};
pub use view::{BackendView, PoolView, WaitingRequest};
