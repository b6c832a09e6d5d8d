//! What makes the simulator look like the process `vllm serve`: its flags, its start-up and its failures.
//!
//! `config` turns vLLM's flags into the settings of a server, `startup` plans the phases and log lines until it is ready,
//! `model_folder` reads the sizes of a model on disk, `refusal` holds the start-up errors with vLLM's texts, and `fault` the
//! faults that an operator can inject.

pub mod config;
pub mod fault;
pub(crate) mod model_folder;
pub mod refusal;
pub mod startup;
