//! The limits of an API key at several gateways, on virtual time, with the store in memory.

use sha2::{Digest, Sha256};

use super::{Gateway, LEASE, Memory, pass};
use sluice_config::{Auth, ClusterMode, Key, KeyDigest, KeyLimit, ModelScope};
use sluice_core::base::Tokens;
use sluice_gateway::flow::keys::{ApiKey, InFlight, Keyring, UsedTokens};
use sluice_gateway::pool::Need;
use tokio::time::Instant;

const IN_FLIGHT: u32 = 10;
const A_MINUTE: u32 = 600;

struct Client {
    key: ApiKey,
    running: Vec<InFlight>,
    served: usize,
}

impl Client {
    fn of(gateway: &Gateway, limit: KeyLimit) -> Self {
        let sha256 = KeyDigest::new(Sha256::digest(b"secret").into(), None);
        let key = Key {
            name: "team-a".to_owned(),
            sha256,
            models: ModelScope::All,
            priority: 0,
            priority_min: None,
            priority_max: i32::MAX,
            weight: 1.0,
            on_failure: None,
            limit,
        };
        let ring = Keyring::new(&Auth { keys: vec![key], admin_token: None }, &gateway.keys);
        let key = ring.authenticate(Some("secret")).unwrap().unwrap();
        Self { key, running: Vec::new(), served: 0 }
    }

    /// Tries to run `most` requests. Refused ones are sent again at the next call.
    fn fill(&mut self, most: usize) {
        self.running.truncate(most);
        while self.running.len() < most
            && let Ok(running) = self.key.start_request(Instant::now())
        {
            self.running.push(running);
        }
    }

    fn send(&mut self, count: usize) {
        self.served += (0..count).filter(|_| self.key.start_request(Instant::now()).is_ok()).count();
    }
}

fn all(gateways: &[Gateway], limit: &KeyLimit) -> Vec<Client> {
    gateways.iter().map(|gateway| Client::of(gateway, limit.clone())).collect()
}

#[tokio::test(start_paused = true)]
async fn a_key_has_its_limit_at_all_gateways_together_and_it_follows_the_requests() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..=3).map(|number| Gateway::join(&store, number, ClusterMode::Strict)).collect();
    let mut clients = all(&gateways, &KeyLimit { in_flight: Some(IN_FLIGHT), ..KeyLimit::default() });
    pass(&mut gateways, 2 * LEASE.as_secs(), |_| ()).await;
    for wanted in [[30, 0, 0], [0, 30, 0], [30, 30, 30], [2, 2, 30]] {
        // Until the next renewal, more requests than the limit may run.
        pass(&mut gateways, LEASE.as_secs(), |_| clients.iter_mut().zip(wanted).for_each(|(one, most)| one.fill(most)))
            .await;
        let running = |clients: &[Client]| clients.iter().map(|one| one.running.len()).collect::<Vec<_>>();
        pass(&mut gateways, LEASE.as_secs(), |_| {
            clients.iter_mut().zip(wanted).for_each(|(one, most)| one.fill(most));
            assert!(running(&clients).iter().sum::<usize>() <= IN_FLIGHT as usize, "{:?}", running(&clients));
        })
        .await;
        let found = running(&clients);
        assert!(found.iter().sum::<usize>() + 2 >= IN_FLIGHT as usize, "{wanted:?}: {found:?}");
        // The next division must find no requests in use.
        clients.iter_mut().for_each(|one| one.running.clear());
    }
}

#[tokio::test(start_paused = true)]
async fn a_rate_is_that_of_all_gateways_together_also_when_one_of_them_ends() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..=2).map(|number| Gateway::join(&store, number, ClusterMode::Strict)).collect();
    let mut clients = all(&gateways, &KeyLimit { requests_per_minute: Some(A_MINUTE), ..KeyLimit::default() });
    pass(&mut gateways, 2 * LEASE.as_secs(), |_| ()).await;
    let mut rate = async |gateways: &mut Vec<Gateway>, count: usize| {
        // The clients use up the bursts, and the gateways learn the demand.
        pass(gateways, 60, |_| clients.iter_mut().take(count).for_each(|one| one.send(10))).await;
        clients.iter_mut().for_each(|one| one.served = 0);
        pass(gateways, 60, |_| clients.iter_mut().take(count).for_each(|one| one.send(10))).await;
        clients.iter().map(|one| one.served).collect::<Vec<_>>()
    };
    let both = rate(&mut gateways, 2).await;
    let near = |sum: usize| sum.abs_diff(A_MINUTE as usize) <= A_MINUTE as usize / 20;
    assert!(near(both.iter().sum()) && both[0].abs_diff(both[1]) < 60, "{both:?}");
    gateways.pop();
    let alone = rate(&mut gateways, 1).await;
    assert!(near(alone[0]), "{alone:?}");
}

#[tokio::test(start_paused = true)]
async fn a_rate_with_fewer_units_than_gateways_is_kept_and_goes_round() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..=3).map(|number| Gateway::join(&store, number, ClusterMode::Strict)).collect();
    let mut clients = all(&gateways, &KeyLimit { requests_per_minute: Some(1), ..KeyLimit::default() });
    pass(&mut gateways, 60, |_| clients.iter_mut().for_each(|one| one.send(1))).await;
    clients.iter_mut().for_each(|one| one.served = 0);
    pass(&mut gateways, 30 * 60, |_| clients.iter_mut().for_each(|one| one.send(1))).await;
    let served: Vec<usize> = clients.iter().map(|one| one.served).collect();
    let sum: usize = served.iter().sum();
    assert!((24..=33).contains(&sum) && served.iter().all(|one| *one >= 5), "in half an hour: {served:?}");
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_added_begins_with_an_even_part_and_one_that_is_replaced_claims_nothing() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..=2).map(|number| Gateway::join(&store, number, ClusterMode::Strict)).collect();
    pass(&mut gateways, 2 * LEASE.as_secs(), |_| ()).await;
    let mut clients = all(&gateways, &KeyLimit { in_flight: Some(IN_FLIGHT), ..KeyLimit::default() });
    clients.iter_mut().for_each(|one| one.fill(30));
    assert_eq!(clients.iter().map(|one| one.running.len()).collect::<Vec<_>>(), [5, 5], "before any renewal");
    assert_eq!(gateways[0].keys.uses(LEASE, Instant::now()).len(), 1);
    Keyring::new(&Auth { keys: vec![], admin_token: None }, &gateways[0].keys);
    assert_eq!(gateways[0].keys.uses(LEASE, Instant::now()), [], "its requests still run");
}

#[tokio::test(start_paused = true)]
async fn the_tokens_of_a_day_are_those_of_all_gateways_together() {
    const A_DAY: u64 = 10_000;
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..=2).map(|number| Gateway::join(&store, number, ClusterMode::Strict)).collect();
    let limit = KeyLimit { tokens_per_day: Some(Tokens(A_DAY)), ..KeyLimit::default() };
    let clients = all(&gateways, &limit);
    pass(&mut gateways, 2 * LEASE.as_secs(), |_| ()).await;
    let mut used = [0, 0];
    for busy in [0, 1] {
        pass(&mut gateways, 300, |_| {
            let now = Instant::now();
            let mut request = clients[busy].key.start_request(now).unwrap();
            let need = Need { slots: 1, prompt_tokens: 100, output_tokens: 0 };
            if request.take(&need, Some(0), now).is_ok() {
                request.settle(UsedTokens::Counted { prompt: 100, output: 0, whole: true }, now);
                used[busy] += 100;
            }
        })
        .await;
    }
    let sum = used[0] + used[1];
    // A gateway may admit a little more than its part while demand moves.
    let about_a_day = A_DAY * 9 / 10..=A_DAY * 102 / 100;
    assert!(about_a_day.contains(&sum) && used[0] > A_DAY / 2, "{used:?}");
}
