//! Reads the status of a pod.
//!
//! A pod is ready if the containers are, and all gates but ours are set. The `Ready` condition also
//! waits for our gate, and turns false when the cluster loses a node whose engines still serve.

use k8s_openapi::api::core::v1::Pod;

use super::failure::{engine, failure};
use super::{GATE, Gate, SeenPod};

/// The name and state of a pod with this engine `container`.
pub(crate) fn read(pod: &Pod, container: &str) -> Option<(String, SeenPod)> {
    let name = pod.metadata.name.clone()?;
    let status = pod.status.clone().unwrap_or_default();
    let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let gates: Vec<&str> = gates.map(|gate| gate.condition_type.as_str()).collect();
    let is_true = |wanted: &str| {
        status.conditions.iter().flatten().any(|condition| condition.type_ == wanted && condition.status == "True")
    };
    let gate = match (gates.contains(&GATE), is_true(GATE)) {
        (false, _) => Gate::Absent,
        (true, false) => Gate::Missing,
        (true, true) => Gate::Given,
    };
    let others = gates.iter().filter(|gate| **gate != GATE).all(|gate| is_true(gate));
    let seen = SeenPod {
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        ip: status.pod_ip.clone().filter(|ip| !ip.is_empty()),
        restarts: engine(pod, container).map_or(0, |engine| engine.restart_count),
        ready: is_true("ContainersReady") && others,
        gate,
        leaving: pod.metadata.deletion_timestamp.is_some(),
        failure: failure(pod, container),
    };
    Some((name, seen))
}
