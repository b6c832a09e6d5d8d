//! The ledger: one JSON object in a store, which all gateways read and replace as a whole.
//!
//! Each gateway has an [`Entry`], with a [`Holding`] for each backend. The key of an entry is the
//! gateway's name and a number that is new at every start, so two processes with one name are two
//! gateways. The number of `writes` orders the turns of gateways.
//!
//! Bounds: [`GATEWAYS_MAX`], [`BYTES_MAX`]. An object of a newer version, or one that is not a
//! ledger, is [`Unreadable`].

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::amounts::{Amounts, Limit, Unit};
use crate::key_claim::KeyClaim;
use crate::pool_load::PoolLoad;

/// The version that this program writes.
pub const VERSION: u32 = 1;
/// Most gateways in one ledger.
pub const GATEWAYS_MAX: usize = 64;
/// Largest object in bytes; etcd refuses requests above 1.5 MiB.
pub const BYTES_MAX: usize = 1 << 20;
/// The entry for gateways of an earlier, lost object.
///
/// The member that replaces a missing object puts the limit, less its own share, into this entry,
/// which is taken back like the shares of a silent gateway. Other members move their last shares
/// from it to themselves, but only during their lease, even in mode `keep`, because later other
/// gateways may have received these shares. A member without a share admits nothing new until the
/// capacity of this entry is free. After an outage longer than the lease, this takes 1.25 leases
/// and some seconds.
pub const EARLIER: &str = "#earlier";
/// The entry for capacity that requests of silent gateways may still use.
pub const UNEXPLAINED: &str = "#unexplained";
/// Number of time windows in a holding; see `census.rs`.
pub const WINDOWS: usize = 12;
/// Most backends in `known`. If one more comes, the first by name leaves `known`, and is then
/// treated like a backend of a lost object.
pub const BACKENDS_MAX: usize = 1_024;

/// Whether an entry belongs to a gateway.
pub fn is_gateway(id: &str) -> bool {
    id != EARLIER && id != UNEXPLAINED
}

/// Shares, claims and loads of all gateways.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// Version of the program that wrote the object.
    pub version: u32,
    /// Name of this object, by which members distinguish it from a lost object.
    pub begun: String,
    /// Writes of this object so far.
    pub writes: u64,
    /// Backends of which this object holds all shares. Shares of other backends may be in a lost
    /// object.
    pub known: BTreeSet<String>,
    /// Entries, by identity.
    pub gateways: BTreeMap<String, Entry>,
}

/// The entry of one gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Grows with every renewal.
    pub beat: u64,
    /// Milliseconds for which a renewal is valid, on the gateway's clock, from the moment of
    /// sending.
    pub lease_ms: u64,
    /// Whether the gateway keeps using the last shares after the lease.
    pub keeps: bool,
    /// Holdings, by backend.
    pub backends: BTreeMap<String, Holding>,
    /// Claims to the limits of API keys, by name of the key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keys: BTreeMap<String, KeyClaim>,
    /// Backends that this gateway closed to all, because it drains or restarts their engines.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub closed: BTreeSet<String>,
    /// Load of each scaled pool, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pools: BTreeMap<String, PoolLoad>,
    /// Milliseconds of engine work of each owner of requests, by pool and owner; see `attained.rs`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attained: BTreeMap<String, BTreeMap<u64, u64>>,
}

/// A gateway's share and use of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The limit in the gateway's configuration.
    pub limit: Limit,
    /// The gateway's share of the limit.
    pub share: Amounts,
    /// Amounts in use when the gateway wrote.
    pub used: Amounts,
    /// Amounts in use, plus the amounts for which requests waited, when the gateway wrote.
    pub wanted: Amounts,
    /// By unit: the size of the largest request that waited.
    pub need: Amounts,
    /// By unit: the number of the write at which the gateway joined the line; 0 if it is not in the
    /// line.
    pub since: [u64; 4],
    /// By time window, latest first: the fewest of this gateway's sequences that the engine had for
    /// sure.
    pub settled: [u64; WINDOWS],
}

/// Why an object cannot be used as a ledger.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// A newer program wrote the object.
    #[error(
        "the ledger has version {found}, and this gateway reads up to {VERSION}: update this gateway, or give it another \
         key (cluster.key)"
    )]
    Newer {
        /// The version.
        found: u32,
    },
    /// The object is not a ledger.
    #[error("the object is not a ledger ({why}): remove it, or give the gateways another key (cluster.key)")]
    NotALedger {
        /// The message of the parser.
        why: String,
    },
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Ledger {
    /// A ledger without gateways, with a unique name `begun`.
    pub(crate) fn new(begun: String) -> Self {
        Self { version: VERSION, begun, writes: 0, known: BTreeSet::new(), gateways: BTreeMap::new() }
    }

    /// Parses an object.
    pub fn parse(bytes: &[u8]) -> Result<Self, Unreadable> {
        let not_a_ledger = |error: serde_json::Error| Unreadable::NotALedger { why: error.to_string() };
        let Version { version } = serde_json::from_slice(bytes).map_err(not_a_ledger)?;
        if version > VERSION {
            return Err(Unreadable::Newer { found: version });
        }
        serde_json::from_slice(bytes).map_err(not_a_ledger)
    }

    /// The JSON text of the object.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and text have a JSON form")
    }

    /// The smallest limit of a backend in any gateway's configuration, by unit.
    pub fn limit(&self, backend: &str) -> Limit {
        self.holdings(backend).fold(Limit::default(), |least, (_, holding)| least.min(&holding.limit))
    }

    /// The backends that gateways other than this one have closed.
    pub fn closed_by_others(&self, id: &str) -> BTreeSet<&str> {
        let others = self.gateways.iter().filter(|(other, _)| *other != id);
        others.flat_map(|(_, entry)| entry.closed.iter().map(String::as_str)).collect()
    }

    /// The holdings of all entries on a backend.
    pub fn holdings<'l>(&'l self, backend: &'l str) -> impl Iterator<Item = (&'l str, &'l Holding)> {
        self.gateways.iter().filter_map(move |(id, entry)| Some((id.as_str(), entry.backends.get(backend)?)))
    }

    /// The sum of the shares of a backend.
    pub fn sum(&self, backend: &str) -> Amounts {
        Amounts::each(|unit| self.holdings(backend).map(|(_, holding)| holding.share.get(unit)).sum())
    }
}

impl Holding {
    /// The share, or the amount in use if that is larger.
    pub(crate) fn held(&self, unit: Unit) -> u64 {
        self.share.get(unit).max(self.used.get(unit))
    }
}
