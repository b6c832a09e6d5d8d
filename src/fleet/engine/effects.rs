//! What each step of an engine's life does. One future per step; how it ends says what comes next.
//!
//! A future may be dropped at any moment, because the engine died or somebody decided otherwise: whatever it began is
//! either without harm or found again by the step that follows. Every wait has a bound: the rules of `[fleet]`, the
//! patience for one question, or, for a start, progress in the log.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::context::EngineContext;
use super::lifecycle::{Event, Step, StepFailure};
use super::preflight::{RestartBlocked, may_go_now};
use super::{adapters, client};
use crate::driver::EngineFailure;
use crate::{ReadyRules, wait_until_ready};
use sluice_core::vllm::failure::Retryable;
use sluice_gateway::pool::{Cordon, Phase};

/// Between two looks at something that has to come to an end.
const LOOK: Duration = Duration::from_millis(50);
/// Steps in which a fresh engine comes to all its slots.
const RAMP: [u32; 3] = [8, 4, 2];

/// Carries out `step`, to its end.
pub(super) async fn perform(context: Arc<EngineContext>, step: Step) -> Event {
    let result = match step {
        Step::Adopt => ready(&context).await,
        Step::Drain => drain(&context).await,
        Step::Stop => stop(&context).await,
        Step::Start => start(&context).await,
        Step::Adapters => load_adapters(&context).await,
        Step::Golden => client::compare_golden(&context).await,
        Step::WarmUp => client::warm_up(&context).await,
        Step::Ramp => ramp(&context).await,
        Step::Serve => serve(&context).await,
        Step::Backoff => backoff(&context).await,
        Step::Off | Step::Hold => std::future::pending().await,
    };
    match result {
        Ok(()) => Event::Done,
        Err(failure) => Event::Failed(failure),
    }
}

/// The engine is there no more, or does nothing; for steps in which it should live. Never returns otherwise.
pub(super) async fn gone(context: Arc<EngineContext>, step: Step) -> Event {
    let watched = matches!(step, Step::Drain | Step::Adapters | Step::Golden | Step::WarmUp) || step.in_rotation();
    if !watched {
        return std::future::pending().await;
    }
    tokio::select! {
        // It ran with these settings: whatever its log says last, they are not permanent.
        exit = context.driver.wait_for_exit() => {
            let why = context.driver.diagnose(Some(exit)).to_string();
            Event::Gone(StepFailure { why, permanent: false })
        }
        why = standstill(&context, step) => Event::Gone(StepFailure { why, permanent: false }),
    }
}

impl From<EngineFailure> for StepFailure {
    fn from(failure: EngineFailure) -> Self {
        Self { why: failure.to_string(), permanent: failure.retry() == Retryable::Never }
    }
}

/// Requests in flight that do not move, or a process that does not answer any more.
async fn standstill(context: &EngineContext, step: Step) -> String {
    let hangs = context.place().map_or(0, |place| place.hangs);
    let mut down_since = None;
    loop {
        sleep(LOOK * 4).await;
        let (Some(place), true) = (context.place(), step.in_rotation()) else { continue };
        // Counted, not looked up: an ejection may be over before anybody looks.
        if place.hangs > hangs {
            return "it hangs: requests in flight and no progress".to_owned();
        }
        if place.phase != Phase::Down {
            down_since = None;
            continue;
        }
        let (since, stall) = (*down_since.get_or_insert_with(Instant::now), context.spec.load().stall);
        if since.elapsed() >= stall {
            return format!("its /health has not answered for {:.0} s", stall.as_secs_f64());
        }
    }
}

/// Our own requests first, then whatever else the engine runs; then what its golden answers are now.
async fn drain(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let limit = context.spec.load().rules.drain;
    let emptied = async {
        loop {
            let running = context.running();
            if running == 0 {
                break;
            }
            context.detail(format!("{running} requests under way"));
            sleep(LOOK).await;
        }
        // Who is asked to end, with the gateway or for good, does not wait for clients that are not the gateway's.
        let leaving = context.state.lock().life.leaving;
        while !leaving && let Some(running) = client::running(context).await.filter(|running| *running > 0.0) {
            context.detail(format!("{running:.0} requests of others under way"));
            sleep(LOOK).await;
        }
    };
    if timeout(limit, emptied).await.is_err() {
        let left = context.running();
        let why = format!(
            "{left} requests were still running after {:.0} s (fleet.drain); try again later, raise it, or restart with --cut",
            limit.as_secs_f64()
        );
        return Err(StepFailure::temporary(why));
    }
    still_spared(context).await?;
    if !context.state.lock().life.leaving {
        client::note_golden(context).await;
    }
    Ok(())
}

/// Whoever was to stand in may have died while this one drained. A change that may cut is given up too.
async fn still_spared(context: &EngineContext) -> Result<(), StepFailure> {
    let asked = context.state.lock().life.change.as_ref().is_some_and(|change| !change.hold);
    if !asked {
        return Ok(());
    }
    match may_go_now(&context.admission, &context.reported, &context.spec.load()).await {
        Err(why @ RestartBlocked::NoStandIn(_)) => {
            Err(StepFailure { why: format!("while it drained: {why}"), permanent: true })
        }
        _ => Ok(()),
    }
}

async fn stop(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let stopped = context.driver.stop(context.spec.load().stop_rules()).await?;
    let (name, orphans) = (Arc::clone(&context.spec.load().name), stopped.orphans);
    if stopped.forced {
        tracing::warn!(backend = %name, orphans, "its engine did not end when it was asked to, and was killed");
    } else if orphans > 0 {
        tracing::info!(backend = %name, orphans, "processes that outlived their engine were ended");
    }
    if stopped.memory_back == Some(false) {
        tracing::warn!(backend = %name, "its device's memory is not back to what it was before");
    }
    context.state.lock().trace = None;
    Ok(())
}

async fn start(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let settings = context.settings();
    // Its adapters were judged when the change was asked for; see `load_adapters` for what becomes of them now.
    let notices = context.driver.check(&settings).await?;
    for notice in notices {
        tracing::warn!(backend = %context.spec.load().name, "{notice}");
    }
    let trace = context.driver.start(&settings).await?;
    {
        let mut state = context.state.lock();
        (state.trace, state.adopted) = (Some(trace), false);
    }
    if let Err(error) = context.write().await {
        tracing::error!(backend = %context.spec.load().name, %error, "the journal cannot be written");
    }
    ready(context).await
}

async fn ready(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let spec = context.spec.load_full();
    let progress = context.driver.progress();
    let shown = async {
        let Some(progress) = progress else { return std::future::pending().await };
        loop {
            context.detail(progress.borrow().to_string());
            sleep(LOOK * 4).await;
        }
    };
    let rules = ReadyRules {
        answer: spec.request_timeout,
        start_timeout_scale: spec.rules.start_timeout_scale,
        ..ReadyRules::default()
    };
    tokio::select! {
        ready = wait_until_ready(&*context.driver, &spec.address, &spec.models, rules) => {
            ready.map(|_| context.driver.mark_ready()).map_err(|failure| {
                let mut told = StepFailure::from(failure);
                let log = context.driver.log_path().map(|path| format!(" (log: {})", path.display()));
                told.why += &log.unwrap_or_default();
                told
            })
        }
        never = shown => never,
    }
}

/// Fails a change that somebody asked for; a restart after a crash goes on without them, because what else the engine serves
/// is worth having, and they are tried again while it serves.
async fn load_adapters(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let loaded = adapters::load(context).await;
    let asked = context.state.lock().life.change.as_ref().is_some_and(|change| change.failed.is_none());
    match loaded {
        Err(failure) if !asked => {
            tracing::error!(backend = %context.spec.load().name, "goes on without: {}", failure.why);
            Ok(())
        }
        loaded => loaded,
    }
}

/// In rotation with a growing share of its slots.
async fn ramp(context: &EngineContext) -> Result<(), StepFailure> {
    let (spec, settings) = (context.spec.load_full(), context.settings());
    let full = context.ceiling(&settings);
    let most = full.unwrap_or(u32::MAX).min(spec.slots);
    let quick = context.state.lock().adopted;
    context.set_ceiling(if quick { full } else { Some((most / RAMP[0]).max(1)) });
    context.renew();
    context.set_cordon(Cordon::Open);
    for share in RAMP.iter().take(if quick { 0 } else { RAMP.len() }) {
        let slots = (most / share).max(1);
        context.set_ceiling(Some(slots));
        context.detail(format!("{slots} of {most} slots"));
        sleep(spec.rules.ramp / RAMP.len() as u32).await;
    }
    context.set_ceiling(full);
    Ok(())
}

/// Ends once, when the settings that serve have not yet been known to be good and have now served long enough. Meanwhile,
/// and after, its adapters are those that should be there.
async fn serve(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let settled = async {
        if context.state.lock().life.is_settled() {
            return std::future::pending().await;
        }
        sleep(context.spec.load().rules.settle).await;
    };
    tokio::select! {
        () = settled => Ok(()),
        never = adapters::keep(context) => never,
    }
}

async fn backoff(context: &EngineContext) -> Result<(), StepFailure> {
    let wait = Duration::from_millis(context.state.lock().life.backoff_ms(&context.spec.load().life_rules()));
    context.detail(format!("next attempt after {:.1} s", wait.as_secs_f64()));
    sleep(wait).await;
    Ok(())
}
