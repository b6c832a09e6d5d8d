//! How much work a request is, before it is sent: prompt tokens and expected output tokens.
//!
//! [`prompt`] estimates prompt tokens from character counts, learned from usage · [`output`] bounds the length of responses ·
//! [`exact`] counts with the model's tokenizer, where a configuration has one and the estimate is near a boundary.
//!
//! A [`ModelEstimator`] holds what has been learned about one model, behind a lock that is held for less than a
//! microsecond and never across an await. The character counts are defined in [`sluice_core::openai::shape`].

pub mod exact;
pub mod output;
pub mod prompt;

use parking_lot::Mutex;

pub use exact::{Counted, ExactCounter, ExactError};
pub use output::{OutputBounds, OutputEstimator};
pub use prompt::{EstimateSource, PromptEstimate, PromptEstimator};

pub use sluice_core::openai::{PromptShape, TextShape};

/// What has been learned about one model.
#[derive(Debug, Default)]
pub struct ModelEstimator {
    model: Mutex<Model>,
}

#[derive(Debug, Default)]
struct Model {
    prompt: PromptEstimator,
    output: OutputEstimator,
}

impl ModelEstimator {
    /// How many prompt tokens a request of this shape has; each media part counts as `media_part_tokens`.
    pub fn estimate(&self, shape: &PromptShape, media_part_tokens: u64) -> PromptEstimate {
        self.model.lock().prompt.estimate(shape, media_part_tokens)
    }

    /// How many tokens to expect of one sequence of the response.
    pub fn expect_output(&self, bounds: OutputBounds) -> u64 {
        self.model.lock().output.expect(bounds)
    }

    /// Learns from a finished request: its usage. `completion_tokens` is per sequence (usage divided by
    /// [`RequestView::sequences`](sluice_core::openai::RequestView::sequences)) and `None` where nothing was generated or
    /// the client disconnected before the end.
    pub fn learn(&self, shape: &PromptShape, prompt_tokens: u64, completion_tokens: Option<u64>) {
        let mut model = self.model.lock();
        model.prompt.learn(shape, prompt_tokens);
        if let Some(tokens) = completion_tokens {
            model.output.learn(tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_learn_apart() {
        let (trained, other) = (ModelEstimator::default(), ModelEstimator::default());
        let text = TextShape { plain: 4_000, marks: 500, wide: 0 };
        let shape = PromptShape { text, messages: 1, ..PromptShape::default() };
        let before = other.estimate(&shape, 0);
        for _ in 0..30 {
            trained.learn(&shape, 3_000, Some(20));
        }
        let learned = trained.estimate(&shape, 0);
        assert!((2_850..3_150).contains(&learned.tokens), "{learned:?}");
        assert_eq!(other.estimate(&shape, 0), before);
        assert_eq!(trained.expect_output(OutputBounds::default()), 20);
    }
}
