//! How much work a request is, before it is sent: prompt tokens and expected output tokens.
//!
//! [`prompt`] estimates prompt tokens from character counts ([`sluice_core::openai::shape`]), with
//! weights learned from usage. [`clients`] limits how much one client can change the weights.
//! [`output`] bounds the length of responses. [`exact`] counts with the model's tokenizer, if one
//! is configured and the count can change a decision.
//!
//! A [`ModelEstimator`] holds the learned state behind a lock, which is held for less than a
//! microsecond and never across an await.

pub mod clients;
pub mod exact;
pub mod output;
pub mod prompt;

use parking_lot::Mutex;
use tokio::time::Instant;

pub use clients::ClientId;
pub use exact::{Counted, ExactCounter, ExactError};
pub use output::{OutputBounds, OutputEstimator};
pub use prompt::{EstimateSource, PromptEstimate, PromptEstimator};

use clients::Clients;
pub use sluice_core::openai::{PromptShape, TextShape};

/// The learned state of one model.
#[derive(Debug, Default)]
pub struct ModelEstimator {
    model: Mutex<Model>,
}

#[derive(Debug, Default)]
struct Model {
    prompt: PromptEstimator,
    output: OutputEstimator,
    clients: Clients,
}

/// The inputs of a prompt's estimate.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    /// The character counts.
    pub shape: PromptShape,
    /// Tokens of each media part, from the configuration.
    pub media_part_tokens: u64,
    /// The client that sent it.
    pub client: ClientId,
}

/// The usage that an engine reported for a finished request.
#[derive(Clone, Copy, Debug)]
pub struct Reported {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Tokens of each sequence (usage divided by
    /// [`RequestView::sequences`](sluice_core::openai::RequestView::sequences)); `None` if nothing
    /// was generated.
    pub completion_tokens: Option<u64>,
    /// The lowest boundary above the estimate: a prompt of this many tokens belongs to another
    /// pool, or needs a permit.
    pub boundary: u64,
    /// Whether the tokens can be compared with the shape. They can if the request had one text-only
    /// prompt that the engine read as sent, and the response is complete.
    pub comparable: bool,
}

impl Prompt {
    /// The most tokens that the prompt can have, whatever its text.
    pub fn at_most(&self) -> u64 {
        prompt::at_most(&self.shape, self.media_part_tokens)
    }
}

impl ModelEstimator {
    /// The estimated prompt tokens of a request.
    pub fn estimate(&self, prompt: &Prompt, now: Instant) -> PromptEstimate {
        let model = self.model.lock();
        let factor = model.clients.factor(prompt.client, now);
        model.prompt.estimate(&prompt.shape, prompt.media_part_tokens).raised(factor, prompt.at_most())
    }

    /// Expected output tokens of one sequence of a response to this client.
    pub fn expect_output(&self, client: ClientId, bounds: OutputBounds) -> u64 {
        let model = self.model.lock();
        model.clients.output(client).unwrap_or(&model.output).expect(bounds)
    }

    /// Learns from reported usage.
    pub fn learn(&self, prompt: &Prompt, reported: Reported, now: Instant) {
        let mut model = self.model.lock();
        let estimated = model.prompt.estimate(&prompt.shape, prompt.media_part_tokens);
        if reported.prompt_tokens >= reported.boundary && estimated.source != EstimateSource::Exact {
            let ratio = reported.prompt_tokens as f64 / estimated.tokens as f64;
            model.clients.underestimated(prompt.client, ratio, now);
        }
        if let Some(tokens) = reported.completion_tokens.filter(|_| reported.comparable) {
            model.clients.learn_output(prompt.client, tokens, now);
        }
        if reported.comparable && model.clients.may_teach(prompt.client, now) {
            model.prompt.learn(&prompt.shape, reported.prompt_tokens);
            if let Some(tokens) = reported.completion_tokens {
                model.output.learn(tokens);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn prompt(client: &str) -> Prompt {
        let text = TextShape { plain: 4_000, marks: 500, ..TextShape::default() };
        let shape = PromptShape { text, messages: 1, ..PromptShape::default() };
        Prompt { shape, media_part_tokens: 0, client: ClientId::of_key(client) }
    }

    fn reported(prompt_tokens: u64) -> Reported {
        Reported { prompt_tokens, completion_tokens: Some(20), boundary: 5_000, comparable: true }
    }

    #[test]
    fn what_one_model_learns_does_not_change_another() {
        let (trained, other) = (ModelEstimator::default(), ModelEstimator::default());
        let (prompt, now) = (prompt("a"), Instant::now());
        let before = other.estimate(&prompt, now);
        for _ in 0..30 {
            trained.learn(&prompt, reported(3_000), now);
        }
        let learned = trained.estimate(&prompt, now);
        assert!((2_850..3_150).contains(&learned.tokens), "{learned:?}");
        assert_eq!(other.estimate(&prompt, now), before);
        assert_eq!(trained.expect_output(prompt.client, OutputBounds::default()), 20);
    }

    #[test]
    fn one_client_does_not_decide_the_estimates_of_others() {
        let (model, start) = (ModelEstimator::default(), Instant::now());
        for second in 0..300 {
            let now = start + Duration::from_secs(second);
            (0..100).for_each(|_| model.learn(&prompt("loud"), reported(4_000), now));
            // The quiet client sends one request for each one that may be learned from the loud
            // client.
            model.learn(&prompt("quiet"), reported(1_200), now);
        }
        let tokens = model.estimate(&prompt("quiet"), start + Duration::from_secs(300)).tokens;
        assert!((1_200..3_000).contains(&tokens), "{tokens}");
    }

    #[test]
    fn long_responses_of_one_client_are_not_expected_of_another() {
        let (model, now) = (ModelEstimator::default(), Instant::now());
        let completed = |client: &str, tokens| {
            model.learn(&prompt(client), Reported { completion_tokens: Some(tokens), ..reported(1_200) }, now);
        };
        (0..20).for_each(|_| completed("short", 100));
        (0..60).for_each(|_| completed("long", 30_000));
        let expected = |client: &str| model.expect_output(ClientId::of_key(client), OutputBounds::default());
        assert_eq!((expected("short"), expected("long")), (100, 30_000));
        assert!(expected("new") > 30_000, "a new client by those of all: mean and two standard deviations");
    }

    #[test]
    fn a_prompt_that_was_placed_as_too_short_raises_the_estimates_of_its_client_only() {
        let (model, now) = (ModelEstimator::default(), Instant::now());
        let base = model.estimate(&prompt("honest"), now).tokens;
        model.learn(&prompt("forger"), Reported { comparable: false, ..reported(4_999) }, now);
        assert_eq!(model.estimate(&prompt("forger"), now).tokens, base, "below the boundary, as placed");
        model.learn(&prompt("forger"), Reported { comparable: false, ..reported(2 * base) }, now);
        assert_eq!(model.estimate(&prompt("forger"), now).tokens, base, "still below the boundary");
        model.learn(&prompt("forger"), Reported { comparable: false, boundary: 2 * base, ..reported(2 * base) }, now);
        let raised = model.estimate(&prompt("forger"), now);
        assert_eq!((raised.tokens, raised.source), (2 * base, EstimateSource::Raised));
        assert_eq!(model.estimate(&prompt("honest"), now).tokens, base);
        let id = Prompt { client: ClientId::default(), ..prompt("") };
        model.learn(&id, Reported { comparable: false, boundary: 2 * base, ..reported(2 * base) }, now);
        assert_eq!(model.estimate(&id, now).tokens, base, "clients without keys cannot be distinguished");
    }

    #[test]
    fn a_raised_estimate_never_exceeds_the_most_tokens_that_the_prompt_can_have() {
        let (model, now, prompt) = (ModelEstimator::default(), Instant::now(), prompt("a"));
        model.learn(&prompt, Reported { boundary: 1, comparable: false, ..reported(1 << 40) }, now);
        assert_eq!(model.estimate(&prompt, now).tokens, prompt.at_most());
    }
}
