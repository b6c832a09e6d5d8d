//! What each step of an engine's life does. One future per step; how it ends says what comes next.
//!
//! A future may be dropped at any moment, because the engine died or somebody decided otherwise: whatever it began is
//! either without harm or found again by the step that follows. Every wait has a bound: the rules of `[fleet]`, the
//! patience for one question, or, for a start, progress in the log.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::preflight::{NotNow, may_go_now};
use super::scene::Scene;
use super::{adapters, engine};
use crate::driver::EngineFailure;
use crate::life::{Event, Step, Trouble};
use crate::{ReadyRules, wait_until_ready};
use sluice_core::vllm::failure::Retryable;
use sluice_gateway::pool::{Cordon, Phase};

/// Between two looks at something that has to come to an end.
const LOOK: Duration = Duration::from_millis(50);
/// Steps in which a fresh engine comes to all its slots.
const RAMP: [u32; 3] = [8, 4, 2];

/// Carries out `step`, to its end.
pub(super) async fn perform(scene: Arc<Scene>, step: Step) -> Event {
    let result = match step {
        Step::Adopt => ready(&scene).await,
        Step::Drain => drain(&scene).await,
        Step::Stop => stop(&scene).await,
        Step::Start => start(&scene).await,
        Step::Adapters => load_adapters(&scene).await,
        Step::Golden => engine::compare_golden(&scene).await,
        Step::WarmUp => engine::warm_up(&scene).await,
        Step::Ramp => ramp(&scene).await,
        Step::Serve => serve(&scene).await,
        Step::Backoff => backoff(&scene).await,
        Step::Off | Step::Hold => std::future::pending().await,
    };
    match result {
        Ok(()) => Event::Done,
        Err(trouble) => Event::Failed(trouble),
    }
}

/// The engine is there no more, or does nothing; for steps in which it should live. Never returns otherwise.
pub(super) async fn gone(scene: Arc<Scene>, step: Step) -> Event {
    let watched = matches!(step, Step::Drain | Step::Adapters | Step::Golden | Step::WarmUp) || step.in_rotation();
    if !watched {
        return std::future::pending().await;
    }
    tokio::select! {
        // It ran with these settings: whatever its log says last, they are not hopeless.
        exit = scene.driver.wait_for_exit() => {
            let why = scene.driver.diagnose(Some(exit)).to_string();
            Event::Gone(Trouble { why, hopeless: false })
        }
        why = standstill(&scene, step) => Event::Gone(Trouble { why, hopeless: false }),
    }
}

pub(super) fn trouble(failure: &EngineFailure) -> Trouble {
    Trouble { why: failure.to_string(), hopeless: failure.retry() == Retryable::Never }
}

fn plain(why: impl Into<String>) -> Trouble {
    Trouble { why: why.into(), hopeless: false }
}

/// Requests in flight that do not move, or a process that does not answer any more.
async fn standstill(scene: &Scene, step: Step) -> String {
    let hangs = scene.place().map_or(0, |place| place.hangs);
    let mut down_since = None;
    loop {
        sleep(LOOK * 4).await;
        let (Some(place), true) = (scene.place(), step.in_rotation()) else { continue };
        // Counted, not looked up: an ejection may be over before anybody looks.
        if place.hangs > hangs {
            return "it hangs: requests in flight and no progress".to_owned();
        }
        if place.phase != Phase::Down {
            down_since = None;
            continue;
        }
        let (since, stall) = (*down_since.get_or_insert_with(Instant::now), scene.spec.load().stall);
        if since.elapsed() >= stall {
            return format!("its /health has not answered for {:.0} s", stall.as_secs_f64());
        }
    }
}

/// Our own requests first, then whatever else the engine runs; then what its golden answers are now.
async fn drain(scene: &Arc<Scene>) -> Result<(), Trouble> {
    let limit = scene.spec.load().rules.drain;
    let emptied = async {
        loop {
            let running = scene.running();
            if running == 0 {
                break;
            }
            scene.detail(format!("{running} requests under way"));
            sleep(LOOK).await;
        }
        // Who is asked to end, with the gateway or for good, does not wait for clients that are not the gateway's.
        let leaving = scene.kept.lock().life.leaving;
        while !leaving && let Some(running) = engine::running(scene).await.filter(|running| *running > 0.0) {
            scene.detail(format!("{running:.0} requests of others under way"));
            sleep(LOOK).await;
        }
    };
    if timeout(limit, emptied).await.is_err() {
        let left = scene.running();
        let why = format!(
            "{left} requests were still running after {:.0} s (fleet.drain); try again later, raise it, or restart with --cut",
            limit.as_secs_f64()
        );
        return Err(plain(why));
    }
    still_spared(scene).await?;
    if !scene.kept.lock().life.leaving {
        engine::note_golden(scene).await;
    }
    Ok(())
}

/// Whoever was to stand in may have died while this one drained. A change that may cut is given up too.
async fn still_spared(scene: &Scene) -> Result<(), Trouble> {
    let asked = scene.kept.lock().life.change.as_ref().is_some_and(|change| !change.hold);
    if !asked {
        return Ok(());
    }
    match may_go_now(&scene.admission, &scene.reported, &scene.spec.load()).await {
        Err(why @ NotNow::NoStandIn(_)) => Err(Trouble { why: format!("while it drained: {why}"), hopeless: true }),
        _ => Ok(()),
    }
}

async fn stop(scene: &Arc<Scene>) -> Result<(), Trouble> {
    let stopped = scene.driver.stop(scene.spec.load().stop_rules()).await.map_err(|failure| trouble(&failure))?;
    let (name, orphans) = (Arc::clone(&scene.spec.load().name), stopped.orphans);
    if stopped.forced {
        tracing::warn!(backend = %name, orphans, "its engine did not end when it was asked to, and was killed");
    } else if orphans > 0 {
        tracing::info!(backend = %name, orphans, "processes that outlived their engine were ended");
    }
    if stopped.memory_back == Some(false) {
        tracing::warn!(backend = %name, "its device's memory is not back to what it was before");
    }
    scene.kept.lock().trace = None;
    Ok(())
}

async fn start(scene: &Arc<Scene>) -> Result<(), Trouble> {
    let settings = scene.settings();
    // Its adapters were judged when the change was asked for; see `load_adapters` for what becomes of them now.
    let notices = scene.driver.check(&settings).await.map_err(|failure| trouble(&failure))?;
    for notice in notices {
        tracing::warn!(backend = %scene.spec.load().name, "{notice}");
    }
    let trace = scene.driver.start(&settings).await.map_err(|failure| trouble(&failure))?;
    {
        let mut kept = scene.kept.lock();
        (kept.trace, kept.adopted) = (Some(trace), false);
    }
    if let Err(error) = scene.write().await {
        tracing::error!(backend = %scene.spec.load().name, %error, "the journal cannot be written");
    }
    ready(scene).await
}

async fn ready(scene: &Arc<Scene>) -> Result<(), Trouble> {
    let spec = scene.spec.load_full();
    let progress = scene.driver.progress();
    let shown = async {
        let Some(progress) = progress else { return std::future::pending().await };
        loop {
            scene.detail(progress.borrow().to_string());
            sleep(LOOK * 4).await;
        }
    };
    let rules = ReadyRules {
        answer: spec.patience,
        start_timeout_scale: spec.rules.start_timeout_scale,
        ..ReadyRules::default()
    };
    tokio::select! {
        ready = wait_until_ready(&*scene.driver, &spec.address, &spec.models, rules) => {
            ready.map(|_| scene.driver.mark_ready()).map_err(|failure| {
                let mut told = trouble(&failure);
                let log = scene.driver.log_path().map(|path| format!(" (log: {})", path.display()));
                told.why += &log.unwrap_or_default();
                told
            })
        }
        never = shown => never,
    }
}

/// Fails a change that somebody asked for; a restart after a crash goes on without them, because what else the engine serves
/// is worth having, and they are tried again while it serves.
async fn load_adapters(scene: &Arc<Scene>) -> Result<(), Trouble> {
    let loaded = adapters::load(scene).await;
    let asked = scene.kept.lock().life.change.as_ref().is_some_and(|change| change.failed.is_none());
    match loaded {
        Err(trouble) if !asked => {
            tracing::error!(backend = %scene.spec.load().name, "goes on without: {}", trouble.why);
            Ok(())
        }
        loaded => loaded,
    }
}

/// In rotation with a growing share of its slots.
async fn ramp(scene: &Scene) -> Result<(), Trouble> {
    let (spec, settings) = (scene.spec.load_full(), scene.settings());
    let full = scene.ceiling(&settings);
    let most = full.unwrap_or(u32::MAX).min(spec.slots);
    let quick = scene.kept.lock().adopted;
    scene.set_ceiling(if quick { full } else { Some((most / RAMP[0]).max(1)) });
    scene.renew();
    scene.set_cordon(Cordon::Open);
    for share in RAMP.iter().take(if quick { 0 } else { RAMP.len() }) {
        let slots = (most / share).max(1);
        scene.set_ceiling(Some(slots));
        scene.detail(format!("{slots} of {most} slots"));
        sleep(spec.rules.ramp / RAMP.len() as u32).await;
    }
    scene.set_ceiling(full);
    Ok(())
}

/// Ends once, when the settings that serve have not yet been known to be good and have now served long enough. Meanwhile,
/// and after, its adapters are those that should be there.
async fn serve(scene: &Arc<Scene>) -> Result<(), Trouble> {
    let settled = async {
        if scene.kept.lock().life.is_settled() {
            return std::future::pending().await;
        }
        sleep(scene.spec.load().rules.settle).await;
    };
    tokio::select! {
        () = settled => Ok(()),
        never = adapters::keep(scene) => never,
    }
}

async fn backoff(scene: &Scene) -> Result<(), Trouble> {
    let wait = Duration::from_millis(scene.kept.lock().life.backoff_ms(&scene.spec.load().life_rules()));
    scene.detail(format!("next attempt after {:.1} s", wait.as_secs_f64()));
    sleep(wait).await;
    Ok(())
}
