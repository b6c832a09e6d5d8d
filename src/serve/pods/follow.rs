//! Follows the pods of pools with a `kubernetes` table: warms up new pods, sets their readiness
//! gate, and puts them in force.
//!
//! [`Members`] decides about each pod. The pods of a pool stay in force while the API server is
//! unreachable, and after a change of the selector until its pods were listed. Bounds: [`AT_ONCE`]
//! pods are prepared at once. Failed preparations are repeated every [`RETRY`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::Pods;
use crate::core::Core;
use sluice_config::diff;
use sluice_config::{Address, Config, FoundPod};
use sluice_fleet::discovery::{self, Job, Members, PodQuery, PodsView, Seen};
use sluice_fleet::warm_up_external;

/// Longest pause between looks, because engines and configurations change without a notification.
const LOOK: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_secs(10);
const AT_ONCE: usize = 8;

#[derive(Debug)]
struct Follower {
    query: PodQuery,
    managed: bool,
    members: Members,
    seen: watch::Receiver<Seen>,
    task: JoinHandle<()>,
    /// The pods in force. After a change of the selector, the earlier pods stay until the new ones
    /// were listed.
    found: Vec<FoundPod>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A prepared pod: the pool, the job, and the outcomes of the warm-up and of the readiness gate.
type Prepared = (String, Job, Result<(), String>, Result<(), String>);

#[derive(Debug)]
struct Followers {
    pools: BTreeMap<String, Follower>,
    news: Arc<Notify>,
    jobs: JoinSet<Prepared>,
    room: Arc<Semaphore>,
    tried: Instant,
}

pub(crate) fn start(core: Arc<Core>, pods: Arc<Pods>, end: watch::Receiver<bool>) -> JoinHandle<()> {
    tokio::spawn(keep_finding(core, pods, end))
}

async fn keep_finding(core: Arc<Core>, pods: Arc<Pods>, mut end: watch::Receiver<bool>) {
    let news = Arc::new(Notify::new());
    let (jobs, room) = (JoinSet::new(), Arc::new(Semaphore::new(AT_ONCE)));
    let mut followers =
        Followers { pools: BTreeMap::new(), news: Arc::clone(&news), jobs, room, tried: Instant::now() };
    loop {
        followers.configure(&core.config.load(), core.acts());
        tokio::select! {
            () = news.notified() => {}
            () = tokio::time::sleep(LOOK) => {}
            Some(done) = followers.jobs.join_next() => followers.note(done),
            _ = end.wait_for(|ending| *ending) => return,
        }
        followers.look(&core);
        if pods.set(followers.found()) {
            let (core, pods) = (Arc::clone(&core), Arc::clone(&pods));
            // This rebuilds the routing table, so it runs on a thread that may block.
            if let Err(error) = tokio::task::spawn_blocking(move || put_in_force(&core, &pods)).await {
                tracing::error!(%error, "the pods could not be put in force");
            }
        }
        pods.show(followers.views());
    }
}

/// Makes the found pods the backends of their pools. Blocks.
fn put_in_force(core: &Core, pods: &Pods) {
    let _alone = core.alone();
    let running = core.config.load_full();
    let mut config = Config::clone(&running);
    pods.put(&mut config);
    for change in diff::changes(&running, &config) {
        tracing::info!("pods: {change}");
    }
    core.switch(config, None);
}

impl Followers {
    /// Follows exactly the pools of this configuration. `acts`: this gateway may restart the pods
    /// of a StatefulSet.
    fn configure(&mut self, config: &Config, acts: bool) {
        let mut found = BTreeMap::new();
        for pool in &config.pools {
            let Some(pods) = &pool.kubernetes else { continue };
            let (namespace, selector) = (pods.namespace.clone(), pods.selector.clone());
            let query = PodQuery { namespace, selector, container: pods.container.clone() };
            found.insert(pool.name.clone(), (query, acts && pods.statefulset.is_some()));
        }
        self.pools.retain(|name, _| found.contains_key(name));
        for (name, (query, managed)) in found {
            let before = self.pools.get(&name);
            if before.is_some_and(|before| before.query == query && before.managed == managed) {
                continue;
            }
            let kept = before.map(|before| before.found.clone()).unwrap_or_default();
            let follower = self.follow(query, managed, kept);
            self.pools.insert(name, follower);
        }
    }

    fn follow(&self, query: PodQuery, managed: bool, found: Vec<FoundPod>) -> Follower {
        let (sender, seen) = watch::channel(Seen::default());
        let (news, mut changes, followed) = (Arc::clone(&self.news), seen.clone(), query.clone());
        let task = tokio::spawn(async move {
            let notified = async {
                while changes.changed().await.is_ok() {
                    news.notify_one();
                }
            };
            tokio::join!(discovery::follow(followed, sender), notified);
        });
        Follower { query, managed, members: Members::new(managed), seen, task, found }
    }

    fn look(&mut self, core: &Core) {
        let engines = core.fleet.views();
        if self.tried.elapsed() >= RETRY {
            self.tried = Instant::now();
            self.pools.values_mut().for_each(|follower| follower.members.retry());
        }
        let config = core.config.load_full();
        for (pool, follower) in &mut self.pools {
            let seen = follower.seen.borrow_and_update().clone();
            let is_coming = |pod: &str| {
                let name = format!("{pool}/{pod}");
                engines.iter().any(|engine| engine.backend == name && !matches!(&*engine.step, "hold" | "off" | "idle"))
            };
            follower.members.see(&seen, is_coming);
            if seen.complete {
                follower.found = follower.members.found();
            }
            let serves = |pod: &str| {
                let name = format!("{pool}/{pod}");
                engines.iter().any(|engine| engine.backend == name && matches!(&*engine.step, "ramp" | "serve"))
            };
            for job in follower.members.jobs(serves) {
                let (pool, query, room) = (pool.clone(), follower.query.clone(), Arc::clone(&self.room));
                let config = Arc::clone(&config);
                self.jobs.spawn(async move {
                    // The semaphore is never closed.
                    let _room = room.acquire().await;
                    let (warm, gate) = prepare(&config, &pool, &query, &job).await;
                    (pool, job, warm, gate)
                });
            }
        }
    }

    fn note(&mut self, done: Result<Prepared, tokio::task::JoinError>) {
        let (pool, job, warm, gate) = match done {
            Ok(done) => done,
            Err(error) => return tracing::error!(%error, "a pod could not be prepared"),
        };
        let name = &job.name;
        match (&warm, &gate) {
            (Err(why), _) => tracing::warn!("pod {pool}/{name}: not in use: {why}"),
            (Ok(()), Err(why)) => tracing::warn!("pod {pool}/{name}: {why}"),
            (Ok(()), Ok(())) => tracing::info!(gate = job.gate, "pod {pool}/{name}: warm"),
        }
        if let Some(follower) = self.pools.get_mut(&pool) {
            follower.members.prepared(&job, warm, gate);
        }
    }

    fn found(&self) -> BTreeMap<String, Vec<FoundPod>> {
        self.pools.iter().map(|(pool, follower)| (pool.clone(), follower.found.clone())).collect()
    }

    fn views(&self) -> Vec<PodsView> {
        let view = |(pool, follower): (&String, &Follower)| PodsView {
            pool: pool.clone(),
            trouble: follower.seen.borrow().trouble.clone(),
            pods: follower.members.views(),
        };
        self.pools.iter().map(view).collect()
    }
}

async fn prepare(config: &Config, pool: &str, query: &PodQuery, job: &Job) -> (Result<(), String>, Result<(), String>) {
    let pool = config.pools.iter().find(|own| own.name == pool);
    let Some((pods, engine)) = pool.and_then(|own| Some((own.kubernetes.as_ref()?, *own.engine))) else {
        return (Err("its pool is gone".to_owned()), Ok(()));
    };
    if job.warm_up {
        let pod = FoundPod { name: job.name.clone(), ip: job.ip.clone(), cordoned: false };
        let address = Arc::new(Address::of(&pods.backend(&pod, engine)));
        let warmed = warm_up_external(&address, config.health.probe_timeout, config.fleet.warm_up).await;
        if warmed.is_err() {
            return (warmed, Ok(()));
        }
    }
    let gate = if job.gate { discovery::give_gate(query, job).await } else { Ok(()) };
    (Ok(()), gate)
}
