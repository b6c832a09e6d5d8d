//! The HTTP client that sends one request and measures the response.
//!
//! It shares no code with the gateway's request path, so a fault there shows here.

pub mod failure;
pub mod events;
pub mod tls;
pub(crate) mod target;
mod stream;
pub mod load_client;
