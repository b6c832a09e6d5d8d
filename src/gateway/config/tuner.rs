//! `[tuner]`: what the online tuner may change while requests run.
//!
//! The tuner itself is a crate above this one, `online`; it reads the limits of a configuration and changes those of pools. A
//! gateway without objectives has nothing to tune by, whatever the mode.

use super::table::table;
use super::value::words;

table! {
    /// The online tuner: moves limits by what live requests experience. It needs objectives ([slo]).
    #[derive(Copy, Eq)]
    pub struct Tuner {
        /// "advise" shows what it would change and why; "approve" makes a change when an operator approves it; "apply" makes
        /// changes by itself, one at a time, and undoes those that do not help; "off" does nothing. It moves slots,
        /// long_prefix, prefill_tokens and the prompt lengths that separate pools, never beyond what keeps every request
        /// servable. A reload keeps what it found, unless limits, objectives or backends in the file are others than before.
        pub mode: TunerMode = default("advise");
    }
}

words! {
    /// What the online tuner may do.
    pub enum TunerMode {
        /// Nothing.
        Off = "off",
        /// Show what it would change.
        Advise = "advise",
        /// Make a change that an operator approved.
        Approve = "approve",
        /// Make changes.
        Apply = "apply",
    }
}
