//! Successive halving: many settings with little effort, few with much.
//!
//! Every setting is tried with a [`FIRST`] of the usual requests or runs, the best third of them with three times as many, until
//! one round has the full effort (Jamieson and Talwalkar 2016). The default stays to the end. A setting that cannot be used leaves
//! at once. Bounds: [`MOST`] settings in the first round, chosen at random if there are more.

use super::ask::{Ask, Known, Search, score};
use super::race::Chance;
use crate::setting::Setting;
use crate::trial::Effort;

/// The effort of the first round.
const FIRST: f64 = 1.0 / 9.0;
/// By how much the effort grows from round to round, and the number of settings shrinks.
const FACTOR: f64 = 3.0;
/// The most settings of the first round.
const MOST: usize = 243;

/// The search. See the header of this file.
pub(super) struct Halving {
    effort: f64,
    /// Settings of this round, and how many of them were asked for.
    round: Vec<Setting>,
    asked: usize,
}

impl Halving {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let mut chance = Chance::new(known);
        let drawn = std::iter::from_fn(|| chance.next(known)).take(MOST).map(|ask| ask.setting);
        Self { effort: FIRST, round: drawn.collect(), asked: 0 }
    }

    /// The settings of the next round: the default, and the best of this one.
    fn survivors(&self, known: &Known<'_>) -> Vec<Setting> {
        let value = |setting: &Setting| {
            let own = known.of(setting).find(|trial| trial.effort == Effort::Rung(self.effort));
            own.and_then(|trial| score(trial, known.goal))
        };
        let mut scored: Vec<(f64, &Setting)> =
            self.round.iter().filter_map(|setting| Some((value(setting)?, setting))).collect();
        scored.sort_by(|one, other| other.0.total_cmp(&one.0));
        let keep = ((self.round.len() as f64 / FACTOR).ceil() as usize).max(1);
        let mut kept: Vec<Setting> = scored.into_iter().take(keep).map(|(_, setting)| setting.clone()).collect();
        if !kept.contains(&known.settings[0]) {
            kept.push(known.settings[0].clone());
        }
        kept
    }
}

impl Search for Halving {
    fn next(&mut self, known: &Known<'_>) -> Option<Ask> {
        if self.asked == self.round.len() {
            if self.effort >= 1.0 {
                return None;
            }
            self.round = self.survivors(known);
            // Powers of 1/3 do not add up to exactly 1.
            self.effort = if self.effort * FACTOR > 0.99 { 1.0 } else { self.effort * FACTOR };
            self.asked = 0;
        }
        self.asked += 1;
        Some(Ask { setting: self.round[self.asked - 1].clone(), effort: Effort::Rung(self.effort) })
    }
}
