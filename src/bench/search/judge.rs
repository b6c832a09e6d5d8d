//! Decides one trial: whether the objectives hold at a rate.
//!
//! The *SLO ratio* of a request is the largest ratio of a measure to the bound; up to 1, the
//! objectives are met. It is infinite for a failed request, and for a request in flight that is too
//! late. Misses become known later than hits, so a request counts only once all requests that were
//! due earlier are known.
//!
//! - A **look** fails once it has more misses than the trial's length allows. From [`EARLIEST`] of
//!   the length on, it holds if Wald's test decides for half the allowed share of misses against
//!   twice that share.
//! - A **sample** counts misses at full length, but ends at [`HOPELESS`] times the allowed misses.
//! - A **proof** fails as a look does. At full length, it holds if the share of hits reaches the
//!   target and SLO ratios do not grow. While they grow, the proof goes on, up to [`MAX_EXTENSION`]
//!   lengths.
//!
//! With *groups*, the objectives must hold in every group.

use sluice_core::stats::{Estimate, RatioTest, TestState, Trend, proportion};

use super::trial::{TrialKind, TrialRule, TrialVerdict};

const MAX_EXTENSION: usize = 4;
const CONFIDENCE: f64 = 0.95;
const EARLIEST: f64 = 0.5;
const HOPELESS: f64 = 10.0;
/// Both error probabilities of Wald's test.
const LOOK_ERROR: f64 = 0.05;
/// Largest SLO ratio in a mean, so that no stuck request dominates it.
const MAX_SLO_RATIO: f64 = 3.0;

#[derive(Clone, Copy, Debug, PartialEq)]
struct JudgedRequest {
    due: f64,
    slo_ratio: f64,
    group: usize,
}

#[derive(Clone, Debug)]
struct Group {
    /// Known misses after the warm-up, even if earlier requests are unknown.
    misses: usize,
    /// Requests after the warm-up and before the first unknown one.
    counted: usize,
    /// Misses among `counted`.
    missed: usize,
    wald: RatioTest,
}

impl JudgedRequest {
    const UNKNOWN: Self = Self { due: f64::NAN, slo_ratio: f64::NAN, group: 0 };

    fn is_known(&self) -> bool {
        !self.slo_ratio.is_nan()
    }

    fn is_hit(&self) -> bool {
        self.slo_ratio <= 1.0
    }
}

/// Judges one trial.
#[derive(Clone, Debug)]
pub struct Judge {
    rule: TrialRule,
    /// Requests in the order due. The ratio of a request that is not known yet is NaN.
    requests: Vec<JudgedRequest>,
    /// Number of requests before the first unknown one.
    known: usize,
    groups: Vec<Group>,
    verdict: Option<TrialVerdict>,
    /// Whether misses after unknown requests decided the verdict. All known requests then count.
    ended_by_known_misses: bool,
}

impl Judge {
    /// A judge for a trial that has not begun.
    pub fn new(rule: TrialRule) -> Self {
        Self {
            rule: TrialRule { length: rule.length.max(1), ..rule },
            requests: Vec::new(),
            known: 0,
            groups: Vec::new(),
            verdict: None,
            ended_by_known_misses: false,
        }
    }

    /// The most requests of the trial, with the warm-up.
    pub fn max_requests(&self) -> usize {
        let times = if self.rule.kind == TrialKind::Proof { MAX_EXTENSION } else { 1 };
        self.rule.warmup + self.rule.length * times
    }

    /// Records request `ordinal` (from 0, in the order due), due `due` seconds after the start:
    /// with `slo_ratio`, or with infinity once the objectives cannot be met. Only the first record
    /// of a request counts.
    pub fn record(&mut self, ordinal: usize, due: f64, slo_ratio: f64) {
        self.record_in(0, ordinal, due, slo_ratio);
    }

    /// Like [`Judge::record`], in a `group`. Groups are numbered from 0 without gaps.
    pub fn record_in(&mut self, group: usize, ordinal: usize, due: f64, slo_ratio: f64) {
        if ordinal >= self.max_requests() {
            return;
        }
        if self.requests.len() <= ordinal {
            self.requests.resize(ordinal + 1, JudgedRequest::UNKNOWN);
        }
        if self.requests[ordinal].is_known() {
            return;
        }
        let slo_ratio = if slo_ratio.is_nan() { f64::INFINITY } else { slo_ratio };
        self.requests[ordinal] = JudgedRequest { due, slo_ratio, group };
        let allowed = 1.0 - self.rule.target;
        let wald = || RatioTest::new(allowed / 2.0, allowed * 2.0, LOOK_ERROR);
        while self.groups.len() <= group {
            self.groups.push(Group { misses: 0, counted: 0, missed: 0, wald: wald() });
        }
        if ordinal >= self.rule.warmup && slo_ratio > 1.0 {
            self.groups[group].misses += 1;
        }
        self.advance();
    }

    /// The verdict; `None` while the trial must continue.
    pub fn verdict(&self) -> Option<TrialVerdict> {
        self.verdict
    }

    /// Ends a trial that cannot continue. The share of hits so far decides, but an unfinished proof
    /// fails.
    pub fn close(&mut self) -> TrialVerdict {
        let holds = self.rule.kind != TrialKind::Proof && self.counted() > 0 && self.holds_so_far();
        *self.verdict.get_or_insert(if holds { TrialVerdict::Holds } else { TrialVerdict::Fails })
    }

    fn counted(&self) -> usize {
        self.known.saturating_sub(self.rule.warmup)
    }

    /// Whether each counted request met the objectives, in the order due: the requests before the
    /// first unknown one, or all known ones if misses after it ended the trial.
    pub fn hits(&self) -> Vec<bool> {
        self.series().map(|request| request.is_hit()).collect()
    }

    /// [`Judge::hits`] of one group.
    pub fn hits_of(&self, group: usize) -> Vec<bool> {
        self.series().filter(|request| request.group == group).map(|request| request.is_hit()).collect()
    }

    /// The SLO ratios of [`Judge::hits_of`], limited to [`MAX_SLO_RATIO`].
    pub(super) fn ratios_of(&self, group: usize) -> Vec<f64> {
        let requests = self.series().filter(|request| request.group == group);
        requests.map(|request| request.slo_ratio.min(MAX_SLO_RATIO)).collect()
    }

    /// The number of groups, at least 1.
    pub fn groups(&self) -> usize {
        self.groups.len().max(1)
    }

    /// The group with the lowest attainment, and that attainment.
    pub fn worst(&self) -> (usize, Estimate) {
        let of_group = |group: usize| {
            (group, proportion::of_series_with(&self.hits_of(group), &self.ratios_of(group), CONFIDENCE))
        };
        let counted = (0..self.groups()).filter(|group| self.series().any(|request| request.group == *group));
        let worst = counted.map(of_group).min_by(|one, other| one.1.value.total_cmp(&other.1.value));
        worst.unwrap_or_else(|| (0, proportion::of_series(&[], CONFIDENCE)))
    }

    /// Attainment of the worst group.
    pub fn attainment(&self) -> Estimate {
        self.worst().1
    }

    /// Counted requests per second of due times. By chance it differs from the requested rate by a
    /// few percent.
    pub fn rate(&self) -> Option<f64> {
        // Unknown requests in between were due as well, so they count.
        let from = self.rule.warmup;
        let (first, last) = (self.requests.get(from)?.due, self.series().last()?.due);
        let count = self.requests.iter().rposition(|request| request.due == last)? - from;
        let span = last - first;
        (count > 0 && span > 0.0).then(|| count as f64 / span)
    }

    fn series(&self) -> impl Iterator<Item = JudgedRequest> {
        let to = if self.ended_by_known_misses { self.requests.len() } else { self.known };
        let counted = self.requests.get(self.rule.warmup..to).unwrap_or_default();
        counted.iter().copied().filter(JudgedRequest::is_known)
    }

    fn holds_so_far(&self) -> bool {
        let holds = |group: &Group| (group.counted - group.missed) as f64 >= self.rule.target * group.counted as f64;
        self.groups.iter().all(holds)
    }

    /// Whether a group has more misses than the full length allows for the group's share of the
    /// requests so far.
    fn has_too_many_misses(&self) -> bool {
        let times = if self.rule.kind == TrialKind::Sample { HOPELESS } else { 1.0 };
        let allowed = (1.0 - self.rule.target) * self.rule.length as f64 * times;
        let total: usize = self.groups.iter().map(|group| group.counted).sum();
        self.groups.iter().any(|group| {
            let share = match (self.groups.len(), total) {
                (0 | 1, _) | (_, 0) => 1.0,
                _ => group.counted.max(group.misses) as f64 / total.max(group.misses) as f64,
            };
            group.misses as f64 > allowed * share + 1e-9
        })
    }

    fn advance(&mut self) {
        while let Some(request) = self.requests.get(self.known).copied().filter(JudgedRequest::is_known) {
            if self.known >= self.rule.warmup {
                let group = &mut self.groups[request.group];
                group.wald.add(request.is_hit());
                group.counted += 1;
                group.missed += usize::from(!request.is_hit());
            }
            self.known += 1;
            self.decide();
        }
        if self.verdict.is_none() && self.counted() <= self.rule.length && self.has_too_many_misses() {
            (self.verdict, self.ended_by_known_misses) = (Some(TrialVerdict::Fails), true);
        }
    }

    fn decide(&mut self) {
        if self.verdict.is_some() {
            return;
        }
        let (counted, length) = (self.counted(), self.rule.length);
        let by_share = |holds| Some(if holds { TrialVerdict::Holds } else { TrialVerdict::Fails });
        self.verdict = match self.rule.kind {
            TrialKind::Look | TrialKind::Sample if counted >= length => by_share(self.holds_so_far()),
            TrialKind::Sample => None,
            TrialKind::Look => {
                let acceptable = |group: &Group| group.counted == 0 || group.wald.state() == TestState::Acceptable;
                let early = counted as f64 >= EARLIEST * length as f64 && self.groups.iter().all(acceptable);
                early.then_some(TrialVerdict::Holds)
            }
            TrialKind::Proof if counted == length || counted == 2 * length || counted == MAX_EXTENSION * length => {
                let is_growing = self.holds_so_far() && self.is_growing();
                if is_growing && counted < MAX_EXTENSION * length {
                    None
                } else {
                    by_share(self.holds_so_far() && !is_growing)
                }
            }
            TrialKind::Proof => None,
        };
    }

    /// Whether a line fitted to the SLO ratios ([`Trend`]) rises significantly, and by over a
    /// quarter of their mean. A queue that keeps growing has a long-run attainment of 0, whatever
    /// the attainment so far.
    pub(super) fn is_growing(&self) -> bool {
        let bounded: Vec<f64> = self.series().map(|request| request.slo_ratio.min(MAX_SLO_RATIO)).collect();
        Trend::of_series(&bounded).is_some_and(|trend| trend.is_rising() && trend.rise > trend.mean / 4.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: TrialRule = TrialRule { kind: TrialKind::Look, target: 0.99, warmup: 10, length: 1000 };
    const PROOF: TrialRule = TrialRule { kind: TrialKind::Proof, length: 2000, ..LOOK };

    fn feed(rule: TrialRule, slo_ratio: impl Fn(usize) -> f64) -> (Option<TrialVerdict>, usize) {
        let mut judge = Judge::new(rule);
        for ordinal in 0..judge.max_requests() {
            judge.record(ordinal, ordinal as f64, slo_ratio(ordinal));
            if judge.verdict().is_some() {
                return (judge.verdict(), ordinal + 1);
            }
        }
        (judge.verdict(), judge.max_requests())
    }

    #[test]
    fn a_clean_look_ends_at_half_its_length_and_a_bad_one_at_the_miss_that_is_too_many() {
        assert_eq!(feed(LOOK, |_| 0.5), (Some(TrialVerdict::Holds), 510));
        // 10 misses in 1000 are allowed, and the eleventh miss is the eleventh request that counts.
        assert_eq!(feed(LOOK, |_| f64::INFINITY), (Some(TrialVerdict::Fails), 21));
        assert_eq!(feed(LOOK, |n| if (n - n.min(10)) % 50 == 0 { 2.0 } else { 0.5 }), (Some(TrialVerdict::Fails), 511));
    }

    #[test]
    fn a_sample_continues_where_a_look_has_failed_but_not_without_end() {
        let sample = TrialRule { kind: TrialKind::Sample, ..LOOK };
        assert_eq!(feed(sample, |n| if n % 50 == 0 { 2.0 } else { 0.5 }), (Some(TrialVerdict::Fails), 1010));
        assert_eq!(feed(sample, |_| 0.5), (Some(TrialVerdict::Holds), 1010));
        assert_eq!(feed(sample, |_| 2.0), (Some(TrialVerdict::Fails), 111));
    }

    #[test]
    fn the_warm_up_does_not_count() {
        assert_eq!(feed(LOOK, |n| if n < 10 { 9.0 } else { 1.0 }), (Some(TrialVerdict::Holds), 510));
    }

    #[test]
    fn hits_after_an_unknown_request_do_not_count_yet() {
        let mut judge = Judge::new(LOOK);
        (0..1010).filter(|n| *n != 300).for_each(|n| judge.record(n, n as f64, 0.5));
        assert_eq!((judge.verdict(), judge.hits().len()), (None, 290));
        judge.record(300, 300.0, 2.0);
        assert_eq!(judge.verdict(), Some(TrialVerdict::Holds));
        assert_eq!(judge.hits().len(), 1000);
        assert!((judge.rate().unwrap() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn misses_after_an_unknown_request_count_at_once() {
        let mut judge = Judge::new(LOOK);
        (20..31).for_each(|n| judge.record(n, n as f64, f64::INFINITY));
        assert_eq!(judge.verdict(), Some(TrialVerdict::Fails));
        assert_eq!(judge.hits(), [false; 11]);
    }

    #[test]
    fn a_queue_that_grows_is_not_proven_whatever_its_attainment() {
        assert_eq!(feed(PROOF, |_| 0.5), (Some(TrialVerdict::Holds), 2010));
        // After two lengths, some requests have missed the objectives.
        let (verdict, taken) = feed(PROOF, |n| 0.2 + 0.7 * n as f64 / 2010.0);
        assert_eq!(verdict, Some(TrialVerdict::Fails));
        assert!(taken > 2010, "{taken}");
        // Ratios that rise and level off come from a short warm-up.
        assert_eq!(feed(PROOF, |n| 0.6 - 0.5 * f64::exp(-(n as f64) / 200.0)).0, Some(TrialVerdict::Holds));
    }

    #[test]
    fn a_trial_that_is_cut_short_proves_nothing() {
        let mut look = Judge::new(LOOK);
        assert_eq!(look.clone().close(), TrialVerdict::Fails, "no request recorded");
        (0..300).for_each(|n| look.record(n, n as f64, 0.5));
        assert_eq!(look.close(), TrialVerdict::Holds);
        let mut proof = Judge::new(PROOF);
        (0..300).for_each(|n| proof.record(n, n as f64, 0.5));
        assert_eq!(proof.close(), TrialVerdict::Fails);
    }

    #[test]
    fn only_the_first_record_of_a_request_counts() {
        let mut judge = Judge::new(LOOK);
        judge.record(0, 0.0, 0.5);
        judge.record(0, 0.0, f64::INFINITY);
        judge.record(1, 0.1, f64::NAN);
        let ratios: Vec<f64> = judge.requests.iter().map(|request| request.slo_ratio).collect();
        assert_eq!(ratios, [0.5, f64::INFINITY]);
    }
}
