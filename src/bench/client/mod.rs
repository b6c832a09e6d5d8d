//! The HTTP client that sends one request and measures the response.
//!
//! `load_client` sends requests, `target` holds the HTTP/1.1 connections to a server, `stream`
//! measures a response, `events` parses it, `tls` is for https addresses. No code is shared with
//! the gateway's request path: a fault there cannot hide here.

pub mod failure;
pub mod events;
pub mod tls;
pub(crate) mod target;
mod stream;
pub mod load_client;
