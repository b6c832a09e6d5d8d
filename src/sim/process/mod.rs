//! The simulator as the process `vllm serve`: flags, start-up and failures.
//!
//! `config` turns vLLM's flags into settings. `startup` plans phases and log lines until the server
//! is ready. `model_folder` reads the sizes of a model on disk. `refusal` holds the start-up
//! errors, `fault` the faults that an operator can inject.

pub mod config;
pub mod fault;
pub(crate) mod model_folder;
pub mod refusal;
pub mod startup;
