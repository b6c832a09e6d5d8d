//! The HTTP client that sends one request and measures its response.
//!
//! `load_client` sends requests, `target` holds the HTTP/1.1 connections to a server, `stream` measures a response and
//! `events` parses it; `tls` is for https addresses. No code is shared with the gateway, so that a fault there cannot hide
//! the same fault here. HTTP/2 is not supported. `mock` is for tests.

pub mod failure;
pub mod events;
pub mod tls;
pub(crate) mod target;
mod stream;
pub mod load_client;

#[cfg(any(test, feature = "testing"))]
pub mod mock;
