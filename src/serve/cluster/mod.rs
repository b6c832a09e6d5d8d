//! Several gateways before the same engines hold one limit: this gateway's part in the ledger.
//!
//! ```text
//!   pool --uses--> renewal --plan--> Member (src/cluster) --Ledger--> store: etcd, or a ConfigMap
//!     ^              |                                                 |
//!     '----shares----'<------------------ read ------------------------'
//! ```
//!
//! Beside the ledger is the record of which gateway leads (`campaign.rs`), if one shall.
//!
//! The rules are those of the crate `sluice-cluster`; here is what it needs: a [store], measurements of the pool (`units.rs`,
//! `pulse.rs`), and the task that renews (`renewal.rs`). Without `[cluster]` none of it exists.
//!
//! A gateway that stops, or that has handed over to a newer process, leaves: it goes on renewing while its requests run, and gives
//! back what they no longer use. After an upgrade the two processes are two members, so the limits hold across both of them.

mod store;
mod etcd;
#[cfg(feature = "kubernetes")]
mod object;
#[cfg(feature = "kubernetes")]
mod lease;
mod any_store;
mod units;
mod pulse;
mod loads;
mod attained;
mod view;
mod leader_view;
mod renewal;
mod campaign;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use sluice_cluster::{Candidate, Identity, Member, Rules};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::base::Rng;
use crate::config::{self, ClusterLeader, ClusterMode};
use crate::fleet::{Lead, OtherGateways};
use crate::flow::keys::KeyUsage;
use crate::pool::{Address, Admission};
use any_store::AnyStore;
use campaign::Campaign;
pub(crate) use leader_view::LeaderView;
pub(crate) use loads::{OtherLoad, OtherLoads};
use pulse::Pulse;
use renewal::{Renewal, Running, Timing};
use store::Store;
pub(crate) use view::View;

/// Where the name of the host is.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// How long a gateway that takes over waits for its first share.
const FIRST_SHARE: Duration = Duration::from_secs(10);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(50);

/// What the gateways divide.
#[derive(Clone, Copy, Debug)]
pub(super) struct Divided<'a> {
    /// The limits of backends.
    pub(super) admission: &'a Arc<Admission>,
    /// Those of API keys.
    pub(super) keys: &'a Arc<KeyUsage>,
    /// While it is held, backends whose engines this gateway drains or starts are closed for all ..
    pub(super) lead: &'a Arc<Lead>,
    /// .. and this says which of them the others have left.
    pub(super) others: &'a Arc<OtherGateways>,
}

/// This gateway's part in the ledger.
#[derive(Debug)]
pub(super) struct Cluster {
    leaving: watch::Sender<bool>,
    renewing: JoinHandle<()>,
    ticking: JoinHandle<()>,
    view: Arc<View>,
    /// For the last renewals, once nothing is in use.
    last: Duration,
}

impl Cluster {
    /// Joins. From here on the pool uses only what the ledger gives it. `takes_over`: from a process of the same name, perhaps.
    pub(super) fn join(config: &config::Cluster, divided: Divided<'_>, seed: u64, takes_over: bool) -> Self {
        let timing = Timing::of(config.lease);
        Self::join_with(AnyStore::of(config, timing.call), config, divided, (seed, takes_over), renewal::running)
    }

    fn join_with<S: Store>(
        store: S,
        config: &config::Cluster,
        Divided { admission, keys, lead, others }: Divided<'_>,
        (seed, takes_over): (u64, bool),
        running: fn(Arc<Address>) -> Running,
    ) -> Self {
        admission.divide();
        let timing = Timing::of(config.lease);
        let rules = Rules { lease: config.lease, keep: config.mode == ClusterMode::Keep };
        let member = Member::new(&Identity { name: name(config), incarnation: seed }, rules);
        let view = Arc::new(View::new(member.id(), config.mode.word(), store.name()));
        tracing::info!(
            id = member.id(),
            mode = config.mode.word(),
            "cluster: the limits are divided by the ledger in {}",
            store.name()
        );
        let pulse = Arc::new(Pulse::default());
        let renewal = Renewal {
            member,
            store: Arc::new(store),
            admission: Arc::clone(admission),
            keys: Arc::clone(keys),
            lead: Arc::clone(lead),
            others: Arc::clone(others),
            timing,
            pulse: Arc::clone(&pulse),
            view: Arc::clone(&view),
            rng: Rng::new(seed),
            epoch: Instant::now(),
            takes_over,
            running,
            state: renewal::State::default(),
        };
        let (leaving, is_leaving) = watch::channel(false);
        let ticking = tokio::spawn(pulse.keep(Arc::clone(admission)));
        let renewing = tokio::spawn(renewal.keep(is_leaving));
        Self { leaving, renewing, ticking, view, last: timing.call * 2 }
    }

    /// What is shown of it.
    pub(super) fn view(&self) -> Arc<View> {
        Arc::clone(&self.view)
    }

    /// From now on it takes no more, and gives back what is not in use.
    pub(super) fn leave(&self) {
        self.leaving.send_replace(true);
    }

    /// Gives back all that is left, if the store answers in time.
    pub(super) async fn end(mut self) {
        self.leave();
        if timeout(self.last, &mut self.renewing).await.is_err() {
            tracing::warn!(
                "cluster: the shares of this gateway were not given back: others take them back after the lease"
            );
        }
    }

    /// Waits until it has a share, so that a gateway that takes over can serve. Whether it has one.
    pub(super) async fn has_share(&self) -> bool {
        let ready = async {
            while !self.view.is_ready() {
                sleep(LOOK).await;
            }
        };
        timeout(FIRST_SHARE, ready).await.is_ok()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.renewing.abort();
        self.ticking.abort();
    }
}

/// What is known of which gateway leads; `None`: none is elected. From here on `lead` is not held until this one is. `seed`: that of
/// [`Cluster::join`].
pub(super) fn leader(config: &config::Cluster, lead: Arc<Lead>, seed: u64) -> Option<Arc<LeaderView>> {
    if config.leader == ClusterLeader::None {
        return None;
    }
    lead.set(None);
    let identity = Identity { name: name(config), incarnation: seed };
    Some(Arc::new(LeaderView::new(&identity.id(), config, lead)))
}

/// Stands for election, until it has resigned.
pub(super) fn campaign(
    config: &config::Cluster,
    view: &Arc<LeaderView>,
    lead: Arc<Lead>,
    resigning: watch::Receiver<bool>,
) -> JoinHandle<()> {
    let timing = campaign::Timing::of(config.lease);
    let campaign = Campaign {
        candidate: Candidate::new(view.id().to_owned(), config.lease),
        store: AnyStore::of_leader(config, timing.call),
        timing,
        epoch: Instant::now(),
        lead,
        view: Arc::clone(view),
    };
    tokio::spawn(campaign.keep(resigning))
}

fn name(config: &config::Cluster) -> String {
    config.name.clone().unwrap_or_else(host_name)
}

fn host_name() -> String {
    let read = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
    let name = read.trim();
    if name.is_empty() { "gateway".to_owned() } else { name.to_owned() }
}
