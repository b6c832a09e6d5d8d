//! The admin port: metrics, status, reload, drain and the live page. None of it is on the client
//! port.
//!
//! | method and path | response | token |
//! |---|---|---|
//! | GET `/`, `/ui/{file}` | the live page, fed by `/admin/events` | no |
//! | GET `/metrics` | Prometheus' text format | no |
//! | GET `/health` | 200 while the process serves | no |
//! | GET `/admin/status` | pools, backends, the last five minutes ([`Status`]) | yes |
//! | GET `/admin/findings` | findings, and the last minute by key and engine | yes |
//! | GET `/admin/events` | server-sent events once a second, see [`snapshot`] | yes |
//! | GET `/admin/history` | the last five minutes and hour by class and pool | yes |
//! | GET `/admin/requests` | the slowest, shed and failed of the last requests | yes |
//! | GET `/admin/requests/{id}` | the last finished requests with this id | yes |
//! | POST `/admin/reload` | the list of changes, or the problems | yes |
//! | POST `/admin/backends/{pool}/{backend}/drain`, `/enable` | the new state | yes |
//! | POST `/admin/backends/{pool}/{backend}/restart` | 202, number of the change | yes |
//! | GET `/admin/backends/{pool}/{backend}/log` | engine's log, see [`engine_log`] | yes |
//! | POST `/admin/feedback/{request id}` | rates an answer: `{"good": true}` or false | yes |
//! | GET, POST, PUT, DELETE `/admin/experiments/..` | see [`experiments`] | yes |
//! | GET, POST `/admin/tuner/..` | the online tuner, see [`tuner`] | yes |
//!
//! [`RestartOptions`] has the body of a restart.
//!
//! The token is `auth.admin_token` of the configuration in force. Without a token, every client
//! that reaches the port (loopback by default) may read, and may make changes with the header
//! `x-sluice-admin`; pages of other sites can do neither. `/health` needs no token, because probes
//! carry none. `/metrics` needs none either, as on vLLM with an API key, because the page has names
//! and counts, but no keys and no text. To hide the page, bind the port to a private address.
//!
//! [`server`] listens; [`routes`] finds the row of [`route`], checks the request with [`access`]
//! and runs one of the [`actions`] on [`Control`]. [`events`] sends [`snapshot`]; [`ui`] is the
//! live page.

pub mod access;
mod encoding;
mod restart;
pub mod client;
mod connections;
mod error;
pub mod unsaved;
mod engine_log;
mod experiments;
mod tuner;
pub mod status;
pub mod named;
mod control;
pub mod snapshot;
pub mod events;
pub mod body;
mod ui;
mod answer;
mod actions;
mod route;
pub mod routes;
pub mod server;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod route_tests;
#[cfg(test)]
mod event_tests;

pub use access::Access;
pub use client::{AdminClient, AdminClientError, RESTART_TIMEOUT};
pub use control::Control;
pub use encoding::encode;
pub use engine_log::LOG_LINES_MAX;
pub use error::{BackendLogError, BackendRestartError, NoSuchBackend, ReloadError};
pub use experiments::{ExperimentControl, ExperimentError, Order};
pub use restart::{RestartBegun, RestartOptions, RestartOptionsError, flag};
pub use server::{Socket, bind};
pub use status::{About, Status};
pub use tuner::{TunerControl, TunerError, TunerOrder};
