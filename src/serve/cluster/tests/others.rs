//! Gateways exchange closed backends and the load of pools through the ledger.
//!
//! The first gateway closes a backend, and the second leaves it.

use std::collections::BTreeMap;

use sluice_cluster::PoolLoad;

use super::*;

fn closed(gateway: &Gateway) -> bool {
    gateway.admission.view()[0].backends[0].closed
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_one_gateway_closes_gets_nothing_from_the_other_and_is_left_when_that_has_ended() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..3).map(|number| Gateway::join(&store, number, ClusterMode::Keep)).collect();
    pass(&mut gateways, 20, |_| {}).await;
    gateways[1].fill(2);
    assert_eq!(gateways[1].leases.len(), 2);
    gateways[0].others.close("p/b");
    // When the engine may be stopped, the other gateway has no request there and sends none.
    let ended = |gateways: &mut [Gateway]| {
        if gateways[0].others.have_left("p/b") {
            assert!(closed(&gateways[1]) && gateways[1].leases.is_empty());
        }
    };
    pass(&mut gateways, 5, ended).await;
    assert!(closed(&gateways[1]) && !closed(&gateways[0]), "its own cordon is what counts there");
    assert!(!gateways[0].others.have_left("p/b"), "two requests run");
    gateways[1].leases.clear();
    gateways[1].fill(1);
    assert_eq!((gateways[1].leases.len(), gateways[1].tickets.len()), (0, 1), "it waits");
    pass(&mut gateways, 5, ended).await;
    assert!(gateways[0].others.have_left("p/b"));
    gateways[0].others.open("p/b");
    pass(&mut gateways, 5, |_| {}).await;
    gateways[1].fill(1);
    assert_eq!(gateways[1].leases.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_does_not_lead_closes_nothing_and_without_the_store_what_is_closed_stays_so_for_a_while() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..3).map(|number| Gateway::join(&store, number, ClusterMode::Keep)).collect();
    pass(&mut gateways, 20, |_| {}).await;
    gateways[0].lead.set(None);
    gateways[0].others.close("p/b");
    pass(&mut gateways, 5, |gateways| assert!(!closed(&gateways[1]))).await;
    gateways[0].lead.set(Some(Instant::now() + Duration::from_secs(600)));
    pass(&mut gateways, 5, |_| {}).await;
    assert!(closed(&gateways[1]));
    store.set(Fault::Gone);
    // The gateway that closed the backend may still reach the store.
    pass(&mut gateways, LEASE.as_secs() * 11, |gateways| assert!(closed(&gateways[1]))).await;
    pass(&mut gateways, LEASE.as_secs() * 2, |_| {}).await;
    assert!(!closed(&gateways[1]), "its probes decide");
}

#[tokio::test(start_paused = true)]
async fn the_load_of_pools_reaches_the_other_gateways_until_the_store_is_gone() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..3).map(|number| Gateway::join(&store, number, ClusterMode::Keep)).collect();
    let load = |ended: f64| PoolLoad { queue: 3, in_flight: 2, ended: [ended; 6] };
    let ended = Arc::new(parking_lot::Mutex::new(5.0));
    let shown = Arc::clone(&ended);
    let loads = move || BTreeMap::from([("p".to_owned(), load(*shown.lock()))]);
    gateways[0].cluster.view().show_loads(Box::new(loads));
    pass(&mut gateways, 20, |_| {}).await;
    let view = gateways[1].cluster.view();
    assert_eq!(view.loads.take("p").tally.ended, 0.0, "before it was seen");
    *ended.lock() = 9.0;
    pass(&mut gateways, 5, |_| {}).await;
    let seen = view.loads.take("p");
    assert_eq!((seen.queue, seen.in_flight, seen.tally.ended), (3, 2, 4.0));
    assert_eq!(gateways[0].cluster.view().loads.take("p").queue, 0, "its own does not count twice");
    store.set(Fault::Gone);
    pass(&mut gateways, LEASE.as_secs() + 2, |_| {}).await;
    assert_eq!(view.loads.take("p").in_flight, 0);
}
