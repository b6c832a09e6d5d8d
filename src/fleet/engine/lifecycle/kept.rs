//! The old engine that sleeps while new settings are on trial, so that a return to the old settings
//! is a wake instead of a start.
//!
//! The change puts the drained engine to sleep, and starts another one next to it. Where the next
//! start would bring up the old settings, the old engine wakes: after a failed start, a crash
//! before the new settings have settled, or a change back. A wake that fails becomes a start. At
//! most one engine is kept, so a second change before the first has settled keeps no other.

use super::change::{Keep, Kept};
use super::{AfterStop, Lifecycle, Step};

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// Whether the drained engine is put to sleep instead of being stopped.
    pub(super) fn keeps_old(&self) -> bool {
        let change = self.change.as_ref().filter(|change| change.keep.is_some() && change.from != change.to);
        change.is_some() && self.kept.is_none() && !self.leaving && !self.resting
    }

    /// Notes that the old engine sleeps, and begins the start of the new settings.
    pub(super) fn kept_old(&mut self) {
        let Some(change) = &self.change else { return };
        let keep = change.keep.unwrap_or(Keep::Settling);
        self.kept = Some(Kept { setup: self.wanted.clone(), keep });
        (self.wanted, self.step, self.adopted) = (change.to.clone(), Step::Start, false);
    }

    /// Starts the wanted settings, or wakes the engine that has them.
    pub(super) fn bring_up(&mut self) {
        let returns = self.kept.as_ref().is_some_and(|kept| kept.setup == self.wanted);
        self.step = if returns { Step::Wake } else { Step::Start };
    }

    /// Notes that the engine is awake. It is warm.
    pub(super) fn woken(&mut self) {
        match self.kept.take() {
            Some(_) => (self.step, self.adopted) = (Step::Adapters, true),
            None => self.step = Step::Serve,
        }
    }

    /// After the kept engine did not wake, stops it and starts another one.
    pub(super) fn did_not_wake(&mut self, why: String) {
        (self.kept, self.why) = (None, Some(why));
        self.stop_then(AfterStop::Start);
    }

    /// Whether no sleeping engine is needed next to this one any more.
    pub(crate) fn is_done_with_kept(&self) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.keep == Keep::Settling && self.is_settled())
    }

    /// Notes that the tuner has ended the change.
    pub(crate) fn end_trial(&mut self) {
        let change = self.change.as_mut().and_then(|change| change.keep.as_mut());
        let kept = self.kept.as_mut().map(|kept| &mut kept.keep);
        change.into_iter().chain(kept).for_each(|keep| *keep = Keep::Settling);
    }

    /// Notes that the engine that slept next to this one is gone, or is being stopped.
    pub(crate) fn forget_kept(&mut self) {
        self.kept = None;
    }
}
