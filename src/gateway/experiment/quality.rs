//! Quality next to speed: how answers end, without keeping their text, and how users rate them.
//!
//! An answer that ends at the token limit is cut off. An answer that the engine marks as a refusal
//! did not help. Users rate answers as good or bad through the admin API, by request id; a second
//! rating replaces the first.
//!
//! Bounds: the latest [`RATEABLE`] answers of an experiment can be rated, 50 bytes each, and none
//! from before a restart of the gateway.

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};
use sluice_core::openai::{Answer, FinishReason};
use twox_hash::XxHash3_64;

use super::counts::Counts;

/// Answers of an experiment that can be rated: the latest ones.
pub const RATEABLE: usize = 65_536;

/// How the answers of one arm ended and were rated.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    pub(super) answers: Counts,
    /// Answers that were cut off at their token limit.
    pub(super) truncated: Counts,
    /// Answers that are marked as refusals.
    pub(super) refused: Counts,
    pub(super) rated: Counts,
    pub(super) bad: Counts,
    /// Answers by how they ended, in the order of [`FinishReason::ALL`].
    finish: [f64; FinishReason::ALL.len()],
}

impl Quality {
    pub(super) fn add(&mut self, group: usize, answer: Answer) {
        let Some(finish) = answer.finish else { return };
        let count = |counts: &mut Counts, happened: bool| counts.0[group] += f64::from(u8::from(happened));
        count(&mut self.answers, true);
        count(&mut self.truncated, finish == FinishReason::Length);
        count(&mut self.refused, answer.refused);
        self.finish[finish as usize] += 1.0;
    }

    /// Adds a rating that replaces `before`.
    pub(super) fn rate(&mut self, group: usize, good: bool, before: Option<bool>) {
        self.rated.0[group] += f64::from(u8::from(before.is_none()));
        self.bad.0[group] += f64::from(i8::from(!good) - i8::from(before == Some(false)));
    }

    /// How many answers ended for each reason.
    pub fn finish(&self) -> Vec<(FinishReason, u64)> {
        FinishReason::ALL.into_iter().zip(self.finish).map(|(reason, count)| (reason, count as u64)).collect()
    }

    /// Answers that were marked as refusals.
    pub fn refused(&self) -> u64 {
        self.refused.total() as u64
    }

    /// Answers that were rated as bad, and all rated answers.
    pub fn ratings(&self) -> (u64, u64) {
        (self.bad.total() as u64, self.rated.total() as u64)
    }
}

#[derive(Clone, Copy, Debug)]
struct Rateable {
    /// The number of the answer, which wraps around.
    number: u32,
    arm: u8,
    group: u8,
    rating: Option<bool>,
}

/// The latest answers of an experiment, by a hash of their request ids.
#[derive(Debug, Default)]
pub(super) struct AnswerIds {
    answers: HashMap<u64, Rateable>,
    /// Oldest first, with their numbers. An id that was used again occurs more than once.
    order: VecDeque<(u64, u32)>,
    next: u32,
}

impl AnswerIds {
    /// Notes an answer. An id that a client uses again refers to the latest answer.
    pub(super) fn note(&mut self, request_id: &str, arm: usize, group: usize) {
        let id = XxHash3_64::oneshot(request_id.as_bytes());
        // Both numbers fit, because there are few arms and 64 groups.
        let answer = Rateable { number: self.next, arm: arm as u8, group: group as u8, rating: None };
        if self.order.len() >= RATEABLE
            && let Some((oldest, number)) = self.order.pop_front()
            && self.answers.get(&oldest).is_some_and(|answer| answer.number == number)
        {
            self.answers.remove(&oldest);
        }
        self.answers.insert(id, answer);
        self.order.push_back((id, self.next));
        self.next = self.next.wrapping_add(1);
    }

    /// Rates an answer. Returns the arm, the group and the rating before; `None`: unknown.
    pub(super) fn rate(&mut self, request_id: &str, good: bool) -> Option<(usize, usize, Option<bool>)> {
        let answer = self.answers.get_mut(&XxHash3_64::oneshot(request_id.as_bytes()))?;
        Some((answer.arm.into(), answer.group.into(), answer.rating.replace(good)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_answers_can_be_rated_and_older_ones_are_forgotten() {
        let mut recent = AnswerIds::default();
        for number in 0..=RATEABLE {
            recent.note(&format!("request-{number}"), number % 2, number % 64);
        }
        assert_eq!(recent.rate("request-0", true), None);
        assert_eq!(recent.rate("request-65", true), Some((1, 1, None)));
        assert_eq!(recent.rate("request-65", false), Some((1, 1, Some(true))));
        recent.note("request-65", 0, 7);
        assert_eq!(recent.rate("request-65", false), Some((0, 7, None)), "the id was used again");
        assert_eq!((recent.answers.len(), recent.order.len()), (RATEABLE - 1, RATEABLE));
    }

    #[test]
    fn an_answer_whose_id_was_used_before_can_be_rated_as_long_as_any_other() {
        let mut recent = AnswerIds::default();
        for number in 0..RATEABLE {
            recent.note(&format!("request-{number}"), 0, 0);
        }
        recent.note("request-1", 1, 7);
        for number in 0..RATEABLE - 1 {
            recent.note(&format!("later-{number}"), 0, 0);
        }
        assert_eq!(recent.rate("request-1", true), Some((1, 7, None)));
        recent.note("last", 0, 0);
        assert_eq!(recent.rate("request-1", true), None);
        assert_eq!((recent.answers.len(), recent.order.len()), (RATEABLE, RATEABLE));
    }

    #[test]
    fn a_second_rating_replaces_the_first() {
        let mut quality = Quality::default();
        quality.rate(3, false, None);
        quality.rate(3, false, Some(false));
        assert_eq!(quality.ratings(), (1, 1));
        quality.rate(3, true, Some(false));
        assert_eq!(quality.ratings(), (0, 1));
    }
}
