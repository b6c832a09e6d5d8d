//! The Kubernetes client of all pools, made when first needed, and errors in words.
//!
//! It finds the API server as kubectl does: KUBECONFIG, else the service account of the gateway's
//! pod. Bounds: [`CONNECT`] per connection, [`CALL`] per [`call`].

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Config};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::timeout;

use super::{GATE, Job, PodQuery};

const CONNECT: Duration = Duration::from_secs(5);
pub(crate) const CALL: Duration = Duration::from_secs(10);
/// The field manager that owns the gateway's fields of objects.
pub(crate) const MANAGER: &str = "sluice";

static CLIENT: Mutex<Option<Client>> = Mutex::new(None);

/// The client, made at the first call.
///
/// # Errors
/// There is no cluster, or no usable configuration.
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

/// The API of a namespace; by default the gateway's.
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

/// Makes one call within [`CALL`]. `what`: the permission that it needs, such as `patch
/// pods/status`.
///
/// # Errors
/// The failure, for the operator.
pub(crate) async fn call<T>(what: &str, call: impl Future<Output = kube::Result<T>>) -> Result<T, CallError> {
    match timeout(CALL, call).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(CallError::of(what, &error)),
        Err(_) => Err(CallError::Other(format!("the API server has not answered within {} s", CALL.as_secs()))),
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// The object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Another field manager owns a field, or the object has changed.
    #[error("{0}")]
    Conflict(String),
    /// Other pods of the StatefulSet must change first.
    #[error("{0}")]
    TooEarly(String),
    /// The StatefulSet was scaled below this pod.
    #[error("{0}")]
    Unwanted(String),
    /// Any other failure.
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

/// The text of the innermost error, which names the cause.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Sets our readiness gate on a pod, unless another pod has the name by now.
///
/// # Errors
/// The failure, for the operator.
pub async fn give_gate(query: &PodQuery, job: &Job) -> Result<(), String> {
    let api: Api<Pod> = api(query.namespace.as_deref()).await?;
    let now = format!("{:.0}", jiff::Timestamp::now());
    let condition = json!({ "type": GATE, "status": "True", "reason": "WarmedUp", "lastTransitionTime": now });
    // The uid makes the API server refuse another pod of this name.
    let patch = json!({ "metadata": { "uid": job.uid }, "status": { "conditions": [condition] } });
    let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
    match call("patch pods/status", api.patch_status(&job.name, &params, &patch)).await {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("its readiness gate {GATE} is not given: {error}")),
    }
}
