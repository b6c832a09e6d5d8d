//! This gateway's part in the ledger: several gateways in front of the same engines keep within one
//! limit.
//!
//! ```text
//!   pool --uses--> renewal --plan--> Member (src/cluster) --Ledger--> store: etcd, or a ConfigMap
//!     ^              |                                                 |
//!     '----shares----'<------------------ read ------------------------'
//! ```
//!
//! The crate `sluice-cluster` has the rules. Here are the [store], measurements of the pool
//! (`units.rs`, `pulse.rs`), and the task that renews (`renewal.rs`). An elected leader has a
//! second object (`campaign.rs`).
//!
//! A gateway that stops or has handed over leaves: it renews while requests run, and gives back
//! unused capacity. During an upgrade, both processes are members, so the limits hold across both.

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

use any_store::AnyStore;
use campaign::Campaign;
pub(crate) use leader_view::LeaderView;
pub(crate) use loads::{OtherLoad, OtherLoads};
use pulse::Pulse;
use renewal::{Renewal, Running, Timing};
use sluice_config::{Address, ClusterLeader, ClusterMode};
use sluice_core::base::Rng;
use sluice_fleet::{Lead, OtherGateways};
use sluice_gateway::flow::keys::KeyUsage;
use sluice_gateway::pool::Admission;
use store::Store;
pub(crate) use view::View;

const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Longest wait for the first share of a gateway that takes over from another process.
const FIRST_SHARE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug)]
pub(super) struct Divided<'a> {
    pub(super) admission: &'a Arc<Admission>,
    pub(super) keys: &'a Arc<KeyUsage>,
    /// While this gateway holds the lead, all gateways close the backends whose engines it drains
    /// or starts.
    pub(super) lead: &'a Arc<Lead>,
    /// Knows on which closed backends no other gateway has requests any more.
    pub(super) others: &'a Arc<OtherGateways>,
}

#[derive(Debug)]
pub(super) struct Cluster {
    leaving: watch::Sender<bool>,
    renewing: JoinHandle<()>,
    ticking: JoinHandle<()>,
    view: Arc<View>,
    /// Time limit of the last renewals, which give the capacity back.
    last: Duration,
}

impl Cluster {
    /// From now on, pools use only this gateway's shares. `takes_over`: this process replaces
    /// another one, which may have the same name.
    pub(super) fn join(config: &sluice_config::Cluster, divided: Divided<'_>, seed: u64, takes_over: bool) -> Self {
        let timing = Timing::of(config.lease);
        Self::join_with(AnyStore::of(config, timing.call), config, divided, (seed, takes_over), renewal::running)
    }

    fn join_with<S: Store>(
        store: S,
        config: &sluice_config::Cluster,
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

    pub(super) fn view(&self) -> Arc<View> {
        Arc::clone(&self.view)
    }

    /// From now on, this gateway takes no more capacity, and gives back capacity that it does not
    /// use.
    pub(super) fn leave(&self) {
        self.leaving.send_replace(true);
    }

    /// Gives back the rest of the capacity, if the store answers in time.
    pub(super) async fn end(mut self) {
        self.leave();
        if timeout(self.last, &mut self.renewing).await.is_err() {
            tracing::warn!(
                "cluster: the shares of this gateway were not given back: others take them back after the lease"
            );
        }
    }

    /// Waits at most [`FIRST_SHARE`] for the shares without which a gateway may not take over.
    /// Returns whether they have come.
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

/// The view of the election; `None` if the configuration elects no leader. Gives up `lead` until
/// this gateway is elected.
pub(super) fn leader(config: &sluice_config::Cluster, lead: Arc<Lead>, seed: u64) -> Option<Arc<LeaderView>> {
    if config.leader == ClusterLeader::None {
        return None;
    }
    lead.set(None);
    let identity = Identity { name: name(config), incarnation: seed };
    Some(Arc::new(LeaderView::new(&identity.id(), config, lead)))
}

/// Stands for election. After a resignation, the task only reads who leads.
pub(super) fn campaign(
    config: &sluice_config::Cluster,
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

fn name(config: &sluice_config::Cluster) -> String {
    config.name.clone().unwrap_or_else(host_name)
}

fn host_name() -> String {
    let read = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
    let name = read.trim();
    if name.is_empty() { "gateway".to_owned() } else { name.to_owned() }
}
