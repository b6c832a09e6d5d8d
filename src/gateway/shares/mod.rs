//! Bounded resources that clients share: body memory, responses that wait for slow clients,
//! connections, handshakes.
//!
//! The rule is in [`ledger`]. This file adds the lock, and wakes the task that must give its
//! holding back.
//!
//! ```text
//!   enter -> (may give way) -- keep -->  (kept) -- drop --> returned
//!                 ^  |                     |
//!                 |  +-- gives way: the task is woken, and drops the holding
//!                 +--------- offer --------+
//! ```
//!
//! A holding is returned by drop. Table sizes follow the number of holdings.

mod demand;
mod heap;
mod links;
pub mod ledger;

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::origin::Origin;

pub use demand::Demand;
pub use ledger::GivesWay;
use ledger::{HoldingId, Ledger};

/// The client to whom a holding is charged.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The API key with this name.
    Key(Arc<str>),
    /// The client's address, or with IPv6 the /64 network, because one host can use all addresses
    /// in it.
    Network(IpAddr),
    /// The origin of a request, if only that is known.
    Origin(Origin),
    /// A trusted proxy, for connections whose client is not known yet.
    Proxy(IpAddr),
}

impl Owner {
    /// The owner of a client without a key.
    pub fn network(address: IpAddr) -> Self {
        Self::Network(network(address))
    }
}

/// The address under which a client counts: an IPv4 address, or the /64 network of an IPv6 address.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

/// The counts of a resource, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharesView {
    /// Units that are held.
    pub used: u64,
    /// Units in all.
    pub total: u64,
    /// Owners that hold units.
    pub owners: usize,
    /// Holdings that gave way since the start.
    pub gave_way: u64,
}

/// One shared resource.
#[derive(Debug)]
pub struct Shares {
    ledger: Mutex<Ledger<Owner, Option<Waker>>>,
    /// Units held after the last change, for reads without the lock.
    used: AtomicU64,
}

impl Shares {
    /// A resource of `total` units, the last `reserve` of which only owners within their share may
    /// keep.
    pub fn new(gives_way: GivesWay, total: u64, reserve: u64) -> Arc<Self> {
        let ledger = Mutex::new(Ledger::new(gives_way, total, reserve));
        Arc::new(Self { ledger, used: AtomicU64::new(0) })
    }

    /// Changes the size. Holdings stay, even above the new total.
    pub fn resize(&self, total: u64, reserve: u64) {
        self.ledger.lock().resize(total, reserve);
    }

    /// The current counts.
    pub fn view(&self) -> SharesView {
        let ledger = self.ledger.lock();
        SharesView { used: ledger.used(), total: ledger.total(), owners: ledger.owners(), gave_way: ledger.gave_way() }
    }

    /// Takes units for `owner` as a holding that may give way; `None`: there is no room.
    pub fn enter(self: &Arc<Self>, owner: Owner, demand: Demand) -> Option<Holding> {
        self.take(owner, demand, false)
    }

    /// Takes units as a holding that does not give way.
    pub fn enter_kept(self: &Arc<Self>, owner: Owner, demand: Demand) -> Option<Holding> {
        self.take(owner, demand, true)
    }

    fn take(self: &Arc<Self>, owner: Owner, demand: Demand, kept: bool) -> Option<Holding> {
        let mut gave_way = Vec::new();
        let id = {
            let mut ledger = self.ledger.lock();
            let id = ledger.enter(owner, demand, None, &mut gave_way);
            id.filter(|id| {
                let fine = !kept || ledger.keep(*id);
                if !fine {
                    ledger.leave(*id);
                }
                fine
            })
            .inspect(|_| self.used.store(ledger.used(), Ordering::Relaxed))
        };
        wake(gave_way);
        Some(Holding { shares: Arc::clone(self), id: id? })
    }

    /// Units that are held, read without the lock.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether a demand would be met now.
    pub fn could(&self, owner: &Owner, demand: Demand) -> bool {
        self.ledger.lock().could(owner, demand)
    }

    /// Lets a holding of the largest owner give way, because a resource behind this one is
    /// exhausted; `false`: none may.
    pub fn yield_one(&self) -> bool {
        let woken = self.ledger.lock().yield_one();
        let any = woken.is_some();
        wake(woken);
        any
    }
}

/// Wakes tasks. Call it without the lock, because a task that ends returns a holding.
fn wake(gave_way: impl IntoIterator<Item = Option<Waker>>) {
    gave_way.into_iter().flatten().for_each(Waker::wake);
}

/// Units of a resource; dropping it returns them.
#[derive(Debug)]
pub struct Holding {
    shares: Arc<Shares>,
    id: HoldingId,
}

impl Holding {
    /// Takes more units; `false`: there is no room, or the holding gave way.
    pub fn grow(&self, demand: Demand) -> bool {
        let mut gave_way = Vec::new();
        let grown = {
            let mut ledger = self.shares.ledger.lock();
            let grown = ledger.grow(self.id, demand, &mut gave_way);
            self.shares.used.store(ledger.used(), Ordering::Relaxed);
            grown
        };
        wake(gave_way);
        grown
    }

    /// From now on the holding does not give way; `false`: it may not be kept, or it gave way.
    pub fn keep(&self) -> bool {
        self.shares.ledger.lock().keep(self.id)
    }

    /// [`Holding::keep`] that moves the holding to `owner`, which may hold at most `most` units.
    pub fn keep_as(&self, owner: Owner, most: u64) -> bool {
        self.shares.ledger.lock().keep_as(self.id, owner, most)
    }

    /// Lets the holding give way again, as a holding of `owner`.
    pub fn offer(&self, owner: &Owner) {
        self.shares.ledger.lock().offer(self.id, owner);
    }

    /// Ready when the holding gave way.
    pub fn poll_gave_way(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll(cx, None)
    }

    /// Lets the holding give way, as a holding of `owner`. Ready when it did.
    pub fn poll_offered(&self, owner: &Owner, cx: &mut Context<'_>) -> Poll<()> {
        self.poll(cx, Some(owner))
    }

    fn poll(&self, cx: &Context<'_>, offer: Option<&Owner>) -> Poll<()> {
        // The old waker is dropped outside the lock, because that may drop a task with a holding.
        let _replaced = {
            let mut ledger = self.shares.ledger.lock();
            if let Some(owner) = offer {
                ledger.offer(self.id, owner);
            }
            if ledger.has_given_way(self.id) {
                return Poll::Ready(());
            }
            match ledger.tag(self.id) {
                Some(waker) if waker.will_wake(cx.waker()) => None,
                tag => tag.replace(cx.waker().clone()),
            }
        };
        Poll::Pending
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let _waker = {
            let mut ledger = self.shares.ledger.lock();
            let waker = ledger.leave(self.id);
            self.shares.used.store(ledger.used(), Ordering::Relaxed);
            waker
        };
    }
}

#[cfg(test)]
mod tests;
