//! The turns of engines by example, exhaustively in a small world, and over random histories.
//!
//! The world has the true states of the engines. The turn sees only the state that each engine
//! shows.

use std::collections::{HashSet, VecDeque};

use proptest::prelude::*;

use super::*;

const STAY: Duration = Duration::from_secs(2);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn sharer(name: u8, hold: Hold, waits_since: Option<u64>) -> Sharer<u8> {
    Sharer { name, hold, waits_since: waits_since.map(at) }
}

#[test]
fn the_engine_with_the_oldest_request_wakes_and_stays_for_a_while() {
    let mut turn = Turn::default();
    let asleep = [sharer(0, Hold::Asleep, Some(5)), sharer(1, Hold::Asleep, Some(4)), sharer(2, Hold::Asleep, None)];
    assert_eq!(turn.decide(&asleep, at(6), STAY), Some(Order::Wake(1)));
    let seen = |hold, waits| [sharer(0, Hold::Asleep, waits), sharer(1, hold, Some(4))];
    assert_eq!(turn.decide(&seen(Hold::Coming, Some(5)), at(20), STAY), None);
    assert_eq!(turn.decide(&seen(Hold::Awake, Some(5)), at(21), STAY), None, "it has been awake for a second");
    assert_eq!(turn.decide(&seen(Hold::Awake, None), at(90), STAY), None, "no request waits for the other");
    assert_eq!(
        turn.decide(&seen(Hold::Awake, Some(89)), at(90), STAY),
        Some(Order::Rest(1)),
        "its own queue is no reason"
    );
    assert_eq!(turn.decide(&seen(Hold::Leaving, Some(89)), at(91), STAY), None);
    assert_eq!(turn.decide(&seen(Hold::Asleep, Some(89)), at(92), STAY), Some(Order::Wake(0)), "the others come first");
}

#[test]
fn an_engine_that_could_not_leave_begins_a_turn() {
    let mut turn = Turn::default();
    let seen = |hold| [sharer(0, hold, Some(1)), sharer(1, Hold::Asleep, Some(1))];
    assert_eq!(turn.decide(&seen(Hold::Awake), at(1), STAY), None);
    assert_eq!(turn.decide(&seen(Hold::Awake), at(3), STAY), Some(Order::Rest(0)));
    assert_eq!(turn.decide(&seen(Hold::Leaving), at(300), STAY), None);
    assert_eq!(turn.decide(&seen(Hold::Awake), at(301), STAY), None, "its own requests waited as well");
    assert_eq!(turn.decide(&seen(Hold::Awake), at(302), STAY), Some(Order::Rest(0)));
}

#[test]
fn a_drain_lasts_until_its_requests_end_or_no_request_waits_for_another_engine() {
    let mut turn = Turn::default();
    let seen = |hold, other| [sharer(0, hold, Some(1)), sharer(1, Hold::Asleep, other)];
    assert_eq!(turn.decide(&seen(Hold::Awake, Some(1)), at(1), STAY), None);
    assert_eq!(turn.decide(&seen(Hold::Awake, Some(1)), at(3), STAY), Some(Order::Rest(0)));
    assert_eq!(turn.decide(&seen(Hold::Draining, Some(1)), at(3_600), STAY), None, "its own queue is no reason");
    assert_eq!(turn.decide(&seen(Hold::Draining, None), at(3_601), STAY), Some(Order::Wake(0)), "it serves on");
    assert_eq!(turn.decide(&seen(Hold::Leaving, None), at(3_601), STAY), None, "it falls asleep");
    assert_eq!(turn.decide(&seen(Hold::Awake, Some(3_602)), at(3_602), STAY), None, "that began a turn");
    assert_eq!(turn.decide(&seen(Hold::Awake, Some(3_602)), at(3_603), STAY), Some(Order::Rest(0)));
}

#[test]
fn an_engine_that_fails_leaves_at_once_and_one_that_an_operator_has_is_passed_over() {
    let mut turn = Turn::default();
    let failing = [sharer(0, Hold::Failing, Some(1)), sharer(1, Hold::Asleep, Some(9))];
    assert_eq!(turn.decide(&failing, at(9), STAY), Some(Order::Rest(0)));
    let alone = [sharer(0, Hold::Failing, Some(1)), sharer(1, Hold::Asleep, None)];
    assert_eq!(turn.decide(&alone, at(9), STAY), None, "it may start again");
    let away = [sharer(0, Hold::Away, Some(1)), sharer(1, Hold::Asleep, Some(9))];
    assert_eq!(turn.decide(&away, at(9), STAY), Some(Order::Wake(1)));
    let stuck = [sharer(0, Hold::Stuck, Some(1)), sharer(1, Hold::Asleep, Some(9))];
    assert_eq!(turn.decide(&stuck, at(9), STAY), None, "the device may not be free");
}

#[test]
fn of_several_that_run_one_stays() {
    let mut turn = Turn::default();
    let both = [sharer(0, Hold::Coming, None), sharer(1, Hold::Awake, None)];
    assert_eq!(turn.decide(&both, at(0), STAY), Some(Order::Rest(0)));
    let one = [sharer(0, Hold::Leaving, None), sharer(1, Hold::Awake, None)];
    assert_eq!(turn.decide(&one, at(0), STAY), None);
}

/// What the engines do, and which requests wait.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    turn: Turn<u8>,
    holds: Vec<Hold>,
    waits: Vec<Option<Duration>>,
    now: Duration,
}

impl World {
    fn new(engines: usize) -> Self {
        Self { turn: Turn::default(), holds: vec![Hold::Asleep; engines], waits: vec![None; engines], now: at(0) }
    }

    fn sharers(&self) -> Vec<Sharer<u8>> {
        let both = self.holds.iter().zip(&self.waits).enumerate();
        both.map(|(name, (hold, waits))| Sharer { name: name as u8, hold: *hold, waits_since: *waits }).collect()
    }

    /// Decides and obeys the order, which must be possible and safe.
    fn obey(&mut self) -> Option<Order<u8>> {
        let since = self.turn.since;
        let order = self.turn.decide(&self.sharers(), self.now, STAY);
        match order {
            Some(Order::Wake(name)) => {
                let name = usize::from(name);
                let mut others = self.holds.iter().enumerate().filter(|(at, _)| *at != name);
                assert!(others.all(|(_, hold)| !hold.is_held()), "woken beside another one: {self:?}");
                let drains = self.holds[name] == Hold::Draining;
                assert!(drains || self.waits[name].is_some(), "woken without a request: {self:?}");
                self.holds[name] = if drains { Hold::Awake } else { Hold::Coming };
            }
            Some(Order::Rest(name)) => {
                let hold = &mut self.holds[usize::from(name)];
                let stayed = self.turn.since == since && self.now - since >= STAY;
                assert!(*hold == Hold::Failing || (*hold == Hold::Awake && stayed), "too early: {order:?}");
                *hold = Hold::Draining;
            }
            None => {}
        }
        order
    }

    /// All states that one event leads to, for the exhaustive test.
    fn successors(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for engine in 0..self.holds.len() {
            let next: &[Hold] = match self.holds[engine] {
                Hold::Coming => &[Hold::Awake, Hold::Failing, Hold::Away],
                Hold::Awake => &[Hold::Failing],
                Hold::Draining => &[Hold::Leaving, Hold::Awake, Hold::Stuck],
                Hold::Leaving => &[Hold::Asleep, Hold::Awake, Hold::Stuck],
                Hold::Failing => &[Hold::Coming],
                Hold::Away | Hold::Stuck => &[Hold::Asleep],
                Hold::Asleep => &[],
            };
            all.extend(next.iter().map(|hold| {
                let mut next = self.clone();
                next.holds[engine] = *hold;
                next
            }));
            if self.waits[engine].is_none() {
                let mut next = self.clone();
                next.waits[engine] = Some(self.now);
                all.push(next);
            } else if self.holds[engine] == Hold::Awake {
                let mut next = self.clone();
                next.waits[engine] = None;
                all.push(next);
            }
        }
        if self.now < at(4) {
            all.push(Self { now: self.now + at(1), ..self.clone() });
        }
        for next in &mut all {
            next.obey();
        }
        all
    }
}

#[test]
fn exhaustively_no_order_of_events_wakes_two_or_leaves_a_request_without_an_engine() {
    let first = World::new(3);
    let (mut seen, mut open) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    while let Some(world) = open.pop_front() {
        let held = world.holds.iter().filter(|hold| hold.is_held()).count();
        assert!(held <= 1, "{world:?}");
        let waits = (0..3).any(|at| world.waits[at].is_some() && world.holds[at] == Hold::Asleep);
        assert!(held == 1 || !waits, "a request waits, and no engine comes: {world:?}");
        for next in world.successors() {
            if seen.insert(next.clone()) {
                open.push_back(next);
            }
        }
    }
    assert!(seen.len() > 10_000, "explored only {} states", seen.len());
}

proptest! {
    /// Engines take some time to come and to leave, and may fail. Engine 0 always has older
    /// requests than the others. Every request gets its engine within two turns of each engine.
    #[test]
    fn no_request_waits_longer_than_two_turns_of_each_engine(
        engines in 2usize..5,
        events in prop::collection::vec((0usize..5, 0u8..100), 300),
    ) {
        let mut world = World::new(engines);
        let (come, leave) = (3u64, 2u64);
        let longest = at(2 * engines as u64 * (come * 2 + leave + 1 + STAY.as_secs() + 2));
        let mut left = 0;
        for (engine, chance) in events {
            world.now += at(1);
            world.waits[0] = Some(at(0));
            let engine = engine % engines;
            if engine > 0 && chance < 60 && world.waits[engine].is_none() {
                world.waits[engine] = Some(world.now);
            }
            let holder = (0..engines).find(|at| world.holds[*at].is_held());
            if let Some(holder) = holder {
                left = if left == 0 { 0 } else { left - 1 };
                match (world.holds[holder], left) {
                    (Hold::Coming, 0) if chance >= 97 => {
                        world.holds[holder] = Hold::Failing;
                        left = 1;
                    }
                    (Hold::Coming, 0) => world.holds[holder] = Hold::Awake,
                    (Hold::Failing, 0) => {
                        world.holds[holder] = Hold::Coming;
                        left = come;
                    }
                    (Hold::Draining, 0) => {
                        world.holds[holder] = Hold::Leaving;
                        left = 1;
                    }
                    (Hold::Leaving, 0) => world.holds[holder] = Hold::Asleep,
                    _ => {}
                }
                if world.holds[holder] == Hold::Awake {
                    world.waits[holder] = None;
                }
            }
            match world.obey() {
                Some(Order::Wake(_)) => left = come,
                Some(Order::Rest(_)) => left = leave,
                None => {}
            }
            for waits in world.waits.iter().skip(1).flatten() {
                prop_assert!(world.now - *waits <= longest, "starves: {:?}", world);
            }
        }
    }
}
