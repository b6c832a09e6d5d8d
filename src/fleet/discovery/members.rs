//! Which pods of a pool are backends, and in which state: a state machine without clock and I/O.
//!
//! ```text
//!   not ready --ready--> cold --warmed up--> in use --unready or engine restarted--> cordoned
//!   cordoned --ready--> cold     any --deleted--> leaving --> gone
//! ```
//!
//! A new pod is warm without warm-up if our gate is set, or if it has no such gate and was ready
//! when the gateway began. A pod enters when it is warm and all containers are ready. The `Ready`
//! condition does not count, because it waits for our gate, and turns false for a lost node
//! although the containers may run. The gateway's probes judge the containers. A pod with a
//! `deletionTimestamp` gets no new requests. That is seconds before it turns unready.
//!
//! With a driver (`statefulset`), every pod with an address is a backend, and the engine's life
//! cycle decides whether it gets requests.

use std::collections::BTreeMap;

use super::{Gate, PodView, Seen, SeenPod};
use sluice_config::FoundPod;

/// The pods of one pool.
#[derive(Debug, Default)]
pub struct Members {
    pods: BTreeMap<String, Member>,
    /// Whether all pods were listed once, so that later pods are new.
    began: bool,
    /// Whether a driver restarts the engines.
    managed: bool,
}

#[derive(Debug)]
struct Member {
    pod: SeenPod,
    warmth: Warmth,
    /// Whether the pod was a backend, so that requests may run there.
    was_in: bool,
    /// Why our gate could not be set.
    gate_trouble: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Warmth {
    Cold,
    WarmingUp,
    Failed(String),
    Warm,
}

/// A pod to warm up (`warm_up`) and to give our gate (`gate`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The pod's name.
    pub name: String,
    /// The pod's uid.
    pub uid: String,
    /// See [`SeenPod::restarts`].
    pub restarts: i32,
    /// The pod's address.
    pub ip: String,
    /// Whether to warm it up.
    pub warm_up: bool,
    /// Whether to set our gate.
    pub gate: bool,
}

impl Members {
    /// No pods yet. `managed`: a driver restarts the engines.
    pub fn new(managed: bool) -> Self {
        Self { managed, ..Self::default() }
    }

    /// Records the pods seen last. `is_coming`: whether the driver of a missing pod waits for the
    /// next pod of this name.
    pub fn see(&mut self, seen: &Seen, is_coming: impl Fn(&str) -> bool) {
        let managed = self.managed;
        self.pods.retain(|name, member| {
            let is_there = seen.pods.contains_key(name);
            if !is_there {
                // The backend remains, but gets no requests.
                member.pod = SeenPod { ip: member.pod.ip.take(), leaving: true, ..SeenPod::default() };
            }
            is_there || managed && is_coming(name)
        });
        for (name, pod) in &seen.pods {
            let is_same =
                |member: &Member| member.pod.uid == pod.uid && (member.pod.ip == pod.ip || member.pod.ip.is_none());
            match self.pods.get_mut(name).filter(|member| is_same(member)) {
                Some(member) => {
                    if member.pod.restarts != pod.restarts {
                        member.warmth = Warmth::Cold;
                    }
                    member.pod = pod.clone();
                }
                None => {
                    let warm = pod.gate == Gate::Given || (pod.gate == Gate::Absent && !self.began && pod.ready);
                    let warmth = if warm { Warmth::Warm } else { Warmth::Cold };
                    let mut pod = pod.clone();
                    let before = self.pods.get(name).and_then(|before| before.pod.ip.clone());
                    if managed && pod.ip.is_none() && before.is_some() {
                        // Until the new pod has an address, the backend keeps the old one.
                        (pod.ip, pod.leaving) = (before, true);
                    }
                    let member = Member { pod, warmth, was_in: false, gate_trouble: None };
                    self.pods.insert(name.clone(), member);
                }
            }
        }
        for member in self.pods.values_mut() {
            member.was_in |= if self.managed { member.pod.ip.is_some() } else { member.is_open() };
        }
        self.began |= seen.complete;
    }

    /// The pods that are backends. With a driver, the highest number comes first, as a StatefulSet
    /// changes them.
    pub fn found(&self) -> Vec<FoundPod> {
        let backend = |(name, member): (&String, &Member)| {
            let ip = member.pod.ip.clone().filter(|_| member.was_in)?;
            let cordoned = if self.managed { member.pod.leaving } else { !member.is_open() };
            Some(FoundPod { name: name.clone(), ip, cordoned })
        };
        let mut found: Vec<FoundPod> = self.pods.iter().filter_map(backend).collect();
        if self.managed {
            let number = |pod: &FoundPod| pod.name.rsplit('-').next().and_then(|number| number.parse::<u32>().ok());
            found.sort_by_key(|pod| std::cmp::Reverse(number(pod)));
        }
        found
    }

    /// Pods to prepare, each once until [`Members::prepared`] or [`Members::retry`]. `serves`:
    /// whether the engine of a pod with a driver serves.
    pub fn jobs(&mut self, serves: impl Fn(&str) -> bool) -> Vec<Job> {
        let mut jobs = Vec::new();
        for (name, member) in &mut self.pods {
            let Some(ip) = member.pod.ip.clone().filter(|_| member.pod.ready && !member.pod.leaving) else { continue };
            let ready_for_gate = if self.managed { serves(name) } else { true };
            let warm_up = !self.managed && member.warmth == Warmth::Cold;
            let gate = member.pod.gate == Gate::Missing && member.gate_trouble.is_none() && ready_for_gate;
            if member.warmth == Warmth::WarmingUp || matches!(member.warmth, Warmth::Failed(_)) || !(warm_up || gate) {
                continue;
            }
            member.warmth = Warmth::WarmingUp;
            let (uid, restarts) = (member.pod.uid.clone(), member.pod.restarts);
            jobs.push(Job { name: name.clone(), uid, restarts, ip, warm_up, gate });
        }
        jobs
    }

    /// Records whether a pod was warmed up, and got our gate.
    pub fn prepared(&mut self, job: &Job, warm: Result<(), String>, gate: Result<(), String>) {
        let Some(member) = self.pods.get_mut(&job.name) else { return };
        if member.pod.uid != job.uid || member.pod.restarts != job.restarts {
            return;
        }
        member.warmth = match warm {
            Ok(()) => Warmth::Warm,
            Err(why) => Warmth::Failed(why),
        };
        member.gate_trouble = gate.err();
        if member.gate_trouble.is_none() && job.gate && member.warmth == Warmth::Warm {
            // Set now; the watch will later show the same.
            member.pod.gate = Gate::Given;
        }
        member.was_in |= !self.managed && member.is_open();
    }

    /// Allows new attempts after failures.
    pub fn retry(&mut self) {
        for member in self.pods.values_mut() {
            if matches!(member.warmth, Warmth::Failed(_)) {
                member.warmth = Warmth::Cold;
            }
            member.gate_trouble = None;
        }
    }

    /// The pods for operators.
    pub fn views(&self) -> Vec<PodView> {
        let view = |(name, member): (&String, &Member)| {
            let (state, why) = member.shown(self.managed);
            PodView { name: name.clone(), state: state.to_owned(), why }
        };
        self.pods.iter().map(view).collect()
    }
}

impl Member {
    fn is_open(&self) -> bool {
        self.pod.ready && !self.pod.leaving && self.warmth == Warmth::Warm && self.pod.ip.is_some()
    }

    fn shown(&self, managed: bool) -> (&'static str, Option<String>) {
        let failure = || self.pod.failure.as_ref().map(ToString::to_string);
        if self.pod.leaving {
            return ("leaving", None);
        }
        match &self.warmth {
            _ if managed => ("managed", failure().or(self.gate_trouble.clone())),
            _ if !self.pod.ready => (if self.was_in { "cordoned" } else { "not_ready" }, failure()),
            Warmth::Cold => ("cold", None),
            Warmth::WarmingUp => ("warming_up", None),
            Warmth::Failed(why) => ("cold", Some(why.clone())),
            Warmth::Warm => ("in_use", self.gate_trouble.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str) -> SeenPod {
        let ip = Some(format!("10.0.0.{}", uid.len()));
        SeenPod { uid: uid.to_owned(), ip, ready: true, gate: Gate::Missing, ..SeenPod::default() }
    }

    fn seen(pods: &[(&str, SeenPod)]) -> Seen {
        let pods = pods.iter().map(|(name, pod)| ((*name).to_owned(), pod.clone())).collect();
        Seen { pods, complete: true, trouble: None }
    }

    fn see(members: &mut Members, seen: &Seen) {
        members.see(seen, |_| false);
    }

    /// Names of backends, the cordoned ones with a `-`.
    fn backends(members: &Members) -> Vec<String> {
        let word = |pod: FoundPod| format!("{}{}", if pod.cordoned { "-" } else { "" }, pod.name);
        members.found().into_iter().map(word).collect()
    }

    /// Prepares all pods that are due. Returns their names.
    fn warm(members: &mut Members) -> Vec<String> {
        let jobs = members.jobs(|_| false);
        jobs.iter().for_each(|job| members.prepared(job, Ok(()), Ok(())));
        jobs.into_iter().map(|job| job.name).collect()
    }

    #[test]
    fn a_pod_comes_in_warm_and_leaves_cordoned_from_its_deletion_on() {
        let mut members = Members::new(false);
        let not_ready = SeenPod { ready: false, ..pod("1") };
        see(&mut members, &seen(&[("a", not_ready.clone())]));
        assert_eq!((warm(&mut members), backends(&members)), (vec![], vec![]));
        see(&mut members, &seen(&[("a", pod("1"))]));
        assert_eq!(backends(&members), [""; 0], "cold");
        assert_eq!(warm(&mut members), ["a"]);
        assert_eq!(backends(&members), ["a"]);
        assert_eq!(warm(&mut members), [""; 0], "once");
        see(&mut members, &seen(&[("a", SeenPod { leaving: true, gate: Gate::Given, ..pod("1") })]));
        assert_eq!(backends(&members), ["-a"]);
        see(&mut members, &seen(&[]));
        assert_eq!(backends(&members), [""; 0]);
    }

    #[test]
    fn an_engine_that_restarted_in_its_pod_is_warmed_up_again() {
        let mut members = Members::new(false);
        see(&mut members, &seen(&[("a", pod("1"))]));
        warm(&mut members);
        see(&mut members, &seen(&[("a", SeenPod { ready: false, restarts: 1, gate: Gate::Given, ..pod("1") })]));
        assert_eq!(backends(&members), ["-a"]);
        see(&mut members, &seen(&[("a", SeenPod { restarts: 1, gate: Gate::Given, ..pod("1") })]));
        assert_eq!(backends(&members), ["-a"], "ready and cold");
        assert_eq!(warm(&mut members), ["a"]);
        assert_eq!(backends(&members), ["a"]);
    }

    #[test]
    fn pods_that_serve_when_the_gateway_begins_are_warm() {
        let without_gate = SeenPod { gate: Gate::Absent, ..pod("1") };
        let given = SeenPod { gate: Gate::Given, ..pod("22") };
        let mut members = Members::new(false);
        see(&mut members, &seen(&[("a", without_gate.clone()), ("b", given)]));
        assert_eq!(backends(&members), ["a", "b"]);
        let later = SeenPod { uid: "x".to_owned(), ip: Some("10.0.0.9".to_owned()), ..without_gate };
        see(&mut members, &seen(&[("c", later)]));
        assert_eq!(backends(&members), [""; 0], "one that came later is cold");
        assert_eq!(warm(&mut members), ["c"]);
    }

    #[test]
    fn a_new_pod_of_the_same_name_is_another_one() {
        let mut members = Members::new(false);
        see(&mut members, &seen(&[("a", pod("1"))]));
        let job = members.jobs(|_| false).remove(0);
        see(&mut members, &seen(&[("a", pod("22"))]));
        members.prepared(&job, Ok(()), Ok(()));
        assert_eq!(backends(&members), [""; 0], "the result is of the old one");
        assert_eq!(warm(&mut members), ["a"]);
    }

    #[test]
    fn what_failed_is_tried_again_and_a_refused_gate_keeps_no_warm_pod_out() {
        let mut members = Members::new(false);
        see(&mut members, &seen(&[("a", pod("1"))]));
        let job = members.jobs(|_| false).remove(0);
        members.prepared(&job, Err("no text".to_owned()), Ok(()));
        assert_eq!((backends(&members), members.jobs(|_| false)), (vec![], vec![]));
        assert_eq!(members.views()[0].why.as_deref(), Some("no text"));
        members.retry();
        let job = members.jobs(|_| false).remove(0);
        members.prepared(&job, Ok(()), Err("forbidden".to_owned()));
        assert_eq!(backends(&members), ["a"]);
        assert_eq!(
            (members.views()[0].state.as_str(), members.views()[0].why.as_deref()),
            ("in_use", Some("forbidden"))
        );
        members.retry();
        let job = members.jobs(|_| false).remove(0);
        assert_eq!((job.warm_up, job.gate), (false, true));
    }

    #[test]
    fn with_a_driver_a_pod_is_a_backend_at_once_and_gets_the_gate_when_its_engine_serves() {
        let mut members = Members::new(true);
        see(&mut members, &seen(&[("a", SeenPod { ready: false, ..pod("1") })]));
        assert_eq!(backends(&members), ["a"]);
        see(&mut members, &seen(&[("a", pod("1"))]));
        assert_eq!(members.jobs(|_| false), []);
        let jobs = members.jobs(|name| name == "a");
        assert_eq!((jobs[0].warm_up, jobs[0].gate), (false, true));
    }

    #[test]
    fn with_a_driver_a_backend_outlives_its_pod_until_the_next_one_has_an_address() {
        let mut members = Members::new(true);
        let ten = SeenPod { ip: Some("10.0.0.10".to_owned()), ..pod("1") };
        members.see(&seen(&[("a-2", pod("1")), ("a-10", ten.clone())]), |_| true);
        assert_eq!(backends(&members), ["a-10", "a-2"]);
        members.see(&seen(&[("a-10", ten.clone())]), |_| true);
        assert_eq!(backends(&members), ["a-10", "-a-2"]);
        members
            .see(&seen(&[("a-2", SeenPod { ip: None, ready: false, ..pod("22") }), ("a-10", ten.clone())]), |_| true);
        assert_eq!(backends(&members), ["a-10", "-a-2"]);
        assert_eq!(members.found()[1].ip, "10.0.0.1");
        members.see(&seen(&[("a-2", pod("22")), ("a-10", ten.clone())]), |_| true);
        assert_eq!(backends(&members), ["a-10", "a-2"]);
        assert_eq!(members.found()[1].ip, "10.0.0.2");
        members.see(&seen(&[("a-10", ten)]), |_| false);
        assert_eq!(backends(&members), ["a-10"], "scaled down");
    }
}
