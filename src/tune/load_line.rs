//! A load of a rate search as a line of the journal, so that an interrupted search continues.
//!
//! Rates are in requests per second, times in seconds.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use sluice_bench::search::TrialRecord;

/// A line of a load. The only key, `load`, distinguishes it from the line of a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoadLine {
    pub(crate) load: Load,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) of: Value,
    pub(crate) record: TrialRecord,
}

impl LoadLine {
    pub(crate) const BEGINS: &'static str = "{\"load\":";

    pub(crate) fn new(of: Value, record: &TrialRecord) -> Self {
        Self { load: Load { of, record: record.clone() } }
    }
}
