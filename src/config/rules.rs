//! Rules about several keys: names used twice, addresses that clash, a base delay above the
//! maximum, empty commands, permits.
//!
//! A rule about one value is a bound or a check in the key's definition. Rules about the prompt
//! lengths of pools and about spilling are in `coverage.rs`. No rule is applied to a value that
//! already has a problem, so one mistake gives one message.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use super::auth::{Auth, PriorityRange};
use super::autoscale::ENGINES;
use super::backend::{Backend, Target};
use super::certificates::UpstreamTls;
use super::class;
use super::cluster::ClusterLeader;
use super::events;
use super::fair::Fair;
use super::limits;
use super::model::{Model, ModelScope};
use super::pool::Pool;
use super::problem::Situation;
use super::put_pods;
use super::ranks;
use super::report::{Claimed, Report};
use super::root::Config;
use super::server::{AccessLog, LogTarget, Server, Slo};
use super::value::Endpoint;
use sluice_core::base::{ModelId, Period};
use sluice_core::openai::Route;

/// Applies every rule. Sets values that depend on several keys: the objectives that pools inherit
/// from `slo`, the kinds of engines and their slots, the TLS settings of backends, the classes of a
/// file without any, and the default of `server.max_body_memory`.
pub(super) fn apply(config: &mut Config, report: &mut Report<'_>) {
    let Config {
        server, health, fleet, models, auth, pools, slo, classes, access_log, records, tracing, cluster, ..
    } = config;
    if ["server.listen", "server.admin"].iter().all(|path| report.is_sound(path))
        && overlap(server.listen, server.admin)
    {
        report.add_at("server.admin", Situation::AdminIsListen { listen: server.listen.to_string() });
    }
    let waits = [
        ("health.ejection_base", health.ejection_base, "ejection_max", health.ejection_max),
        ("fleet.backoff", fleet.backoff, "backoff_max", fleet.backoff_max),
    ];
    for (path, value, max_key, max) in waits {
        check_order(path, value, max_key, max, report);
    }
    check_body_memory(server, report);
    if server.proxy_protocol && server.trusted_proxies.is_empty() && report.is_sound("server.trusted_proxies") {
        report.add_at("server.proxy_protocol", Situation::ProxyWithoutTrust);
    }
    check_models(models, pools, report);
    check_auth(auth, server, report);
    if let Some(AccessLog { path: LogTarget::File(file), .. }) = access_log {
        check_written_file(file, "access_log.path", report);
    }
    if let Some(records) = records {
        check_written_file(&records.path, "records.path", report);
    }
    if pools.is_empty() && report.is_sound("pool") {
        report.add_at("pool", Situation::NoPool);
    }
    let mut names = Claimed::default();
    for (index, pool) in pools.iter_mut().enumerate() {
        let path = format!("pool[{index}]");
        names.claim(&pool.name, format!("{path}.name"), report);
        check_pool(pool, &path, report);
        if pool.queue.fair == Some(Fair::Key) && auth.keys.is_empty() && report.is_sound("auth.keys") {
            report.add_at(&format!("{path}.queue.fair"), Situation::FairWithoutKeys);
        }
        if !report.is_written(&format!("{path}.slots")) {
            pool.slots = pool.engine.rules().slots;
        }
        for backend in &mut pool.backends {
            (backend.engine, backend.events) = (*pool.engine, events::port(pool.prefix, backend));
        }
        inherit_objectives(&mut pool.slo, slo, &path, report);
        connect_with_tls(pool, &path, report);
    }
    check_routes(pools, report);
    class::check(classes, report);
    if classes.is_empty() && report.is_sound("class") {
        *classes = class::derived(pools);
    }
    check_endpoints(pools, server, report);
    pools.iter().enumerate().for_each(|(index, pool)| ranks::check(index, pool, report));
    events::check(pools, report);
    if let Some(cluster) = cluster {
        cluster.check(report);
        if cluster.leader != ClusterLeader::None {
            check_ports_of_leaders(pools, report);
        }
        if cluster.leader == ClusterLeader::Decides {
            check_engines_for_others(pools, report);
        }
    }
    if let Some(tracing) = tracing {
        tracing.check(report);
    }
}

/// Checks that no pool may stop all engines (`autoscale.min = 0`). Only the leader starts engines,
/// and it sees only its own requests, so requests at other gateways need an engine that runs.
fn check_engines_for_others(pools: &[Pool], report: &mut Report<'_>) {
    for (index, pool) in pools.iter().enumerate() {
        if pool.autoscale.is_some_and(|autoscale| autoscale.apply && autoscale.min == 0) {
            report.add_at(&format!("pool[{index}].autoscale.min"), Situation::NoEngineForOthers);
        }
    }
}

/// Checks that every engine has a port in the file, because every gateway must know the address of
/// an engine that another gateway started.
fn check_ports_of_leaders(pools: &[Pool], report: &mut Report<'_>) {
    for (index, pool) in pools.iter().enumerate() {
        for (number, backend) in pool.backends.iter().enumerate() {
            if matches!(&backend.target, Target::Launch(launch) if launch.port == 0) {
                report.add_at(&format!("pool[{index}].backend[{number}].launch.port"), Situation::PortOfLeader);
            }
        }
    }
}

/// Whether two sockets cannot both be bound, or a client could reach one through the address of the
/// other. Port 0 means any free port and never overlaps.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let same_host = one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && same_host
}

fn check_order(path: &str, value: Duration, max_key: &'static str, max: Duration, report: &mut Report<'_>) {
    if value > max && report.is_sound(path) {
        let (value, max) = (Period(value).to_string(), Period(max).to_string());
        report.add_at(path, Situation::AboveMaximum { value, max_key, max });
    }
}

/// Checks that `server.max_body_memory` is enough for one body of `server.max_body`. If it is not,
/// a default is raised, and a value that the operator wrote is a problem.
fn check_body_memory(server: &mut Server, report: &mut Report<'_>) {
    let (value, max) = (server.max_body, server.max_body_memory);
    if value <= max {
        return;
    }
    if !report.is_written("server.max_body_memory") {
        server.max_body_memory = value;
    } else if ["server.max_body", "server.max_body_memory"].iter().all(|path| report.is_sound(path)) {
        let (value, max) = (value.to_string(), max.to_string());
        report.add_at("server.max_body", Situation::AboveMaximum { value, max_key: "max_body_memory", max });
    }
}

fn check_models(models: &[Model], pools: &[Pool], report: &mut Report<'_>) {
    let launched = |model: ModelId| {
        let launches = |pool: &&Pool| pool.backends.iter().any(|backend| matches!(backend.target, Target::Launch(_)));
        pools.iter().filter(launches).any(|pool| pool.models.includes(model))
    };
    let mut names = Claimed::default();
    for (index, model) in models.iter().enumerate() {
        let path = format!("model[{index}]");
        names.claim(&model.name, format!("{path}.name"), report);
        let aliases = format!("{path}.aliases");
        if report.is_sound(&aliases) {
            for (number, alias) in model.aliases.iter().enumerate() {
                names.claim(alias, format!("{aliases}[{number}]"), report);
            }
        }
        if let Some(file) = model.tokenizer.as_ref().filter(|file| !file.is_file()) {
            let situation = Situation::FileMissing { path: file.display().to_string() };
            report.add_at(&format!("{path}.tokenizer"), situation);
        }
        // An engine with `control` commands may run on another machine.
        let loaded_here = launched(ModelId::new(index));
        if let Some(folder) = model.adapter.as_ref().filter(|folder| loaded_here && !folder.is_dir()) {
            let situation = Situation::FolderMissing { path: folder.display().to_string() };
            report.add_at(&format!("{path}.adapter"), situation);
        }
    }
}

fn check_auth(auth: &Auth, server: &Server, report: &mut Report<'_>) {
    let mut names = Claimed::default();
    let mut digests: BTreeMap<&[u8; 32], &str> = BTreeMap::new();
    for (index, key) in auth.keys.iter().enumerate() {
        let path = format!("auth.keys[{index}]");
        names.claim(&key.name, format!("{path}.name"), report);
        let priorities = key.priorities();
        if !priorities.is_ordered() && report.is_sound(&format!("{path}.priority")) {
            let PriorityRange { default, min, max } = priorities;
            report.add_at(&format!("{path}.priority"), Situation::PriorityOrder { default, min, max });
        }
        let digest = format!("{path}.sha256");
        let first = *digests.entry(key.sha256.bytes()).or_insert(&key.name);
        if first != key.name && report.is_sound(&digest) {
            report.add_at(&digest, Situation::SameKey { first: first.to_owned() });
        }
    }
    if auth.keys.is_empty() && report.is_sound("auth.keys") && !is_loopback(server.listen) {
        report.add_at("auth.keys", Situation::Open { listen: server.listen.to_string() });
    }
    if !report.is_written("auth.admin_token") && report.is_sound("server.admin") && !is_loopback(server.admin) {
        report.add_at("auth.admin_token", Situation::AdminOpen { admin: server.admin.to_string() });
    }
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Checks that the folder of a file that the gateway writes exists. The gateway creates the file,
/// but not the folder.
fn check_written_file(file: &Path, key: &str, report: &mut Report<'_>) {
    if !report.is_sound(key) {
        return;
    }
    if let Some(folder) = file.parent().filter(|folder| !folder.is_dir()) {
        report.add_at(key, Situation::FolderMissing { path: folder.display().to_string() });
    } else if file.is_dir() {
        report.add_at(key, Situation::IsFolder { path: file.display().to_string() });
    }
}

fn check_pool(pool: &Pool, path: &str, report: &mut Report<'_>) {
    let at = |key: &str| format!("{path}.{key}");
    pool.prompt_tokens.check(&at("prompt_tokens"), report);
    if let Some(long) = pool.long_prefix {
        let sound = report.is_sound(&at("prompt_tokens")) && report.is_sound(&at("long_prefix"));
        if long.slots == 0 && pool.prompt_tokens.exceeds(long.threshold) && sound {
            let situation = Situation::LongNeverRuns { threshold: long.threshold.to_string() };
            report.add_at(&at("long_prefix.slots"), situation);
        }
    }
    if let Some(autoscale) = pool.autoscale
        && autoscale.min > autoscale.max
    {
        let (found, min) = (autoscale.max.to_string(), autoscale.min.to_string());
        report.add_at(&at("autoscale.max"), Situation::OutOfRange { found, min, max: ENGINES.to_string() });
    }
    let is_run = |backend: &Backend| !matches!(backend.target, Target::Url(_));
    let are_run = match &pool.kubernetes {
        Some(pods) => pods.statefulset.is_some(),
        None => pool.backends.iter().all(is_run),
    };
    if pool.autoscale.is_some_and(|autoscale| autoscale.apply) && !are_run {
        report.add_at(&at("autoscale.apply"), Situation::AutoscaleWithoutEngines);
    }
    let takes_turns = |backend: &Backend| matches!(&backend.target, Target::Launch(launch) if launch.share.is_some());
    if pool.autoscale.is_some_and(|autoscale| autoscale.apply) && pool.backends.iter().any(takes_turns) {
        report.add_at(&at("autoscale.apply"), Situation::AutoscaleWithShare);
    }
    put_pods::check(pool, path, report);
    if pool.backends.is_empty() && pool.kubernetes.is_none() && report.is_sound(&at("backend")) {
        report.add_at(&at("backend"), Situation::NoBackend);
    }
    let mut names = Claimed::default();
    for (index, backend) in pool.backends.iter().enumerate() {
        let path = at(&format!("backend[{index}]"));
        names.claim(&backend.name, format!("{path}.name"), report);
        check_commands(backend, &path, report);
        check_flags(backend, &path, report);
    }
}

/// Checks the paths that pools name: the pool's engines can serve them, the pool has one model, and
/// no path is named twice.
fn check_routes(pools: &[Pool], report: &mut Report<'_>) {
    let mut first: Vec<(&str, String)> = Vec::new();
    for (index, pool) in pools.iter().enumerate() {
        let at = format!("pool[{index}].routes");
        if pool.routes.is_empty() || !report.is_sound(&at) {
            continue;
        }
        let has_one_model = matches!(&pool.models, ModelScope::Only(models) if models.len() == 1);
        if !has_one_model || !(pool.engine.rules().serves)(Route::Custom) {
            report.add_at(&at, Situation::RoutesOfPool);
        }
        for (number, path) in pool.routes.iter().enumerate() {
            let place = format!("{at}[{number}]");
            match first.iter().find(|(known, _)| known == path) {
                Some((_, first)) => {
                    report.add_at(&place, Situation::Duplicate { name: path.clone(), first: first.clone() });
                }
                None => first.push((path, place)),
            }
        }
    }
}

/// Checks that no flag is written twice, once with `-` and once with `_`, because one of the values
/// would be lost.
fn check_flags(backend: &Backend, path: &str, report: &mut Report<'_>) {
    let (key, args) = match &backend.target {
        Target::Url(_) | Target::Pod(..) => return,
        Target::Launch(launch) => ("launch", &launch.args),
        Target::Control(_, control) => ("control", &control.args),
    };
    let mut first: BTreeMap<String, &String> = BTreeMap::new();
    for name in args.keys() {
        let dashed = name.replace('_', "-");
        if let Some(other) = first.insert(dashed, name) {
            let situation = Situation::Duplicate { name: name.clone(), first: format!("{path}.{key}.args.{other}") };
            report.add_at(&format!("{path}.{key}.args.{name}"), situation);
        }
    }
}

fn check_commands(backend: &Backend, path: &str, report: &mut Report<'_>) {
    let commands = match &backend.target {
        Target::Url(_) | Target::Pod(..) => vec![],
        Target::Launch(launch) => vec![("launch.command", &launch.command)],
        Target::Control(_, control) => vec![("control.start", &control.start), ("control.stop", &control.stop)],
    };
    for (key, command) in commands {
        let path = format!("{path}.{key}");
        if command.first().is_none_or(String::is_empty) && report.is_sound(&path) {
            report.add_at(&path, Situation::EmptyCommand);
        }
    }
}

/// Sets the TLS settings of each backend with an https url, from the backend's `tls` table or the
/// pool's.
fn connect_with_tls(pool: &mut Pool, path: &str, report: &mut Report<'_>) {
    let tables_say = report.is_sound(&format!("{path}.tls"));
    let mut used = false;
    for (index, backend) in pool.backends.iter_mut().enumerate() {
        let path = format!("{path}.backend[{index}]");
        let endpoint = backend.target.endpoint();
        if !endpoint.https {
            if backend.tls.is_some() {
                report.add_at(&format!("{path}.tls"), Situation::TlsWithoutHttps);
            }
            continue;
        }
        used |= backend.tls.is_none();
        let tls = backend.tls.as_ref().or(pool.tls.as_ref());
        if !tables_say || !report.is_sound(&format!("{path}.tls")) {
            continue;
        }
        let settings = match tls {
            Some(tls) => Ok(tls.to(&endpoint.host)),
            None => UpstreamTls::system(&endpoint.host),
        };
        match settings {
            Ok(Some(connection)) => backend.connection = Some(connection),
            Ok(None) => report.add_at(&format!("{path}.url"), Situation::TlsName { found: endpoint.host }),
            Err(error) => report.add_at(&format!("{path}.url"), Situation::Tls { reason: error.to_string() }),
        }
    }
    if pool.tls.is_some() && !used {
        report.add_at(&format!("{path}.tls"), Situation::TlsWithoutHttps);
    }
}

/// Copies every objective that a pool does not set from the general `slo`, together with the
/// objective's origin.
fn inherit_objectives(own: &mut Slo, general: &Slo, path: &str, report: &mut Report<'_>) {
    for key in Slo::FIELDS.iter().map(|field| field.key.name) {
        let path = format!("{path}.slo.{key}");
        if !report.is_written(&path) {
            own.inherit(key, general);
            let origin = report.origins.of(&format!("slo.{key}"));
            report.origins.note(path, origin);
        }
    }
}

/// Whether two pools may have the same server, because they have different models and the server
/// has a separate limit for each model.
fn are_apart(one: &Pool, other: &Pool) -> bool {
    let is_apart = one.engine == other.engine && one.engine.rules().limits_each_model;
    match (&one.models, &other.models) {
        (ModelScope::Only(one), ModelScope::Only(other)) => is_apart && !one.iter().any(|model| other.contains(model)),
        _ => false,
    }
}

struct Seen {
    pool: usize,
    name: String,
    is_launched: bool,
    rank: Option<u16>,
}

/// Checks that each backend is listed once, because a backend in two pools would get the limits
/// twice, and that no backend is the gateway itself.
fn check_endpoints(pools: &[Pool], server: &Server, report: &mut Report<'_>) {
    let mut seen: BTreeMap<Endpoint, Vec<Seen>> = BTreeMap::new();
    let mut count = 0;
    for (index, pool) in pools.iter().enumerate() {
        for (number, backend) in pool.backends.iter().enumerate() {
            count += 1;
            let endpoint = backend.target.endpoint();
            // For port 0 the gateway chooses a free port later.
            if endpoint.port == 0 {
                continue;
            }
            let key = if matches!(backend.target, Target::Launch(_)) { "launch" } else { "url" };
            let path = format!("pool[{index}].backend[{number}].{key}");
            let address = endpoint.authority().replace("localhost:", "127.0.0.1:").parse();
            if address.is_ok_and(|address| is_own(address, server.listen) || is_own(address, server.admin)) {
                report.add_at(&path, Situation::OwnAddress { endpoint: endpoint.to_string() });
            }
            let is_launched = matches!(backend.target, Target::Launch(_));
            let earlier = seen.entry(endpoint.clone()).or_default();
            let is_same = |other: &Seen| {
                let other_rank = other.rank.zip(backend.rank).is_some_and(|(one, other)| one != other);
                !other_rank && (other.pool == index || !are_apart(&pools[other.pool], pool))
            };
            if let Some(other) = earlier.iter().find(|other| is_same(other)) {
                let first = other.name.clone();
                let situation = match is_launched && other.is_launched {
                    true => Situation::SamePort { port: endpoint.port, first },
                    false => Situation::SameEndpoint { endpoint: endpoint.to_string(), first },
                };
                report.add_at(&path, situation);
            }
            let (name, rank) = (format!("{}/{}", pool.name, backend.name), backend.rank);
            earlier.push(Seen { pool: index, name, is_launched, rank });
        }
    }
    if count > limits::MAX_BACKENDS {
        report.add_at("pool", Situation::TooMany { found: count, max: limits::MAX_BACKENDS });
    }
}

/// Whether `address` certainly leads to a socket of the gateway. If the gateway listens on all
/// addresses, only loopback addresses count, because another machine may use the same port.
fn is_own(address: SocketAddr, own: SocketAddr) -> bool {
    let same_host = address.ip() == own.ip() || (own.ip().is_unspecified() && address.ip().is_loopback());
    own.port() != 0 && address.port() == own.port() && same_host
}
