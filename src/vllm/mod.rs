//! What is known about vLLM from outside: its flags and its Prometheus page.
//!
//! Facts of vLLM 0.33.0, with older names where they differ. Pure: text in, values out.

pub mod args;
pub mod metrics;
