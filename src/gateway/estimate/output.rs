//! How many output tokens to reserve for a request.
//!
//! A reservation should seldom be too small and never absurdly large. So it is the mean plus two
//! standard deviations of past completions, within the request's `min_tokens` and upper bound. A
//! new completion has the weight `1 / `[`MEMORY`]. After [`OWN_AFTER`] completions of a client,
//! only the client's own completions count, so that one client's long responses do not raise the
//! reservations of others. With `ignore_eos` the length is exactly the bound.

/// Completions that the moving mean and variance remember.
pub const MEMORY: f64 = 100.0;
/// Completions of a client after which estimates follow only the client's own lengths.
pub const OWN_AFTER: u64 = 8;
/// Tokens expected before any completion was seen: a few paragraphs.
pub const UNSEEN: u64 = 512;

/// The bounds that a request sets on its output, tokens per sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputBounds {
    /// The most tokens; `None`: only the context length bounds the output.
    pub max: Option<u64>,
    /// The least tokens.
    pub min: u64,
    /// Whether the output always runs to `max`.
    pub ignore_eos: bool,
}

impl OutputBounds {
    /// The bounds that a request states.
    pub fn of(view: &sluice_core::openai::RequestView<'_>) -> Self {
        Self { max: view.output_bound(), min: view.min_tokens, ignore_eos: view.ignore_eos }
    }
}

/// Moving mean and variance of completion lengths, of one model or one client.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputEstimator {
    mean: f64,
    variance: f64,
    samples: u64,
}

impl OutputEstimator {
    /// Tokens to expect of one sequence.
    pub fn expect(&self, bounds: OutputBounds) -> u64 {
        let most = bounds.max.unwrap_or(u64::MAX);
        if bounds.ignore_eos && bounds.max.is_some() {
            return most;
        }
        let seen = match self.samples {
            0 => UNSEEN,
            _ => (self.mean + 2.0 * self.variance.sqrt()).ceil() as u64,
        };
        seen.max(bounds.min).min(most)
    }

    /// Whether enough completions were seen to rely on them.
    pub fn is_known(&self) -> bool {
        self.samples >= OWN_AFTER
    }

    /// Completions seen.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Records that one sequence had `tokens` tokens.
    pub fn learn(&mut self, tokens: u64) {
        self.samples += 1;
        let share = 1.0 / (self.samples as f64).min(MEMORY);
        let off = tokens as f64 - self.mean;
        self.mean += share * off;
        // The decayed form of Welford's update.
        self.variance = (1.0 - share) * (self.variance + share * off * off);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::base::Rng;

    #[test]
    fn bounds_of_the_request_come_first() {
        let mut output = OutputEstimator::default();
        assert_eq!(output.expect(OutputBounds::default()), UNSEEN);
        assert_eq!(output.expect(OutputBounds { max: Some(16), ..Default::default() }), 16);
        (0..50).for_each(|_| output.learn(100));
        assert_eq!(output.expect(OutputBounds::default()), 100);
        assert_eq!(output.expect(OutputBounds { max: Some(4_000), ignore_eos: true, min: 0 }), 4_000);
        assert_eq!(output.expect(OutputBounds { max: Some(4_000), ignore_eos: false, min: 300 }), 300);
        assert_eq!(output.expect(OutputBounds { max: Some(0), ..Default::default() }), 0);
    }

    #[test]
    fn few_completions_are_longer_than_expected() {
        let (mut rng, mut output, mut longer) = (Rng::new(4), OutputEstimator::default(), 0);
        for index in 0..2_000 {
            let tokens = (rng.exponential() * 200.0) as u64;
            longer += u32::from(index > 100 && tokens > output.expect(OutputBounds::default()));
            output.learn(tokens);
        }
        // An exponential lies over mean + 2 sd with probability e^-3 = 5 %.
        assert!((60..140).contains(&longer), "{longer}");
    }

    #[test]
    fn it_follows_a_change() {
        let mut output = OutputEstimator::default();
        (0..500).for_each(|_| output.learn(1_000));
        (0..1_000).for_each(|_| output.learn(10));
        assert!(output.expect(OutputBounds::default()) < 40);
    }
}
