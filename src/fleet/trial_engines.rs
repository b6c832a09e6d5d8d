//! Engines that a tuner tries with one setting after another, without a gateway.
//!
//! They are started, found again and stopped like a gateway's ([`ProcessDriver`], the journal,
//! [`wait_until_ready`]), but have no life cycle: a failure is reported and not retried, since the
//! settings are on trial.
//!
//! The journal gets a line before each start and after each stop. So when a tuner is killed, the
//! next one, or a gateway with the same folder, finds the engines. A tuner takes over an engine
//! with the same description and stops all others ([`TrialEngines::adopt_leftovers`]). Only engines
//! whose settings change are restarted. All of these stop before the first starts, since they may
//! share a device.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::driver::{Driver, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, ProcessDriver, StopRules};
use crate::engine::journal::{Journal, JournalError, JournalLine, Setup};
use crate::engine::lifecycle::{Lifecycle, Step};
use crate::engine_health::read_health;
use crate::ready::{ReadyRules, wait_until_ready};
use crate::state_folder;
use sluice_config::{Address, Launch, Target, Words};
use sluice_core::vllm::failure::FailureClass;

/// Limit of a health check; a busy engine responds late.
const HEALTH_LIMIT: Duration = Duration::from_secs(10);
/// Time for an engine to end after a failed health check.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A configured engine.
#[derive(Clone, Debug)]
pub struct TrialSpec {
    /// `pool/backend`.
    pub name: String,
    /// The address.
    pub address: Arc<Address>,
    /// How it is started. The flags come from the settings, except secret ones.
    pub launch: Launch,
    /// Models that it must serve when ready.
    pub models: Vec<String>,
    /// From SIGTERM to SIGKILL.
    pub grace: Duration,
    /// Factor for the time that a phase of the start may be without progress.
    pub start_timeout_scale: f64,
}

/// The failure of one engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{engine}: {failure}")]
pub struct TrialFailure {
    /// `pool/backend`.
    pub engine: String,
    /// The failure.
    pub failure: EngineFailure,
}

/// The engines of one deployment.
#[derive(Debug)]
pub struct TrialEngines {
    journal: Journal,
    engines: Vec<TrialEngine>,
}

#[derive(Debug)]
struct TrialEngine {
    spec: TrialSpec,
    driver: ProcessDriver,
    /// Digest of program, port, devices and environment.
    identity: String,
    /// The settings that the engine runs with, once it is ready.
    running: Option<EngineSettings>,
    models: Vec<String>,
}

impl TrialEngines {
    /// Opens the journal in `folder`, which also gets the logs. Starts nothing.
    ///
    /// # Errors
    /// The folder cannot be used, or a gateway or another tuner uses it.
    pub fn open(folder: &Path, specs: Vec<TrialSpec>) -> Result<Self, JournalError> {
        let journal = Journal::open(folder)?;
        let key =
            state_folder::key(folder).map_err(|source| JournalError::Unusable { path: folder.to_owned(), source })?;
        let engine = |spec: TrialSpec| TrialEngine {
            driver: ProcessDriver::of_kind(spec.address.engine, &spec.name, spec.launch.clone(), folder),
            identity: state_folder::digest(&key, &Target::Launch(spec.launch.clone()).compared()),
            running: None,
            models: Vec::new(),
            spec,
        };
        Ok(Self { journal, engines: specs.into_iter().map(engine).collect() })
    }

    /// Finds engines of an earlier tuner or gateway. A ready one with the same description is taken
    /// over, every other one stopped. Returns a line about each.
    ///
    /// # Errors
    /// An engine that does not stop.
    pub async fn adopt_leftovers(&mut self) -> Result<Vec<String>, TrialFailure> {
        let mut found = Vec::new();
        let records: Vec<JournalLine> = self.journal.last().values().cloned().collect();
        for record in records.iter().filter(|record| record.lifecycle.step.may_run()) {
            if self.engines.iter().any(|engine| engine.spec.name == record.backend) {
                continue;
            }
            let mut other = TrialEngine::unknown(&record.backend, self.journal.folder());
            if other.find(record.trace.as_ref()).await?.is_some() {
                other.stop(&mut self.journal).await?;
                found.push(format!("{}: its engine was stopped: it is not configured any more", record.backend));
            }
        }
        for engine in &mut self.engines {
            let record = records.iter().find(|record| record.backend == engine.spec.name);
            let trace = record.and_then(|record| record.trace.as_ref());
            let Some(trace) = engine.find(trace).await? else { continue };
            let same =
                record.filter(|record| record.trace.as_ref() == Some(&trace) && record.identity == engine.identity);
            let name = engine.spec.name.clone();
            let settings = same.map(|record| record.lifecycle.wanted.settings.clone());
            let line = match (settings, engine.ready().await) {
                (Some(settings), Ok(())) => {
                    engine.running = Some(settings);
                    format!("{name}: its engine runs already and is used")
                }
                (_, Err(failure)) => {
                    format!("{name}: an engine was left that is not ready ({}); it is stopped", failure.class)
                }
                (None, Ok(())) => format!("{name}: an engine was left with other settings; it is stopped"),
            };
            if engine.running.is_none() {
                engine.stop(&mut self.journal).await?;
            }
            found.push(line);
        }
        Ok(found)
    }

    /// The engines' names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.engines.iter().map(|engine| engine.spec.name.as_str())
    }

    /// The models that the engines serve.
    pub fn models(&self) -> Vec<String> {
        self.engines.iter().flat_map(|engine| engine.models.iter().cloned()).collect()
    }

    /// The number of engines that do not run with these settings, including ended ones.
    pub async fn changed(&mut self, settings: &[EngineSettings]) -> usize {
        for engine in &mut self.engines {
            if engine.driver.status().await != EngineStatus::Running {
                engine.running = None;
            }
        }
        self.engines.iter().zip(settings).filter(|(engine, settings)| !engine.runs_with(settings)).count()
    }

    /// Checks settings, one for each engine. Starts nothing.
    ///
    /// # Errors
    /// The first engine whose settings cannot work.
    pub async fn check(&self, settings: &[EngineSettings]) -> Result<(), TrialFailure> {
        for (engine, settings) in self.engines.iter().zip(settings) {
            engine.driver.check(settings).await.map_err(|failure| engine.failure(failure))?;
        }
        Ok(())
    }

    /// Makes every engine run with its settings, ready to serve. Engines that already do are not
    /// touched.
    ///
    /// # Errors
    /// The first engine that does not stop, start or become ready. An engine that does not become
    /// ready is stopped. If one does not start, all engines that had to start are stopped.
    pub async fn run(&mut self, settings: &[EngineSettings]) -> Result<(), TrialFailure> {
        let mut due = Vec::new();
        for (engine, settings) in self.engines.iter_mut().zip(settings) {
            if !engine.runs_with(settings) {
                engine.stop(&mut self.journal).await?;
                due.push((engine, settings));
            }
        }
        let mut failed = Ok(());
        for (engine, settings) in &mut due {
            failed = engine.start(settings, &mut self.journal).await;
            if failed.is_err() {
                break;
            }
        }
        let all_started = failed.is_ok();
        for (engine, settings) in due {
            let ready =
                if all_started { engine.ready().await.map_err(|failure| engine.failure(failure)) } else { Ok(()) };
            if all_started && ready.is_ok() {
                engine.running = Some(settings.clone());
            } else {
                failed = failed.and(ready).and(engine.stop(&mut self.journal).await);
            }
        }
        failed
    }

    /// Returns when an engine that should run has ended.
    pub async fn lost(&self) -> TrialFailure {
        let ends = self.engines.iter().filter(|engine| engine.running.is_some()).map(|engine| {
            Box::pin(async move {
                let exit = engine.driver.wait_for_exit().await;
                engine.failure(engine.driver.diagnose(Some(exit)))
            })
        });
        first(ends.collect()).await
    }

    /// An engine that should run, but has ended or fails the health check. When vLLM's engine
    /// process dies, the API server responds with errors for a while. So this waits for the end of
    /// the engine, because then the log shows the reason.
    pub async fn ill(&self) -> Option<TrialFailure> {
        for engine in self.engines.iter().filter(|engine| engine.running.is_some()) {
            if read_health(&engine.spec.address, HEALTH_LIMIT).await.is_ok() {
                continue;
            }
            let exit = tokio::time::timeout(END_LIMIT, engine.driver.wait_for_exit()).await;
            return Some(engine.failure(engine.driver.diagnose(exit.ok())));
        }
        None
    }

    /// Stops every engine, even one whose start was cancelled.
    ///
    /// # Errors
    /// The first engine that does not stop. The others are stopped.
    pub async fn stop(&mut self) -> Result<(), TrialFailure> {
        let mut failed = Ok(());
        for engine in &mut self.engines {
            failed = failed.and(engine.stop(&mut self.journal).await);
        }
        failed
    }
}

/// The output of the first future that ends; pending without futures.
async fn first<T>(mut futures: Vec<std::pin::Pin<Box<impl Future<Output = T>>>>) -> T {
    std::future::poll_fn(|context| {
        let ready = futures.iter_mut().find_map(|future| match future.as_mut().poll(context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        });
        ready.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
    })
    .await
}

impl TrialEngine {
    /// An engine known by name only: it can be found and stopped.
    fn unknown(name: &str, folder: &Path) -> Self {
        let launch = Launch::of(Words::default(), 0);
        let driver = ProcessDriver::new(name, launch.clone(), folder);
        let endpoint = Target::Launch(launch.clone()).endpoint();
        let address = Address::new(endpoint, None, None);
        let spec = TrialSpec {
            name: name.to_owned(),
            address: Arc::new(address),
            launch,
            models: Vec::new(),
            grace: StopRules::default().grace,
            start_timeout_scale: 1.0,
        };
        Self { spec, driver, identity: String::new(), running: None, models: Vec::new() }
    }

    fn failure(&self, failure: EngineFailure) -> TrialFailure {
        TrialFailure { engine: self.spec.name.clone(), failure }
    }

    fn runs_with(&self, settings: &EngineSettings) -> bool {
        self.running.as_ref() == Some(settings)
    }

    /// Takes control of a running engine of this name, by `trace` or by mark.
    async fn find(&self, trace: Option<&EngineIdentity>) -> Result<Option<EngineIdentity>, TrialFailure> {
        for trace in [trace.cloned(), self.driver.find_running(None).await].into_iter().flatten() {
            if self.driver.adopt(&trace).await.map_err(|failure| self.failure(failure))? {
                return Ok(Some(trace));
            }
        }
        Ok(None)
    }

    async fn start(&mut self, settings: &EngineSettings, journal: &mut Journal) -> Result<(), TrialFailure> {
        self.write(Step::Start, settings, None, journal)?;
        let trace = self.driver.start(settings).await.map_err(|failure| self.failure(failure))?;
        self.write(Step::Start, settings, Some(trace), journal)
    }

    /// Waits until the engine is ready, within [`ReadyRules::total`].
    async fn ready(&mut self) -> Result<(), EngineFailure> {
        let rules = ReadyRules { start_timeout_scale: self.spec.start_timeout_scale, ..ReadyRules::default() };
        let ready = wait_until_ready(&self.driver, &self.spec.address, &self.spec.models, rules).await?;
        self.driver.mark_ready();
        self.models = ready.models;
        Ok(())
    }

    async fn stop(&mut self, journal: &mut Journal) -> Result<(), TrialFailure> {
        self.running = None;
        if self.driver.status().await == EngineStatus::Absent {
            return Ok(());
        }
        let rules = StopRules { grace: self.spec.grace, ..StopRules::default() };
        self.driver.stop(rules).await.map_err(|failure| self.failure(failure))?;
        self.write(Step::Off, &EngineSettings::default(), None, journal)
    }

    fn write(
        &self,
        step: Step,
        settings: &EngineSettings,
        trace: Option<EngineIdentity>,
        journal: &mut Journal,
    ) -> Result<(), TrialFailure> {
        let setup = Setup { settings: settings.clone(), configured: self.identity.clone() };
        let mut lifecycle = Lifecycle::new(setup);
        lifecycle.step = step;
        let (at, backend) = (jiff::Timestamp::now().to_string(), self.spec.name.clone());
        let identity = self.identity.clone();
        let golden = Vec::new();
        let record = JournalLine { at, backend, lifecycle, trace, aside: None, identity, start_ms: None, golden };
        journal.write(record).map_err(|error| {
            let cause =
                format!("the journal of the engines in {} cannot be written: {error}", journal.folder().display());
            self.failure(EngineFailure::new(FailureClass::CommandFailed, cause))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_programs::write_program;
    use sluice_config::Endpoint;

    fn spec(name: &str, program: &Path) -> TrialSpec {
        // No engine listens, so ports need not be free.
        let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port: 1, prefix: String::new() };
        let address = Address::new(endpoint, None, None);
        let command = vec![program.display().to_string()].into();
        let launch = Launch::of(command, 1);
        TrialSpec {
            name: name.to_owned(),
            address: Arc::new(address),
            launch,
            models: Vec::new(),
            grace: Duration::from_secs(10),
            start_timeout_scale: 1.0,
        }
    }

    #[tokio::test]
    async fn an_engine_that_does_not_start_leaves_no_other_one_running() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("engine");
        write_program(&program, "#!/bin/bash\nwhile :; do sleep 0.05; done\n");
        let missing = folder.path().join("missing");
        let specs = vec![spec("p/a", &program), spec("p/b", &missing)];
        let mut engines = TrialEngines::open(&folder.path().join("state"), specs).unwrap();
        let failure = engines.run(&[EngineSettings::default(), EngineSettings::default()]).await.unwrap_err();
        assert_eq!((failure.engine.as_str(), failure.failure.class), ("p/b", FailureClass::ProgramMissing));
        let left = engines.engines[0].driver.status().await;
        engines.stop().await.unwrap();
        assert_eq!(left, EngineStatus::Absent);
    }
}
