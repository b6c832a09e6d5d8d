//! Names that a server answers to: `/v1/models` and LoRA adapters at run time.
//!
//! Adapters are names only: nothing is read from the path. Loading needs `--enable-lora`; an adapter that runs keeps
//! running when it is unloaded. At most [`MAX_ADAPTERS`] are ever loaded in one process, so ids never run out.

use serde::Serialize;
use serde_json::Value;

use super::config::MAX_ADAPTERS;
use super::driver::Shared;
use super::generate::unix_time;
use super::wire::ErrorBody;
use crate::base::Rng;

/// A model in `/v1/models`, in vLLM's key order.
#[derive(Serialize)]
struct Card<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<&'a str>,
    max_model_len: Option<u32>,
    permission: [Permission; 1],
}

#[derive(Serialize)]
struct Permission {
    id: String,
    object: &'static str,
    created: u64,
    allow_create_engine: bool,
    allow_sampling: bool,
    allow_logprobs: bool,
    allow_search_indices: bool,
    allow_view: bool,
    allow_fine_tuning: bool,
    organization: &'static str,
    group: Option<String>,
    is_blocking: bool,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Card<'a>>,
}

/// The body of `/v1/models`.
pub(super) fn list(shared: &Shared) -> String {
    let config = &shared.config;
    let created = unix_time();
    let base = config.names.first().map_or("", String::as_str);
    let card = |id, root, parent, max_model_len| Card {
        id,
        object: "model",
        created,
        owned_by: "vllm",
        root,
        parent,
        max_model_len,
        permission: [permission(config.seed, created)],
    };
    let adapters = shared.adapters.lock();
    let names = config.names.iter().map(|name| card(name, config.root.as_str(), None, Some(config.max_model_len)));
    let loaded = adapters.iter().flatten().map(|(name, path)| card(name, path.as_str(), Some(base), None));
    let list = List { object: "list", data: names.chain(loaded).collect() };
    serde_json::to_string(&list).expect("a list of plain fields is always JSON")
}

fn permission(seed: u64, created: u64) -> Permission {
    Permission {
        id: format!("modelperm-{:016x}", Rng::new(seed).next_u64()),
        object: "model_permission",
        created,
        allow_create_engine: false,
        allow_sampling: true,
        allow_logprobs: true,
        allow_search_indices: false,
        allow_view: true,
        allow_fine_tuning: false,
        organization: "*",
        group: None,
        is_blocking: false,
    }
}

fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str, ErrorBody> {
    let given = value[field].as_str().filter(|text| !text.is_empty());
    given.ok_or_else(|| invalid(format!("Both 'lora_name' and 'lora_path' must be provided ('{field}' is missing).")))
}

fn invalid(message: String) -> ErrorBody {
    ErrorBody { status: 400, kind: "InvalidUserInput", param: None, message }
}

/// `/v1/load_lora_adapter`
pub(super) fn load(shared: &Shared, value: &Value) -> Result<String, ErrorBody> {
    let (name, path) = (text(value, "lora_name")?, text(value, "lora_path")?);
    if !shared.config.lora {
        return Err(invalid("LoRA is not enabled; start with --enable-lora.".into()));
    }
    let mut adapters = shared.adapters.lock();
    let full = adapters.len() >= MAX_ADAPTERS;
    let loaded = adapters.iter_mut().flatten().find(|(known, _)| known == name);
    match loaded {
        Some((_, known)) if value["load_inplace"].as_bool().unwrap_or(false) => *known = path.to_owned(),
        Some(_) => {
            let message = format!(
                "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
                 'load_inplace' to True."
            );
            return Err(invalid(message));
        }
        None if shared.config.names.iter().any(|known| known == name) => {
            return Err(invalid(format!("The lora adapter '{name}' has the name of a base model.")));
        }
        None if full => {
            return Err(invalid(format!("at most {MAX_ADAPTERS} adapters can be loaded in one process.")));
        }
        None => adapters.push(Some((name.to_owned(), path.to_owned()))),
    }
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// `/v1/unload_lora_adapter`
pub(super) fn unload(shared: &Shared, value: &Value) -> Result<String, ErrorBody> {
    let name = value["lora_name"].as_str().unwrap_or_default();
    let mut adapters = shared.adapters.lock();
    let slot = adapters.iter_mut().find(|slot| slot.as_ref().is_some_and(|(known, _)| known == name));
    match slot {
        Some(slot) => *slot = None,
        None => {
            let message = format!("The lora adapter '{name}' cannot be found.");
            return Err(ErrorBody { status: 404, kind: "NotFoundError", param: None, message });
        }
    }
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}
