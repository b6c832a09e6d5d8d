//! What the estimator learns from the usage of a finished request, and which usage events the gateway requested itself.
//!
//! Both are decided while a request is prepared and needed when its response ends. Weights are learned only where the usage
//! can be compared with the estimate: one prompt, text only, which the engine read as it was sent. When the usage of any
//! request shows that its prompt was above the boundary below which it was placed, later estimates of its client are raised.

use std::sync::Arc;

use tokio::time::Instant;

use super::request_bounds::RequestBounds;
use crate::estimate::{Counted, ExactCounter, ModelEstimator, Prompt, Reported};
use sluice_core::meter::Strip;
use sluice_core::openai::{TokenUsage, UsageEdit};

/// Usage requested on behalf of the client, to be removed from the response again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedUsage {
    /// None.
    Nothing,
    /// One usage event at the end.
    Final,
    /// Usage in every event.
    Continuous {
        /// The client requested the final one itself.
        keep_final: bool,
    },
}

impl InjectedUsage {
    /// Whether something must be removed from the response.
    pub(super) fn is_some(self) -> bool {
        self != Self::Nothing
    }

    /// The change to the request body.
    pub(super) fn edit(self) -> UsageEdit {
        match self {
            Self::Nothing => UsageEdit::AsSent,
            Self::Final => UsageEdit::AtEnd,
            Self::Continuous { .. } => UsageEdit::InEveryEvent,
        }
    }

    /// What is removed from the response.
    pub(super) fn strip(self) -> Strip {
        match self {
            Self::Nothing => Strip::Nothing,
            Self::Final => Strip::InjectedUsage,
            Self::Continuous { keep_final } => Strip::Continuous { keep_final },
        }
    }
}

/// What the estimate of a request was based on.
#[derive(Debug)]
pub(super) struct Feedback {
    pub(super) estimator: Arc<ModelEstimator>,
    pub(super) prompt: Prompt,
    /// The exact count, if one was made: its counter learns the chat template's overhead.
    pub(super) exact: Option<ExactCount>,
    pub(super) sequences: u32,
    /// Within which the usage is believed.
    pub(super) bounds: RequestBounds,
    /// The boundary above the estimate; see [`Reported::boundary`].
    pub(super) boundary: u64,
    /// One prompt, text only, that the engine reads as it was sent.
    pub(super) comparable: bool,
}

/// An exact count and the counter that made it.
#[derive(Debug)]
pub(super) struct ExactCount {
    pub(super) counter: Arc<ExactCounter>,
    pub(super) counted: Counted,
}

impl Feedback {
    /// Learns from the usage that the engine reported, if it did; `completed`: for a whole response.
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
