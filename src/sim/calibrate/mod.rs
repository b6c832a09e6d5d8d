//! Calibration: fits the constants of the simulator to measured load tests, and reports the errors.
//!
//! ```text
//! CSV -> rows -> play (closed loop, Poisson; virtual time) -> report (measured, simulated, error)
//!                  ^------ search (moves constants) <-------- distance
//! ```
//!
//! The module is in this crate and not in the command line, because it runs the engine on virtual
//! time and its tests check the built-in constants. `sluice sim fit` only reads files and prints.
//! The measurements are in `tests/fixtures/h200`: load tests on two machines, simulated with the
//! host `quiet` (median errors 4 % and 2 %), recorded requests, single steps, and mixed traffic
//! through the gateway, simulated with the host `busy` (median error 3 %).
//! `src/lab/tests/measured.rs` compares later runs with the current gateway. The least accurate
//! value is the median TTFT of a burst. It depends on which requests share a prefill step, so that
//! two runs of the same load on the same server differ by a fifth.

mod play;
pub mod report;
pub mod rows;
pub mod search;

#[cfg(test)]
mod tests;

pub use play::play;
pub use report::Spread;
pub use rows::{Row, RowError};
pub use search::FitSettings;
