//! The ledger: one object in a store, which all gateways read and replace as a whole.
//!
//! JSON. A gateway is an entry; what it holds of a backend is a [`Holding`]. Entries are keyed by the gateway's name and a number
//! that is new with every start, so that two processes with one name are two gateways. `writes` grows by one with each write and
//! is the clock by which gateways take turns.
//!
//! Bounds: [`GATEWAYS_MAX`] entries, [`BYTES_MAX`] bytes. Errors: an object of a newer version, and one that is not a ledger.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::amounts::{Amounts, Limit, Unit};
use crate::key_claim::KeyClaim;
use crate::pool_load::PoolLoad;

/// The version that this program writes.
pub const VERSION: u32 = 1;
/// Gateways in one ledger at most.
pub const GATEWAYS_MAX: usize = 64;
/// The largest object that is written; etcd refuses requests above 1.5 MiB.
pub const BYTES_MAX: usize = 1 << 20;
/// The entry of gateways that an earlier object may have had: they hold what no entry holds, until it is taken back.
pub const EARLIER: &str = "#earlier";
/// The entry of what gateways held whose lease is over: as much as their requests may still use.
pub const UNEXPLAINED: &str = "#unexplained";
/// Windows of which a holding says how many requests its engine had from the gateway for sure; see `census.rs`.
pub const WINDOWS: usize = 12;
/// Backends in a ledger at most. One that it does not know is taken for one of an object that was lost, which costs a wait.
pub const BACKENDS_MAX: usize = 1_024;

/// Whether an entry is a gateway's.
pub fn is_gateway(id: &str) -> bool {
    id != EARLIER && id != UNEXPLAINED
}

/// Who holds what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// The version of the program that wrote it.
    pub version: u32,
    /// Which object it is: another one if the store lost the one before.
    pub begun: String,
    /// Writes so far.
    pub writes: u64,
    /// The backends of which all that was ever shared is in this object.
    pub known: BTreeSet<String>,
    /// Entries by the gateway's identity.
    pub gateways: BTreeMap<String, Entry>,
}

/// One gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Grows with every renewal.
    pub beat: u64,
    /// How long a renewal is good for, on the gateway's clock from when it was sent.
    pub lease_ms: u64,
    /// It goes on with its last share when it cannot renew it.
    pub keeps: bool,
    /// What it holds, by backend.
    pub backends: BTreeMap<String, Holding>,
    /// What it wants of the limits of API keys, by their name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keys: BTreeMap<String, KeyClaim>,
    /// Backends to which no gateway shall send requests: this one drains or restarts their engines.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub closed: BTreeSet<String>,
    /// Its load of the pools that are scaled, by their name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pools: BTreeMap<String, PoolLoad>,
    /// Milliseconds of engine work that the owners of requests have had through this gateway, by
    /// pool; see `attained.rs`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attained: BTreeMap<String, BTreeMap<u64, u64>>,
}

/// What one gateway holds of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The limit as the gateway has it in its configuration.
    pub limit: Limit,
    /// Its share of the limit.
    pub share: Amounts,
    /// In use when it wrote.
    pub used: Amounts,
    /// In use and waiting for room when it wrote.
    pub wanted: Amounts,
    /// The largest request that waited.
    pub need: Amounts,
    /// Since which write it has been in the line for more; 0: it wants nothing.
    pub since: [u64; 4],
    /// Sequences of it that the engine had for sure during the last windows, the latest first.
    pub settled: [u64; WINDOWS],
}

/// Why an object cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// A newer program writes it.
    #[error(
        "the ledger has version {found}, and this gateway reads up to {VERSION}: update this gateway, or give it another \
         key (cluster.key)"
    )]
    Newer {
        /// Its version.
        found: u32,
    },
    /// Not a ledger.
    #[error("the object is not a ledger ({why}): remove it, or give the gateways another key (cluster.key)")]
    NotALedger {
        /// What the parser says.
        why: String,
    },
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Ledger {
    /// One without gateways, with a name that no other has.
    pub(crate) fn new(begun: String) -> Self {
        Self { version: VERSION, begun, writes: 0, known: BTreeSet::new(), gateways: BTreeMap::new() }
    }

    /// Reads an object.
    pub fn parse(bytes: &[u8]) -> Result<Self, Unreadable> {
        let not_a_ledger = |error: serde_json::Error| Unreadable::NotALedger { why: error.to_string() };
        let Version { version } = serde_json::from_slice(bytes).map_err(not_a_ledger)?;
        if version > VERSION {
            return Err(Unreadable::Newer { found: version });
        }
        serde_json::from_slice(bytes).map_err(not_a_ledger)
    }

    /// The object.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and text have a JSON form")
    }

    /// The smallest limit of a backend that a gateway has in its configuration.
    pub fn limit(&self, backend: &str) -> Limit {
        self.holdings(backend).fold(Limit::default(), |least, (_, holding)| least.min(&holding.limit))
    }

    /// The backends that gateways other than this one have closed.
    pub fn closed_by_others(&self, id: &str) -> BTreeSet<&str> {
        let others = self.gateways.iter().filter(|(other, _)| *other != id);
        others.flat_map(|(_, entry)| entry.closed.iter().map(String::as_str)).collect()
    }

    /// What all hold of a backend.
    pub fn holdings<'l>(&'l self, backend: &'l str) -> impl Iterator<Item = (&'l str, &'l Holding)> {
        self.gateways.iter().filter_map(move |(id, entry)| Some((id.as_str(), entry.backends.get(backend)?)))
    }

    /// The sum of the shares of a backend.
    pub fn sum(&self, backend: &str) -> Amounts {
        Amounts::each(|unit| self.holdings(backend).map(|(_, holding)| holding.share.get(unit)).sum())
    }
}

impl Holding {
    /// What it takes of the limit: its share, or what it uses if that is more.
    pub(crate) fn held(&self, unit: Unit) -> u64 {
        self.share.get(unit).max(self.used.get(unit))
    }
}
