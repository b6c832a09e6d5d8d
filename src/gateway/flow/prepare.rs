//! From bytes to a decision: what is asked, by whom, how long it is, and which pools may take it.
//!
//! Everything that can be refused without a backend is refused here, cheapest check first, before
//! anything is counted against a limit. The body is read once, in place; nothing of it is copied.

use std::sync::Arc;

use tokio::time::Instant;

use super::IncomingRequest;
use super::classify::{self, Placement};
use super::keys::{ApiKey, InFlight, KeyError};
use super::record::{RecordGuard, Recorder};
use super::respond::whole_seconds;
use super::routing_table::{ModelRoute, RoutingTable};
use crate::config::UsageInjection;
use crate::config::limits::MAX_TOKENS;
use crate::estimate::{Counted, EstimateSource, ExactCounter, OutputBounds, PromptEstimate};
use crate::experiment::Experiments;
use crate::pool::Need;
use sluice_core::openai::{EditedBody, Edits, Refusal, RequestView, UsageEdit, multipart, request};

/// A request that may ask for a backend.
#[derive(Debug)]
pub(super) struct PreparedRequest {
    pub(super) placement: Placement,
    pub(super) need: Need,
    pub(super) priority: i32,
    pub(super) stream: bool,
    /// The body as it goes upstream.
    pub(super) body: EditedBody,
    /// What was injected, and so must be taken out of the answer.
    pub(super) injected: InjectedUsage,
    /// What the estimate was made of, to learn from the answer.
    pub(super) lesson: Feedback,
    /// Counts against the key's limit while the request lives.
    _in_flight: Option<InFlight>,
}

/// Usage asked for on behalf of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedUsage {
    /// Nothing.
    Nothing,
    /// One usage event at the end.
    Final,
    /// Usage in every event.
    Continuous {
        /// The client asked for the last one itself.
        keep_final: bool,
    },
}

impl Feedback {
    /// Learns from the usage of the finished request.
    pub(super) fn learn(&self, prompt_tokens: u64, completion_tokens: Option<u64>) {
        if !self.usable {
            return;
        }
        let each = completion_tokens.map(|tokens| tokens / u64::from(self.sequences.max(1)));
        self.estimator.learn(&self.shape, prompt_tokens, each);
        if let Some((counter, counted)) = &self.counted {
            counter.learn(counted, prompt_tokens);
        }
    }
}

impl InjectedUsage {
    fn usage(self) -> UsageEdit {
        match self {
            Self::Nothing => UsageEdit::AsSent,
            Self::Final => UsageEdit::AtEnd,
            Self::Continuous { .. } => UsageEdit::InEveryEvent,
        }
    }
}

/// What is needed to learn from the answer.
#[derive(Debug)]
pub(super) struct Feedback {
    pub(super) estimator: Arc<crate::estimate::ModelEstimator>,
    pub(super) shape: sluice_core::openai::PromptShape,
    /// The exact count, if one was made, for the counter to learn its template from.
    pub(super) counted: Option<(Arc<ExactCounter>, Counted)>,
    pub(super) sequences: u32,
    /// The prompt can be learned from: one engine prompt, text only.
    pub(super) usable: bool,
}

/// Opens the gate for a request, or says why not.
pub(super) async fn prepare<R: Recorder>(
    plan: &RoutingTable,
    experiments: &Experiments,
    incoming: &IncomingRequest,
    record: &mut RecordGuard<'_, R>,
) -> Result<PreparedRequest, Refusal> {
    let begun = Instant::now();
    let view = read(incoming)?;
    let name = view.model.as_deref().ok_or(Refusal::NoModel)?;
    let known = plan.model(name);
    let holder = match plan.keys.is_open() {
        true => None,
        false => Some(plan.keys.recognise(incoming.key.as_deref()).map_err(|error| match error {
            KeyError::Missing => Refusal::NoKey,
            KeyError::Unknown => Refusal::BadKey,
        })?),
    };
    record.key = holder.as_ref().map(|holder| holder.name().into());
    let Some((model, alias)) = known else {
        return Err(Refusal::UnknownModel { model: name.to_owned(), valid: valid_names(plan, holder.as_ref()) });
    };
    if holder.as_ref().is_some_and(|holder| !holder.may_use(model.declared)) {
        return Err(Refusal::ModelForbidden { model: name.to_owned() });
    }
    record.model = Some(Arc::clone(&model.name));
    record.stream = view.stream;
    let in_flight = match &holder {
        Some(holder) => Some(
            holder.begin(incoming.arrived).map_err(|over| Refusal::KeyLimit { retry_after: whole_seconds(over.0) })?,
        ),
        None => None,
    };
    let (estimate, counted) = estimate(plan, model, &view, incoming).await;
    record.estimate = Some(estimate);
    let placement = classify::place(plan, model, estimate.tokens)
        .ok_or_else(|| Refusal::UnknownModel { model: name.to_owned(), valid: valid_names(plan, holder.as_ref()) })?;
    let home = &plan.pools[placement.home];
    record.home = Some(Arc::clone(&home.name));
    let arm = experiments.assign();
    record.arm = arm.map(|arm| Arc::clone(&arm.name));
    let rename = arm.and_then(|arm| arm.model.as_deref()).or(alias.then_some(&*model.name));
    let injected = injection(home.usage, &view);
    let body = EditedBody::new(&incoming.body, &view.edits, Edits { model: rename, usage: injected.usage() });
    record.estimate_time = begun.elapsed();
    let sequences = u32::try_from(view.sequences()).unwrap_or(u32::MAX);
    Ok(PreparedRequest {
        placement,
        need: Need {
            slots: sequences,
            // Clients write these numbers: sums over all requests of a backend must stay far from overflow.
            prompt_tokens: estimate.tokens.min(MAX_TOKENS.0),
            output_tokens: expected_output(model, &view).saturating_mul(u64::from(sequences)).min(MAX_TOKENS.0),
        },
        priority: holder.as_ref().map_or(0, |holder| holder.priority()),
        stream: view.stream,
        body,
        injected,
        lesson: Feedback {
            estimator: Arc::clone(&model.estimator),
            usable: incoming.route.generates() && view.prompts == 1 && view.shape.media_parts == 0,
            shape: view.shape,
            counted,
            sequences,
        },
        _in_flight: in_flight,
    })
}

/// The estimate, made exact where that can change a decision.
async fn estimate(
    plan: &RoutingTable,
    model: &ModelRoute,
    view: &RequestView<'_>,
    incoming: &IncomingRequest,
) -> (PromptEstimate, Option<(Arc<ExactCounter>, Counted)>) {
    let estimate = model.estimator.estimate(&view.shape, model.media_part_tokens);
    let Some(counter) = &model.exact else { return (estimate, None) };
    if estimate.source == EstimateSource::Exact
        || !classify::near_boundary(plan, model, estimate.tokens, estimate.spread)
    {
        return (estimate, None);
    }
    match counter.count(incoming.route, incoming.body.clone()).await {
        Some(counted) => (PromptEstimate::exact(counted.total), Some((Arc::clone(counter), counted))),
        None => (estimate, None),
    }
}

/// Usage is asked for when the pool says so, the answer is a stream that can carry it, and the client
/// did not ask itself.
fn injection(usage: UsageInjection, view: &RequestView<'_>) -> InjectedUsage {
    // With several sequences, events that end one come long before the usage event, and could not be
    // given back the bytes that asking for it takes from them (see `meter::strip`).
    if !view.stream || !view.route.has_stream_options() || view.sequences() > 1 {
        return InjectedUsage::Nothing;
    }
    let asked = view.include_usage;
    match usage {
        UsageInjection::Off => InjectedUsage::Nothing,
        UsageInjection::Final if asked => InjectedUsage::Nothing,
        UsageInjection::Final => InjectedUsage::Final,
        UsageInjection::Continuous if asked && view.continuous_usage => InjectedUsage::Nothing,
        UsageInjection::Continuous => InjectedUsage::Continuous { keep_final: asked },
    }
}

/// Output tokens of one sequence, as far as they can be foreseen.
fn expected_output(model: &ModelRoute, view: &RequestView<'_>) -> u64 {
    model.estimator.expect_output(OutputBounds::of(view))
}

fn read(incoming: &IncomingRequest) -> Result<RequestView<'_>, Refusal> {
    let view = match incoming.route.is_multipart() {
        true => multipart::read(incoming.route, &incoming.content_type, &incoming.body)?,
        false => request::read(incoming.route, &incoming.body)?,
    };
    Ok(view)
}

fn valid_names(plan: &RoutingTable, holder: Option<&ApiKey<'_>>) -> Vec<String> {
    plan.names(holder).map(|entry| entry.name.to_string()).collect()
}
