//! This gateway's part in the ledger as operators, load balancers and the metrics page see it.
//!
//! A gateway is ready if its shares are in force and it has, or has had, a share: one that admits
//! nothing should get no requests. At first, the whole limit may be held for earlier gateways.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use parking_lot::Mutex;
use sluice_cluster::notice::name;
use sluice_cluster::{Ledger, PoolLoad, Standing, ledger};
use tokio::time::Instant;

use super::loads::OtherLoads;
use sluice_admin::status::ClusterStatus;
use sluice_gateway::telemetry::ClusterMetrics;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) written: u64,
    pub(super) refused: u64,
    pub(super) unknown: u64,
}

#[derive(Debug)]
struct Shown {
    id: String,
    standing: Standing,
    renewed: Option<Instant>,
    gateways: Vec<String>,
    /// Whether shares are still held for earlier or silent gateways.
    is_withheld: bool,
    has_had_room: bool,
    counts: Counts,
    trouble: Option<String>,
}

pub(crate) struct View {
    mode: &'static str,
    store: String,
    shown: Mutex<Shown>,
    pub(crate) loads: OtherLoads,
    own_loads: OnceLock<OwnLoads>,
}

pub(crate) type OwnLoads = Box<dyn Fn() -> BTreeMap<String, PoolLoad> + Send + Sync>;

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("store", &self.store).field("shown", &self.shown).finish_non_exhaustive()
    }
}

impl View {
    pub(super) fn new(id: &str, mode: &'static str, store: String) -> Self {
        let shown = Shown {
            id: id.to_owned(),
            standing: Standing::Joining,
            renewed: None,
            gateways: Vec::new(),
            is_withheld: true,
            has_had_room: false,
            counts: Counts::default(),
            trouble: None,
        };
        let (shown, loads) = (Mutex::new(shown), OtherLoads::default());
        Self { mode, store, shown, loads, own_loads: OnceLock::new() }
    }

    pub(crate) fn show_loads(&self, loads: OwnLoads) {
        let _ = self.own_loads.set(loads);
    }

    pub(super) fn own_loads(&self) -> BTreeMap<String, PoolLoad> {
        self.own_loads.get().map(|loads| loads()).unwrap_or_default()
    }

    pub(super) fn note_ledger(&self, found: &Ledger, is_withheld: bool) {
        let mut shown = self.shown.lock();
        shown.gateways =
            found.gateways.keys().filter(|id| ledger::is_gateway(id)).map(|id| name(id).to_owned()).collect();
        shown.is_withheld = is_withheld;
    }

    pub(super) fn note_room(&self, has_room: bool) {
        self.shown.lock().has_had_room |= has_room;
    }

    pub(super) fn note(&self, standing: Standing, renewed: Option<Instant>, counts: Counts, trouble: Option<String>) {
        let mut shown = self.shown.lock();
        (shown.standing, shown.renewed, shown.counts, shown.trouble) = (standing, renewed, counts, trouble);
    }

    pub(crate) fn is_ready(&self) -> bool {
        let shown = self.shown.lock();
        shown.is_ready()
    }

    pub(crate) fn status(&self) -> ClusterStatus {
        let shown = self.shown.lock();
        ClusterStatus {
            name: name(&shown.id).to_owned(),
            id: shown.id.clone(),
            mode: self.mode.to_owned(),
            store: self.store.clone(),
            standing: shown.standing.label().to_owned(),
            ready: shown.is_ready(),
            why: shown.why(),
            renewed_seconds: shown.renewed.map(|at| at.elapsed().as_secs_f64()),
            gateways: shown.gateways.clone(),
            leader: None,
        }
    }

    pub(crate) fn metrics(&self) -> ClusterMetrics {
        let shown = self.shown.lock();
        ClusterMetrics {
            standing: shown.standing.label(),
            standings: Standing::ALL.map(Standing::label).to_vec(),
            gateways: shown.gateways.len(),
            renewed_seconds: shown.renewed.map(|at| at.elapsed().as_secs_f64()),
            writes: [
                ("written", shown.counts.written),
                ("refused", shown.counts.refused),
                ("unknown", shown.counts.unknown),
            ],
            leader: None,
        }
    }
}

impl Shown {
    fn is_ready(&self) -> bool {
        matches!(self.standing, Standing::Holding | Standing::Keeping) && (self.has_had_room || !self.is_withheld)
    }

    /// Why the gateway may use less than its part of the limits.
    fn why(&self) -> Option<String> {
        let trouble = self.trouble.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        match self.standing {
            Standing::Joining => Some(format!("it has no share yet{trouble}")),
            Standing::Keeping => Some(format!("it goes on with its last shares, which cannot be renewed{trouble}")),
            Standing::Stopped => Some(format!("it admits nothing, since its shares cannot be renewed{trouble}")),
            Standing::StandingBack => Some("it may not write the ledger, see the log".to_owned()),
            Standing::Holding if !self.has_had_room && self.is_withheld => Some(
                "it has no share yet: all is kept for gateways of before, until their lease is over and the engines \
                     have said what they run"
                    .to_owned(),
            ),
            Standing::Holding => self.trouble.clone(),
        }
    }
}
