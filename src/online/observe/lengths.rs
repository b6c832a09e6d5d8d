//! A histogram of prompt lengths on a fixed geometric grid.
//!
//! A threshold between short and long prompts can lie only between lengths that occur. A bin is 19
//! % wide, so lengths that differ by more are in different bins. Bounds: [`BINS`].

/// Bins per doubling of the length.
const PER_OCTAVE: f64 = 4.0;
/// Lower end of the first bin, in tokens; shorter prompts count there.
const FIRST: f64 = 16.0;
/// The last bin begins at 16 * 2^(67/4), about 1.8 million tokens.
const BINS: usize = 68;

/// Counts of prompts by length.
#[derive(Clone, Debug, PartialEq)]
pub struct Lengths {
    counts: Vec<f64>,
}

impl Default for Lengths {
    fn default() -> Self {
        Self { counts: vec![0.0; BINS] }
    }
}

fn bin(tokens: u64) -> usize {
    let octaves = (tokens as f64 / FIRST).max(1.0).log2();
    ((octaves * PER_OCTAVE) as usize).min(BINS - 1)
}

fn last_in(bin: usize) -> u64 {
    (FIRST * ((bin + 1) as f64 / PER_OCTAVE).exp2()).ceil() as u64 - 1
}

impl Lengths {
    /// Counts a prompt of `tokens`.
    pub fn add(&mut self, tokens: u64) {
        self.counts[bin(tokens)] += 1.0;
    }

    /// Number of prompts.
    pub fn total(&self) -> f64 {
        self.counts.iter().sum()
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(own, other)| *own += other);
    }

    /// Share of the prompts above the bin of `tokens`; 0 without prompts.
    pub fn share_above(&self, tokens: u64) -> f64 {
        let total = self.total();
        let above: f64 = self.counts.iter().skip(bin(tokens) + 1).sum();
        if total > 0.0 { above / total } else { 0.0 }
    }

    /// The next length above `tokens` such that prompts between the two lengths have at least
    /// `share` of all prompt *tokens*. `None`: all longer prompts together have less.
    pub fn next_above(&self, tokens: u64, share: f64) -> Option<u64> {
        let (all, mut between) = (self.tokens().sum::<f64>(), 0.0);
        let found = self.tokens().enumerate().skip(bin(tokens) + 1).find(|(_, tokens)| {
            between += tokens;
            between > 0.0 && between >= share * all
        });
        found.map(|(at, _)| last_in(at))
    }

    /// [`next_above`](Self::next_above) for the next length below.
    pub fn next_below(&self, tokens: u64, share: f64) -> Option<u64> {
        let (all, mut between) = (self.tokens().sum::<f64>(), 0.0);
        let bins: Vec<f64> = self.tokens().collect();
        let found = (0..=bin(tokens)).rev().find(|at| {
            between += bins[*at];
            between > 0.0 && between >= share * all
        });
        found.filter(|at| *at > 0).map(|at| last_in(at - 1))
    }

    /// Prompt tokens in each bin, as if each prompt were as long as the bin allows.
    fn tokens(&self) -> impl Iterator<Item = f64> + '_ {
        self.counts.iter().enumerate().map(|(at, count)| count * last_in(at) as f64)
    }

    /// Hellinger distance of two distributions: 0 (equal, or one empty) to 1 (disjoint).
    pub fn distance(&self, other: &Self) -> f64 {
        let (own, theirs) = (self.total(), other.total());
        if own == 0.0 || theirs == 0.0 {
            return 0.0;
        }
        let common: f64 = self.counts.iter().zip(&other.counts).map(|(a, b)| (a / own * b / theirs).sqrt()).sum();
        (1.0 - common).max(0.0).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_kinds() -> Lengths {
        let mut lengths = Lengths::default();
        (0..300).for_each(|_| lengths.add(200));
        (0..20).for_each(|_| lengths.add(16_000));
        lengths
    }

    #[test]
    fn the_next_length_separates_kinds_of_prompts() {
        let lengths = two_kinds();
        let above = lengths.next_above(64, 0.05).unwrap();
        assert!((200..400).contains(&above), "{above}");
        let above = lengths.next_above(above, 0.05).unwrap();
        assert!((16_000..20_000).contains(&above), "{above}");
        assert_eq!(lengths.next_above(above, 0.05), None);
        let below = lengths.next_below(100_000, 0.05).unwrap();
        assert!((10_000..16_000).contains(&below), "{below}");
        let below = lengths.next_below(below, 0.05).unwrap();
        assert!((100..200).contains(&below), "{below}");
        assert_eq!(lengths.next_below(below, 0.05), None);
    }

    #[test]
    fn shares_and_distances() {
        let lengths = two_kinds();
        assert_eq!(lengths.share_above(1_000), 20.0 / 320.0);
        assert_eq!((lengths.share_above(16_000), lengths.distance(&lengths)), (0.0, 0.0));
        let mut other = Lengths::default();
        other.add(3_000);
        assert_eq!((lengths.distance(&other), Lengths::default().distance(&other)), (1.0, 0.0));
        let mut lasting = Lengths::default();
        [0, 1, u64::MAX].iter().for_each(|tokens| lasting.add(*tokens));
        assert_eq!(lasting.total(), 3.0);
    }
}
