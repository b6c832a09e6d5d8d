//! Two or three candidates with faults on virtual time: two never lead at once, and one leads soon
//! after the faults.
//!
//! Clocks are up to a tenth too fast or too slow. Candidates are killed, frozen and cut off. The
//! store is slow or down, or loses calls, answers or the object. A frozen candidate counts as
//! leading while the term lasts on the candidate's clock, by which it acts when it goes on.

use std::time::Duration;

use sluice_core::base::Rng;

use crate::election::{Candidate, LeaseRecord, RELEASED, TERM};

const LEASE: u64 = 10_000;
const PERIOD: u64 = LEASE / 8;
const CALL: u64 = LEASE / 5;
const TICK: u64 = 20;
const SEEDS: u64 = 300;
const FAULTY: u64 = 90_000 / TICK;
/// Milliseconds within which a candidate must lead: a lease on the slowest clock, the rest of a
/// running call, a read and a write.
const SOON: u64 = LEASE * 10 / 9 + CALL * 2 + PERIOD * 2;

fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

#[derive(Debug)]
enum Call {
    /// Real time of the next read.
    Idle(u64),
    /// Waits for an answer `until` a time on the candidate's clock. An answer with another `number`
    /// is late.
    Waits { number: u64, until: Duration },
}

#[derive(Debug)]
struct Node {
    candidate: Candidate,
    /// Speed of the clock in percent.
    rate: u64,
    call: Call,
    frozen: bool,
    lost: [usize; 2],
}

#[derive(Debug)]
enum Message {
    Read,
    Write(LeaseRecord, Option<u64>),
    Found(Option<(LeaseRecord, u64)>),
    Written(Option<LeaseRecord>),
}

struct World {
    now: u64,
    rng: Rng,
    nodes: Vec<Node>,
    /// Arrival, candidate, number of the call, and message.
    messages: Vec<(u64, String, u64, Message)>,
    object: Option<(LeaseRecord, u64)>,
    version: u64,
    down: bool,
    /// Percentage of messages that arrive up to two leases late.
    late: usize,
    calls: u64,
    started: u64,
    /// The last leader, and the end of the term in real time.
    last: Option<(String, u64)>,
    /// Shortest time between two terms.
    gap: u64,
}

impl World {
    fn new(seed: u64, nodes: usize) -> Self {
        let (messages, object, version, down, calls, started, last) = Default::default();
        let rng = Rng::new(seed);
        let mut world = Self {
            now: 0,
            late: 3,
            rng,
            nodes: Vec::new(),
            messages,
            object,
            version,
            down,
            calls,
            started,
            last,
            gap: u64::MAX,
        };
        (0..nodes).for_each(|_| world.start());
        world
    }

    fn start(&mut self) {
        self.started += 1;
        let rate = 90 + self.rng.below(21) as u64;
        let candidate = Candidate::new(format!("g{}", self.started), ms(LEASE));
        let first = self.now + self.rng.below(PERIOD as usize) as u64;
        self.nodes.push(Node { candidate, rate, call: Call::Idle(first), frozen: false, lost: [0; 2] });
    }

    fn clock(&self, node: usize) -> Duration {
        ms(self.now * self.nodes[node].rate / 100)
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.rng.below(100) < percent
    }

    fn send(&mut self, node: usize, number: u64, message: Message, lost: usize) {
        if self.chance(self.nodes[node].lost[lost]) || self.down {
            return;
        }
        // Some messages arrive when the candidate no longer waits for them.
        let delay = if self.chance(self.late) { self.rng.below(2 * LEASE as usize) } else { self.rng.below(40) };
        let id = self.nodes[node].candidate.id().to_owned();
        self.messages.push((self.now + delay as u64, id, number, message));
    }

    fn call(&mut self, node: usize, message: Message) {
        self.calls += 1;
        let (number, until) = (self.calls, self.clock(node) + ms(CALL));
        self.nodes[node].call = Call::Waits { number, until };
        self.send(node, number, message, 0);
    }

    fn arrive(&mut self, id: &str, number: u64, message: Message) {
        let node = self.nodes.iter().position(|node| node.candidate.id() == id);
        match message {
            Message::Read => {
                let found = self.object.clone();
                if let Some(node) = node {
                    self.send(node, number, Message::Found(found), 1);
                }
            }
            // A write arrives even if the candidate was killed after it sent the write.
            Message::Write(record, over) => {
                let same = self.object.as_ref().map(|(_, version)| *version) == over;
                if same {
                    self.version += 1;
                    self.object = Some((record.clone(), self.version));
                }
                if let Some(node) = node {
                    self.send(node, number, Message::Written(same.then_some(record)), 1);
                }
            }
            Message::Found(found) => {
                let Some(node) = node.filter(|node| self.waits(*node, number)) else { return };
                self.nodes[node].call = Call::Idle(self.now + PERIOD);
                let now = self.clock(node);
                let version = found.as_ref().map(|(_, version)| version.to_string());
                let seen = found.as_ref().map(|(record, _)| record).zip(version.as_deref());
                if let Some(record) = self.nodes[node].candidate.found(now, seen, "t") {
                    self.nodes[node].candidate.sends(now);
                    self.call(node, Message::Write(record, found.map(|(_, version)| version)));
                }
            }
            Message::Written(written) => {
                let Some(node) = node.filter(|node| self.waits(*node, number)) else { return };
                self.nodes[node].call = Call::Idle(self.now + PERIOD);
                let candidate = &mut self.nodes[node].candidate;
                match written {
                    Some(record) => candidate.confirmed(&record),
                    None => candidate.failed(),
                }
            }
        }
    }

    fn waits(&self, node: usize, number: u64) -> bool {
        matches!(&self.nodes[node].call, Call::Waits { number: waits, .. } if *waits == number)
    }

    fn tick(&mut self) {
        self.now += TICK;
        let is_frozen = |nodes: &[Node], id: &str| nodes.iter().any(|node| node.frozen && node.candidate.id() == id);
        let (nodes, now) = (&self.nodes, self.now);
        // Answers to a frozen candidate wait, but the calls that it sent reach the store.
        let (mut due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.messages).into_iter().partition(|message| {
            let to_node = matches!(message.3, Message::Found(_) | Message::Written(_));
            message.0 <= now && !(to_node && is_frozen(nodes, &message.1))
        });
        self.messages = later;
        due.sort_by_key(|message| message.0);
        for (_, id, number, message) in due {
            self.arrive(&id, number, message);
        }
        for node in 0..self.nodes.len() {
            let clock = self.clock(node);
            match self.nodes[node].call {
                _ if self.nodes[node].frozen => {}
                Call::Idle(next) if next <= self.now => self.call(node, Message::Read),
                Call::Waits { until, .. } if until <= clock => {
                    self.nodes[node].candidate.failed();
                    self.nodes[node].call = Call::Idle(self.now + TICK);
                }
                _ => {}
            }
        }
        self.check();
    }

    fn leaders(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|node| self.nodes[*node].candidate.leads(self.clock(*node))).collect()
    }

    fn check(&mut self) {
        let leaders = self.leaders();
        let names: Vec<&str> = leaders.iter().map(|node| self.nodes[*node].candidate.id()).collect();
        assert!(leaders.len() <= 1, "{names:?} lead at {} ms", self.now);
        let Some(leader) = leaders.first() else { return };
        let node = &self.nodes[*leader];
        let id = node.candidate.id().to_owned();
        let until = node.candidate.until().expect("it leads").as_millis() as u64 * 100 / node.rate;
        if let Some((last, ended)) = &self.last
            && *last != id
        {
            self.gap = self.gap.min(self.now.saturating_sub(*ended));
        }
        self.last = Some((id, until));
    }

    fn disturb(&mut self) {
        if self.nodes.is_empty() {
            return self.start();
        }
        let node = self.rng.below(self.nodes.len());
        match self.rng.below(10) {
            0 => drop(self.nodes.remove(node)),
            1 if self.nodes.len() < 3 => self.start(),
            2 | 3 => self.nodes[node].frozen ^= true,
            4 => self.nodes[node].lost = [100, 100],
            5 => self.nodes[node].lost = [0, 100],
            6 => self.nodes[node].lost = [30, 30],
            7 => self.down ^= true,
            8 if self.chance(30) => self.object = None,
            _ => self.nodes[node].lost = [0, 0],
        }
    }

    fn heal(&mut self) {
        self.down = false;
        for node in &mut self.nodes {
            (node.frozen, node.lost) = (false, [0, 0]);
        }
        if self.nodes.is_empty() {
            self.start();
        }
    }

    /// Runs the world until a candidate leads. Returns the milliseconds that this takes.
    fn until_one_leads(&mut self) -> u64 {
        let begun = self.now;
        while self.leaders().is_empty() {
            self.tick();
            assert!(self.now - begun <= SOON + LEASE, "none leads after {} ms", self.now - begun);
        }
        self.now - begun
    }
}

#[test]
fn never_do_two_lead_and_one_does_soon_after_the_faults() {
    let mut gap = u64::MAX;
    for seed in 0..SEEDS {
        let mut world = World::new(seed, 2 + seed as usize % 2);
        for _ in 0..FAULTY {
            if world.chance(1) {
                world.disturb();
            }
            world.tick();
        }
        world.heal();
        // The rest of the schedule is as after a crash of the leader.
        (0..2 * LEASE / TICK).for_each(|_| world.tick());
        world.until_one_leads();
        gap = gap.min(world.gap);
    }
    // Released records would shorten the gap, but here no record is released.
    assert!(gap >= LEASE / 10, "{gap} ms between two terms");
    assert!(gap < LEASE, "no schedule comes near the bound, so it tests nothing: {gap} ms");
}

#[test]
fn after_a_crash_another_leads_within_a_lease_and_two_periods() {
    for seed in 0..SEEDS {
        let mut world = World::new(seed, 2);
        world.late = 0;
        world.until_one_leads();
        let more = world.rng.below(2 * LEASE as usize) as u64 / TICK;
        (0..more).for_each(|_| world.tick());
        let leader = world.leaders()[0];
        world.nodes.remove(leader);
        let took = world.until_one_leads();
        assert!((LEASE / 2..=SOON).contains(&took), "seed {seed}: {took} ms");
    }
}

fn record(holder: Option<&str>, seconds: u32) -> LeaseRecord {
    LeaseRecord {
        holder_identity: holder.map(str::to_owned),
        lease_duration_seconds: seconds,
        acquire_time: Some("a".to_owned()),
        renew_time: Some("r".to_owned()),
        lease_transitions: 4,
    }
}

#[test]
fn a_record_that_was_given_up_is_taken_at_once_and_one_that_lost_its_holder_otherwise_after_a_lease() {
    let mut candidate = Candidate::new("one".to_owned(), ms(LEASE));
    let taken = candidate.found(ms(0), Some((&record(None, RELEASED), "7")), "now").expect("it is free");
    assert_eq!((taken.holder(), taken.lease_duration_seconds, taken.lease_transitions), (Some("one"), 10, 5));
    for by_hand in [record(None, 10), record(Some(""), 10)] {
        let mut candidate = Candidate::new("one".to_owned(), ms(LEASE));
        assert_eq!(candidate.found(ms(0), Some((&by_hand, "7")), "now"), None);
        assert_eq!(candidate.found(ms(LEASE), Some((&by_hand, "7")), "now"), None);
        assert!(candidate.found(ms(LEASE + 1), Some((&by_hand, "7")), "now").is_some());
    }
}

#[test]
fn it_waits_as_long_as_the_record_says_and_from_the_last_change_on() {
    let mut candidate = Candidate::new("one".to_owned(), ms(LEASE));
    let theirs = record(Some("two"), 30);
    assert_eq!(candidate.found(ms(0), Some((&theirs, "1")), "now"), None);
    assert_eq!(candidate.found(ms(29_000), Some((&theirs, "2")), "now"), None, "it was renewed");
    assert_eq!(candidate.found(ms(59_000), Some((&theirs, "2")), "now"), None);
    let taken = candidate.found(ms(59_001), Some((&theirs, "2")), "now").expect("it is over");
    assert_eq!((taken.acquire_time.as_deref(), taken.lease_transitions), (Some("now"), 5));
}

#[test]
fn a_term_counts_from_when_the_renewal_was_sent_and_ends_when_another_ones_record_is_seen() {
    let mut candidate = Candidate::new("one".to_owned(), ms(LEASE));
    let own = candidate.found(ms(0), Some((&record(None, RELEASED), "1")), "now").expect("it is free");
    candidate.sends(ms(100));
    assert!(!candidate.leads(ms(100)), "nothing is confirmed");
    candidate.confirmed(&own);
    let end = ms(100) + ms(LEASE) * TERM.0 / TERM.1;
    assert!(candidate.leads(end - ms(1)) && !candidate.leads(end));
    let renewed = candidate.found(ms(5_000), Some((&own, "2")), "later").expect("it renews");
    assert_eq!((renewed.acquire_time, renewed.renew_time), (Some("now".to_owned()), Some("later".to_owned())));
    candidate.sends(ms(5_000));
    candidate.failed();
    assert!(candidate.leads(ms(5_100)), "the term before is not over");
    assert_eq!(candidate.found(ms(5_200), Some((&record(Some("two"), 10), "3")), "now"), None);
    assert!(!candidate.leads(ms(5_200)));
}

#[test]
fn one_that_resigns_gives_its_record_up_and_takes_none() {
    let mut candidate = Candidate::new("one".to_owned(), ms(LEASE));
    let own = candidate.found(ms(0), Some((&record(None, RELEASED), "1")), "now").expect("it is free");
    candidate.sends(ms(0));
    candidate.confirmed(&own);
    candidate.resign();
    assert!(!candidate.leads(ms(1)));
    let released = candidate.found(ms(10), Some((&own, "2")), "now").expect("its own");
    assert_eq!((released.holder(), released.lease_duration_seconds), (None, RELEASED));
    candidate.sends(ms(10));
    candidate.confirmed(&released);
    assert!(!candidate.leads(ms(11)));
    assert_eq!(candidate.found(ms(20), Some((&released, "3")), "now"), None);
}

#[test]
fn a_lost_object_is_made_anew_by_the_one_that_leads_and_by_others_without_a_holder() {
    let mut leader = Candidate::new("one".to_owned(), ms(LEASE));
    let own = leader.found(ms(0), Some((&record(None, RELEASED), "1")), "now").expect("it is free");
    leader.sends(ms(0));
    leader.confirmed(&own);
    let anew = leader.found(ms(1_000), None, "now").expect("it makes it anew");
    assert_eq!((anew.holder(), leader.leads(ms(1_000))), (Some("one"), true));
    let mut other = Candidate::new("two".to_owned(), ms(LEASE));
    let unheld = other.found(ms(0), None, "now").expect("it makes it");
    assert_eq!(unheld.holder(), None);
    other.sends(ms(0));
    other.confirmed(&unheld);
    assert!(!other.leads(ms(1)));
    assert_eq!(other.found(ms(1_000), Some((&unheld, "2")), "now"), None);
    let again = leader.found(ms(1_500), Some((&unheld, "2")), "now").expect("it leads");
    assert_eq!((again.holder(), leader.leads(ms(1_500))), (Some("one"), true));
}

#[test]
fn what_is_no_record_is_refused_in_words() {
    for bytes in [&b"{}"[..], b"", b"{\"leaseDurationSeconds\":-1}", b"[1]"] {
        let words = LeaseRecord::parse(bytes).unwrap_err().to_string();
        assert!(words.contains("no record of who leads") && words.contains("cluster.key"), "{words}");
    }
    let record = record(Some("one"), 10);
    assert_eq!(LeaseRecord::parse(&record.to_bytes()), Ok(record));
}
