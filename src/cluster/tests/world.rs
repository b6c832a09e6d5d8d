//! A store, engines and gateways on virtual time, with the faults that can occur between them.
//!
//! One tick is 100 ms. Gateways are real members, on clocks that may be too fast or too slow. No
//! write may raise a sum of shares above the limit.

use std::collections::VecDeque;
use std::time::Duration;

use sluice_core::base::Rng;

use super::request::Request;
use super::store::Store;
use crate::amounts::{Amounts, Limit, Unit};
use crate::ledger::Ledger;
use crate::member::{Identity, Member, Plan, Rules};
use crate::silence::{END_AGE, PAUSE, SURE_AGE};
use crate::usage::{LocalUse, Page, Usage};

pub(super) const TICK_MS: u64 = 100;
pub(super) const LEASE: Duration = Duration::from_millis(2_000);
/// Leases without a renewal, on a gateway's own clock, after which others may take its share.
/// Others wait until the lease is over for sure, and twelve leases more (`KEEP_LEASES`). Even on
/// their fast clocks, this takes more than ten leases of the gateway's slow clock.
const GIVEN_UP: u32 = 10;
const PERIOD: u64 = 5;
const RETRIES: u32 = 3;
/// Ticks after which the outcome of a call is unknown.
const DEADLINE: u64 = 8;
const PAGE_AGE: usize = 3;

pub(super) struct Engine {
    pub(super) limit: [Option<u64>; 4],
    pub(super) requests: Vec<Request>,
    /// Number of running sequences in each of the last ticks, latest first.
    pages: VecDeque<u64>,
}

struct Message {
    gateway: usize,
    attempt: u64,
    arrives: u64,
    over: u64,
    ledger: Ledger,
    answered: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Idle,
    Reading { since: u64, answer: Option<u64> },
    Writing { since: u64 },
}

/// Probability of each fault, in percent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) lost_read: usize,
    pub(super) lost_write: usize,
    pub(super) lost_answer: usize,
    pub(super) late_write: usize,
    pub(super) stale_read: usize,
    pub(super) no_page: usize,
}

pub(super) struct Gateway {
    pub(super) name: usize,
    pub(super) member: Member,
    pub(super) alive: bool,
    pub(super) frozen: bool,
    pub(super) faults: Faults,
    /// Speed of the clock in percent.
    rate: u64,
    step: Step,
    next: u64,
    attempt: u64,
    retries: u32,
    /// Requests that the gateway wants to run at once on each backend.
    pub(super) demand: Vec<u64>,
    need: Vec<u64>,
    settled: Vec<u64>,
    /// When the process last ran.
    ran: u64,
    /// Until when a pause may hide ends of requests.
    blind_until: u64,
    page: Vec<Option<Page>>,
    pub(super) last_room: Vec<u64>,
    /// Shares in the last confirmed write.
    pub(super) last_share: Vec<u64>,
    /// The tick of that confirmation.
    pub(super) confirmed: u64,
}

pub(super) struct World {
    pub(super) tick: u64,
    pub(super) rng: Rng,
    pub(super) keep: bool,
    pub(super) store: Store,
    pub(super) engines: Vec<Engine>,
    pub(super) gateways: Vec<Gateway>,
    messages: Vec<Message>,
    /// Length of the longest request, ticks.
    pub(super) longest: usize,
    starts: u64,
    /// Most ticks until the connections of a killed process close.
    pub(super) closes_after: usize,
}

impl World {
    pub(super) fn new(seed: u64, keep: bool, limits: &[[Option<u64>; 4]]) -> Self {
        let engine = |limit: &[Option<u64>; 4]| Engine { limit: *limit, requests: Vec::new(), pages: VecDeque::new() };
        Self {
            tick: 0,
            rng: Rng::new(seed),
            keep,
            store: Store::default(),
            engines: limits.iter().map(engine).collect(),
            gateways: Vec::new(),
            messages: Vec::new(),
            longest: 200,
            starts: 0,
            closes_after: 30,
        }
    }

    pub(super) fn chance(&mut self, per_cent: usize) -> bool {
        self.rng.below(100) < per_cent
    }

    /// Starts a gateway process. Returns the index.
    pub(super) fn start(&mut self, name: usize, rate: u64) -> usize {
        self.starts += 1;
        let identity = Identity { name: format!("gw{name}"), incarnation: self.starts };
        let engines = self.engines.len();
        self.gateways.push(Gateway {
            name,
            member: Member::new(&identity, Rules { lease: LEASE, keep: self.keep }),
            alive: true,
            frozen: false,
            faults: Faults::default(),
            rate,
            step: Step::Idle,
            next: self.tick + self.rng.below(PERIOD as usize) as u64,
            attempt: 0,
            retries: 0,
            demand: vec![0; engines],
            need: vec![1; engines],
            settled: vec![0; engines],
            ran: self.tick,
            blind_until: 0,
            page: vec![None; engines],
            last_room: vec![0; engines],
            last_share: vec![0; engines],
            confirmed: 0,
        });
        self.gateways.len() - 1
    }

    /// Kills a process. The connections of a killed process close after a while. After a power
    /// failure they stay open, and the requests run to their end.
    pub(super) fn kill(&mut self, index: usize, power_failed: bool) {
        self.gateways[index].alive = false;
        for engine in &mut self.engines {
            for request in engine.requests.iter_mut().filter(|request| request.gateway == index) {
                if !power_failed {
                    let closed = self.tick.max(request.arrives) + self.rng.below(self.closes_after) as u64;
                    request.ends = request.ends.min(closed);
                }
            }
        }
    }

    pub(super) fn clock(&self, index: usize) -> Duration {
        Duration::from_millis(100_000 * index as u64 + self.tick * TICK_MS * self.gateways[index].rate / 100)
    }

    pub(super) fn run(&mut self, ticks: u64) {
        for _ in 0..ticks {
            self.tick();
        }
    }

    pub(super) fn tick(&mut self) {
        self.tick += 1;
        let tick = self.tick;
        self.deliver();
        let first = self.rng.below(self.gateways.len().max(1));
        for place in 0..self.gateways.len() {
            let index = (first + place) % self.gateways.len();
            if self.gateways[index].alive && !self.gateways[index].frozen {
                self.admit(index);
                self.note_settled(index);
                self.read_page(index);
                self.renew(index);
            }
        }
        for index in 0..self.gateways.len() {
            let renewed = self.gateways[index].member.renewed();
            if renewed.is_some_and(|renewed| self.clock(index).saturating_sub(renewed) > LEASE * GIVEN_UP) {
                let requests = self.engines.iter_mut().flat_map(|engine| &mut engine.requests);
                requests.filter(|request| request.gateway == index).for_each(|request| request.loose = true);
            }
        }
        for engine in &mut self.engines {
            let running = engine.requests.iter().filter(|request| request.at_engine(tick)).map(|one| one.slots).sum();
            engine.pages.push_front(running);
            engine.pages.truncate(PAGE_AGE);
            let frozen = |request: &Request| self.gateways[request.gateway].frozen;
            let dead = |request: &Request| !self.gateways[request.gateway].alive;
            // A frozen gateway sees ends of requests when it goes on.
            engine.requests.retain(|request| {
                tick < request.ends || (!dead(request) && (frozen(request) || tick < request.seen_end))
            });
        }
    }

    fn deliver(&mut self) {
        let (tick, mut due) = (self.tick, Vec::new());
        self.messages.retain_mut(|message| {
            let is_due = message.arrives <= tick;
            if is_due {
                let empty = Ledger::new(String::new());
                let ledger = std::mem::replace(&mut message.ledger, empty);
                due.push((message.gateway, message.attempt, message.over, ledger, message.answered));
            }
            !is_due
        });
        for (index, attempt, over, ledger, answered) in due {
            let written = !self.store.down && self.store.latest().0 == over;
            let down = self.store.down;
            let entry = ledger.gateways.get(self.gateways[index].member.id());
            let share = |engine| entry.and_then(|entry| entry.backends.get(&format!("b{engine}")));
            let slots = |engine| share(engine).map_or(0, |holding| holding.share.get(Unit::Slots));
            let shares = (0..self.engines.len()).map(slots).collect();
            if written {
                self.check_sums(&ledger);
                self.store.put(Some(ledger));
            }
            let gateway = &mut self.gateways[index];
            let waits = matches!(gateway.step, Step::Writing { .. }) && gateway.attempt == attempt;
            if !waits || !answered || down || !gateway.alive || gateway.frozen {
                continue;
            }
            match written {
                true => {
                    gateway.member.confirmed();
                    (gateway.last_share, gateway.confirmed) = (shares, tick);
                    gateway.retries = 0;
                }
                false => {
                    gateway.member.refused();
                    gateway.retries += 1;
                    if gateway.retries <= RETRIES {
                        gateway.next = tick + 1 + self.rng.below(2) as u64;
                    }
                }
            }
            gateway.step = Step::Idle;
        }
    }

    fn check_sums(&self, ledger: &Ledger) {
        let before = self.store.latest().1;
        for backend in &ledger.known {
            let (sum, limit) = (ledger.sum(backend), ledger.limit(backend));
            for unit in Unit::ALL {
                let old = before.as_ref().map_or(0, |before| before.sum(backend).get(unit));
                let allowed = limit.get(unit).map_or(0, |limit| limit.max(old));
                assert!(sum.get(unit) <= allowed, "{unit:?} of {backend}: {sum:?} above {limit:?}: {ledger:#?}");
            }
        }
    }

    fn used(&self, index: usize, engine: usize) -> (Amounts, u64) {
        let (mut used, mut settled) = (Amounts::default(), 0);
        for request in self.engines[engine].requests.iter().filter(|request| request.gateway == index) {
            let prefilling = self.tick < request.settles;
            let permit = u64::from(request.permit && prefilling);
            let one = Amounts::new([request.slots, request.tokens, 0, permit]);
            used = Amounts::each(|unit| used.get(unit) + one.get(unit));
            settled +=
                if self.tick < request.settles + SURE_AGE.as_millis() as u64 / TICK_MS { 0 } else { request.slots };
        }
        (used, settled)
    }

    fn note_settled(&mut self, index: usize) {
        let (tick, ends, pause) = (self.tick, END_AGE.as_millis() as u64 / TICK_MS, PAUSE.as_millis() as u64 / TICK_MS);
        let gateway = &mut self.gateways[index];
        if tick > gateway.ran + pause {
            gateway.blind_until = tick + ends;
        }
        gateway.ran = tick;
        if tick <= gateway.blind_until {
            gateway.settled.fill(0);
        }
        for engine in 0..self.engines.len() {
            let (_, settled) = self.used(index, engine);
            let least = &mut self.gateways[index].settled[engine];
            *least = settled.min(*least);
        }
    }

    fn admit(&mut self, index: usize) {
        let now = self.clock(index);
        for engine in 0..self.engines.len() {
            let room = self.gateways[index].member.room(now, &format!("b{engine}"));
            self.gateways[index].last_room[engine] = room.get(Unit::Slots);
            self.gateways[index].need[engine] = 1;
            loop {
                let (used, _) = self.used(index, engine);
                if used.get(Unit::Slots) >= self.gateways[index].demand[engine] {
                    break;
                }
                let request = self.request(index);
                let fits = |unit: Unit, amount: u64| {
                    self.engines[engine].limit[unit as usize].is_none() || used.get(unit) + amount <= room.get(unit)
                };
                let all = fits(Unit::Slots, request.slots)
                    && fits(Unit::Tokens, request.tokens)
                    && fits(Unit::Permits, u64::from(request.permit));
                if !all {
                    self.gateways[index].need[engine] = request.slots;
                    break;
                }
                self.engines[engine].requests.push(request);
            }
        }
    }

    fn request(&mut self, index: usize) -> Request {
        let now = self.clock(index);
        let tick = self.tick;
        let arrives = tick + self.rng.below(7) as u64;
        let ends = arrives + 1 + self.rng.below(self.longest) as u64;
        let settles = (arrives + 1 + self.rng.below(5) as u64).min(ends);
        let renewed = self.gateways[index].member.renewed();
        Request {
            gateway: index,
            start: tick,
            slots: if self.chance(10) { 1 + self.rng.below(3) as u64 } else { 1 },
            tokens: 10 + self.rng.below(90) as u64,
            permit: self.chance(20),
            arrives,
            ends,
            settles,
            seen_end: ends + self.rng.below(3) as u64,
            loose: renewed.is_none_or(|renewed| now >= renewed + LEASE),
        }
    }

    fn read_page(&mut self, index: usize) {
        for engine in 0..self.engines.len() {
            if self.chance(30) && !self.chance(self.gateways[index].faults.no_page) {
                let age = self.rng.below(PAGE_AGE);
                let asked = self.clock(index);
                let running = self.engines[engine].pages.get(age).copied();
                self.gateways[index].page[engine] = running.map(|running| Page { asked, running });
            }
        }
    }

    fn renew(&mut self, index: usize) {
        let tick = self.tick;
        match self.gateways[index].step.clone() {
            Step::Idle if tick >= self.gateways[index].next => {
                let next = tick + PERIOD - 1 + self.rng.below(3) as u64;
                let gateway = &mut self.gateways[index];
                gateway.next = next;
                if gateway.retries > RETRIES {
                    gateway.retries = 0;
                }
                let faults = gateway.faults;
                let lost = self.chance(faults.lost_read) || self.store.down;
                let answer = (!lost).then(|| tick + self.rng.below(2) as u64);
                self.gateways[index].step = Step::Reading { since: tick, answer };
            }
            Step::Reading { answer: Some(at), .. } if tick >= at => self.plan(index),
            Step::Reading { since, .. } if tick >= since + DEADLINE => self.gateways[index].step = Step::Idle,
            Step::Writing { since } if tick >= since + DEADLINE => {
                self.gateways[index].member.unknown();
                self.gateways[index].step = Step::Idle;
            }
            _ => {}
        }
    }

    fn plan(&mut self, index: usize) {
        let (tick, faults) = (self.tick, self.gateways[index].faults);
        let stale = self.chance(faults.stale_read) && !self.store.states.is_empty();
        let (over, found) = match stale {
            true => self.store.states[self.rng.below(self.store.states.len())].clone(),
            false => self.store.latest(),
        };
        let local = self.local(index);
        let now = self.clock(index);
        let gateway = &mut self.gateways[index];
        gateway.attempt += 1;
        let Plan::Write(ledger) = gateway.member.plan(now, found.as_ref(), &local) else {
            gateway.step = Step::Idle;
            return;
        };
        if ledger.writes.is_multiple_of(50) {
            let read_back = Ledger::parse(&ledger.to_bytes()).expect("what was written can be read");
            assert_eq!(read_back, ledger);
        }
        gateway.step = Step::Writing { since: tick };
        let attempt = gateway.attempt;
        let late = if self.chance(faults.late_write) { self.rng.below(60) } else { 0 };
        if !self.chance(faults.lost_write) {
            let arrives = tick + late as u64 + u64::from(self.chance(30));
            let answered = !self.chance(faults.lost_answer);
            self.messages.push(Message { gateway: index, attempt, arrives, over, ledger, answered });
            self.deliver();
        }
    }

    /// The gateway's use of each engine, measured since the last plan.
    fn local(&mut self, index: usize) -> LocalUse {
        let mut local = LocalUse::new();
        for engine in 0..self.engines.len() {
            let (used, settled) = self.used(index, engine);
            let gateway = &mut self.gateways[index];
            let more = gateway.demand[engine].saturating_sub(used.get(Unit::Slots));
            let each = Amounts::new([1, 50, 0, 1]);
            let permits = if more > 0 { (more / 5).max(1) } else { 0 };
            let waiting = Amounts::new([more, more * each.get(Unit::Tokens), 0, permits]);
            let need = Amounts::new([gateway.need[engine], 100, 0, 1]);
            let usage = Usage {
                limit: Limit::new(self.engines[engine].limit),
                used,
                wanted: Amounts::each(|unit| used.get(unit) + waiting.get(unit)),
                need: if more > 0 { need } else { Amounts::default() },
                settled: gateway.settled[engine],
                page: gateway.page[engine].take(),
            };
            gateway.settled[engine] = settled;
            local.insert(format!("b{engine}"), usage);
        }
        local
    }

    pub(super) fn running(&self, engine: usize) -> u64 {
        let requests = self.engines[engine].requests.iter().filter(|request| request.at_engine(self.tick));
        requests.map(|request| request.slots).sum()
    }

    pub(super) fn show(&self) -> String {
        let Some(ledger) = self.store.latest().1 else { return "no ledger".to_owned() };
        let mut lines = Vec::new();
        for (id, entry) in &ledger.gateways {
            let alive = self.gateways.iter().find(|gateway| gateway.member.id() == id);
            let alive = alive.map_or("", |gateway| if gateway.alive { "alive" } else { "dead" });
            lines.push(format!("{id} {alive} beat {}", entry.beat));
            for (backend, held) in &entry.backends {
                let (share, used, wanted, need) = (held.share, held.used, held.wanted, held.need);
                lines.push(format!(
                    "   {backend}: {share:?} used {used:?} wanted {wanted:?} need {need:?} {:?}",
                    held.settled
                ));
            }
        }
        lines.join("\n")
    }

    pub(super) fn usable(&self, engine: usize) -> u64 {
        let running = (0..self.gateways.len()).filter(|index| self.gateways[*index].alive);
        let usable = running.map(|index| {
            let room = self.gateways[index].member.room(self.clock(index), &format!("b{engine}"));
            room.max(&self.used(index, engine).0).get(Unit::Slots)
        });
        usable.sum()
    }
}
