//! The result of a run, with statistics and files.
//!
//! `metrics` computes the statistics of `vllm bench serve` from the raw `record`s, `steady` the
//! same for the steady window, `slices` for each class, adapter or pool. `validity` warns if the
//! client itself was the limit.

pub mod record;
pub mod metrics;
pub mod vllm_keys;
pub mod steady;
pub mod slices;
pub mod validity;
pub mod file;
pub mod csv;
