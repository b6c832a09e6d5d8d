//! The admin port: metrics, status, reload, drain, and the live page. Never on the client port.
//!
//! | method and path | answers | token |
//! |---|---|---|
//! | GET `/` | the live page; it holds no numbers itself, it asks `/admin/status` | no |
//! | GET `/metrics` | Prometheus' text format | no |
//! | GET `/health` | 200 while the process serves | no |
//! | GET `/admin/status` | pools, backends, the last minute ([`Status`]) | yes |
//! | POST `/admin/reload` | the list of changes, or the problems | yes |
//! | POST `/admin/backends/{pool}/{backend}/drain`, `/enable` | the backend's new state | yes |
//! | POST `/admin/backends/{pool}/{backend}/restart` | 202 and the number of the change; `/admin/status` shows how it goes | yes |
//!
//! A restart takes its wishes from the query: `set=FLAG=VALUE` (encoded, repeatable), `reset`, `hold`, `cut`.
//!
//! The token is `auth.admin_token` of the configuration in force; without one the API is open to whoever reaches the port, which is loopback by
//! default. `/health` is for probes, which carry no credentials. `/metrics` is open as it is on vLLM itself even with
//! an API key: scrapers are configured once for a fleet, and the page holds names and counts, no
//! keys and no text; who must hide it binds the port to a private address.
//!
//! [`routes`] what is answered · [`status`] the shapes of answers, shared with `sluice status` · [`server`] the
//! listener · [`client`] the other side, for subcommands. What reload and drain do belongs to [`Control`].

mod ask;
pub mod client;
pub mod routes;
pub mod server;
pub mod status;

#[cfg(test)]
mod tests;

pub(crate) use ask::encode;
pub use ask::{AskError, flag, query};
pub use client::{Client, ClientError, RESTART_TIMEOUT};
pub use server::{Socket, bind};
pub use status::{About, Status};

use crate::config::Secret;
use crate::fleet::{ChangeStarted, RestartError, RestartRequest};

/// What the admin port may ask of the running gateway. Called on a thread that may block.
pub trait Control: Send + Sync + 'static {
    /// What the API asks for, in the configuration in force; `None`: it is open.
    fn admin_token(&self) -> Option<Secret>;

    /// The metrics page.
    fn metrics(&self) -> String;

    /// Everything that is shown.
    fn status(&self) -> Status;

    /// Reads the configuration again and takes it over. The changes, one line each; none when nothing changed.
    fn reload(&self) -> Result<Vec<String>, ReloadError>;

    /// Takes a backend out of rotation or back in; running requests finish.
    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend>;

    /// Restarts an engine that the gateway runs. The number of the change, once it has begun.
    fn restart(&self, pool: &str, backend: &str, ask: RestartRequest) -> Result<ChangeStarted, BackendRestartError>;
}

/// Why a reload changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReloadError {
    /// The new configuration is not valid.
    #[error("the configuration has problems; nothing was changed")]
    Problems(Vec<String>),
    /// Another reload is under way.
    #[error("another reload is under way; try again when it is through")]
    Busy,
    /// The gateway was started without a file.
    #[error("the gateway was started without a configuration file; start it with --config to reload")]
    NoFile,
}

/// Why a restart does not begin.
#[derive(Debug, thiserror::Error)]
pub enum BackendRestartError {
    /// There is no such backend.
    #[error(transparent)]
    Unknown(#[from] NoSuchBackend),
    /// It is there, and stays as it is.
    #[error(transparent)]
    Cannot(#[from] RestartError),
}

/// There is no such backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSuchBackend {
    /// No pool of that name.
    #[error("there is no pool '{pool}'; pools are: {known}")]
    Pool {
        /// What was asked for.
        pool: String,
        /// The names there are.
        known: String,
    },
    /// No backend of that name in the pool.
    #[error("there is no backend '{backend}' in pool '{pool}'; its backends are: {known}")]
    Backend {
        /// Its pool.
        pool: String,
        /// What was asked for.
        backend: String,
        /// The names there are.
        known: String,
    },
}
