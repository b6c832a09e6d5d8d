//! sluice: a gateway in front of vLLM that keeps the tail short.
//!
//! ```text
//!   client --> proxy::app --> flow: estimate -> classify -> assign -> admit -> forward -> meter -> record --> telemetry
//!                                     |            |                    |          |
//!                             estimate/  flow/routing_table        pool/     proxy::upstream --> vLLM
//!                                                                  (leases)
//!   probes (serve/) --> pool health        reload (serve/) --> pool::apply, flow::RoutingTable        sim/ looks like vLLM
//!   fleet/ starts, stops, restarts and heals engines; it cordons and resizes backends in the pool meanwhile
//!   bench/ puts load on any server and judges it by stats/; cli/ says it, and draws it
//! ```
//!
//! The layers are crates, so that the compiler enforces them and a change compiles only what is above it:
//! `src/core` <- `src/gateway` <- `src/fleet`; `src/bench` and `src/sim` know `src/core` alone; this crate
//! composes them. Within a crate modules are declared bottom-up and a file imports only from above its own line.
//!
//! What must stay absent:
//! 1. Response bytes are never changed or held back, except what we ourselves injected (usage
//!    events) and take out again.
//! 2. There is no queue, map, buffer, label set or retry without a bound that has a name.
//! 3. There is no retry after the first response byte has reached the client.
//! 4. Domain code (everything above `proxy`) knows no metrics library, socket, process or wall clock.
//! 5. No request ends without exactly one record; no lease is returned but by drop; no counter is
//!    ever repaired by a reset.
//! 6. No `dyn`, no lock and no allocation per chunk of a stream; strings are for edges, dense ids
//!    for the path of a request.

pub use sluice_bench as bench;
pub use sluice_core::{base, meter, openai, stats, vllm};
pub use sluice_fleet as fleet;
pub use sluice_gateway::{config, estimate, experiment, flow, pool, proxy, telemetry};
pub use sluice_sim as sim;

pub mod admin;
pub mod serve;
pub mod cli;
