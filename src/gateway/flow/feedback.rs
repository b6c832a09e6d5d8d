//! Feedback to the estimator from the usage of a finished request, and usage events that the
//! gateway requested itself.
//!
//! Both are decided while a request is prepared, and needed when the response ends. The estimator
//! learns weights only if the usage can be compared with the estimate: the request has one prompt,
//! text only, which the engine read as it was sent. When usage shows that a prompt was above the
//! boundary below which it was placed, later estimates of the same client are raised.

use std::sync::Arc;

use tokio::time::Instant;

use super::request_bounds::RequestBounds;
use crate::estimate::{Counted, ExactCounter, ModelEstimator, Prompt, Reported};
use sluice_core::meter::Strip;
use sluice_core::openai::{TokenUsage, UsageEdit};

/// Usage that the gateway requested although the client did not. It is removed from the response
/// again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedUsage {
    Nothing,
    /// One usage event at the end.
    Final,
    /// Usage in every event.
    Continuous {
        /// The client requested the final usage event itself.
        keep_final: bool,
    },
}

impl InjectedUsage {
    pub(super) fn is_some(self) -> bool {
        self != Self::Nothing
    }

    pub(super) fn edit(self) -> UsageEdit {
        match self {
            Self::Nothing => UsageEdit::AsSent,
            Self::Final => UsageEdit::AtEnd,
            Self::Continuous { .. } => UsageEdit::InEveryEvent,
        }
    }

    pub(super) fn strip(self) -> Strip {
        match self {
            Self::Nothing => Strip::Nothing,
            Self::Final => Strip::InjectedUsage,
            Self::Continuous { keep_final } => Strip::Continuous { keep_final },
        }
    }
}

#[derive(Debug)]
pub(super) struct Feedback {
    pub(super) estimator: Arc<ModelEstimator>,
    pub(super) prompt: Prompt,
    /// The exact count of the prompt, if one was made. From it the counter learns the chat
    /// template's overhead.
    pub(super) exact: Option<ExactCount>,
    pub(super) sequences: u32,
    /// Usage outside these bounds is not believed.
    pub(super) bounds: RequestBounds,
    /// The boundary above the estimate; see [`Reported::boundary`].
    pub(super) boundary: u64,
    /// Whether the request has one prompt, text only, that the engine reads as it was sent.
    pub(super) comparable: bool,
}

#[derive(Debug)]
pub(super) struct ExactCount {
    pub(super) counter: Arc<ExactCounter>,
    pub(super) counted: Counted,
}

impl Feedback {
    /// Learns from the usage that the engine reported, if any. `completed`: the response was
    /// complete.
    pub(super) fn learn(&self, usage: TokenUsage, completed: bool, now: Instant) {
        let Some(prompt_tokens) = usage.prompt else { return };
        let completion_tokens = usage.completion.map(|tokens| tokens / u64::from(self.sequences.max(1)));
        let comparable = completed && self.comparable;
        let reported = Reported { prompt_tokens, completion_tokens, boundary: self.boundary, comparable };
        self.estimator.learn(&self.prompt, reported, now);
        if let Some(exact) = self.exact.as_ref().filter(|_| comparable) {
            exact.counter.learn(&exact.counted, prompt_tokens);
        }
    }
}
