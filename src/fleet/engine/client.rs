//! What is asked of a running engine between its start and its first request: what it serves, golden answers, warm-up.
//!
//! Spoken to directly, beside admission: these requests count for nobody. Bounds: one question takes at most
//! [`QUESTION`], an answer is read up to [`ANSWER_BYTES`], a golden answer has [`GOLDEN_TOKENS`] tokens.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::context::EngineContext;
use super::lifecycle::StepFailure;
use crate::{fetch, post};
use sluice_core::vllm::metrics;
use sluice_gateway::pool::Address;

/// For one question to a fresh engine, whose first generations may compile something.
pub(super) const QUESTION: Duration = Duration::from_secs(120);
/// The most that is read of an answer.
pub(super) const ANSWER_BYTES: usize = 8 << 20;
/// Length of a golden answer: long enough to differ, short enough to be quick.
const GOLDEN_TOKENS: u32 = 16;
/// Length of a warm-up generation.
const WARM_UP_TOKENS: u32 = 32;
/// Words of a warm-up prompt: a few hundred tokens, more than one block, less than any context.
const WARM_UP_WORDS: usize = 200;

/// Requests that the engine itself counts as running or waiting; `None` when it does not say.
pub(super) async fn running(context: &EngineContext) -> Option<f64> {
    let spec = context.spec.load_full();
    let (status, page) = fetch(&spec.address, "/metrics", spec.request_timeout, ANSWER_BYTES).await.ok()?;
    let page = metrics::MetricsSnapshot::parse(std::str::from_utf8(&page).ok()?);
    (status.is_success() && page.samples > 0).then_some(page.running + page.waiting)
}

/// Something that it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Served {
    pub(super) name: String,
    /// Whether it is an adapter to something else.
    pub(super) adapter: bool,
    /// Where it was loaded from.
    pub(super) root: Option<String>,
}

/// What it serves.
pub(super) async fn served(address: &Address, timeout: Duration) -> Result<Vec<Served>, StepFailure> {
    let asked = fetch(address, "/v1/models", timeout, ANSWER_BYTES).await;
    let (_, body) = asked.map_err(|error| StepFailure::temporary(format!("/v1/models: {error}")))?;
    let list: Value =
        serde_json::from_slice(&body).map_err(|error| StepFailure::temporary(format!("/v1/models: {error}")))?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let read = |card: &Value| {
        let (name, root) = (text(&card["id"])?, text(&card["root"]));
        Some(Served { name, adapter: !card["parent"].is_null(), root })
    };
    Ok(list["data"].as_array().into_iter().flatten().filter_map(read).collect())
}

/// The first name that is no adapter.
fn base(served: Vec<Served>) -> Option<String> {
    served.into_iter().find(|served| !served.adapter).map(|served| served.name)
}

/// What the engine answers to the golden prompts now, while nothing else runs on it.
pub(super) async fn note_golden(context: &EngineContext) {
    let spec = context.spec.load_full();
    let mut answers = Vec::new();
    for (model, prompt) in &spec.golden {
        context.detail("noting golden answers");
        match generate(&spec.address, model, prompt, GOLDEN_TOKENS).await {
            Ok(Some(answer)) => answers.push((key(model, prompt), answer)),
            Ok(None) => {}
            Err(why) => tracing::warn!(backend = %spec.name, model, "no golden answer from the old engine: {why}"),
        }
    }
    context.state.lock().golden = answers;
}

fn key(model: &str, prompt: &str) -> String {
    format!("{model}: {prompt}")
}

/// Every model answers at all, and golden prompts are answered as before.
pub(super) async fn compare_golden(context: &EngineContext) -> Result<(), StepFailure> {
    let spec = context.spec.load_full();
    if let Some(base) = base(served(&spec.address, spec.request_timeout).await?) {
        context.detail("asking for a first token");
        generate(&spec.address, &base, "hello", 1)
            .await
            .map_err(|why| StepFailure::temporary(format!("it is up but does not answer: {why}")))?;
    }
    let before = context.state.lock().golden.clone();
    for (model, prompt) in &spec.golden {
        let Some((_, wanted)) = before.iter().find(|(asked, _)| *asked == key(model, prompt)) else { continue };
        context.detail("comparing golden answers");
        let answer = generate(&spec.address, model, prompt, GOLDEN_TOKENS);
        let found = answer.await.map_err(|why| StepFailure::temporary(format!("golden prompt of '{model}': {why}")))?;
        if found.as_ref() != Some(wanted) {
            let found = found.unwrap_or_default();
            let why = format!(
                "'{model}' answers a golden prompt in another way than before: {found:?} instead of {wanted:?}"
            );
            return Err(StepFailure { why, permanent: true });
        }
    }
    Ok(())
}

/// Generations beside each other that nobody waits for. What fails here fails under load as well.
pub(super) async fn warm_up(context: &EngineContext) -> Result<(), StepFailure> {
    let spec = context.spec.load_full();
    let rounds = spec.rules.warm_up;
    if rounds == 0 || context.state.lock().adopted {
        return Ok(());
    }
    let Some(base) = base(served(&spec.address, spec.request_timeout).await?) else { return Ok(()) };
    context.detail(format!("{rounds} generations"));
    let mut asking = JoinSet::new();
    for round in 0..rounds {
        let (address, base) = (Arc::clone(&spec.address), base.clone());
        // Different beginnings: a prefix that is cached would warm nothing.
        let prompt = format!("{round}{}", " warm".repeat(WARM_UP_WORDS));
        asking.spawn(async move { generate(&address, &base, &prompt, WARM_UP_TOKENS).await });
    }
    while let Some(done) = asking.join_next().await {
        match done {
            Ok(Ok(_)) => {}
            Ok(Err(why)) => return Err(StepFailure::temporary(format!("a warm-up generation failed: {why}"))),
            Err(error) => return Err(StepFailure::temporary(error.to_string())),
        }
    }
    Ok(())
}

/// A greedy completion; `None` where the engine has no completions (it embeds or scores).
pub(super) async fn generate(
    address: &Address,
    model: &str,
    prompt: &str,
    tokens: u32,
) -> Result<Option<String>, String> {
    let body = json!({ "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0 });
    let asked = post(address, "/v1/completions", &body, QUESTION, ANSWER_BYTES).await;
    let (status, said) = asked.map_err(|error| error.to_string())?;
    let answer: Value = serde_json::from_slice(&said).unwrap_or_default();
    if status.is_success() {
        let text = answer["choices"][0]["text"].as_str();
        return text.map(|text| Some(text.to_owned())).ok_or_else(|| "the answer has no text".to_owned());
    }
    let no_route = status.as_u16() == 404 && answer["detail"] == "Not Found";
    if no_route || message(&said).contains("does not support Completions") {
        return Ok(None);
    }
    Err(format!("{status}: {}", message(&said)))
}

/// What an error says.
pub(super) fn message(body: &[u8]) -> String {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let said = answer["error"]["message"].as_str().or_else(|| answer["message"].as_str());
    said.map_or_else(|| String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned(), str::to_owned)
}
