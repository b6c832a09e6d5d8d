//! Checks before an engine leaves service: would an engine with the new settings start, and can
//! other backends carry the load?
//!
//! [`Replacement`] judges the load from admission and from each backend's present list of models.
//! The checks change nothing.

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
use sluice_gateway::pool::{Admission, BackendView, Replacement};

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
/// The models that the others cannot serve, or how full they are.
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
    // If a query fails, the models of the last probe count. Admission judges health.
    let names = |backend: &BackendView| current.get(&backend.id).cloned().unwrap_or_else(|| reported.of(backend.id));
    let (pool, backend) = spec.name.split_once('/').unwrap_or(("", &spec.name));
    let spill = spec.spill.iter().map(String::as_str).collect();
    let replacement = Replacement { pool, backend, spill, headroom: spec.rules.headroom };
    Ok(replacement.check(&admission.view(), names)?)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
