//! The order in which gateways get a scarce unit of a backend.
//!
//! A gateway joins the line with the write in which it first uses a unit or waits for it, and
//! leaves when it does neither. A gateway goes to the end of the line after the share was enough
//! for the largest waiting request during [`TURN`] writes of each gateway. So every gateway gets a
//! turn at a scarce unit.

use crate::amounts::{Amounts, Unit};

/// Writes by each gateway for which a gateway whose share is large enough keeps its place.
const TURN: u64 = 4;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Line {
    since: [u64; 4],
    /// By unit: the number of the write since which the share has been large enough; 0 if it is
    /// not.
    served: [u64; 4],
}

impl Line {
    pub(crate) fn places(
        &mut self,
        (write, gateways): (u64, u64),
        wanted: &Amounts,
        need: &Amounts,
        share: &Amounts,
    ) -> [u64; 4] {
        for (place, unit) in Unit::ALL.into_iter().enumerate() {
            let (since, served) = (&mut self.since[place], &mut self.served[place]);
            if wanted.get(unit) == 0 {
                (*since, *served) = (0, 0);
                continue;
            }
            // After a stale read, or in another object, the number of the write may be smaller.
            *since = if *since == 0 { write } else { write.min(*since) };
            let has = share.get(unit) >= need.get(unit).max(1);
            *served = match has {
                false => 0,
                true if *served == 0 => write,
                true => write.min(*served),
            };
            if has && write - *served >= TURN * gateways {
                (*since, *served) = (write, write);
            }
        }
        self.since
    }
}
