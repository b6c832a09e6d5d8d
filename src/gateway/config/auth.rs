//! `[auth]` in the form the gateway works with: who may send requests, for which models, how many.
//!
//! A key itself is never in the configuration: only its SHA-256, so that a leaked file opens nothing.
//! No keys means an open gateway, which the report of `sluice check` and the log of `sluice serve` say
//! as a warning. Names of keys are for logs; they are unique.

use super::pool::ModelScope;
use super::secret::{KeyDigest, Secret};

/// Who may use the gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Auth {
    /// Keys of clients; empty: everybody may send requests.
    pub keys: Vec<Key>,
    /// What the admin API asks for; `None`: it can be read and changed by whoever reaches its port.
    pub admin_token: Option<Secret>,
}

/// One client key.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// For logs and the admin API; never the key.
    pub name: String,
    /// SHA-256 of the key that clients send as `Authorization: Bearer KEY`.
    pub sha256: KeyDigest,
    /// Models it may use; 403 for others.
    pub models: ModelScope,
    /// Lower is served earlier when requests wait, as in vLLM; 0 is normal.
    pub priority: i32,
    /// What it may use at once.
    pub limit: KeyLimit,
}

/// What one key may use; 429 above it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyLimit {
    /// Requests at once, waiting ones included, at least 1; `None`: no limit of its own.
    pub in_flight: Option<u32>,
    /// Requests per minute, at least 1; `None`: no limit of its own.
    pub requests_per_minute: Option<u32>,
}
