//! The HTTP client that sends one request and measures its response.
//!
//! `load_client` sends over HTTP/1.1 connections of its own, `target` is where to, and `events` decodes the bytes of a
//! response and their times. It shares no code with the gateway, so that neither hides a fault of the other. There is
//! no TLS and no HTTP/2. `mock` is for tests.

pub mod failure;
pub mod events;
pub(crate) mod target;
mod stream;
pub mod load_client;

#[cfg(any(test, feature = "testing"))]
pub mod mock;
