//! Several gateways as processes in front of engines that count their requests. The limit holds for
//! all gateways together, even if gateways are killed or frozen, or the store is gone. When the
//! store is back, the gateways use the full limit again.
//!
//! The store is a small part of etcd in this process, so that `cargo test` needs no etcd. With a
//! real one (`apt-get install etcd-server`, or the program in `SLUICE_ETCD`): `cargo test --test
//! cluster -- --ignored --nocapture real_etcd`. `SLUICE_BIN` names a program to test in place of
//! the debug build.

mod engine;
mod etcd;
mod faults;
mod gateways;
mod leaders;
mod restarts;
#[path = "../common/ports.rs"]
mod ports;
#[path = "../common/processes.rs"]
mod processes;
#[path = "../common/program.rs"]
mod program;
#[path = "../common/serve.rs"]
mod serve;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep};

use engine::Engine;
use etcd::{Fake, Mood, Real};
use gateways::{Gateway, LEASE, LOOK, Leader, Load, Setup, TIMEOUT};

/// The limit of each engine.
const SLOTS: u32 = 12;
/// Requests that clients keep open at each gateway.
const CLIENTS: usize = 30;

enum Store {
    Fake(Fake),
    Real(Box<Real>),
}

impl Store {
    fn url(&self) -> String {
        match self {
            Self::Fake(fake) => fake.url.clone(),
            Self::Real(real) => real.url.clone(),
        }
    }

    fn fake(&self) -> &Fake {
        let Self::Fake(fake) = self else { panic!("it is a real etcd") };
        fake
    }

    async fn value_of(&self, key: &str) -> Option<serde_json::Value> {
        match self {
            Self::Fake(fake) => fake.value_of(key),
            Self::Real(real) => real.value_of(key).await,
        }
    }

    async fn take_down(&mut self) {
        match self {
            Self::Fake(fake) => fake.set(Mood::Silent),
            Self::Real(real) => real.kill().await,
        }
    }

    async fn bring_back(&mut self) {
        match self {
            Self::Fake(fake) => fake.set(Mood::Well),
            Self::Real(real) => real.run().await,
        }
    }
}

struct World {
    mode: &'static str,
    store: Store,
    engines: Vec<Arc<Engine>>,
    gateways: Vec<Gateway>,
}

impl World {
    async fn start(mode: &'static str, store: Store) -> Self {
        let engines = vec![Engine::start().await, Engine::start().await];
        let mut world = Self { mode, store, engines, gateways: Vec::new() };
        for name in ["one", "two", "three"] {
            let gateway = world.gateway(name).await;
            world.gateways.push(gateway);
        }
        for gateway in &world.gateways {
            gateway.until("it is ready", async |gateway| gateway.is_ready().await).await;
        }
        world
    }

    async fn gateway(&self, name: &str) -> Gateway {
        let store = self.store.url();
        let setup = Setup {
            store: &store,
            mode: self.mode,
            slots: SLOTS,
            engines: &self.engines,
            more: "",
            leader: Leader::default(),
        };
        Gateway::start(name, &setup).await
    }

    fn ports(&self) -> Vec<u16> {
        self.gateways.iter().map(|gateway| gateway.port).collect()
    }

    fn running(&self) -> Vec<i64> {
        self.engines.iter().map(|engine| engine.running()).collect()
    }

    fn check(&self, what: &str, most: i64) {
        let peaks: Vec<i64> = self.engines.iter().map(|engine| engine.peak()).collect();
        eprintln!("{}: {what}: peaks {peaks:?} of {SLOTS}", self.mode);
        assert!(peaks.iter().all(|peak| *peak <= most), "{what}: {peaks:?} above {most}");
    }

    /// Checks that the other gateways use the share of a lost gateway. Under load they may use only
    /// a part of it, but after a pause without new requests they use all of it.
    async fn recovers(&self, what: &str, load: &Load) {
        let (begun, mut most) = (Instant::now(), 0);
        while begun.elapsed() < LEASE * 4 && most < 2 * ALL {
            most = most.max(self.running().iter().sum::<i64>());
            sleep(LOOK).await;
        }
        eprintln!("{}: {what}: {most} of {} in use after {:.1?} under load", self.mode, 2 * ALL, begun.elapsed());
        if most < 2 * ALL {
            load.pause(true);
            let calm = Instant::now();
            while self.running() != [0, 0] {
                assert!(calm.elapsed() < TIMEOUT, "requests do not end: {:?}", self.running());
                sleep(LOOK).await;
            }
            sleep(LEASE * 2).await;
            load.pause(false);
            let after = self.until_running(what, ALL).await;
            eprintln!("{}: {what}: all in use {after:.1?} after a calm moment", self.mode);
        }
    }

    /// Waits until each engine runs at least `least` requests; returns the time that this took.
    async fn until_running(&self, what: &str, least: i64) -> Duration {
        let begun = Instant::now();
        while self.running().iter().any(|running| *running < least) {
            if begun.elapsed() > TIMEOUT {
                let logs: String =
                    self.gateways.iter().map(|gateway| format!("{}:\n{}", gateway.name, gateway.log())).collect();
                panic!("{what}: {:?} of {least} run\n{logs}", self.running());
            }
            sleep(LOOK).await;
        }
        begun.elapsed()
    }

    async fn unused(&self, time: Duration) -> f64 {
        let (begun, mut sum, mut looks) = (Instant::now(), 0.0, 0.0);
        while begun.elapsed() < time {
            sum += self.running().iter().sum::<i64>() as f64 / f64::from(SLOTS * 2);
            looks += 1.0;
            sleep(LOOK).await;
        }
        1.0 - sum / looks
    }
}

const ALL: i64 = SLOTS as i64;

/// The limits hold while there are more clients than slots: a gateway is killed, another is frozen
/// and resumed, the store is gone and comes back, and at last a gateway stops.
async fn limits_hold(mode: &'static str, store: Store) {
    let mut world = World::start(mode, store).await;
    let load = Load::on(&world.ports(), CLIENTS);
    let after = world.until_running("all of it is used", ALL).await;
    eprintln!("{mode}: all of the limits in use {after:.1?} after the load began");
    let unused = world.unused(Duration::from_secs(5)).await;
    eprintln!("{mode}: unused with three gateways: {:.1} %", unused * 100.0);
    world.check("three gateways", ALL);

    let killed = Instant::now();
    world.gateways[2].kill().await;
    sleep(Duration::from_millis(500)).await;
    let lost = world.unused(LEASE).await;
    eprintln!("{mode}: {:.1} % unused in the seconds after a SIGKILL", lost * 100.0);
    world.recovers("a gateway was killed", &load).await;
    eprintln!("{mode}: {:.1?} since the SIGKILL", killed.elapsed());
    world.check("a gateway was killed", ALL);

    // In mode keep, a resumed gateway goes on with its last share, which the others have meanwhile
    // taken. So the limit may be exceeded by this share.
    let last = i64::try_from(world.gateways[1].share().await).unwrap();
    world.gateways[1].signal(Signal::SIGSTOP);
    // Meanwhile the engines end the requests of this gateway, and the kernel keeps their tokens.
    sleep(LEASE * 2).await;
    world.recovers("a gateway was stopped", &load).await;
    world.check("a gateway was stopped", ALL);
    world.gateways[1].signal(Signal::SIGCONT);
    sleep(LEASE * 2).await;
    let bound = if mode == "keep" { ALL + last } else { ALL };
    world.check("the gateway goes on", bound);
    world.gateways[1].until("it holds a share again", async |gateway| gateway.standing().await == "holding").await;
    world.until_running("two gateways", ALL).await;
    sleep(LEASE * 2).await;
    world.check("two gateways", bound);

    world.store.take_down().await;
    sleep(LEASE * 4).await;
    world.check("without the store", ALL);
    let (standing, running) = (world.gateways[0].standing().await, world.running());
    match mode {
        "strict" => assert_eq!((&*standing, &running[..]), ("stopped", &[0, 0][..]), "{}", world.gateways[0].log()),
        _ => {
            assert_eq!(standing, "keeping", "{}", world.gateways[0].log());
            world.until_running("it goes on without the store", ALL - 2).await;
        }
    }
    assert_eq!(world.gateways[0].is_ready().await, mode == "keep");
    world.store.bring_back().await;
    let after = world.until_running("the store is back", ALL).await;
    eprintln!("{mode}: all in use {after:.1?} after the store was back");
    sleep(LEASE).await;
    world.check("the store is back", ALL);

    // A gateway that stops gives its share back at once.
    let stopped = Instant::now();
    world.gateways[0].stop().await;
    world.until_running("one gateway", ALL).await;
    eprintln!("{mode}: all in use by the last gateway {:.1?} after another was asked to stop", stopped.elapsed());
    world.check("one gateway", ALL);
    let served = load.end().await;
    eprintln!("{mode}: {served} requests served");
    assert!(served > 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn strict_holds_the_limit_through_all_that_fails() {
    limits_hold("strict", Store::Fake(Fake::start().await)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keep_goes_on_without_the_store() {
    limits_hold("keep", Store::Fake(Fake::start().await)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd: apt-get install etcd-server, or SLUICE_ETCD=program"]
async fn real_etcd_strict() {
    limits_hold("strict", Store::Real(Box::new(Real::start().await))).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd: apt-get install etcd-server, or SLUICE_ETCD=program"]
async fn real_etcd_keep() {
    limits_hold("keep", Store::Real(Box::new(Real::start().await))).await;
}
