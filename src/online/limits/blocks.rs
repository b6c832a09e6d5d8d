//! Directions of change that are closed, and until when.
//!
//! A direction closes for 5 minutes, and for twice as long each further time, up to a day. So the
//! limits come to rest, and a change of load that went unnoticed is still answered.

use std::time::Duration;

use crate::limits::moves::Direction;

/// How long the first closing lasts.
const FIRST: Duration = Duration::from_secs(300);
/// The longest closing.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Why a direction is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// A change was tried and did not help.
    Failed,
    /// The opposite change helped.
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

/// Closed directions: at most two for each limit of each pool.
#[derive(Clone, Debug, Default)]
pub struct Blocks(Vec<Block>);

impl Blocks {
    /// Whether a change in this direction may be tried.
    pub fn is_open(&self, direction: Direction, now: Duration) -> bool {
        !self.closed(now).any(|(closed, ..)| closed == direction)
    }

    /// The closed directions, the reasons, and the time left.
    pub fn closed(&self, now: Duration) -> impl Iterator<Item = (Direction, Closed, Duration)> + '_ {
        let left = self.0.iter().map(move |block| (block.direction, block.why, block.until.saturating_sub(now)));
        left.filter(|(.., left)| !left.is_zero())
    }

    /// Closes a direction, for twice as long as the last time.
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

    /// Opens a direction in which a change helped. It may have helped by chance, so the next
    /// closing lasts as long as otherwise.
    pub fn reopen(&mut self, direction: Direction, now: Duration) {
        self.0.iter_mut().filter(|block| block.direction == direction).for_each(|block| block.until = now);
    }

    /// Opens all directions: the load has changed.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
