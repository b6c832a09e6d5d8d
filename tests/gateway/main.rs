//! The gateway over real sockets, as seen by a client and an engine, byte for byte.
//!
//! Each test starts a gateway in this process in front of scripted engines (`engine.rs`), or of
//! simulated ones, and connects to it through a plain socket (`client.rs`). Its counters (`test_gateway.rs`) must be 0 afterwards:
//! nothing in flight, nothing waiting, no tokens outstanding.
//!
//! Every wait is for a condition and has a deadline; no test relies on sleeping. By topic: `access_log`, `admin` (who may
//! use the admin port, and how long), `errors` (the table of the gateway's error responses), `input` (clients that
//! misbehave), `hostile` (requests made to confuse), `limits` (bounds on the holdings of all
//! clients together), `shares` (one client does not keep out the others), `proxies` (proxies that
//! name their clients), `fair` (which key is next),
//! `broken` (engines that do), `early` (engines that do not read to the end), `cut` (requests that outlive
//! `drain_timeout`), `bodies` (bytes arrive unchanged and at once), `stream_options` (whatever a client writes there),
//! `forms` (multipart), `encoded` (compressed), `paths`, `priority`, `state_owner` (the owner
//! of `fleet.state`), `credentials`, `browsers` (pages of other origins), `requests` (the parts of
//! a request that reach an engine, and the parts that do not), `stored` (stored responses),
//! `key_limits` (tokens of keys are settled), `leaving` (clients that go), `experiments`, `length`
//! (the estimated length of a prompt), `models` (engines of one pool that serve different models),
//! `counting` (the counts in the metrics), `failing` (log lines about
//! engines that fail), `failover`, `checks` (what check, serve and a reload refuse), `commands` (subcommands beside a gateway), `engine_metrics`,
//! `fleet`, `health`, `records` (and their replay), `reload`, `reload_keys`, `stop`,
//! `secrets` (of engines, shown nowhere), `tls` and `http2` (`tunnel.rs` puts TLS
//! around what speaks plain text here), `traces`, `upgrade`, `upgrade_faults`, `wide`; and `simulator` (the simulated engine process).

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
mod counting;
mod credentials;
mod cut;
mod early;
mod elsewhere;
mod encoded;
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
mod records;
mod reload;
mod reload_keys;
mod requests;
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
mod wide;
