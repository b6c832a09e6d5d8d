//! The leader's record as a Lease in Kubernetes (`coordination.k8s.io/v1`), so that `kubectl get
//! lease` and other programs can read it.
//!
//! The record is the `spec`. Writes compare `resourceVersion`. Cargo feature `kubernetes`.

use super::store::{Found, Store, Written};
use sluice_fleet::discovery::{ObjectWritten, read_lease, write_lease};

#[derive(Clone, Debug)]
pub(super) struct LeaseObject {
    pub(super) namespace: Option<String>,
    pub(super) lease: String,
}

impl Store for LeaseObject {
    fn name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("Lease {namespace}/{}", self.lease),
            None => format!("Lease {}", self.lease),
        }
    }

    async fn read(&self) -> Result<Found, String> {
        let found = read_lease(self.namespace.as_deref(), &self.lease).await?;
        Ok(found.map_or_else(Found::default, |(spec, version)| Found { bytes: Some(spec), version }))
    }

    async fn write(&self, bytes: Vec<u8>, over: &Found) -> Written {
        let version = over.bytes.is_some().then_some(&*over.version);
        match write_lease(self.namespace.as_deref(), &self.lease, &bytes, version).await {
            ObjectWritten::Done => Written::Done,
            ObjectWritten::Refused => Written::Refused,
            ObjectWritten::Unknown(why) => Written::Unknown(why),
        }
    }
}
