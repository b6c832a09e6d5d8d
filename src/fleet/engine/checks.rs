//! Checks between the start of an engine and the first request: golden prompts and warm-up.
//!
//! Golden prompts detect settings with which an engine starts but generates other text. A failed
//! check ends the start, because requests would fail as well. Bounds: [`GOLDEN_TOKENS`] and
//! [`WARM_UP_TOKENS`] per generation.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::client::{base_model, generate, served_models};
use super::context::EngineContext;
use super::lifecycle::StepFailure;
use sluice_config::Address;

/// Tokens of a golden generation: enough to show a difference, few enough to be quick.
const GOLDEN_TOKENS: u32 = 16;
const WARM_UP_TOKENS: u32 = 32;
/// Words of a warm-up prompt: a few hundred tokens, more than a block and less than any context.
const WARM_UP_WORDS: usize = 200;

/// Records the text that an otherwise idle engine generates for the golden prompts.
pub(super) async fn record_golden(context: &EngineContext) {
    let spec = context.spec();
    let mut texts = Vec::new();
    for (model, prompt) in &spec.golden {
        context.set_detail("recording golden prompts");
        match generate(&spec.address, model, prompt, GOLDEN_TOKENS).await {
            Ok(Some(text)) => texts.push((key(model, prompt), text)),
            Ok(None) => {}
            Err(why) => {
                tracing::warn!(backend = %spec.name, model, "the old engine does not generate for a golden prompt: {why}")
            }
        }
    }
    context.state.lock().golden = texts;
}

fn key(model: &str, prompt: &str) -> String {
    format!("{model}: {prompt}")
}

/// Checks that the engine generates, and generates the same text for golden prompts as before.
pub(super) async fn compare_golden(context: &EngineContext) -> Result<(), StepFailure> {
    let spec = context.spec();
    if let Some(model) = base_model(served_models(&spec.address, spec.request_timeout).await?) {
        context.set_detail("generating a first token");
        generate(&spec.address, &model, "hello", 1)
            .await
            .map_err(|why| StepFailure::temporary(format!("it is ready but does not generate: {why}")))?;
    }
    let before = context.state.lock().golden.clone();
    for (model, prompt) in &spec.golden {
        let Some((_, wanted)) = before.iter().find(|(recorded, _)| *recorded == key(model, prompt)) else { continue };
        context.set_detail("comparing golden prompts");
        let generation = generate(&spec.address, model, prompt, GOLDEN_TOKENS);
        let found =
            generation.await.map_err(|why| StepFailure::temporary(format!("golden prompt of '{model}': {why}")))?;
        if found.as_ref() != Some(wanted) {
            let found = found.unwrap_or_default();
            let why = format!(
                "'{model}' generates other text for a golden prompt than before: {found:?} instead of {wanted:?}"
            );
            return Err(StepFailure { why, permanent: true });
        }
    }
    Ok(())
}

/// Runs parallel generations, which bring a fresh engine up to speed.
pub(super) async fn warm_up(context: &EngineContext) -> Result<(), StepFailure> {
    let spec = context.spec();
    let rounds = spec.rules.warm_up;
    if rounds == 0 || context.state.lock().lifecycle.adopted {
        return Ok(());
    }
    let Some(base) = base_model(served_models(&spec.address, spec.request_timeout).await?) else { return Ok(()) };
    context.set_detail(format!("{rounds} generations"));
    generate_at_once(&spec.address, &base, rounds).await
}

/// Warms up an engine that the gateway does not run: one generation, then `rounds` in parallel.
///
/// # Errors
/// The generation that failed.
pub async fn warm_up_external(address: &Arc<Address>, timeout: Duration, rounds: u32) -> Result<(), String> {
    let served = served_models(address, timeout).await.map_err(|failure| failure.why)?;
    let Some(base) = base_model(served) else { return Ok(()) };
    generate(address, &base, "hello", 1).await.map_err(|why| format!("it is ready but does not generate: {why}"))?;
    generate_at_once(address, &base, rounds).await.map_err(|failure| failure.why)
}

async fn generate_at_once(address: &Arc<Address>, base: &str, rounds: u32) -> Result<(), StepFailure> {
    let mut generations = JoinSet::new();
    for round in 0..rounds {
        let (address, base) = (Arc::clone(address), base.to_owned());
        // The prompts begin differently, because a cached prefix would skip the prefill.
        let prompt = format!("{round}{}", " warm".repeat(WARM_UP_WORDS));
        generations.spawn(async move { generate(&address, &base, &prompt, WARM_UP_TOKENS).await });
    }
    while let Some(done) = generations.join_next().await {
        match done {
            Ok(Ok(_)) => {}
            Ok(Err(why)) => return Err(StepFailure::temporary(format!("a warm-up generation failed: {why}"))),
            Err(error) => return Err(StepFailure::temporary(error.to_string())),
        }
    }
    Ok(())
}
