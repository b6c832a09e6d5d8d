//! From the configuration's words to the supervisor's: which engines we run, and with what.
//!
//! Backends with a `launch` or a `control` table, each with what its pool serves. Digests stand for what only a restart changes, so that
//! a reload and a gateway after a crash can tell whether an engine still is what the configuration says.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::config::{ArgValue, Config, Control, Launch, Model, ModelScope, Pool, Target};
use crate::fleet::driver::{AnyDriver, Settings};
use crate::fleet::{CommandDriver, EngineSpec, ExternalDriver, ProcessDriver};
use crate::pool::{Address, Layout};

/// The engines of a configuration that is in force as `layout`.
pub(super) fn engines(config: &Config, layout: &Layout) -> Vec<EngineSpec> {
    let mut engines = Vec::new();
    for (pool, ids) in config.pools.iter().zip(&layout.backends) {
        for (backend, id) in pool.backends.iter().zip(ids) {
            let Some((mut target, args)) = without_args(&backend.target) else { continue };
            let endpoint = backend.target.endpoint();
            let authority = endpoint.authority().into();
            let served: Vec<&Model> = served(config, pool);
            if let Target::Launch(identity) = &mut target
                && served.iter().any(|model| model.adapter.is_some())
            {
                // Without it the engine has no route to load adapters.
                identity.env.entry("VLLM_ALLOW_RUNTIME_LORA_UPDATING".to_owned()).or_insert_with(|| "1".to_owned());
            }
            engines.push(EngineSpec {
                name: format!("{}/{}", pool.name, backend.name).into(),
                backend: *id,
                address: Arc::new(Address { endpoint, authority, api_key: backend.api_key.clone() }),
                settings: Settings { args },
                identity: digest(&target),
                configured: digest(&backend.target),
                target,
                slots: pool.slots,
                spill: pool.spill.iter().map(|id| config.pools[id.index()].name.clone()).collect(),
                models: served.iter().filter(|model| model.adapter.is_none()).map(|m| m.name.clone()).collect(),
                adapters: served.iter().filter_map(|m| Some((m.name.clone(), m.adapter.clone()?))).collect(),
                golden: served
                    .iter()
                    .flat_map(|m| m.golden.iter().map(|text| (m.name.clone(), text.clone())))
                    .collect(),
                rules: config.fleet.clone(),
                stall: config.health.stall,
                patience: config.health.probe_timeout,
            });
        }
    }
    engines
}

/// What an engine of ours is started by, and its flags apart; `None` for one that somebody else runs.
fn without_args(target: &Target) -> Option<(Target, BTreeMap<String, ArgValue>)> {
    match target {
        Target::Url(_) => None,
        Target::Launch(launch) => {
            Some((Target::Launch(Launch { args: BTreeMap::new(), ..launch.clone() }), launch.args.clone()))
        }
        Target::Control(endpoint, control) => {
            let bare = Control { args: BTreeMap::new(), ..control.clone() };
            Some((Target::Control(endpoint.clone(), bare), control.args.clone()))
        }
    }
}

/// The models that every backend of a pool serves.
fn served<'c>(config: &'c Config, pool: &Pool) -> Vec<&'c Model> {
    match &pool.models {
        ModelScope::All => config.models.iter().collect(),
        ModelScope::Only(ids) => ids.iter().map(|id| &config.models[id.index()]).collect(),
    }
}

/// The driver of an engine that is new. Its logs lie beside the journal.
pub(super) fn driver(spec: &EngineSpec) -> AnyDriver {
    let (name, folder) = (&spec.name, &spec.rules.state);
    match &spec.target {
        Target::Launch(launch) => Arc::new(ProcessDriver::new(name, launch.clone(), folder)),
        Target::Control(_, control) => Arc::new(CommandDriver::new(name, control.clone(), folder)),
        Target::Url(_) => Arc::new(ExternalDriver::new(name)),
    }
}

fn digest(what: &impl Debug) -> String {
    let digest = Sha256::digest(format!("{what:?}"));
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}
