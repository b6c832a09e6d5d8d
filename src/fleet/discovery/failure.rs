//! Finds in a pod's status why the pod does not come up or why the engine in it ended. The failures
//! have the classes of all engines.
//!
//! The last lines of an ended container (`terminationMessagePolicy: FallbackToLogsOnError`, as in
//! the chart) are diagnosed like a process's log. Messages of the platform are cut to
//! [`MESSAGE_BYTES`].

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus, Pod};

use crate::driver::EngineFailure;
use sluice_core::vllm::failure::{Diagnosis, Exit, FailureClass, diagnose};
use sluice_core::vllm::logs::StartPhase;

/// Bytes kept of a message.
const MESSAGE_BYTES: usize = 300;
/// Exit status of a container that got SIGKILL.
const KILLED: i32 = 128 + 9;

/// Why the pod does not serve; `None` if it runs, or starts normally.
pub(crate) fn failure(pod: &Pod, container: &str) -> Option<EngineFailure> {
    let status = pod.status.as_ref()?;
    let condition = |kind: &str| status.conditions.iter().flatten().find(|condition| condition.type_ == kind);
    if let Some(scheduled) = condition("PodScheduled").filter(|scheduled| scheduled.status == "False") {
        let why = short(scheduled.message.as_deref().or(scheduled.reason.as_deref()));
        return Some(EngineFailure::new(FailureClass::Unschedulable, why));
    }
    // The pod was evicted or preempted, or is out of ephemeral storage.
    if status.phase.as_deref() == Some("Failed")
        && let Some(reason) = &status.reason
    {
        let cause = format!("{reason}: {}", short(status.message.as_deref()));
        return Some(EngineFailure::new(FailureClass::Killed, cause));
    }
    let init = status.init_container_statuses.iter().flatten().find_map(of_container);
    init.or_else(|| engine(pod, container).and_then(of_container))
}

/// The status of the engine's container, or of the only container.
pub(crate) fn engine<'p>(pod: &'p Pod, container: &str) -> Option<&'p ContainerStatus> {
    let all = pod.status.as_ref()?.container_statuses.as_deref()?;
    all.iter().find(|status| status.name == container).or(if let [only] = all { Some(only) } else { None })
}

/// How the engine's container last ended, if it did.
pub(crate) fn last_exit(status: &ContainerStatus) -> Option<Exit> {
    let ended = terminated(status.state.as_ref()).or_else(|| terminated(status.last_state.as_ref()))?;
    Some(exit(ended))
}

fn terminated(state: Option<&ContainerState>) -> Option<&ContainerStateTerminated> {
    state?.terminated.as_ref()
}

fn of_container(status: &ContainerStatus) -> Option<EngineFailure> {
    let state = status.state.as_ref();
    if let Some(waiting) = state.and_then(|state| state.waiting.as_ref()) {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        let message = || format!("{reason}: {}", short(waiting.message.as_deref()));
        return match reason {
            "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" | "RegistryUnavailable" => {
                let cause = format!("{} {}", status.image, message());
                Some(EngineFailure::new(FailureClass::ImagePull, cause))
            }
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
                Some(EngineFailure::new(FailureClass::ContainerConfig, message()))
            }
            "CrashLoopBackOff" => Some(terminated(status.last_state.as_ref()).map_or_else(
                || EngineFailure::new(FailureClass::EngineFailed, message()),
                |ended| of_end(status, ended),
            )),
            _ => None,
        };
    }
    // A container that is ready again has not failed.
    let last = terminated(status.last_state.as_ref()).filter(|_| status.restart_count > 0 && !status.ready);
    terminated(state).filter(|ended| ended.exit_code != 0).or(last).map(|ended| of_end(status, ended))
}

fn of_end(status: &ContainerStatus, ended: &ContainerStateTerminated) -> EngineFailure {
    let exit = exit(ended);
    let again = match status.restart_count {
        0 => String::new(),
        times => format!(", restarted {times} times"),
    };
    let reason = ended.reason.as_deref().unwrap_or("Error");
    if reason == "OOMKilled" {
        let cause = format!("container {}: OOMKilled ({exit}{again})", status.name);
        let diagnosis = Diagnosis::plain(FailureClass::ContainerMemory, Some(cause));
        return EngineFailure::of(diagnosis, Some(exit), StartPhase::Launching);
    }
    let lines: Vec<&str> = ended.message.as_deref().unwrap_or_default().lines().collect();
    // The phase that the start had reached is unknown.
    let mut diagnosis = diagnose(&lines, Some(exit), StartPhase::Launching);
    let said = diagnosis.cause.take().map(|cause| format!(": {cause}")).unwrap_or_default();
    diagnosis.cause = Some(format!("container {} ended with {exit}{again}{said}", status.name));
    EngineFailure::of(diagnosis, Some(exit), StartPhase::Launching)
}

fn exit(ended: &ContainerStateTerminated) -> Exit {
    match (ended.signal, ended.exit_code) {
        (Some(signal), _) if signal > 0 => Exit::Signal(signal),
        (_, KILLED) => Exit::Signal(9),
        (_, code) => Exit::Code(code),
    }
}

fn short(message: Option<&str>) -> String {
    let message = message.unwrap_or("the cluster gives no reason");
    let end = message.char_indices().map(|(at, _)| at).find(|at| *at >= MESSAGE_BYTES);
    message[..end.unwrap_or(message.len())].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pod whose container `engine` has this status.
    fn pod(status: serde_json::Value) -> Pod {
        let mut container = serde_json::json!({
            "name": "engine", "image": "registry/vllm:x", "imageID": "", "ready": false, "restartCount": 0
        });
        container.as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
        serde_json::from_value(serde_json::json!({
            "metadata": { "name": "p" }, "status": { "phase": "Running", "containerStatuses": [container] }
        }))
        .unwrap()
    }

    fn found(status: serde_json::Value) -> Option<(FailureClass, String)> {
        failure(&pod(status), "engine").map(|failure| (failure.class, failure.to_string()))
    }

    #[test]
    fn states_of_containers_have_classes_and_say_what_to_do() {
        use serde_json::json;
        let waiting = |reason: &str| json!({ "state": { "waiting": { "reason": reason, "message": "no such tag" } } });
        let (class, text) = found(waiting("ImagePullBackOff")).unwrap();
        assert_eq!(class, FailureClass::ImagePull);
        assert!(text.contains("registry/vllm:x ImagePullBackOff: no such tag; ") && text.contains("image"), "{text}");
        assert_eq!(found(waiting("CreateContainerConfigError")).unwrap().0, FailureClass::ContainerConfig);
        assert_eq!(found(waiting("ContainerCreating")), None);
        let oom = json!({ "restartCount": 3, "state": { "waiting": { "reason": "CrashLoopBackOff" } },
            "lastState": { "terminated": { "reason": "OOMKilled", "exitCode": 137 } } });
        let (class, text) = found(oom).unwrap();
        assert_eq!(class, FailureClass::ContainerMemory);
        assert!(text.contains("OOMKilled (signal 9, restarted 3 times)") && text.contains("limits.memory"), "{text}");
        let log = "ValueError: To serve at least one request with the model's max seq len (4096), 8 GiB is needed";
        let crash = json!({ "restartCount": 1, "state": { "terminated": { "exitCode": 1, "message": log } } });
        let (class, text) = found(crash).unwrap();
        assert_eq!(class, FailureClass::KvTooSmall);
        assert!(text.contains("exit status 1") && text.contains("To serve at least one"), "{text}");
        let ready = json!({ "ready": true, "restartCount": 1, "state": { "running": {} },
            "lastState": { "terminated": { "exitCode": 1 } } });
        assert_eq!(found(ready), None);
    }

    #[test]
    fn a_pod_without_a_node_is_unschedulable() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "p" },
            "status": { "phase": "Pending", "conditions": [{ "type": "PodScheduled", "status": "False",
                "reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu." }] }
        }))
        .unwrap();
        let failure = failure(&pod, "engine").unwrap();
        assert_eq!(failure.class, FailureClass::Unschedulable);
        assert!(failure.to_string().contains("Insufficient nvidia.com/gpu"), "{failure}");
    }
}
