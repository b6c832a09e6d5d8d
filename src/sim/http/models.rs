//! The models that a server serves: `/v1/models`, and LoRA adapters loaded at run time (needs
//! `--enable-lora`).
//!
//! If the model is only a name, an adapter may have any path. If the model is a folder, the
//! adapter's `adapter_config.json` is checked as in vLLM. The engine loads a new adapter at once,
//! so the adapter's first request does not wait. Requests that use an adapter continue when it is
//! unloaded. Ids are not reused: a process loads at most [`MAX_ADAPTERS`] adapters, including
//! unloaded ones.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::validate::pydantic::{self, Field, FieldReader, ValidationErrors};
use crate::validate::{json as body_json, schema};

use crate::http::error_body::ErrorBody;
use crate::process::config::MAX_ADAPTERS;
use crate::process::model_folder::{ADAPTER_CONFIG, check_adapter};
use crate::real_time::command::Control;
use crate::real_time::state::ServerState;
use crate::unix_time::unix_time;
use sluice_core::base::Rng;

/// The body of `/v1/models`, in vLLM's key order.
pub(crate) fn list(shared: &ServerState) -> String {
    let config = &shared.config;
    let (created, permission) = (unix_time(), Rng::new(config.seed).next_u64());
    let base = config.names.first();
    let owner = if config.sglang.is_some() { "sglang" } else { "vllm" };
    let card = |id: &str, root: &str, parent: Option<&String>, longest: Option<u32>| {
        format!(
            "{{\"id\":{},\"object\":\"model\",\"created\":{created},\"owned_by\":\"{owner}\",\"root\":{},\"parent\":{},\
             \"max_model_len\":{},\"permission\":[{{\"id\":\"modelperm-{permission:016x}\",\"object\":\"model_permission\",\
             \"created\":{created},\"allow_create_engine\":false,\"allow_sampling\":true,\"allow_logprobs\":true,\
             \"allow_search_indices\":false,\"allow_view\":true,\"allow_fine_tuning\":false,\"organization\":\"*\",\
             \"group\":null,\"is_blocking\":false}}]}}",
            json!(id),
            json!(root),
            json!(parent),
            json!(longest)
        )
    };
    let adapters = shared.adapters.lock();
    let names = config.names.iter().map(|name| card(name, &config.root, None, Some(config.max_model_len)));
    let loaded = adapters.iter().flatten().map(|(name, path)| card(name, path, base, None));
    let cards: Vec<String> = names.chain(loaded).collect();
    format!("{{\"object\":\"list\",\"data\":[{}]}}", cards.join(","))
}

fn invalid(message: String) -> ErrorBody {
    ErrorBody { status: 400, kind: "InvalidUserInput", param: None, message }
}

fn checked(bytes: &[u8], schema: &[Field]) -> Result<Map<String, Value>, ErrorBody> {
    let fields = body_json::object(bytes)?;
    let mut problems = ValidationErrors::default();
    pydantic::check(schema, &fields, &mut problems);
    if problems.is_empty() { Ok(fields) } else { Err(problems.refusal()) }
}

/// `/v1/load_lora_adapter`: the reply comes when the engine has loaded the adapter.
pub(crate) async fn load(shared: &ServerState, bytes: &[u8]) -> Result<String, ErrorBody> {
    let (id, name) = register(shared, bytes)?;
    shared.control(Control::LoadAdapter(id)).await.ok_or_else(ErrorBody::dead)?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// Adds an adapter to the list; returns its id and its name.
fn register(shared: &ServerState, bytes: &[u8]) -> Result<(u16, String), ErrorBody> {
    let fields = checked(bytes, schema::LOAD_ADAPTER)?;
    let text = |name: &str| fields.text(name).unwrap_or_default();
    let (name, path) = (text("lora_name"), text("lora_path"));
    if name.is_empty() || path.is_empty() {
        return Err(invalid("Both 'lora_name' and 'lora_path' must be provided.".into()));
    }
    if shared.config.names.iter().any(|known| known == name) {
        return Err(invalid(format!("The lora adapter '{name}' conflicts with a served base model.")));
    }
    let mut adapters = shared.adapters.lock();
    let loaded = adapters.iter().position(|slot| slot.as_ref().is_some_and(|(known, _)| known == name));
    if loaded.is_some() && !fields.truth("load_inplace") {
        let message = format!(
            "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
             'load_inplace' to True."
        );
        return Err(invalid(message));
    }
    if !shared.config.lora {
        let message = "Call to add_lora method failed: Worker failed with error 'LoRA is not enabled. Use --enable-lora to \
                       enable LoRA.', please check the stack trace above for the root cause";
        return Err(engine_error(message.to_owned()));
    }
    // If the model is only a name, the adapter may be only a name too; but an adapter folder that
    // exists must be valid.
    if (shared.config.on_disk || Path::new(path).join(ADAPTER_CONFIG).exists())
        && let Err(message) = check_adapter(name, path, shared.config.max_lora_rank)
    {
        let missing = message.contains("No adapter found");
        return Err(if missing { ErrorBody::not_found(None, message) } else { engine_error(message) });
    }
    let at = loaded.unwrap_or(adapters.len());
    if at >= MAX_ADAPTERS {
        return Err(invalid(format!("at most {MAX_ADAPTERS} adapters can be loaded in one process.")));
    }
    let adapter = Some((name.to_owned(), path.to_owned()));
    match adapters.get_mut(at) {
        Some(slot) => *slot = adapter,
        None => adapters.push(adapter),
    }
    Ok((at as u16, name.to_owned()))
}

fn engine_error(message: String) -> ErrorBody {
    ErrorBody { status: 500, kind: "InternalServerError", param: None, message }
}

pub(crate) fn unload(shared: &ServerState, bytes: &[u8]) -> Result<String, ErrorBody> {
    let fields = checked(bytes, schema::UNLOAD_ADAPTER)?;
    let name = fields.text("lora_name").unwrap_or_default();
    if name.is_empty() {
        return Err(invalid("'lora_name' needs to be provided to unload a LoRA adapter.".into()));
    }
    remove(shared, name)?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

pub(crate) fn remove(shared: &ServerState, name: &str) -> Result<(), ErrorBody> {
    let mut adapters = shared.adapters.lock();
    let slot = adapters.iter_mut().find(|slot| slot.as_ref().is_some_and(|(known, _)| known == name));
    let Some(slot) = slot else {
        return Err(ErrorBody::not_found(None, format!("The lora adapter '{name}' cannot be found.")));
    };
    *slot = None;
    Ok(())
}
