//! What is known about vLLM from outside: its flags, its versions and its Prometheus page.
//!
//! Facts of vLLM 0.32 and 0.33, with older names where they differ. Pure: text in, values out.

pub mod args;
mod flags;
pub mod metrics;
pub mod version;
