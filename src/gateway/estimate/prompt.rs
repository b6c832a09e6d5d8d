//! Estimates prompt tokens from character counts, with weights learned from the usage that engines
//! report.
//!
//! ```text
//! tokens = a*plain + b*marks + c*wide + d*blanks + m*messages + k
//!
//! minimise  sum FORGET^age * trust * ((w.x - y) / max(y, guess))^2
//!           + PULL * sum ((w_j - p_j) / p_j)^2       with  LOW_j <= w_j <= HIGH_j
//! ```
//!
//! [`TextShape`](sluice_core::openai::TextShape) defines the counts. Each response with usage is a
//! sample of the model's weights, which minimise the squared *relative* error, because estimates
//! must be equally accurate, in proportion, near every boundary. Older samples are forgotten
//! exponentially, and the weights are pulled towards a prior for typical byte-pair vocabularies.
//! The sums take O(1) memory; projected coordinate descent from the last weights finds the bounded
//! minimum in a few hundred multiplications.

use sluice_core::openai::PromptShape;

/// Factor on the weight of older samples at each new one: about 200 are remembered.
pub const FORGET: f64 = 0.995;
/// Strength of the prior, in samples.
pub const PULL: f64 = 0.002;
/// The largest ratio between actual and estimated tokens that counts in full.
pub const SURPRISE: f64 = 4.0;
/// Errors up to this many standard deviations count in full. The weight of a larger error falls
/// with the square of the error.
const TRUSTED: f64 = 3.0;
/// [`TRUSTED`] is at least this relative error, in case the standard deviation is tiny.
const TRUSTED_AT_LEAST: f64 = 0.15;
/// Relative error assumed before the first sample.
pub const PRIOR_SPREAD: f64 = 0.35;
/// Samples after which an estimate counts as learned.
pub const LEARNED_AFTER: u64 = 8;

const FEATURES: usize = 6;
type Weights = [f64; FEATURES];

/// Tokens for each letter or blank, other ASCII character, other character, blank after a blank,
/// message, and request.
const PRIOR: Weights = [0.23, 0.55, 0.9, 0.08, 5.0, 1.0];
/// Lower bounds of the weights, for text in all vocabularies in use. English has 0.2 tokens for
/// each letter, digits 0.33, Chinese 0.6 and Cyrillic 0.25. Runs of one mark (dashes, line breaks)
/// may have fewer, and are estimated as too long.
const LOW: Weights = [0.15, 0.25, 0.2, 0.01, 2.0, 0.0];
/// Upper bounds of the weights. A character has at most one token for each of its UTF-8 bytes.
const HIGH: Weights = [1.0, 1.0, 4.0, 1.0, 60.0, 200.0];
/// Rounds of coordinate descent for each sample. They are enough, because the descent starts from
/// the last weights.
const ROUNDS: usize = 12;
/// Samples that the moving average of the error remembers, once it has seen as many.
const SPREAD_SAMPLES: f64 = 50.0;

sluice_core::labels! {
    /// The source of an estimate.
    pub enum EstimateSource {
        /// The prompt came as token ids, or a tokenizer counted it.
        Exact = "exact",
        /// Weights that were learned for this model.
        Learned = "learned",
        /// The prior.
        Prior = "prior",
        /// Weights, raised because earlier prompts of the same client were longer than estimated.
        Raised = "raised",
    }
}

/// The estimated length of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptEstimate {
    /// Prompt tokens, at least 1.
    pub tokens: u64,
    /// Standard deviation of the relative error; 0 when exact.
    pub spread: f64,
    /// The source of the estimate.
    pub source: EstimateSource,
}

impl PromptEstimate {
    /// The estimate times `factor`, for a client whose prompts were underestimated; at most
    /// `at_most`.
    pub fn raised(self, factor: f64, at_most: u64) -> Self {
        if factor < 1.01 || self.source == EstimateSource::Exact {
            return self;
        }
        let tokens = (self.tokens as f64 * factor) as u64;
        Self { tokens: tokens.min(at_most).max(self.tokens), source: EstimateSource::Raised, ..self }
    }

    /// The estimate for a prompt that the engine appends to a stored conversation of this many
    /// tokens.
    pub fn behind(self, stored: u64) -> Self {
        let tokens = self.tokens.saturating_add(stored);
        // The stored tokens were counted, so only the rest is uncertain.
        let spread = self.spread * self.tokens as f64 / tokens.max(1) as f64;
        Self { tokens, spread, ..self }
    }

    /// A count that needs no estimate.
    pub fn exact(tokens: u64) -> Self {
        Self { tokens: tokens.max(1), spread: 0.0, source: EstimateSource::Exact }
    }
}

/// The weights of one model, and the sums from which they are computed.
#[derive(Clone, Debug)]
pub struct PromptEstimator {
    weights: Weights,
    /// Weighted sums of x x^T and of x y.
    square: [Weights; FEATURES],
    linear: Weights,
    /// Moving average of the squared logarithm of estimated / actual.
    error: f64,
    samples: u64,
}

impl Default for PromptEstimator {
    fn default() -> Self {
        Self {
            weights: PRIOR,
            square: [[0.0; FEATURES]; FEATURES],
            linear: [0.0; FEATURES],
            error: PRIOR_SPREAD * PRIOR_SPREAD,
            samples: 0,
        }
    }
}

impl PromptEstimator {
    /// The length of a prompt of this shape, with `media_part_tokens` for each media part.
    pub fn estimate(&self, shape: &PromptShape, media_part_tokens: u64) -> PromptEstimate {
        if shape.is_exact() {
            return PromptEstimate::exact(shape.token_ids);
        }
        let known = known(shape, media_part_tokens);
        let text = dot(&self.weights, &row(shape)).max(0.0);
        PromptEstimate {
            tokens: known.saturating_add(text.round() as u64).max(1),
            spread: self.error.sqrt(),
            source: if self.samples < LEARNED_AFTER { EstimateSource::Prior } else { EstimateSource::Learned },
        }
    }

    /// Learns that a prompt of this shape had `actual` tokens.
    ///
    /// An error above a factor [`SURPRISE`] counts as that factor, and an unusual error weighs less
    /// (Huber's idea, squared). Weights never leave the bounds. So no text counts as shorter than
    /// 0.15 tokens for each letter, which is well below the need of today's vocabularies. A sample
    /// below these bounds is ignored, because the engine truncated or partly ignored the prompt. A
    /// prompt with media is ignored, because the media's share of the usage is unknown.
    pub fn learn(&mut self, shape: &PromptShape, actual: u64) {
        if shape.is_exact() || shape.media_parts > 0 || actual <= shape.token_ids {
            return;
        }
        let x = row(shape);
        if ((actual - shape.token_ids) as f64) < dot(&LOW, &x) {
            return;
        }
        let guess = dot(&self.weights, &x).max(1.0);
        let y = ((actual - shape.token_ids) as f64).clamp(guess / SURPRISE, guess * SURPRISE);
        self.samples += 1;
        let trusted = (TRUSTED * self.error.sqrt()).max(TRUSTED_AT_LEAST);
        let error = (guess / y).ln().powi(2).max(f64::MIN_POSITIVE);
        self.error += (error - self.error) / (self.samples as f64 + 4.0).min(SPREAD_SAMPLES);
        let trust = (trusted / error.sqrt()).min(1.0).powi(2);
        let scale = trust / (y.max(guess) * y.max(guess));
        for (i, sum) in self.square.iter_mut().enumerate() {
            for (j, cell) in sum.iter_mut().enumerate() {
                *cell = *cell * FORGET + scale * x[i] * x[j];
            }
            self.linear[i] = self.linear[i] * FORGET + scale * x[i] * y;
        }
        self.solve();
    }

    /// Samples learned so far.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Moves each weight in turn to its minimum within its bounds, with the others fixed.
    fn solve(&mut self) {
        for _ in 0..ROUNDS {
            for i in 0..FEATURES {
                let pull = PULL / (PRIOR[i] * PRIOR[i]);
                let others = dot(&self.square[i], &self.weights) - self.square[i][i] * self.weights[i];
                let best = (self.linear[i] - others + pull * PRIOR[i]) / (self.square[i][i] + pull);
                self.weights[i] = best.clamp(LOW[i], HIGH[i]);
            }
        }
    }
}

/// The most tokens that a prompt of this shape can have: one for each byte.
pub fn at_most(shape: &PromptShape, media_part_tokens: u64) -> u64 {
    known(shape, media_part_tokens).saturating_add(dot(&HIGH, &row(shape)) as u64)
}

fn known(shape: &PromptShape, media_part_tokens: u64) -> u64 {
    shape.token_ids.saturating_add(u64::from(shape.media_parts).saturating_mul(media_part_tokens))
}

fn row(shape: &PromptShape) -> Weights {
    let text = [shape.text.plain, shape.text.marks, shape.text.wide, shape.text.blanks].map(|count| count as f64);
    [text[0], text[1], text[2], text[3], f64::from(shape.messages), 1.0]
}

fn dot(a: &Weights, b: &Weights) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sluice_core::base::Rng;
    use sluice_core::openai::TextShape;

    fn shape(plain: u64, marks: u64, wide: u64, messages: u32) -> PromptShape {
        PromptShape { text: TextShape { plain, marks, wide, blanks: 0 }, messages, ..PromptShape::default() }
    }

    /// A vocabulary that is far from the prior, with 3 % noise.
    fn truth(shape: &PromptShape, rng: &mut Rng) -> u64 {
        let exact = dot(&[0.4, 0.9, 2.0, 0.1, 11.0, 20.0], &row(shape));
        (exact * (0.97 + 0.06 * rng.unit())) as u64
    }

    fn any_shape(rng: &mut Rng) -> PromptShape {
        let size = 200 + rng.below(20_000) as u64;
        let wide = if rng.below(3) == 0 { size / 2 } else { 0 };
        shape(size, size / (3 + rng.below(8) as u64), wide, 1 + rng.below(6) as u32)
    }

    #[test]
    fn weights_are_learned_within_fifty_samples() {
        let (mut rng, mut ratio) = (Rng::new(1), PromptEstimator::default());
        for _ in 0..50 {
            let shape = any_shape(&mut rng);
            ratio.learn(&shape, truth(&shape, &mut rng));
        }
        let mut worst = 0.0f64;
        for _ in 0..100 {
            let shape = any_shape(&mut rng);
            let actual = truth(&shape, &mut rng) as f64;
            worst = worst.max((ratio.estimate(&shape, 0).tokens as f64 / actual - 1.0).abs());
        }
        assert!(worst < 0.12, "worst {worst}");
        assert_eq!(ratio.estimate(&any_shape(&mut rng), 0).source, EstimateSource::Learned);
    }

    #[test]
    fn one_wrong_sample_changes_the_estimate_little() {
        let (mut rng, mut ratio) = (Rng::new(2), PromptEstimator::default());
        for _ in 0..100 {
            let shape = any_shape(&mut rng);
            ratio.learn(&shape, truth(&shape, &mut rng));
        }
        let probe = shape(8_000, 1_000, 0, 2);
        let before = ratio.estimate(&probe, 0).tokens as f64;
        for poison in [1, u64::MAX] {
            let mut ratio = ratio.clone();
            ratio.learn(&probe, poison);
            let after = ratio.estimate(&probe, 0).tokens as f64;
            assert!((after / before - 1.0).abs() < 0.25, "{poison}: {before} -> {after}");
        }
    }

    #[test]
    fn token_ids_are_exact_and_media_cost_what_is_configured() {
        let ratio = PromptEstimator::default();
        let ids = PromptShape { token_ids: 77, ..PromptShape::default() };
        assert_eq!(ratio.estimate(&ids, 0), PromptEstimate::exact(77));
        let text = shape(400, 0, 0, 1);
        let image = PromptShape { media_parts: 2, ..text };
        assert_eq!(ratio.estimate(&image, 700).tokens, ratio.estimate(&text, 700).tokens + 2 * 700);
        assert_eq!(ratio.estimate(&text, 0).source, EstimateSource::Prior);
    }

    #[test]
    fn the_spread_shows_the_accuracy() {
        let (mut rng, mut ratio) = (Rng::new(3), PromptEstimator::default());
        for _ in 0..300 {
            let shape = any_shape(&mut rng);
            ratio.learn(&shape, truth(&shape, &mut rng));
        }
        let spread = ratio.estimate(&any_shape(&mut rng), 0).spread;
        assert!((0.005..0.06).contains(&spread), "spread {spread}");
    }

    /// English of 9,000 tokens, in a vocabulary of 4.6 letters to a token.
    fn honest() -> (PromptShape, u64) {
        (shape(39_000, 2_400, 0, 1), 9_000)
    }

    #[test]
    fn requests_of_which_the_engine_read_a_part_do_not_shorten_others() {
        let (shape, actual) = honest();
        let mut ratio = PromptEstimator::default();
        (0..100).for_each(|_| ratio.learn(&shape, actual));
        for truncated in [1, 50, 500, 3_000, 5_000] {
            (0..50).for_each(|_| ratio.learn(&shape, truncated));
            let tokens = ratio.estimate(&shape, 0).tokens;
            assert!(tokens > 8_000, "{tokens} of {actual} after {truncated}");
        }
    }

    #[test]
    fn padding_does_not_shorten_text() {
        let (honest, actual) = honest();
        let mut ratio = PromptEstimator::default();
        (0..100).for_each(|_| ratio.learn(&honest, actual));
        let padded = PromptShape { text: TextShape { blanks: 60_000, ..shape(200, 0, 0, 1).text }, ..honest };
        (0..1_000).for_each(|_| ratio.learn(&padded, 700));
        let tokens = ratio.estimate(&honest, 0).tokens;
        assert!((7_500..11_000).contains(&tokens), "{tokens}");
    }

    proptest! {
        #[test]
        fn whatever_is_learned_an_honest_prompt_stays_within_its_bounds(
            samples in prop::collection::vec((0u64..1 << 20, 0u64..1 << 20, 0u64..1 << 20, 0u32..1000, 0u64..1 << 20), 0..300),
        ) {
            let (honest, actual) = honest();
            let mut ratio = PromptEstimator::default();
            for (plain, marks, wide, messages, actual) in samples {
                ratio.learn(&shape(plain, marks, wide, messages), actual);
            }
            let tokens = ratio.estimate(&honest, 0).tokens;
            prop_assert!(tokens > actual * 6 / 10 && tokens <= at_most(&honest, 0), "{}", tokens);
        }

        #[test]
        fn no_samples_drive_weights_out_of_bounds(
            samples in prop::collection::vec((0u64..1 << 40, 0u64..1 << 40, 0u64..1 << 40, 0u32..1000, any::<u64>()), 0..40),
        ) {
            let mut ratio = PromptEstimator::default();
            for (plain, marks, wide, messages, actual) in samples {
                ratio.learn(&shape(plain, marks, wide, messages), actual);
                for (i, weight) in ratio.weights.iter().enumerate() {
                    prop_assert!((LOW[i]..=HIGH[i]).contains(weight), "{:?}", ratio.weights);
                }
                prop_assert!(ratio.error.is_finite());
            }
        }
    }
}
