//! The gateway's own requests to engines: served models, running requests, a short generation.
//!
//! These requests bypass admission and metrics. Bounds: [`GENERATION_TIMEOUT`] per generation,
//! [`RESPONSE_BYTES`] per response.

use std::time::Duration;

use serde_json::{Value, json};

use super::context::EngineContext;
use super::lifecycle::StepFailure;
use crate::{fetch, post, scrape};
use sluice_config::Address;

/// Limit of a request that may generate: a fresh engine may compile during the first ones.
pub(super) const GENERATION_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest body that is accepted, bytes.
pub(super) const RESPONSE_BYTES: usize = 8 << 20;

/// Running and waiting requests by the engine's own count; `None` without metrics.
pub(super) async fn running_requests(context: &EngineContext) -> Option<f64> {
    let spec = context.spec();
    let page = scrape(&spec.address, spec.request_timeout).await?;
    Some(page.running + page.waiting)
}

/// A model or adapter that an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServedModel {
    pub(super) name: String,
    pub(super) is_adapter: bool,
    /// The folder or name from which the model was loaded.
    pub(super) root: Option<String>,
}

/// The models and adapters that an engine serves.
/// The list is empty for a kind of engine that lists none.
pub(super) async fn served_models(address: &Address, timeout: Duration) -> Result<Vec<ServedModel>, StepFailure> {
    if !address.engine.rules().lists_models {
        return Ok(Vec::new());
    }
    let response = fetch(address, "/v1/models", timeout, RESPONSE_BYTES).await;
    let (_, body) = response.map_err(|error| StepFailure::temporary(format!("/v1/models: {error}")))?;
    let list: Value =
        serde_json::from_slice(&body).map_err(|error| StepFailure::temporary(format!("/v1/models: {error}")))?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let read = |card: &Value| {
        let (name, root) = (text(&card["id"])?, text(&card["root"]));
        Some(ServedModel { name, is_adapter: !card["parent"].is_null(), root })
    };
    Ok(list["data"].as_array().into_iter().flatten().filter_map(read).collect())
}

/// The first model that is not an adapter.
pub(super) fn base_model(served: Vec<ServedModel>) -> Option<String> {
    served.into_iter().find(|model| !model.is_adapter).map(|model| model.name)
}

/// A greedy completion; `None` if the engine has no completions (it embeds or scores).
pub(super) async fn generate(
    address: &Address,
    model: &str,
    prompt: &str,
    tokens: u32,
) -> Result<Option<String>, String> {
    let body = json!({ "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0 });
    let response = post(address, "/v1/completions", &body, GENERATION_TIMEOUT, RESPONSE_BYTES).await;
    let (status, bytes) = response.map_err(|error| error.to_string())?;
    let json: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    if status.is_success() {
        let text = json["choices"][0]["text"].as_str();
        return text.map(|text| Some(text.to_owned())).ok_or_else(|| "the response has no text".to_owned());
    }
    let no_route = status.as_u16() == 404 && json["detail"] == "Not Found";
    if no_route || error_message(&bytes).contains("does not support Completions") {
        return Ok(None);
    }
    Err(format!("{status}: {}", error_message(&bytes)))
}

pub(super) fn error_message(body: &[u8]) -> String {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let message = json["error"]["message"].as_str().or_else(|| json["message"].as_str());
    message.map_or_else(|| String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned(), str::to_owned)
}
