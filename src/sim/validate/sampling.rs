//! Sampling parameters: vLLM's limits, checked in vLLM's order after the prompt is known.
//!
//! The limits are from `SamplingParams` and the engine of 0.32; messages show numbers in Python's
//! notation. Parameters that only change which tokens are drawn (temperature, top-p) have no
//! effect.

use serde_json::{Map, Value};

use super::pydantic::FieldReader;
use crate::http::error_body::ErrorBody;

/// vLLM's `VLLM_MAX_N_SEQUENCES`.
const MAX_CHOICES: i64 = 16_384;
/// Temperatures below this mean greedy search.
const GREEDY: f64 = 1e-5;
const FORCING_BIAS: f64 = 50.0;

/// A float as Python prints it.
fn python(value: f64) -> String {
    match value {
        _ if value.is_nan() => "nan".to_owned(),
        _ if value.is_infinite() => if value > 0.0 { "inf" } else { "-inf" }.to_owned(),
        _ if value.fract() == 0.0 && value.abs() < 1e16 => format!("{value:.1}"),
        _ => value.to_string(),
    }
}

fn named(param: &str, value: impl std::fmt::Display, message: String) -> Result<(), ErrorBody> {
    Err(ErrorBody::bad_request(Some(param), format!("{message} (parameter={param}, value={value})")))
}

fn check_that(holds: bool, message: impl FnOnce() -> String) -> Result<(), ErrorBody> {
    if holds { Ok(()) } else { Err(ErrorBody::bad_request(None, message())) }
}

/// As [`check_that`], with a message that names the parameter and repeats the value.
fn check_named(param: &str, value: &str, holds: bool, rule: &str) -> Result<(), ErrorBody> {
    if holds { Ok(()) } else { named(param, value, format!("{param} must be {rule}, got {value}.")) }
}

/// Checks the sampling parameters. `limit`: the output limit after it was lowered to the context.
/// The first limit that is broken is reported.
pub(super) fn check(fields: &Map<String, Value>, limit: i64) -> Result<(), ErrorBody> {
    let n = fields.int("n").unwrap_or(1);
    check_that(n >= 1, || format!("n must be at least 1, got {n}."))?;
    check_that(n <= MAX_CHOICES, || {
        format!(
            "n must be at most {MAX_CHOICES}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment \
             variable."
        )
    })?;
    for name in ["presence_penalty", "frequency_penalty"] {
        let penalty = fields.float(name).unwrap_or(0.0);
        let message = || format!("{name} must be in [-2, 2], got {}.", python(penalty));
        check_that((-2.0..=2.0).contains(&penalty), message)?;
    }
    let repetition = fields.float("repetition_penalty").unwrap_or(1.0);
    let wrong = |rule: &str| format!("repetition_penalty must be {rule}, got {}.", python(repetition));
    check_that(repetition.is_finite(), || wrong("a finite number"))?;
    check_that(repetition > 0.0, || wrong("greater than zero"))?;
    let temperature = fields.float("temperature").unwrap_or(1.0);
    let shown = python(temperature);
    check_named("temperature", &shown, temperature.is_finite(), "a finite number")?;
    check_named("temperature", &shown, temperature >= 0.0, "non-negative")?;
    check_named("temperature", &shown, temperature <= 2.0, "in [0, 2]")?;
    let top_p = fields.float("top_p").unwrap_or(1.0);
    check_named("top_p", &python(top_p), top_p > 0.0 && top_p <= 1.0, "in (0, 1]")?;
    let top_k = fields.int("top_k").unwrap_or(0);
    check_that(top_k >= -1, || format!("top_k must be 0 (disable), or at least 1, got {top_k}."))?;
    let min_p = fields.float("min_p").unwrap_or(0.0);
    check_that((0.0..=1.0).contains(&min_p), || format!("min_p must be in [0, 1], got {}.", python(min_p)))?;
    check_named("max_tokens", &limit.to_string(), limit >= 1, "at least 1")?;
    let least = fields.int("min_tokens").unwrap_or(0);
    check_that(least >= 0, || format!("min_tokens must be greater than or equal to 0, got {least}."))?;
    check_that(least <= limit, || {
        format!("min_tokens must be less than or equal to max_tokens={limit}, got {least}.")
    })?;
    let is_whole = stops(fields).iter().all(|stop| !stop.is_empty());
    check_that(is_whole, || "stop cannot contain an empty string.".to_owned())?;
    let is_greedy = temperature < GREEDY && !fields.truth("use_beam_search");
    check_that(n == 1 || !is_greedy, || format!("n must be 1 when using greedy sampling, got {n}."))
}

fn listed(ids: impl Iterator<Item = i64>) -> Option<String> {
    let ids: Vec<i64> = ids.collect();
    (!ids.is_empty()).then(|| format!("{ids:?}"))
}

/// The ids in `logit_bias` with their biases. Python reads ids with spaces around them.
fn biases(fields: &Map<String, Value>) -> impl Iterator<Item = (i64, &Value)> {
    let biases = fields.get("logit_bias").and_then(Value::as_object).into_iter().flatten();
    biases.filter_map(|(key, bias)| Some((key.trim().parse().ok()?, bias)))
}

/// Checks the limits of the engine: numbers of log probabilities, and ids against the vocabulary.
pub(super) fn check_engine(
    fields: &Map<String, Value>,
    sample_logprobs: Option<i64>,
    most_logprobs: i64,
    vocabulary: u32,
) -> Result<(), ErrorBody> {
    // -1 means the whole vocabulary, in a request and in the limit.
    let all = |count: i64| if count == -1 { i64::from(vocabulary) } else { count };
    let most_logprobs = all(most_logprobs);
    let over = |count: Option<i64>| count.map(all).filter(|count| *count > most_logprobs);
    if let Some(count) = over(sample_logprobs) {
        let text = format!("Requested sample logprobs of {count}, which is greater than max allowed: {most_logprobs}");
        named("logprobs", count, text)?;
    }
    if let Some(count) = over(fields.int("prompt_logprobs")) {
        let text = format!("Requested prompt logprobs of {count}, which is greater than max allowed: {most_logprobs}");
        named("prompt_logprobs", count, text)?;
    }
    let is_unknown = |id: &i64| !(0..i64::from(vocabulary)).contains(id);
    if let Some(unknown) = listed(biases(fields).map(|(id, _)| id).filter(is_unknown)) {
        let text = format!(
            "token_id(s) {unknown} in logit_bias contain out-of-vocab token ids. Vocabulary size: {vocabulary}"
        );
        named("logit_bias", &unknown, text)?;
    }
    let Some(allowed) = fields.get("allowed_token_ids").and_then(Value::as_array) else { return Ok(()) };
    if allowed.is_empty() {
        named("allowed_token_ids", "[]", "allowed_token_ids is not None and empty!".to_owned())?;
    }
    if let Some(unknown) = listed(allowed.iter().filter_map(Value::as_i64).filter(is_unknown)) {
        named("allowed_token_ids", &unknown, "allowed_token_ids contains out-of-vocab token id!".to_owned())?;
    }
    Ok(())
}

pub(super) fn check_bias(fields: &Map<String, Value>) -> Result<(), ErrorBody> {
    let keys = fields.get("logit_bias").and_then(Value::as_object);
    let wrong: Vec<String> = keys
        .into_iter()
        .flatten()
        .filter(|(key, _)| key.trim().parse::<i64>().is_err())
        .map(|(key, _)| super::pydantic::repr(key))
        .collect();
    if wrong.is_empty() {
        return Ok(());
    }
    let list = format!("[{}]", wrong.join(", "));
    named(
        "logit_bias",
        &list,
        format!("logit_bias contains key(s) that cannot be converted to integer token IDs: {list}"),
    )
}

pub(super) fn stops(fields: &Map<String, Value>) -> Vec<String> {
    match fields.get("stop") {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(texts)) => texts.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

pub(super) fn ids(fields: &Map<String, Value>, name: &str) -> Vec<u32> {
    let items = fields.get(name).and_then(Value::as_array);
    items.into_iter().flatten().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()).collect()
}

/// The only tokens that the output may have, by `allowed_token_ids` or by a bias that forces
/// tokens; empty means any token.
pub(super) fn forced(fields: &Map<String, Value>) -> Vec<u32> {
    let allowed = ids(fields, "allowed_token_ids");
    let strong = biases(fields).filter(|(_, bias)| bias.as_f64().is_some_and(|bias| bias >= FORCING_BIAS));
    let strong: Vec<u32> = strong.filter_map(|(id, _)| u32::try_from(id).ok()).collect();
    if strong.is_empty() { allowed } else { strong }
}
