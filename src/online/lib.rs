//! The online tuner: changes the gateway's limits and the engines' flags according to how live
//! requests fare.
//!
//! | room | task |
//! |---|---|
//! | [`observe`] | gathers finished requests, the use of limits and metrics pages |
//! | [`kv_limit`] | learns a limit of tokens from preemptions, without the tuner |
//! | [`limits`] | fast layer: tries one change of limits at a time |
//! | [`engines`] | slow layer: changes flags by restarts, where limits no longer help |
//! | [`tuner`] | both layers for a whole configuration |
//! | [`scaler`] | computes how many engines a pool needs |
//! | [`findings`] | names the causes of slow requests, with evidence |
//!
//! Pure: no clock, socket or file. [`drive`] runs it on live traffic for `sluice serve`, on virtual
//! time for `sluice lab`.

pub mod event;
mod gate;
pub mod observe;
pub mod findings;
pub mod kv_limit;
pub mod scaler;
pub mod limits;
pub mod engines;
pub mod tuner;
pub mod drive;
