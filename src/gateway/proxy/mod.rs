//! The pingora adapter: the client side is an `HttpServerApp`, the engine side a `Connector`.
//!
//! Why not pingora's `ProxyHttp`: the gateway must read the body before it can choose an upstream,
//! and if a body was read in advance, `ProxyHttp` forwards it from a buffer of 64 KiB (16k tokens)
//! and silently drops the rest. So hop-by-hop headers, `100 Continue`, retries and error bodies are
//! implemented here. No other module of the crate uses pingora.
//!
//! | file | content |
//! |---|---|
//! | `app.rs` | the requests of a connection: refusals before the body, and the request path |
//! | `local.rs` | paths that the gateway serves itself |
//! | `cors.rs`, `engine_origins.rs` | cross-origin requests of web pages |
//! | `head.rs` | reading a request head: deadline, size, framing checks |
//! | `body.rs`, `spare_buffers.rs` | reading a request body: size, rate, memory; reused buffers |
//! | `decode.rs` | compressed request bodies |
//! | `clients.rs` | shares of connections, handshakes and body memory |
//! | `trust.rs`, `proxy_protocol.rs` | the client's address behind proxies |
//! | `downstream.rs` | the client as the request path sees it |
//! | `upstream/` | the engine as the request path sees it: connections, exchanges, responses |
//! | `tunnel.rs`, `web_socket.rs` | WebSockets |
//! | `transport.rs` | a client's connection: TLS or plain, HTTP/1.1 or HTTP/2 |
//! | `socket.rs` | a client's socket: gathered writes |
//! | `client_handle.rs` | the socket below a session: chunks, detection of disconnects |
//! | `http2.rs`, `frames.rs` | an HTTP/2 connection and its limits |
//! | `proxy_flow.rs` | the type of the request path; refused heads |
//! | `after.rs` | the end of a connection after a request |
//! | `headers.rs` | forwarded headers |
//! | `listener.rs`, `ending.rs` | accepting connections, shutdown, hand-over to another process |

mod after;
mod app;
mod spare_buffers;
mod trust;
mod client_handle;
mod clients;
mod engine_origins;
mod body;
mod cors;
mod decode;
mod proxy_flow;
mod proxy_protocol;
mod downstream;
mod ending;
mod frames;
mod head;
mod headers;
mod http2;
mod listener;
mod local;
mod socket;
mod transport;
mod tunnel;
mod upstream;
mod web_socket;

pub use app::Gateway;
pub use clients::ClientLimits;
pub use ending::{Ending, Ends};
pub use listener::{ListenError, Listener, listen};
pub use local::LocalRoutes;
pub use proxy_flow::ProxyFlow;
pub use upstream::UpstreamConnector;
