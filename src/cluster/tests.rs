//! Tests of the ledger's rules on virtual time.
//!
//! `situations.rs` and `schedules.rs` (seeded faults) run in the world of `world.rs`. `election.rs`
//! has a world of candidates.

mod request;
mod store;
mod world;
mod schedules;
mod election;
mod situations;
