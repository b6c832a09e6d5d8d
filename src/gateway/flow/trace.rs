//! The trace that a request belongs to, and the data for spans that is not in the record.
//!
//! Sampling is decided before the request is sent, because the engine learns of it: the
//! `traceparent` of a sampled request names the span of the attempt, so the engine's span lies
//! below it. Otherwise the client's headers are passed on unchanged. Spans are built from the
//! finished record (`telemetry/otlp`); this file only notes the times of each wait and each
//! attempt.
//!
//! Bounds: [`STEPS_MAX`] steps. A request without a trace costs nothing.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use smallvec::SmallVec;

use sluice_core::base::{Rng, TraceParent};

/// Header with the trace, the sender's span, and whether the trace is sampled.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Header with data that tracing systems add. Passed on unchanged.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The most steps that are noted: enough for a wait and a delivery of each attempt. A request has
/// at most 8 attempts of `retry.attempts`, 8 moves, 2 continuations, and one attempt after a fall
/// back from an arm.
pub const STEPS_MAX: usize = 40;

/// The trace of a request.
#[derive(Clone, Debug)]
pub struct RequestTrace {
    /// The context that the client sent, or a new one if the trace begins with this request.
    context: TraceParent,
    from_client: bool,
    steps: SmallVec<[Step; 3]>,
}

/// One step of a request, which lasts until the next step or the end.
#[derive(Clone, Debug)]
pub struct Step {
    /// When the step began, since the request was received.
    pub begun: Duration,
    /// The kind of step.
    pub kind: StepKind,
}

/// A kind of step.
#[derive(Clone, Debug)]
pub enum StepKind {
    /// Waiting for a lease.
    Queue,
    /// A delivery to a backend, under an attempt id.
    Attempt {
        /// The attempt's number, from 1.
        number: u32,
        /// The pool of the backend.
        pool: Arc<str>,
        /// The backend.
        backend: Arc<str>,
        /// When the request had been sent, since it was received.
        sent: Option<Duration>,
    },
}

impl RequestTrace {
    /// The trace of a request with these headers. `share`: the share of new traces that is sampled,
    /// 0 to 1; `None`: tracing is off.
    pub fn of(headers: &HeaderMap, share: Option<f64>, random: impl FnOnce() -> Rng) -> Option<Box<Self>> {
        let mut sent = headers.get_all(TRACEPARENT).iter();
        let first = sent.next().filter(|_| sent.next().is_none());
        let client = first.and_then(|value| value.to_str().ok()?.parse::<TraceParent>().ok());
        let Some(context) = client else {
            let context = TraceParent::begin(share?, &mut random())?;
            return Some(Box::new(Self { context, from_client: false, steps: SmallVec::new() }));
        };
        // A gateway without tracing has no spans, so it must not announce any.
        let context = if share.is_some() { context } else { context.without_sampling() };
        Some(Box::new(Self { context, from_client: true, steps: SmallVec::new() }))
    }

    /// Id of the trace.
    pub fn id(&self) -> u128 {
        self.context.trace
    }

    /// Whether the request has spans.
    pub fn is_sampled(&self) -> bool {
        self.context.is_sampled()
    }

    /// The context of the span of this request.
    pub fn own(&self) -> TraceParent {
        if self.from_client { self.context.child(0) } else { self.context }
    }

    /// The client's span; `None` if the client sent no trace.
    pub fn parent(&self) -> Option<u64> {
        self.from_client.then_some(self.context.span)
    }

    /// The context of a delivery.
    pub fn attempt(&self, number: u32) -> TraceParent {
        self.own().child(number.into())
    }

    /// The steps in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    pub(crate) fn step(&mut self, begun: Duration, kind: StepKind) {
        if self.is_sampled() && self.steps.len() < STEPS_MAX {
            self.steps.push(Step { begun, kind });
        }
    }

    pub(super) fn sent(&mut self, at: Duration) {
        if let Some(Step { kind: StepKind::Attempt { sent, .. }, .. }) = self.steps.last_mut() {
            *sent = Some(at);
        }
    }

    /// Gives the engine the span of a delivery. If the trace is not sampled, the client's headers
    /// stay.
    pub(super) fn announce(&self, number: u32, headers: &mut HeaderMap) {
        let value = self.is_sampled().then(|| HeaderValue::try_from(self.attempt(number).to_string()));
        let Some(Ok(value)) = value else { return };
        headers.insert(TRACEPARENT, value);
        if !self.from_client {
            // `tracestate` belongs to the header that was replaced.
            headers.remove(TRACESTATE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn of(sent: &[&'static str], share: Option<f64>) -> (Option<Box<RequestTrace>>, HeaderMap) {
        let mut headers = HeaderMap::new();
        sent.iter().for_each(|value| _ = headers.append(TRACEPARENT, HeaderValue::from_static(value)));
        headers.insert(TRACESTATE, HeaderValue::from_static("vendor=1"));
        (RequestTrace::of(&headers, share, || Rng::new(1)), headers)
    }

    /// The headers that the engine gets with a delivery.
    fn announced(trace: &RequestTrace, number: u32, sent: &HeaderMap) -> (String, bool) {
        let mut headers = sent.clone();
        trace.announce(number, &mut headers);
        (headers[TRACEPARENT].to_str().unwrap().to_owned(), headers.contains_key(TRACESTATE))
    }

    #[test]
    fn the_decision_of_the_client_is_followed() {
        let (trace, headers) = of(&[SAMPLED], Some(0.0));
        let trace = trace.unwrap();
        assert!(trace.is_sampled());
        assert_eq!(
            (trace.id(), trace.parent()),
            (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, Some(0x00f0_67aa_0ba9_02b7))
        );
        assert_ne!(Some(trace.own().span), trace.parent());
        let (below, has_state) = announced(&trace, 1, &headers);
        assert!(below.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && has_state, "{below}");
        assert!(below != SAMPLED && below != announced(&trace, 2, &headers).0);
        let not_sampled = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
        let (trace, headers) = of(&[not_sampled], Some(1.0));
        assert_eq!(announced(&trace.unwrap(), 1, &headers), (not_sampled.to_owned(), true));
    }

    #[test]
    fn without_tracing_the_trace_is_known_and_its_headers_stay() {
        let (trace, headers) = of(&[SAMPLED], None);
        let mut trace = trace.unwrap();
        trace.step(Duration::ZERO, StepKind::Queue);
        assert!(!trace.is_sampled() && trace.steps().is_empty());
        assert_eq!(announced(&trace, 1, &headers), (SAMPLED.to_owned(), true));
        assert!(of(&[], None).0.is_none());
    }

    #[test]
    fn a_malformed_or_repeated_header_begins_a_new_trace() {
        for sent in [&["00-x"][..], &[SAMPLED, SAMPLED], &[]] {
            let (trace, headers) = of(sent, Some(1.0));
            let trace = trace.unwrap();
            assert!(trace.is_sampled() && trace.parent().is_none());
            let (announced, has_state) = announced(&trace, 1, &headers);
            assert!(
                !sent.contains(&announced.as_str()) && !has_state,
                "the state belongs to the header that is replaced"
            );
            assert!(of(sent, Some(0.0)).0.is_none());
        }
    }

    #[test]
    fn steps_are_bounded() {
        let mut trace = of(&[SAMPLED], Some(1.0)).0.unwrap();
        (0..100).for_each(|_| trace.step(Duration::ZERO, StepKind::Queue));
        assert_eq!(trace.steps().len(), STEPS_MAX);
    }
}
