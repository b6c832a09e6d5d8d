//! The online tuner: changes the gateway's limits and the engines' flags by how live requests fare.
//!
//! ```text
//!   finished request --> Observer --> Window --.
//!   pools, every second ------------> Usage ---+--> Controller --> limits --> Tuner --> config
//!   engines' metrics pages -------> EngineWatch --> diagnosis in words
//! ```
//!
//! The [`Controller`] (fast layer) tries one change of limits at a time. [`moves`] proposes it from
//! the place where late requests lose time ([`loss`]) and the limit that holds them up ([`usage`]).
//! Later requests decide whether it stays. A change that did not help is blocked for a while, so
//! the limits come to rest. The [`EngineTuner`] (slow layer) changes flags where limits no longer
//! help. The [`Scaler`] computes how many engines a pool needs.
//!
//! Pure: no clock, socket or file. [`drive`] runs it on live traffic for `sluice serve`, on virtual
//! time for `sluice lab`.

pub mod lengths;
pub mod limits;
pub mod loss;
pub mod usage;
pub mod arms;
pub mod recent;
pub mod scaler;
pub mod window;
pub mod engines;
pub mod diagnosis;
pub mod moves;
pub mod blocks;
pub mod event;
pub mod flags;
pub mod forecast;
pub mod controller;
mod controller_choice;
mod controller_view;
pub mod proof;
pub mod change;
pub mod engine_look;
pub mod advice;
pub mod report;
mod pooled;
mod engine_saved;
pub mod engine_tuner;
mod engine_decision;
mod engine_verdict;
mod groups;
pub mod tuner;
mod tuner_view;
pub mod drive;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod engine_tests;

pub use controller::Controller;
pub use diagnosis::{Diagnosis, Reading};
pub use engine_look::{EngineState, Order, Restarted};
pub use engine_tuner::EngineTuner;
pub use engines::EngineSample;
pub use event::{Event, EventKind};
pub use flags::{EngineFlag, Flags};
pub use forecast::{Answer, Candidate, Forecast, LimitsQuestion, Question};
pub use limits::{Knob, Limits};
pub use proof::Load;
pub use report::{GroupReport, TimedEvent, TunerReport};
pub use scaler::{Look, Scaler, ScalerRules, Tally};
pub use tuner::{Saved, Tuner};
pub use window::Observer;
