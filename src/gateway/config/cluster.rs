//! `[cluster]`: several gateways before the same engines, which keep one limit by a ledger in a
//! shared store.
//!
//! The rules of the ledger are in a separate crate (`src/cluster`), which `serve` runs. This table
//! says where the ledger is, how long a share is valid, and what happens when the store cannot be
//! reached.

use std::time::Duration;

use super::limits;
use super::problem::Situation;
use super::report::Report;
use super::table::table;
use super::tls::UpstreamTls;
use super::value::{Endpoint, check_name, not_empty, words};
use crate::tls::ClientTls;

/// Whether this gateway can talk to Kubernetes.
const HAS_KUBERNETES: bool = cfg!(feature = "kubernetes");

table! {
    /// Several gateways before the same engines: they divide the limits of each backend by a
    /// ledger, so that all of them together stay within it.
    pub struct Cluster {
        /// The name of this gateway in the ledger, in status and in the log. Each gateway has its
        /// own.
        pub name: Option<String> = optional("the name of the host").check(check_name).example("gateway-1");
        /// The ledger is a key in etcd: the addresses of its members, which are tried in turn.
        /// Version 3.4 or later, by its JSON gateway.
        pub etcd: Vec<Endpoint> = default("[]").at_most(limits::MAX_STORE_ENDPOINTS).example("[\"http://10.0.0.1:2379\"]");
        /// TLS to etcd, where its addresses have https.
        pub tls: Option<UpstreamTls> = optional("the CAs that this machine trusts, and no own certificate");
        /// The ledger is a ConfigMap in Kubernetes, instead of etcd.
        pub kubernetes: Option<ClusterObject> = optional("the ledger is in etcd");
        /// The key in etcd, or the name of the ConfigMap. All gateways before the same engines have
        /// the same.
        pub key: String = default("sluice-ledger").check(not_empty);
        /// How long a renewal of this gateway's shares is good for. It renews them more often than
        /// every quarter of this. A gateway that is gone keeps its shares from the others for about
        /// one and a quarter of it.
        pub lease: Duration = duration("10s").within("2s", "5m");
        /// When the shares cannot be renewed within the lease: "keep" goes on with the last ones,
        /// so the limit may be exceeded by what others have taken back meanwhile; "strict" admits
        /// nothing new. All gateways have the same.
        pub mode: ClusterMode = default("keep");
        /// Whether one of the gateways leads: "none": each one decides for itself, and only one may
        /// run engines. "decides": one is elected, which alone changes engines (launch, control,
        /// statefulset), experiments and what the tuner tunes, while all serve; another one takes
        /// over when it is gone. "serves": the same, and only that one is ready; the others stand
        /// by. All gateways have the same, and best the same fleet.state, on a volume that they
        /// share.
        pub leader: ClusterLeader = default("none");
    }
}

table! {
    /// The ledger as an object in Kubernetes.
    pub struct ClusterObject {
        /// The namespace of the ConfigMap.
        pub namespace: Option<String> = optional("that of the gateway: of its service account, or of the context in KUBECONFIG")
            .check(not_empty).example("inference");
    }
}

words! {
    /// The reaction when shares cannot be renewed.
    pub enum ClusterMode {
        /// The last shares are used further.
        Keep = "keep",
        /// Nothing new is admitted.
        Strict = "strict",
    }
}

words! {
    /// The tasks of the gateway that leads.
    pub enum ClusterLeader {
        /// No gateway leads.
        None = "none",
        /// Only the leader changes engines, experiments and limits.
        Decides = "decides",
        /// In addition, only the leader is ready.
        Serves = "serves",
    }
}

impl Cluster {
    /// The key, or object name, under which the store has the leader.
    pub fn leader_key(&self) -> String {
        format!("{}-leader", self.key)
    }

    /// The members of etcd, with the settings for TLS.
    pub fn endpoints(&self) -> impl Iterator<Item = (&Endpoint, Option<ClientTls>)> {
        self.etcd.iter().map(|endpoint| (endpoint, self.connection(endpoint).ok().flatten()))
    }

    fn connection(&self, endpoint: &Endpoint) -> Result<Option<ClientTls>, Situation> {
        if !endpoint.https {
            return Ok(None);
        }
        let settings = match &self.tls {
            Some(tls) => Ok(tls.to(&endpoint.host)),
            None => UpstreamTls::system(&endpoint.host),
        };
        match settings {
            Ok(Some(connection)) => Ok(Some(connection)),
            Ok(None) => Err(Situation::TlsName { found: endpoint.host.clone() }),
            Err(error) => Err(Situation::Tls { reason: error.to_string() }),
        }
    }

    pub(super) fn check(&self, report: &mut Report<'_>) {
        if !report.is_sound("cluster.etcd") || !report.is_sound("cluster.kubernetes") {
            return;
        }
        match (self.etcd.is_empty(), &self.kubernetes) {
            (true, None) => report.add_at("cluster", Situation::NoStore),
            (false, Some(_)) => report.add_at("cluster.etcd", Situation::TwoStores),
            (true, Some(_)) if !HAS_KUBERNETES => report.add_at("cluster.kubernetes", Situation::WithoutKubernetes),
            (true, Some(_)) if !is_object_name(&self.key) => {
                report.add_at("cluster.key", Situation::ObjectName { found: self.key.clone() });
            }
            _ => {}
        }
        for (index, endpoint) in self.etcd.iter().enumerate() {
            if let Err(situation) = self.connection(endpoint) {
                report.add_at(&format!("cluster.etcd[{index}]"), situation);
            }
        }
        if self.tls.is_some() && !self.etcd.iter().any(|endpoint| endpoint.https) {
            report.add_at("cluster.tls", Situation::TlsWithoutHttps);
        }
    }
}

/// Whether Kubernetes accepts a text as the name of an object.
fn is_object_name(name: &str) -> bool {
    let ends =
        |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit());
    let inner = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-.".contains(letter);
    name.len() <= 253 && name.chars().all(inner) && ends(name.chars().next()) && ends(name.chars().last())
}
