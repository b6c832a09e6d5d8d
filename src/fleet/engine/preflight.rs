//! Checks before an engine leaves service: would the new settings start, and can others carry the
//! load?
//!
//! Other backends are the ones in rotation in the engine's pool and in the pools that the requests
//! may spill to. They must serve every model and adapter of the engine, and have room for the
//! running and waiting requests, with a margin (`fleet.headroom`). Admission and each backend's
//! present list are consulted; nothing changes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::task::JoinSet;

use super::client::served_models;
use super::lifecycle::RestartBlocked;
use super::spec::EngineSpec;
use crate::adapter_rank;
use crate::driver::{AdapterRank, Driver, DriverKind, EngineFailure, EngineSettings, Notice};
use crate::models::ReportedModels;
use sluice_core::vllm::failure::FailureClass;
use sluice_gateway::pool::{Admission, BackendView, PoolView};

/// Checks that the engine could run with these settings and the adapters. Returns warnings.
///
/// # Errors
/// The setting or adapter that would fail.
pub async fn check_settings(
    driver: &dyn Driver,
    spec: &EngineSpec,
    settings: &EngineSettings,
) -> Result<Vec<Notice>, EngineFailure> {
    let notices = driver.check(settings).await?;
    // Other drivers' adapter folders may be on another machine.
    if driver.kind() == DriverKind::Process {
        check_adapters(&spec.adapters, driver.adapter_rank(settings))?;
    }
    Ok(notices)
}

fn check_adapters(adapters: &[(String, PathBuf)], limit: AdapterRank) -> Result<(), EngineFailure> {
    for (name, folder) in adapters {
        if let AdapterRank::None(why) = &limit {
            return Err(EngineFailure::new(
                FailureClass::BadArguments,
                format!("adapter '{name}' is to be loaded, and {why}"),
            ));
        }
        if !folder.is_dir() {
            let cause = format!("adapter '{name}': there is no folder {}", folder.display());
            return Err(EngineFailure::new(FailureClass::ModelNotFound, cause));
        }
        if let AdapterRank::UpTo(most) = limit
            && let Some(rank) = adapter_rank(folder).filter(|rank| i64::from(*rank) > most)
        {
            let cause = format!("adapter '{name}' has rank {rank}, above max-lora-rank {most}");
            return Err(EngineFailure::new(FailureClass::LoraRank, cause));
        }
    }
    Ok(())
}

/// Checks that other backends can carry the engine's load. Queries their models, because the last
/// probe may be seconds old.
///
/// # Errors
/// The models that they cannot serve, or how full they are.
pub(crate) async fn check_replacement(
    admission: &Admission,
    reported: &ReportedModels,
    spec: &EngineSpec,
) -> Result<(), RestartBlocked> {
    let mut queries = JoinSet::new();
    for backend in admission.view().into_iter().flat_map(|pool| pool.backends) {
        let timeout = spec.request_timeout;
        queries.spawn(async move { (backend.id, served_models(&backend.address, timeout).await) });
    }
    let mut current = BTreeMap::new();
    while let Some(response) = queries.join_next().await {
        if let Ok((id, Ok(served))) = response {
            current.insert(id, served.into_iter().map(|served| served.name).collect::<Vec<_>>());
        }
    }
    let (pool, name) = spec.name.split_once('/').unwrap_or(("", &spec.name));
    // If a query fails, the last probe counts; admission judges health.
    let names = |backend: &BackendView| current.get(&backend.id).cloned().unwrap_or_else(|| reported.of(backend.id));
    judge_replacement(&admission.view(), (pool, name), &spec.spill, names, spec.rules.headroom)
}

/// Judges whether backend `name` of `pool` can be replaced. `spill`: pools that the requests may
/// spill to. `names`: the models of a backend.
fn judge_replacement(
    views: &[PoolView],
    (pool, name): (&str, &str),
    spill: &[String],
    names: impl Fn(&BackendView) -> Vec<String>,
    headroom: f64,
) -> Result<(), RestartBlocked> {
    let reachable = |view: &&PoolView| *view.name == *pool || spill.iter().any(|spill| **spill == *view.name);
    let of = |view: &PoolView, backend: &BackendView| *view.name == *pool && *backend.name == *name;
    let mut others = Vec::new();
    let (mut missing, mut used) = (Vec::new(), 0u64);
    for view in views.iter().filter(reachable) {
        used += view.queue_length as u64;
        for backend in &view.backends {
            used += u64::from(backend.used.slots);
            if of(view, backend) {
                missing = names(backend);
            } else if backend.in_rotation() {
                others.push(backend);
            }
        }
    }
    let served: Vec<String> = others.iter().flat_map(|other| names(other)).collect();
    missing.retain(|name| !served.contains(name));
    if others.is_empty() || !missing.is_empty() {
        let names = if missing.is_empty() { "its requests".to_owned() } else { missing.join(", ") };
        return Err(RestartBlocked::NoReplacement(names));
    }
    let room: u64 = others.iter().map(|other| u64::from(other.limits.slots)).sum();
    if used as f64 > room as f64 * headroom {
        return Err(RestartBlocked::NoRoom { used, room, headroom_percent: (headroom * 100.0).round() as u32 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::*;
    use sluice_gateway::config::{Endpoint, Policy};
    use sluice_gateway::pool::*;

    /// Two pools with two ready backends each, and the ids of the backends.
    fn pools(slots: u32) -> (Arc<Admission>, PoolLayout) {
        let limits = BackendLimits { slots, tokens: None, prefill_tokens: None, long_prefix: None };
        let second = std::time::Duration::from_secs(1);
        let rules = HealthRules {
            probe_failures: 1,
            request_failures: 1,
            eject_base: second,
            eject_max: second,
            max_ejected: 0.5,
        };
        let spec = |name: &str, base: u16| PoolSpec {
            name: name.into(),
            rules: PoolRules {
                policy: Policy::LeastWork,
                limits,
                queue_length: 8,
                queue_timeout: second,
                hold: None,
                order: QueueOrder::FIFO,
                by_priority: None,
            },
            backends: (base..base + 2)
                .map(|port| {
                    let endpoint = Endpoint { https: false, host: "10.0.0.1".to_owned(), port, prefix: String::new() };
                    let address = Address::new(endpoint, None, None);
                    BackendSpec { name: format!("b{port}").into(), address: Arc::new(address), weight: 1.0 }
                })
                .collect(),
            spill: vec![],
        };
        let now = Instant::now();
        let admission = Admission::new(now, rules, 1);
        let layout = admission.apply(&[spec("one", 1), spec("two", 3)], rules, now);
        for id in layout.backends.iter().flatten() {
            admission.record_probe(*id, true, now);
        }
        (admission, layout)
    }

    fn judge(
        admission: &Admission,
        spill: &[&str],
        names: impl Fn(&BackendView) -> Vec<String>,
    ) -> Result<(), RestartBlocked> {
        let spill: Vec<String> = spill.iter().map(|&pool| pool.to_owned()).collect();
        judge_replacement(&admission.view(), ("one", "b1"), &spill, names, 0.5)
    }

    fn same(_: &BackendView) -> Vec<String> {
        vec!["m".to_owned(), "lora".to_owned()]
    }

    #[test]
    fn another_backend_in_rotation_and_in_reach_must_serve_every_name() {
        let (admission, layout) = pools(8);
        assert_eq!(judge(&admission, &[], same), Ok(()));
        let without_lora =
            |view: &BackendView| same(view).into_iter().take(if *view.name == *"b1" { 2 } else { 1 }).collect();
        assert_eq!(judge(&admission, &[], without_lora), Err(RestartBlocked::NoReplacement("lora".to_owned())));
        admission.set_cordon(layout.backends[0][1], Cordon::Starting);
        assert_eq!(judge(&admission, &[], same), Err(RestartBlocked::NoReplacement("m, lora".to_owned())));
        assert_eq!(judge(&admission, &["two"], same), Ok(()));
    }

    #[test]
    fn an_adapter_that_is_not_there_or_too_big_is_found_before_anything_is_touched() {
        let folder = tempfile::tempdir().unwrap();
        let adapters = |path: &std::path::Path| [("sql".to_owned(), path.to_owned())];
        let said = |path: &std::path::Path, most| {
            check_adapters(&adapters(path), AdapterRank::UpTo(most)).unwrap_err().to_string()
        };
        assert!(said(&folder.path().join("none"), 16).contains("there is no folder"));
        let why = || AdapterRank::None("x; set args.enable-lora = true".to_owned());
        let none = check_adapters(&adapters(folder.path()), why()).unwrap_err().to_string();
        assert!(none.contains("and x; set args.enable-lora = true"), "{none}");
        assert!(check_adapters(&adapters(folder.path()), AdapterRank::Unknown).is_ok());
        std::fs::write(folder.path().join("adapter_config.json"), r#"{"r": 32}"#).unwrap();
        let too_big = said(folder.path(), 16);
        assert!(too_big.contains("rank 32, above max-lora-rank 16") && too_big.contains("raise"), "{too_big}");
        assert!(check_adapters(&adapters(folder.path()), AdapterRank::UpTo(32)).is_ok());
        assert!(check_adapters(&[], why()).is_ok());
    }

    #[test]
    fn what_runs_and_waits_must_fit_on_the_others_with_a_margin() {
        let (admission, layout) = pools(4);
        let request = || AdmissionRequest {
            layout: layout.number,
            home: layout.pools[0],
            spill: [].into_iter().collect(),
            need: Need { slots: 1, prompt_tokens: 1, output_tokens: 1 },
            priority: 0,
            fair: None,
            arrived: Instant::now(),
            since: Instant::now(),
            prefix: Default::default(),
            adapter: None,
            asks: Default::default(),
            wants: Default::default(),
            avoid: [].into_iter().collect(),
            only: None,
            pinned: false,
        };
        let mut held = Vec::new();
        for _ in 0..2 {
            let AdmissionDecision::Granted(lease) = admission.enter(request()) else { panic!("there is room") };
            held.push(lease);
        }
        assert_eq!(judge(&admission, &[], same), Ok(()));
        let AdmissionDecision::Granted(_third) = admission.enter(request()) else { panic!("there is room") };
        assert_eq!(
            judge(&admission, &[], same),
            Err(RestartBlocked::NoRoom { used: 3, room: 4, headroom_percent: 50 })
        );
    }
}
