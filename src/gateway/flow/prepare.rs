//! Turns the bytes of a request into the input of admission: model, prompt estimate, placement, and
//! the body to send.
//!
//! Every refusal that needs no backend happens here, cheapest check first. A request that cannot be
//! read, or whose model the key may not use, does not count against the key's limits. The body is
//! read once, in place, and not copied.

use std::sync::Arc;

use http::header::CONTENT_TYPE;
use tokio::time::Instant;

use super::assign::{self, ArmTarget};
use super::classes::Kind;
use super::classify::{self, PlacedRequest, Placement};
use super::continuation;
use super::feedback::{ExactCount, Feedback, InjectedUsage};
use super::incoming::IncomingRequest;
use super::job;
use super::keys::{ApiKey, InFlight, KeyLimitExceeded, KeyNeedError};
use super::owner::owner;
use super::priority::RequestPriority;
use super::record::{RecordGuard, Recorder, client_text};
use super::request_bounds::RequestBounds;
use super::respond::whole_seconds;
use super::response_owners::{self, ResponseOwner, ResponseOwners};
use super::routing_table::{ModelMatch, ModelRoute, RoutingTable};
use crate::estimate::{ClientId, EstimateSource, OutputBounds, Prompt, PromptEstimate};
use crate::pool::{Admission, AdmissionRequest, Asks, ModelKey, Need};
use sluice_config::UsageInjection;
use sluice_config::limits::MAX_TOKENS;
use sluice_core::engines::EngineKind;
use sluice_core::openai::{
    EditedBody, Edits, NotContinued, PromptPrefix, Refusal, RequestView, Route, RouteHint, kserve, multipart, request,
};

#[derive(Debug)]
pub(super) struct PreparedRequest {
    pub(super) placed: PlacedRequest,
    /// The model name that is sent without an experiment.
    pub(super) own_model: ModelKey,
    pub(super) priority: RequestPriority,
    pub(super) stream: bool,
    pub(super) prompts: u32,
    pub(super) body: EditedBody,
    /// The path to send, if it names another model than the client's path.
    pub(super) path: Option<String>,
    /// The body to send without the experiment, if the arm sends another model name.
    pub(super) body_without_arm: Option<EditedBody>,
    /// The experiment's arm, if it serves the request differently from requests without the
    /// experiment.
    pub(super) arm: Option<ArmTarget>,
    pub(super) injected: InjectedUsage,
    /// Whether the client requested the usage event.
    pub(super) include_usage: bool,
    /// Whether another engine may continue the answer, and if not, why.
    pub(super) continuation: Result<(), NotContinued>,
    pub(super) feedback: Feedback,
}

/// Reads, authorizes, estimates, classifies and assigns a request. An error is the refusal to send.
pub(super) async fn prepare<R: Recorder>(
    (owners, admission): (&ResponseOwners, &Admission),
    incoming: &IncomingRequest,
    record: &mut RecordGuard<'_, R>,
) -> Result<PreparedRequest, Refusal> {
    let (begun, table, key) = (Instant::now(), &*incoming.routing, incoming.key.as_ref());
    record.key = key.map(|key| Arc::clone(key.name()));
    let view = read(incoming)?;
    let name = view.model.as_deref().or_else(|| only_model(table, key)).ok_or(Refusal::NoModel)?;
    let model = authorize(table, key, name).inspect_err(|_| record.refused_model = Some(client_text(name)))?;
    record.model = Some(Arc::clone(&model.route.name));
    record.stream = view.stream;
    // A copy does not count, because the original counts against the limits of the client's key.
    record.start_in_flight(start_request(key.filter(|_| incoming.copy_for.is_none()), incoming.arrived)?);
    let client = key.map_or(ClientId::of_network(incoming.origin), |key| ClientId::of_key(key.name()));
    let prompt = Prompt { shape: view.shape, media_part_tokens: model.route.media_part_tokens, client };
    let (estimate, exact) = estimate(table, model.route, &prompt, incoming).await;
    owners.check_new(view.response_id.as_deref(), key)?;
    let continued = response_owners::continued(owners, admission, view.previous_response.as_deref(), key)?;
    // The engine puts the whole stored conversation into the prompt.
    let estimate = estimate.behind(continued.as_ref().map_or(0, |owner| owner.tokens));
    record.estimate = Some(estimate);
    let placement = place(table, model.route, (incoming.route, estimate.tokens), continued.as_ref())
        .map_err(|lacking| lacking.unwrap_or_else(|| unknown_model(table, key, name)))?;
    let limits = [classify::tokens_limit(table, &placement), key.and_then(ApiKey::tokens_limit)];
    let need =
        need(model.route, &view, (prompt.client, estimate), sequences(&view), limits.into_iter().flatten().min());
    record.sequences = need.slots;
    if let Some(in_flight) = record.in_flight() {
        in_flight.take(&need, permitted_output(&view), incoming.arrived).map_err(|error| key_refusal(key, error))?;
    }
    let own_name = (model.is_alias || view.model.is_none()).then_some(&*model.route.name);
    record.set_class(&table.classes, kind(model.route, incoming, estimate.tokens));
    // No arm serves a continued response, which one backend has stored, or a job.
    let assign = || assign::assign(incoming, &view, model.route, placement.home, record);
    let assigned = (continued.is_none() && incoming.route.may_be_in_an_arm()).then(assign).flatten();
    let pinned = assigned.as_ref().is_some_and(|assigned| assigned.arm().pool.is_some());
    let target = assigned.and_then(|assigned| ArmTarget::of(&assigned, table, estimate.tokens));
    let (arm, placement) = target.map_or((None, placement), |(arm, placement)| (Some(arm), placement));
    let home = &table.pools[placement.home];
    record.set_home(home);
    let arm_name = arm.as_ref().and_then(|arm| arm.model.as_deref());
    let model_of = |name: &str| table.model(name).map(|found| found.route);
    let own_model = ModelKey::of(own_name.unwrap_or(name));
    let prefix = Arc::new(PromptPrefix::new(&incoming.body, &view.prompt_parts, arm_name.unwrap_or(&model.route.name)));
    record.prefix = Some(Arc::clone(&prefix));
    let priority = RequestPriority::of(incoming, &view);
    let request = AdmissionRequest {
        spill: placement.spill,
        priority: priority.number,
        fair: owner(&home.fair, incoming, &view),
        prefix,
        adapter: arm_name.map_or(Some(model.route), model_of).and_then(|route| route.adapter),
        asks: asks(incoming, &view, arm_name.map_or(own_model, ModelKey::of), estimate.tokens),
        avoid: arm.as_ref().map(|arm| arm.others.clone()).unwrap_or_default(),
        only: continued.map(|owner| owner.backend),
        pinned,
        ..AdmissionRequest::new(table.layout, home.id, need, incoming.arrived)
    };
    let injected = injected_usage(home.usage, &view);
    let body_for = |name: Option<&str>| edited(incoming, &view, name, injected);
    let (body, body_without_arm) = (body_for(arm_name.or(own_name)), arm_name.map(|_| body_for(own_name)));
    record.estimate_time = begun.elapsed();
    Ok(PreparedRequest {
        placed: PlacedRequest { table: Arc::clone(&incoming.routing), home: placement.home, request },
        own_model,
        priority,
        stream: view.stream,
        prompts: view.prompts,
        body,
        path: own_name.and_then(|name| path_for(incoming, name)),
        body_without_arm,
        arm,
        injected,
        include_usage: view.include_usage,
        continuation: continuation::check(incoming, &view, home.engine),
        feedback: feedback(incoming, &view, model.route, prompt, exact, estimate.tokens),
    })
}

fn edited(
    incoming: &IncomingRequest,
    view: &RequestView<'_>,
    model: Option<&str>,
    injected: InjectedUsage,
) -> EditedBody {
    let model = model.filter(|_| !incoming.route.is_opaque());
    EditedBody::new(&incoming.body, &view.edits, Edits { model, usage: injected.edit() })
}

/// The path to send for the model `name`, if the path names the model.
fn path_for(incoming: &IncomingRequest, name: &str) -> Option<String> {
    kserve::with_model(&incoming.path, name).filter(|_| incoming.route.is_kserve())
}

fn kind(model: &ModelRoute, incoming: &IncomingRequest, tokens: u64) -> Kind {
    Kind { tokens, adapter: model.adapter.is_some(), generates: incoming.route.generates() }
}

/// The model, route and length that the request asks of an engine; `model` is the name that is
/// sent.
fn asks(incoming: &IncomingRequest, view: &RequestView<'_>, model: ModelKey, tokens: u64) -> Asks {
    // The engine gets the path as the client sent it. An engine may lack `/invocations` or another
    // spelling of a route, and still have the route.
    let path = incoming.path.split('?').next();
    Asks {
        model: Some(model),
        // Engines' lists of routes have no WebSockets.
        route: Some(incoming.route).filter(|route| route.path() == path && !route.is_tunnel()),
        prompt_tokens: view.shape.longest_prompt(tokens, view.prompts),
        output_tokens: view.max_output.unwrap_or(0),
        ..Asks::default()
    }
}

/// Prepares the feedback from the response. Nothing is learned from the response to a copy.
fn feedback(
    incoming: &IncomingRequest,
    view: &RequestView<'_>,
    model: &ModelRoute,
    prompt: Prompt,
    exact: Option<ExactCount>,
    tokens: u64,
) -> Feedback {
    let is_copy = incoming.copy_for.is_some();
    // The length of a stored conversation says nothing about the client's estimates.
    let is_placed = is_copy || view.previous_response.is_some();
    let boundary = if is_placed { u64::MAX } else { classify::next_boundary(&incoming.routing, model, tokens) };
    Feedback {
        estimator: Arc::clone(&model.estimator),
        comparable: !is_copy
            && incoming.route.generates()
            && !incoming.route.is_job()
            && view.prompts == 1
            && view.shape.media_parts == 0
            && !view.shape.has_tensors
            && view.usage_measures_shape,
        boundary,
        prompt,
        exact,
        sequences: sequences(view),
        bounds: RequestBounds::new(view, incoming.body.len(), prompt.at_most()),
    }
}

/// The most output tokens of all sequences together, if the request bounds them.
fn permitted_output(view: &RequestView<'_>) -> Option<u64> {
    view.output_bound().map(|most| most.max(view.min_tokens).saturating_mul(view.sequences()))
}

fn sequences(view: &RequestView<'_>) -> u32 {
    u32::try_from(view.sequences()).unwrap_or(u32::MAX)
}

/// The pools for the prompt's length. A request that continues a stored response has only the pool
/// of the backend that stores it. An error is the refusal if the engines of the pool lack the
/// route, and `None` if no pool serves the model.
fn place(
    table: &RoutingTable,
    model: &ModelRoute,
    (route, tokens): (Route, u64),
    continued: Option<&ResponseOwner>,
) -> Result<Placement, Option<Refusal>> {
    let placement = match continued {
        None => classify::place(table, model, tokens),
        Some(owner) => classify::place_in(table, model, &owner.pool),
    };
    let mut placement = placement.ok_or(None)?;
    let lacks = |engine: EngineKind| Refusal::UnknownRoute { hint: Some(RouteHint::Engine(engine.label())) };
    classify::keep_serving(table, &mut placement, route).map_err(lacks)?;
    Ok(placement)
}

fn read(incoming: &IncomingRequest) -> Result<RequestView<'_>, Refusal> {
    if incoming.headers.get_all(CONTENT_TYPE).iter().nth(1).is_some() {
        let message = "Content-Type was sent twice; send it once".to_owned();
        return Err(Refusal::BadRequest { message, param: None });
    }
    if incoming.route.is_opaque() {
        return Ok(job::opaque(incoming));
    }
    if incoming.route.is_tunnel() {
        return Ok(job::tunnel(incoming));
    }
    let is_form = incoming.route.makes_media() && incoming.content_type.starts_with("multipart/form-data");
    let view = match incoming.route.is_multipart() || is_form {
        true => multipart::read(incoming.route, &incoming.content_type, &incoming.body)?,
        false => request::read(incoming.route, &incoming.body)?,
    };
    // In the background, the engine would generate after the exchange has ended: outside all
    // limits, without measurements, and without a way to abort.
    if view.background {
        let message = "'background' is not supported; leave it out and read the response, streamed if it takes long";
        return Err(Refusal::BadRequest { message: message.to_owned(), param: Some("background") });
    }
    Ok(view)
}

/// The model of a request that names none: the only model that the client may use. It is added to
/// the request, because vLLM would use the base model, which may not be allowed for the client.
fn only_model<'a>(table: &'a RoutingTable, key: Option<&ApiKey>) -> Option<&'a str> {
    let mut models = table.models_for(key);
    models.next().filter(|_| models.next().is_none()).map(|model| &*model.name)
}

/// The model named `name`, if it exists and the key may use it.
fn authorize<'a>(table: &'a RoutingTable, key: Option<&ApiKey>, name: &str) -> Result<ModelMatch<'a>, Refusal> {
    let model = table.model(name).ok_or_else(|| unknown_model(table, key, name))?;
    if key.is_some_and(|key| !key.may_use(model.route.declared)) {
        return Err(Refusal::ModelForbidden { model: name.to_owned() });
    }
    Ok(model)
}

pub(super) fn unknown_model(table: &RoutingTable, key: Option<&ApiKey>, name: &str) -> Refusal {
    let valid = table.models_for(key).map(|model| model.name.to_string()).collect();
    Refusal::UnknownModel { model: name.to_owned(), valid }
}

pub(super) fn start_request(key: Option<&ApiKey>, arrived: Instant) -> Result<Option<InFlight>, Refusal> {
    let started = key.map(|key| key.start_request(arrived)).transpose();
    started.map_err(|exceeded| key_refusal(key, KeyNeedError::Exceeded(exceeded)))
}

fn key_refusal(key: Option<&ApiKey>, error: KeyNeedError) -> Refusal {
    match error {
        KeyNeedError::Exceeded(KeyLimitExceeded { limit, retry_after }) => {
            let key = key.map(|key| key.name().to_string()).unwrap_or_default();
            Refusal::KeyLimit { key, limit, retry_after: whole_seconds(retry_after) }
        }
        KeyNeedError::TooLarge(limit) => Refusal::ExceedsKey(limit),
    }
}

/// Estimates the prompt's length. The prompt is counted exactly if that can change the pool or the
/// need for a permit, that is, if a boundary lies above the estimate less its spread and not above
/// the most tokens that the bytes allow.
async fn estimate(
    table: &RoutingTable,
    model: &ModelRoute,
    prompt: &Prompt,
    incoming: &IncomingRequest,
) -> (PromptEstimate, Option<ExactCount>) {
    if let Some(cost) = job::cost(table, model, incoming) {
        return (PromptEstimate::exact(cost), None);
    }
    let estimate = model.estimator.estimate(prompt, incoming.arrived);
    let Some(counter) = &model.exact else { return (estimate, None) };
    let low = estimate.tokens.saturating_sub((estimate.tokens as f64 * estimate.spread) as u64);
    let is_exact = estimate.source == EstimateSource::Exact;
    if is_exact || !classify::boundary_between(table, model, low, prompt.at_most()) {
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

/// If an estimate exceeds a limit, the prompt is assumed to be shorter by up to this many standard
/// deviations (about 2 % of prompts are shorter still).
const DEVIATIONS: f64 = 2.0;

/// The capacity that the request needs on a backend. Clients influence these numbers, so each is
/// bounded: the sum over all requests of a backend must not overflow.
///
/// `limit` is the most tokens that one request may take. Only tokens that are certain may exceed
/// it: the shortest likely prompt, and the output that the client demands (`min_tokens`). So no
/// request is refused because its estimate is uncertain, or for a long response that it did not
/// demand.
fn need(
    model: &ModelRoute,
    view: &RequestView<'_>,
    (client, estimate): (ClientId, PromptEstimate),
    sequences: u32,
    limit: Option<u64>,
) -> Need {
    let (bounds, limit) = (OutputBounds::of(view), limit.unwrap_or(u64::MAX));
    let of_all = |tokens: u64| tokens.saturating_mul(sequences.into()).min(MAX_TOKENS.0);
    let demanded = of_all(bounds.min.min(bounds.max.unwrap_or(u64::MAX)));
    let expected = match view.route.is_job() || view.route.is_tunnel() {
        true => 0,
        false => of_all(model.estimator.expect_output(client, bounds)),
    };
    let estimated = estimate.tokens.min(MAX_TOKENS.0);
    let certain = (estimated as f64 / (1.0 + DEVIATIONS * estimate.spread.max(0.0))) as u64;
    let prompt_tokens = estimated.min(limit.saturating_sub(demanded)).max(certain);
    let output_tokens = expected.min(limit.saturating_sub(prompt_tokens)).max(demanded);
    Need { slots: sequences, prompt_tokens, output_tokens }
}

/// The gateway requests usage if the pool is configured for it, the response is a stream that can
/// carry usage, and the client did not request the same.
fn injected_usage(configured: UsageInjection, view: &RequestView<'_>) -> InjectedUsage {
    // A request for usage changes the bytes of the event that ends a sequence. To restore them, the
    // gateway holds that event until the usage event arrives, which may be much later for several
    // sequences (see `meter::strip`).
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
