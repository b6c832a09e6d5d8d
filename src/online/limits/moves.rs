//! Proposes changes of limits. Where requests lose time, and which limits hold requests up, decides
//! which ones.
//!
//! | lost time | and | change |
//! |---|---|---|
//! | in the gateway's queue | no permit was free | more permits, a higher threshold |
//! | | no slot was free | more slots |
//! | | no room for prompt tokens | a higher limit of prompt tokens, or none |
//! | on the engine before the first token | | fewer permits, tokens, slots; lower threshold |
//! | between tokens | | the same, slots before the threshold |
//! | any of these | the next pool loses less | the boundary between the two |
//!
//! A lower limit is computed from the highest use, because a limit above it has no effect.

use std::collections::BTreeMap;

use crate::limits::{Knob, LimitRange, Limits, PoolLimits};
use crate::observe::lengths::Lengths;
use crate::observe::loss::Cause;
use crate::observe::window::{PoolWindow, Window};

/// A cause with a smaller share of a pool's loss brings no proposal. A change can gain at most this
/// share, and a trial costs requests.
const CAUSE_SHARE: f64 = 0.25;
/// A threshold moves at least over prompts with this share of the prompt tokens.
const LENGTHS_SHARE: f64 = 0.05;
/// A moved boundary gives prompts with this share of a pool's prompt tokens to the neighbour.
const BOUNDARY_SHARE: f64 = 0.25;
/// Largest share of prompts that need a permit.
const LONG_SHARE: f64 = 0.5;
/// A limit holds requests up if it was used up in this share of the moments with a queue.
const HELD_UP: f64 = 0.25;
/// From this loss per request on, a pool gives work to an idle neighbour before its own limits
/// move.
const MUCH: f64 = 0.05;
/// A neighbour is idle below this share of the pool's loss per request.
const IDLE: f64 = 0.25;
/// Ratio of raised slots to the demand, which varies, and grows with the requests at once.
const DEMAND_MARGIN: f64 = 1.5;
/// Lowered slots stay above this multiple of the demand.
const NEED_MARGIN: f64 = 1.15;
/// All lowered slots together also stay above the demand plus this multiple of its square root,
/// which random arrivals exceed 2 % of the time.
const NEED_DEVIATIONS: f64 = 2.0;
/// Lowered slots also stay above this multiple of the sequences of the widest request.
const WIDEST_MARGIN: f64 = 2.0;
/// A boundary rises at most to this share of the context of the engines below it, to leave room for
/// output.
const CONTEXT_SHARE: f64 = 0.5;
/// A neighbour takes work if it loses at most this share of the pool's loss per request.
const LESS: f64 = 0.5;

/// Limits under which a change of flags may help: the configured limits, and the configured limits
/// with one permit for long prompts. The present limits were found with other flags. The range
/// stays.
pub fn beside(now: &PoolLimits, configured: &PoolLimits, lengths: &Lengths, bounds: &LimitRange) -> Vec<PoolLimits> {
    let file = PoolLimits { range: now.range, ..*configured };
    let long = match file.long {
        Some((threshold, permits)) => Some((threshold, permits.min(bounds.permits.0))),
        None => long_prompts(lengths, bounds).map(|threshold| (threshold, bounds.permits.0)),
    };
    let mut found = vec![file, PoolLimits { long, ..file }];
    found.dedup();
    found.retain(|limits| limits != now);
    found
}

/// A threshold above which at least [`BOUNDARY_SHARE`] of the prompt tokens lie, but not most of
/// the prompts.
fn long_prompts(lengths: &Lengths, bounds: &LimitRange) -> Option<u64> {
    let found = lengths.next_below(u64::MAX, BOUNDARY_SHARE).filter(|found| *found >= bounds.threshold.0)?;
    (lengths.share_above(found) <= LONG_SHARE).then_some(found)
}

/// A limit and the direction in which it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Direction {
    /// Position of the pool.
    pub pool: usize,
    /// The limit.
    pub knob: Knob,
    /// Whether the value grows. A limit where there was none counts as down.
    pub up: bool,
}

/// A change that may help.
#[derive(Clone, Debug, PartialEq)]
pub struct Move {
    /// The limit that moves.
    pub direction: Direction,
    /// All limits after the change.
    pub to: Limits,
    /// Why it may help.
    pub why: String,
}

/// Factors of one step, by pool and limit.
#[derive(Clone, Debug, Default)]
pub struct Steps(BTreeMap<(usize, Knob), f64>);

const FIRST_STEP: f64 = 2.0;
const LAST_STEP: f64 = 1.15;

impl Steps {
    fn of(&self, pool: usize, knob: Knob) -> f64 {
        self.0.get(&(pool, knob)).copied().unwrap_or(FIRST_STEP)
    }

    /// Makes a limit's steps smaller, after one that did not help.
    pub fn refine(&mut self, pool: usize, knob: Knob) {
        let step = self.of(pool, knob);
        self.0.insert((pool, knob), step.sqrt().max(LAST_STEP));
    }

    /// Forgets the steps, for another load or other engines.
    pub fn reset(&mut self) {
        self.0.clear();
    }
}

/// Changes that may help, the most promising first.
pub fn candidates(window: &Window, limits: &Limits, bounds: &LimitRange, steps: &Steps) -> Vec<Move> {
    let mut pools: Vec<(usize, f64)> =
        window.pools.iter().map(PoolWindow::loss).enumerate().filter(|(_, loss)| *loss > 0.0).collect();
    pools.sort_by(|one, other| other.1.total_cmp(&one.1));
    let mut moves = Vec::new();
    for (pool, lost) in pools {
        let seen = &window.pools[pool];
        let mut causes = [Cause::Queue, Cause::Engine, Cause::Decode];
        causes.sort_by(|one, other| seen.loss_by(*other).total_cmp(&seen.loss_by(*one)));
        for cause in causes {
            if seen.loss_by(cause) > CAUSE_SHARE * lost {
                Proposer { window, limits, bounds, steps, pool, seen, moves: &mut moves }.propose(cause);
            }
        }
    }
    moves
}

struct Proposer<'a> {
    window: &'a Window,
    limits: &'a Limits,
    bounds: &'a LimitRange,
    steps: &'a Steps,
    pool: usize,
    seen: &'a PoolWindow,
    moves: &'a mut Vec<Move>,
}

impl Proposer<'_> {
    fn propose(&mut self, cause: Cause) {
        let (total, loss) = (self.seen.loss(), self.seen.loss_by(cause));
        let share = format!("{:.0} % of the lost time", 100.0 * loss / total);
        match cause {
            Cause::Queue => self.raise(&format!("{share} is in the queue")),
            Cause::Engine => {
                let why = format!("{share} is on the engines before the first token");
                if self.neighbour_is_idle() {
                    self.boundary(&why);
                }
                self.fewer_permits(&why);
                self.boundary(&why);
                self.lower_threshold(&why);
                self.less_prefill(&why);
                self.fewer_slots(&why);
            }
            Cause::Decode => {
                let why = format!("{share} is between tokens");
                if self.neighbour_is_idle() {
                    self.boundary(&why);
                }
                self.fewer_permits(&why);
                self.less_prefill(&why);
                self.fewer_slots(&why);
                self.lower_threshold(&why);
                self.boundary(&why);
            }
        }
    }

    fn own(&self) -> PoolLimits {
        self.limits.0[self.pool]
    }

    fn add(&mut self, knob: Knob, up: bool, limits: PoolLimits, why: &str) {
        let mut to = self.limits.clone();
        to.0[self.pool] = limits;
        self.add_all(Direction { pool: self.pool, knob, up }, to, why);
    }

    fn add_all(&mut self, direction: Direction, to: Limits, why: &str) {
        if to != *self.limits && !self.moves.iter().any(|known| known.direction == direction) {
            self.moves.push(Move { direction, to, why: why.to_owned() });
        }
    }

    /// Raises the limits that hold requests up. Long prompts wait for permits, others for slots and
    /// prompt tokens. Limits of the prompts that wait come first.
    fn raise(&mut self, why: &str) {
        let (usage, own) = (self.seen.usage, self.own());
        let lengths = &self.seen.lengths;
        if self.neighbour_is_idle() {
            self.boundary(why);
        }
        let long = own.long.map_or(0.0, |(threshold, _)| self.seen.queued.share_above(threshold));
        let held_up = |moments: u32| f64::from(moments) >= (f64::from(usage.waiting) * HELD_UP).max(1.0);
        let at = |knob: Knob, moments: u32| {
            format!("{why}, and {} was used up at {moments} of {} moments", knob.key(), usage.waiting)
        };
        let permits = |proposer: &mut Self| {
            let Some((threshold, _)) = own.long.filter(|_| held_up(usage.no_permits)) else { return };
            let why = at(Knob::Permits, usage.no_permits);
            if lengths.share_above(threshold) > LONG_SHARE {
                proposer.raise_threshold(&why);
                proposer.more_permits(&why);
            } else {
                proposer.more_permits(&why);
                proposer.raise_threshold(&why);
            }
        };
        let others = |proposer: &mut Self| {
            if held_up(usage.no_prefill) && usage.no_prefill > usage.no_slots {
                proposer.more_prefill(&at(Knob::PrefillTokens, usage.no_prefill));
            }
            // If at most half of the slots are used, the engines' own limit (`max-num-seqs`) holds
            // requests up.
            let is_own = usage.slots_peak.saturating_mul(2) > own.slots;
            if is_own && held_up(usage.no_slots) || usage.slots_peak >= own.slots {
                proposer.more_slots(&at(Knob::Slots, usage.no_slots));
            }
            if held_up(usage.no_prefill) {
                proposer.more_prefill(&at(Knob::PrefillTokens, usage.no_prefill));
            }
        };
        if long > LONG_SHARE {
            permits(self);
            others(self);
        } else {
            others(self);
            permits(self);
        }
        self.boundary(why);
    }

    fn step(&self, knob: Knob) -> f64 {
        self.steps.of(self.pool, knob)
    }

    fn above(&self, knob: Knob, value: u64) -> u64 {
        ((value as f64 * self.step(knob)).round() as u64).max(value.saturating_add(1))
    }

    fn below(&self, knob: Knob, value: u64) -> u64 {
        ((value as f64 / self.step(knob)).round() as u64).min(value.saturating_sub(1))
    }

    fn more_slots(&mut self, why: &str) {
        let own = self.own();
        let most = u64::from(self.bounds.slots.1.max(own.slots));
        // From far too few slots, single steps would take long.
        let wanted = self.seen.demand().map_or(0, |demand| (demand * DEMAND_MARGIN).ceil() as u64);
        let slots = self.above(Knob::Slots, own.slots.into()).max(wanted).min(most) as u32;
        self.add(Knob::Slots, true, PoolLimits { slots, ..own }, why);
    }

    fn fewer_slots(&mut self, why: &str) {
        let own = self.own();
        let used = f64::from(own.slots.min(self.seen.usage.slots_peak));
        // With slots below the demand, a queue grows without end. A demand above the used slots
        // shows overloaded engines, which may be faster with fewer sequences.
        let backends = self.seen.usage.in_rotation.max(1) as f64;
        let with_margin =
            |demand: f64| (demand * NEED_MARGIN).max(demand + NEED_DEVIATIONS * (demand / backends).sqrt());
        let needed = self.seen.demand().filter(|needed| *needed < used).map_or(0.0, with_margin);
        // A request with more sequences than slots would be refused.
        let widest = f64::from(self.seen.widest) * WIDEST_MARGIN;
        let slots = (used / self.step(Knob::Slots).sqrt()).max(needed).max(widest).round() as u32;
        if slots >= self.bounds.slots.0 && f64::from(slots) < used {
            self.add(Knob::Slots, false, PoolLimits { slots, ..own }, why);
        }
    }

    fn more_permits(&mut self, why: &str) {
        let own = self.own();
        let Some((threshold, permits)) = own.permits() else { return };
        let most = u64::from(self.bounds.permits.1.max(permits));
        let permits = self.above(Knob::Permits, permits.into()).min(most) as u32;
        self.add(Knob::Permits, true, PoolLimits { long: Some((threshold, permits)), ..own }, why);
    }

    fn fewer_permits(&mut self, why: &str) {
        let own = self.own();
        let Some((threshold, permits)) = own.permits() else { return };
        let used = permits.min(self.seen.usage.permits_peak);
        let permits = self.below(Knob::Permits, used.into()) as u32;
        if permits >= self.bounds.permits.0 {
            self.add(Knob::Permits, false, PoolLimits { long: Some((threshold, permits)), ..own }, why);
        }
    }

    fn raise_threshold(&mut self, why: &str) {
        let own = self.own();
        let Some((threshold, permits)) = own.permits() else { return };
        let lengths = &self.seen.lengths;
        let mut found = lengths.next_above(threshold, LENGTHS_SHARE);
        // If most prompts need a permit, the threshold is far too low.
        while let Some(length) = found.filter(|_| lengths.share_above(threshold) > LONG_SHARE)
            && lengths.share_above(length) > LONG_SHARE / 2.0
        {
            found = lengths.next_above(length, LENGTHS_SHARE);
        }
        let found = found.unwrap_or(self.bounds.threshold.1);
        if found > threshold && found <= self.bounds.threshold.1 {
            self.add(Knob::Threshold, true, PoolLimits { long: Some((found, permits)), ..own }, why);
        }
    }

    /// Lowers the threshold, or adds one with the fewest permits.
    fn lower_threshold(&mut self, why: &str) {
        let own = self.own();
        let lengths: &Lengths = &self.seen.lengths;
        if own.long.is_some() && own.permits().is_none() {
            return;
        }
        let (found, permits) = match own.long {
            Some((threshold, permits)) => (lengths.next_below(threshold, LENGTHS_SHARE), permits),
            None => (long_prompts(lengths, self.bounds), self.bounds.permits.0),
        };
        let Some(threshold) = found.filter(|found| *found >= self.bounds.threshold.0) else { return };
        if lengths.share_above(threshold) <= LONG_SHARE {
            self.add(Knob::Threshold, false, PoolLimits { long: Some((threshold, permits)), ..own }, why);
        }
    }

    fn more_prefill(&mut self, why: &str) {
        let own = self.own();
        let Some(limit) = own.prefill_tokens else { return };
        let raised = self.above(Knob::PrefillTokens, limit);
        let prefill_tokens = Some(raised).filter(|raised| *raised <= self.bounds.prefill_tokens.1);
        self.add(Knob::PrefillTokens, true, PoolLimits { prefill_tokens, ..own }, why);
    }

    fn less_prefill(&mut self, why: &str) {
        let own = self.own();
        let used = own.prefill_tokens.unwrap_or(u64::MAX).min(self.seen.usage.prefill_peak);
        let lowered = self.below(Knob::PrefillTokens, used);
        if lowered >= self.bounds.prefill_tokens.0 {
            self.add(Knob::PrefillTokens, false, PoolLimits { prefill_tokens: Some(lowered), ..own }, why);
        }
    }

    /// Whether this pool loses much while a neighbour loses next to nothing.
    fn neighbour_is_idle(&self) -> bool {
        let lost = self.seen.loss_per_request();
        let is_idle = |other: &usize| self.window.pools[*other].loss_per_request() < lost * IDLE;
        lost > MUCH
            && (0..self.limits.0.len()).filter(|other| self.is_next_to(*other).is_some()).any(|other| is_idle(&other))
    }

    /// Whether the other pool's range is right above this pool's (true) or right below (false);
    /// `None`: neither.
    fn is_next_to(&self, other: usize) -> Option<bool> {
        let (own, theirs) = (self.own().range, self.limits.0[other].range);
        match (own.1 == Some(theirs.0), theirs.1 == Some(own.0)) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    }

    fn boundary(&mut self, why: &str) {
        let (own, lost) = (self.own(), self.seen.loss_per_request());
        for other in 0..self.limits.0.len() {
            let Some(above) = self.is_next_to(other) else { continue };
            if self.window.pools[other].loss_per_request() > lost * LESS {
                continue;
            }
            let lengths = &self.seen.lengths;
            let (at, found) = match (above, own.range.1) {
                (true, Some(end)) => (self.pool, lengths.next_below(end - 1, BOUNDARY_SHARE)),
                _ => (other, lengths.next_above(own.range.0, BOUNDARY_SHARE)),
            };
            // The end of a range is excluded.
            let to = found.map(|length| length + 1);
            // The pool below must be able to serve the longer prompts.
            let context = self.window.pools[at].usage.context.map(|tokens| (tokens as f64 * CONTEXT_SHARE) as u64);
            let is_raised = !above;
            let fits = |to: &u64| !is_raised || context.is_none_or(|most| *to <= most);
            let is_within = |to: &u64| (self.bounds.boundary.0..=self.bounds.boundary.1).contains(to) && fits(to);
            let to = to.filter(is_within);
            if let Some(moved) = to.and_then(|to| self.limits.with_boundary(at, to)) {
                let direction = Direction { pool: at, knob: Knob::Boundary, up: !above };
                self.add_all(direction, moved, &format!("{why}, and the next pool loses less"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::observe::loss::Judged;
    use crate::observe::usage::Usage;

    #[test]
    fn where_little_of_the_time_is_lost_nothing_is_tried() {
        let limits = Limits(vec![PoolLimits { slots: 64, prefill_tokens: None, long: None, range: (0, None) }]);
        let knobs = |between_tokens: f64| {
            let mut pool = PoolWindow::new(Duration::ZERO);
            pool.lengths.add(200);
            pool.causes = [10.0 - between_tokens, 0.0, between_tokens];
            pool.usage = Usage { slots_peak: 40, in_rotation: 2, ..Usage::default() };
            let window = Window { from: Duration::ZERO, pools: vec![pool] };
            let moves = candidates(&window, &limits, &LimitRange::default(), &Steps::default());
            moves.into_iter().map(|step| (step.direction.knob, step.direction.up)).collect::<Vec<_>>()
        };
        assert_eq!(knobs(2.0), []);
        assert!(knobs(3.0).contains(&(Knob::Slots, false)), "{:?}", knobs(3.0));
    }

    #[test]
    fn slots_are_not_lowered_below_the_demand_and_two_of_its_standard_deviations() {
        let limits = Limits(vec![PoolLimits { slots: 64, prefill_tokens: None, long: None, range: (0, None) }]);
        let mut pool = PoolWindow::new(Duration::ZERO);
        // 48 requests/s of one second are 24 at once on each of two backends. A step
        // alone would lower 40 slots to 28.
        for second in 0..20 {
            (0..48).for_each(|_| {
                let judged = Judged { loss: 1.0, cause: Some(Cause::Decode), service: Some(1.0) };
                pool.add(Duration::from_secs(second), 200, judged);
            });
        }
        let in_flight = Some(((Duration::ZERO, 48), (Duration::from_secs(20), 48)));
        pool.usage = Usage { slots_peak: 40, in_rotation: 2, in_flight, ..Usage::default() };
        pool.ended = 960.0;
        let window = Window { from: Duration::ZERO, pools: vec![pool] };
        let moves = candidates(&window, &limits, &LimitRange::default(), &Steps::default());
        let slots = moves.iter().find(|step| step.direction.knob == Knob::Slots).unwrap().to.0[0].slots;
        assert_eq!(slots, 31, "24 + 2 * sqrt(12)");
    }
}
