//! Mistakes of an operator and faults of a store, each with the gateway's reaction.
//!
//! Each test starts one or two gateways in front of one engine, and checks that the engine never
//! runs more requests than its limit.

use serde_json::json;

use super::*;

async fn one(mode: &str, more: &str) -> (Fake, Arc<Engine>, Gateway) {
    let (store, engine) = (Fake::start().await, Engine::start().await);
    let gateway = start(&store, &engine, "one", mode, more).await;
    (store, engine, gateway)
}

async fn start(store: &Fake, engine: &Arc<Engine>, name: &str, mode: &str, more: &str) -> Gateway {
    let engines = [Arc::clone(engine)];
    Gateway::start(
        name,
        &Setup { store: &store.url, mode, slots: SLOTS, engines: &engines, more, leader: Leader::default() },
    )
    .await
}

async fn ready(gateway: &Gateway) {
    gateway.until("it is ready", async |gateway| gateway.is_ready().await).await;
}

async fn stands(gateway: &Gateway, standing: &str) {
    gateway.until(standing, async |gateway| gateway.standing().await == standing).await;
}

async fn logs(gateway: &Gateway, part: &str) {
    gateway.until(part, async |gateway| gateway.log().contains(part)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_finds_no_store_is_not_ready_and_says_why() {
    for mode in ["strict", "keep"] {
        let (store, engine) = (Fake::start().await, Engine::start().await);
        store.set(Mood::Silent);
        let gateway = start(&store, &engine, "one", mode, "").await;
        logs(&gateway, "the ledger cannot be renewed").await;
        assert!(!gateway.is_ready().await);
        let cluster = gateway.status().await.unwrap().cluster.unwrap();
        assert_eq!((&*cluster.standing, cluster.ready), ("joining", false));
        assert!(cluster.why.unwrap().contains("no share yet"));
        store.set(Mood::Well);
        ready(&gateway).await;
        assert!(gateways::complete(gateway.port, 1, 5).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_of_one_name_are_two_gateways_and_the_log_says_so() {
    let (store, engine, first) = one("strict", "").await;
    let second = start(&store, &engine, "one", "strict", "").await;
    ready(&first).await;
    ready(&second).await;
    logs(&first, "give each gateway its own cluster.name").await;
    logs(&second, "give each gateway its own cluster.name").await;
    let load = Load::on(&[first.port, second.port], 20);
    sleep(LEASE * 2).await;
    // The peak is read before the clients leave, because the engine notices later than the gateway
    // that a client has left.
    assert!((1..=ALL).contains(&engine.peak()));
    load.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_ledger_and_what_is_no_ledger_are_left_as_they_are() {
    let (store, engine, gateway) = one("strict", "").await;
    ready(&gateway).await;
    for (object, part) in [(json!({ "version": 9 }), "has version 9"), (json!({ "some": "thing" }), "is not a ledger")]
    {
        store.put(object.to_string().as_bytes());
        logs(&gateway, part).await;
        stands(&gateway, "standing_back").await;
        assert!(!gateway.is_ready().await);
        // After the lease the gateway admits nothing, so the request waits.
        sleep(LEASE).await;
        engine.peak();
        let waiting = tokio::spawn(gateways::complete(gateway.port, 1, 5));
        sleep(LEASE / 2).await;
        assert_eq!((engine.peak(), store.value()), (0, Some(object)));
        store.put(b"");
        assert!(!waiting.is_finished());
        logs(&gateway, "is not a ledger").await;
        waiting.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_slow_forgetful_or_speaks_garbage_never_raises_the_peak() {
    let (store, engine, first) = one("strict", "").await;
    let second = start(&store, &engine, "two", "strict", "").await;
    ready(&first).await;
    ready(&second).await;
    let load = Load::on(&[first.port, second.port], 20);
    for mood in [Mood::Slow(Duration::from_millis(150)), Mood::Forgets, Mood::Slow(LEASE), Mood::Garbage] {
        store.set(mood);
        sleep(LEASE * 2).await;
        assert!(engine.peak() <= ALL, "{mood:?}");
        if mood == Mood::Garbage {
            logs(&first, "not one of etcd's").await;
            assert_eq!(first.standing().await, "stopped");
        }
        store.set(Mood::Well);
        for gateway in [&first, &second] {
            stands(gateway, "holding").await;
        }
        assert!(engine.peak() <= ALL, "after {mood:?}");
    }
    load.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_larger_than_its_gateways_share_is_served_by_one_gateway_at_a_time() {
    let (store, engine, first) = one("strict", "tokens = 1_000").await;
    let second = start(&store, &engine, "two", "strict", "tokens = 1_000").await;
    ready(&first).await;
    ready(&second).await;
    // The request at each gateway takes eleven of the twelve slots.
    let wide = [first.port, second.port].map(|port| tokio::spawn(gateways::complete(port, 11, 20)));
    for one in wide {
        assert!(one.await.unwrap(), "{}\n{}", first.log(), second.log());
    }
    assert_eq!(engine.peak(), 1, "one after the other");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_keeps_to_the_limit_and_the_old_process_leaves_the_ledger() {
    let (store, engine, mut first) = one("strict", "").await;
    let second = start(&store, &engine, "two", "strict", "").await;
    ready(&first).await;
    ready(&second).await;
    let load = Load::on(&[first.port, second.port], 20);
    sleep(LEASE).await;
    first.run(&["--upgrade"]).await;
    ready(&first).await;
    sleep(LEASE * 2).await;
    let peak = engine.peak();
    load.end().await;
    assert!((ALL - 1..=ALL).contains(&peak), "{peak}\n{}", first.log());
    let gateways = |store: &Fake| store.value().map_or(0, |ledger| ledger["gateways"].as_object().unwrap().len());
    assert_eq!(gateways(&store), 2, "{:?}", store.value());
}
