//! The HTTP side: vLLM's routes, the bytes of its responses, and the way from a request to its sequences.
//!
//! `server` accepts connections, `routes` picks the handler, `generate` turns a valid body into sequences for the
//! engine, and `response_body` sends what they produce through a `response_writer`. All of it uses the state that
//! [`crate::real_time`] shares and never touches the engine itself.

mod anthropic;
mod response_body;
mod choice;
pub(crate) mod error_body;
mod response_writer;
pub(crate) mod generate;
pub(crate) mod models;
mod reply;
mod responses;
pub(crate) mod routes;
pub mod server;
#[cfg(test)]
mod server_tests;
pub mod wire;
