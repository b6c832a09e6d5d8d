//! The driver of an engine that somebody else runs: it can be drained and probed, and nothing more.
//!
//! It exists so that the supervisor needs no second kind of backend: every answer is an honest "not here".

use async_trait::async_trait;
use tokio::sync::watch;

use crate::driver::{
    AdapterRank, Driver, Failure, Kind, Notice, Owner, Progress, Settings, Status, StopRules, Stopped, Trace,
};
use sluice_core::vllm::failure::{Class, Exit};
use sluice_core::vllm::logs::StartPhase;

/// An engine that is only known by its URL.
#[derive(Debug)]
pub struct ExternalDriver {
    name: String,
}

impl ExternalDriver {
    /// The driver of the backend called `name`.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    fn refusal(&self) -> Failure {
        Failure::new(Class::NotOurs, format!("{} is run by somebody else: only its url is known here", self.name))
    }
}

#[async_trait]
impl Driver for ExternalDriver {
    fn kind(&self) -> Kind {
        Kind::External
    }

    async fn check(&self, _settings: &Settings) -> Result<Vec<Notice>, Failure> {
        Err(self.refusal())
    }

    fn adapter_rank(&self, _settings: &Settings) -> AdapterRank {
        AdapterRank::Unknown
    }

    async fn start(&self, _settings: &Settings) -> Result<Trace, Failure> {
        Err(self.refusal())
    }

    async fn find(&self) -> Option<Trace> {
        Some(Trace::External)
    }

    async fn adopt(&self, trace: &Trace) -> Result<bool, Failure> {
        match trace {
            Trace::External => Ok(true),
            _ => Err(self.refusal()),
        }
    }

    async fn stop(&self, _rules: StopRules) -> Result<Stopped, Failure> {
        Err(self.refusal())
    }

    async fn status(&self) -> Status {
        Status::Unknown
    }

    async fn ended(&self) -> Exit {
        std::future::pending().await
    }

    async fn owner(&self) -> Owner {
        Owner::Unknown
    }

    fn tail(&self, _lines: usize) -> Vec<String> {
        Vec::new()
    }

    fn progress(&self) -> Option<watch::Receiver<Progress>> {
        None
    }

    fn diagnosis(&self, exit: Option<Exit>) -> Failure {
        Failure { exit, phase: StartPhase::Serving, ..self.refusal() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::vllm::failure::Retry;

    #[tokio::test]
    async fn every_command_is_refused_by_name() {
        let driver = ExternalDriver::new("short/gpu0");
        let failures = [
            driver.check(&Settings::default()).await.unwrap_err(),
            driver.start(&Settings::default()).await.unwrap_err(),
            driver.stop(StopRules::default()).await.unwrap_err(),
        ];
        for failure in failures {
            assert_eq!((failure.class, failure.retry()), (Class::NotOurs, Retry::Never));
            assert!(failure.to_string().contains("short/gpu0 is run by somebody else"), "{failure}");
        }
        assert!(!driver.kind().restarts());
    }
}
