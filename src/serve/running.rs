//! A running gateway: how it stops, and how it hands decisions to another gateway.
//!
//! Of several gateways that live at the same time, one decides about engines, limits and
//! experiments. Bounds: `server.drain_timeout` for requests, [`TAKE_BACK_MAX`] for the journal.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::app::App;
use crate::cluster::Cluster;
use crate::core::Core;
use crate::leading::{Deciders, Leading, stand_for_election};
use crate::upgrade::Port;
use sluice_config::OnExit;
use sluice_fleet::EngineBusy;
use sluice_gateway::proxy::Ending;

/// Longest wait for the journal's lock after a failed hand-over. After it, this gateway serves
/// without the journal and keeps trying to lock it.
const TAKE_BACK_MAX: Duration = Duration::from_secs(5);
const TAKE_BACK_PAUSE: Duration = Duration::from_millis(100);

/// A running gateway.
#[derive(Debug)]
pub struct Running {
    pub(crate) app: Arc<App>,
    pub(crate) client: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) ending: Ending,
    pub(crate) admin_ending: Ending,
    pub(crate) end: watch::Sender<bool>,
    pub(crate) serving: JoinHandle<usize>,
    pub(crate) tasks: Vec<JoinHandle<()>>,
    /// `None` while another gateway decides, and always in a cluster that elects its leader.
    pub(crate) deciders: Option<Deciders>,
    /// This gateway's part in the election of a leader. It runs the deciders while this gateway
    /// leads.
    pub(crate) leading: Option<Leading>,
    pub(crate) taking_back: Option<JoinHandle<()>>,
    /// Duplicates of the listening sockets, with the configured addresses. While one is open, the
    /// kernel completes connections.
    pub(crate) sockets: Vec<(Port, SocketAddr, OwnedFd)>,
    pub(crate) predecessor: Option<JoinHandle<()>>,
    pub(crate) cluster: Option<Cluster>,
    /// Number of draining gateways whose use this one counts, directly or through each other.
    pub(crate) draining: Arc<AtomicU32>,
}

impl Running {
    /// The address of the client port.
    pub fn client_address(&self) -> SocketAddr {
        self.client
    }

    /// The address of the admin port.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// The parts of the gateway.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Becomes unready and serves as before for the returned time, `server.lame_duck`. A leader
    /// stays ready until another gateway leads, so that a load balancer always has one.
    pub fn leave(&self) -> Duration {
        match &self.leading {
            None => self.app.core.flow.leave(),
            Some(leading) => {
                let (resigned, app) = (leading.resign(), Arc::clone(&self.app));
                tokio::spawn(async move {
                    resigned.await;
                    app.core.flow.leave();
                });
            }
        }
        self.app.core.config.load().server.lame_duck
    }

    /// Stops in order; [`Fleet::shut_down_fast`](sluice_fleet::Fleet::shut_down_fast) shortens
    /// every wait. Returns the number of requests that were cut after `server.drain_timeout`.
    pub async fn stop(mut self) -> usize {
        self.app.core.flow.close();
        if let Some(cluster) = &self.cluster {
            cluster.leave();
        }
        self.sockets.clear();
        self.ending.stop();
        let elected = self.leading.take().map(|leading| tokio::spawn(leading.end()));
        let cut = (&mut self.serving).await.unwrap_or(0);
        match (elected, self.app.core.config.load().fleet.on_exit) {
            (Some(leading), _) => drop(leading.await),
            (None, OnExit::Stop) => self.app.core.fleet.stop().await,
            (None, OnExit::Keep) => self.app.core.fleet.abandon(),
        }
        self.finish().await;
        cut
    }

    /// The handle with which, after a hand-over, connections without a request end at once.
    pub fn ending(&self) -> Ending {
        self.ending.clone()
    }

    /// After a hand-over, waits at most `server.drain_timeout` until all requests have ended here
    /// and in the gateways that this one counts. Returns the number of requests that were cut here.
    pub async fn drain(mut self) -> usize {
        let until = Instant::now() + self.app.core.config.load().server.drain_timeout;
        let cut = (&mut self.serving).await.unwrap_or(0);
        if let Some(predecessor) = self.predecessor.take() {
            tokio::select! {
                _ = timeout(until - Instant::now(), predecessor) => {}
                () = self.app.core.fleet.fast_shutdown() => {}
            }
        }
        self.finish().await;
        cut
    }

    async fn finish(mut self) {
        self.stop_taking_back().await;
        if let Some(deciders) = self.deciders {
            deciders.end().await;
        }
        if let Some(leading) = self.leading {
            leading.end().await;
        }
        if let Some(cluster) = self.cluster {
            cluster.end().await;
        }
        self.end.send_replace(true);
        self.admin_ending.stop();
        for task in self.tasks {
            let _ = task.await;
        }
        self.app.core.telemetry.flush();
    }

    /// Ends the deciders. Then their state is on disk, the engines run on, and the journal is
    /// unlocked.
    ///
    /// # Errors
    /// An engine is being changed or stopped; nothing has changed.
    pub(crate) async fn release(&mut self) -> Result<(), EngineBusy> {
        self.stop_taking_back().await;
        self.app.core.fleet.release().await?;
        if let Some(deciders) = self.deciders.take() {
            deciders.end().await;
        }
        if let Some(leading) = self.leading.take() {
            leading.end().await;
        }
        self.app.tuner.state.release(true);
        Ok(())
    }

    pub(crate) async fn take_back(&mut self) {
        self.app.tuner.state.release(false);
        self.leading = stand_for_election(&self.app);
        if self.leading.is_some() {
            return;
        }
        let mut taking_back = tokio::spawn(keep_taking_engines_back(Arc::clone(&self.app.core)));
        if timeout(TAKE_BACK_MAX, &mut taking_back).await.is_err() {
            tracing::error!(
                "engines are not managed: another process has locked the journal in fleet.state; end that process; this gateway goes on trying"
            );
            self.taking_back = Some(taking_back);
        }
        self.deciders = Some(Deciders::begin(&self.app));
    }

    async fn stop_taking_back(&mut self) {
        if let Some(task) = self.taking_back.take() {
            task.abort();
            let _ = task.await;
        }
    }
}

async fn keep_taking_engines_back(core: Arc<Core>) {
    let mut is_late = false;
    while let Err(error) = core.take_engines_back() {
        tracing::debug!("engines are not managed yet: {error}");
        is_late = true;
        sleep(TAKE_BACK_PAUSE).await;
    }
    if is_late {
        tracing::info!("engines are managed by this gateway again");
    }
}
