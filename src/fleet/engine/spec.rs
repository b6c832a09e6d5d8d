//! An engine that the gateway runs, as the configuration describes it.
//!
//! Digests stand for what only a restart changes, so that a reload, and a gateway after a crash, can tell whether an engine
//! still is what the configuration says. Two specs also tell whether their engines may run beside each other.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::journal::Setup;
use super::lifecycle::RestartRules;
use crate::driver::{EngineSettings, StopRules};
use sluice_core::base::BackendId;
use sluice_gateway::config::{Fleet as Rules, Target};
use sluice_gateway::pool::Address;

/// An engine that the gateway runs.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// `pool/backend`.
    pub name: Arc<str>,
    /// Its place in admission.
    pub backend: BackendId,
    /// Where it is reached.
    pub address: Arc<Address>,
    /// How it is started and stopped, flags excepted.
    pub target: Target,
    /// Its flags as configured.
    pub settings: EngineSettings,
    /// Program, port, devices and environment, as a digest: what a driver is made for.
    pub identity: String,
    /// Everything about it that only a restart changes, as a digest.
    pub configured: String,
    /// Autoscaling decides when it is started.
    pub starts_on_demand: bool,
    /// Its pod is being deleted, or there is none at the moment.
    pub leaving: bool,
    /// The slots that its pool gives it.
    pub slots: u32,
    /// Pools that requests of its pool may spill to.
    pub spill: Vec<String>,
    /// Names that it must serve once it is ready, adapters that the gateway loads excepted.
    pub models: Vec<String>,
    /// Adapters that it must have, by name, with their folders.
    pub adapters: Vec<(String, PathBuf)>,
    /// Model and prompt; the generated text must be the same after a restart.
    pub golden: Vec<(String, String)>,
    /// Limits of its start, drain, stop and restarts.
    pub rules: Rules,
    /// Without a byte, a counter or a response for this long it is considered hung.
    pub stall: Duration,
    /// Limit of one request to its health, model and metrics endpoints.
    pub request_timeout: Duration,
}

impl EngineSpec {
    /// Its settings as configured.
    pub(crate) fn setup(&self) -> Setup {
        Setup { settings: self.settings.clone(), configured: self.configured.clone() }
    }

    /// The name of its pool.
    pub(crate) fn pool(&self) -> &str {
        self.name.split_once('/').map_or("", |(pool, _)| pool)
    }

    /// The GPUs that it may see; `None`: any, or none that is known.
    fn devices(&self) -> Option<&[u16]> {
        match &self.target {
            Target::Launch(launch) if !launch.gpu.is_empty() => Some(&launch.gpu),
            Target::Launch(_) | Target::Url(_) | Target::Control(..) | Target::Pod(..) => None,
        }
    }

    /// Whether both are known to use one device or one address.
    pub(crate) fn shares_place_with(&self, other: &Self) -> bool {
        let shared = match (self.devices(), other.devices()) {
            (Some(one), Some(two)) => one.iter().any(|gpu| two.contains(gpu)),
            _ => false,
        };
        shared || self.address.endpoint == other.address.endpoint
    }

    /// Whether one must be gone before the other starts: they share a place or a name, or may share a device that is not
    /// known.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let launched = |spec: &Self| matches!(spec.target, Target::Launch(_));
        let unknown = self.devices().is_none() || other.devices().is_none();
        (launched(self) && launched(other) && unknown) || self.shares_place_with(other) || self.name == other.name
    }

    pub(crate) fn restart_rules(&self) -> RestartRules {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        RestartRules {
            restarts: self.rules.restarts as usize,
            window_ms: ms(self.rules.restart_window),
            backoff_ms: ms(self.rules.backoff),
            backoff_max_ms: ms(self.rules.backoff_max),
        }
    }

    pub(crate) fn stop_rules(&self) -> StopRules {
        StopRules { grace: self.rules.grace, ..StopRules::default() }
    }
}
