//! The simulated store: one object with a revision.
//!
//! A stale read may return an earlier state. Bounds: the last 12 states.

use std::collections::VecDeque;

use crate::ledger::Ledger;

const HISTORY: usize = 12;

#[derive(Default)]
pub(super) struct Store {
    pub(super) states: VecDeque<(u64, Option<Ledger>)>,
    revision: u64,
    pub(super) down: bool,
}

impl Store {
    pub(super) fn latest(&self) -> (u64, Option<Ledger>) {
        self.states.front().cloned().unwrap_or((0, None))
    }

    pub(super) fn put(&mut self, ledger: Option<Ledger>) {
        self.revision += 1;
        self.states.push_front((self.revision, ledger));
        self.states.truncate(HISTORY);
    }
}
