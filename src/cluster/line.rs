//! The line of gateways that want more of a unit than they have: who came first, and when a gateway goes to its end.
//!
//! A gateway enters at the write at which it begins to want something, and leaves when it wants nothing. When it has had what its
//! largest request needs for [`TURN`] writes of each gateway, it goes to the end, so that a unit that is too rare for all goes
//! round. Time is counted in writes of the ledger, which all gateways see alike.

use crate::amounts::{Amounts, Unit};

/// Writes of each gateway for which a gateway keeps its place after it has got what it needs.
const TURN: u64 = 4;

/// This gateway's places, unit by unit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Line {
    since: [u64; 4],
    /// Since which write it has what it needs; 0: it has not.
    served: [u64; 4],
}

impl Line {
    /// Its places at this write of a ledger of so many gateways. `share` is what it has of each unit.
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
            // A write may have a smaller number than the last: what was read was old, or the object is another one.
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
