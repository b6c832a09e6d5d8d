//! One gateway's part in the ledger: the next write, and the room to use meanwhile.
//!
//! The caller reads the object, asks for a [`Plan`], writes it over exactly the state that it read,
//! and reports the outcome: [`confirmed`](Member::confirmed), [`refused`](Member::refused) or
//! [`unknown`](Member::unknown).
//!
//! A member computes the [division](crate::division) of each limit among the gateways that renew.
//! The share rises towards the member's part as far as the limit has free capacity. It falls if
//! another gateway lacks capacity, the limit shrank or the member leaves. Then the member at once
//! uses no more than the part, and the share falls as requests end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::amounts::{Amounts, Unit};
use crate::attained::{self, Attained};
use crate::census::Census;
use crate::closing::Closing;
use crate::key_claim::KeyClaim;
use crate::keys::bounded;
use crate::ledger::{BACKENDS_MAX, EARLIER, Entry, GATEWAYS_MAX, Holding, Ledger, UNEXPLAINED, Unreadable, is_gateway};
use crate::line::Line;
use crate::notice::{NOTICES_MAX, Notice, Standing, name};
use crate::part::{Division, move_over};
use crate::pool_load::PoolLoad;
use crate::silence::Silence;
use crate::usage::{LocalUse, Usage};
use crate::windows::Windows;

/// Leases without a new beat of [`UNEXPLAINED`] after which mode `keep` frees all capacity in that
/// entry.
const KEEP_LEASES: u32 = 12;
/// Leases without a page of an engine after which mode `keep` at once frees the capacity that
/// silent gateways hold there.
const PAGE_LEASES: u32 = 2;

/// Identity of a gateway in the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The configured name.
    pub name: String,
    /// A number that is different at every start.
    pub incarnation: u64,
}

impl Identity {
    /// The key in the ledger, and in the record of the leader.
    pub fn id(&self) -> String {
        format!("{}#{:016x}", self.name, self.incarnation)
    }
}

/// Behaviour of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// How long a renewal is valid.
    pub lease: Duration,
    /// Whether the last shares stay in use after the lease (mode `keep`), or nothing new is
    /// admitted (`strict`).
    ///
    /// In mode `keep`, requests admitted after the lease may exceed an engine's limit, at most by
    /// the last share of each gateway. So may requests of silent gateways whose share was freed
    /// although the engine's load was not explained: after twelve leases, or because the engine
    /// sends no page.
    pub keep: bool,
}

/// The caller's next step with the object that was read.
#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    /// Replace the object by this ledger, if the object is still in the state that was read.
    Write(Ledger),
    /// Write nothing this time.
    Wait,
}

#[derive(Clone, Debug)]
struct Pending {
    ledger: Ledger,
    sent: Duration,
    rooms: BTreeMap<String, Amounts>,
    notices: Vec<Notice>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Own {
    room: Amounts,
    windows: Windows,
    line: Line,
}

/// One gateway.
#[derive(Clone, Debug)]
pub struct Member {
    id: String,
    rules: Rules,
    own: BTreeMap<String, Own>,
    renewed: Option<Duration>,
    pending: Option<Pending>,
    beat: u64,
    silence: Silence,
    census: Census,
    /// Name of the last written object.
    begun: String,
    /// The number of writes of that object.
    writes: u64,
    /// Since when reads have shown fewer writes.
    behind: Option<Duration>,
    keys: BTreeMap<String, KeyClaim>,
    closing: Closing,
    pools: BTreeMap<String, PoolLoad>,
    attained: Attained,
    leaving: bool,
    has_left: bool,
    barred: bool,
    standing: Standing,
    notices: Vec<Notice>,
    noticed: BTreeSet<String>,
}

impl Member {
    /// A member without a share.
    pub fn new(identity: &Identity, rules: Rules) -> Self {
        Self {
            id: identity.id(),
            rules,
            own: BTreeMap::new(),
            renewed: None,
            pending: None,
            beat: 0,
            silence: Silence::default(),
            census: Census::default(),
            begun: String::new(),
            writes: 0,
            behind: None,
            keys: BTreeMap::new(),
            closing: Closing::default(),
            pools: BTreeMap::new(),
            attained: Attained::new(),
            leaving: false,
            has_left: false,
            barred: false,
            standing: Standing::Joining,
            notices: Vec::new(),
            noticed: BTreeSet::new(),
        }
    }

    /// The key in the ledger.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// From now on, gives back unused capacity and takes none.
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// Sets the claims to the limits of API keys for the next plans.
    pub fn set_keys(&mut self, keys: BTreeMap<String, KeyClaim>) {
        self.keys = keys;
    }

    /// Sets the load of pools for the next plans.
    pub fn set_pools(&mut self, pools: BTreeMap<String, PoolLoad>) {
        self.pools = pools;
    }

    /// Sets the work of owners through this gateway, for the next plans.
    pub fn set_attained(&mut self, attained: Attained) {
        self.attained = attained;
    }

    /// Closes backends: from the next plan on, no gateway may send requests to them.
    pub fn set_closed(&mut self, closed: &BTreeSet<String>) {
        self.closing.set(closed);
    }

    /// The closed backends that all other gateways have left.
    pub fn left_by_others(&self) -> BTreeSet<String> {
        self.closing.left()
    }

    /// Whether another gateway may still have requests on a closed backend.
    pub fn is_closing(&self) -> bool {
        self.closing.left().len() < self.closing.names().len()
    }

    /// Whether the member has given back everything and left the ledger.
    pub fn has_left(&self) -> bool {
        self.has_left
    }

    /// When the room ends without a renewal; `None`: never.
    pub fn ends(&self) -> Option<Duration> {
        if self.rules.keep { None } else { Some(self.renewed.map_or(Duration::ZERO, |sent| sent + self.rules.lease)) }
    }

    fn is_over(&self, now: Duration) -> bool {
        self.renewed.is_none_or(|sent| now >= sent + self.rules.lease)
    }

    /// When the last confirmed renewal was sent.
    pub fn renewed(&self) -> Option<Duration> {
        self.renewed
    }

    /// The room on a backend at this time; 0 for a unit without a limit.
    pub fn room(&self, now: Duration, backend: &str) -> Amounts {
        let ended = self.ends().is_some_and(|end| now >= end);
        let own = self.own.get(backend).filter(|_| !ended && self.renewed.is_some());
        own.map_or(Amounts::default(), |own| own.room)
    }

    /// The object cannot be used.
    pub fn stand_back(&mut self, why: Unreadable) {
        self.barred = true;
        let key = why.to_string();
        self.notice_once(&key, Notice::Unreadable(why));
    }

    /// The ledger to write over `found` (`None`: no object), sent at `now`.
    pub fn plan(&mut self, now: Duration, found: Option<&Ledger>, local: &LocalUse) -> Plan {
        self.pending = None;
        self.barred = false;
        let found = match found {
            Some(found) if found.begun == self.begun && found.writes < self.writes => {
                // Either the read is stale and a write would be refused, or the store has lost
                // writes.
                let behind = *self.behind.get_or_insert(now);
                if now.saturating_sub(behind) <= crate::silence::still_after(self.rules.lease) {
                    return Plan::Wait;
                }
                None
            }
            found => found,
        };
        self.behind = None;
        self.closing.read(&self.id, found);
        let mut ledger = found.cloned().unwrap_or_else(|| Ledger::new(format!("{}/{}", self.id, self.beat + 1)));
        if self.silence.observe(now, &ledger) {
            // The census has samples of the earlier object.
            self.census = Census::default();
        }
        if !self.may_write(&ledger) {
            return Plan::Wait;
        }
        let over = self.over(now, &ledger);
        self.census.observe(now, &self.id, &ledger, local, &over);
        self.take_back(now, &mut ledger, local);
        move_over(&mut ledger, &over);
        ledger.writes += 1;
        let mut notices: Vec<Notice> = over.into_iter().map(Notice::TookBack).collect();
        if found.is_none() {
            notices.push(Notice::Began);
        } else if self.renewed.is_some() && ledger.begun == self.begun && !ledger.gateways.contains_key(&self.id) {
            notices.push(Notice::WasTakenBack);
        }
        let rooms = self.write_own(now, &mut ledger, local);
        self.notice_differences(&ledger);
        self.pending = Some(Pending { ledger: ledger.clone(), sent: now, rooms, notices });
        Plan::Write(ledger)
    }

    /// The plan was written.
    pub fn confirmed(&mut self) {
        let Some(pending) = self.pending.take() else { return };
        self.beat += 1;
        (self.begun, self.writes) = (pending.ledger.begun.clone(), pending.ledger.writes);
        self.has_left = self.leaving && !pending.ledger.gateways.contains_key(&self.id);
        self.renewed = Some(pending.sent);
        for (backend, own) in &mut self.own {
            own.room = pending.rooms.get(backend).copied().unwrap_or_default();
            own.windows.close();
        }
        self.own.retain(|backend, _| pending.rooms.contains_key(backend));
        self.census.wrote(pending.sent, &pending.ledger);
        self.closing.written(&self.id, &pending.ledger);
        pending.notices.into_iter().for_each(|notice| self.notice(notice));
    }

    /// Another gateway wrote first: the caller must read again.
    pub fn refused(&mut self) {
        self.pending = None;
    }

    /// The store may have written the plan already, or may write it later or never.
    pub fn unknown(&mut self) {
        if self.pending.take().is_some() {
            self.beat += 1;
        }
    }

    /// The standing at `now`. A change of the standing also gives a notice.
    pub fn standing(&mut self, now: Duration) -> Standing {
        let ended = self.renewed.is_some() && self.is_over(now);
        let standing = match self.renewed {
            _ if self.barred => Standing::StandingBack,
            None => Standing::Joining,
            Some(_) if ended && self.rules.keep => Standing::Keeping,
            Some(_) if ended => Standing::Stopped,
            Some(_) => Standing::Holding,
        };
        if standing != self.standing {
            self.notice(Notice::Stands(self.standing, standing));
            self.standing = standing;
        }
        standing
    }

    /// Takes the notices since the last call.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn notice(&mut self, notice: Notice) {
        if self.notices.len() < NOTICES_MAX {
            self.notices.push(notice);
        }
    }

    fn notice_once(&mut self, key: &str, notice: Notice) {
        if self.noticed.len() < NOTICES_MAX && self.noticed.insert(key.to_owned()) {
            self.notice(notice);
        }
    }

    /// Whether the ledger has room for this gateway, and no other process has this identity.
    fn may_write(&mut self, ledger: &Ledger) -> bool {
        self.barred = match ledger.gateways.get(&self.id) {
            Some(entry) => entry.beat > self.beat,
            None => ledger.gateways.len() >= GATEWAYS_MAX,
        };
        if self.barred {
            let notice = if ledger.gateways.contains_key(&self.id) { Notice::SameIdentity } else { Notice::Crowded };
            self.own.values_mut().for_each(|own| own.room = Amounts::default());
            self.notice_once("barred", notice);
        }
        !self.barred
    }

    fn over(&self, now: Duration, ledger: &Ledger) -> BTreeSet<String> {
        let others = ledger.gateways.iter().filter(|(id, _)| **id != self.id && *id != UNEXPLAINED);
        others.filter(|(id, entry)| self.silence.is_over(now, id, entry)).map(|(id, _)| id.clone()).collect()
    }

    /// Frees the capacity of silent gateways as far as the other gateways explain the load of the
    /// engines.
    fn take_back(&self, now: Duration, ledger: &mut Ledger, local: &LocalUse) {
        let given_up = self.rules.keep && self.silence.of(now, UNEXPLAINED) > self.rules.lease * KEEP_LEASES;
        let Some(entry) = ledger.gateways.get_mut(UNEXPLAINED) else { return };
        for (backend, holding) in entry.backends.iter_mut().filter(|(backend, _)| local.contains_key(*backend)) {
            let left = self.census.left(backend, entry.beat);
            if given_up || (left.is_none() && self.rules.keep && self.has_no_pages(now, backend)) {
                holding.shrink_to(0);
            } else if let Some(left) = left {
                holding.shrink_to(left);
            }
        }
        entry.backends.retain(|_, holding| !holding.share.is_none() || !holding.used.is_none());
        if entry.backends.is_empty() {
            ledger.gateways.remove(UNEXPLAINED);
        }
    }

    fn has_no_pages(&self, now: Duration, backend: &str) -> bool {
        self.census.page(backend).is_some_and(|at| now.saturating_sub(at) > self.rules.lease * PAGE_LEASES)
    }

    /// Puts this gateway's entry into the ledger. Returns the room on each backend once the write
    /// is confirmed.
    fn write_own(&mut self, now: Duration, ledger: &mut Ledger, local: &LocalUse) -> BTreeMap<String, Amounts> {
        let old = ledger.gateways.get(&self.id).cloned();
        let gone = self.own.iter_mut().filter(|(backend, _)| !local.contains_key(*backend));
        gone.for_each(|(_, own)| own.room = Amounts::default());
        let beat = self.beat + 1;
        let lease_ms = self.rules.lease.as_millis() as u64;
        let keys = if self.leaving { BTreeMap::new() } else { bounded(&self.keys, ledger.gateways.len()) };
        let (closed, pools) = (self.closing.names(), self.pools.clone());
        let attained = attained::bounded(&self.attained, ledger.gateways.len());
        let mut entry =
            Entry { beat, lease_ms, keeps: self.rules.keep, backends: BTreeMap::new(), keys, closed, pools, attained };
        let mut rooms = BTreeMap::new();
        for (backend, usage) in local {
            let known = old.as_ref().and_then(|old| old.backends.get(backend)).copied();
            let had = match known {
                Some(holding) => holding.share,
                None => self.claim(now, ledger, backend, usage),
            };
            let (holding, goal) = self.divide_backend(ledger, backend, usage, &had);
            let own = self.own.entry(backend.clone()).or_default();
            let room = holding.share.min(&goal);
            own.room = own.room.min(&room);
            rooms.insert(backend.clone(), room);
            entry.backends.insert(backend.clone(), holding);
        }
        let holds_nothing = entry.backends.values().all(|holding| holding.share.is_none() && holding.used.is_none());
        match self.leaving && holds_nothing {
            true => drop(ledger.gateways.remove(&self.id)),
            false => drop(ledger.gateways.insert(self.id.clone(), entry)),
        }
        rooms
    }

    /// The initial share of a backend, moved out of [`EARLIER`]: the room that a lost object gave
    /// this member, but at most the share in [`EARLIER`]. After the lease it is nothing. If the
    /// object does not know the backend, the whole limit goes into [`EARLIER`] first.
    fn claim(&self, now: Duration, ledger: &mut Ledger, backend: &str, usage: &Usage) -> Amounts {
        // After the lease, other gateways may have the share. In the object that this member wrote
        // last, [`EARLIER`] does not contain it.
        let is_taken = ledger.begun == self.begun || self.is_over(now);
        let room = if is_taken { Amounts::default() } else { self.room(now, backend) };
        if !ledger.known.contains(backend) {
            if ledger.known.len() >= BACKENDS_MAX {
                ledger.known.pop_first();
            }
            ledger.known.insert(backend.to_owned());
            let share = Amounts::each(|unit| usage.limit.get(unit).unwrap_or(0));
            let lease_ms = self.rules.lease.as_millis() as u64;
            let earlier =
                ledger.gateways.entry(EARLIER.to_owned()).or_insert_with(|| Entry { lease_ms, ..Entry::default() });
            // A new beat makes all members wait for a whole lease.
            earlier.beat += 1;
            earlier.lease_ms = earlier.lease_ms.max(lease_ms);
            earlier.backends.insert(backend.to_owned(), Holding { limit: usage.limit, share, ..Holding::default() });
        }
        let earlier = ledger.gateways.get_mut(EARLIER).and_then(|earlier| earlier.backends.get_mut(backend));
        let Some(earlier) = earlier else { return Amounts::default() };
        let claimed = room.min(&earlier.share);
        earlier.share = Amounts::each(|unit| earlier.share.get(unit) - claimed.get(unit));
        claimed
    }

    /// The next holding of a backend, and the amounts that this gateway may use.
    fn divide_backend(&mut self, ledger: &Ledger, backend: &str, usage: &Usage, had: &Amounts) -> (Holding, Amounts) {
        let limit = ledger.limit(backend).min(&usage.limit);
        let own = self.own.entry(backend.to_owned()).or_default();
        let wanted = if self.leaving { Amounts::default() } else { usage.wanted };
        let need = if self.leaving { Amounts::default() } else { usage.need };
        let since = own.line.places((ledger.writes, ledger.gateways.len() as u64), &wanted, &need, had);
        let settled = own.windows.extend(usage.settled);
        let mut holding = Holding { limit: usage.limit, share: *had, used: usage.used, wanted, need, since, settled };
        let mut goal = Amounts::default();
        for unit in Unit::ALL {
            let Some(limit) = limit.get(unit) else {
                holding.share.set(unit, 0);
                continue;
            };
            let division = Division { ledger, id: &self.id, backend, unit, limit, leaving: self.leaving };
            let (part, share) = division.next(&holding);
            goal.set(unit, part);
            holding.share.set(unit, share);
        }
        (holding, goal)
    }

    fn notice_differences(&mut self, ledger: &Ledger) {
        let Some(own) = ledger.gateways.get(&self.id) else { return };
        let others = ledger.gateways.iter().filter(|(id, _)| **id != self.id && is_gateway(id));
        let mut found = Vec::new();
        for (id, entry) in others {
            if name(id) == name(&self.id) && self.silence.is_renewed(id) {
                found.push((format!("name {id}"), Notice::NameTwice(id.clone())));
            }
            if entry.keeps != own.keeps {
                found.push((format!("mode {id}"), Notice::ModeDiffers(id.clone())));
            }
            let differs = |(backend, holding): (&String, &Holding)| {
                entry.backends.get(backend).is_some_and(|other| other.limit != holding.limit).then(|| backend.clone())
            };
            if let Some(backend) = own.backends.iter().find_map(differs) {
                found.push((format!("limit {id} {backend}"), Notice::LimitDiffers(backend, id.clone())));
            }
        }
        found.into_iter().for_each(|(key, notice)| self.notice_once(&key, notice));
    }
}
