//! The requests that an engine has for sure: load that no other gateway can have caused.
//!
//! A request counts from [`AFTER`] ticks after the first token of its stream was seen, until the
//! end of the stream is seen, or until the client keeps it waiting, because then the end may be
//! seen late. A request with several sequences counts as one sequence, because the others may end
//! early.
//!
//! Time comes as ticks ([`Settled::tick`]), at least [`TICK`] apart; without them nothing counts.
//! The end of a request takes a few instructions under a lock that is held anyway. Bound: [`TICKS`]
//! counters.

use std::num::NonZeroU32;
use std::time::Duration;

/// The shortest time between two ticks.
pub const TICK: Duration = Duration::from_millis(100);
/// Ticks after the first token from which a request counts: at least 800 ms, since the first tick
/// may come at once.
const AFTER: u32 = 9;
const TICKS: usize = AFTER as usize + 1;

/// The tick in which the first token of a request was seen, counted from 1.
pub(super) type Mark = NonZeroU32;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Settled {
    tick: u32,
    /// Requests whose first token was seen during one of the last ticks.
    young: [u32; TICKS],
    /// Older requests.
    sure: u32,
    least: u32,
}

impl Settled {
    /// The first token of a request was seen. Returns the mark.
    pub(super) fn begin(&mut self) -> Mark {
        self.young[self.tick as usize % TICKS] += 1;
        Mark::MIN.saturating_add(self.tick)
    }

    /// A request with this mark has ended, or does not count any more.
    pub(super) fn end(&mut self, mark: Option<Mark>) {
        let Some(begun) = mark.map(|mark| mark.get() - 1) else { return };
        if self.tick - begun < AFTER {
            self.young[begun as usize % TICKS] -= 1;
        } else {
            self.sure -= 1;
            self.least = self.least.min(self.sure);
        }
    }

    /// Time has passed. `at_client`: requests that wait for their client now.
    pub(super) fn tick(&mut self, at_client: u32) {
        self.tick += 1;
        if let Some(old) = self.tick.checked_sub(AFTER) {
            self.sure += std::mem::take(&mut self.young[old as usize % TICKS]);
        }
        self.least = self.least.min(self.sure.saturating_sub(at_client));
    }

    /// The fewest requests that counted since the last call.
    pub(super) fn look(&mut self, at_client: u32) -> u32 {
        let now = self.sure.saturating_sub(at_client);
        let least = self.least.min(now);
        self.least = now;
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(settled: &mut Settled, count: u32) {
        (0..count).for_each(|_| settled.tick(0));
    }

    #[test]
    fn a_request_counts_from_nine_ticks_after_its_first_token_to_its_end() {
        let mut settled = Settled::default();
        ticks(&mut settled, 5);
        let mark = settled.begin();
        ticks(&mut settled, 8);
        settled.look(0);
        assert_eq!(settled.look(0), 0);
        ticks(&mut settled, 1);
        assert_eq!(settled.look(0), 0, "it did not count at the beginning of this window");
        ticks(&mut settled, 30);
        assert_eq!(settled.look(0), 1);
        settled.end(Some(mark));
        assert_eq!(settled.look(0), 0);
    }

    #[test]
    fn the_fewest_of_a_window_count_and_young_ones_end_without_a_trace() {
        let mut settled = Settled::default();
        let marks: Vec<Mark> = (0..4).map(|_| settled.begin()).collect();
        ticks(&mut settled, 9);
        settled.look(0);
        let young = settled.begin();
        settled.end(Some(young));
        settled.end(Some(marks[0]));
        let later = settled.begin();
        ticks(&mut settled, 9);
        assert_eq!(settled.look(0), 3, "three at the time of that end, although there are four now");
        assert_eq!(settled.look(0), 4);
        settled.tick(2);
        assert_eq!((settled.look(0), settled.look(0)), (2, 4), "two waited for their clients");
        settled.end(None);
        marks[1..].iter().chain([&later]).for_each(|mark| settled.end(Some(*mark)));
        ticks(&mut settled, 20);
        settled.look(0);
        assert_eq!((settled.look(0), settled.young), (0, [0; TICKS]));
    }

    #[test]
    fn without_ticks_nothing_counts() {
        let mut settled = Settled::default();
        let mark = settled.begin();
        assert_eq!(settled.look(0), 0);
        settled.end(Some(mark));
        assert_eq!(settled.young, [0; TICKS]);
    }
}
