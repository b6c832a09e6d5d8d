//! Gives the engines of a gateway that is upgraded to the gateway that takes its place.
//!
//! What the journal says is all that the next gateway needs, as after a crash. So the tasks end where they are, and the journal is
//! unlocked when the last of them has ended. Two cases are refused, because two gateways would act on one engine: a planned
//! change, whose rollout would be cut in two, and an engine that is being stopped for good. A gateway that no longer leads refuses
//! neither: from then on it does nothing to engines.
//!
//! Bounds: [`TASKS_MAX`] for the tasks to end.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::timeout;

use super::registry::Registry;
use crate::engine::engine_task::ManagedEngine;

/// How long the tasks of the coordinator may take to notice that they end.
const TASKS_MAX: Duration = Duration::from_secs(5);

/// Why engines are not given away now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("engine {backend} is being {what}; try again when that has ended (sluice backend list)")]
pub struct EngineBusy {
    backend: String,
    what: &'static str,
}

/// Ends all tasks and closes the journal.
pub(super) async fn release(registry: &Registry) -> Result<(), EngineBusy> {
    let managed = {
        let mut table = registry.table();
        if let Some(stopping) = table.stopping.first() {
            return Err(EngineBusy { backend: stopping.name().to_owned(), what: "stopped" });
        }
        let changes = |engine: &ManagedEngine| engine.handle.context.state.lock().lifecycle.change.is_some();
        if let Some((name, _)) = table.managed.iter().find(|(_, engine)| changes(engine)) {
            return Err(EngineBusy { backend: name.clone(), what: "changed" });
        }
        // Under the lock of the table, so that no engine is started any more.
        registry.close();
        std::mem::take(&mut table.managed)
    };
    end(registry, managed).await;
    Ok(())
}

/// Ends all tasks where they are, also in the middle of a change, and closes the journal.
pub(super) async fn let_go(registry: &Registry) {
    let managed = {
        let mut table = registry.table();
        registry.close();
        std::mem::take(&mut table.managed)
    };
    end(registry, managed).await;
    registry.table().stopping.clear();
}

async fn end(registry: &Registry, managed: BTreeMap<String, ManagedEngine>) {
    for engine in managed.into_values() {
        engine.task.abort();
        // Its task writes the journal, and may be spawning a process, which the next line of the journal says.
        let _ = engine.task.await;
    }
    registry.tasks.close();
    if timeout(TASKS_MAX, registry.tasks.wait()).await.is_err() {
        tracing::warn!("tasks of engines have not ended yet; they do nothing more");
    }
    registry.others.open_all();
    registry.close_journal();
}
