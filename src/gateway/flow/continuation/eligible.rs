//! Decides from configuration, headers and request whether the answer may be continued.
//!
//! The table in `core/openai/not_continued.rs` has the conditions with their reasons. Conditions on
//! single members of the body were checked when the body was read. The first condition that applies
//! gives the reason.

use super::super::incoming::IncomingRequest;
use sluice_config::Continue;
use sluice_core::engines::EngineKind;
use sluice_core::openai::{NotContinued, RequestView, Route};

/// Whether the answer to the request may be continued, judged before it is sent.
pub(in crate::flow) fn check(
    incoming: &IncomingRequest,
    view: &RequestView<'_>,
    engine: EngineKind,
) -> Result<(), NotContinued> {
    // Only for some kinds of engines it was shown that they continue exactly where a given text
    // ends.
    let is_route =
        matches!(view.route, Route::ChatCompletions | Route::Completions | Route::Messages) && engine.rules().continues;
    let of_key = incoming.key.as_ref().and_then(|key| key.key.on_failure);
    Err(match () {
        () if of_key.unwrap_or(incoming.routing.config.retry.on_failure) == Continue::Off => NotContinued::Off,
        () if !is_route || incoming.copy_for.is_some() => NotContinued::Route,
        () if !view.stream => NotContinued::NotStreamed,
        () if view.sequences() > 1 => NotContinued::Choices,
        () if view.shape.media_parts > 0 || view.shape.has_tensors => NotContinued::Media,
        () if view.shape.token_ids > 0 => NotContinued::TokenIds,
        () if view.echo => NotContinued::Echo,
        () if incoming.no_continue => NotContinued::Header,
        () => return view.not_continued.map_or(Ok(()), Err),
    })
}
