//! The driver of an external engine: the gateway has only its URL, so it can drain and probe it.
//!
//! With this driver, the supervision needs no second kind of backend. The driver refuses commands,
//! and reports a state that it cannot determine as unknown.

use async_trait::async_trait;

use super::{
    Driver, DriverKind, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, Notice, StopRules, Stopped,
};
use sluice_core::vllm::failure::{Exit, FailureClass};
use sluice_core::vllm::logs::StartPhase;

/// An engine that the gateway does not control.
#[derive(Debug)]
pub struct ExternalDriver {
    name: String,
}

impl ExternalDriver {
    /// The driver of the backend `name`.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    fn refusal(&self) -> EngineFailure {
        EngineFailure::new(
            FailureClass::NotOurs,
            format!("{} is an external engine: the gateway only has its url", self.name),
        )
    }
}

#[async_trait]
impl Driver for ExternalDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::External
    }

    async fn check(&self, _settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure> {
        Err(self.refusal())
    }

    async fn start(&self, _settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure> {
        Err(self.refusal())
    }

    async fn find_running(&self, _except: Option<&EngineIdentity>) -> Option<EngineIdentity> {
        Some(EngineIdentity::External)
    }

    async fn adopt(&self, trace: &EngineIdentity) -> Result<bool, EngineFailure> {
        match trace {
            EngineIdentity::External => Ok(true),
            _ => Err(self.refusal()),
        }
    }

    async fn stop(&self, _rules: StopRules) -> Result<Stopped, EngineFailure> {
        Err(self.refusal())
    }

    async fn status(&self) -> EngineStatus {
        EngineStatus::Unknown
    }

    async fn wait_for_exit(&self) -> Exit {
        std::future::pending().await
    }

    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure {
        EngineFailure { exit, phase: StartPhase::Serving, ..self.refusal() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::vllm::failure::Retryable;

    #[tokio::test]
    async fn every_command_is_refused_with_the_name_of_the_backend() {
        let driver = ExternalDriver::new("short/gpu0");
        let failures = [
            driver.check(&EngineSettings::default()).await.unwrap_err(),
            driver.start(&EngineSettings::default()).await.unwrap_err(),
            driver.stop(StopRules::default()).await.unwrap_err(),
        ];
        for failure in failures {
            assert_eq!((failure.class, failure.retry()), (FailureClass::NotOurs, Retryable::Never));
            assert!(failure.to_string().contains("short/gpu0 is an external engine"), "{failure}");
        }
    }
}
