//! Sets the replicas of StatefulSets to the number that autoscaling wants (`autoscale.apply`).
//!
//! An increase is applied at once. Before a decrease, a dry run finds out whether it is allowed.
//! Then the pods with the highest numbers are drained, and the replicas follow. A field that
//! another manager owns is left alone.
//!
//! Bounds: while nothing changes, the API server is asked about a set every [`LOOK`]. After an
//! error, it is asked again after [`RETRY`], and otherwise once a second.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use sluice_config::Pods;
use sluice_fleet::Fleet;
use sluice_fleet::discovery::{PodsView, apply_replicas, read_replicas};

const LOOK: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Sets(BTreeMap<String, Set>);

#[derive(Debug, Default)]
struct Set {
    /// The number of replicas, and when it was read or set.
    have: Option<(u32, Instant)>,
    allowed: Option<Instant>,
    not_before: Option<Instant>,
    /// The last error, logged once.
    why: String,
}

/// The smallest number of replicas that explains the pods of a set, without pods that are being
/// deleted.
fn replicas_seen(seen: &[PodsView], pool: &str, set: &str) -> u32 {
    let pods = seen.iter().filter(|view| view.pool == pool).flat_map(|view| &view.pods);
    let number = |name: &str| name.strip_prefix(set)?.strip_prefix('-')?.parse::<u32>().ok();
    let staying = pods.filter(|pod| pod.state != "leaving").filter_map(|pod| number(&pod.name));
    staying.max().map_or(0, |highest| highest.saturating_add(1))
}

impl Sets {
    /// Looks once at the set of a pool that should run `wanted` pods. `seen`: the existing pods.
    pub(super) async fn step(
        &mut self,
        fleet: &Fleet,
        (pool, pods): (&str, &Pods),
        seen: &[PodsView],
        wanted: u32,
        may_stop: bool,
    ) {
        let Some(name) = &pods.statefulset else { return };
        let set = self.0.entry(pool.to_owned()).or_default();
        if set.not_before.is_some_and(|moment| Instant::now() < moment) {
            return;
        }
        // With more pods than the known number explains, another manager may have raised the
        // number, so it is read again.
        let seen = replicas_seen(seen, pool, name);
        set.have = set.have.filter(|(have, _)| seen <= *have);
        match set.follow(fleet, pool, (pods.namespace.as_deref(), name), wanted, may_stop).await {
            Ok(()) => set.not_before = None,
            Err(why) => {
                set.not_before = Some(Instant::now() + RETRY);
                (set.have, set.allowed) = (None, None);
                if set.why != why {
                    tracing::warn!("autoscale: pool {pool}: {why}");
                    set.why = why;
                }
            }
        }
    }
}

impl Set {
    /// Whether a decrease needs a dry run. An earlier answer counts only while the number is above
    /// the wanted one: later, another manager may have raised it again.
    fn must_ask(&mut self, have: u32, wanted: u32) -> bool {
        if wanted >= have {
            self.allowed = None;
            return false;
        }
        self.allowed.is_none_or(|at| at.elapsed() >= RETRY)
    }

    async fn follow(
        &mut self,
        fleet: &Fleet,
        pool: &str,
        (namespace, name): (Option<&str>, &str),
        wanted: u32,
        may_stop: bool,
    ) -> Result<(), String> {
        let known = self.have.filter(|(have, at)| *have == wanted && at.elapsed() < LOOK);
        let (have, _) = match known {
            Some(known) => known,
            None => (read_replicas(namespace, name).await?, Instant::now()),
        };
        self.have = Some((have, Instant::now())).filter(|_| known.is_none()).or(known);
        if self.must_ask(have, wanted) {
            if let Err(why) = apply_replicas(namespace, name, wanted, true).await {
                fleet.scale(pool, Some(have), false).await;
                return Err(why);
            }
            self.allowed = Some(Instant::now());
        }
        // The number stays above `wanted` while the pods beyond it are in use.
        let next = fleet.scale(pool, Some(wanted), may_stop).await.max(wanted);
        // Without the lead, another gateway sets the replicas.
        if (wanted > have || next < have) && fleet.lead().is_held() {
            let next = if wanted > have { wanted } else { next };
            apply_replicas(namespace, name, next, false).await?;
            tracing::info!("autoscale: pool {pool}: StatefulSet {name} has {next} replicas (had {have})");
            self.have = Some((next, Instant::now()));
        }
        self.why.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_fleet::discovery::PodView;

    #[test]
    fn pods_of_the_set_that_stay_say_how_many_replicas_it_has_at_least() {
        let pod = |name: &str, state: &str| PodView { name: name.to_owned(), state: state.to_owned(), why: None };
        let view = |pool: &str, pods: Vec<PodView>| PodsView { pool: pool.to_owned(), trouble: None, pods };
        let seen = [
            view("other", vec![pod("short-9", "managed")]),
            view("p", vec![pod("short-0", "managed"), pod("short-4", "managed"), pod("short-7", "leaving")]),
            view("p", vec![pod("long-8", "managed"), pod("short-x", "managed"), pod("short", "managed")]),
        ];
        assert_eq!(replicas_seen(&seen, "p", "short"), 5);
        assert_eq!(replicas_seen(&seen, "other", "short"), 10);
        assert_eq!(replicas_seen(&seen, "p", "none"), 0);
    }

    #[test]
    fn each_time_that_fewer_are_to_be_set_it_is_asked_anew() {
        let mut set = Set::default();
        assert!(set.must_ask(3, 2));
        set.allowed = Some(Instant::now());
        assert!(!set.must_ask(3, 2), "the answer is new");
        assert!(!set.must_ask(2, 2), "nothing is to be lowered");
        assert!(set.must_ask(3, 2), "another manager may have raised them");
    }
}
