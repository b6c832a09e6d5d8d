//! The fleet: all engines that this gateway runs, and the interface to them for the rest of the
//! gateway.
//!
//! [`Fleet`] accepts configurations and commands; other parts of the coordinator carry them out.
//! [`Fleet::views`] shows the state of each engine.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::change::{self, ChangeStarted, RestartError, RestartRequest};
use super::engine_table::ExternalBackend;
use super::hand_over::{self, EngineBusy};
use super::registry::{DriverMaker, Registry};
use super::stop::begin_stop;
use super::{leftovers, reconcile, scale, sharing};
use crate::driver::LogLines;
use crate::engine::journal::JournalError;
use crate::engine::lifecycle::ChangeRefused;
use crate::engine::spec::EngineSpec;
use crate::engine::view::EngineView;
use crate::lead::Lead;
use crate::models::ReportedModels;
use crate::other_gateways::OtherGateways;
use crate::state_folder;
use sluice_gateway::pool::Admission;

/// Why there is no log of an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// The gateway does not run the engine.
    #[error("{0} is not managed by sluice (it has a url, no launch), so its log is where its engine runs")]
    NotManaged(String),
    /// The engine is in a pod.
    #[error("the engine of {0} is in a pod, so its log is in kubectl logs")]
    Elsewhere(String),
}

/// All engines that this gateway runs.
#[derive(Debug)]
pub struct Fleet {
    registry: Arc<Registry>,
    reconciling: AtomicBool,
    /// The zero of the clock of turns.
    begun: Instant,
}

impl Fleet {
    /// A fleet without engines. `maker` makes the driver of each engine that [`Fleet::apply`] adds.
    pub fn new(admission: Arc<Admission>, reported: Arc<ReportedModels>, maker: DriverMaker) -> Arc<Self> {
        let registry = Arc::new(Registry::new(admission, reported, maker));
        Arc::new(Self { registry, reconciling: AtomicBool::new(false), begun: Instant::now() })
    }

    /// Opens the journal, unless it is open. Call it before the first [`Fleet::apply`].
    ///
    /// # Errors
    /// The folder cannot be used, or another gateway uses it.
    pub fn open(&self, folder: &Path) -> Result<(), JournalError> {
        self.registry.open_journal(folder)
    }

    /// Whether this gateway gave the engines to another gateway and did not take them back.
    pub fn is_given_away(&self) -> bool {
        self.registry.is_closed()
    }

    /// Unlocks the journal for the gateway that has the engines.
    pub fn close_journal(&self) {
        self.registry.close_journal();
    }

    /// A digest of a setting that may contain secrets, for comparison and storage. It is keyed with
    /// a random key of the state folder, so a secret cannot be guessed from it.
    pub fn digest(&self, bytes: &[u8]) -> String {
        state_folder::digest(&self.registry.digest_key(), bytes)
    }

    /// Applies a configuration: starts new engines, stops removed ones, and restarts changed ones,
    /// one at a time. Returns at once; the reconciler does the work. If there are engines, the
    /// journal must be open.
    pub fn apply(&self, engines: Vec<EngineSpec>, external: Vec<ExternalBackend>) {
        if self.registry.is_closed() {
            return;
        }
        self.registry.set_wanted(engines, external);
        leftovers::stop_leftovers(&self.registry);
        self.reconcile();
    }

    /// Applies a configuration while another gateway runs the engines. To this gateway, all
    /// backends are then external.
    pub fn stand_by(&self, external: Vec<ExternalBackend>) {
        if !self.registry.is_closed() {
            self.registry.set_wanted(Vec::new(), external);
            self.reconcile();
        }
    }

    fn reconcile(&self) {
        self.registry.update_cordons();
        self.registry.wake.notify_one();
        if !self.reconciling.swap(true, Ordering::Relaxed) {
            self.registry.tasks.spawn(reconcile::reconcile(Arc::clone(&self.registry)));
        }
    }

    /// Restarts an engine. Returns once the change has begun; [`Fleet::views`] shows the progress.
    ///
    /// # Errors
    /// The change is refused; nothing has changed.
    pub async fn restart(&self, name: &str, request: RestartRequest) -> Result<ChangeStarted, RestartError> {
        change::restart(&self.registry, name, request).await
    }

    /// Ends the trials of the tuner, except on engines (`pool/backend`) for which `is_under_way`
    /// holds. The old engines are then no longer kept for a return.
    pub fn end_trials(&self, is_under_way: impl Fn(&str) -> bool) {
        for (name, engine) in &self.registry.table().managed {
            if !is_under_way(name) {
                engine.handle.context.state.lock().lifecycle.end_trial();
            }
        }
    }

    /// Makes an engine start now that is on hold or in backoff. Does nothing for an external
    /// backend.
    ///
    /// # Errors
    /// The engine is being shut down.
    pub async fn enable(&self, name: &str) -> Result<(), ChangeRefused> {
        match self.registry.handle(name) {
            Some(handle) => handle.enable().await,
            None => Ok(()),
        }
    }

    /// Makes `wanted` engines of a pool run, or all of them (`None`). If `may_stop`, surplus
    /// engines are drained and stopped. One call takes one step, so repeat it about once a second.
    /// [`Fleet::views`] shows the result. If the engines are pods of a StatefulSet, returns the
    /// fewest replicas to which the set may be reduced.
    pub async fn scale(&self, pool: &str, wanted: Option<u32>, may_stop: bool) -> u32 {
        scale::scale(&self.registry, pool, wanted, may_stop).await
    }

    /// Lets the engines that share a device take turns. One call takes one step, so repeat it
    /// several times a second.
    pub async fn take_turns(&self) {
        sharing::take_turns(&self.registry, self.begun).await;
    }

    /// The state of every engine, by name: engines that are managed, that are being stopped, or
    /// that wait until another engine has stopped.
    pub fn views(&self) -> Vec<EngineView> {
        self.registry.table().views()
    }

    /// Lines of the log of a managed engine: see
    /// [`Driver::log_lines`](crate::driver::Driver::log_lines).
    ///
    /// # Errors
    /// The gateway does not run the engine, or the engine is in a pod.
    pub fn log(&self, name: &str, after: Option<u64>, most: usize) -> Result<LogLines, LogError> {
        let context = self.registry.context(name).ok_or_else(|| LogError::NotManaged(name.to_owned()))?;
        context.driver().log_lines(after, most).ok_or_else(|| LogError::Elsewhere(name.to_owned()))
    }

    /// The limits of a managed engine (`pool/backend`) for LoRA adapters, if known: how many
    /// adapters the engine keeps in host memory, and the largest rank.
    pub fn adapter_limits(&self, name: &str) -> (Option<u64>, Option<u32>) {
        self.registry.table().adapter_limits(name).unwrap_or_default()
    }

    /// Speeds up the current or next shutdown. Engines are not drained, and an engine that still
    /// runs two seconds after SIGTERM is killed.
    pub fn shut_down_fast(&self) {
        self.registry.fast_shutdown.cancel();
    }

    /// Completes once [`Fleet::shut_down_fast`] was called.
    pub fn fast_shutdown(&self) -> impl Future<Output = ()> + Send + use<> {
        self.registry.fast_shutdown.clone().cancelled_owned()
    }

    /// The running engines that this gateway started or took over, such as `pool/backend (pid 71)`.
    pub fn running(&self) -> Vec<String> {
        self.registry.table().running()
    }

    /// Stops every engine and waits for their ends. No engine is started any more.
    pub async fn stop(&self) {
        self.registry.close();
        let names: Vec<String> = self.registry.table().managed.keys().cloned().collect();
        for name in names {
            begin_stop(&self.registry, &name, None);
        }
        self.registry.tasks.close();
        self.registry.tasks.wait().await;
    }

    /// Gives the running engines and the journal to another gateway, which adopts them.
    /// [`Fleet::take_back`] undoes it.
    ///
    /// # Errors
    /// An engine is being changed, or stopped for good. Then nothing is given away.
    pub async fn release(&self) -> Result<(), EngineBusy> {
        hand_over::release(&self.registry).await?;
        self.reconciling.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Notes that another gateway still has requests on the engines of the journal. So engines that
    /// are no longer configured keep running until [`Fleet::serves_alone`], but not longer than
    /// `at_most`. Call it before [`Fleet::apply`].
    pub fn serves_beside_another(&self, at_most: Duration) {
        self.registry.set_beside(Some(Instant::now() + at_most));
    }

    /// Notes that the other gateway has ended.
    pub fn serves_alone(&self) {
        self.registry.set_beside(None);
    }

    /// Whether this gateway may act on engines, if several gateways elect a leader.
    pub fn lead(&self) -> Arc<Lead> {
        Arc::clone(&self.registry.lead)
    }

    /// Other gateways before the same engines.
    pub fn others(&self) -> Arc<OtherGateways> {
        Arc::clone(&self.registry.others)
    }

    /// Lets go of all engines at once, since another gateway may lead. Each engine task ends within
    /// a step, as if this process had been killed, and the journal is closed. [`Fleet::take_back`]
    /// undoes it.
    pub async fn let_go(&self) {
        hand_over::let_go(&self.registry).await;
        self.reconciling.store(false, Ordering::Relaxed);
    }

    /// Undoes [`Fleet::release`] or [`Fleet::let_go`]. Open the journal next, then apply the
    /// configuration.
    pub fn take_back(&self) {
        self.registry.reopen();
    }

    /// Ends all engine tasks. The engines keep running; the journal lists their processes.
    pub fn abandon(&self) {
        self.registry.close();
        for engine in std::mem::take(&mut self.registry.table().managed).into_values() {
            engine.task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::journal::Journal;
    use crate::engine::journal::tests::record;
    use crate::engine::lifecycle::Step;
    use sluice_gateway::pool::HealthRules;

    fn fleet() -> Arc<Fleet> {
        let second = Duration::from_secs(1);
        let rules = HealthRules {
            probe_failures: 1,
            request_failures: 1,
            eject_base: second,
            eject_max: second,
            max_ejected: 0.5,
        };
        let maker: DriverMaker = Arc::new(|_| unreachable!("there are no engines"));
        Fleet::new(Admission::new(Instant::now(), rules, 1), Arc::default(), maker)
    }

    #[tokio::test]
    async fn a_gateway_that_stands_by_stops_no_engine_of_the_journal() {
        let folder = tempfile::tempdir().unwrap();
        Journal::open(folder.path()).unwrap().write(record("p/a", Step::Serve)).unwrap();
        let fleet = fleet();
        fleet.open(folder.path()).unwrap();
        let stopping =
            || fleet.registry.table().stopping.iter().map(|engine| engine.name().to_owned()).collect::<Vec<_>>();
        fleet.stand_by(Vec::new());
        assert!(stopping().is_empty());
        fleet.apply(Vec::new(), Vec::new());
        assert_eq!(stopping(), ["p/a"], "it is no longer configured");
        fleet.abandon();
    }

    #[tokio::test]
    async fn a_fleet_is_given_away_until_it_is_taken_back_and_its_journal_is_locked_until_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let fleet = fleet();
        fleet.release().await.unwrap();
        assert!(fleet.is_given_away());
        fleet.take_back();
        assert!(!fleet.is_given_away());
        fleet.open(folder.path()).unwrap();
        assert!(Journal::open(folder.path()).is_err());
        fleet.close_journal();
        assert!(Journal::open(folder.path()).is_ok());
    }

    #[test]
    fn engines_are_handed_over_by_an_upgrade_an_election_and_when_they_are_taken_back() {
        let fleet = fleet();
        assert!(!fleet.registry.is_handed_over());
        fleet.serves_beside_another(Duration::from_secs(60));
        assert!(fleet.registry.is_handed_over());
        fleet.serves_alone();
        assert!(!fleet.registry.is_handed_over());
        fleet.take_back();
        assert!(fleet.registry.is_handed_over());
        let elected = self::fleet();
        elected.lead().set(None);
        assert!(elected.registry.is_handed_over());
    }

    #[tokio::test]
    async fn no_change_begins_while_an_engine_is_being_replaced() {
        let fleet = fleet();
        let name: Arc<str> = "p/a".into();
        let replacing = fleet.registry.replace(&name);
        let blocked = change::ensure_no_change(&fleet.registry, None).unwrap_err();
        assert_eq!(blocked, crate::engine::lifecycle::RestartBlocked::ChangeInProgress("p/a".to_owned()));
        assert_eq!(change::ensure_no_change(&fleet.registry, Some("p/a")), Ok(()));
        drop(replacing);
        assert_eq!(change::ensure_no_change(&fleet.registry, None), Ok(()));
    }
}
