//! Time windows, each with the fewest sequences that the engine had for sure.
//!
//! A window reaches from the making of one confirmed plan to the making of the next, without a gap.
//! A failed or unknown write ends no window.

use crate::ledger::WINDOWS;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// The fewest sequences since the last confirmed plan.
    open: Option<u64>,
    closed: [u64; WINDOWS - 1],
}

impl Windows {
    /// Adds the fewest sequences since the last plan. Returns all windows, the open one first.
    pub(crate) fn extend(&mut self, least: u64) -> [u64; WINDOWS] {
        let open = self.open.map_or(least, |open| open.min(least));
        self.open = Some(open);
        let mut all = [open; WINDOWS];
        all[1..].copy_from_slice(&self.closed);
        all
    }

    /// The confirmed plan closes the window.
    pub(crate) fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.closed.rotate_right(1);
        self.closed[0] = open;
    }
}
