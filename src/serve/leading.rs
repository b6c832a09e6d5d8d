//! The leader's work in this gateway, while it leads. Only one of several gateways leads.
//!
//! The leader runs the engines, the tuner and the saved state of experiments. The others serve
//! requests too, and treat every engine as external, judged by probes. So their configuration,
//! connections and adapters are ready when one of them takes over; it reads the state that the
//! previous leader saved in `fleet.state`.
//!
//! When a term ends unrenewed, the leader's tasks are aborted at once, as if the process had been
//! killed: another gateway may act a tenth of the lease later. Requests are not affected.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::app::{App, Source};
use super::cluster::{self, LeaderView};
use super::reload::ReloadError;
use super::{engines, experiments, saved_experiments};
use crate::fleet::Lead;
use crate::online::engines::change::EXPERIMENT;
use crate::pool::{Bound, PoolLayout};
use sluice_config::Config;

/// Pause between attempts to open the journal, which the previous leader may still have locked.
const JOURNAL_PAUSE: Duration = Duration::from_millis(100);
/// Longest wait until the store shows that this gateway has given up the lead.
const RELEASE_MAX: Duration = Duration::from_secs(5);
/// Pause between looks at whether another gateway leads.
const LOOK: Duration = Duration::from_millis(50);

/// Pause between looks at the clock of ramps.
const RAMPS: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Leading {
    resigning: watch::Sender<bool>,
    acting: JoinHandle<()>,
    campaign: JoinHandle<()>,
    view: Arc<LeaderView>,
    lease: Duration,
}

impl Leading {
    pub(super) fn begin(app: &Arc<App>, config: &sluice_config::Cluster, view: Arc<LeaderView>) -> Self {
        let (resigning, resigns) = watch::channel(false);
        let (acts, ended) = watch::channel(false);
        let acting = tokio::spawn({
            let app = Arc::clone(app);
            async move {
                app.act_while_leading(resigns).await;
                acts.send_replace(true);
            }
        });
        let campaign = cluster::campaign(config, &view, app.fleet.lead(), ended);
        Self { resigning, acting, campaign, view, lease: config.lease }
    }

    /// Ends the leader's work and gives up the lead. The returned future completes when this
    /// gateway may become unready: when another one leads, after a lease, or at once if readiness
    /// does not depend on the lead.
    pub(super) fn resign(&self) -> impl Future<Output = ()> + Send + use<> {
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

    /// As [`Leading::resign`], and waits until the store shows that this gateway does not lead. If
    /// the store cannot be reached, the others have to wait for the lease.
    pub(super) async fn end(self) {
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

/// The tasks that decide about engines, limits and experiments. Only one of several gateways runs
/// them.
#[derive(Debug)]
pub(super) struct Deciders {
    end: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Deciders {
    pub(super) fn begin(app: &Arc<App>) -> Self {
        let (end, ending) = watch::channel(false);
        let state = app.config.load().fleet.state.clone();
        let tasks = vec![
            tokio::spawn(Arc::clone(app).keep_experiments(state, ending.clone())),
            tokio::spawn(Arc::clone(app).keep_looking_at_adapters(ending.clone())),
            tokio::spawn(Arc::clone(app).keep_tuning(ending.clone())),
            tokio::spawn(Arc::clone(app).keep_scaling(ending.clone())),
            tokio::spawn(Arc::clone(app).keep_watching_engines(ending)),
        ];
        Self { end, tasks }
    }

    /// Aborts the tasks where they are, because another gateway may decide.
    pub(super) fn abort(self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }

    /// Ends the tasks. Afterwards their knowledge is on disk.
    pub(super) async fn end(self) {
        self.end.send_replace(true);
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

impl App {
    /// Whether this gateway changes engines now.
    pub(super) fn acts(&self) -> bool {
        self.leader.as_ref().is_none_or(|_| *self.acts.lock())
    }

    /// Does the leader's work whenever this gateway leads, until it resigns.
    async fn act_while_leading(self: Arc<Self>, mut resigns: watch::Receiver<bool>) {
        let lead = self.fleet.lead();
        loop {
            tokio::select! {
                () = lead.held() => {}
                () = self.keep_ramps() => {}
                _ = resigns.wait_for(|resigns| *resigns) => return,
            }
            tracing::info!("cluster: this gateway leads: it changes engines, limits and experiments");
            let resigned = tokio::select! {
                biased;
                () = lead.lost() => false,
                () = self.begin_to_act() => false,
                _ = resigns.wait_for(|resigns| *resigns) => true,
            };
            let mut ends_in_order = resigned;
            if !resigned && lead.is_held() {
                let deciders = Deciders::begin(&self);
                ends_in_order = tokio::select! {
                    biased;
                    () = lead.lost() => false,
                    _ = resigns.wait_for(|resigns| *resigns) => true,
                };
                if ends_in_order {
                    deciders.end().await;
                    self.tuning.save_or_warn();
                } else {
                    deciders.abort();
                }
            }
            self.end_to_act(&lead, ends_in_order).await;
            if ends_in_order {
                return;
            }
        }
    }

    /// Advances the ramps of experiments, so that a user has the same arm at every gateway. Never
    /// ends.
    async fn keep_ramps(&self) {
        loop {
            sleep(RAMPS).await;
            self.learned.experiments.advance(Timestamp::now());
        }
    }

    /// Reads the state that the previous leader saved, and takes over the engines once that leader
    /// has unlocked the journal.
    async fn begin_to_act(self: &Arc<Self>) {
        let app = Arc::clone(self);
        if let Err(error) = tokio::task::spawn_blocking(move || app.read_saved()).await {
            tracing::error!(%error, "what the gateway before has saved could not be read");
        }
        let mut waits = None;
        while engines::any(&self.config.load())
            && let Err(error) = self.fleet.open(&self.config.load().fleet.state)
        {
            if waits.is_none() {
                tracing::error!("this gateway leads, and does not manage engines yet: {error}; it goes on trying");
                waits = Some(error.to_string());
                self.note_wait(waits.clone());
            }
            sleep(JOURNAL_PAUSE).await;
        }
        if waits.is_some() {
            tracing::info!("engines are managed by this gateway now");
            self.note_wait(None);
        }
        let app = Arc::clone(self);
        let applied = tokio::task::spawn_blocking(move || app.set_acts(true)).await;
        if let Err(error) = applied {
            tracing::error!(%error, "engines could not be taken over");
        }
    }

    fn note_wait(&self, why: Option<String>) {
        if let Some(view) = &self.leader {
            view.note_wait(why);
        }
    }

    /// Aborts all changes of engines.
    async fn end_to_act(self: &Arc<Self>, lead: &Lead, in_order: bool) {
        if !in_order {
            let why = self.leader.as_ref().and_then(|view| view.trouble()).map(|why| format!(": {why}"));
            tracing::warn!(
                "cluster: this gateway no longer leads{}; its requests go on, and it changes nothing any more",
                why.unwrap_or_default()
            );
        }
        lead.set(None);
        self.note_wait(None);
        self.fleet.let_go().await;
        self.fleet.take_back();
        self.scaling.clear();
        let app = Arc::clone(self);
        let applied = tokio::task::spawn_blocking(move || app.end_trials());
        if let Err(error) = applied.await {
            tracing::error!(%error, "engines could not be handed to another gateway");
        }
    }

    /// Ends the trials of the tuner, which another gateway takes over. The limits in force stay.
    fn end_trials(&self) {
        self.set_acts(false);
        let view = self.admission.view();
        let all = view.iter().flat_map(|pool| pool.backends.iter().map(|backend| (backend.id, Bound::Trial(None))));
        self.admission.set_bounds(all);
        self.put_limits(|config| config.experiments.retain(|experiment| experiment.name != EXPERIMENT));
    }

    /// Sets whether this gateway or another one manages the engines.
    fn set_acts(&self, acts: bool) {
        let _guard = self.reloading.lock();
        // The lead may have been lost during the wait for a reload.
        let acts = acts && self.fleet.lead().is_held();
        *self.acts.lock() = acts;
        if !acts {
            // A reload that began earlier may have opened the journal.
            self.fleet.close_journal();
        }
        let (config, loaded) = (self.config.load_full(), self.loaded.lock());
        self.apply_engines(&config, &loaded.layout);
    }

    /// Hands the engines of a configuration to the fleet, as managed or as external ones. Returns
    /// the number of managed engines.
    pub(super) fn apply_engines(&self, config: &Config, layout: &PoolLayout) -> usize {
        let acts = self.acts();
        let external = engines::external_backends(config, layout, !acts);
        if !acts {
            self.fleet.stand_by(external);
            return 0;
        }
        let own = engines::engines(config, layout, |bytes| self.fleet.digest(bytes));
        let count = own.len();
        self.fleet.apply(own, external);
        count
    }

    /// Stands for election, if the configuration elects a leader.
    pub(super) fn stand_for_election(self: &Arc<Self>) -> Option<Leading> {
        let (config, view) = (self.config.load(), self.leader.clone()?);
        config.cluster.as_ref().map(|cluster| Leading::begin(self, cluster, view))
    }

    /// Goes on where the previous leader stopped: experiments with their measurements, and the
    /// limits that the tuner found.
    fn read_saved(&self) {
        let folder = self.config.load().fleet.state.clone();
        experiments::restore_over(&self.learned.experiments, &folder);
        if let Err(error) = self.read_added() {
            tracing::error!("the experiments of the admin API are not in force: {error}");
        }
        let goes_on = self.tuning.restore();
        // Also without limits, because experiments have new measurements.
        self.put_limits(|config| {
            if goes_on {
                self.tuning.put(config);
            }
        });
    }

    /// Puts the saved experiments of the admin API in force, in place of the known ones.
    fn read_added(&self) -> Result<(), ReloadError> {
        let Source::File { path, sets } = &self.source else { return Ok(()) };
        let _guard = self.reloading.lock();
        let mut config = Config::load_with(path, sets, &[])?.config;
        let added = saved_experiments::restore(&mut config, path, sets);
        if added != *self.added.lock() {
            self.apply(config)?;
            *self.added.lock() = added;
        }
        Ok(())
    }
}
