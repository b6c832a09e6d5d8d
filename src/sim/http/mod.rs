//! The HTTP side: vLLM's routes, the bytes of responses, and the path from a request to sequences.
//!
//! `server` accepts connections, `routes` picks the handler, `generate` turns a valid body into
//! sequences for the engine, and `response_body` sends their tokens through a `response_writer`.
//! All of them use the state in [`crate::real_time`], which alone runs the engine.

mod anthropic;
mod response_body;
mod choice;
pub(crate) mod error_body;
mod response_writer;
pub(crate) mod generate;
pub(crate) mod models;
mod reply;
mod responses;
mod sglang;
pub(crate) mod routes;
pub mod server;
#[cfg(test)]
mod server_tests;
pub mod wire;
