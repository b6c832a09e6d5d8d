//! The driver of an engine in a pod of a StatefulSet.
//!
//! A start applies the flags as arguments of the container ([`set`]). If the pod is still the
//! stopped one, the start deletes it, and the platform starts the new pod. So a stop does nothing
//! to the pod, which is out of rotation, because the platform gives no device to two pods. If the
//! platform replaced or restarted the pod (a drained node, a crash), the engine has ended, and the
//! new one enters rotation like any other, without a second replacement.
//!
//! If another field manager owns the arguments, the gateway yields: it refuses a planned change
//! before any stop, and lets an engine with other arguments serve, which a [`Driver::remark`]
//! shows. While the API server is away, the state is unknown and nothing is changed.
//!
//! Bounds: one reading of a pod per [`LOOK`]; a replacement takes the pod's grace period and
//! [`REPLACED`] at most.

mod set;

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use self::set::{Set, args_of};
use crate::discovery::client::CallError;
use crate::discovery::{Gate, failure, read};
use crate::driver::{
    Driver, DriverKind, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, Notice, PortOwner, StopRules,
    Stopped,
};
use crate::launch::check_values;
use sluice_config::PodEngine;
use sluice_core::engines::EngineKind;
use sluice_core::vllm::failure::{Exit, FailureClass};

/// Pause between two looks at a pod whose end is awaited.
const LOOK: Duration = Duration::from_secs(2);
/// Pause between two looks at a pod that is being replaced.
const REPLACE_LOOK: Duration = Duration::from_millis(500);
/// Time for a replacement, after the grace period.
const REPLACED: Duration = Duration::from_secs(60);
/// The grace period of a pod that gives none, seconds.
const GRACE: i64 = 30;

/// Controls one engine in a pod.
#[derive(Debug)]
pub struct PodDriver {
    name: String,
    kind: EngineKind,
    engine: PodEngine,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The uid of the pod, and the restarts of the container when the engine was started or
    /// adopted.
    current: Option<(String, i32)>,
    /// The pod of the stopped engine. It still runs, and the next start replaces it.
    stopped: Option<String>,
    /// The arguments of the pod, as last seen.
    args: Option<Vec<String>>,
    /// Whether the container was ready, as last seen.
    ready: bool,
    /// Whether the pod had our readiness gate, or needs none.
    warm: bool,
    failure: Option<EngineFailure>,
    remark: Option<String>,
}

impl PodDriver {
    /// A driver for the backend `name`.
    pub fn new(name: &str, engine: PodEngine) -> Self {
        Self::of_kind(EngineKind::default(), name, engine)
    }

    /// [`new`](Self::new) for an engine of this kind.
    pub fn of_kind(kind: EngineKind, name: &str, engine: PodEngine) -> Self {
        Self { name: name.to_owned(), kind, engine, state: Mutex::default() }
    }

    fn failed(&self, error: CallError) -> EngineFailure {
        match error {
            CallError::Conflict(why) => EngineFailure::new(
                FailureClass::ManagedElsewhere,
                format!("StatefulSet {} of {}: {why}", self.engine.statefulset, self.name),
            ),
            CallError::TooEarly(why) => {
                let advice = "change that pod first; then this one can follow".to_owned();
                EngineFailure { advice, ..EngineFailure::new(FailureClass::ClusterRefused, why) }
            }
            CallError::Unwanted(why) => EngineFailure::new(FailureClass::ManagedElsewhere, why),
            CallError::NotFound(why) | CallError::Other(why) => EngineFailure::new(FailureClass::ClusterRefused, why),
        }
    }

    fn set(&self) -> Result<Set<'_>, EngineFailure> {
        Set::of(&self.engine).map_err(|error| self.failed(error))
    }

    /// Reads the pod, and records the state for methods that do not call the API server.
    async fn look(&self) -> Result<Option<Pod>, EngineFailure> {
        let pod = self.set()?.pod().await.map_err(|error| self.failed(error))?;
        let mut state = self.state.lock();
        match &pod {
            Some(pod) => {
                state.args = args_of(pod.spec.as_ref(), &self.engine.container);
                let seen = read::read(pod, &self.engine.container).map(|(_, seen)| seen).unwrap_or_default();
                (state.ready, state.warm) = (seen.ready && !seen.leaving, seen.gate != Gate::Missing);
                state.failure = failure::failure(pod, &self.engine.container).or(state.failure.take());
            }
            None => state.ready = false,
        }
        drop(state);
        Ok(pod)
    }

    fn restarts(&self, pod: &Pod) -> i32 {
        failure::engine(pod, &self.engine.container).map_or(0, |engine| engine.restart_count)
    }

    fn status_of(&self, pod: Option<&Pod>) -> EngineStatus {
        let state = self.state.lock();
        let (Some((uid, restarts)), Some(pod)) = (&state.current, pod) else {
            return if state.current.is_some() { EngineStatus::Ended(Exit::Unseen) } else { EngineStatus::Absent };
        };
        if pod.metadata.uid.as_deref() != Some(uid) || pod.metadata.deletion_timestamp.is_some() {
            return EngineStatus::Ended(Exit::Unseen);
        }
        let engine = failure::engine(pod, &self.engine.container);
        let ended = |engine: &&k8s_openapi::api::core::v1::ContainerStatus| {
            engine.restart_count > *restarts || engine.state.as_ref().is_some_and(|state| state.terminated.is_some())
        };
        match engine.filter(ended) {
            Some(engine) => EngineStatus::Ended(failure::last_exit(engine).unwrap_or(Exit::Unseen)),
            None => EngineStatus::Running,
        }
    }

    /// Waits for a pod other than `old`.
    async fn replaced(&self, old: Option<&str>) -> Result<Pod, EngineFailure> {
        let began = Instant::now();
        let mut grace = GRACE;
        loop {
            let found = self.look().await;
            if let Ok(Some(pod)) = found {
                let is_new = pod.metadata.uid.as_deref() != old && pod.metadata.deletion_timestamp.is_none();
                if is_new {
                    return Ok(pod);
                }
                grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(grace);
            }
            let limit = REPLACED + Duration::from_secs(u64::try_from(grace).unwrap_or(0));
            if began.elapsed() > limit {
                let cause =
                    format!("the cluster has not replaced the pod {} within {} s", self.engine.pod, limit.as_secs());
                return Err(EngineFailure::new(FailureClass::ClusterRefused, cause));
            }
            sleep(REPLACE_LOOK).await;
        }
    }

    /// Applies the flags. Returns whether they are in force. If another manager owns the arguments,
    /// or they cannot change yet, a planned start fails. Another start leaves them as they are.
    async fn apply(&self, wanted: &[String], is_planned: bool) -> Result<bool, EngineFailure> {
        let set = self.set()?;
        // The order of pods was checked before the stop. An unplanned start returns to the
        // arguments that the pod had.
        let applied = match set.plan(wanted, true).await {
            Ok(plan) => set.apply(&plan, false).await,
            Err(error) => Err(error),
        };
        let remark = match applied {
            Ok(()) => return Ok(true),
            Err(CallError::Conflict(why)) if !is_planned => format!("its arguments are managed elsewhere: {why}"),
            Err(CallError::TooEarly(why)) if !is_planned => format!("its arguments cannot change yet: {why}"),
            Err(error) => return Err(self.failed(error)),
        };
        tracing::warn!(backend = %self.name, "{remark}; they stay as they are");
        self.state.lock().remark = Some(remark);
        Ok(false)
    }
}

#[async_trait]
impl Driver for PodDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Kubernetes
    }

    async fn check(&self, settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure> {
        check_values(self.kind, settings)?;
        let (set, wanted) = (self.set()?, settings.words_of(self.kind));
        let own = self.look().await?.and_then(|pod| args_of(pod.spec.as_ref(), &self.engine.container));
        // After a stop, this may be the check of a rollback to the arguments before.
        let stays = own.as_ref() == Some(&wanted) || self.state.lock().current.is_none();
        let plan = set.plan(&wanted, stays).await.map_err(|error| self.failed(error))?;
        set.apply(&plan, true).await.map_err(|error| self.failed(error))?;
        Ok(Vec::new())
    }

    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure> {
        let wanted = settings.words_of(self.kind);
        let stopped = self.state.lock().stopped.clone();
        let before = self.look().await?;
        let uid = before.as_ref().and_then(|pod| pod.metadata.uid.clone());
        let is_leaving = before.as_ref().is_some_and(|pod| pod.metadata.deletion_timestamp.is_some());
        let own = before.as_ref().and_then(|pod| args_of(pod.spec.as_ref(), &self.engine.container));
        let runs_wanted = own.as_ref() == Some(&wanted);
        let is_planned = stopped.is_some() && stopped == uid;
        // A pod that does not run these flags is replaced as well, because a failed change goes
        // back.
        let replaces = is_planned || before.is_some() && !runs_wanted;
        let applied = self.apply(&wanted, is_planned).await?;
        let pod = match before {
            // The platform starts the next pod.
            Some(_) if is_leaving => self.replaced(uid.as_deref()).await?,
            Some(pod) if !(replaces && applied || is_planned) => pod,
            Some(_) => {
                self.state.lock().failure = None;
                let uid = uid.unwrap_or_default();
                self.set()?.delete(&uid).await.map_err(|error| self.failed(error))?;
                self.replaced(Some(&uid)).await?
            }
            None => self.replaced(None).await?,
        };
        let found = args_of(pod.spec.as_ref(), &self.engine.container);
        if applied && found.as_ref() != Some(&wanted) {
            let cause = format!("the pod {} came up with {}", self.engine.pod, found.unwrap_or_default().join(" "));
            return Err(EngineFailure::new(FailureClass::ManagedElsewhere, cause));
        }
        let (uid, restarts) = (pod.metadata.uid.clone().unwrap_or_default(), self.restarts(&pod));
        let mut state = self.state.lock();
        if applied {
            state.remark = None;
        }
        state.stopped = None;
        state.current = Some((uid.clone(), restarts));
        Ok(EngineIdentity::Pod { uid, restarts })
    }

    async fn find_running(&self, _except: Option<&EngineIdentity>) -> Option<EngineIdentity> {
        let pod = self.look().await.ok()??;
        let restarts = self.restarts(&pod);
        pod.metadata.deletion_timestamp.is_none().then_some(())?;
        Some(EngineIdentity::Pod { uid: pod.metadata.uid?, restarts })
    }

    fn running_settings(&self) -> Option<EngineSettings> {
        self.state.lock().args.as_deref().map(EngineSettings::of_words)
    }

    async fn adopt(&self, identity: &EngineIdentity) -> Result<bool, EngineFailure> {
        let EngineIdentity::Pod { uid, .. } = identity else {
            let cause = format!("{} is a pod, but the journal describes another kind of engine", self.name);
            return Err(EngineFailure::new(FailureClass::NotOurs, cause));
        };
        let pod = self.look().await?;
        let Some(pod) = pod.filter(|pod| pod.metadata.uid.as_ref() == Some(uid)) else { return Ok(false) };
        // The engine may have restarted in the pod; the next look shows whether it is ready.
        self.state.lock().current = Some((uid.clone(), self.restarts(&pod)));
        Ok(true)
    }

    async fn stop(&self, _rules: StopRules) -> Result<Stopped, EngineFailure> {
        let pod = self.look().await.ok().flatten();
        let runs = self.status_of(pod.as_ref()) == EngineStatus::Running;
        let mut state = self.state.lock();
        if runs {
            state.stopped = pod.and_then(|pod| pod.metadata.uid);
        }
        state.current = None;
        Ok(Stopped { exit: None, forced: false, orphans: 0, memory_back: None })
    }

    async fn status(&self) -> EngineStatus {
        match self.look().await {
            Ok(pod) => self.status_of(pod.as_ref()),
            Err(_) => EngineStatus::Unknown,
        }
    }

    async fn wait_for_exit(&self) -> Exit {
        loop {
            sleep(LOOK).await;
            match self.status().await {
                EngineStatus::Ended(exit) => return exit,
                EngineStatus::Absent => std::future::pending().await,
                EngineStatus::Running | EngineStatus::Unknown => {}
            }
        }
    }

    /// Until the container is ready, the port counts as free, because another pod may respond at
    /// the address.
    async fn port_owner(&self) -> PortOwner {
        if self.state.lock().ready { PortOwner::Unknown } else { PortOwner::Free }
    }

    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure {
        let seen = self.state.lock().failure.clone();
        let failure = seen.unwrap_or_else(|| {
            let cause = format!("the pod {} was deleted or its engine ended", self.engine.pod);
            EngineFailure::new(FailureClass::EngineDied, cause)
        });
        EngineFailure { exit: failure.exit.or(exit), ..failure }
    }

    fn is_warm(&self) -> bool {
        self.state.lock().warm
    }

    fn remark(&self) -> Option<String> {
        self.state.lock().remark.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_must_wait_for_another_one_is_not_said_to_be_managed_elsewhere() {
        let engine = PodEngine {
            pod: "short-1".to_owned(),
            namespace: None,
            statefulset: "short".to_owned(),
            container: "vllm".to_owned(),
            args: Default::default(),
        };
        let driver = PodDriver::new("p/short-1", engine);
        let early = driver.failed(CallError::TooEarly("short-2 has to get these flags first".to_owned())).to_string();
        assert!(early.starts_with("cluster_refused: short-2 has to get these flags first; change that pod"), "{early}");
        let owned = driver.failed(CallError::Conflict("conflict with \"owner\"".to_owned())).to_string();
        assert!(owned.starts_with("managed_elsewhere: StatefulSet short of p/short-1: conflict with"), "{owned}");
    }
}
