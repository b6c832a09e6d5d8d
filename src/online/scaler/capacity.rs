//! Learns how much work per second one engine does while requests meet their objectives.
//!
//! Minutes are sorted into classes by the load of an engine, a factor of [`STEP`] apart. The share
//! of misses rises with the load, so a rising sequence is fitted (isotonic regression, pool
//! adjacent violators; Robertson, Wright and Dykstra 1988). The capacity is the highest load whose
//! fitted share of misses is allowed. If no seen load was too high, the capacity is one step above
//! the highest, or [`FAR`] times it if requests stayed far below their bounds.
//!
//! A miss counts at the highest load of the last [`BLAME`] minutes, because the load at arrival
//! caused it. Bounds: [`CLASSES`].

use std::collections::{BTreeMap, VecDeque};

const STEP: f64 = 1.1;
/// Bound on the number of classes. The loads of one engine need fewer.
const CLASSES: usize = 128;
/// The highest load of this many minutes is blamed for a miss.
const BLAME: usize = 3;
/// Factor by which the weight of an observation falls each minute, to half after a day.
const KEPT: f64 = 0.999_518_8;
/// Judged requests that a class needs.
const ENOUGH: f64 = 100.0;
/// Factor above the highest seen load if requests stayed far below their bounds.
const FAR: f64 = 1.5;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Seen {
    judged: f64,
    missed: f64,
    near: f64,
}

/// The capacity of one engine, learned per load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capacity {
    classes: BTreeMap<i32, Seen>,
    last: VecDeque<f64>,
    /// Capacity known from elsewhere.
    prior: Option<f64>,
}

/// Merged classes between which the share of misses did not rise.
struct Block {
    lowest: i32,
    highest: i32,
    seen: Seen,
}

impl Capacity {
    /// Sets a capacity that is known from elsewhere.
    pub fn set_prior(&mut self, prior: Option<f64>) {
        self.prior = prior.filter(|prior| prior.is_finite() && *prior > 0.0);
    }

    /// Counts the requests that ended in a minute at this `load` of one engine. Ignores invalid
    /// numbers.
    pub fn note(&mut self, load: f64, judged: f64, missed: f64, near: f64) {
        let counts = [judged, missed, near];
        let is_sound = counts.iter().all(|count| count.is_finite() && *count >= 0.0);
        if !(is_sound && load.is_finite() && load > 0.0) {
            return;
        }
        self.last.push_back(load);
        if self.last.len() > BLAME {
            self.last.pop_front();
        }
        let blamed = self.last.iter().copied().fold(load, f64::max);
        self.classes.values_mut().for_each(|seen| {
            (seen.judged, seen.missed, seen.near) = (seen.judged * KEPT, seen.missed * KEPT, seen.near * KEPT);
        });
        let class = self.classes.entry(class_of(blamed)).or_default();
        class.judged += judged;
        class.missed += missed;
        class.near += near;
        if self.classes.len() > CLASSES
            && let Some(least) = self.classes.iter().min_by(|a, b| a.1.judged.total_cmp(&b.1.judged))
        {
            let least = *least.0;
            self.classes.remove(&least);
        }
    }

    /// Work per second that one engine holds if this share of requests may miss, if known.
    pub fn estimate(&self, allowed: f64) -> Option<f64> {
        let blocks = self.blocks();
        let share = |count: f64, seen: &Seen| count / seen.judged.max(1.0);
        let fine = blocks.iter().take_while(|block| share(block.seen.missed, &block.seen) <= allowed).last();
        let too_high = blocks.iter().find(|block| share(block.seen.missed, &block.seen) > allowed);
        let more = fine.map(|block| {
            let far = share(block.seen.near, &block.seen) <= allowed;
            load_of(block.highest) * if far { FAR } else { STEP }
        });
        // The capacity known from elsewhere counts until a load contradicts it.
        let holds = more.into_iter().chain(self.prior).reduce(f64::max);
        let below = too_high.map(|block| load_of(block.lowest) / STEP);
        match (holds, below) {
            (Some(holds), Some(below)) => Some(holds.min(below)),
            (holds, below) => holds.or(below),
        }
    }

    /// Blocks with a rising share of misses. A class with too few requests joins the next higher
    /// class.
    fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let (mut carried, mut lowest) = (Seen::default(), None);
        for (class, seen) in &self.classes {
            carried = carried.and(seen);
            let from = *lowest.get_or_insert(*class);
            if carried.judged < ENOUGH {
                continue;
            }
            let mut block = Block { lowest: from, highest: *class, seen: std::mem::take(&mut carried) };
            lowest = None;
            let rate = |seen: &Seen| seen.missed / seen.judged;
            while let Some(before) = blocks.pop_if(|before| rate(&before.seen) >= rate(&block.seen)) {
                (block.lowest, block.seen) = (before.lowest, block.seen.and(&before.seen));
            }
            blocks.push(block);
        }
        blocks
    }
}

impl Seen {
    fn and(&self, other: &Self) -> Self {
        Self { judged: self.judged + other.judged, missed: self.missed + other.missed, near: self.near + other.near }
    }
}

fn class_of(load: f64) -> i32 {
    (load.ln() / STEP.ln()).round() as i32
}

fn load_of(class: i32) -> f64 {
    STEP.powi(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Minutes at loads from 100 to 1,000, where requests miss at loads above `limit`.
    fn seen(limit: f64) -> Capacity {
        let mut capacity = Capacity::default();
        for round in 0..10 {
            for load in [100.0, 200.0, 400.0, 600.0, 800.0, 1_000.0, 300.0, 100.0, 100.0, 100.0] {
                let missed = if load > limit { 30.0 } else { f64::from(round % 2) * 0.5 };
                capacity.note(load, 200.0, missed, 10.0);
            }
        }
        capacity
    }

    #[test]
    fn the_capacity_is_the_highest_load_at_which_requests_were_in_time() {
        let holds = seen(700.0).estimate(0.01).unwrap();
        assert!((600.0..740.0).contains(&holds), "{holds}");
        let holds = seen(300.0).estimate(0.01).unwrap();
        assert!((270.0..370.0).contains(&holds), "{holds}");
    }

    #[test]
    fn misses_count_at_the_load_at_which_their_requests_arrived() {
        let mut capacity = Capacity::default();
        for _ in 0..20 {
            for (load, missed) in [(100.0, 0.0), (900.0, 0.0), (100.0, 40.0), (100.0, 0.0), (100.0, 0.0), (400.0, 0.0)]
            {
                capacity.note(load, 200.0, missed, missed);
            }
        }
        let holds = capacity.estimate(0.01).unwrap();
        assert!((350.0..900.0).contains(&holds), "{holds}");
    }

    #[test]
    fn where_no_load_was_too_high_a_step_more_is_tried() {
        let mut capacity = Capacity::default();
        assert_eq!(capacity.estimate(0.01), None);
        capacity.set_prior(Some(50.0));
        assert_eq!(capacity.estimate(0.01), Some(50.0));
        (0..10).for_each(|_| capacity.note(100.0, 100.0, 0.0, 0.0));
        let far = capacity.estimate(0.01).unwrap();
        assert!((140.0..165.0).contains(&far), "{far}");
        (0..10).for_each(|_| capacity.note(100.0, 100.0, 0.0, 50.0));
        let near = capacity.estimate(0.01).unwrap();
        assert!((100.0..120.0).contains(&near), "{near}");
        (0..10).for_each(|_| capacity.note(100.0, 100.0, 50.0, 50.0));
        assert!(capacity.estimate(0.01).unwrap() < 90.0);
    }

    #[test]
    fn what_is_no_number_changes_nothing_and_old_loads_are_forgotten() {
        let mut capacity = seen(700.0);
        let before = capacity.clone();
        capacity.note(100.0, f64::NAN, 0.0, 0.0);
        capacity.note(100.0, 1.0, -1.0, 0.0);
        for load in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            capacity.note(load, 1.0, 1.0, 1.0);
        }
        assert_eq!(capacity, before);
        (0..5 * 1_440).for_each(|_| capacity.note(1_500.0, 100.0, 0.0, 0.0));
        assert!(capacity.estimate(0.01).unwrap() > 1_400.0);
        assert!(capacity.classes.len() <= CLASSES);
    }
}
