//! Tests of the ledger's rules on virtual time.
//!
//! `situations.rs` has single situations, `schedules.rs` has seeded schedules of faults, and both
//! run in the world of `world.rs`. `election.rs` tests the election with a world of candidates.

mod request;
mod store;
mod world;
mod schedules;
mod election;
mod situations;
