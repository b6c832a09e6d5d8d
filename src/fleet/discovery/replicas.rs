//! The replicas of a StatefulSet, as the gateway sets them for autoscaling.
//!
//! The gateway owns the one field by server-side apply, as a field manager of its own: what it applies as another one (the arguments
//! of engines) stays. It never takes the field from another manager (no `force`), such as an HPA or a manifest that says how many.

use k8s_openapi::api::apps::v1::StatefulSet;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::client::{CallError, api, call};

/// The name under which the gateway owns the replicas.
const MANAGER: &str = "sluice-autoscale";

/// The replicas that a StatefulSet is to have now.
///
/// # Errors
/// In words.
pub async fn read_replicas(namespace: Option<&str>, name: &str) -> Result<u32, String> {
    let sets: Api<StatefulSet> = api(namespace).await?;
    let found = call("get statefulsets", sets.get(name)).await;
    let set = found.map_err(|error| format!("StatefulSet {name}: {error}"))?;
    Ok(u32::try_from(set.spec.and_then(|spec| spec.replicas).unwrap_or(1)).unwrap_or(0))
}

/// Sets them; with `dry_run` only asks whether they could be set.
///
/// # Errors
/// In words: another manager owns the field, or anything else.
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
