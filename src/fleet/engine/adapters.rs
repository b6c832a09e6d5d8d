//! LoRA adapters as configured: loaded when an engine starts, and kept loaded while it serves.
//!
//! Adapters that were loaded at run time are lost when an engine restarts, and other clients may
//! load and unload them. So the engine's adapters are compared with the configuration after each
//! start, after a change of the configuration, and every [`CHECK_EVERY`]. A missing adapter is
//! loaded. An adapter with another folder is replaced in place, if the engine can do that, so that
//! it is never missing. An adapter that left the configuration is unloaded. Adapters that were
//! never configured are not touched. A failure is retried at the next comparison.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use serde_json::json;
use tokio::time::timeout;

use super::client::{GENERATION_TIMEOUT, RESPONSE_BYTES, ServedModel, error_message, generate, served_models};
use super::context::EngineContext;
use super::lifecycle::StepFailure;
use crate::post;
use sluice_config::Address;

/// Time between comparisons of a serving engine with the configuration.
const CHECK_EVERY: Duration = Duration::from_secs(30);

/// Loads the configured adapters that are missing, and warms each.
///
/// # Errors
/// The first adapter that cannot be loaded.
pub(super) async fn load(context: &EngineContext) -> Result<(), StepFailure> {
    let spec = context.spec();
    if spec.adapters.is_empty() {
        return Ok(());
    }
    let loaded = served_models(&spec.address, spec.request_timeout).await?;
    for (name, path) in &spec.adapters {
        let present = loaded.iter().find(|served| served.name == *name);
        if present.is_some_and(|present| is_from(present, path)) {
            continue;
        }
        context.set_detail(format!("loading adapter {name}"));
        let mode = if present.is_some() { Mode::Replace } else { Mode::Add };
        load_one(context, name, path, mode).await?;
        tracing::info!(backend = %spec.name, adapter = name, path = %path.display(), "adapter loaded");
    }
    Ok(())
}

/// Whether a served adapter is the one in `folder`. True if the engine reports no absolute path,
/// because others cannot be compared.
fn is_from(served: &ServedModel, folder: &Path) -> bool {
    let Some(root) = served.root.as_deref().map(Path::new).filter(|root| root.is_absolute()) else { return true };
    match (root.canonicalize(), folder.canonicalize()) {
        (Ok(root), Ok(folder)) => root == folder,
        _ => root == folder,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// No adapter of that name is loaded.
    Add,
    /// An adapter of that name from another folder is loaded.
    Replace,
}

async fn load_one(context: &EngineContext, name: &str, path: &Path, mode: Mode) -> Result<(), StepFailure> {
    let address = &context.spec().address;
    let (status, body) = match mode {
        Mode::Add => send_load(address, name, path, false).await?,
        Mode::Replace => {
            let (status, body) = send_load(address, name, path, true).await?;
            // An older engine cannot replace an adapter in place.
            if status.as_u16() == 400 && error_message(&body).contains("already") {
                unload(context, name).await;
                send_load(address, name, path, false).await?
            } else {
                (status, body)
            }
        }
    };
    finish_load(address, name, path, status, &body).await
}

/// Loads an adapter into an engine that the gateway does not run, and warms the adapter, so that
/// the first request need not wait. `path` is a folder on the engine's machine.
///
/// # Errors
/// Why the engine does not serve the adapter.
pub async fn load_adapter(address: &Address, name: &str, path: &Path) -> Result<(), String> {
    let loaded = async {
        let (status, body) = send_load(address, name, path, false).await?;
        finish_load(address, name, path, status, &body).await
    };
    loaded.await.map_err(|failure: StepFailure| failure.why)
}

async fn send_load(
    address: &Address,
    name: &str,
    path: &Path,
    in_place: bool,
) -> Result<(StatusCode, Bytes), StepFailure> {
    let mut body = json!({ "lora_name": name, "lora_path": path });
    if in_place {
        body["load_inplace"] = true.into();
    }
    let response = post(address, "/v1/load_lora_adapter", &body, GENERATION_TIMEOUT, RESPONSE_BYTES).await;
    response.map_err(|error| StepFailure::temporary(format!("adapter '{name}' cannot be loaded: {error}")))
}

async fn finish_load(
    address: &Address,
    name: &str,
    path: &Path,
    status: StatusCode,
    body: &[u8],
) -> Result<(), StepFailure> {
    if !status.is_success() {
        let hint = match status.as_u16() {
            404 => "; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
            _ => "",
        };
        // vLLM replaces paths in messages.
        let message = error_message(body).replace("<path>", &path.display().to_string());
        let why = format!("adapter '{name}' cannot be loaded from {}: {message}{hint}", path.display());
        return Err(StepFailure { why, permanent: true });
    }
    let warm = generate(address, name, "warm", 1).await;
    warm.map(drop).map_err(|why| StepFailure::temporary(format!("adapter '{name}': {why}")))
}

/// Unloads an adapter. Returns whether the adapter is gone. Logs a failure.
async fn unload(context: &EngineContext, name: &str) -> bool {
    let spec = context.spec();
    let body = json!({ "lora_name": name });
    let response = post(&spec.address, "/v1/unload_lora_adapter", &body, GENERATION_TIMEOUT, RESPONSE_BYTES).await;
    let why = match response {
        Ok((status, _)) if status.is_success() => {
            tracing::info!(backend = %spec.name, adapter = name, "adapter unloaded");
            return true;
        }
        Ok((_, body)) => error_message(&body),
        Err(error) => error.to_string(),
    };
    tracing::warn!(backend = %spec.name, adapter = name, "adapter cannot be unloaded: {why}");
    false
}

/// Keeps the adapters of a serving engine as configured; never returns.
pub(super) async fn maintain(context: &EngineContext) -> ! {
    let mut reported = None;
    loop {
        let _ = timeout(CHECK_EVERY, context.adapters_changed.notified()).await;
        let why = apply(context).await.err().map(|failure| failure.why);
        if why != reported {
            let name = &context.spec().name;
            match &why {
                Some(why) => tracing::error!(backend = %name, "{why}; tried again every {} s", CHECK_EVERY.as_secs()),
                None => tracing::info!(backend = %name, "its adapters are loaded as configured"),
            }
            reported.clone_from(&why);
        }
        context.set_detail(why.unwrap_or_default());
    }
}

/// Unloads adapters that left the configuration, and loads missing ones.
async fn apply(context: &EngineContext) -> Result<(), StepFailure> {
    let unwanted = context.state.lock().unwanted.clone();
    if !unwanted.is_empty() {
        let spec = context.spec();
        let loaded = served_models(&spec.address, spec.request_timeout).await?;
        for name in unwanted {
            let present = loaded.iter().any(|served| served.is_adapter && served.name == name);
            if !present || unload(context, &name).await {
                context.state.lock().unwanted.retain(|other| *other != name);
            }
        }
    }
    load(context).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_from_another_folder_is_another_one_where_the_folder_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        std::fs::create_dir_all(&one).unwrap();
        std::fs::create_dir_all(&two).unwrap();
        let from = |root: Option<&str>| {
            let served = ServedModel { name: "ad".into(), is_adapter: true, root: root.map(str::to_owned) };
            is_from(&served, &one)
        };
        let text = |path: &Path| path.display().to_string();
        assert!(from(Some(&text(&one))) && from(Some(&format!("{}/../one/", text(&one)))));
        assert!(!from(Some(&text(&two))) && !from(Some("/elsewhere/one")));
        assert!(from(None) && from(Some("org/adapter-on-a-hub")), "no folder of this machine is reported");
    }
}
