//! Watches one run and says when it has shown enough.
//!
//! A request's *strain* is its worst measure over the bound for it: 1 or less meets all objectives, failures are
//! infinite. So is a request that still runs when it can no longer meet them: a server that answers nothing has an
//! attainment of 0, not none.
//!
//! Requests are judged in the order in which they were due, and only as far as all before them are known. A miss takes
//! longer to become known than a hit, so whoever counts what has ended so far counts too few misses. Those due within
//! the warm-up find an empty server and count neither way.
//!
//! Three manners:
//!
//! - a **look** ends as soon as it can say anything. It fails at the first miss that is too many for its length (exact: no
//!   later hit can bring the share back). It holds when Wald's test, after [`EARLIEST`] of the length, prefers half the
//!   allowed misses to twice the allowed. At its length it goes by the share seen;
//! - a **sample** goes its length, for the count of its misses; it ends early at [`HOPELESS`] times the allowed misses;
//! - a **proof** goes its length and fails as a look does. It holds when the share seen is at the target and strain is not
//!   growing. If strain grows it goes on, to [`PATIENCE`] times its length, and fails if it grows still.
//!
//! Growing strain: a line through it ([`Trend`]) rises by more than chance and by more than a quarter of its middle. A queue
//! that grows has a long-run attainment of 0 whatever it shows so far.

use sluice_core::stats::{Estimate, RatioTest, TestState, Trend, proportion};

/// A proof goes on to this many times its length at most.
pub const PATIENCE: usize = 4;
/// Confidence of reported intervals.
pub const CONFIDENCE: f64 = 0.95;
/// A look may hold after this share of its length.
pub const EARLIEST: f64 = 0.5;
/// A sample ends at this many times the misses allowed for its length.
pub const HOPELESS: f64 = 10.0;
/// Errors of Wald's test.
const LOOK_ERROR: f64 = 0.05;
/// Strain above this is as bad as this: a stuck request must not outweigh a hundred others in a mean.
const WORST_STRAIN: f64 = 3.0;

/// What a run has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The objectives hold.
    Holds,
    /// They do not.
    Fails,
}

/// How thorough a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Ends as soon as it can.
    Look,
    /// Counts misses.
    Sample,
    /// Goes the whole length.
    Proof,
}

/// What one run is judged by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// How thorough.
    pub manner: Manner,
    /// Share of requests that must meet their objectives.
    pub target: f64,
    /// Requests at the start that do not count.
    pub warmup: usize,
    /// Requests that count, at least 1.
    pub length: usize,
}

/// One run under judgement.
#[derive(Clone, Debug)]
pub struct Judge {
    rule: Rule,
    /// By ordinal: seconds from the start when due, and strain; a strain of NaN is not known yet.
    seen: Vec<(f64, f64)>,
    /// All before this are known.
    known: usize,
    /// Known misses that count, wherever they are.
    misses: usize,
    wald: RatioTest,
    finding: Option<Finding>,
    /// The finding came from misses behind requests that are not known: all that is known counts.
    cut: bool,
}

impl Judge {
    /// A judge that has seen nothing.
    pub fn new(rule: Rule) -> Self {
        let allowed = 1.0 - rule.target;
        Self {
            rule: Rule { length: rule.length.max(1), ..rule },
            seen: Vec::new(),
            known: 0,
            misses: 0,
            wald: RatioTest::new(allowed / 2.0, allowed * 2.0, LOOK_ERROR),
            finding: None,
            cut: false,
        }
    }

    /// How many requests the run may need at most, the warm-up included.
    pub fn at_most(&self) -> usize {
        let times = if self.rule.manner == Manner::Proof { PATIENCE } else { 1 };
        self.rule.warmup + self.rule.length * times
    }

    /// The request with this `ordinal` (from 0, in the order due), `due` seconds after the start, has ended with this
    /// `strain`, or can no longer meet its objectives.
    ///
    /// The first word about a request counts. What comes after a finding is kept and changes nothing.
    pub fn record(&mut self, ordinal: usize, due: f64, strain: f64) {
        if ordinal >= self.at_most() {
            return;
        }
        if self.seen.len() <= ordinal {
            self.seen.resize(ordinal + 1, (f64::NAN, f64::NAN));
        }
        if !self.seen[ordinal].1.is_nan() {
            return;
        }
        // A strain that is not a number is a failure to measure, which is no success.
        let strain = if strain.is_nan() { f64::INFINITY } else { strain };
        self.seen[ordinal] = (due, strain);
        if ordinal >= self.rule.warmup && strain > 1.0 {
            self.misses += 1;
        }
        self.advance();
    }

    /// What the run has shown; nothing while it must go on.
    pub fn finding(&self) -> Option<Finding> {
        self.finding
    }

    /// Ends a run that cannot go on: by the share seen, but never in favour for a proof.
    pub fn close(&mut self) -> Finding {
        let holds = self.rule.manner != Manner::Proof && self.counted() > 0 && self.holds_so_far();
        *self.finding.get_or_insert(if holds { Finding::Holds } else { Finding::Fails })
    }

    /// Requests that count and are known, with all before them.
    fn counted(&self) -> usize {
        self.known.saturating_sub(self.rule.warmup)
    }

    /// Whether each request met its objectives, in the order due: of those that are known with all before them, or of all
    /// that are known when the run was ended by misses further on.
    pub fn hits(&self) -> Vec<bool> {
        self.series().map(|(_, strain)| strain <= 1.0).collect()
    }

    /// Attainment of the requests counted.
    pub fn attainment(&self) -> Estimate {
        let strains: Vec<f64> = self.series().map(|(_, strain)| strain.min(WORST_STRAIN)).collect();
        proportion::of_series_with(&self.hits(), &strains, CONFIDENCE)
    }

    /// Requests per second among those counted, by when they were due. Chance moves it by some percent from what was asked,
    /// and it is what the server had to bear.
    pub fn rate(&self) -> Option<f64> {
        // A late request among known ones was due in between, so the count is of all.
        let from = self.rule.warmup;
        let (first, last) = (self.seen.get(from)?.0, self.series().last()?.0);
        let count = self.seen.iter().rposition(|(due, _)| *due == last)? - from;
        let span = last - first;
        (count > 0 && span > 0.0).then(|| count as f64 / span)
    }

    fn series(&self) -> impl Iterator<Item = (f64, f64)> {
        let to = if self.cut { self.seen.len() } else { self.known };
        let counted = self.seen.get(self.rule.warmup..to).unwrap_or_default();
        counted.iter().copied().filter(|(_, strain)| !strain.is_nan())
    }

    fn holds_so_far(&self) -> bool {
        let hits = self.series().filter(|(_, strain)| *strain <= 1.0).count();
        hits as f64 >= self.rule.target * self.counted() as f64
    }

    fn advance(&mut self) {
        while let Some((_, strain)) = self.seen.get(self.known).copied().filter(|(_, strain)| !strain.is_nan()) {
            if self.known >= self.rule.warmup {
                self.wald.add(strain <= 1.0);
            }
            self.known += 1;
            self.decide();
        }
        let times = if self.rule.manner == Manner::Sample { HOPELESS } else { 1.0 };
        let allowed = (1.0 - self.rule.target) * self.rule.length as f64 * times;
        if self.finding.is_none() && self.misses as f64 > allowed + 1e-9 && self.counted() <= self.rule.length {
            (self.finding, self.cut) = (Some(Finding::Fails), true);
        }
    }

    /// Looks at the prefix that is known, after each of its requests.
    fn decide(&mut self) {
        if self.finding.is_some() {
            return;
        }
        let (counted, length) = (self.counted(), self.rule.length);
        let by_share = |holds| Some(if holds { Finding::Holds } else { Finding::Fails });
        self.finding = match self.rule.manner {
            Manner::Look | Manner::Sample if counted >= length => by_share(self.holds_so_far()),
            Manner::Sample => None,
            Manner::Look => {
                let early = counted as f64 >= EARLIEST * length as f64 && self.wald.state() == TestState::Acceptable;
                early.then_some(Finding::Holds)
            }
            Manner::Proof if counted == length || counted == 2 * length || counted == PATIENCE * length => {
                let grows = self.holds_so_far() && self.grows();
                if grows && counted < PATIENCE * length { None } else { by_share(self.holds_so_far() && !grows) }
            }
            Manner::Proof => None,
        };
    }

    /// Whether strain rises through the series. See the head of this file.
    fn grows(&self) -> bool {
        let bounded: Vec<f64> = self.series().map(|(_, strain)| strain.min(WORST_STRAIN)).collect();
        Trend::of_series(&bounded).is_some_and(|trend| trend.is_rising() && trend.rise > trend.mean / 4.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Rule = Rule { manner: Manner::Look, target: 0.99, warmup: 10, length: 1000 };
    const PROOF: Rule = Rule { manner: Manner::Proof, length: 2000, ..LOOK };

    /// Feeds strains in order until there is a finding; says it and how many were taken.
    fn feed(rule: Rule, strain: impl Fn(usize) -> f64) -> (Option<Finding>, usize) {
        let mut judge = Judge::new(rule);
        for ordinal in 0..judge.at_most() {
            judge.record(ordinal, ordinal as f64, strain(ordinal));
            if judge.finding().is_some() {
                return (judge.finding(), ordinal + 1);
            }
        }
        (judge.finding(), judge.at_most())
    }

    #[test]
    fn a_clean_look_ends_at_half_its_length_and_a_bad_one_at_the_miss_that_is_too_many() {
        assert_eq!(feed(LOOK, |_| 0.5), (Some(Finding::Holds), 510));
        // 10 misses in 1000 are allowed; the eleventh is at the 11th request that counts.
        assert_eq!(feed(LOOK, |_| f64::INFINITY), (Some(Finding::Fails), 21));
        // 1 miss in 50: the 11th is at ordinal 10 + 500.
        assert_eq!(feed(LOOK, |n| if (n - n.min(10)) % 50 == 0 { 2.0 } else { 0.5 }), (Some(Finding::Fails), 511));
    }

    #[test]
    fn a_sample_goes_on_where_a_look_has_failed_but_not_for_ever() {
        let sample = Rule { manner: Manner::Sample, ..LOOK };
        assert_eq!(feed(sample, |n| if n % 50 == 0 { 2.0 } else { 0.5 }), (Some(Finding::Fails), 1010));
        assert_eq!(feed(sample, |_| 0.5), (Some(Finding::Holds), 1010));
        assert_eq!(feed(sample, |_| 2.0), (Some(Finding::Fails), 111));
    }

    #[test]
    fn the_warm_up_does_not_count() {
        assert_eq!(feed(LOOK, |n| if n < 10 { 9.0 } else { 1.0 }), (Some(Finding::Holds), 510));
    }

    #[test]
    fn hits_behind_a_request_that_is_not_known_prove_nothing() {
        let mut judge = Judge::new(LOOK);
        (0..1010).filter(|n| *n != 300).for_each(|n| judge.record(n, n as f64, 0.5));
        assert_eq!((judge.finding(), judge.hits().len()), (None, 290));
        judge.record(300, 300.0, 2.0);
        assert_eq!(judge.finding(), Some(Finding::Holds));
        assert_eq!(judge.hits().len(), 1000);
        assert!((judge.rate().unwrap() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn misses_behind_a_request_that_is_not_known_count_at_once() {
        let mut judge = Judge::new(LOOK);
        (20..31).for_each(|n| judge.record(n, n as f64, f64::INFINITY));
        assert_eq!(judge.finding(), Some(Finding::Fails));
        assert_eq!(judge.hits(), [false; 11]);
    }

    #[test]
    fn a_queue_that_grows_is_not_proven_however_good_it_looks() {
        assert_eq!(feed(PROOF, |_| 0.5), (Some(Finding::Holds), 2010));
        // At its length everything has met its objectives; at twice the length it has not.
        let (finding, taken) = feed(PROOF, |n| 0.2 + 0.7 * n as f64 / 2010.0);
        assert_eq!(finding, Some(Finding::Fails));
        assert!(taken > 2010, "{taken}");
        // Rising and levelling off is a warm-up that was too short, not a queue that grows.
        assert_eq!(feed(PROOF, |n| 0.6 - 0.5 * f64::exp(-(n as f64) / 200.0)).0, Some(Finding::Holds));
    }

    #[test]
    fn what_is_cut_short_proves_nothing() {
        let mut look = Judge::new(LOOK);
        assert_eq!(look.clone().close(), Finding::Fails, "nothing seen");
        (0..300).for_each(|n| look.record(n, n as f64, 0.5));
        assert_eq!(look.close(), Finding::Holds);
        let mut proof = Judge::new(PROOF);
        (0..300).for_each(|n| proof.record(n, n as f64, 0.5));
        assert_eq!(proof.close(), Finding::Fails);
    }

    #[test]
    fn the_first_word_about_a_request_counts() {
        let mut judge = Judge::new(LOOK);
        judge.record(0, 0.0, 0.5);
        judge.record(0, 0.0, f64::INFINITY);
        judge.record(1, 0.1, f64::NAN);
        assert_eq!(judge.seen[..2], [(0.0, 0.5), (0.1, f64::INFINITY)]);
    }
}
