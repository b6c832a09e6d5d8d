//! Puts the found pods into a configuration, and checks the tables that select pods.
//!
//! An address becomes only one backend: if several pools select a pod, the first of these pools has
//! it. Finding pods is a cargo feature (`kubernetes`). In a gateway without it, the table is an
//! error whose message says how to get a gateway with the feature.

use std::collections::{BTreeMap, HashSet};

use super::backend::is_secret_arg;
use super::events;
use super::limits;
use super::pods::FoundPod;
use super::pool::Pool;
use super::problem::Situation;
use super::report::Report;
use super::root::Config;
use super::value::Endpoint;

/// Whether this gateway can find pods.
const IS_BUILT: bool = cfg!(feature = "kubernetes");

impl Config {
    /// Makes these pods the backends of their pools, by pool name; a pool without an entry gets
    /// none. Returns the pods that were left out, with the reason.
    pub fn put_pods(&mut self, found: &BTreeMap<String, Vec<FoundPod>>) -> Vec<(String, String)> {
        let listed = self.pools.iter().filter(|pool| pool.kubernetes.is_none());
        let mut taken: HashSet<Endpoint> =
            listed.flat_map(|pool| &pool.backends).map(|backend| backend.target.endpoint()).collect();
        let mut left_out = Vec::new();
        for pool in &mut self.pools {
            let Some(pods) = &pool.kubernetes else { continue };
            pool.backends.clear();
            for pod in found.get(&pool.name).into_iter().flatten() {
                let mut backend = pods.backend(pod, *pool.engine);
                backend.events = events::port(pool.prefix, &backend);
                let name = format!("{}/{}", pool.name, pod.name);
                if taken.len() >= limits::MAX_BACKENDS {
                    left_out.push((name, format!("there are {} backends, which is the most", taken.len())));
                } else if taken.insert(backend.target.endpoint()) {
                    pool.backends.push(backend);
                } else {
                    left_out.push((name, format!("{} is a backend already; give the pools other selectors", pod.ip)));
                }
            }
        }
        left_out
    }
}

pub(super) fn check(pool: &Pool, path: &str, report: &mut Report<'_>) {
    let Some(pods) = &pool.kubernetes else { return };
    let at = |key: &str| format!("{path}.{key}");
    if !IS_BUILT {
        return report.add_at(&at("kubernetes"), Situation::WithoutKubernetes);
    }
    if !pool.backends.is_empty() {
        report.add_at(&at("backend"), Situation::PodsAndBackends);
    }
    if !pods.args.is_empty() && pods.statefulset.is_none() {
        report.add_at(&at("kubernetes.args"), Situation::ArgsWithoutStatefulset);
    }
    if let Some((name, _)) = pods.args.iter().find(|(name, value)| is_secret_arg(name, value)) {
        report.add_at(&at(&format!("kubernetes.args.{name}")), Situation::SecretInPodArgs);
    }
}
