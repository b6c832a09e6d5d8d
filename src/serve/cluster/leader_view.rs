//! What is shown of which gateway leads: to operators, to load balancers and on the metrics page; and what the log says of it.
//!
//! With `leader = "serves"` only the one that leads is ready. When it cannot renew, another one may lead, or none, if the store is
//! gone. So in mode `keep` it stays ready until it has seen that another one leads: two that serve keep the limits by the ledger, and
//! none would be an outage. In mode `strict` a gateway without a store admits nothing anyway.

use std::sync::Arc;

use parking_lot::Mutex;
use sluice_cluster::notice::name;
use tokio::time::Instant;

use crate::admin::status::LeaderStatus;
use crate::config::{self, ClusterLeader, ClusterMode};
use crate::fleet::Lead;

#[derive(Debug)]
struct Shown {
    /// The identity that the record names.
    holder: Option<String>,
    since: Instant,
    /// How often that was another one than before.
    changes: u64,
    /// This one was the last that was seen to lead.
    led_last: bool,
    resigned: bool,
    trouble: Option<String>,
    /// What the journal is waited for with.
    waits: Option<String>,
}

/// See the header of this file.
#[derive(Debug)]
pub(crate) struct LeaderView {
    id: String,
    only_it_serves: bool,
    keeps: bool,
    lead: Arc<Lead>,
    shown: Mutex<Shown>,
}

impl LeaderView {
    pub(super) fn new(id: &str, config: &config::Cluster, lead: Arc<Lead>) -> Self {
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

    /// This gateway's identity.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The record was read or written; it names this holder.
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

    /// This one gives the lead up: until another one has it, it goes on serving.
    pub(in crate::serve) fn note_resigned(&self) {
        self.shown.lock().resigned = true;
    }

    /// Whether the record names this one, as last seen.
    pub(in crate::serve) fn is_own(&self) -> bool {
        self.shown.lock().holder.as_deref() == Some(&*self.id)
    }

    /// Whether the gateways that do not lead are not ready.
    pub(in crate::serve) fn only_it_serves(&self) -> bool {
        self.only_it_serves
    }

    /// It leads, and has not what it needs to change engines.
    pub(in crate::serve) fn note_wait(&self, why: Option<String>) {
        self.shown.lock().waits = why;
    }

    /// The last that failed, for the log.
    pub(in crate::serve) fn trouble(&self) -> Option<String> {
        self.shown.lock().trouble.clone()
    }

    /// Whether a load balancer may send requests here, as far as it depends on who leads.
    pub(crate) fn is_ready(&self) -> bool {
        if !self.only_it_serves || self.lead.is_held() {
            return true;
        }
        let shown = self.shown.lock();
        (self.keeps || shown.resigned) && shown.led_last
    }

    /// Whether another gateway leads, as last seen.
    pub(in crate::serve) fn is_another(&self) -> bool {
        self.shown.lock().holder.as_deref().is_some_and(|holder| holder != self.id)
    }

    /// Why this gateway may not change engines, limits or experiments; `None`: it may.
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

    /// For `/admin/status`.
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

    /// Whether it leads, and how often the lead was seen to change.
    pub(crate) fn metrics(&self) -> (bool, u64) {
        (self.lead.is_held(), self.shown.lock().changes)
    }
}
