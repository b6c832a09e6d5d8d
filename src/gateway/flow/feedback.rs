//! What the usage of a finished request teaches the estimator, and which usage events the gateway asked for itself.
//!
//! Both are decided while a request is prepared and needed when its response ends. Prompts with media and requests
//! with several prompts are not learned from: their token counts do not split into known parts.

use std::sync::Arc;

use crate::estimate::{Counted, ExactCounter, ModelEstimator};
use sluice_core::meter::Strip;
use sluice_core::openai::{PromptShape, UsageEdit};

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
    pub(super) shape: PromptShape,
    /// The exact count, if one was made: its counter learns the chat template's overhead.
    pub(super) exact: Option<ExactCount>,
    pub(super) sequences: u32,
    /// One prompt, text only.
    pub(super) usable: bool,
}

/// An exact count and the counter that made it.
#[derive(Debug)]
pub(super) struct ExactCount {
    pub(super) counter: Arc<ExactCounter>,
    pub(super) counted: Counted,
}

impl Feedback {
    /// Learns from the usage that the engine reported.
    pub(super) fn learn(&self, prompt_tokens: u64, completion_tokens: Option<u64>) {
        if !self.usable {
            return;
        }
        let per_sequence = completion_tokens.map(|tokens| tokens / u64::from(self.sequences.max(1)));
        self.estimator.learn(&self.shape, prompt_tokens, per_sequence);
        if let Some(exact) = &self.exact {
            exact.counter.learn(&exact.counted, prompt_tokens);
        }
    }
}
