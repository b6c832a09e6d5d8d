//! What is known about vLLM from outside: its flags, its Prometheus page, its log and its failures.
//!
//! Facts of vLLM 0.33.0, with older names where they differ. Pure: text in, values out.

pub mod args;
pub mod failure;
pub mod logs;
pub mod metrics;
