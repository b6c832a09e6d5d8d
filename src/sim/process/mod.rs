//! The simulator as the process `vllm serve`: flags, start-up and failures.
//!
//! `config` turns vLLM's flags into the settings of a server. `startup` plans the phases and log
//! lines until the server is ready. `model_folder` reads the sizes of a model on disk. `refusal`
//! holds the start-up errors with vLLM's texts. `fault` holds the faults that an operator can
//! inject.

pub mod config;
pub mod fault;
pub(crate) mod model_folder;
pub mod refusal;
pub mod startup;
