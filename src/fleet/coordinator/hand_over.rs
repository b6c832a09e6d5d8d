//! Gives the engines to the new gateway in an upgrade.
//!
//! As after a crash, the next gateway needs only the journal. So the engine tasks end in the middle
//! of a step, and the journal is unlocked when the last task has ended. A planned change, or an
//! engine that is being stopped for good, prevents the hand-over, because two gateways would act on
//! one engine. A gateway that loses the lead hands over in any case.
//!
//! Bounds: [`TASKS_MAX`] for the tasks to end.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::timeout;

use super::registry::Registry;
use crate::engine::engine_task::ManagedEngine;

/// Time in which the coordinator's tasks must notice that they should end.
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
        // Closed under the lock of the table, so that no engine is started afterwards.
        registry.close();
        std::mem::take(&mut table.managed)
    };
    end(registry, managed).await;
    Ok(())
}

/// Ends all tasks, even during a change, and closes the journal.
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
        // The task may be spawning a process that is not in the journal yet.
        let _ = engine.task.await;
    }
    registry.tasks.close();
    if timeout(TASKS_MAX, registry.tasks.wait()).await.is_err() {
        tracing::warn!("tasks of engines have not ended yet; they do nothing more");
    }
    registry.others.open_all();
    registry.close_journal();
}
