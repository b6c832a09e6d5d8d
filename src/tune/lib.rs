//! Finds the best settings of vLLM and the gateway for a workload and its objectives, with proof.
//!
//! ```text
//! tune.toml ──▶ space ──▶ search ──asks──▶ verdict ──▶ backend: the laboratory, or real engines
//!                           ▲                 │
//!                           └──── journal ◀───┘ trial
//!                                    │
//!                                    ▼
//!                      winner against default ──▶ table, JSON, result.txt, page
//! ```
//!
//! A *trial* is one setting with an outcome. A *search* chooses the next setting from the trials so
//! far. A *verdict* is the search for the highest rate at which the objectives hold, or a number of
//! runs that give a measure. The default is always tried. The reported values of the winner and the
//! default come from loads that no search used, except with `auto-tune`. The backend reports engine
//! times.

pub mod error;
pub mod setting;
pub mod constraint;
pub mod file;
pub mod space;
pub mod bound;
pub mod goal;
pub mod trial;
mod learned;
mod memory;
pub mod backend;
pub mod laboratory;
pub mod real;
#[cfg(test)]
mod testing;
mod front;
mod script_verdict;
mod unmet;
mod verdict;
mod load_line;
pub mod journal;
pub mod search;
pub mod tuner;
pub mod report;
#[cfg(test)]
mod tests;

pub use backend::{Backend, Started, System};
pub use bound::Bound;
pub use error::TuneError;
pub use file::TuneFile;
pub use goal::{Goal, Objective};
pub use journal::{Header, Journal};
pub use laboratory::{Laboratory, at_once};
pub use real::{BenchEngine, Flags, InPlace, OwnGateway, RealEngines, Watch};
pub use search::Method;
pub use space::Space;
pub use trial::{Effort, Outcome, Trial};
pub use tuner::{Budget, Plan, Progress, Report, tune};
