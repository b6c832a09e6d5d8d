//! The rule of shares, by example and for random operations in any order.

use sluice_core::base::Rng;

use super::ledger::{HoldingId, Ledger};
use super::*;

type Names = Ledger<u32, u32>;

/// Enters one holding. Returns it with the tags of the holdings that gave way.
fn enter(ledger: &mut Names, owner: u32, units: u64, tag: u32) -> (Option<HoldingId>, Vec<u32>) {
    let mut gave_way = Vec::new();
    let id = ledger.enter(owner, Demand::of(units), tag, &mut gave_way);
    ledger.check();
    (id, gave_way)
}

#[test]
fn one_owner_may_have_all_and_gives_the_newest_back_up_to_the_share_of_others() {
    let mut ledger = Names::new(GivesWay::Newest, 100, 0);
    for tag in 0..10 {
        assert!(enter(&mut ledger, 1, 10, tag).1.is_empty());
    }
    assert_eq!(enter(&mut ledger, 1, 1, 10), (None, vec![]), "nothing of its own gives way");
    let mut given = Vec::new();
    for tag in 20..25 {
        let (id, gave_way) = enter(&mut ledger, 2, 10, tag);
        assert!(id.is_some());
        given.extend(gave_way.iter().copied());
        // The owners of the holdings that gave way return the units.
        let gone: Vec<_> = ledger.given().collect();
        gone.into_iter().for_each(|id| _ = ledger.leave(id));
    }
    assert_eq!((given, ledger.of(&1), ledger.of(&2)), (vec![9, 8, 7, 6, 5], 50, 50));
    assert_eq!(enter(&mut ledger, 2, 10, 25), (None, vec![]), "above its share");
    assert_eq!(ledger.gave_way(), 5);
}

#[test]
fn the_oldest_gives_way_where_the_newest_is_the_one_that_is_served() {
    let mut ledger = Names::new(GivesWay::Oldest, 4, 0);
    for tag in 0..4 {
        enter(&mut ledger, 1, 1, tag);
    }
    assert_eq!(enter(&mut ledger, 1, 1, 4).1, [0], "an owner alone replaces its own oldest");
    let gone: Vec<_> = ledger.given().collect();
    gone.into_iter().for_each(|id| _ = ledger.leave(id));
    assert_eq!(enter(&mut ledger, 2, 1, 5).1, [1]);
    ledger.check();
}

#[test]
fn with_more_owners_than_units_the_oldest_of_all_gives_way() {
    let mut ledger = Names::new(GivesWay::Oldest, 64, 0);
    for owner in 0..10_000 {
        let (id, gave_way) = enter(&mut ledger, owner, 1, owner);
        assert!(id.is_some());
        assert_eq!(gave_way, owner.checked_sub(64).map_or(vec![], |oldest| vec![oldest]));
        let gone: Vec<_> = ledger.given().collect();
        gone.into_iter().for_each(|id| _ = ledger.leave(id));
    }
    assert!(ledger.owners() == 64, "the table contains holders only");
}

#[test]
fn what_is_kept_does_not_give_way_and_leaves_a_reserve_for_newcomers() {
    let mut ledger = Names::new(GivesWay::Oldest, 8, 2);
    let ids: Vec<_> = (0..8).map(|tag| enter(&mut ledger, 1, 1, tag).0.unwrap()).collect();
    let kept: Vec<bool> = ids.iter().map(|id| ledger.keep(*id)).collect();
    assert_eq!(kept, [true, true, true, true, true, true, false, false]);
    let (newcomer, gave_way) = enter(&mut ledger, 2, 1, 9);
    assert!(gave_way == [6] && ledger.keep(newcomer.unwrap()), "the reserve is for the newcomer");
    ledger.offer(ids[0], &1);
    ledger.check();
    assert!(!ledger.keep(ids[6]), "it gave way");
    assert!(!ledger.keep(ids[7]), "the reserve again");
}

#[test]
fn a_holding_can_be_kept_for_another_owner_and_comes_back() {
    let mut ledger = Names::new(GivesWay::Oldest, 8, 2);
    let ids: Vec<_> = (0..4).map(|tag| enter(&mut ledger, 1, 1, tag).0.unwrap()).collect();
    assert!(ledger.keep_as(ids[0], 7, 1) && !ledger.keep_as(ids[1], 7, 1), "at most one");
    assert_eq!((ledger.of(&1), ledger.of(&7)), (3, 1));
    ledger.check();
    ledger.offer(ids[0], &1);
    ledger.check();
    assert_eq!((ledger.of(&1), ledger.of(&7), ledger.owners()), (4, 0, 1));
}

#[test]
fn a_demand_is_foreseen_as_it_is_met() {
    let mut ledger = Names::new(GivesWay::Newest, 100, 0);
    enter(&mut ledger, 1, 90, 0);
    for (units, could) in [(10, true), (50, true), (51, false), (u64::MAX, false)] {
        assert_eq!(ledger.could(&2, Demand::of(units)), could, "{units}");
    }
    assert!(!ledger.could(&2, Demand { spare: 51, ..Demand::of(50) }));
    assert!(!ledger.could(&2, Demand { most: 9, ..Demand::of(10) }));
    assert!(ledger.could(&1, Demand::of(10)) && !ledger.could(&1, Demand::of(11)));
}

/// Any order of operations keeps the sums right and stays within the bounds. No owner takes from an
/// owner within the fair share while another is above it, and every unit is returned.
#[test]
fn any_order_of_operations_keeps_the_rule_and_returns_everything() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let order = if seed % 2 == 0 { GivesWay::Newest } else { GivesWay::Oldest };
        let (total, most_units, owners) = [(40, 9, 3), (16, 1, 40), (1_000, 300, 6)][seed as usize % 3];
        let mut ledger = Names::new(order, total, total / 8);
        let mut held: Vec<HoldingId> = Vec::new();
        for _ in 0..400 {
            let mut pick = |below: u64| rng.next_u64() % below;
            let owner = pick(owners) as u32;
            let at = pick(held.len().max(1) as u64) as usize;
            match pick(8) {
                0..=3 => {
                    let demand = Demand::of(1 + pick(most_units));
                    held.extend(admitted(&mut ledger, owner, demand));
                }
                4 if !held.is_empty() => {
                    ledger.grow(held[at], Demand::of(1 + pick(most_units)), &mut Vec::new());
                }
                5 if !held.is_empty() => _ = ledger.keep(held[at]),
                6 if !held.is_empty() => match pick(2) {
                    0 => ledger.offer(held[at], &owner),
                    _ => _ = ledger.keep_as(held[at], owner, total),
                },
                _ if !held.is_empty() => _ = ledger.leave(held.swap_remove(at)),
                _ => {}
            }
            ledger.check();
            assert!(ledger.used() <= total && ledger.owners() <= held.len());
        }
        for id in held {
            ledger.leave(id);
            ledger.check();
        }
        assert_eq!((ledger.used(), ledger.owners()), (0, 0), "seed {seed}");
    }
}

/// Enters a holding and checks rules 2 to 4.
fn admitted(ledger: &mut Names, owner: u32, demand: Demand) -> Option<HoldingId> {
    let before: Vec<u64> = (0..64).map(|owner| ledger.of(&owner)).collect();
    let (used, gave) = (ledger.used(), ledger.gave_way());
    let is_new = before[owner as usize] == 0;
    let mut out = Vec::new();
    let id = ledger.enter(owner, demand, owner, &mut out);
    let free = ledger.total() - used;
    assert!(id.is_some() || demand.units > free, "work-conserving");
    assert_eq!(ledger.gave_way() - gave, out.len() as u64);
    if demand.units <= free {
        assert!(out.is_empty(), "nothing gives way while there is room");
    }
    let owners = before.iter().filter(|units| **units > 0).count() + usize::from(is_new);
    let fair = (ledger.total() / owners.max(1) as u64).max(1);
    // With `Oldest`, the owner itself may have given up enough to be within the fair share again.
    if ledger.of(&owner) > fair {
        let others = (0..64).filter(|other| *other != owner);
        let taken = others.filter(|other| ledger.of(other) != before[*other as usize]).count();
        assert_eq!(taken, 0, "an owner above its share takes nothing from others");
    }
    id
}

#[tokio::test]
async fn a_task_whose_holding_gives_way_is_woken_and_everything_is_returned() {
    let shares = Shares::new(GivesWay::Newest, 8, 0);
    let owner = |last| Owner::network([10, 0, 0, last].into());
    let first = shares.enter(owner(1), Demand::of(6)).unwrap();
    let kept = shares.enter_kept(owner(1), Demand::of(2)).unwrap();
    let waiting = tokio::spawn(async move {
        std::future::poll_fn(|cx| first.poll_gave_way(cx)).await;
        assert!(!first.grow(Demand::of(1)) && !first.keep());
    });
    tokio::task::yield_now().await;
    let second = shares.enter(owner(2), Demand::of(4)).expect("the first gives way");
    waiting.await.unwrap();
    assert_eq!(shares.view(), SharesView { used: 6, total: 8, owners: 2, gave_way: 1 });
    drop((second, kept));
    assert_eq!(shares.view(), SharesView { used: 0, total: 8, owners: 0, gave_way: 1 });
}

#[test]
fn a_network_of_ipv6_is_one_owner() {
    let of = |text: &str| Owner::network(text.parse().unwrap());
    assert_eq!(of("2001:db8:0:1::1"), of("2001:db8:0:1:ffff::9"));
    assert_ne!(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
    assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
}
