//! Keeps one engine: carries its life out, step by step.
//!
//! Before a step begins it is in the journal and admission knows whether requests may go there. Then its effect runs, beside
//! a watch for the engine's end and for commands; whichever comes first decides the next step. A journal that cannot be
//! written keeps planned changes from beginning; healing goes on without, loudly.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::effects::{gone, perform};
use super::scene::{EngineSpec, Scene, now_ms};
use crate::driver::EngineSettings;
use crate::journal::Setup;
use crate::life::{Event, Refused, Step, Trouble};
use sluice_gateway::pool::Cordon;

/// What a keeper is told.
#[derive(Debug)]
pub(super) enum Command {
    /// Go over to these settings.
    Change { wish: Wish, answer: oneshot::Sender<Result<(), Refused>> },
    /// Try again where it holds.
    Enable { answer: oneshot::Sender<Result<(), Refused>> },
}

/// A planned change.
#[derive(Debug)]
pub(super) struct Wish {
    pub(super) id: u64,
    pub(super) to: Setup,
    /// Requests that outlast the drain are cut.
    pub(super) cut: bool,
    /// It goes on although nobody can stand in.
    pub(super) hold: bool,
}

/// Runs until the engine has left: `leave` has it drain, stop and end.
pub(super) async fn keep(scene: Arc<Scene>, mut commands: mpsc::Receiver<Command>, leave: CancellationToken) {
    loop {
        if leave.is_cancelled() && !leaving(&scene) {
            scene.kept.lock().life.leave();
        }
        let step = scene.step();
        let mut next = enter(&scene, step).await;
        if leaving(&scene) && matches!(step, Step::Off | Step::Hold) {
            return;
        }
        let mut effect = std::pin::pin!(perform(Arc::clone(&scene), step));
        let mut end = std::pin::pin!(gone(Arc::clone(&scene), step));
        while next.is_none() && scene.step() == step {
            tokio::select! {
                event = &mut effect => next = Some(event),
                event = &mut end => next = Some(event),
                Some(command) = commands.recv() => obey(&scene, command),
                () = leave.cancelled(), if !leaving(&scene) => {
                    scene.kept.lock().life.leave();
                    // A drain that was under way is another one now.
                    break;
                }
            }
        }
        if let Some(event) = next {
            take(&scene, step, event);
        }
    }
}

fn leaving(scene: &Scene) -> bool {
    scene.kept.lock().life.leaving
}

/// The step begins: on disk, in admission, in what is shown. An event when it cannot begin.
async fn enter(scene: &Arc<Scene>, step: Step) -> Option<Event> {
    let spec = scene.spec.load_full();
    let (leaving, settings) = {
        let mut kept = scene.kept.lock();
        (kept.since, kept.detail) = (Instant::now(), String::new());
        (kept.life.leaving, kept.life.wanted.settings.clone())
    };
    tracing::info!(backend = %spec.name, step = step.label(), settings = %shown(&settings), "engine");
    if let Err(error) = scene.write().await {
        tracing::error!(backend = %spec.name, %error, "the journal cannot be written; free or mount fleet.state");
        if step == Step::Drain && !leaving {
            let why = format!("the journal cannot be written: {error}");
            return Some(Event::Failed(Trouble { why, hopeless: false }));
        }
    }
    if leaving {
        // Its place may be another's by now; who let it go has closed it.
        return None;
    }
    let cordon = match step {
        Step::Drain => Cordon::Draining,
        _ if !step.is_coming() => Cordon::Away,
        // Opens itself, together with a bound on slots.
        Step::Ramp => return None,
        // Somebody is about to let it go.
        Step::Serve if scene.kept.lock().spared => Cordon::Draining,
        Step::Serve => Cordon::Open,
        _ => Cordon::Coming,
    };
    if step == Step::Serve {
        scene.set_ceiling(scene.ceiling(&settings));
    }
    scene.set_cordon(cordon);
    None
}

fn take(scene: &Scene, step: Step, event: Event) {
    let spec = scene.spec.load_full();
    if let Event::Failed(trouble) | Event::Gone(trouble) = &event {
        tracing::warn!(backend = %spec.name, step = step.label(), "engine: {}", trouble.why);
        // At once: the next step may take a while to begin.
        if step.in_rotation() && !leaving(scene) {
            scene.set_cordon(Cordon::Coming);
        }
    }
    let mut kept = scene.kept.lock();
    let changing = kept.life.change.is_some();
    kept.life.on(event, &spec.life_rules(), now_ms());
    if let Some(ended) = kept.life.ended.as_ref().filter(|_| changing && kept.life.change.is_none()) {
        tracing::info!(backend = %spec.name, change = ended.id, outcome = ?ended.outcome, "change ended");
    }
}

fn obey(scene: &Arc<Scene>, command: Command) {
    match command {
        Command::Change { wish: Wish { id, to, cut, hold }, answer } => {
            let mut kept = scene.kept.lock();
            let answered = kept.life.change(id, to, cut);
            if answered.is_ok()
                && let Some(change) = kept.life.change.as_mut()
            {
                change.hold = hold;
                kept.waits = None;
            }
            // Who asked may have gone away; the change goes on.
            let _ = answer.send(answered);
        }
        Command::Enable { answer } => {
            let _ = answer.send(scene.kept.lock().life.enable());
        }
    }
}

/// The configuration says something else about what no restart is needed for.
pub(super) fn describe(scene: &Scene, spec: EngineSpec) {
    let before = scene.spec.swap(Arc::new(spec));
    let now = scene.spec.load_full();
    if before.adapters == now.adapters {
        return;
    }
    let listed = |name: &String| now.adapters.iter().any(|(other, _)| other == name);
    let mut kept = scene.kept.lock();
    kept.unwanted.retain(|name| !listed(name));
    kept.unwanted.extend(before.adapters.iter().map(|(name, _)| name.clone()).filter(|name| !listed(name)));
    scene.adapters.notify_one();
}

/// Settings on one line.
pub(super) fn shown(settings: &EngineSettings) -> String {
    let word = |value: &sluice_gateway::config::ArgValue| match serde_json::to_string(value) {
        Ok(text) => text.trim_matches('"').to_owned(),
        Err(_) => "?".to_owned(),
    };
    let all: Vec<String> = settings.args.iter().map(|(name, value)| format!("{name}={}", word(value))).collect();
    all.join(" ")
}
