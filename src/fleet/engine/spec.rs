//! An engine that the gateway runs, as the configuration describes it.
//!
//! Digests stand for everything that only a restart changes. From them a reload, and a gateway
//! after a crash, can see whether the configuration of an engine has changed. Two specs also show
//! whether both engines may run at the same time.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::journal::Setup;
use super::lifecycle::RestartRules;
use crate::driver::{EngineSettings, StopRules};
use sluice_config::{Address, Fleet as Rules, Gpu, Target};
use sluice_core::base::BackendId;

/// A configured engine.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// `pool/backend`.
    pub name: Arc<str>,
    /// The index in admission.
    pub backend: BackendId,
    /// The address.
    pub address: Arc<Address>,
    /// How the engine is started and stopped, without flags.
    pub target: Target,
    /// Configured flags.
    pub settings: EngineSettings,
    /// Digest of the target without the flags, such as program, port, devices and environment. If
    /// it changes, the engine gets a new driver.
    pub identity: String,
    /// Digest of everything that only a restart changes.
    pub configured: String,
    /// Whether the engine starts only when autoscaling wants it, or in its turn on a device.
    pub starts_on_demand: bool,
    /// Whether the pod is being deleted or is missing.
    pub leaving: bool,
    /// Slots of the engine in the pool.
    pub slots: u32,
    /// Pools that requests may spill to.
    pub spill: Vec<String>,
    /// Models that the engine must serve when it is ready, without adapters that the gateway loads.
    pub models: Vec<String>,
    /// Adapters that the engine must have: names and folders.
    pub adapters: Vec<(String, PathBuf)>,
    /// Golden prompts: model and prompt, for which the text must be the same after a restart.
    pub golden: Vec<(String, String)>,
    /// Limits of start, drain, stop and restarts.
    pub rules: Rules,
    /// When streams begin to move to other engines during a drain; `None`: never.
    pub moves_after: Option<Duration>,
    /// The engine counts as hung after this time without output, progress or a response.
    pub stall: Duration,
    /// Limit of a request for health, models or metrics.
    pub request_timeout: Duration,
}

fn draining(running: u32, moves_after: Option<Duration>, limit: Option<Duration>) -> String {
    let moves = moves_after.map(|after| format!("streams move after {:.0} s (drain.move_after)", after.as_secs_f64()));
    let end = match limit {
        Some(limit) => format!("given up after {:.0} s (fleet.drain)", limit.as_secs_f64()),
        None => "another model waits for its turn".to_owned(),
    };
    let texts: Vec<String> = moves.into_iter().chain([end]).collect();
    format!("{running} requests in flight; {}", texts.join(", "))
}

impl EngineSpec {
    /// The state of a drain with this many requests, and both of its limits.
    pub(crate) fn draining(&self, running: u32, limit: Option<Duration>) -> String {
        draining(running, self.moves_after, limit)
    }

    pub(crate) fn setup(&self) -> Setup {
        Setup { settings: self.settings.clone(), configured: self.configured.clone() }
    }

    pub(crate) fn pool(&self) -> &str {
        self.name.split_once('/').map_or("", |(pool, _)| pool)
    }

    /// The GPUs that the engine may use; `None`: any, or unknown.
    fn devices(&self) -> Option<&[Gpu]> {
        match &self.target {
            Target::Launch(launch) if !launch.gpu.is_empty() => Some(&launch.gpu),
            Target::Launch(_) | Target::Url(_) | Target::Control(..) | Target::Pod(..) => None,
        }
    }

    /// The name of the device on which this engine takes turns with others, if it does.
    pub(crate) fn share(&self) -> Option<&str> {
        match &self.target {
            Target::Launch(launch) => launch.share.as_deref(),
            Target::Url(_) | Target::Control(..) | Target::Pod(..) => None,
        }
    }

    /// Whether both are known to share a device or an address.
    pub(crate) fn shares_place_with(&self, other: &Self) -> bool {
        let shared = match (self.devices(), other.devices()) {
            (Some(one), Some(two)) => one.iter().any(|gpu| two.contains(gpu)),
            _ => false,
        };
        shared || self.address.endpoint == other.address.endpoint
    }

    /// Whether one engine must be gone before the other starts, because they share a place or name,
    /// or may share an unknown device.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_says_when_streams_move_and_when_it_is_given_up() {
        let of = |moves| draining(3, moves, Some(Duration::from_secs(300)));
        assert_eq!(
            of(Some(Duration::from_secs(5))),
            "3 requests in flight; streams move after 5 s (drain.move_after), given up after 300 s (fleet.drain)"
        );
        assert_eq!(of(None), "3 requests in flight; given up after 300 s (fleet.drain)");
        assert_eq!(draining(1, None, None), "1 requests in flight; another model waits for its turn");
    }
}
