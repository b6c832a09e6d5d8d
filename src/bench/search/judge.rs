//! Decides one trial: whether the objectives hold at its rate.
//!
//! The *SLO ratio* of a request is the largest of its measures divided by their bounds: 1 or less meets all objectives. It is
//! infinite for a failed request, and for one in flight that can no longer meet its objectives, so that a server which
//! never responds has an attainment of 0.
//!
//! Requests are judged in the order in which they were due, and only when all requests before them are known: a miss becomes
//! known later than a hit, so counting requests as they end would count too few misses. Requests due within the warm-up
//! meet an empty server and do not count.
//!
//! - A **look** ends as soon as it can decide. It fails when it has more misses than its full length allows. After
//!   [`EARLIEST`] of the length it holds when Wald's test prefers half the allowed share of misses to twice that share. At
//!   its full length the share of hits decides.
//! - A **sample** runs its full length to count misses. It ends early at [`HOPELESS`] times the allowed misses.
//! - A **proof** runs its full length and fails as a look does. It holds when the share of hits reaches the target and SLO
//!   ratios do not grow. While they grow, it continues, to at most [`MAX_EXTENSION`] times its length, and then fails.
//!
//! Requests may belong to *groups*, such as classes and adapters. The objectives hold when they hold in every group, so the
//! worst group decides. Without groups all requests are one.
//!
//! SLO ratios grow when a line fitted to them ([`Trend`]) rises significantly and by more than a quarter of its mean. A
//! queue that keeps growing has a long-run attainment of 0, whatever the attainment so far.

use sluice_core::stats::{Estimate, RatioTest, TestState, Trend, proportion};

use super::trial::{TrialKind, TrialRule, TrialVerdict};

/// A proof continues to at most this many times its length.
const MAX_EXTENSION: usize = 4;
/// Confidence of reported intervals.
const CONFIDENCE: f64 = 0.95;
/// A look may hold after this share of its length.
const EARLIEST: f64 = 0.5;
/// A sample ends at this many times the allowed misses.
const HOPELESS: f64 = 10.0;
/// Both error probabilities of Wald's test.
const LOOK_ERROR: f64 = 0.05;
/// Ratios are limited to this one, so that one stuck request does not dominate a mean.
const MAX_SLO_RATIO: f64 = 3.0;

/// A request as the judge knows it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct JudgedRequest {
    /// When it was due, seconds from the start.
    due: f64,
    slo_ratio: f64,
    group: usize,
}

/// What is counted of one group.
#[derive(Clone, Debug)]
struct Group {
    /// Known misses that count, whether or not all requests before them are known.
    misses: usize,
    /// Requests before which all are known, and the misses among them; without the warm-up.
    counted: usize,
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
    /// Requests by number in the order due. An unknown ratio is NaN.
    requests: Vec<JudgedRequest>,
    /// All requests before this one are known.
    known: usize,
    groups: Vec<Group>,
    verdict: Option<TrialVerdict>,
    /// Whether misses after unknown requests decided: then all known requests count.
    ended_by_known_misses: bool,
}

impl Judge {
    /// A judge of a trial that has not begun.
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

    /// The most requests that the trial may need, the warm-up included.
    pub fn max_requests(&self) -> usize {
        let times = if self.rule.kind == TrialKind::Proof { MAX_EXTENSION } else { 1 };
        self.rule.warmup + self.rule.length * times
    }

    /// The request with this `ordinal` (from 0, in the order due), `due` seconds after the start, has ended with this
    /// `slo_ratio`, or can no longer meet its objectives.
    ///
    /// Only the first record of a request counts. Records after the verdict do not change it.
    pub fn record(&mut self, ordinal: usize, due: f64, slo_ratio: f64) {
        self.record_in(0, ordinal, due, slo_ratio);
    }

    /// The same for a request of a `group`. Groups are numbered from 0, and every number below the largest is one.
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
        // A ratio that is not a number was not measured, which is not a hit.
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

    /// Ends a trial that cannot continue: the share of hits so far decides, but an unfinished proof fails.
    pub fn close(&mut self) -> TrialVerdict {
        let holds = self.rule.kind != TrialKind::Proof && self.counted() > 0 && self.holds_so_far();
        *self.verdict.get_or_insert(if holds { TrialVerdict::Holds } else { TrialVerdict::Fails })
    }

    /// Requests that count, as far as all before them are known.
    fn counted(&self) -> usize {
        self.known.saturating_sub(self.rule.warmup)
    }

    /// Whether each counted request met its objectives, in the order due. These are the requests before which all are known;
    /// or all known ones, when misses further on ended the trial.
    pub fn hits(&self) -> Vec<bool> {
        self.series().map(|request| request.is_hit()).collect()
    }

    /// The same for the requests of one group.
    pub fn hits_of(&self, group: usize) -> Vec<bool> {
        self.series().filter(|request| request.group == group).map(|request| request.is_hit()).collect()
    }

    /// Their SLO ratios, limited to [`MAX_SLO_RATIO`].
    pub(super) fn ratios_of(&self, group: usize) -> Vec<f64> {
        let requests = self.series().filter(|request| request.group == group);
        requests.map(|request| request.slo_ratio.min(MAX_SLO_RATIO)).collect()
    }

    /// Number of groups, at least 1.
    pub fn groups(&self) -> usize {
        self.groups.len().max(1)
    }

    /// The group with the lowest attainment, and its attainment, of the requests counted.
    pub fn worst(&self) -> (usize, Estimate) {
        let of_group = |group: usize| {
            (group, proportion::of_series_with(&self.hits_of(group), &self.ratios_of(group), CONFIDENCE))
        };
        // A group without a request says nothing.
        let counted = (0..self.groups()).filter(|group| self.series().any(|request| request.group == *group));
        let worst = counted.map(of_group).min_by(|one, other| one.1.value.total_cmp(&other.1.value));
        worst.unwrap_or_else(|| (0, proportion::of_series(&[], CONFIDENCE)))
    }

    /// Attainment of the worst group.
    pub fn attainment(&self) -> Estimate {
        self.worst().1
    }

    /// Requests per second among those counted, by when they were due. This is the load that the server really had; chance
    /// moves it a few percent from the requested rate.
    pub fn rate(&self) -> Option<f64> {
        // Requests that are not known yet were due in between, so all count.
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

    /// Whether a group has more misses than its share of the full length allows. With one group that is exact; with several,
    /// the share is that of the requests so far.
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

    /// Decides from the requests before the first unknown one, after each of them.
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

    /// Whether SLO ratios rise through the series, as the header defines it.
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

    /// Records ratios in order until there is a verdict. Returns it with the number of records.
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
        // 10 misses in 1000 are allowed; the eleventh is at the 11th request that counts.
        assert_eq!(feed(LOOK, |_| f64::INFINITY), (Some(TrialVerdict::Fails), 21));
        // 1 miss in 50: the 11th is at ordinal 10 + 500.
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
        // At its length everything has met its objectives; at twice the length it has not.
        let (verdict, taken) = feed(PROOF, |n| 0.2 + 0.7 * n as f64 / 2010.0);
        assert_eq!(verdict, Some(TrialVerdict::Fails));
        assert!(taken > 2010, "{taken}");
        // Rising and levelling off is a warm-up that was too short, not a queue that grows.
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
