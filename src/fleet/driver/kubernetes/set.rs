//! A StatefulSet whose pods are engines: reads it, and owns the arguments by server-side apply.
//!
//! The field manager `sluice` owns two fields: `args` of the container, and the partition of the
//! rolling update. It never takes a field from another manager (no `force`), and tries each change
//! in a dry run before any stop.
//!
//! Pods from the partition on get the arguments of the template, pods below it the previous
//! arguments of the set. So pods change from the highest number down. If a pod must go back to the
//! old arguments while higher pods keep the new ones, the partition moves above it again
//! ([`plan`]).

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::discovery::client::{CallError, MANAGER, api, call};
use sluice_config::PodEngine;

/// An engine's StatefulSet, and the number of the pod.
#[derive(Debug)]
pub(super) struct Set<'d> {
    engine: &'d PodEngine,
    /// The number of the pod.
    pub(super) number: i32,
}

/// The fields to apply, so that a pod runs with the wanted arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) args: Vec<String>,
    pub(super) partition: i32,
}

/// The plan for pod `number` to start with `wanted`. `template`: the arguments of the template.
/// `higher`: numbers and arguments of higher pods. `stays`: the pod has `wanted` or returns to it,
/// so it may be below the partition.
///
/// # Errors
/// The number of a higher pod, which must change first.
pub(super) fn plan(
    number: i32,
    wanted: &[String],
    template: &[String],
    stays: bool,
    higher: &[(i32, Vec<String>)],
) -> Result<Plan, i32> {
    match higher.iter().find(|(_, args)| args != wanted) {
        None => Ok(Plan { args: wanted.to_vec(), partition: number }),
        Some(_) if stays && higher.iter().all(|(_, args)| args == template) => {
            Ok(Plan { args: template.to_vec(), partition: number + 1 })
        }
        Some((other, _)) => Err(*other),
    }
}

pub(super) fn args_of(spec: Option<&PodSpec>, container: &str) -> Option<Vec<String>> {
    let is_it = |found: &&Container| found.name == container;
    spec?.containers.iter().find(is_it).map(|found| found.args.clone().unwrap_or_default())
}

impl<'d> Set<'d> {
    /// # Errors
    /// The name of the pod does not end in a number.
    pub(super) fn of(engine: &'d PodEngine) -> Result<Self, CallError> {
        let prefix = format!("{}-", engine.statefulset);
        let number = engine.pod.strip_prefix(&prefix).and_then(|number| number.parse().ok());
        let other = || CallError::Other(format!("{} is no pod of the StatefulSet {}", engine.pod, engine.statefulset));
        Ok(Self { engine, number: number.ok_or_else(other)? })
    }

    async fn pods(&self) -> Result<Api<Pod>, CallError> {
        api(self.engine.namespace.as_deref()).await.map_err(CallError::Other)
    }

    /// The pod; `None` if it does not exist.
    pub(super) async fn pod(&self) -> Result<Option<Pod>, CallError> {
        let pods = self.pods().await?;
        call("get pods", pods.get_opt(&self.engine.pod)).await
    }

    /// Deletes the pod, unless another pod has the name by now.
    pub(super) async fn delete(&self, uid: &str) -> Result<(), CallError> {
        let pods = self.pods().await?;
        let preconditions = kube::api::Preconditions { uid: Some(uid.to_owned()), ..Default::default() };
        let params = kube::api::DeleteParams { preconditions: Some(preconditions), ..Default::default() };
        match call("delete pods", pods.delete(&self.engine.pod, &params)).await {
            Ok(_) | Err(CallError::NotFound(_) | CallError::Conflict(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The plan for these arguments.
    ///
    /// # Errors
    /// The set or the container does not exist, the set was scaled below this pod, or other pods
    /// must change first.
    pub(super) async fn plan(&self, wanted: &[String], stays: bool) -> Result<Plan, CallError> {
        let PodEngine { statefulset, container, namespace, .. } = self.engine;
        let sets: Api<StatefulSet> = api(namespace.as_deref()).await.map_err(CallError::Other)?;
        let set = call("get statefulsets", sets.get(statefulset)).await?;
        let spec = set.spec.unwrap_or_default();
        let template = args_of(spec.template.spec.as_ref(), container).ok_or_else(|| {
            CallError::Other(format!(
                "the StatefulSet {statefulset} has no container {container}; set kubernetes.container"
            ))
        })?;
        let replicas = spec.replicas.unwrap_or(1);
        if self.number >= replicas {
            let pod = &self.engine.pod;
            return Err(CallError::Unwanted(format!(
                "{statefulset} was scaled to {replicas} pods, and {pod} is none of them"
            )));
        }
        let pods = self.pods().await?;
        let mut higher = Vec::new();
        for number in self.number + 1..replicas {
            let found = call("get pods", pods.get_opt(&format!("{statefulset}-{number}"))).await?;
            higher.extend(found.and_then(|pod| Some((number, args_of(pod.spec.as_ref(), container)?))));
        }
        plan(self.number, wanted, &template, stays, &higher).map_err(|other| {
            CallError::TooEarly(format!(
                "a StatefulSet changes its pods from the highest number down, so {statefulset}-{other} has to get these flags first"
            ))
        })
    }

    /// Applies a plan; with `dry_run` only checks whether it could be applied.
    ///
    /// # Errors
    /// [`CallError::Conflict`]: another field manager owns a field.
    pub(super) async fn apply(&self, plan: &Plan, dry_run: bool) -> Result<(), CallError> {
        let PodEngine { statefulset, container, namespace, .. } = self.engine;
        let sets: Api<StatefulSet> = api(namespace.as_deref()).await.map_err(CallError::Other)?;
        let patch = json!({
            "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": statefulset },
            "spec": {
                "updateStrategy": { "rollingUpdate": { "partition": plan.partition } },
                "template": { "spec": { "containers": [{ "name": container, "args": plan.args }] } }
            }
        });
        let params = PatchParams { dry_run, ..PatchParams::apply(MANAGER) };
        let patch = Patch::Apply(patch);
        call("patch statefulsets", sets.patch(statefulset, &params, &patch)).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(seqs: i32) -> Vec<String> {
        vec![format!("--max-num-seqs={seqs}")]
    }

    #[test]
    fn pods_are_changed_from_the_highest_number_down() {
        let (old, new) = (words(64), words(32));
        // The highest pod goes first.
        assert_eq!(plan(2, &new, &old, false, &[]), Ok(Plan { args: new.clone(), partition: 2 }));
        // Then the next pod, but not the pod below it.
        let higher = [(2, new.clone())];
        assert_eq!(plan(1, &new, &new, false, &higher), Ok(Plan { args: new.clone(), partition: 1 }));
        let higher = [(1, old.clone()), (2, new.clone())];
        assert_eq!(plan(0, &new, &new, false, &higher), Err(1));
    }

    #[test]
    fn one_that_goes_back_leaves_the_higher_ones_as_they_are() {
        let (old, new) = (words(64), words(32));
        let higher = [(2, new.clone())];
        let back = Ok(Plan { args: new.clone(), partition: 2 });
        assert_eq!(plan(1, &old, &new, true, &higher), back);
        assert_eq!(plan(1, &old, &new, false, &higher), Err(2));
        // If the highest pod goes back, so does the template.
        assert_eq!(plan(2, &old, &new, true, &[]), Ok(Plan { args: old, partition: 2 }));
    }
}
