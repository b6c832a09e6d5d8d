//! Speculative decoding: how many drafts a sequence gets, and how many of them the model accepts.
//!
//! A sequence that has sampled a token gets up to [`Speculation::tokens`] drafts. The next step
//! verifies them beside the last token, and the sequence advances by the accepted drafts and one
//! more token. Of rejected drafts, only the blocks stay allocated.
//!
//! Acceptance is a rate for each position: entry i is the share of drafts of which the first i + 1
//! tokens were accepted, as `vllm:spec_decode_num_accepted_tokens_per_pos` divided by
//! `vllm:spec_decode_num_drafts` shows it. Beyond the given positions, the rates continue to fall
//! by the ratio of the last two. The simulator draws each draft independently, although in a real
//! text parts with many accepted drafts alternate with parts with few. Texts of which more is
//! accepted end after fewer steps. A mean over all texts hides this, so there are
//! [`Speculation::kinds`].

use super::id::SequenceId;
use sluice_core::base::Rng;
use sluice_core::vllm::drafts::POSITIONS;

/// The most drafts of a sequence in a step.
pub const MAX_DRAFTS: u32 = POSITIONS as u32;
/// Assumed chance that a draft is accepted if the draft before it was accepted. Used if no rate is
/// known.
const UNKNOWN: f64 = 0.7;

/// The part of the engine that proposes drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafter {
    /// Repeated parts of the context, found on the CPU: n-grams, suffixes. vLLM plans no step ahead
    /// with it.
    Lookup,
    /// A head or a small model on the GPU, which reserves a slot of the KV cache for each draft.
    Model,
}

/// Speculative decoding as flags and measurements describe it.
#[derive(Clone, Debug, PartialEq)]
pub struct Speculation {
    /// The part that proposes drafts.
    pub drafter: Drafter,
    /// The most drafts of a sequence, 1 to [`MAX_DRAFTS`].
    pub tokens: u32,
    /// Share of drafts accepted up to each position; falling, each from 0 to 1. Empty: unknown.
    pub acceptance: Vec<f64>,
    /// The acceptance for further kinds of texts. The id of a sequence decides its kind, so that
    /// sequences have all kinds in turn.
    pub kinds: Vec<Vec<f64>>,
    /// Share of decoding sequences for which a draft is found.
    pub proposed: f64,
    /// Mean tokens of a draft that is looked up, from half of `tokens` to `tokens`, because a
    /// repeated part may be shorter than `tokens`. It is `vllm:spec_decode_num_draft_tokens`
    /// divided by `vllm:spec_decode_num_drafts`.
    pub length: f64,
    /// Whether all requests have temperature 0, so that verification compares tokens only.
    pub is_greedy: bool,
    /// The most drafts of a sequence for ranges of the number of scheduled sequences, each as
    /// first, last and drafts. Empty: always `tokens`.
    pub by_sequences: Vec<(u32, u32, u32)>,
}

/// Counters of speculative decoding since the start, as vLLM counts them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Drafts that were verified.
    pub drafts: u64,
    /// Tokens of these drafts.
    pub tokens: u64,
    /// Accepted tokens by position.
    pub accepted: Vec<u64>,
}

impl DraftStats {
    pub(super) fn new(speculation: Option<&Speculation>) -> Self {
        Self { accepted: vec![0; speculation.map_or(0, |own| own.tokens as usize)], ..Self::default() }
    }

    /// Adds a draft of `drafted` tokens of which the first `accepted` were accepted.
    pub(super) fn add(&mut self, drafted: u32, accepted: u32) {
        self.drafts += 1;
        self.tokens += u64::from(drafted);
        self.accepted.resize(self.accepted.len().max(drafted as usize), 0);
        self.accepted[..accepted as usize].iter_mut().for_each(|count| *count += 1);
    }
}

impl Speculation {
    /// Slots of the KV cache that a decode reserves beyond its tokens and drafts.
    pub(super) fn lookahead(&self) -> u32 {
        match self.drafter {
            Drafter::Lookup => 0,
            Drafter::Model => self.tokens,
        }
    }

    /// The most drafts of a sequence after a step with this many sequences.
    pub(super) fn most(&self, sequences: u32) -> u32 {
        let chosen = self.by_sequences.iter().find(|(first, last, _)| (*first..=*last).contains(&sequences));
        chosen.map_or(self.tokens, |(_, _, tokens)| (*tokens).min(self.tokens))
    }

    /// The number of drafts of a sequence after a step with this many sequences.
    pub(super) fn propose(&self, sequences: u32, rng: &mut Rng) -> u32 {
        let tokens = self.most(sequences);
        if tokens == 0 || self.proposed < 1.0 && rng.unit() >= self.proposed {
            return 0;
        }
        let short = self.short_share();
        if tokens > 1 && short > 0.0 && rng.unit() < short { 1 + rng.below(tokens as usize - 1) as u32 } else { tokens }
    }

    /// Share of drafts shorter than `tokens`. All shorter lengths are equally frequent.
    fn short_share(&self) -> f64 {
        let most = f64::from(self.tokens);
        if self.drafter == Drafter::Model { 0.0 } else { (2.0 * (1.0 - self.length / most)).clamp(0.0, 1.0) }
    }

    /// How many of `drafted` drafts of a sequence are accepted. One draw suffices, because the
    /// rates fall.
    pub(super) fn accept(&self, sequence: SequenceId, drafted: u32, rng: &mut Rng) -> u32 {
        if drafted == 0 {
            return 0;
        }
        let kind = sequence % (self.kinds.len() as u64 + 1);
        let rates = kind.checked_sub(1).map_or(&self.acceptance, |further| &self.kinds[further as usize]);
        // The rate of a position counts drafts that are too short as not accepted, so longer drafts
        // are accepted more often than the rate.
        let longer = |position: u32| {
            let shorter = f64::from(position) / f64::from(self.tokens.max(2) - 1);
            (1.0 - self.short_share() * shorter).max(f64::MIN_POSITIVE)
        };
        let draw = rng.unit();
        (0..drafted).take_while(|position| draw * longer(*position) < rate(rates, *position)).count() as u32
    }
}

/// The share of drafts that are accepted up to `position`.
fn rate(acceptance: &[f64], position: u32) -> f64 {
    let (position, known) = (position as usize, acceptance.len());
    if let Some(rate) = acceptance.get(position) {
        return *rate;
    }
    let (from, ratio) = match *acceptance {
        [] => (1.0, UNKNOWN),
        [only] => (only, only),
        [.., before, last] => (last, if before > 0.0 { (last / before).min(1.0) } else { 0.0 }),
    };
    from * ratio.powi((position + 1 - known) as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speculation(acceptance: &[f64]) -> Speculation {
        let acceptance = acceptance.to_vec();
        let (kinds, by_sequences) = (Vec::new(), Vec::new());
        let (drafter, is_greedy) = (Drafter::Lookup, false);
        Speculation { drafter, tokens: 4, acceptance, kinds, proposed: 1.0, length: 4.0, is_greedy, by_sequences }
    }

    #[test]
    fn accepted_drafts_have_the_given_rate_at_each_position() {
        let own = speculation(&[0.8, 0.5, 0.4]);
        let rates = &own.acceptance;
        assert!((rate(rates, 3) - 0.32).abs() < 1e-9);
        let (mut rng, mut stats) = (Rng::new(3), DraftStats::default());
        for _ in 0..20_000 {
            let accepted = own.accept(1, 4, &mut rng);
            stats.add(4, accepted);
        }
        assert_eq!((stats.drafts, stats.tokens), (20_000, 80_000));
        for (position, count) in stats.accepted.iter().enumerate() {
            let share = *count as f64 / 20_000.0;
            assert!((share - rate(rates, position as u32)).abs() < 0.015, "{position}: {share}");
        }
    }

    #[test]
    fn rates_of_unknown_positions_fall_off_and_extremes_hold() {
        assert!((rate(&[], 1) - 0.49).abs() < 1e-9);
        assert!((rate(&[0.5], 2) - 0.125).abs() < 1e-9);
        let mut rng = Rng::new(1);
        assert_eq!([0.0, 1.0].map(|rate| speculation(&[rate; 4]).accept(1, 4, &mut rng)), [0, 4]);
        assert_eq!(rate(&[0.0, 0.0], 9), 0.0);
    }

    #[test]
    fn drafts_may_be_shorter_and_the_rates_still_hold() {
        let own = Speculation { length: 3.6, ..speculation(&[0.8, 0.6, 0.5, 0.3]) };
        let (mut rng, mut stats) = (Rng::new(5), DraftStats::default());
        for _ in 0..20_000 {
            let drafted = own.propose(1, &mut rng);
            stats.add(drafted, own.accept(1, drafted, &mut rng));
        }
        let share = |count: u64| count as f64 / 20_000.0;
        assert!((share(stats.tokens) - 3.6).abs() < 0.03, "{}", share(stats.tokens));
        for (count, rate) in stats.accepted.iter().zip(&own.acceptance) {
            assert!((share(*count) - rate).abs() < 0.015, "{} for {rate}", share(*count));
        }
        let model = Speculation { drafter: Drafter::Model, ..own };
        assert_eq!(model.propose(1, &mut rng), 4, "a head proposes as many as it is asked for");
    }

    #[test]
    fn kinds_of_texts_take_turns() {
        let own = Speculation { kinds: vec![vec![0.0; 4], vec![1.0, 1.0, 0.0]], ..speculation(&[1.0; 4]) };
        let mut rng = Rng::new(1);
        assert_eq!([0, 1, 2, 3].map(|sequence| own.accept(sequence, 4, &mut rng)), [4, 0, 2, 4]);
    }

    #[test]
    fn drafts_follow_the_number_of_sequences() {
        let own = Speculation { by_sequences: vec![(1, 8, 4), (9, 16, 2), (17, 256, 0)], ..speculation(&[0.5]) };
        let mut rng = Rng::new(1);
        assert_eq!([1, 8, 9, 17, 300].map(|sequences| own.propose(sequences, &mut rng)), [4, 4, 2, 0, 4]);
        let seldom = Speculation { proposed: 0.25, ..speculation(&[0.5]) };
        let share = (0..4000).filter(|_| seldom.propose(1, &mut rng) > 0).count();
        assert!((900..1100).contains(&share), "{share}");
    }
}
