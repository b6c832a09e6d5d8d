//! Two measures at once: the settings that no other one beats in both.
//!
//! A trial *dominates* another if it is at least as good in both measures and better in one. The
//! *front* holds the trials that no other trial dominates. [`Weight::score`] combines a pair into
//! one number (augmented Chebyshev; Knowles 2006, ParEGO), so that each member of a front is the
//! best for some weight.

use crate::goal::{Goal, score_of};
use crate::trial::{Outcome, Trial};

pub(crate) type Pair = [f64; 2];

/// Prefers, among settings that are best in one measure, the one that is less far off in the other.
const AUGMENT: f64 = 0.05;

/// The scores of a trial in both measures. After a lost race, they are rough.
pub(crate) fn pair(trial: &Trial, goal: &Goal) -> Option<Pair> {
    let own = match &trial.outcome {
        Outcome::Measured { value, .. } => value.value,
        Outcome::Worse { guess } if *guess > 0.0 => *guess,
        _ => return None,
    };
    let sense = goal.against.as_ref()?.sense();
    let mean = trial.against.iter().sum::<f64>() / trial.against.len() as f64;
    mean.is_finite().then(|| [goal.score(own), score_of(sense, mean)])
}

fn dominates(one: Pair, other: Pair) -> bool {
    one != other && one.iter().zip(other).all(|(one, other)| *one >= other)
}

/// The measured trials that no other trial dominates, the best in the objective first. Of equal
/// trials, only the first is returned.
pub(crate) fn front<'a>(trials: impl Iterator<Item = &'a Trial>, goal: &Goal) -> Vec<&'a Trial> {
    let measured = trials.filter(|trial| trial.value().is_some());
    let all: Vec<(Pair, &Trial)> = measured.filter_map(|trial| Some((pair(trial, goal)?, trial))).collect();
    let mut members: Vec<(Pair, &Trial)> = Vec::new();
    for (own, trial) in &all {
        let is_beaten = all.iter().any(|(other, _)| dominates(*other, *own));
        if !is_beaten && !members.iter().any(|(other, _)| other == own) {
            members.push((*own, trial));
        }
    }
    members.sort_by(|one, other| other.0[0].total_cmp(&one.0[0]));
    members.into_iter().map(|(_, trial)| trial).collect()
}

/// The weight of the first measure; the rest is for the second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weight {
    share: f64,
    best: Pair,
}

impl Weight {
    /// A weight for these pairs; `share` is from 0 to 1.
    pub(crate) fn new(share: f64, pairs: impl Iterator<Item = Pair>) -> Option<Self> {
        let best = pairs.reduce(|one, other| [one[0].max(other[0]), one[1].max(other[1])])?;
        Some(Self { share, best })
    }

    pub(crate) fn score(&self, pair: Pair) -> f64 {
        let [own, other] = [self.share * (self.best[0] - pair[0]), (1.0 - self.share) * (self.best[1] - pair[1])];
        -own.max(other) - AUGMENT * (own + other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{paired_goal, paired_trial};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_front_is_what_nothing_dominates(
            values in proptest::collection::vec((1u32..30, 1u32..30), 1..40),
            share in 0.05..0.95f64,
        ) {
            let goal = paired_goal();
            let trials: Vec<Trial> =
                values.iter().map(|(one, other)| paired_trial(f64::from(*one), f64::from(*other))).collect();
            let members = front(trials.iter(), &goal);
            let pairs: Vec<Pair> = trials.iter().map(|trial| pair(trial, &goal).unwrap()).collect();
            let inside: Vec<Pair> = members.iter().map(|trial| pair(trial, &goal).unwrap()).collect();
            // Each other pair is dominated by a member or equal to one.
            prop_assert!(inside.iter().all(|own| !pairs.iter().any(|other| dominates(*other, *own))));
            prop_assert!(pairs.iter().all(|own| inside.iter().any(|member| member == own || dominates(*member, *own))));
            // Along the front, one measure gets worse and the other better.
            prop_assert!(inside.windows(2).all(|two| two[0][0] > two[1][0] && two[0][1] < two[1][1]));
            // The best pair by a weight is a member.
            let weight = Weight::new(share, pairs.iter().copied()).unwrap();
            let most = pairs.iter().copied().max_by(|one, other| weight.score(*one).total_cmp(&weight.score(*other)));
            prop_assert!(inside.contains(&most.unwrap()));
        }
    }
}
