//! The amount towards which a gateway's share moves, and the shares of silent gateways.
//!
//! A share never rises above the amount that the other gateways leave of the limit, and never falls
//! below the amount in use.

use std::collections::BTreeSet;

use crate::amounts::{Amounts, Unit};
use crate::division::{Claim, divide};
use crate::ledger::{Entry, Holding, Ledger, UNEXPLAINED, is_gateway};

/// The inputs with which gateway `id` divides one unit of a backend.
pub(crate) struct Division<'l> {
    pub(crate) ledger: &'l Ledger,
    pub(crate) id: &'l str,
    pub(crate) backend: &'l str,
    pub(crate) unit: Unit,
    pub(crate) limit: u64,
    pub(crate) leaving: bool,
}

impl Division<'_> {
    /// Returns the amount that the gateway may use, and the next share. The share is larger while
    /// requests still use more than that amount.
    pub(crate) fn next(&self, own: &Holding) -> (u64, u64) {
        let unit = self.unit;
        let others = || self.ledger.holdings(self.backend).filter(|(id, _)| *id != self.id);
        // The holdings in `UNEXPLAINED` and `EARLIER`.
        let over: u64 = others().filter(|(id, _)| !is_gateway(id)).map(|(_, holding)| holding.held(unit)).sum();
        let renewing: Vec<(&str, &Holding)> = others().filter(|(id, _)| is_gateway(id)).collect();
        let held = over + renewing.iter().map(|(_, holding)| holding.held(unit)).sum::<u64>();
        let top = self.limit.saturating_sub(held);
        let (had, used) = (own.share.get(unit), own.used.get(unit));
        let part = if self.leaving { 0 } else { self.part(own, &renewing, self.limit.saturating_sub(over), top) };
        let goal = if part > had { part.min(top.max(had)) } else { part };
        (goal, goal.max(used.min(had)))
    }

    fn part(&self, own: &Holding, renewing: &[(&str, &Holding)], capacity: u64, top: u64) -> u64 {
        let unit = self.unit;
        let claim = |holding: &Holding| Claim {
            wanted: holding.wanted.get(unit),
            need: holding.need.get(unit),
            since: holding.since[unit as usize],
        };
        let place = renewing.partition_point(|(id, _)| *id < self.id);
        let mut claims: Vec<Claim> = renewing.iter().map(|(_, holding)| claim(holding)).collect();
        claims.insert(place, claim(own));
        let parts = divide(capacity, &claims);
        let (part, had) = (parts[place], own.share.get(unit));
        if part >= had || had > top {
            return part;
        }
        // A gateway gives the surplus over its part to gateways that need it. If none does, it
        // keeps the surplus.
        let others = parts.iter().enumerate().filter(|(index, _)| *index != place).map(|(_, part)| *part);
        let lacks = |(part, (_, holding)): (u64, &(&str, &Holding))| {
            let (wanted, has) = (holding.wanted.get(unit).max(holding.need.get(unit)), holding.share.get(unit));
            part > has && (wanted > has || has == 0)
        };
        if others.zip(renewing).any(lacks) { part } else { had }
    }
}

/// Moves the holdings of silent gateways to [`UNEXPLAINED`]. A silent gateway that renews again
/// does not get them back, because others may already use them.
pub(crate) fn move_over(ledger: &mut Ledger, over: &BTreeSet<String>) {
    let moved: Vec<Entry> = over.iter().filter_map(|id| ledger.gateways.remove(id)).collect();
    if moved.is_empty() {
        return;
    }
    let to = ledger.gateways.entry(UNEXPLAINED.to_owned()).or_default();
    // The new beat voids the bounds of the census, which do not include the gateways that are added
    // now.
    to.beat = ledger.writes + 1;
    for (backend, holding) in moved.into_iter().flat_map(|entry| entry.backends) {
        let held = Amounts::each(|unit| holding.held(unit));
        if held.is_none() {
            continue;
        }
        let sum = to.backends.entry(backend).or_default();
        sum.limit = sum.limit.min(&holding.limit);
        sum.share = Amounts::each(|unit| sum.share.get(unit) + holding.share.get(unit));
        // A gateway that lost the share and renewed again may use more than the new share.
        sum.used = Amounts::each(|unit| sum.used.get(unit) + held.get(unit));
    }
}

impl Holding {
    /// Lowers the slots to this number, and the other units in the same proportion, rounded up.
    pub(crate) fn shrink_to(&mut self, slots: u64) {
        self.share = shrunk(&self.share, slots);
        self.used = shrunk(&self.used, slots);
    }
}

fn shrunk(amounts: &Amounts, slots: u64) -> Amounts {
    let had = amounts.get(Unit::Slots);
    if slots >= had && had > 0 {
        return *amounts;
    }
    let part = |amount: u64| u64::try_from((u128::from(amount) * u128::from(slots)).div_ceil(u128::from(had.max(1))));
    Amounts::each(|unit| if had == 0 { 0 } else { part(amounts.get(unit)).unwrap_or(u64::MAX) })
}
