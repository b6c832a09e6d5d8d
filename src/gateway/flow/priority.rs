//! The priority of a request: the number that the client asks for, within the range of the client's
//! key, and the engines that get it.
//!
//! Lower is earlier, as in vLLM. The header `X-Vllm-Priority` wins over `priority` in the body, as
//! in vLLM. The number orders the gateway's queue. Engines that schedule by priority get it in the
//! body, or in the header on the one route where vLLM reads only the header. Other engines get
//! neither: vLLM with `--scheduling-policy fcfs` ignores a priority, or refuses one that is not 0
//! (engine version 0).

use http::HeaderName;
use http::header::HeaderValue;

use super::exchange::UpstreamRequest;
use super::incoming::IncomingRequest;
use super::keys::ApiKey;
use sluice_core::openai::{RequestView, Route};

/// The header that asks for a priority.
pub const PRIORITY: &str = "x-vllm-priority";

#[derive(Clone, Copy, Debug)]
pub(super) struct RequestPriority {
    pub(super) number: i32,
    is_asked: bool,
}

impl RequestPriority {
    pub(super) fn of(incoming: &IncomingRequest, view: &RequestView<'_>) -> Self {
        let asked = incoming.priority.or(view.priority);
        let range =
            incoming.key.as_ref().map_or_else(|| incoming.routing.config.server.priorities(), ApiKey::priorities);
        Self { number: range.of(asked), is_asked: asked.is_some() }
    }

    #[cfg(test)]
    pub(super) fn for_test(number: i32) -> Self {
        Self { number, is_asked: true }
    }

    /// Adds the priority to a request for an engine that schedules by it; removes it from a request
    /// for another engine, because an attempt before may have added it. Without a priority, engines
    /// assume 0.
    pub(super) fn give(self, request: &mut UpstreamRequest, route: Route, by_priority: bool) {
        if self.number == 0 && !self.is_asked {
            return;
        }
        let number = by_priority.then_some(self.number);
        request.body.set_priority(number.filter(|_| route.has_priority()).map(i64::from));
        match number.filter(|_| route == Route::Messages) {
            Some(number) => drop(request.headers.insert(HeaderName::from_static(PRIORITY), HeaderValue::from(number))),
            None => drop(request.headers.remove(PRIORITY)),
        }
    }
}
