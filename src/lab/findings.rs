//! Findings in a run: the gateway looks for causes of slow requests on virtual time.
//!
//! Pages are read without a network. Findings are recorded when they appear, with seconds from the
//! start. Good traffic should have none. A look also learns the limits of pools with `tokens =
//! "auto"`.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::client::seconds;
use crate::cluster::Cluster;
use crate::job::LabFlow;
use sluice_config::{Config, TokenLimit};
use sluice_core::base::BackendId;
use sluice_gateway::pool::Bound;
use sluice_online::findings::facts::Facts;
use sluice_online::findings::{Finding, Findings};
use sluice_online::kv_limit::{KvLimit, KvSample};

#[derive(Debug, Default)]
pub(crate) struct LabFindings {
    findings: Findings,
    limits: BTreeMap<BackendId, KvLimit>,
    pub(crate) appeared: Vec<(f64, Finding)>,
}

impl LabFindings {
    /// Looks once for findings. `backends`: the gateway's backends with the indices of their
    /// engines.
    pub(crate) fn look(
        &mut self,
        now: Duration,
        start: Instant,
        flow: &LabFlow,
        (cluster, backends): (&Cluster, &[(BackendId, usize)]),
    ) {
        let facts = Facts::of(&flow.admission().view(), flow.recorder().totals(), |backend| {
            let silent = backend.silent_since.map(|since| (start + now).saturating_duration_since(since));
            let engine = backends.iter().find(|(id, _)| *id == backend.id).map(|(_, engine)| *engine);
            let decoding = flow.admission().decoding(backend.id, start + now);
            (silent, engine.and_then(|engine| cluster.facts(engine)), decoding)
        });
        let appeared = self.findings.look(facts, now).appeared;
        self.appeared.extend(appeared.into_iter().map(|finding| (seconds(now), finding)));
    }

    /// Learns limits of tokens as the gateway does with `tokens = "auto"`.
    pub(crate) fn limit_tokens(
        &mut self,
        config: &Config,
        flow: &LabFlow,
        cluster: &Cluster,
        engines: &[(BackendId, usize)],
        now: Duration,
    ) {
        for pool in &flow.admission().view() {
            let is_auto = config.pools.iter().any(|own| own.name == *pool.name && own.tokens == TokenLimit::Auto);
            for backend in pool.backends.iter().filter(|_| is_auto) {
                let engine = engines.iter().find(|(id, _)| *id == backend.id).map(|(_, engine)| *engine);
                let Some(page) = engine.and_then(|engine| cluster.facts(engine)) else { continue };
                let own = self.limits.entry(backend.id).or_default();
                own.look(KvSample::new(&page, backend.used.tokens, pool.queue_length > 0, now));
                if own.limit() != backend.learned {
                    flow.admission().set_bounds([(backend.id, Bound::Learned(own.limit()))]);
                }
            }
        }
    }
}
