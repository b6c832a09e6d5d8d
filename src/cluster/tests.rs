//! The ledger's rules on virtual time: single situations in `situations.rs`, seeded schedules of faults in `schedules.rs`, both
//! in the world of `world.rs`.

mod request;
mod store;
mod world;
mod schedules;
mod election;
mod situations;
