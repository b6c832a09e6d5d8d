//! The replicas of a StatefulSet, which the gateway sets for autoscaling.
//!
//! The gateway owns this field by server-side apply. For this field the gateway uses a separate
//! field manager, so that the arguments of engines, which the gateway also owns, stay. It never
//! takes the field from another manager (no `force`), such as an HPA or a manifest.

use k8s_openapi::api::apps::v1::StatefulSet;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::client::{CallError, api, call};

/// The field manager that owns the replicas.
const MANAGER: &str = "sluice-autoscale";

/// The replicas in the spec of a StatefulSet.
///
/// # Errors
/// The failure, for the operator.
pub async fn read_replicas(namespace: Option<&str>, name: &str) -> Result<u32, String> {
    let sets: Api<StatefulSet> = api(namespace).await?;
    let found = call("get statefulsets", sets.get(name)).await;
    let set = found.map_err(|error| format!("StatefulSet {name}: {error}"))?;
    Ok(u32::try_from(set.spec.and_then(|spec| spec.replicas).unwrap_or(1)).unwrap_or(0))
}

/// Sets the replicas; with `dry_run` only checks whether they could be set.
///
/// # Errors
/// Another manager owns the field, or another failure, for the operator.
pub async fn apply_replicas(namespace: Option<&str>, name: &str, replicas: u32, dry_run: bool) -> Result<(), String> {
    let sets: Api<StatefulSet> = api(namespace).await?;
    let patch = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": name }, "spec": { "replicas": replicas }
    });
    let params = PatchParams { dry_run, ..PatchParams::apply(MANAGER) };
    match call("patch statefulsets", sets.patch(name, &params, &Patch::Apply(patch))).await {
        Ok(_) => Ok(()),
        Err(CallError::Conflict(why)) => Err(format!(
            "the replicas of StatefulSet {name} are managed elsewhere; remove them there (an HPA, replicas in a manifest), or \
             autoscale.apply here ({why})"
        )),
        Err(error) => Err(format!("StatefulSet {name}: {error}")),
    }
}
