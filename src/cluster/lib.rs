//! Several gateways in front of the same engines keep within one limit.
//!
//! ```text
//!   pool: in use, waiting --> Member --plan--> Ledger --compare-and-swap--> store (one object)
//!   engine: running --------^   ^                                            |
//!                               '---- read ----------------------------------'
//!                            Member --room--> pool: a bound on each backend
//! ```
//!
//! | word | meaning |
//! |---|---|
//! | share | the part of a backend's limits that a gateway holds in the [`Ledger`] |
//! | lease | time for which a renewal is valid, on the sender's clock from when it was sent |
//! | beat | a counter that grows with each renewal of a gateway |
//! | silent | said of a gateway whose beat stood still until the lease was surely over |
//! | page | an engine's report of the sequences that it has |
//! | line | the gateways that use or want a unit, in the order of their turns (`line`) |
//!
//! - A write replaces only the state that a [`Member`] read. It never raises the sum of the shares
//!   of a backend above the limit.
//! - A member obeys a lower share before it sends that share, and a higher share once the store has
//!   confirmed it. Until the outcome of a write is known, the smaller share counts. A read may be
//!   stale, so it raises no share.
//! - A member frees shares of silent gateways as far as the requests of the other gateways explain
//!   the load that the engine reports (`census`).
//! - For the time after the lease, see [`Rules`]; after a loss of the object, see [`EARLIER`].
//!
//! API keys have simpler rules ([`keys`]). Fair queues share each owner's work ([`attained`]). One
//! gateway may lead ([`election`]). No clock, I/O or randomness is used: the caller passes times of
//! the member's monotonic clock. Bounds: [`GATEWAYS_MAX`].

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
pub use election::{Candidate, LeaseRecord, NotARecord};
pub use key_claim::{KeyClaim, UNITS};
pub use ledger::{EARLIER, Entry, GATEWAYS_MAX, Holding, Ledger, UNEXPLAINED, Unreadable, VERSION};
pub use member::{Identity, Member, Plan, Rules};
pub use notice::{Notice, Standing};
pub use pool_load::PoolLoad;
pub use silence::{END_AGE, PAUSE, SURE_AGE};
pub use usage::{LocalUse, Page, Usage};
