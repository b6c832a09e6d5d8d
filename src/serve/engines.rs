//! Translates a configuration into the engines that the gateway runs, for [`sluice_fleet`].
//!
//! Covers backends with a `launch` or `control` table, and pods of a StatefulSet. Digests of the
//! settings that only a restart changes show that an engine no longer matches the configuration.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use sluice_config::{Address, Backend, Config, Continue, Launch, Model, ModelScope, Pool, Target};
use sluice_core::base::BackendId;
#[cfg(feature = "kubernetes")]
use sluice_fleet::driver::PodDriver;
use sluice_fleet::driver::{EngineSettings, SharedDriver};
use sluice_fleet::{
    CommandDriver, EngineSpec, EngineView, ExternalBackend, ExternalDriver, PortsError, ProcessDriver, ports,
};
use sluice_gateway::pool::PoolLayout;
use sluice_gateway::telemetry::EngineMetrics;

pub(super) fn engines(config: &Config, layout: &PoolLayout, digest: impl Fn(&[u8]) -> String) -> Vec<EngineSpec> {
    let mut engines = Vec::new();
    for (pool, ids) in config.pools.iter().zip(&layout.backends) {
        for (backend, id) in pool.backends.iter().zip(ids) {
            let Some((target, args)) = backend.target.without_settings().filter(|_| !backend.follows()) else {
                continue;
            };
            let served: Vec<&Model> = served(config, pool);
            engines.push(EngineSpec {
                name: format!("{}/{}", pool.name, backend.name).into(),
                backend: *id,
                // Requests about the whole process may go to any rank.
                address: Arc::new(Address { rank: None, ..Address::of(backend) }),
                settings: EngineSettings { args },
                identity: digest(&target.compared()),
                configured: digest(&backend.target.compared()),
                target,
                starts_on_demand: starts_on_demand(pool, &backend.target),
                leaving: backend.cordoned,
                slots: pool.slots,
                spill: pool.spill.iter().map(|id| config.pools[id.index()].name.clone()).collect(),
                models: served.iter().filter(|model| model.adapter.is_none()).map(|m| m.name.clone()).collect(),
                adapters: served.iter().filter_map(|m| Some((m.name.clone(), m.adapter.clone()?))).collect(),
                golden: served
                    .iter()
                    .flat_map(|m| m.golden.iter().map(|text| (m.name.clone(), text.clone())))
                    .collect(),
                rules: config.fleet.clone(),
                moves_after: (config.retry.on_failure != Continue::Off).then_some(config.drain.move_after),
                stall: config.health.stall,
                request_timeout: config.health.probe_timeout,
            });
        }
    }
    engines
}

fn starts_on_demand(pool: &Pool, target: &Target) -> bool {
    let takes_turns = matches!(target, Target::Launch(launch) if launch.share.is_some());
    let is_scaled = pool.autoscale.is_some_and(|autoscale| autoscale.apply) && !matches!(target, Target::Pod(..));
    takes_turns || is_scaled
}

pub(super) fn metrics(views: &[EngineView]) -> Vec<EngineMetrics> {
    let metrics = |view: &EngineView| {
        let (pool, backend) = view.backend.split_once('/')?;
        Some(EngineMetrics {
            pool: pool.to_owned(),
            backend: backend.to_owned(),
            phase: view.step.clone(),
            restarts: view.restarts_total,
            crashes: view.crashes_total,
            wakes: view.wakes_total,
            wake_seconds: view.wake_seconds,
            started: view.started,
        })
    };
    views.iter().filter_map(metrics).collect()
}

pub(super) fn any(config: &Config) -> bool {
    let restarts_pods = |pool: &Pool| pool.kubernetes.as_ref().is_some_and(|pods| pods.statefulset.is_some());
    let runs = |backend: &Backend| matches!(backend.target, Target::Launch(_) | Target::Control(..));
    config.pools.iter().any(|pool| restarts_pods(pool) || pool.backends.iter().any(runs))
}

/// Gives a port to each launched engine that has none. A running engine keeps its port, because a
/// reload cannot move it without losing requests. Returns whether the configuration asks for
/// another port for a running engine. Without `stores` nothing is written.
///
/// # Errors
/// No port is free, or a requested port belongs to another running engine.
pub(super) fn settle_ports(config: &mut Config, running: Option<&Config>, stores: bool) -> Result<bool, PortsError> {
    let moved = settle_processes(config, running, stores)?;
    for pool in &mut config.pools {
        let mut port = 0;
        for backend in &mut pool.backends {
            let follows = backend.follows();
            match &mut backend.target {
                Target::Launch(launch) if follows => launch.port = port,
                Target::Launch(launch) => port = launch.port,
                Target::Url(_) | Target::Control(..) | Target::Pod(..) => {}
            }
        }
    }
    Ok(moved)
}

/// Settles the ports of processes. Ranks that follow a process get the port of that process.
fn settle_processes(config: &mut Config, running: Option<&Config>, stores: bool) -> Result<bool, PortsError> {
    let stays: BTreeMap<String, u16> = running.into_iter().flat_map(ports_of).filter(|(_, port)| *port > 0).collect();
    let without: Vec<String> = ports_of(config).filter(|(_, port)| *port == 0).map(|(name, _)| name).collect();
    let mut moved = false;
    for (name, launch) in launches(config) {
        if let Some(port) = stays.get(&name) {
            moved |= launch.port != *port && launch.port != 0;
            launch.port = *port;
        }
    }
    let mut taken: BTreeMap<u16, String> = BTreeMap::new();
    for (engine, port) in ports_of(config).filter(|(_, port)| *port > 0) {
        if let Some(other) = taken.insert(port, engine.clone()) {
            let (holder, engine) = if stays.contains_key(&other) { (other, engine) } else { (engine, other) };
            return Err(PortsError::Held { port, engine, holder });
        }
    }
    if without.is_empty() {
        return Ok(moved);
    }
    let urls = config.backends().map(|(_, _, backend)| backend.target.endpoint().port);
    let mut others: HashSet<u16> = urls.chain(taken.into_keys()).collect();
    others.extend([config.server.listen.port(), config.server.admin.port()]);
    let wanted: Vec<(String, Option<u16>)> =
        without.into_iter().map(|name| (name.clone(), stays.get(&name).copied())).collect();
    let (state, range) = (&config.fleet.state, &config.fleet.ports);
    let given = match stores {
        true => ports::assign(state, range, &wanted, &others)?,
        false => ports::choose(state, range, &wanted, &others)?.1,
    };
    for (name, launch) in launches(config) {
        if let Some(port) = given.get(&name) {
            launch.port = *port;
        }
    }
    Ok(moved)
}

/// Engines that the gateway starts, by `pool/backend`.
fn launches(config: &mut Config) -> impl Iterator<Item = (String, &mut Launch)> {
    config.pools.iter_mut().flat_map(|pool| {
        let name = pool.name.clone();
        pool.backends.iter_mut().filter(|backend| !backend.follows()).filter_map(move |backend| {
            match &mut backend.target {
                Target::Launch(launch) => Some((format!("{name}/{}", backend.name), launch)),
                Target::Url(_) | Target::Control(..) | Target::Pod(..) => None,
            }
        })
    })
}

fn ports_of(config: &Config) -> impl Iterator<Item = (String, u16)> {
    config.pools.iter().flat_map(|pool| {
        pool.backends.iter().filter(|backend| !backend.follows()).filter_map(|backend| match &backend.target {
            Target::Launch(launch) => Some((format!("{}/{}", pool.name, backend.name), launch.port)),
            Target::Url(_) | Target::Control(..) | Target::Pod(..) => None,
        })
    })
}

/// The backends that the gateway does not run. `all`: another gateway runs the engines that this
/// one could run.
pub(super) fn external_backends(config: &Config, layout: &PoolLayout, all: bool) -> Vec<ExternalBackend> {
    let places = config.pools.iter().zip(&layout.backends).flat_map(|(pool, ids)| pool.backends.iter().zip(ids));
    let theirs = places.filter(|(backend, _)| all || matches!(backend.target, Target::Url(_)));
    let other = |(backend, id): (&Backend, &BackendId)| ExternalBackend {
        backend: *id,
        endpoint: backend.target.endpoint(),
        cordoned: backend.cordoned,
    };
    theirs.map(other).collect()
}

fn served<'c>(config: &'c Config, pool: &Pool) -> Vec<&'c Model> {
    match &pool.models {
        ModelScope::All => config.models.iter().collect(),
        ModelScope::Only(ids) => ids.iter().map(|id| &config.models[id.index()]).collect(),
    }
}

pub(super) fn driver_for_checks(spec: &EngineSpec) -> SharedDriver {
    match &spec.target {
        Target::Launch(launch) => {
            Arc::new(ProcessDriver::for_checks(spec.address.engine, &spec.name, launch.clone(), &spec.rules.state))
        }
        Target::Control(..) | Target::Pod(..) | Target::Url(_) => driver(spec),
    }
}

pub(super) fn driver(spec: &EngineSpec) -> SharedDriver {
    let (kind, name, folder) = (spec.address.engine, &spec.name, &spec.rules.state);
    match &spec.target {
        Target::Launch(launch) => Arc::new(ProcessDriver::of_kind(kind, name, launch.clone(), folder)),
        Target::Control(_, control) => Arc::new(CommandDriver::of_kind(kind, name, control.clone(), folder)),
        #[cfg(feature = "kubernetes")]
        Target::Pod(_, engine) => Arc::new(PodDriver::of_kind(kind, name, engine.clone())),
        #[cfg(not(feature = "kubernetes"))]
        Target::Pod(..) => Arc::new(ExternalDriver::new(name)),
        Target::Url(_) => Arc::new(ExternalDriver::new(name)),
    }
}
