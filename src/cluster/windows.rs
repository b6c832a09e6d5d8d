//! The windows of time of which a holding says how many of its requests the engine had for sure.
//!
//! A window lasts from one confirmed plan to the next one that is made, so that they follow each other without a gap. A plan
//! whose write failed or whose outcome is unknown ends none.

use crate::ledger::WINDOWS;

/// Of one backend.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    /// The least since the last confirmed plan was made.
    open: Option<u64>,
    closed: [u64; WINDOWS - 1],
}

impl Windows {
    /// Adds the least since the last plan. All windows, the open one first.
    pub(crate) fn extend(&mut self, least: u64) -> [u64; WINDOWS] {
        let open = self.open.map_or(least, |open| open.min(least));
        self.open = Some(open);
        let mut all = [open; WINDOWS];
        all[1..].copy_from_slice(&self.closed);
        all
    }

    /// The plan was confirmed.
    pub(crate) fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.closed.rotate_right(1);
        self.closed[0] = open;
    }
}
