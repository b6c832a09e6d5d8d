//! Conditions for a change of limits or engines: an operator's approval, and no recent failure.
//!
//! [`Proposals`] holds at most one change; an approval ends with the proposal. [`Closings`] holds
//! changes that are not tried for now. Each further closing of a change lasts twice as long, so the
//! settings come to rest. Bounds: one closing for each change.
//!
//! The layers have separate code for trials. A change of limits is judged by one window and undone
//! at once. A change of flags needs restarts and several stages.

use std::time::Duration;

use crate::event::{Event, EventKind, Proposal};

#[derive(Debug)]
pub(crate) struct Proposals<T>(Option<Proposed<T>>);

#[derive(Debug)]
struct Proposed<T> {
    proposal: Proposal,
    change: T,
    is_approved: bool,
}

impl<T> Proposals<T> {
    pub(crate) const NONE: Self = Self(None);

    /// The proposal, and whether it is approved.
    pub(crate) fn shown(&self) -> Option<(&Proposal, bool)> {
        self.0.as_ref().map(|proposed| (&proposed.proposal, proposed.is_approved))
    }

    pub(crate) fn change(&self) -> Option<&T> {
        self.0.as_ref().map(|proposed| &proposed.change)
    }

    pub(crate) fn propose(&mut self, now: Duration, proposal: Proposal, change: T) -> Event {
        let Proposal { key, values, why, .. } = proposal.clone();
        self.0 = Some(Proposed { proposal, change, is_approved: false });
        Event { at: now.as_secs_f64(), kind: EventKind::Proposed, key, values, why }
    }

    pub(crate) fn approve(&mut self, id: u64) -> bool {
        let known = self.0.as_mut().filter(|proposed| proposed.proposal.id == id);
        known.map(|proposed| proposed.is_approved = true).is_some()
    }

    pub(crate) fn approved(&self) -> Option<(&Proposal, &T)> {
        self.0.as_ref().filter(|proposed| proposed.is_approved).map(|proposed| (&proposed.proposal, &proposed.change))
    }

    pub(crate) fn take_approved(&mut self) -> Option<T> {
        self.0.take_if(|proposed| proposed.is_approved).map(|proposed| proposed.change)
    }

    pub(crate) fn withdraw(&mut self) {
        self.0 = None;
    }

    pub(crate) fn withdraw_if(&mut self, is: impl Fn(&T) -> bool) {
        self.0.take_if(|proposed| is(&proposed.change));
    }
}

#[derive(Debug)]
pub(crate) struct Closings<K, W> {
    all: Vec<Closing<K, W>>,
    /// How long the first closing of a change lasts, and the longest one.
    lasts: (Duration, Duration),
}

#[derive(Debug)]
pub(crate) struct Closing<K, W> {
    pub(crate) key: K,
    pub(crate) why: W,
    pub(crate) until: Duration,
    /// Number of earlier closings of the same change.
    pub(crate) before: u32,
}

impl<K: PartialEq, W> Closings<K, W> {
    pub(crate) fn new(lasts: (Duration, Duration)) -> Self {
        Self { all: Vec::new(), lasts }
    }

    pub(crate) fn restore(&mut self, all: Vec<Closing<K, W>>) {
        self.all = all;
    }

    /// All closings, ended ones included.
    pub(crate) fn all(&self) -> &[Closing<K, W>] {
        &self.all
    }

    pub(crate) fn in_force(&self, now: Duration) -> impl Iterator<Item = &Closing<K, W>> {
        self.all.iter().filter(move |closing| now < closing.until)
    }

    pub(crate) fn is_open(&self, key: &K, now: Duration) -> bool {
        !self.in_force(now).any(|closing| closing.key == *key)
    }

    /// Closes a change, for twice as long as the last time it was closed.
    pub(crate) fn close(&mut self, key: K, why: W, now: Duration) {
        let known = self.all.iter().position(|closing| closing.key == key);
        let before = known.map_or(0, |at| self.all[at].before + 1);
        let lasts = self.lasts.0.saturating_mul(1 << before.min(16)).min(self.lasts.1);
        let closing = Closing { key, why, until: now + lasts, before };
        match known {
            Some(at) => self.all[at] = closing,
            None => self.all.push(closing),
        }
    }

    /// Opens a change that helped. It may have helped by chance, so the next closing is as long as
    /// without this opening.
    pub(crate) fn reopen(&mut self, key: &K, now: Duration) {
        self.all.iter_mut().filter(|closing| closing.key == *key).for_each(|closing| closing.until = now);
    }

    pub(crate) fn clear(&mut self) {
        self.all.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_approval_ends_with_the_proposal() {
        let proposal = |id| Proposal { id, key: String::new(), values: Default::default(), why: String::new() };
        let mut proposals = Proposals::NONE;
        assert!(!proposals.approve(1));
        proposals.propose(SECOND, proposal(1), "one");
        assert!(!proposals.approve(2) && proposals.take_approved().is_none());
        assert!(proposals.approve(1) && proposals.approved().is_some());
        proposals.propose(SECOND, proposal(2), "two");
        assert_eq!((proposals.approve(1), proposals.take_approved()), (false, None));
        assert!(proposals.approve(2));
        proposals.withdraw_if(|change| *change == "one");
        assert_eq!((proposals.take_approved(), proposals.shown()), (Some("two"), None));
    }

    #[test]
    fn each_closing_lasts_twice_as_long_up_to_a_bound() {
        let mut closings = Closings::new((2 * SECOND, 5 * SECOND));
        for lasts in [2, 4, 5, 5] {
            closings.close('a', (), SECOND);
            let opens = |second: &u32| closings.is_open(&'a', *second * SECOND);
            assert_eq!((1..9).find(opens), Some(1 + lasts));
        }
        closings.reopen(&'a', 3 * SECOND);
        assert!(closings.is_open(&'a', 3 * SECOND));
        closings.close('a', (), SECOND);
        assert_eq!((closings.all()[0].until, closings.all()[0].before), (6 * SECOND, 4), "not forgotten");
        closings.clear();
        closings.close('a', (), SECOND);
        assert_eq!(closings.all()[0].until, 3 * SECOND);
    }
}
