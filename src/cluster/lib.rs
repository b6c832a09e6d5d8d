//! Several gateways before the same engines hold one limit.
//!
//! ```text
//!   pool: in use, waiting --> Member --plan--> Ledger --compare-and-swap--> store (one object)
//!   engine: running --------^   ^                                            |
//!                               '---- read ----------------------------------'
//!                            Member --room--> pool: a bound on each backend
//! ```
//!
//! The [`Ledger`] says which gateway may use which *share* of each backend's limits. A gateway's [`Member`] decides what it
//! writes next and what it may use meanwhile. The rules, and why the sum of all that runs stays within the limit:
//!
//! - A member writes only states in which the shares of a backend sum to no more than its limit, and only over the state that
//!   it read. It never lowers a share below its own use.
//! - It uses less from before it sends a lower share, and more only once the higher one is confirmed. While the outcome of a
//!   write is unknown it uses the smaller of both; a read alone never raises what it uses, since it may be stale.
//! - A share is good for the *lease*, counted on the member's own clock from when the renewal was sent. In mode `strict` nothing
//!   new is admitted after that; in mode `keep` the last share is used until the store answers again.
//! - Others take a share back only after its owner's beat has stood still for longer than the lease on their own clock
//!   ([`silence`]), and only as far as what the engine says it runs is explained by the others ([`census`]).
//! - An object that is not there may have been lost: the member that makes it anew leaves the whole limit, less its own share, with
//!   [`EARLIER`], and that is taken back like any other share. Each member takes its own share from there, but only while its
//!   lease lasts, in mode `keep` too: later, that share may have been given to others before the object was lost.
//!   Without a share it admits nothing new until what was left with [`EARLIER`] is free: after an outage that lasted longer than
//!   the lease and lost the object, that takes another lease and a quarter, and some seconds.
//! - In mode `keep`, an engine's limit is exceeded at most by what gateways admitted after their lease had ended, of each of them
//!   no more than its last share, and by what still runs for gateways whose share was given up unexplained: after ten leases of
//!   silence, or because the engine does not say what it runs.
//!
//! Simpler rules divide the limits of API keys: [`keys`]. Fair queues share the work that each key
//! has had: [`attained`]. One of the gateways may lead, by another object in the same store:
//! [`election`].
//!
//! Pure: no clock, no I/O, no randomness. Times are durations on the member's own monotonic clock.
//! Bounds: [`GATEWAYS_MAX`] gateways in a ledger.

pub mod amounts;
mod key_claim;
mod pool_load;
pub mod ledger;
pub mod attained;
pub mod division;
pub mod keys;
mod silence;
pub mod usage;
mod windows;
mod census;
mod line;
pub mod notice;
mod part;
mod closing;
pub mod member;
pub mod election;
#[cfg(test)]
mod tests;

pub use amounts::{Amounts, Limit, Unit};
pub use attained::Attained;
pub use election::{Candidate, NotARecord, Record};
pub use key_claim::{KeyClaim, UNITS};
pub use ledger::{EARLIER, Entry, GATEWAYS_MAX, Holding, Ledger, UNEXPLAINED, Unreadable, VERSION};
pub use member::{Identity, Member, Plan, Rules};
pub use notice::{Notice, Standing};
pub use pool_load::PoolLoad;
pub use silence::{END_AGE, PAUSE, SURE_AGE};
pub use usage::{LocalUse, Page, Usage};
