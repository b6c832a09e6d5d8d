//! Which arms of experiments the backends can serve now.
//!
//! An arm with a model waits until a ready backend serves it. An engine reports an adapter before
//! it is warm, so an adapter that is being loaded does not count.

use super::Core;
use sluice_core::base::BackendId;
use sluice_gateway::experiment::{ArmPlan, Experiment, ExperimentPlan, Phase};
use sluice_gateway::flow::RoutingTable;

impl Core {
    pub(crate) fn note_served_models(&self) {
        let table = self.flow.routing_table();
        for Experiment { plan, state } in self.learned.experiments.all() {
            for (number, arm) in plan.arms.iter().enumerate() {
                let Some((model, _)) = &arm.model else { continue };
                let mut ready = backends_of(arm, &table);
                ready.retain(|id| self.admission.is_any_in_rotation(&[*id]));
                let loading = self.loading.lock();
                let is_loading = |id: BackendId| loading.iter().any(|(other, name)| *other == id && *name == *model);
                let serves = |id: &BackendId| self.reported.serves(*id, model) != Some(false) && !is_loading(*id);
                let served = (!ready.is_empty()).then(|| ready.iter().any(serves));
                if state.note_served(number, served) && state.phase() != Phase::Stopped {
                    match state.is_waiting(number) {
                        true => tracing::warn!(
                            "experiment {}: the arm {} waits: no ready backend serves the model {model}",
                            plan.name,
                            arm.name
                        ),
                        false => tracing::info!(
                            "experiment {}: requests take part in the arm {}: a ready backend serves the model {model}",
                            plan.name,
                            arm.name
                        ),
                    }
                }
            }
        }
    }

    /// The first arm with a `pool` of which no backend is ready.
    pub(crate) fn arm_that_is_not_ready(&self, plan: &ExperimentPlan) -> Option<String> {
        let table = self.flow.routing_table();
        let not_ready = plan
            .arms
            .iter()
            .find(|arm| arm.pool.is_some() && !self.admission.is_any_in_rotation(&backends_of(arm, &table)));
        not_ready.map(|arm| arm.name.to_string())
    }
}

/// The backends that may serve an arm; empty if the arm sets neither a pool nor a model.
pub(crate) fn backends_of(arm: &ArmPlan, table: &RoutingTable) -> Vec<BackendId> {
    let of_pool = |pool: &usize| table.pools.get(*pool).map_or(&[][..], |pool| &pool.backends[..]);
    match (&arm.pool, &arm.model) {
        (Some(pool), _) => {
            let own = |position: &usize| arm.backends.is_empty() || arm.backends.contains(position);
            of_pool(pool).iter().enumerate().filter(|(at, _)| own(at)).map(|(_, id)| *id).collect()
        }
        (None, Some((model, _))) => {
            let pools = table.model(model).map_or(&[][..], |found| &found.route.pools[..]);
            pools.iter().flat_map(of_pool).copied().collect()
        }
        (None, None) => Vec::new(),
    }
}
