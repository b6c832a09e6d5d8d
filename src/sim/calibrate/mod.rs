//! Measured rows beside what the simulator makes of the same load, and a fit of the constants to them.
//!
//! ```text
//! CSV -> rows -> play (closed loop, Poisson; virtual time) -> report (measured, simulated, error)
//!                  ^------ search (moves constants) <-------- distance
//! ```
//!
//! Where the simulator's own numbers come from, and how far they can be trusted, is in `tests/fixtures/h200` and in the
//! tests here: 40 cells of one machine within 15 % (half of them within 3 %), 109 of another (half within 2 %; all of
//! throughput, TPOT and E2EL within 15 %), single steps within 2 %, and recorded requests answered when they were.
//! The median TTFT of a burst is the weak spot: it depends on which requests share a prefill step, and two runs of the
//! same load on the same server differ in it by a fifth.

mod play;
pub mod report;
pub mod rows;
pub mod search;

#[cfg(test)]
mod arrangements;
#[cfg(test)]
mod tests;

pub use play::play;
pub use report::Spread;
pub use rows::{Row, RowError};
pub use search::Setting;
