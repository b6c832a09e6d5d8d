//! The result of a run, its statistics, and its files.
//!
//! `record` holds the raw data: one record for each request. `metrics` computes the statistics of `vllm bench serve`
//! from it, `steady` those of the steady window, `slices` those by class, adapter or pool. `validity` warns when the
//! client itself was the limit. `file` and `csv` are the formats on disk. Nothing here draws or prints.

pub mod record;
pub mod metrics;
pub mod vllm_keys;
pub mod steady;
pub mod slices;
pub mod validity;
pub mod file;
pub mod csv;
