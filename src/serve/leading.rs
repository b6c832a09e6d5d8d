//! The work of the one gateway that leads: it runs the engines, the tuner and the saved state of
//! experiments.
//!
//! The other gateways serve requests too, and treat every engine as external, judged by probes. So
//! configuration, connections and adapters are ready when one of them takes over and reads the
//! state in `fleet.state`.
//!
//! When a term ends unrenewed, the leader's tasks are aborted at once, as if the process had been
//! killed, because another gateway may act a tenth of the lease later.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::app::App;
use crate::cluster::{self, LeaderView};
use crate::core::Core;
use crate::{engines, experiments, tuner, turns};
use sluice_fleet::Lead;
use sluice_gateway::pool::Bound;
use sluice_online::engines::change::EXPERIMENT;

/// Pause between attempts to open the journal, which the previous leader may still have locked.
const JOURNAL_PAUSE: Duration = Duration::from_millis(100);
/// Longest wait until the store shows that this gateway has given up the lead.
const RELEASE_MAX: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

const RAMPS: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Leading {
    resigning: watch::Sender<bool>,
    acting: JoinHandle<()>,
    campaign: JoinHandle<()>,
    view: Arc<LeaderView>,
    lease: Duration,
}

impl Leading {
    pub(crate) fn begin(app: &Arc<App>, config: &sluice_config::Cluster, view: Arc<LeaderView>) -> Self {
        let (resigning, resigns) = watch::channel(false);
        let (acts, ended) = watch::channel(false);
        let acting = tokio::spawn({
            let app = Arc::clone(app);
            async move {
                act_while_leading(&app, resigns).await;
                acts.send_replace(true);
            }
        });
        let campaign = cluster::campaign(config, &view, app.core.fleet.lead(), ended);
        Self { resigning, acting, campaign, view, lease: config.lease }
    }

    /// Ends the leader's work and gives up the lead. The returned future completes when this
    /// gateway may become unready: when another one leads, after a lease, or at once if readiness
    /// does not depend on the lead.
    pub(crate) fn resign(&self) -> impl Future<Output = ()> + Send + use<> {
        self.view.note_resigned();
        self.resigning.send_replace(true);
        let (view, lease) = (Arc::clone(&self.view), self.lease);
        async move {
            let another = async {
                while view.only_it_serves() && !view.is_another() {
                    sleep(LOOK).await;
                }
            };
            let _ = timeout(lease, another).await;
        }
    }

    /// Resigns ([`Leading::resign`]), and waits until the store shows that this gateway does not
    /// lead. If the store does not answer, the other gateways wait for the end of the lease.
    pub(crate) async fn end(self) {
        drop(self.resign());
        let _ = self.acting.await;
        let released = async {
            while self.view.is_own() {
                sleep(LOOK).await;
            }
        };
        if timeout(self.lease.min(RELEASE_MAX), released).await.is_err() {
            tracing::warn!("cluster: the lead was not given up in the store: others wait for the lease");
        }
        self.campaign.abort();
    }
}

/// The tasks that decide about engines, limits and experiments.
#[derive(Debug)]
pub(crate) struct Deciders {
    end: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Deciders {
    pub(crate) fn begin(app: &Arc<App>) -> Self {
        let (end, ending) = watch::channel(false);
        let mut tasks = Vec::from(app.experiments.start(&ending));
        tasks.extend(tuner::start(&app.tuner, &ending));
        tasks.push(app.scaler.start(&ending));
        tasks.push(turns::start(&app.core, &ending));
        Self { end, tasks }
    }

    /// Aborts the tasks, because another gateway may decide now.
    pub(crate) fn abort(self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }

    /// Ends the tasks, after they have saved their state.
    pub(crate) async fn end(self) {
        self.end.send_replace(true);
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

async fn act_while_leading(app: &Arc<App>, mut resigns: watch::Receiver<bool>) {
    let lead = app.core.fleet.lead();
    loop {
        tokio::select! {
            () = lead.held() => {}
            () = keep_ramps(app) => {}
            _ = resigns.wait_for(|resigns| *resigns) => return,
        }
        tracing::info!("cluster: this gateway leads: it changes engines, limits and experiments");
        let resigned = tokio::select! {
            biased;
            () = lead.lost() => false,
            () = begin_to_act(app) => false,
            _ = resigns.wait_for(|resigns| *resigns) => true,
        };
        let mut ends_in_order = resigned;
        if !resigned && lead.is_held() {
            let deciders = Deciders::begin(app);
            ends_in_order = tokio::select! {
                biased;
                () = lead.lost() => false,
                _ = resigns.wait_for(|resigns| *resigns) => true,
            };
            if ends_in_order {
                deciders.end().await;
                app.tuner.state.save_or_warn();
            } else {
                deciders.abort();
            }
        }
        end_to_act(app, &lead, ends_in_order).await;
        if ends_in_order {
            return;
        }
    }
}

/// Advances the ramps of experiments, so that a user has the same arm at every gateway.
async fn keep_ramps(app: &App) {
    loop {
        sleep(RAMPS).await;
        app.core.learned.experiments.advance(Timestamp::now());
    }
}

/// Reads the saved state, and takes over the engines once the journal is unlocked.
async fn begin_to_act(app: &Arc<App>) {
    let reading = Arc::clone(app);
    if let Err(error) = tokio::task::spawn_blocking(move || read_saved(&reading)).await {
        tracing::error!(%error, "what the gateway before has saved could not be read");
    }
    let mut waits = None;
    while engines::any(&app.core.config.load())
        && let Err(error) = app.core.fleet.open(&app.core.config.load().fleet.state)
    {
        if waits.is_none() {
            tracing::error!("this gateway leads, and does not manage engines yet: {error}; it goes on trying");
            waits = Some(error.to_string());
            note_wait(app, waits.clone());
        }
        sleep(JOURNAL_PAUSE).await;
    }
    if waits.is_some() {
        tracing::info!("engines are managed by this gateway now");
        note_wait(app, None);
    }
    let core = Arc::clone(&app.core);
    let applied = tokio::task::spawn_blocking(move || core.set_acts(true)).await;
    if let Err(error) = applied {
        tracing::error!(%error, "engines could not be taken over");
    }
}

fn note_wait(app: &App, why: Option<String>) {
    if let Some(view) = &app.core.leader {
        view.note_wait(why);
    }
}

async fn end_to_act(app: &Arc<App>, lead: &Lead, in_order: bool) {
    if !in_order {
        let why = app.core.leader.as_ref().and_then(|view| view.trouble()).map(|why| format!(": {why}"));
        tracing::warn!(
            "cluster: this gateway no longer leads{}; its requests go on, and it changes nothing any more",
            why.unwrap_or_default()
        );
    }
    lead.set(None);
    note_wait(app, None);
    app.core.fleet.let_go().await;
    app.core.fleet.take_back();
    app.scaler.clear();
    let core = Arc::clone(&app.core);
    let applied = tokio::task::spawn_blocking(move || end_trials(&core));
    if let Err(error) = applied.await {
        tracing::error!(%error, "engines could not be handed to another gateway");
    }
}

/// Ends the tuner's trials. The limits in force stay.
fn end_trials(core: &Core) {
    core.set_acts(false);
    let view = core.admission.view();
    let all = view.iter().flat_map(|pool| pool.backends.iter().map(|backend| (backend.id, Bound::Trial(None))));
    core.admission.set_bounds(all);
    core.put_limits(|config| config.experiments.retain(|experiment| experiment.name != EXPERIMENT));
}

pub(crate) fn stand_for_election(app: &Arc<App>) -> Option<Leading> {
    let (config, view) = (app.core.config.load(), app.core.leader.clone()?);
    config.cluster.as_ref().map(|cluster| Leading::begin(app, cluster, view))
}

fn read_saved(app: &App) {
    let folder = app.core.config.load().fleet.state.clone();
    experiments::restore_over(&app.core.learned.experiments, &folder);
    if let Err(error) = app.reloader.read_added() {
        tracing::error!("the experiments of the admin API are not in force: {error}");
    }
    let goes_on = app.tuner.state.restore();
    // Even without kept limits the routing table must be rebuilt, because the experiments have new
    // measurements.
    app.core.put_limits(|config| {
        if goes_on {
            app.tuner.state.put(config);
        }
    });
}
