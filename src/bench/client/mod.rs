//! The HTTP client that sends one request and measures its response.
//!
//! `load_client` sends requests, `target` holds the HTTP/1.1 connections to a server, `stream` measures a response and
//! `events` parses it. No code is shared with the gateway, so that a fault there cannot hide the same fault here. TLS and
//! HTTP/2 are not supported. `mock` is for tests.

pub mod failure;
pub mod events;
pub(crate) mod target;
mod stream;
pub mod load_client;

#[cfg(any(test, feature = "testing"))]
pub mod mock;
