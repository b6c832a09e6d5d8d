//! Keeps one engine: carries its life out, step by step.
//!
//! Before a step begins it is in the journal and admission knows whether requests may go there. Then its effect runs, beside
//! a watch for the engine's end and for commands; whichever comes first decides the next step. A journal that cannot be
//! written keeps planned changes from beginning; healing goes on without, loudly.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::context::{EngineContext, EngineSpec, now_ms};
use super::effects::{gone, perform};
use super::journal::Setup;
use super::lifecycle::{ChangeRefused, Event, Step, StepFailure};
use crate::driver::EngineSettings;
use sluice_gateway::pool::Cordon;

/// What a keeper is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Go over to these settings.
    Change { wish: ChangeRequest, answer: oneshot::Sender<Result<(), ChangeRefused>> },
    /// Try again where it holds.
    Enable { answer: oneshot::Sender<Result<(), ChangeRefused>> },
}

/// A planned change.
#[derive(Debug)]
pub(crate) struct ChangeRequest {
    pub(crate) id: u64,
    pub(crate) to: Setup,
    /// Requests that outlast the drain are cut.
    pub(crate) cut: bool,
    /// It goes on although nobody can stand in.
    pub(crate) hold: bool,
}

/// Runs until the engine has left: `leave` has it drain, stop and end.
pub(crate) async fn run_engine(
    context: Arc<EngineContext>,
    mut commands: mpsc::Receiver<Command>,
    leave: CancellationToken,
) {
    loop {
        if leave.is_cancelled() && !leaving(&context) {
            context.state.lock().life.leave();
        }
        let step = context.step();
        let mut next = enter(&context, step).await;
        if leaving(&context) && matches!(step, Step::Off | Step::Hold) {
            return;
        }
        let mut effect = std::pin::pin!(perform(Arc::clone(&context), step));
        let mut end = std::pin::pin!(gone(Arc::clone(&context), step));
        while next.is_none() && context.step() == step {
            tokio::select! {
                event = &mut effect => next = Some(event),
                event = &mut end => next = Some(event),
                Some(command) = commands.recv() => obey(&context, command),
                () = leave.cancelled(), if !leaving(&context) => {
                    context.state.lock().life.leave();
                    // A drain that was under way is another one now.
                    break;
                }
            }
        }
        if let Some(event) = next {
            take(&context, step, event);
        }
    }
}

fn leaving(context: &EngineContext) -> bool {
    context.state.lock().life.leaving
}

/// The step begins: on disk, in admission, in what is shown. An event when it cannot begin.
async fn enter(context: &Arc<EngineContext>, step: Step) -> Option<Event> {
    let spec = context.spec.load_full();
    let (leaving, settings) = {
        let mut state = context.state.lock();
        (state.since, state.detail) = (Instant::now(), String::new());
        (state.life.leaving, state.life.wanted.settings.clone())
    };
    tracing::info!(backend = %spec.name, step = step.label(), settings = %shown(&settings), "engine");
    if let Err(error) = context.write().await {
        tracing::error!(backend = %spec.name, %error, "the journal cannot be written; free or mount fleet.state");
        if step == Step::Drain && !leaving {
            let why = format!("the journal cannot be written: {error}");
            return Some(Event::Failed(StepFailure { why, permanent: false }));
        }
    }
    if leaving {
        // Its place may be another's by now; who let it go has closed it.
        return None;
    }
    let cordon = match step {
        Step::Drain => Cordon::Draining,
        _ if !step.is_coming() => Cordon::Down,
        // Opens itself, together with a bound on slots.
        Step::Ramp => return None,
        // Somebody is about to let it go.
        Step::Serve if context.state.lock().spared => Cordon::Draining,
        Step::Serve => Cordon::Open,
        _ => Cordon::Starting,
    };
    if step == Step::Serve {
        context.set_ceiling(context.ceiling(&settings));
    }
    context.set_cordon(cordon);
    None
}

fn take(context: &EngineContext, step: Step, event: Event) {
    let spec = context.spec.load_full();
    if let Event::Failed(failure) | Event::Gone(failure) = &event {
        tracing::warn!(backend = %spec.name, step = step.label(), "engine: {}", failure.why);
        // At once: the next step may take a while to begin.
        if step.in_rotation() && !leaving(context) {
            context.set_cordon(Cordon::Starting);
        }
    }
    let mut state = context.state.lock();
    let changing = state.life.change.is_some();
    state.life.on(event, &spec.life_rules(), now_ms());
    if let Some(ended) = state.life.ended.as_ref().filter(|_| changing && state.life.change.is_none()) {
        tracing::info!(backend = %spec.name, change = ended.id, outcome = ?ended.outcome, "change ended");
    }
}

fn obey(context: &Arc<EngineContext>, command: Command) {
    match command {
        Command::Change { wish: ChangeRequest { id, to, cut, hold }, answer } => {
            let mut state = context.state.lock();
            let answered = state.life.change(id, to, cut);
            if answered.is_ok()
                && let Some(change) = state.life.change.as_mut()
            {
                change.hold = hold;
                state.waits = None;
            }
            // Who asked may have gone away; the change goes on.
            let _ = answer.send(answered);
        }
        Command::Enable { answer } => {
            let _ = answer.send(context.state.lock().life.enable());
        }
    }
}

/// The configuration says something else about what no restart is needed for.
pub(crate) fn describe(context: &EngineContext, spec: EngineSpec) {
    let before = context.spec.swap(Arc::new(spec));
    let now = context.spec.load_full();
    if before.adapters == now.adapters {
        return;
    }
    let listed = |name: &String| now.adapters.iter().any(|(other, _)| other == name);
    let mut state = context.state.lock();
    state.unwanted.retain(|name| !listed(name));
    state.unwanted.extend(before.adapters.iter().map(|(name, _)| name.clone()).filter(|name| !listed(name)));
    context.adapters.notify_one();
}

/// Settings on one line.
pub(crate) fn shown(settings: &EngineSettings) -> String {
    let word = |value: &sluice_gateway::config::ArgValue| match serde_json::to_string(value) {
        Ok(text) => text.trim_matches('"').to_owned(),
        Err(_) => "?".to_owned(),
    };
    let all: Vec<String> = settings.args.iter().map(|(name, value)| format!("{name}={}", word(value))).collect();
    all.join(" ")
}
