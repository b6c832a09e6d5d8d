//! The election as operators, load balancers, the metrics page and the log see it.
//!
//! With `leader = "serves"`, only the leader is ready. A leader that cannot renew does not know
//! whether another one leads. In mode `keep` it stays ready until it has seen another leader. If
//! two gateways serve, the ledger still keeps the limits. If none serves, clients have an outage.
//! In mode `strict`, a gateway without a store admits nothing anyway.

use std::sync::Arc;

use parking_lot::Mutex;
use sluice_cluster::notice::name;
use tokio::time::Instant;

use sluice_admin::status::LeaderStatus;
use sluice_config::{ClusterLeader, ClusterMode};
use sluice_fleet::Lead;

#[derive(Debug)]
struct Shown {
    holder: Option<String>,
    since: Instant,
    changes: u64,
    led_last: bool,
    resigned: bool,
    trouble: Option<String>,
    /// Why this leader does not manage engines yet.
    waits: Option<String>,
}

#[derive(Debug)]
pub(crate) struct LeaderView {
    id: String,
    only_it_serves: bool,
    keeps: bool,
    lead: Arc<Lead>,
    shown: Mutex<Shown>,
}

impl LeaderView {
    pub(super) fn new(id: &str, config: &sluice_config::Cluster, lead: Arc<Lead>) -> Self {
        let shown = Shown {
            holder: None,
            since: Instant::now(),
            changes: 0,
            led_last: false,
            resigned: false,
            trouble: None,
            waits: None,
        };
        Self {
            id: id.to_owned(),
            only_it_serves: config.leader == ClusterLeader::Serves,
            keeps: config.mode == ClusterMode::Keep,
            lead,
            shown: Mutex::new(shown),
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn note(&self, holder: Option<String>) {
        let mut shown = self.shown.lock();
        if shown.trouble.take().is_some() {
            tracing::info!("cluster: the record of which gateway leads is read and written again");
        }
        shown.led_last |= self.lead.is_held();
        if holder.is_some() {
            shown.led_last &= holder.as_deref() == Some(&*self.id);
        }
        if shown.holder != holder {
            if let Some(other) = holder.as_deref().filter(|holder| *holder != self.id) {
                tracing::info!(id = other, "cluster: {} leads", name(other));
            }
            (shown.holder, shown.since, shown.changes) = (holder, Instant::now(), shown.changes + 1);
        }
    }

    pub(super) fn note_trouble(&self, why: String) {
        let mut shown = self.shown.lock();
        if shown.trouble.is_none() {
            tracing::warn!("cluster: the record of which gateway leads cannot be renewed: {why}");
        }
        shown.trouble = Some(why);
    }

    pub(super) fn has_trouble(&self) -> bool {
        self.shown.lock().trouble.is_some()
    }

    /// Notes that this gateway gives up the lead, and serves until another one leads.
    pub(crate) fn note_resigned(&self) {
        self.shown.lock().resigned = true;
    }

    pub(crate) fn is_own(&self) -> bool {
        self.shown.lock().holder.as_deref() == Some(&*self.id)
    }

    pub(crate) fn only_it_serves(&self) -> bool {
        self.only_it_serves
    }

    pub(crate) fn note_wait(&self, why: Option<String>) {
        self.shown.lock().waits = why;
    }

    pub(crate) fn trouble(&self) -> Option<String> {
        self.shown.lock().trouble.clone()
    }

    /// Whether a load balancer may send requests here, as far as the lead decides.
    pub(crate) fn is_ready(&self) -> bool {
        if !self.only_it_serves || self.lead.is_held() {
            return true;
        }
        let shown = self.shown.lock();
        (self.keeps || shown.resigned) && shown.led_last
    }

    pub(crate) fn is_another(&self) -> bool {
        self.shown.lock().holder.as_deref().is_some_and(|holder| holder != self.id)
    }

    /// Why this gateway may not change engines, limits or experiments.
    pub(crate) fn refusal(&self) -> Option<String> {
        if self.lead.is_held() {
            return None;
        }
        let shown = self.shown.lock();
        Some(match shown.holder.as_deref().filter(|holder| *holder != self.id) {
            Some(other) => format!("{} leads, and only it makes such changes (cluster.leader): ask its admin port", name(other)),
            None => "no gateway leads at present, and only one that does makes such changes (cluster.leader): try again, or see sluice status".to_owned(),
        })
    }

    pub(crate) fn status(&self) -> LeaderStatus {
        let leads = self.lead.is_held();
        let shown = self.shown.lock();
        LeaderStatus {
            leads,
            name: shown.holder.as_deref().map(|holder| name(holder).to_owned()),
            seconds: shown.since.elapsed().as_secs_f64(),
            only_it_serves: self.only_it_serves,
            why: shown.trouble.clone().or_else(|| shown.waits.clone().filter(|_| leads)),
        }
    }

    /// Whether this gateway leads, and how often the leader has changed.
    pub(crate) fn metrics(&self) -> (bool, u64) {
        (self.lead.is_held(), self.shown.lock().changes)
    }
}
