//! sluice: a gateway in front of vLLM that keeps the tail short.

pub mod base;
pub mod vllm;

pub mod bench;
pub mod sim;

pub mod cli;
