//! How much work a request is, before it is sent: prompt tokens and expected output tokens.
//!
//! [`ratio`] learns tokens from the look of the text · [`output`] how long answers are · [`exact`] counts with the
//! model's tokenizer, where a configuration names one and the estimate is near a boundary.
//!
//! [`Estimators`] holds one state for each model, behind a lock of its own that is held for less than a
//! microsecond and never across an await. What is counted is in [`crate::openai::shape`].

pub mod exact;
pub mod output;
pub mod ratio;

use parking_lot::Mutex;

pub use exact::{Counted, ExactCounter, ExactError};
pub use output::{Output, OutputBounds};
pub use ratio::{Estimate, How, Ratio};

use crate::base::ModelId;
pub use crate::openai::{PromptShape, TextShape};

/// What has been learned about each model.
#[derive(Debug, Default)]
pub struct Estimators {
    models: Vec<Mutex<Model>>,
}

#[derive(Debug, Default)]
struct Model {
    ratio: Ratio,
    output: Output,
}

impl Estimators {
    /// Fresh estimators for the models `0..models`.
    pub fn new(models: usize) -> Self {
        Self { models: (0..models).map(|_| Mutex::default()).collect() }
    }

    /// How many prompt tokens a request of this shape has. A model beyond the table gets the prior.
    pub fn estimate(&self, model: ModelId, shape: &PromptShape) -> Estimate {
        match self.models.get(model.index()) {
            Some(state) => state.lock().ratio.estimate(shape),
            None => Ratio::default().estimate(shape),
        }
    }

    /// How many tokens to expect of one sequence of the answer.
    pub fn expect_output(&self, model: ModelId, bounds: OutputBounds) -> u64 {
        match self.models.get(model.index()) {
            Some(state) => state.lock().output.expect(bounds),
            None => Output::default().expect(bounds),
        }
    }

    /// Learns from a finished request: its usage. `completion_tokens` is per sequence (usage divided by
    /// [`RequestView::sequences`](crate::openai::RequestView::sequences)) and `None` where nothing was generated or
    /// the answer was cut short by a leaving client.
    pub fn learn(&self, model: ModelId, shape: &PromptShape, prompt_tokens: u64, completion_tokens: Option<u64>) {
        let Some(state) = self.models.get(model.index()) else { return };
        let mut state = state.lock();
        state.ratio.learn(shape, prompt_tokens);
        if let Some(tokens) = completion_tokens {
            state.output.learn(tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_learn_apart() {
        let estimators = Estimators::new(2);
        let text = TextShape { plain: 4_000, marks: 500, wide: 0 };
        let shape = PromptShape { text, messages: 1, ..PromptShape::default() };
        let before = estimators.estimate(ModelId::new(1), &shape);
        for _ in 0..30 {
            estimators.learn(ModelId::new(0), &shape, 3_000, Some(20));
        }
        let learned = estimators.estimate(ModelId::new(0), &shape);
        assert!((2_850..3_150).contains(&learned.tokens), "{learned:?}");
        assert_eq!(estimators.estimate(ModelId::new(1), &shape), before);
        assert_eq!(estimators.expect_output(ModelId::new(0), OutputBounds::default()), 20);
        assert_eq!(estimators.expect_output(ModelId::new(9), OutputBounds::default()), output::UNSEEN);
    }
}
