//! Changes that did not help, and until when they are not tried again.
//!
//! Each failure closes a direction for twice as long as the one before, up to a day. So limits come to rest, and a load that has
//! changed without being noticed is still found.

use std::time::Duration;

use crate::moves::Direction;

/// How long after the first failure.
const FIRST: Duration = Duration::from_secs(300);
/// How long at most.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Why a direction is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// It was tried and did not help.
    Failed,
    /// The opposite was tried and helped.
    OppositeHelped,
    /// A simulation promises no gain.
    Simulated,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    direction: Direction,
    why: Closed,
    until: Duration,
    lasts: Duration,
}

/// The directions that failed; there are as many as knobs and pools, twice.
#[derive(Clone, Debug, Default)]
pub struct Blocks(Vec<Block>);

impl Blocks {
    /// Whether a change may be tried.
    pub fn is_open(&self, direction: Direction, now: Duration) -> bool {
        !self.closed(now).any(|(closed, ..)| closed == direction)
    }

    /// Those that may not, why, and for how long.
    pub fn closed(&self, now: Duration) -> impl Iterator<Item = (Direction, Closed, Duration)> + '_ {
        let left = self.0.iter().map(move |block| (block.direction, block.why, block.until.saturating_sub(now)));
        left.filter(|(.., left)| !left.is_zero())
    }

    /// Nothing is tried in this direction for a while.
    pub fn close(&mut self, direction: Direction, why: Closed, now: Duration) {
        match self.0.iter_mut().find(|block| block.direction == direction) {
            Some(block) => {
                block.why = why;
                block.lasts = (block.lasts * 2).min(LONGEST);
                block.until = now + block.lasts;
            }
            None => self.0.push(Block { direction, why, until: now + FIRST, lasts: FIRST }),
        }
    }

    /// It helped. How often it failed is not forgotten, because it may have helped by chance.
    pub fn reopen(&mut self, direction: Direction, now: Duration) {
        self.0.iter_mut().filter(|block| block.direction == direction).for_each(|block| block.until = now);
    }

    /// The load is another one.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
