//! The client of the cluster: one for all pools, made when it is first needed, and words for its errors.
//!
//! It finds the API server as kubectl does: KUBECONFIG, else the service account of its own pod. Bounds: [`CONNECT`] for a
//! connection, [`CALL`] for one call that is not a watch.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Config};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::timeout;

use super::{GATE, Job, PodQuery};

/// For a connection to the API server.
const CONNECT: Duration = Duration::from_secs(5);
/// For one call.
pub(crate) const CALL: Duration = Duration::from_secs(10);
/// The name under which the gateway owns fields of objects.
pub(crate) const MANAGER: &str = "sluice";

static CLIENT: Mutex<Option<Client>> = Mutex::new(None);

/// The client.
///
/// # Errors
/// No cluster is configured, or its configuration cannot be used.
pub(crate) async fn client() -> Result<Client, String> {
    if let Some(client) = CLIENT.lock().clone() {
        return Ok(client);
    }
    let no_cluster =
        |why: String| format!("no cluster: set KUBECONFIG, or run the gateway in a pod with a service account ({why})");
    let mut config = Config::infer().await.map_err(|error| no_cluster(error.to_string()))?;
    config.connect_timeout = Some(CONNECT);
    let client = Client::try_from(config).map_err(|error| no_cluster(error.to_string()))?;
    *CLIENT.lock() = Some(client.clone());
    Ok(client)
}

/// An API of a namespace; without one that of the gateway.
pub(crate) async fn api<K>(namespace: Option<&str>) -> Result<Api<K>, String>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
    K::DynamicType: Default,
{
    let client = client().await?;
    Ok(match namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::default_namespaced(client),
    })
}

/// Makes one call, within [`CALL`]. `what` is the permission that it needs, such as `patch pods/status`.
///
/// # Errors
/// In words.
pub(crate) async fn call<T>(what: &str, call: impl Future<Output = kube::Result<T>>) -> Result<T, CallError> {
    match timeout(CALL, call).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(CallError::of(what, &error)),
        Err(_) => Err(CallError::Other(format!("the API server has not answered within {} s", CALL.as_secs()))),
    }
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// There is no such object.
    #[error("{0}")]
    NotFound(String),
    /// Another field manager owns a field, or the object has changed.
    #[error("{0}")]
    Conflict(String),
    /// The platform does not want there to be such a pod.
    #[error("{0}")]
    Unwanted(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl CallError {
    pub(crate) fn of(what: &str, error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Other(format!("the API server cannot be reached: {}", root_cause(error)));
        };
        let message = status.message.clone();
        match status.code {
            403 => Self::Other(format!(
                "no permission to {what}: bind the gateway's service account to the role in config/kubernetes ({message})"
            )),
            401 => Self::Other(format!("the API server does not accept the gateway's credentials ({message})")),
            404 => Self::NotFound(message),
            409 => Self::Conflict(message),
            _ => Self::Other(message),
        }
    }
}

/// The innermost error, which names what happened.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Gives our readiness gate to a pod, unless another one has its name by now.
///
/// # Errors
/// In words.
pub async fn give_gate(query: &PodQuery, job: &Job) -> Result<(), String> {
    let api: Api<Pod> = api(query.namespace.as_deref()).await?;
    let now = format!("{:.0}", jiff::Timestamp::now());
    let condition = json!({ "type": GATE, "status": "True", "reason": "WarmedUp", "lastTransitionTime": now });
    // With the uid it is refused for another pod of this name.
    let patch = json!({ "metadata": { "uid": job.uid }, "status": { "conditions": [condition] } });
    let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
    match call("patch pods/status", api.patch_status(&job.name, &params, &patch)).await {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("its readiness gate {GATE} is not given: {error}")),
    }
}
