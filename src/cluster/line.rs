//! The line of gateways that want more of a unit than they have.
//!
//! A gateway joins at the write at which it begins to want something, and leaves when it wants
//! nothing. After it had enough for its largest request during [`TURN`] writes of each gateway, it
//! goes to the end, so that a scarce unit goes round. All gateways see the writes alike.

use crate::amounts::{Amounts, Unit};

/// Writes by each gateway for which one that has enough keeps its place.
const TURN: u64 = 4;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Line {
    since: [u64; 4],
    /// The write since which the gateway has had enough, if it has.
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
            // After a stale read, or in another object, the number may be smaller.
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
