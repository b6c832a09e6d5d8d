//! The task of one engine: carries out the life cycle, step by step.
//!
//! Each step is written to the journal and shown to admission before it begins. Then the effect
//! runs, while the task also watches for the loss of the engine and for commands. The first of
//! these events decides the next step. If the journal cannot be written, no planned change begins;
//! restarts after a crash continue and log an error. When the gateway loses the lead, the task ends
//! where it is, as if the process had been killed.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::context::{EngineContext, now_ms};
use super::effects::{engine_lost, perform};
use super::journal::Setup;
use super::lifecycle::{ChangeRefused, ChangeRequest, Event, Lifecycle, Step, StepFailure};
use super::recover::recover;
use super::view::{flag_line, taken_back};
use sluice_gateway::pool::Cordon;

/// Commands that may queue for one engine task; each takes only moments.
const COMMANDS: usize = 16;

type CommandResult = Result<(), ChangeRefused>;

/// A change of the engine's lifecycle.
type Act = Box<dyn FnOnce(&mut Lifecycle<Setup>) -> CommandResult + Send>;

/// A command to an engine task, with the channel for the result.
struct Command {
    act: Act,
    result: oneshot::Sender<CommandResult>,
}

/// One engine, and the channel to the task.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle {
    pub(crate) context: Arc<EngineContext>,
    commands: mpsc::Sender<Command>,
}

impl EngineHandle {
    /// Starts a planned change. Returns once it has begun.
    ///
    /// # Errors
    /// The change does not fit the present step, or the engine is being shut down.
    pub(crate) async fn change(&self, request: ChangeRequest<Setup>) -> CommandResult {
        self.send(|lifecycle| lifecycle.change(request)).await
    }

    /// Retries now, if the engine is in `Hold` or waits for the next attempt.
    ///
    /// # Errors
    /// The engine is being shut down.
    pub(crate) async fn enable(&self) -> CommandResult {
        self.send(Lifecycle::enable).await
    }

    /// Begins to drain the engine, which then sleeps or is stopped, because it is not wanted now.
    ///
    /// # Errors
    /// A rest does not fit the present step, or the engine is being shut down.
    pub(crate) async fn rest(&self) -> CommandResult {
        let context = &self.context;
        let sleeps = context.driver().sleeps(&context.settings());
        self.send(move |lifecycle| lifecycle.rest(sleeps)).await
    }

    /// Starts the engine again, or ends the drain.
    ///
    /// # Errors
    /// The task has ended.
    pub(crate) async fn wake(&self) -> CommandResult {
        self.send(|lifecycle| {
            lifecycle.wake();
            Ok(())
        })
        .await
    }

    async fn send(&self, act: impl FnOnce(&mut Lifecycle<Setup>) -> CommandResult + Send + 'static) -> CommandResult {
        let (sender, result) = oneshot::channel();
        let command = Command { act: Box::new(act), result: sender };
        self.commands.send(command).await.map_err(|_| ChangeRefused::ShuttingDown)?;
        result.await.map_err(|_| ChangeRefused::ShuttingDown)?
    }
}

#[derive(Debug)]
pub(crate) struct ManagedEngine {
    pub(crate) handle: EngineHandle,
    /// Cancel it to make the task drain and stop the engine, and end.
    pub(crate) leave: CancellationToken,
    pub(crate) task: JoinHandle<()>,
}

/// Starts the task of an engine, which first looks for an engine of an earlier gateway.
pub(crate) fn spawn(context: Arc<EngineContext>) -> ManagedEngine {
    let (commands, inbox) = mpsc::channel(COMMANDS);
    let leave = CancellationToken::new();
    let (engine, leaves) = (Arc::clone(&context), leave.clone());
    let task = tokio::spawn(async move {
        let runs = async {
            recover(&engine).await;
            run_engine(Arc::clone(&engine), inbox, leaves).await;
        };
        tokio::select! {
            biased;
            () = engine.lead.lost() => {}
            () = runs => {}
        }
    });
    ManagedEngine { handle: EngineHandle { context, commands }, leave, task }
}

/// Runs until the engine has been shut down at the request of `leave`.
async fn run_engine(context: Arc<EngineContext>, mut commands: mpsc::Receiver<Command>, leave: CancellationToken) {
    loop {
        if leave.is_cancelled() && !context.is_leaving() {
            context.state.lock().lifecycle.leave();
        }
        let step = context.step();
        let mut next = enter(&context, step).await;
        if context.is_leaving() && matches!(step, Step::Off | Step::Hold) {
            return;
        }
        let mut effect = std::pin::pin!(perform(Arc::clone(&context), step));
        let mut lost = std::pin::pin!(engine_lost(Arc::clone(&context), step));
        while next.is_none() && context.step() == step {
            tokio::select! {
                event = &mut effect => next = Some(event),
                event = &mut lost => next = Some(event),
                Some(Command { act, result }) = commands.recv() => {
                    // The command takes effect even if the sender no longer waits for the result.
                    let _ = result.send(act(&mut context.state.lock().lifecycle));
                }
                () = leave.cancelled(), if !context.is_leaving() => {
                    context.state.lock().lifecycle.leave();
                    // A drain that is under way begins again, because a shutdown has other rules
                    // for drains.
                    break;
                }
            }
        }
        if let Some(event) = next {
            advance(&context, step, event);
        }
    }
}

/// Begins a step: in the journal, in admission, in the view. Returns an event if it cannot begin.
async fn enter(context: &Arc<EngineContext>, step: Step) -> Option<Event> {
    let name = context.spec().name.clone();
    let (leaving, settings, traced) = {
        let mut state = context.state.lock();
        (state.since, state.detail) = (Instant::now(), String::new());
        (state.lifecycle.leaving, state.lifecycle.wanted.settings.clone(), state.trace.is_some())
    };
    // Every start is preceded by a stop. If no engine is known to run, the stop is not logged.
    if step != Step::Stop || traced {
        tracing::info!(backend = %name, step = step.label(), settings = %flag_line(&settings), "engine");
    }
    if let Err(error) = context.write_journal().await {
        tracing::error!(backend = %name, %error, "the journal cannot be written; free or mount fleet.state");
        if step == Step::Drain && !leaving {
            return Some(Event::Failed(StepFailure::temporary(format!("the journal cannot be written: {error}"))));
        }
    }
    let cordon = context.state.lock().lifecycle.cordon()?;
    if step == Step::Serve {
        context.set_ceiling(context.ceiling(&settings));
    }
    context.set_cordon(cordon);
    None
}

fn advance(context: &EngineContext, step: Step, event: Event) {
    let spec = context.spec();
    if let Event::Failed(failure) | Event::EngineLost(failure) = &event {
        tracing::warn!(backend = %spec.name, step = step.label(), "engine: {}", failure.why);
        // The cordon is set now, since the next step may take a while to begin.
        if step.in_rotation() && !context.is_leaving() {
            context.set_cordon(Cordon::Starting);
        }
    }
    let mut state = context.state.lock();
    state.history.ended(step, &event);
    let changing = state.lifecycle.change.is_some();
    let before = state.lifecycle.taken_back.clone();
    let did_not_start =
        matches!(step, Step::Start | Step::Adapters | Step::Golden | Step::WarmUp) && event != Event::Done;
    state.lifecycle.on(event, &spec.restart_rules(), now_ms());
    if let Some(ended) = state.lifecycle.ended.as_ref().filter(|_| changing && state.lifecycle.change.is_none()) {
        tracing::info!(backend = %spec.name, change = ended.id, outcome = ?ended.outcome, "change ended");
    }
    if state.lifecycle.taken_back != before
        && let Some(text) = taken_back(&state.lifecycle, &spec.configured)
    {
        let change = state.lifecycle.taken_back.as_ref().map(|taken_back| taken_back.id);
        tracing::warn!(backend = %spec.name, change, "a change was taken back: {text}");
    }
    let next_try = state.lifecycle.next_try_ms(&spec.restart_rules()).map(Duration::from_millis);
    drop(state);
    if did_not_start {
        context.start_failed(next_try);
    }
}
