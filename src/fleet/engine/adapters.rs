//! Adapters as they should be: those of the configuration, loaded into an engine that is started and kept there.
//!
//! An engine forgets adapters that were loaded at run time when it restarts, and anybody may load and unload them. So what
//! it serves is compared with what it should serve: after each start, when the configuration says something else, and every
//! [`LOOK_EVERY`]. One that is missing is loaded; one that was loaded from another folder is replaced in place, so that no
//! request finds it missing, where the engine can do that; one that was taken out of the configuration is unloaded. Adapters
//! that were never configured are somebody else's and stay. A failure is tried again at the next look.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use super::client::{ANSWER_BYTES, QUESTION, Served, generate, message, served};
use super::context::EngineContext;
use super::lifecycle::StepFailure;
use crate::post;

/// How often an engine that serves is asked for its adapters.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Loads the adapters that should be there and are not, and warms each.
///
/// # Errors
/// The first that cannot be loaded.
pub(super) async fn load(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let spec = context.spec.load_full();
    if spec.adapters.is_empty() {
        return Ok(());
    }
    let loaded = served(&spec.address, spec.request_timeout).await?;
    for (name, path) in &spec.adapters {
        let known = loaded.iter().find(|served| served.name == *name);
        if known.is_some_and(|known| is_from(known, path)) {
            continue;
        }
        context.detail(format!("loading adapter {name}"));
        load_one(context, name, path, known.is_some()).await?;
        tracing::info!(backend = %spec.name, adapter = name, path = %path.display(), "loaded");
    }
    Ok(())
}

/// Whether an adapter is the one in a folder. An engine that does not say, or says it with a path that means nothing here,
/// is believed.
fn is_from(served: &Served, folder: &Path) -> bool {
    let Some(root) = served.root.as_deref().map(Path::new).filter(|root| root.is_absolute()) else { return true };
    match (root.canonicalize(), folder.canonicalize()) {
        (Ok(root), Ok(folder)) => root == folder,
        _ => root == folder,
    }
}

async fn load_one(context: &EngineContext, name: &str, path: &Path, replace: bool) -> Result<(), StepFailure> {
    let spec = context.spec.load_full();
    let mut body = json!({ "lora_name": name, "lora_path": path });
    if replace {
        body["load_inplace"] = true.into();
    }
    let ask = async |body: &Value| {
        let asked = post(&spec.address, "/v1/load_lora_adapter", body, QUESTION, ANSWER_BYTES).await;
        asked.map_err(|error| StepFailure::temporary(format!("adapter '{name}' cannot be loaded: {error}")))
    };
    let (mut status, mut said) = ask(&body).await?;
    if replace && status.as_u16() == 400 && message(&said).contains("already") {
        // An older engine does not know how to replace one.
        unload(context, name).await;
        (status, said) = ask(&json!({ "lora_name": name, "lora_path": path })).await?;
    }
    if !status.is_success() {
        let hint = match status.as_u16() {
            404 => "; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
            _ => "",
        };
        let why = format!("adapter '{name}' cannot be loaded: {}{hint}", message(&said));
        return Err(StepFailure { why, permanent: true });
    }
    let warm = generate(&spec.address, name, "warm", 1).await;
    warm.map(drop).map_err(|why| StepFailure::temporary(format!("adapter '{name}': {why}")))
}

/// Takes one out; whether it is gone. A failure is said in the log.
async fn unload(context: &EngineContext, name: &str) -> bool {
    let spec = context.spec.load_full();
    let body = json!({ "lora_name": name });
    let asked = post(&spec.address, "/v1/unload_lora_adapter", &body, QUESTION, ANSWER_BYTES).await;
    let why = match asked {
        Ok((status, _)) if status.is_success() => {
            tracing::info!(backend = %spec.name, adapter = name, "unloaded");
            return true;
        }
        Ok((_, said)) => message(&said),
        Err(error) => error.to_string(),
    };
    tracing::warn!(backend = %spec.name, adapter = name, "cannot be unloaded: {why}");
    false
}

/// Keeps the adapters of an engine that serves as they should be, for ever.
pub(super) async fn keep(context: &Arc<EngineContext>) -> ! {
    let mut said = None;
    loop {
        let _ = timeout(LOOK_EVERY, context.adapters.notified()).await;
        let why = mend(context).await.err().map(|failure| failure.why);
        if why != said {
            let name = Arc::clone(&context.spec.load().name);
            match &why {
                Some(why) => {
                    let again = LOOK_EVERY.as_secs();
                    tracing::error!(backend = %name, "{why}; tried again every {again} s");
                }
                None => tracing::info!(backend = %name, "its adapters are as they should be"),
            }
            said.clone_from(&why);
        }
        context.detail(why.unwrap_or_default());
    }
}

async fn mend(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let unwanted = context.state.lock().unwanted.clone();
    if !unwanted.is_empty() {
        let spec = context.spec.load_full();
        let loaded = served(&spec.address, spec.request_timeout).await?;
        for name in unwanted {
            let there = loaded.iter().any(|served| served.adapter && served.name == name);
            if !there || unload(context, &name).await {
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
    fn an_adapter_is_another_one_when_it_comes_from_another_folder_that_can_be_told() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        std::fs::create_dir_all(&one).unwrap();
        std::fs::create_dir_all(&two).unwrap();
        let from = |root: Option<&str>| {
            let served = Served { name: "ad".into(), adapter: true, root: root.map(str::to_owned) };
            is_from(&served, &one)
        };
        let text = |path: &Path| path.display().to_string();
        assert!(from(Some(&text(&one))) && from(Some(&format!("{}/../one/", text(&one)))));
        assert!(!from(Some(&text(&two))) && !from(Some("/elsewhere/one")));
        assert!(from(None) && from(Some("org/adapter-on-a-hub")), "nothing is known of those");
    }
}
