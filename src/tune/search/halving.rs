//! Successive halving: many settings with little effort, few with much.
//!
//! The first round tries every setting with a [`FIRST`] of the usual requests or runs. Each further
//! round tries the best third with three times as many, up to the full effort (Jamieson and
//! Talwalkar 2016). The default stays to the end; an unusable setting leaves at once. Bounds:
//! [`MOST`] settings in the first round, chosen at random from more.

use super::ask::{Ask, Known, Search, score};
use super::race::Chance;
use crate::setting::Setting;
use crate::trial::Effort;

/// The effort of the first round.
const FIRST: f64 = 1.0 / 9.0;
/// Factor by which effort grows and the number of settings shrinks in each round.
const FACTOR: f64 = 3.0;
/// The most settings of the first round.
const MOST: usize = 243;

pub(super) struct Halving {
    effort: f64,
    /// Settings of this round, and the number asked for.
    round: Vec<Setting>,
    asked: usize,
}

impl Halving {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let mut chance = Chance::new(known);
        let drawn = std::iter::from_fn(|| chance.next(known)).take(MOST).map(|ask| ask.setting);
        Self { effort: FIRST, round: drawn.collect(), asked: 0 }
    }

    /// The settings of the next round: the best, and the default.
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
