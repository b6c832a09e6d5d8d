//! A ConfigMap that several gateways replace as a whole, each only over the state that it has read.
//!
//! The platform's `resourceVersion` is what a write is compared with. Reads ask for the latest state (no `resourceVersion`), so the
//! API server asks its store. Bounds: the callers', for time; a ConfigMap holds 1 MiB.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};

use super::client::{MANAGER, api};

/// The key of the ConfigMap under which the text is.
const KEY: &str = "ledger";

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectWritten {
    /// It is the state now.
    Done,
    /// The object has changed since it was read.
    Refused,
    /// It may have been written or not.
    Unknown(String),
}

/// The text of an object with its version; `None`: there is no such object.
///
/// # Errors
/// In words.
pub async fn read_object(namespace: Option<&str>, name: &str) -> Result<Option<(String, String)>, String> {
    let objects: Api<ConfigMap> = api(namespace).await?;
    let found = objects.get_opt(name).await.map_err(|error| words("get", name, &error))?;
    let Some(object) = found else { return Ok(None) };
    let version = object.metadata.resource_version.unwrap_or_default();
    let text = object.data.and_then(|mut data| data.remove(KEY)).unwrap_or_default();
    Ok(Some((text, version)))
}

/// Replaces the object that was read with this version; without one, makes it.
pub async fn write_object(namespace: Option<&str>, name: &str, text: String, over: Option<&str>) -> ObjectWritten {
    let objects: Api<ConfigMap> = match api(namespace).await {
        Ok(objects) => objects,
        Err(why) => return ObjectWritten::Unknown(why),
    };
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        resource_version: over.map(str::to_owned),
        labels: Some(BTreeMap::from([("app.kubernetes.io/managed-by".to_owned(), MANAGER.to_owned())])),
        ..ObjectMeta::default()
    };
    let object = ConfigMap { metadata, data: Some(BTreeMap::from([(KEY.to_owned(), text)])), ..ConfigMap::default() };
    let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
    let (verb, written) = match over {
        Some(_) => ("update", objects.replace(name, &params, &object).await),
        None => ("create", objects.create(&params, &object).await),
    };
    match written {
        Ok(_) => ObjectWritten::Done,
        // 409: changed, or made meanwhile. 404: removed, so that a replacement finds nothing.
        Err(kube::Error::Api(status)) if status.code == 409 || (status.code == 404 && over.is_some()) => {
            ObjectWritten::Refused
        }
        Err(error) => ObjectWritten::Unknown(words(verb, name, &error)),
    }
}

fn words(verb: &str, name: &str, error: &kube::Error) -> String {
    let said = super::client::CallError::of(&format!("{verb} configmaps"), error);
    format!("ConfigMap {name}: {said}")
}
