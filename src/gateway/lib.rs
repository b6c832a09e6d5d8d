//! The request path: from the bytes of a client to a backend and back.
//!
//! ```text
//!   client -> proxy -> flow: estimate -> classify -> assign -> admit -> forward -> meter -> record
//!                                |           |          |        |         |                  |
//!                           estimate/ flow/classify experiment/ pool/      |             telemetry
//!                                                                 proxy::upstream -> vLLM
//! ```
//!
//! Modules are declared lowest layer first; a file imports only from modules above its own line.

pub mod origin;
pub mod shares;
pub mod estimate;
pub mod pool;
pub mod connect;
pub mod experiment;
pub mod flow;
pub mod telemetry;
pub mod proxy;
