//! From a request's bytes to what admission needs: model, prompt estimate, placement, and the body to send.
//!
//! Every refusal that needs no backend happens here, cheapest check first and before the request counts against a
//! limit. The body is read once, in place, and not copied.

use std::sync::Arc;

use tokio::time::Instant;

use super::classify::{self, Placement};
use super::feedback::{ExactCount, Feedback, InjectedUsage};
use super::incoming::IncomingRequest;
use super::keys::{ApiKey, InFlight};
use super::record::{RecordGuard, Recorder};
use super::respond::whole_seconds;
use super::routing_table::{ModelMatch, ModelRoute, RoutingTable};
use crate::config::UsageInjection;
use crate::config::limits::MAX_TOKENS;
use crate::estimate::{EstimateSource, OutputBounds, PromptEstimate};
use crate::experiment::Experiments;
use crate::pool::Need;
use sluice_core::openai::{EditedBody, Edits, Refusal, RequestView, multipart, request};

/// A request that is ready to be admitted.
#[derive(Debug)]
pub(super) struct PreparedRequest {
    pub(super) placement: Placement,
    pub(super) need: Need,
    pub(super) priority: i32,
    pub(super) stream: bool,
    /// The body as it goes upstream.
    pub(super) body: EditedBody,
    pub(super) injected: InjectedUsage,
    pub(super) feedback: Feedback,
    /// Counts against the key's limit while the request lives.
    _in_flight: Option<InFlight>,
}

/// Reads, authorizes, estimates, classifies and assigns a request; an error is the refusal to send.
pub(super) async fn prepare<R: Recorder>(
    experiments: &Experiments,
    incoming: &IncomingRequest,
    record: &mut RecordGuard<'_, R>,
) -> Result<PreparedRequest, Refusal> {
    let begun = Instant::now();
    let (table, key) = (&*incoming.routing, incoming.key.as_ref());
    let view = read(incoming)?;
    let name = view.model.as_deref().ok_or(Refusal::NoModel)?;
    record.key = key.map(|key| Arc::clone(key.name()));
    let model = authorize(table, key, name)?;
    record.model = Some(Arc::clone(&model.route.name));
    record.stream = view.stream;
    let in_flight = start_request(key, incoming.arrived)?;
    let (estimate, exact) = estimate(table, model.route, &view, incoming).await;
    record.estimate = Some(estimate);
    let placement =
        classify::place(table, model.route, estimate.tokens).ok_or_else(|| unknown_model(table, key, name))?;
    let home = &table.pools[placement.home];
    record.home = Some(Arc::clone(&home.name));
    let arm = experiments.assign();
    record.arm = arm.map(|arm| Arc::clone(&arm.name));
    let rename = arm.and_then(|arm| arm.model.as_deref()).or(model.is_alias.then_some(&*model.route.name));
    let injected = injected_usage(home.usage, &view);
    let body = EditedBody::new(&incoming.body, &view.edits, Edits { model: rename, usage: injected.edit() });
    record.estimate_time = begun.elapsed();
    let sequences = u32::try_from(view.sequences()).unwrap_or(u32::MAX);
    Ok(PreparedRequest {
        placement,
        need: need(model.route, &view, estimate, sequences),
        priority: key.map_or(0, ApiKey::priority),
        stream: view.stream,
        body,
        injected,
        feedback: Feedback {
            estimator: Arc::clone(&model.route.estimator),
            usable: incoming.route.generates() && view.prompts == 1 && view.shape.media_parts == 0,
            shape: view.shape,
            exact,
            sequences,
        },
        _in_flight: in_flight,
    })
}

fn read(incoming: &IncomingRequest) -> Result<RequestView<'_>, Refusal> {
    let view = match incoming.route.is_multipart() {
        true => multipart::read(incoming.route, &incoming.content_type, &incoming.body)?,
        false => request::read(incoming.route, &incoming.body)?,
    };
    Ok(view)
}

/// The model of that name, if it exists and the key may use it.
fn authorize<'a>(table: &'a RoutingTable, key: Option<&ApiKey>, name: &str) -> Result<ModelMatch<'a>, Refusal> {
    let model = table.model(name).ok_or_else(|| unknown_model(table, key, name))?;
    if key.is_some_and(|key| !key.may_use(model.route.declared)) {
        return Err(Refusal::ModelForbidden { model: name.to_owned() });
    }
    Ok(model)
}

fn unknown_model(table: &RoutingTable, key: Option<&ApiKey>, name: &str) -> Refusal {
    let valid = table.models_for(key).map(|model| model.name.to_string()).collect();
    Refusal::UnknownModel { model: name.to_owned(), valid }
}

/// Counts the request against the key's limits.
fn start_request(key: Option<&ApiKey>, arrived: Instant) -> Result<Option<InFlight>, Refusal> {
    let started = key.map(|key| key.start_request(arrived)).transpose();
    started.map_err(|exceeded| Refusal::KeyLimit { retry_after: whole_seconds(exceeded.retry_after) })
}

/// The estimate of the prompt's length; an exact count where that can change a decision.
async fn estimate(
    table: &RoutingTable,
    model: &ModelRoute,
    view: &RequestView<'_>,
    incoming: &IncomingRequest,
) -> (PromptEstimate, Option<ExactCount>) {
    let estimate = model.estimator.estimate(&view.shape, model.media_part_tokens);
    let Some(counter) = &model.exact else { return (estimate, None) };
    let is_exact = estimate.source == EstimateSource::Exact;
    if is_exact || !classify::near_boundary(table, model, estimate.tokens, estimate.spread) {
        return (estimate, None);
    }
    match counter.count(incoming.route, incoming.body.clone()).await {
        Some(counted) => {
            let estimate = PromptEstimate::exact(counted.total);
            (estimate, Some(ExactCount { counter: Arc::clone(counter), counted }))
        }
        None => (estimate, None),
    }
}

/// What the request takes of a backend. Clients influence these numbers, so each is bounded: the sum over all requests
/// of a backend must not overflow.
fn need(model: &ModelRoute, view: &RequestView<'_>, estimate: PromptEstimate, sequences: u32) -> Need {
    let output_tokens = model.estimator.expect_output(OutputBounds::of(view));
    Need {
        slots: sequences,
        prompt_tokens: estimate.tokens.min(MAX_TOKENS.0),
        output_tokens: output_tokens.saturating_mul(u64::from(sequences)).min(MAX_TOKENS.0),
    }
}

/// Usage is injected if the pool is configured so, the response is a stream that can carry it, and the client did not
/// request it itself.
fn injected_usage(configured: UsageInjection, view: &RequestView<'_>) -> InjectedUsage {
    // With several sequences, the events that end one precede the usage event by far; the bytes that requesting usage
    // changes in them could not be restored (see `meter::strip`).
    if !view.stream || !view.route.has_stream_options() || view.sequences() > 1 {
        return InjectedUsage::Nothing;
    }
    let requested = view.include_usage;
    match configured {
        UsageInjection::Off => InjectedUsage::Nothing,
        UsageInjection::Final if requested => InjectedUsage::Nothing,
        UsageInjection::Final => InjectedUsage::Final,
        UsageInjection::Continuous if requested && view.continuous_usage => InjectedUsage::Nothing,
        UsageInjection::Continuous => InjectedUsage::Continuous { keep_final: requested },
    }
}
