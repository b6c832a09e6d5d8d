//! The phase of the slow layer with the data of that phase, and the legal transitions.
//!
//! ```text
//!   watching <-> simulating
//!   watching --> canary -> copies -> recovery -> compared -> promotion <-> watched
//!                            ^----------------------'            `--> watching
//!   canary, copies, recovery, compared, promotion, watched --> return --> watching
//! ```
//!
//! An engine restarts in `canary`, `promotion` and `return`. In the other steps all engines must
//! serve. Only [`Phase::enter`] and [`EngineTrial::enter`] make transitions; debug assertions there
//! refuse any other.

use std::time::Duration;

use super::change::{EngineChange, Stage};
use super::forecast::EngineQuestion;
use super::proof::Proof;

#[derive(Debug)]
pub(crate) enum Phase {
    /// No simulation is asked for before `from`.
    Watching { from: Duration },
    /// `question`: `None` if it was for another configuration.
    Simulating { since: Duration, question: Option<EngineQuestion> },
    /// Engines change.
    Changing(Box<EngineTrial>),
}

#[derive(Debug)]
pub(crate) struct EngineTrial {
    pub(crate) change: EngineChange,
    step: Step,
    /// Requests and misses when the change began, once known.
    pub(super) before: Option<(f64, f64)>,
    pub(super) missed_before: f64,
    pub(super) waited: usize,
    pub(super) proof: Proof,
    /// Since when requests wait because of bounds on changed engines.
    pub(super) held_up: Option<Duration>,
    pub(super) copied: u32,
}

/// A [`Stage`] with the data of the stage.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Canary(Restart),
    Copies(Measure),
    Recovery(Measure),
    Compared(Measure),
    Promotion(Restart),
    /// An engine that was promoted is watched after the restart.
    Watched(Measure),
    Return(Restart),
}

#[derive(Clone, Debug)]
pub(crate) struct Restart {
    pub(super) since: Duration,
    /// Earliest time of the next attempt.
    pub(super) retry: Duration,
    pub(super) failed: u32,
    /// The backend whose restart was ordered, and when.
    pub(super) ordered: Option<(String, Duration)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Measure {
    pub(super) since: Duration,
    /// Since when an engine is out of rotation.
    pub(super) absent: Option<Duration>,
}

impl Phase {
    pub(crate) fn enter(&mut self, next: Self) {
        debug_assert!(self.leads_to(&next), "{self:?} to {next:?}");
        *self = next;
    }

    fn leads_to(&self, next: &Self) -> bool {
        match (self, next) {
            (Self::Watching { .. }, Self::Changing(next)) => matches!(next.step, Step::Canary(_)),
            (Self::Changing(trial), Self::Watching { .. }) => {
                matches!(trial.step, Step::Promotion(_) | Step::Return(_))
            }
            (Self::Watching { .. } | Self::Simulating { .. }, Self::Watching { .. }) => true,
            (Self::Watching { .. }, Self::Simulating { .. }) => true,
            (Self::Simulating { .. } | Self::Changing(_), _) => false,
        }
    }
}

impl EngineTrial {
    pub(crate) fn new(change: EngineChange, step: Step) -> Self {
        Self {
            change,
            step,
            before: None,
            missed_before: 0.0,
            waited: 0,
            proof: Proof::default(),
            held_up: None,
            copied: 0,
        }
    }

    /// `return` follows itself, once for each engine.
    pub(super) fn enter(&mut self, next: Step) {
        debug_assert!(self.step.leads_to(&next), "{:?} to {next:?}", self.step);
        self.step = next;
    }

    pub(super) fn step(&self) -> &Step {
        &self.step
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.step {
            Step::Canary(_) => Stage::Canary,
            Step::Copies(_) => Stage::Copies,
            Step::Recovery(_) => Stage::Recovery,
            Step::Compared(_) => Stage::Compared,
            Step::Promotion(_) | Step::Watched(_) => Stage::Promotion,
            Step::Return(_) => Stage::Return,
        }
    }

    pub(super) fn restart(&mut self) -> Option<&mut Restart> {
        match &mut self.step {
            Step::Canary(restart) | Step::Promotion(restart) | Step::Return(restart) => Some(restart),
            _ => None,
        }
    }

    pub(super) fn measure(&mut self) -> Option<&mut Measure> {
        match &mut self.step {
            Step::Copies(own) | Step::Recovery(own) | Step::Compared(own) | Step::Watched(own) => Some(own),
            _ => None,
        }
    }
}

impl Step {
    fn leads_to(&self, next: &Self) -> bool {
        use Step::{Canary, Compared, Copies, Promotion, Recovery, Return, Watched};
        match self {
            Canary(_) => matches!(next, Copies(_) | Return(_)),
            Copies(_) => matches!(next, Recovery(_) | Return(_)),
            Recovery(_) => matches!(next, Compared(_) | Return(_)),
            Compared(_) => matches!(next, Copies(_) | Promotion(_) | Return(_)),
            Promotion(_) => matches!(next, Watched(_) | Return(_)),
            Watched(_) => matches!(next, Promotion(_) | Return(_)),
            Return(_) => matches!(next, Return(_)),
        }
    }
}

impl Restart {
    pub(crate) fn at(now: Duration) -> Self {
        Self { since: now, retry: now, failed: 0, ordered: None }
    }
}

impl Measure {
    pub(crate) fn at(since: Duration) -> Self {
        Self { since, absent: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::flags::EngineFlag;
    use crate::engines::proof::Load;

    fn all() -> Vec<Phase> {
        let change = EngineChange {
            number: 1,
            pool: "all".to_owned(),
            backends: vec!["e0".to_owned(), "e1".to_owned()],
            flag: EngineFlag::MaxNumSeqs,
            from: 8.0,
            to: 16.0,
            limits: None,
            limits_first: false,
            loss_before: 0.5,
            forecast: None,
            crowded: false,
            changed: Vec::new(),
            proved: Load::default(),
        };
        let (restart, measure) = (Restart::at(Duration::ZERO), Measure::at(Duration::ZERO));
        let steps = [
            Step::Canary(restart.clone()),
            Step::Copies(measure.clone()),
            Step::Recovery(measure.clone()),
            Step::Compared(measure.clone()),
            Step::Promotion(restart.clone()),
            Step::Watched(measure),
            Step::Return(restart),
        ];
        let since = Duration::ZERO;
        let idle = [Phase::Watching { from: since }, Phase::Simulating { since, question: None }];
        let changing = |step| Phase::Changing(Box::new(EngineTrial::new(change.clone(), step)));
        idle.into_iter().chain(steps.map(changing)).collect()
    }

    #[test]
    fn a_change_goes_forward_or_returns_and_each_way_ends_in_watching() {
        let leads = |one: &Phase, next: &Phase| match (one, next) {
            (Phase::Changing(one), Phase::Changing(next)) => one.step.leads_to(&next.step),
            _ => one.leads_to(next),
        };
        let names =
            ["watching", "simulating", "canary", "copies", "recovery", "compared", "promotion", "watched", "return"];
        let after = |one: &Phase| {
            let found = names.iter().zip(all()).filter(|(_, next)| leads(one, next));
            found.map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
        };
        let found: Vec<String> = all().iter().map(after).collect();
        let legal = [
            "watching simulating canary",
            "watching",
            "copies return",
            "recovery return",
            "compared return",
            "copies promotion return",
            "watching watched return",
            "promotion return",
            "watching return",
        ];
        assert_eq!(found, legal);
    }
}
