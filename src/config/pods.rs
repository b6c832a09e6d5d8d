//! `pool.kubernetes`: backends that are pods of a Kubernetes cluster, found while the gateway runs.
//!
//! The file has a selector. `put_pods` puts the pods that exist now into a configuration, so the
//! pool's limits and rules apply to pods as to listed backends. Each pod is an external backend.
//! With `statefulset`, the gateway may restart the pod's engine with other arguments.

use std::collections::BTreeMap;

use super::backend::{ArgValue, Backend, PodEngine, Target};
use super::secret::Secret;
use super::table::table;
use super::value::{Endpoint, not_empty};
use sluice_core::engines::EngineKind;

table! {
    /// Backends that are pods of a Kubernetes cluster.
    pub struct Pods {
        /// Labels of the pods, written as for `kubectl -l`.
        pub selector: String = required("write the labels of the pods, such as \"app=short\"").check(not_empty)
            .example("app=short");
        /// Port on which the engines serve.
        pub port: u16 = default("8000").within("1", "65535");
        /// The namespace of the pods.
        pub namespace: Option<String> = optional("that of the gateway: of its service account, or of the context in KUBECONFIG")
            .check(not_empty).example("inference");
        /// Share of new work of each pod, relative to the other pods.
        pub weight: f64 = default("1.0").within("0.001", "1000");
        /// Bearer token that the gateway sends to the engines, if they were started with --api-key:
        /// "env:NAME" or "file:PATH".
        pub api_key: Option<Secret> = optional("none").example("env:GPU0_API_KEY");
        /// The StatefulSet of the pods, if the gateway may restart their engines with other
        /// arguments. It restarts one pod at a time, from the highest number down. The gateway then
        /// owns `args` of the container and the partition of the StatefulSet.
        pub statefulset: Option<String> = optional("the gateway restarts no pods").check(not_empty).example("short")
            .restarts_engine();
        /// Name of the container that runs the engine.
        pub container: String = default("engine").check(not_empty).restarts_engine();
        /// Flags of vLLM, without leading dashes, that the gateway sets as the arguments of the
        /// container; see `launch.args`. All other flags belong into the command of the container.
        pub args: BTreeMap<String, ArgValue> = table().example("max-num-seqs = 256").restarts_engine();
    }
}

/// A pod that is a backend now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPod {
    /// The pod's name, which is also the backend's.
    pub name: String,
    /// The pod's address.
    pub ip: String,
    /// Whether the pod gets no new requests, because it is being deleted or is not ready.
    pub cordoned: bool,
}

impl Pods {
    /// The backend for a pod with this kind of engine.
    pub fn backend(&self, pod: &FoundPod, engine: EngineKind) -> Backend {
        let endpoint = Endpoint { https: false, host: pod.ip.clone(), port: self.port, prefix: String::new() };
        let target = match &self.statefulset {
            None => Target::Url(endpoint),
            Some(statefulset) => Target::Pod(
                endpoint,
                PodEngine {
                    pod: pod.name.clone(),
                    namespace: self.namespace.clone(),
                    statefulset: statefulset.clone(),
                    container: self.container.clone(),
                    args: self.args.clone(),
                },
            ),
        };
        let (name, weight, api_key) = (pod.name.clone(), self.weight, self.api_key.clone());
        Backend {
            name,
            target,
            weight,
            api_key,
            tls: None,
            connection: None,
            cordoned: pod.cordoned,
            engine,
            metrics_port: None,
            rank: None,
            events_port: None,
            events: None,
        }
    }
}
