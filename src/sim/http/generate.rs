//! Starts a generating request: resolves the model, checks the admission limits, plans the output,
//! and submits the sequences.
//!
//! When [`start`] returns, the request is either refused or submitted. Admission limits bound the
//! sequences in flight.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use twox_hash::XxHash3_64;

use crate::engine::{BLOCK_TOKENS, Content, Request};
use crate::http::choice::{Choice, OutputOptions};
use crate::http::error_body::ErrorBody;
use crate::http::response_body::ResponseBody;
use crate::http::response_writer::ResponseWriter;
use crate::real_time::command::{Command, Submission};
use crate::real_time::concurrency_limit::LimitReached;
use crate::real_time::output_collector::OutputCollector;
use crate::real_time::state::ServerState;
use crate::text::planned_output::{self, PlannedOutput};
use crate::unix_time::unix_time;
use crate::validate::{GenerateRequest, Prompt, RequestKind};
use sluice_core::base::Rng;

/// Maximum output tokens of a sequence that enter the prefix cache, for the next turn of a chat.
const CACHED_OUTPUT: u32 = 8192;

/// The model of a request: the name that the response shows, and the adapter (`None` for the base
/// model).
#[derive(Clone, Debug)]
pub(crate) struct ResolvedModel {
    pub(crate) name: String,
    pub(crate) adapter: Option<u16>,
}

/// Finds the model with this name. Without a name, returns the base model.
///
/// # Errors
/// 404 for an unknown name.
pub(crate) fn resolve_model(shared: &ServerState, name: Option<&str>) -> Result<ResolvedModel, ErrorBody> {
    let names = &shared.config.names;
    let base = names.first().cloned().unwrap_or_default();
    let Some(name) = name else { return Ok(ResolvedModel { name: base, adapter: None }) };
    if names.iter().any(|known| known == name) {
        // As in vLLM, the response shows the first served name.
        return Ok(ResolvedModel { name: base, adapter: None });
    }
    let adapters = shared.adapters.lock();
    if let Some(id) = adapters.iter().position(|slot| slot.as_ref().is_some_and(|(known, _)| known == name)) {
        return Ok(ResolvedModel { name: name.to_owned(), adapter: u16::try_from(id).ok() });
    }
    // Names of adapters are valid too, but vLLM lists only names of the base model.
    let message = format!("The model `{name}` does not exist. Valid aliases: {}.", names.join(", "));
    Err(ErrorBody::not_found(Some("model"), message))
}

/// Starts generating. Dropping the returned body aborts the generation.
///
/// # Errors
/// An admission limit (503); an engine that is dead or shuts down (500).
pub(crate) fn start(
    shared: &Arc<ServerState>,
    request: &GenerateRequest,
    model: &ResolvedModel,
    format: ResponseWriter,
) -> Result<ResponseBody, ErrorBody> {
    if shared.dead.is_cancelled() {
        return Err(ErrorBody::dead());
    }
    if shared.draining.load(Ordering::Relaxed) {
        // vLLM's message at this point, from the thread pool that renders prompts.
        let message = "cannot schedule new futures after shutdown".to_owned();
        return Err(ErrorBody { status: 500, kind: "InternalServerError", param: None, message });
    }
    let prompt_tokens: u64 = request.prompts.iter().map(|prompt| u64::from(prompt.tokens())).sum();
    admit(shared, request, prompt_tokens)?;
    let (mut submissions, mut choices, mut ids) = (Vec::new(), Vec::new(), Vec::new());
    let mut counted = 0;
    let (texts, wanted) = (&shared.config.texts, OutputOptions::of(request));
    for (prompt, limit) in request.prompts.iter().zip(&request.limits) {
        for sibling in 0..request.n {
            let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
            let (prompt, output) = planned(shared, request, (prompt, *limit), sibling);
            let prompt = &*prompt;
            counted += if sibling == 0 { u64::from(prompt.tokens()) } else { 0 };
            let finish = output.finish();
            submissions.push(Submission {
                request: Request {
                    id,
                    prompt_tokens: prompt.tokens(),
                    output_tokens: output.tokens,
                    adapter: model.adapter,
                    priority: request.priority,
                    stops: finish == crate::http::wire::Finish::Stop,
                    content: content(prompt, &output),
                    salt: request.cache_salt.as_ref().map_or(0, |salt| XxHash3_64::oneshot(salt.as_bytes()) | 1),
                    text: prompt.tokenized,
                    choice: sibling,
                    skip_cached: request.prompt_logprobs.is_some(),
                    ..Request::default()
                },
                finish,
                max_tokens: *limit,
                n: request.n,
                session: request.session.clone(),
            });
            choices.push(Choice::new(output, prompt.clone(), Arc::clone(texts), wanted.clone()));
            ids.push(id);
        }
    }
    let interval = request.stream_interval.max(shared.config.stream_interval);
    let collector = Arc::new(OutputCollector::new(choices.len(), if request.stream { interval } else { u32::MAX }));
    let Some(rank) = shared.rank(request.rank) else { return Err(ErrorBody::dead()) };
    let engine = (Arc::clone(shared), Arc::clone(rank));
    let body = ResponseBody::new(engine, Arc::clone(&collector), format, ids, choices, counted);
    rank.send(Command::Submit(submissions, collector));
    Ok(body)
}

/// The prompt and the output of one choice. If the prompt ends with the beginning of an output of
/// this server, the output continues from there, and the prompt has the tokens of that output.
fn planned<'a>(
    shared: &ServerState,
    request: &GenerateRequest,
    (prompt, limit): (&'a Prompt, u32),
    choice: u32,
) -> (Cow<'a, Prompt>, PlannedOutput) {
    let (texts, server) = (&shared.config.texts, shared.config.seed);
    let seed = planned_output::seed(server, prompt, choice);
    let found = match (&prompt.continued, &prompt.text) {
        (Some(continued), _) => {
            let seed = planned_output::seed(server, &continued.base, choice);
            let begun = planned_output::begun(&texts.vocabulary, seed, &continued.text);
            begun.map(|begun| (continued.base.clone(), begun, seed))
        }
        (None, Some(text)) if request.kind == RequestKind::Completion && !request.echo => {
            let seed_of = |hash| planned_output::seed(server, &Prompt { seed: hash, ..prompt.clone() }, choice);
            planned_output::begun_within(&texts.vocabulary, text, seed_of).map(|(end, begun)| {
                let base = XxHash3_64::oneshot_with_seed(0, &text.as_bytes()[..end]);
                let ids = texts.vocabulary.encode(&text[..end], request.special_tokens);
                (Prompt { ids: ids.into(), seed: base, ..prompt.clone() }, begun, seed_of(base))
            })
        }
        _ => None,
    };
    let rest = found.and_then(|(base, begun, seed)| {
        // If the prompt ends inside a token of the earlier output, the tokenizer counts that piece
        // as one token.
        let known = begun.tokens + u32::from(begun.part > 0);
        let ids = (0..known).map(|position| texts.vocabulary.draw(seed, position));
        let ids: Arc<[u32]> = base.ids.iter().copied().chain(ids).collect();
        let room = shared.config.max_model_len.saturating_sub(ids.len() as u32);
        let output = PlannedOutput::rest(texts, request, (limit.min(room.max(1)), seed), &begun)?;
        Some((Cow::Owned(Prompt { ids, ..prompt.clone() }), output))
    });
    rest.unwrap_or_else(|| (Cow::Borrowed(prompt), PlannedOutput::new(texts, request, limit, seed)))
}

/// Hashes of the blocks of prompt and output, for the prefix cache.
fn content(prompt: &Prompt, output: &PlannedOutput) -> Content {
    let known = output.tokens.min(CACHED_OUTPUT);
    let output_ids = (0..known).map(|position| output.token(position));
    let mut blocks = Vec::with_capacity((prompt.ids.len() + known as usize) / BLOCK_TOKENS as usize);
    let mut block = Vec::with_capacity(4 * BLOCK_TOKENS as usize);
    for id in prompt.ids.iter().copied().chain(output_ids) {
        block.extend_from_slice(&id.to_le_bytes());
        if block.len() == 4 * BLOCK_TOKENS as usize {
            blocks.push(XxHash3_64::oneshot(&block));
            block.clear();
        }
    }
    Content::Blocks { blocks: blocks.into(), tail: XxHash3_64::oneshot_with_seed(prompt.seed, &block) }
}

fn admit(shared: &ServerState, request: &GenerateRequest, prompt_tokens: u64) -> Result<(), ErrorBody> {
    let config = &shared.config;
    let sequences = request.prompts.len() as u64 * u64::from(request.n);
    let tokens = prompt_tokens * u64::from(request.n);
    let entered =
        shared.concurrency.lock().enter(sequences, tokens, config.max_queued_requests, config.max_queued_tokens);
    let Err(full) = entered else { return Ok(()) };
    let (reason, why) = match full {
        LimitReached::Requests => (0, "The engine is currently busy and cannot accept new requests."),
        LimitReached::Tokens => (1, "The engine has reached its prefill token backlog limit."),
    };
    shared.first().stats.lock().rejections[reason] += 1;
    let message = format!("{why} Please try again later or on a different instance.");
    Err(ErrorBody { status: 503, kind: "Service Unavailable", param: None, message })
}

pub(crate) fn fresh_id(shared: &ServerState) -> String {
    let count = shared.next_id.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}", Rng::new(count ^ unix_time().rotate_left(32) ^ shared.config.seed).next_u64())
}
