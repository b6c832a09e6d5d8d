//! The gateway over real sockets, as seen by a client and an engine, byte for byte.
//!
//! Each test starts a gateway in this process in front of scripted engines (`engine.rs`) or
//! simulated ones, and connects to it through a plain socket (`client.rs`). Its counters
//! (`test_gateway.rs`) must be 0 afterwards: nothing in flight, nothing waiting, no tokens
//! outstanding. Every wait is for a condition and has a deadline. The header of each module names
//! its topic:
//!
//! - clients: `admin`, `browsers`, `credentials`, `encoded`, `errors`, `fair`, `forms`, `hostile`,
//!   `http2`, `input`, `key_limits`, `leaving`, `limits`, `origins`, `paths`, `priority`,
//!   `proxies`, `shares`, `slow_readers`, `stored`, `stream_options`, `wide`
//! - engines: `bodies`, `broken`, `continued`, `early`, `elsewhere`, `engine_kinds`, `engines`,
//!   `failing`, `failover`, `health`, `length`, `models`, `requests`, `sglang`, `tls`
//!   (`tunnel.rs` adds TLS to plain text), `web_sockets`
//! - operation: `access_log`, `added_experiments`, `checks`, `commands`, `counting`, `cut`,
//!   `engine_metrics`, `experiments`, `fleet`, `records`, `reload`, `reload_keys`, `secrets`,
//!   `shadow`, `state_owner`, `stop`, `traces`, `tuner`, `upgrade`, `upgrade_faults`
//! - the simulated engine process: `simulator`

mod client;
mod engine;
mod test_gateway;
mod tunnel;
#[path = "../common/ports.rs"]
mod ports;

mod access_log;
mod added_experiments;
mod admin;
mod bodies;
mod broken;
mod browsers;
mod checks;
mod commands;
mod continued;
mod counting;
mod credentials;
mod cut;
mod early;
mod elsewhere;
mod encoded;
mod engines;
mod engine_kinds;
mod engine_metrics;
mod errors;
mod experiments;
mod failing;
mod failover;
mod fair;
mod fleet;
mod forms;
mod health;
mod hostile;
mod http2;
mod http2_client;
mod input;
mod key_limits;
mod leaving;
mod length;
mod limits;
mod models;
mod origins;
mod paths;
mod priority;
mod proxies;
mod kv_events;
mod ranks;
mod records;
mod reload;
mod reload_keys;
mod requests;
mod sglang;
mod shadow;
mod shares;
mod simulator;
mod slow_readers;
mod state_owner;
mod stop;
mod secrets;
mod stored;
mod stream_options;
mod tls;
mod traces;
mod tuner;
mod upgrade;
mod upgrade_faults;
mod web_sockets;
mod wide;
