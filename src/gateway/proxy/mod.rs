//! pingora at the edges: the client side as an `HttpServerApp`, the engine side as a `Connector`.
//!
//! Why not pingora's `ProxyHttp`: a length-aware gateway must read the body before it can choose an
//! upstream, and there a body that was read beforehand is sent again only from a 64 KiB buffer; the
//! 65,537th byte is lost in silence. 64 KiB are about 16k tokens: exactly the prompts this is about.
//! Owning both ends also means owning hop-by-hop headers, `100 Continue`, retries and error bodies;
//! they are in the files of this folder, and nothing else in the crate touches pingora.
//!
//! | file | what |
//! |---|---|
//! | `app.rs` | one connection's requests: routes, local responses, refusals before the body |
//! | `head.rs` | the head of a request: its deadline and bound, where the request ends |
//! | `body.rs` | the bounded read of a request body |
//! | `clients.rs` | what all clients together may hold: connections, bytes of bodies |
//! | `downstream.rs` | the client as the request path sees it |
//! | `upstream/` | the engine as the request path sees it: connections, one exchange, HTTP/1.1 from bytes |
//! | `transport.rs` | a client's connection: TLS or not, HTTP/1.1 or HTTP/2 |
//! | `socket.rs` | the client's socket: what belongs together leaves in one packet, a client that leaves is noticed |
//! | `http2.rs`, `frames.rs` | a connection with many requests, and its bounds |
//! | `headers.rs` | what passes from one side to the other |
//! | `listener.rs` | sockets, and the orderly end of connections |

mod app;
mod body;
mod clients;
mod downstream;
mod frames;
mod head;
mod headers;
mod http2;
mod listener;
mod socket;
mod transport;
mod upstream;

pub use app::{Gateway, LocalRoutes};
pub use clients::ClientLimits;
pub use listener::{ListenError, Listener, listen};
pub use upstream::UpstreamConnector;
