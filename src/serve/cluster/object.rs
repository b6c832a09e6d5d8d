//! The ledger as a ConfigMap in Kubernetes.
//!
//! A ConfigMap is used because it has no controller, exists in every cluster, holds a MiB, and can
//! be granted to one service account by name. Writes compare `resourceVersion`. Cargo feature
//! `kubernetes`.

use super::store::{Found, Store, Written};
use sluice_fleet::discovery::{ObjectWritten, read_object, write_object};

#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) namespace: Option<String>,
    pub(super) object: String,
}

impl Store for Object {
    fn name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("ConfigMap {namespace}/{}", self.object),
            None => format!("ConfigMap {}", self.object),
        }
    }

    async fn read(&self) -> Result<Found, String> {
        let found = read_object(self.namespace.as_deref(), &self.object).await?;
        Ok(found.map_or_else(Found::default, |(text, version)| Found { bytes: Some(text.into_bytes()), version }))
    }

    async fn write(&self, bytes: Vec<u8>, over: &Found) -> Written {
        let text = String::from_utf8(bytes).expect("a ledger is JSON");
        let version = over.bytes.is_some().then_some(&*over.version);
        match write_object(self.namespace.as_deref(), &self.object, text, version).await {
            ObjectWritten::Done => Written::Done,
            ObjectWritten::Refused => Written::Refused,
            ObjectWritten::Unknown(why) => Written::Unknown(why),
        }
    }
}
