//! From a parsed request to an answer under way: model, admission, output lengths, submission.
//!
//! Output length: exactly `max_tokens` with `ignore_eos`; otherwise drawn from a log-normal distribution with median
//! [`MEDIAN_TOKENS`] and shape [`SHAPE`] (chat answers in public traces look so), from a seed made of the server's
//! seed, the prompt and the choice, and kept within `min_tokens` and `max_tokens`. A drawn end is a `stop`, the limit a
//! `length`. The same prompt gets the same answer on every server with the same seed, whatever else runs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use super::answer::{Answer, Choice};
use super::driver::{Command, Shared, Submission};
use super::engine::Request;
use super::gate::Full;
use super::outlet::Outlet;
use super::protocol::{Generate, Kind, Prompt};
use super::wire::{Envelope, ErrorBody, Finish};
use crate::base::Rng;

/// Median of drawn output lengths, tokens.
const MEDIAN_TOKENS: f64 = 180.0;
/// Standard deviation of the logarithm of drawn output lengths.
const SHAPE: f64 = 0.8;

/// Seconds since 1970, for `created`.
pub(super) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Which adapter a model name means: none for the base model.
///
/// # Errors
/// 404 for an unknown name.
pub(super) fn resolve_model(shared: &Shared, name: Option<&str>) -> Result<(String, Option<u16>), ErrorBody> {
    let names = &shared.config.names;
    let base = names.first().cloned().unwrap_or_default();
    let Some(name) = name else { return Ok((base, None)) };
    if names.iter().any(|known| known == name) {
        return Ok((name.to_owned(), None));
    }
    let adapters = shared.adapters.lock();
    if let Some(id) = adapters.iter().position(|slot| slot.as_ref().is_some_and(|(known, _)| known == name)) {
        return Ok((name.to_owned(), u16::try_from(id).ok()));
    }
    let known: Vec<&str> =
        names.iter().map(String::as_str).chain(adapters.iter().flatten().map(|(name, _)| name.as_str())).collect();
    let message = format!("The model `{name}` does not exist. Valid aliases: {}.", known.join(", "));
    Err(ErrorBody { status: 404, kind: "NotFoundError", param: Some("model".into()), message })
}

/// Starts generating; the answer aborts it when dropped.
///
/// # Errors
/// Unknown model (404), admission limits (503), a dead engine (500).
pub(super) fn start(shared: &Arc<Shared>, request: &Generate, request_id: &str) -> Result<Answer, ErrorBody> {
    let (model, adapter) = resolve_model(shared, request.model.as_deref())?;
    if shared.dead.is_cancelled() {
        return Err(ErrorBody::dead());
    }
    let prompt_tokens: u64 = request.prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum();
    admit(shared, request, prompt_tokens)?;
    let (mut submissions, mut choices, mut ids) = (Vec::new(), Vec::new(), Vec::new());
    for prompt in &request.prompts {
        for sibling in 0..request.n {
            let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
            let seed = prompt.seed ^ shared.config.seed.rotate_left(17) ^ u64::from(sibling).rotate_left(40);
            let (output_tokens, finish) = draw_length(request, prompt, seed, shared.config.max_model_len);
            submissions.push(Submission {
                request: Request { id, prompt_tokens: prompt.tokens, output_tokens, adapter, ..Request::default() },
                finish,
                max_tokens: request.output_limit(prompt, shared.config.max_model_len),
                n: request.n,
            });
            choices.push(Choice::new(seed, prompt.tokens));
            ids.push(id);
        }
    }
    let outlet = Arc::new(Outlet::new(choices.len()));
    let prefix = if request.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let force = shared.config.force_usage && request.stream;
    let envelope = Envelope::new(
        request.kind,
        format!("{prefix}-{request_id}"),
        unix_time(),
        &model,
        request.include_usage || force,
        request.continuous_usage || force,
    );
    let answer = Answer::new(Arc::clone(shared), Arc::clone(&outlet), envelope, ids, choices, prompt_tokens);
    shared.send(Command::Submit(submissions, outlet));
    Ok(answer)
}

/// Passes the gate, or says which limit is reached.
fn admit(shared: &Shared, request: &Generate, prompt_tokens: u64) -> Result<(), ErrorBody> {
    let config = &shared.config;
    let sequences = request.prompts.len() as u64 * u64::from(request.n);
    let tokens = prompt_tokens * u64::from(request.n);
    let entered = shared.gate.lock().enter(sequences, tokens, config.max_queued_requests, config.max_queued_tokens);
    let Err(full) = entered else { return Ok(()) };
    let (reason, why) = match full {
        Full::Requests => (0, "The engine is currently busy and cannot accept new requests."),
        Full::Tokens => (1, "The engine has reached its prefill token backlog limit."),
    };
    shared.stats.lock().rejections[reason] += 1;
    let message = format!("{why} Please try again later or on a different instance.");
    Err(ErrorBody { status: 503, kind: "Service Unavailable", param: None, message })
}

fn draw_length(request: &Generate, prompt: &Prompt, seed: u64, max_model_len: u32) -> (u32, Finish) {
    let most = request.output_limit(prompt, max_model_len);
    if request.ignore_eos {
        return (most, Finish::Length);
    }
    let mut rng = Rng::new(seed);
    let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * rng.unit()).cos();
    let drawn = (MEDIAN_TOKENS * (SHAPE * normal).exp()).round().max(1.0);
    let least = u32::try_from(request.min_tokens.max(1)).unwrap_or(u32::MAX);
    let drawn = (drawn as u32).max(least);
    if drawn < most { (drawn, Finish::Stop) } else { (most, Finish::Length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(body: &str) -> Vec<(u32, Finish)> {
        let request = Generate::parse(Kind::Completion, body.as_bytes(), 8192).unwrap();
        (0..2000).map(|seed| draw_length(&request, &request.prompts[0], seed, 8192)).collect()
    }

    #[test]
    fn ignore_eos_generates_exactly_max_tokens() {
        let drawn = lengths(r#"{"prompt":"x","max_tokens":77,"ignore_eos":true}"#);
        assert!(drawn.iter().all(|drawn| *drawn == (77, Finish::Length)));
    }

    #[test]
    fn drawn_lengths_have_the_documented_median_and_respect_the_limits() {
        let mut drawn = lengths(r#"{"prompt":"x","max_tokens":8000}"#);
        drawn.sort_by_key(|(tokens, _)| *tokens);
        assert!((160..200).contains(&drawn[1000].0), "{}", drawn[1000].0);
        let clamped = lengths(r#"{"prompt":"x","max_tokens":50,"min_tokens":40}"#);
        assert!(clamped.iter().all(|(tokens, _)| (40..=50).contains(tokens)));
    }
}
