//! Asks an engine whether it serves requests, on the health page and by the rule of the engine's
//! kind.
//!
//! The kinds and their pages are in `core/engines`. A server without the health page of the
//! configured kind ([`Unhealthy::Unlike`]) is probably of another kind, which `engine_kind.rs`
//! finds. Bound: [`HEALTH_BYTES`] of a response are read.

use std::time::Duration;

use super::http::fetch;
use sluice_config::Address;
use sluice_core::engines::{EngineKind, Health};

const HEALTH_BYTES: usize = 1 << 20;

/// Why an engine does not serve requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unhealthy {
    /// It loads the model.
    Loading,
    /// It has no health page of the configured kind. The text describes the response.
    Unlike(String),
    /// Any other reason, in words.
    Down(String),
}

impl std::fmt::Display for Unhealthy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loading => f.write_str("it is starting and loads its model"),
            Self::Unlike(why) | Self::Down(why) => f.write_str(why),
        }
    }
}

/// Asks an engine for its health, within `limit`, or the time that the page of its kind needs.
///
/// # Errors
/// The engine does not serve requests, or there is no response.
pub async fn read_health(address: &Address, limit: Duration) -> Result<(), Unhealthy> {
    let rules = address.engine.rules();
    let limit = limit.max(rules.health_takes);
    let (status, body) =
        fetch(address, rules.health, limit, HEALTH_BYTES).await.map_err(|error| Unhealthy::Down(error.to_string()))?;
    let (path, status) = (rules.health, status.as_u16());
    match (rules.judge)(status, &body) {
        Health::Up => Ok(()),
        Health::Loading => Err(Unhealthy::Loading),
        Health::Down if matches!(status, 400 | 404 | 405) => Err(Unhealthy::Unlike(format!(
            "{path} responds with status {status}: this server is probably no {}; engine of the pool must be one of {}",
            address.engine.label(),
            EngineKind::LABELS.join(", ")
        ))),
        Health::Down => Err(Unhealthy::Down(format!("{path} responds with status {status}"))),
    }
}
