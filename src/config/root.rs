//! The whole configuration: [`Config`], valid by construction.
//!
//! Order defines the ids: `models[i]` is `ModelId(i)`, `pools[i]` is `PoolId(i)`, and backends are
//! numbered over all pools ([`Config::backends`]). Ids belong to one `Config`; after a reload the
//! same name may have another id.

use super::admin::Admin;
use super::auth::Auth;
use super::backend::Backend;
use super::certificates::{PemFile, ServerTls, UpstreamTls};
use super::class::Class;
use super::cluster::Cluster;
use super::continuation::Drain;
use super::experiment::Experiment;
use super::fleet::Fleet;
use super::limits;
use super::model::Model;
use super::pool::Pool;
use super::records::Records;
use super::report::Names;
use super::server::{AccessLog, Health, Log, Retry, Server, Slo, Timeouts};
use super::setting::{Setting, Shown, ShownTable};
use super::table::table;
use super::traces::Tracing;
use super::tuner::Tuner;
use crate::tls::Certificates;
use sluice_core::base::{BackendId, ModelId, PoolId};

table! {
    /// A valid configuration. Built by [`Config::load`], [`Config::parse`] or
    /// [`Config::from_flags`] only.
    pub struct Config {
        /// Sockets, threads and limits of the client side.
        pub server: Server = table();
        /// Limits on the stages of a request. The whole length of a stream has no limit.
        pub timeouts: Timeouts = table();
        /// How often the gateway tries a request.
        pub retry: Retry = table();
        /// Engines that leave service while streams run there.
        pub drain: Drain = table();
        /// Who may use the gateway. Write a secret as "env:NAME" or "file:PATH"; the gateway never
        /// prints its value.
        pub auth: Auth = table();
        /// Host names of the admin port, and the flags of engines that may be changed through it.
        /// The address of the port is server.admin.
        pub admin: Admin = table();
        /// One table per model name that clients may send; LoRA adapters are models too. Without a
        /// table, pools serve every model that their backends report.
        pub models as "model": Vec<Model> = tables(limits::MAX_MODELS).in_force();
        /// One table per pool: backends that may answer the same requests.
        pub pools as "pool": Vec<Pool> = tables(limits::MAX_POOLS).in_force();
        /// Objectives for goodput, the tuner and experiments. No request is judged by a target that
        /// is absent.
        pub slo: Slo = table();
        /// One table per class: requests whose latency is shown, judged and alerted on together,
        /// whatever pool and engine serve them. A request belongs to the first class that has it.
        /// Without a table, the classes are "short" and "long": they divide at the limits of pools
        /// and permits, or at 5k.
        pub classes as "class": Vec<Class> = tables(limits::MAX_CLASSES);
        /// How backends leave and re-enter rotation.
        pub health: Health = table();
        /// How engines that the gateway runs (pool.backend.launch and control) are started,
        /// restarted and healed.
        pub fleet: Fleet = table();
        /// The online tuner, which adjusts limits to the latencies of live requests. It needs
        /// objectives ([slo]).
        pub tuner: Tuner = table();
        /// Several gateways in front of the same engines. A ledger divides the limits of each
        /// backend among the gateways, so that together they stay within the limits. Absent: this
        /// gateway has the whole limits.
        pub cluster: Option<Cluster> = optional("none").needs_restart();
        /// One table per experiment: arms that serve the same requests in different ways and are
        /// compared.
        pub experiments as "experiment": Vec<Experiment> = tables(limits::MAX_EXPERIMENTS);
        /// The access log, one line per request. Absent: no log is written.
        pub access_log: Option<AccessLog> = optional("none").needs_restart();
        /// Records of requests, for replays and reports: lines of the access log without any text
        /// of clients, with hashes of the beginnings of prompts, in files that the gateway rotates.
        /// Absent: no records are written.
        pub records: Option<Records> = optional("none").needs_restart();
        /// Traces of requests for an OpenTelemetry collector, with the spans of queue, attempts,
        /// prefill and decode. Absent: no traces are sent, and traceparent headers of clients pass
        /// unchanged.
        pub tracing: Option<Tracing> = optional("none").needs_restart();
        /// The gateway's own log, on stderr.
        pub log: Log = table().needs_restart();
    }
}

impl Config {
    /// The model with this name or alias. `None` if it is not declared; pools that serve every
    /// model may still accept it. The search is linear; the request path must build a map instead.
    pub fn model_named(&self, name: &str) -> Option<ModelId> {
        let means = |model: &Model| model.name == name || model.aliases.iter().any(|alias| alias == name);
        self.models.iter().position(means).map(ModelId::new)
    }

    /// The pool called `name`.
    pub fn pool_named(&self, name: &str) -> Option<PoolId> {
        self.pools.iter().position(|pool| pool.name == name).map(PoolId::new)
    }

    /// All backends with their dense ids, pool by pool in the order of the configuration.
    pub fn backends(&self) -> impl Iterator<Item = (PoolId, BackendId, &Backend)> {
        self.pools
            .iter()
            .enumerate()
            .flat_map(|(index, pool)| pool.backends.iter().map(move |backend| (PoolId::new(index), backend)))
            .enumerate()
            .map(|(number, (pool, backend))| (pool, BackendId::new(number), backend))
    }

    /// The files of the certificates that the gateway presents to clients and to engines.
    pub fn own_certificates(&self) -> impl Iterator<Item = &PemFile<Certificates>> {
        let pools = self.pools.iter().flat_map(|pool| {
            let backends = pool.backends.iter().filter_map(|backend| backend.tls.as_ref());
            pool.tls.iter().chain(backends).filter_map(UpstreamTls::certificate)
        });
        self.server.tls.iter().map(ServerTls::certificate).chain(pools)
    }

    /// Replaces the values that only a restart can change by the running values.
    pub fn keep_until_restart(&mut self, running: &Self) {
        self.keep_running(running);
    }

    pub(super) fn shown(&self) -> ShownTable {
        let models = self.models.iter().map(|model| vec![model.name.clone()]).collect();
        let pools = self.pools.iter().map(|pool| pool.name.clone()).collect();
        match self.show(&Names { models, pools }) {
            Shown::Table(table) => table,
            _ => ShownTable::new(&[], Vec::new()),
        }
    }
}
