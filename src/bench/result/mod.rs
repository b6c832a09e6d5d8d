//! The result of a run, with statistics and files.
//!
//! `record` holds the raw data, one record for each request. `metrics` computes the statistics of
//! `vllm bench serve`, `steady` the same for the steady window, `slices` for each class, adapter or
//! pool. `validity` warns if the client itself was the limit. `file` and `csv` are the formats on
//! disk.

pub mod record;
pub mod metrics;
pub mod vllm_keys;
pub mod steady;
pub mod slices;
pub mod validity;
pub mod file;
pub mod csv;
