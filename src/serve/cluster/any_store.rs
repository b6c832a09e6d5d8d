//! The store that a configuration names: one type for all, so that nothing is boxed.
//!
//! The task that renews is generic over the store, so that tests can replace it.

use std::time::Duration;

use super::etcd::Etcd;
#[cfg(feature = "kubernetes")]
use super::lease::LeaseObject;
#[cfg(feature = "kubernetes")]
use super::object::Object;
use super::store::{Found, Store, Written};
use sluice_config::Cluster;

#[derive(Debug)]
pub(super) enum AnyStore {
    Etcd(Etcd),
    #[cfg(feature = "kubernetes")]
    Object(Object),
    #[cfg(feature = "kubernetes")]
    Lease(LeaseObject),
}

impl Store for AnyStore {
    fn name(&self) -> String {
        match self {
            Self::Etcd(etcd) => etcd.name(),
            #[cfg(feature = "kubernetes")]
            Self::Object(object) => object.name(),
            #[cfg(feature = "kubernetes")]
            Self::Lease(lease) => lease.name(),
        }
    }

    async fn read(&self) -> Result<Found, String> {
        match self {
            Self::Etcd(etcd) => etcd.read().await,
            #[cfg(feature = "kubernetes")]
            Self::Object(object) => object.read().await,
            #[cfg(feature = "kubernetes")]
            Self::Lease(lease) => lease.read().await,
        }
    }

    async fn write(&self, bytes: Vec<u8>, over: &Found) -> Written {
        match self {
            Self::Etcd(etcd) => etcd.write(bytes, over).await,
            #[cfg(feature = "kubernetes")]
            Self::Object(object) => object.write(bytes, over).await,
            #[cfg(feature = "kubernetes")]
            Self::Lease(lease) => lease.write(bytes, over).await,
        }
    }
}

impl AnyStore {
    pub(super) fn of(config: &Cluster, limit: Duration) -> Self {
        #[cfg(feature = "kubernetes")]
        if let Some(kubernetes) = &config.kubernetes {
            let (namespace, object) = (kubernetes.namespace.clone(), config.key.clone());
            return Self::Object(Object { namespace, object });
        }
        Self::Etcd(Etcd::new(config, &config.key, limit))
    }

    pub(super) fn of_leader(config: &Cluster, limit: Duration) -> Self {
        #[cfg(feature = "kubernetes")]
        if let Some(kubernetes) = &config.kubernetes {
            return Self::Lease(LeaseObject { namespace: kubernetes.namespace.clone(), lease: config.leader_key() });
        }
        Self::Etcd(Etcd::new(config, &config.leader_key(), limit))
    }
}
