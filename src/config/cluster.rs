//! `[cluster]`: several gateways before the same engines, which keep one limit by a ledger in a
//! shared store.
//!
//! The rules of the ledger are in a separate crate (`src/cluster`), which `serve` runs. This table
//! says where the ledger is, how long a share is valid, and how the gateway reacts when the store
//! cannot be reached.

use std::time::Duration;

use super::certificates::UpstreamTls;
use super::limits;
use super::problem::Situation;
use super::report::Report;
use super::table::table;
use super::value::{Endpoint, check_name, not_empty, words};
use crate::tls::ClientTls;

/// Whether this gateway can talk to Kubernetes.
const HAS_KUBERNETES: bool = cfg!(feature = "kubernetes");

table! {
    /// Several gateways in front of the same engines. A ledger divides the limits of each backend
    /// among the gateways, so that together they stay within the limits.
    pub struct Cluster {
        /// Name of this gateway in the ledger, in the status and in the log. No two gateways may
        /// have the same name.
        pub name: Option<String> = optional("the name of the host").check(check_name).example("gateway-1");
        /// Addresses of the members of etcd, tried in turn; the ledger is a key in etcd. Version
        /// 3.4 or later, by the JSON gateway of etcd.
        pub etcd: Vec<Endpoint> = default("[]").at_most(limits::MAX_STORE_ENDPOINTS).example("[\"http://10.0.0.1:2379\"]");
        /// TLS to etcd, for addresses with https.
        pub tls: Option<UpstreamTls> = optional("the CAs that this machine trusts, and no own certificate");
        /// Keeps the ledger in a ConfigMap in Kubernetes, instead of etcd.
        pub kubernetes: Option<ClusterObject> = optional("the ledger is in etcd");
        /// The key in etcd, or the name of the ConfigMap. All gateways in front of the same engines
        /// must have the same.
        pub key: String = default("sluice-ledger").check(not_empty);
        /// Time for which a renewal of this gateway's shares is valid. The gateway renews them more
        /// often than every quarter of the lease. A gateway that is gone keeps its shares from the
        /// others for about one and a quarter leases.
        pub lease: Duration = duration("10s").within("2s", "5m");
        /// Reaction when the shares cannot be renewed within the lease. "keep" goes on with the
        /// last shares, so the limit may be exceeded by the shares that others have taken
        /// meanwhile. "strict" admits nothing new. All gateways must have the same value.
        pub mode: ClusterMode = default("keep");
        /// Whether the gateways elect a leader. "none": each gateway decides for itself, and only
        /// one may run engines. "decides": the leader alone changes engines (launch, control,
        /// statefulset), experiments and the values that the tuner tunes, while all gateways serve;
        /// another gateway takes over when the leader is gone. "serves": the same, and only the
        /// leader is ready; the others stand by. All gateways must have the same value, and should
        /// have the same fleet.state, on a volume that they share.
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
        /// The gateway goes on using the last shares.
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
