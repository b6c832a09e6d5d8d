//! The whole grid, each setting against the best so far; and settings in random order.
//!
//! The grid begins with the best predicted settings. Without predictions the order is random,
//! except that expensive keys change seldom. The n-th setting of a random order is the best so far
//! with probability 1/n. So of n settings about ln n + 0.6 need a full rate search, and the others
//! one or two trials. After a good prediction only the first setting needs a full search. Settings
//! that earlier trials exclude are left out (`prune`). At the end one of them is tried, and if it
//! is the best, the rest too.

use super::ask::{Ask, CHANCE, Known, Search};
use super::prune::reason;
use super::pruned::Pruned;
use crate::setting::Setting;
use sluice_core::base::Rng;

pub(super) struct Race {
    /// Settings to try, the next one last.
    left: Vec<Setting>,
    pruned: Vec<Pruned>,
    check: Check,
}

enum Check {
    Open,
    Asked(usize),
    Done,
}

impl Race {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let order = known.order();
        let others = order.into_iter().filter(|at| *at != 0).map(|at| known.settings[at].clone());
        let left = std::iter::once(known.settings[0].clone()).chain(others);
        let mut left: Vec<Setting> = left.collect();
        left.reverse();
        Self { left, pruned: Vec::new(), check: Check::Open }
    }

    /// Asks for a setting that was left out. If that setting then leads, puts the others back.
    fn check(&mut self, known: &Known<'_>) -> Option<Ask> {
        match self.check {
            Check::Open if !self.pruned.is_empty() => {
                let at = Rng::new(known.goal.seed ^ CHANCE).below(self.pruned.len());
                self.pruned[at].checked = true;
                self.check = Check::Asked(at);
                Some(known.race(&self.pruned[at].setting))
            }
            Check::Asked(at) if known.leads(&self.pruned[at].setting) => {
                let others = self.pruned.drain(..).enumerate().filter(|(place, _)| *place != at);
                self.left = others.map(|(_, pruned)| pruned.setting).collect();
                self.check = Check::Done;
                self.next(known)
            }
            _ => None,
        }
    }
}

impl Search for Race {
    fn next(&mut self, known: &Known<'_>) -> Option<Ask> {
        while let Some(setting) = self.left.pop() {
            let reason = if matches!(self.check, Check::Open) { reason(&setting, known) } else { None };
            match reason {
                Some(reason) => self.pruned.push(Pruned { setting, reason, checked: false }),
                None => return Some(known.race(&setting)),
            }
        }
        self.check(known)
    }

    fn pruned(&self) -> &[Pruned] {
        &self.pruned
    }
}

pub(super) struct Chance {
    left: Vec<Setting>,
}

impl Chance {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let (mut left, mut rng) = (known.settings[1..].to_vec(), Rng::new(known.goal.seed ^ CHANCE));
        (1..left.len()).for_each(|at| left.swap(at, rng.below(at + 1)));
        left.push(known.settings[0].clone());
        Self { left }
    }
}

impl Search for Chance {
    fn next(&mut self, known: &Known<'_>) -> Option<Ask> {
        self.left.pop().map(|setting| known.race(&setting))
    }
}
