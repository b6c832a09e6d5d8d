//! Time windows, each with the fewest of this gateway's sequences that the engine had for sure.
//!
//! A window reaches from when one confirmed plan was made to when the next was made, without a gap.
//! A failed or unknown write ends no window.

use crate::ledger::WINDOWS;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// The fewest sequences since the last confirmed plan; `None` before the next plan.
    open: Option<u64>,
    closed: [u64; WINDOWS - 1],
}

impl Windows {
    /// Adds the fewest sequences since the last plan to the open window. Returns all windows, the
    /// open one first.
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
