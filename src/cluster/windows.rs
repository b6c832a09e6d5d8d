//! Time windows, each with the smallest number of this gateway's sequences that the engine had for
//! sure.
//!
//! A window reaches from the moment at which one confirmed plan was made to the moment at which the
//! next was made, so there is no gap between windows. A failed or unknown write ends no window.

use crate::ledger::WINDOWS;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// The smallest number of sequences since the last confirmed plan; `None` if no plan was made
    /// since.
    open: Option<u64>,
    closed: [u64; WINDOWS - 1],
}

impl Windows {
    /// Adds the smallest number of sequences since the last plan to the open window. Returns all
    /// windows, the open one first.
    pub(crate) fn extend(&mut self, least: u64) -> [u64; WINDOWS] {
        let open = self.open.map_or(least, |open| open.min(least));
        self.open = Some(open);
        let mut all = [open; WINDOWS];
        all[1..].copy_from_slice(&self.closed);
        all
    }

    /// Closes the open window, because the store confirmed the plan.
    pub(crate) fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.closed.rotate_right(1);
        self.closed[0] = open;
    }
}
