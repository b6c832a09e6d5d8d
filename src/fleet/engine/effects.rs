//! The effect of each step of an engine's life cycle: one future per step, whose result decides the
//! next.
//!
//! A future may be dropped at any moment, because the engine was lost or a command arrived.
//! Anything that the future began is harmless, or the next step finds it. Every wait is limited by
//! `[fleet]`, by the limit of one request, or during a start by [`ReadyRules`]. Only a drain at the
//! end of a turn (`launch.share`) waits for as long as the requests run.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::context::EngineContext;
use super::lifecycle::{Event, RestartBlocked, Step, StepFailure};
use super::preflight::check_replacement;
use super::spec::EngineSpec;
use super::{adapters, checks, client, kept, sleep_mode};
use crate::driver::{EngineFailure, StopRules, Stopped};
use crate::{ReadyRules, wait_until_ready};
use sluice_core::vllm::failure::Retryable;
use sluice_gateway::pool::{Cordon, Irreplaceable, Phase};

/// Pause between two checks of a condition that ends a step.
const POLL: Duration = Duration::from_millis(50);
/// Pause between two checks of an engine's health, or two updates of a progress text.
const WATCH: Duration = Duration::from_millis(200);
/// Limit in a fast shutdown from SIGTERM to SIGKILL, and again from SIGKILL to the end of the wait.
const FAST_STOP_GRACE: Duration = Duration::from_secs(2);
/// A fresh engine gets first an eighth, then a quarter, then half of the slots.
const RAMP: [u32; 3] = [8, 4, 2];

pub(super) async fn perform(context: Arc<EngineContext>, step: Step) -> Event {
    let result = match step {
        Step::Adopt => ready(&context).await,
        Step::Drain => drain(&context).await,
        Step::Stop => stop(&context).await,
        Step::Start => start(&context).await,
        Step::Adapters => load_adapters(&context).await,
        Step::Golden => checks::compare_golden(&context).await,
        Step::WarmUp => checks::warm_up(&context).await,
        Step::Ramp => ramp(&context).await,
        Step::Serve => serve(&context).await,
        Step::Sleep => fall_asleep(&context).await,
        Step::Asleep => asleep(&context).await,
        Step::Wake => kept::wake_up(&context).await,
        Step::Backoff => backoff(&context).await,
        Step::Recover | Step::Off | Step::Idle | Step::Hold => std::future::pending().await,
    };
    match result {
        Ok(()) => Event::Done,
        Err(failure) => Event::Failed(failure),
    }
}

/// Returns when an engine that should run has ended or hangs; never in a step without an engine.
pub(super) async fn engine_lost(context: Arc<EngineContext>, step: Step) -> Event {
    let before_service = matches!(step, Step::Adapters | Step::Golden | Step::WarmUp);
    let at_rest = matches!(step, Step::Sleep | Step::Asleep | Step::Wake);
    let watched = step == Step::Drain || before_service || at_rest || step.in_rotation();
    if !watched {
        return std::future::pending().await;
    }
    let driver = context.driver();
    let why = tokio::select! {
        exit = driver.wait_for_exit() => driver.diagnose(Some(exit)).to_string(),
        why = hung(&context, step) => why,
    };
    // The engine ran with these settings, so a retry may work, whatever the log says last.
    Event::EngineLost(StepFailure::temporary(why))
}

impl From<EngineFailure> for StepFailure {
    fn from(failure: EngineFailure) -> Self {
        Self { why: failure.to_string(), permanent: failure.retry() == Retryable::Never }
    }
}

/// Returns the reason when requests in flight make no progress, the engine was down for
/// `health.stall`, or the pod is being deleted.
async fn hung(context: &EngineContext, step: Step) -> String {
    let hangs = context.backend().map_or(0, |backend| backend.hangs);
    let mut down_since = None;
    loop {
        sleep(WATCH).await;
        if context.spec().leaving {
            return "its pod is being deleted".to_owned();
        }
        let (Some(backend), true) = (context.backend(), step.in_rotation()) else { continue };
        // A counter is compared, because an ejection may begin and end between two checks.
        if backend.hangs > hangs {
            return "it hangs: requests in flight and no progress".to_owned();
        }
        if backend.phase != Phase::Down {
            down_since = None;
            continue;
        }
        let (since, stall) = (*down_since.get_or_insert_with(Instant::now), context.spec().stall);
        if since.elapsed() >= stall {
            return format!("its /health has not responded for {:.0} s", stall.as_secs_f64());
        }
    }
}

/// Waits for this gateway's requests, then for requests of other gateways, then for requests of
/// other clients. Finally records golden prompts.
async fn drain(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let leaving = context.is_leaving();
    // If such a drain were given up, the engine could take long requests again and again, while
    // the requests of another engine wait.
    let ends_turn = !leaving && context.spec().share().is_some() && context.state.lock().lifecycle.resting;
    let limit = (!ends_turn).then(|| context.spec().rules.drain);
    let emptied = async {
        loop {
            let running = context.running();
            if running == 0 {
                break;
            }
            context.set_detail(context.spec().draining(running, limit));
            sleep(POLL).await;
        }
        // A shutdown waits only for this gateway's requests.
        while !leaving && !context.others.have_left(&context.spec().name) {
            context.set_detail("other gateways still use it".to_owned());
            sleep(POLL).await;
        }
        while !leaving && let Some(running) = client::running_requests(context).await.filter(|running| *running > 0.0) {
            context.set_detail(format!("{running:.0} requests of other clients in flight"));
            sleep(POLL).await;
        }
    };
    let emptied = async {
        tokio::select! {
            emptied = timeout(limit.unwrap_or(Duration::MAX), emptied) => emptied,
            () = context.fast_shutdown.cancelled(), if leaving => Ok(()),
        }
    };
    if emptied.await.is_err() {
        let left = match context.running() {
            0 => "requests of other gateways or clients may still be running".to_owned(),
            running => format!("{running} requests were still running"),
        };
        return Err(StepFailure::temporary(format!(
            "{left} after {:.0} s (fleet.drain); try again later, raise it, or restart with --cut",
            limit.unwrap_or_default().as_secs_f64()
        )));
    }
    confirm_replacement(context).await?;
    if !leaving {
        checks::record_golden(context).await;
    }
    Ok(())
}

/// Checks again that other backends serve the models, because they may have failed during the
/// drain. Otherwise even a change with `cut` is given up.
async fn confirm_replacement(context: &EngineContext) -> Result<(), StepFailure> {
    let required = context.state.lock().lifecycle.change.as_ref().is_some_and(|change| !change.hold);
    if !required {
        return Ok(());
    }
    match check_replacement(&context.admission, &context.reported, &context.spec()).await {
        Err(blocked @ RestartBlocked::Irreplaceable(Irreplaceable::Unserved(_))) => {
            Err(StepFailure { why: format!("while it drained: {blocked}"), permanent: true })
        }
        _ => Ok(()),
    }
}

async fn stop(context: &EngineContext) -> Result<(), StepFailure> {
    let spec = context.spec();
    let stopped = tokio::select! {
        biased;
        // This drops the ordinary stop. A repeated stop signals every process it finds.
        () = context.fast_shutdown.cancelled(), if context.is_leaving() => {
            let rules = StopRules { grace: FAST_STOP_GRACE, kill: FAST_STOP_GRACE, port: Duration::ZERO, memory: Duration::ZERO };
            stop_by(context, rules).await?
        }
        stopped = stop_by(context, spec.stop_rules()) => stopped?,
    };
    let (name, orphans) = (&spec.name, stopped.orphans);
    if stopped.forced {
        tracing::warn!(backend = %name, orphans, "its engine did not end in time after SIGTERM and was killed");
    } else if orphans > 0 {
        tracing::info!(backend = %name, orphans, "processes that outlived their engine were ended");
    }
    if stopped.memory_back == Some(false) {
        tracing::warn!(backend = %name, "its device's memory is not back to what it was before");
    }
    let mut state = context.state.lock();
    state.trace = None;
    state.history.stopped();
    Ok(())
}

/// Stops the engine, and one that sleeps next to it, unless that one is kept.
pub(crate) async fn stop_by(context: &EngineContext, rules: StopRules) -> Result<Stopped, EngineFailure> {
    if context.state.lock().lifecycle.kept.is_none() {
        kept::stop_aside(context, rules).await?;
    }
    let stopped = context.driver().stop(rules).await?;
    if context.is_leaving() {
        // Another engine may get the configured address.
        context.connect_to(None);
    }
    Ok(stopped)
}

async fn fall_asleep(context: &EngineContext) -> Result<(), StepFailure> {
    let changes = context.state.lock().lifecycle.change.is_some();
    if changes { kept::put_aside(context).await } else { sleep_mode::fall_asleep(context).await }
}

async fn start(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let (name, settings) = (context.spec().name.clone(), context.settings());
    kept::choose_port(context);
    context.expect_ready();
    context.state.lock().history.starting();
    // Adapters were checked when the change was requested; `load_adapters` handles a failure now.
    let notices = context.driver().check(&settings).await?;
    for notice in notices {
        tracing::warn!(backend = %name, "{notice}");
    }
    let trace = context.driver().start(&settings).await?;
    {
        let mut state = context.state.lock();
        state.history.running(&trace);
        state.trace = Some(trace);
    }
    if let Err(error) = context.write_journal().await {
        tracing::error!(backend = %name, %error, "the journal cannot be written");
    }
    ready(context).await
}

/// Waits until the engine is ready. A pod's new address becomes known after the start.
async fn ready(context: &EngineContext) -> Result<(), StepFailure> {
    let begun = Instant::now();
    loop {
        let spec = context.spec();
        let moved = async {
            loop {
                let now = context.spec();
                if now.address.endpoint != spec.address.endpoint || now.leaving != spec.leaving {
                    return;
                }
                sleep(WATCH).await;
            }
        };
        tokio::select! {
            ready = ready_at(context, &spec) => {
                if ready.is_err() || !context.spec().leaving {
                    return ready;
                }
            }
            () = moved => {}
        }
        if begun.elapsed() > ReadyRules::default().total {
            return Err(StepFailure::temporary(format!("it has had no address for {} s", begun.elapsed().as_secs())));
        }
        sleep(POLL).await;
    }
}

async fn ready_at(context: &EngineContext, spec: &EngineSpec) -> Result<(), StepFailure> {
    let driver = context.driver();
    let progress = driver.progress();
    let shown = async {
        let Some(progress) = progress else { return std::future::pending().await };
        loop {
            context.set_detail(progress.borrow().to_string());
            sleep(WATCH).await;
        }
    };
    let rules = ReadyRules {
        answer: spec.request_timeout,
        start_timeout_scale: spec.rules.start_timeout_scale,
        ..ReadyRules::default()
    };
    let ready = tokio::select! {
        ready = wait_until_ready(&*driver, &spec.address, &spec.models, rules) => ready,
        never = shown => never,
    };
    match ready {
        Ok(_) => {
            driver.mark_ready();
            Ok(())
        }
        Err(failure) => {
            let mut failure = StepFailure::from(failure);
            if let Some(log) = driver.log_path() {
                failure.why += &format!(" (log: {})", log.display());
            }
            Err(failure)
        }
    }
}

/// Loads the adapters. A missing adapter fails a planned change. After a crash the engine serves
/// other models without it, and loading is retried.
async fn load_adapters(context: &EngineContext) -> Result<(), StepFailure> {
    let loaded = adapters::load(context).await;
    let planned = context.state.lock().lifecycle.change.as_ref().is_some_and(|change| change.failed.is_none());
    match loaded {
        Err(failure) if !planned => {
            tracing::error!(backend = %context.spec().name, "continues without an adapter: {}", failure.why);
            Ok(())
        }
        loaded => loaded,
    }
}

/// Opens the backend with a growing share of the slots. An adopted engine gets all slots at once.
async fn ramp(context: &EngineContext) -> Result<(), StepFailure> {
    let (spec, settings) = (context.spec(), context.settings());
    let full = context.ceiling(&settings);
    let most = full.unwrap_or(u32::MAX).min(spec.slots);
    let divisors: &[u32] = if context.state.lock().lifecycle.adopted { &[] } else { &RAMP };
    let share = |divisor: &u32| (most / divisor).max(1);
    context.set_ceiling(divisors.first().map(share).or(full));
    context.renew();
    context.note_ready();
    if context.state.lock().lifecycle.opens_in_ramp() {
        context.set_cordon(Cordon::Open);
    }
    for divisor in divisors {
        let slots = share(divisor);
        context.set_ceiling(Some(slots));
        context.set_detail(format!("{slots} of {most} slots"));
        sleep(spec.rules.ramp / RAMP.len() as u32).await;
    }
    context.set_ceiling(full);
    Ok(())
}

/// If the settings are not known to be good, ends once they have served for the settling time.
/// Until then and afterwards, keeps the adapters as configured.
async fn serve(context: &Arc<EngineContext>) -> Result<(), StepFailure> {
    let settled = async {
        if context.state.lock().lifecycle.is_settled() {
            return std::future::pending().await;
        }
        sleep(context.spec().rules.settle).await;
    };
    tokio::select! {
        () = settled => Ok(()),
        never = adapters::maintain(context) => never,
        never = kept::watch(context) => match never {},
    }
}

/// Ends when the engine has slept for so long that it is stopped.
async fn asleep(context: &EngineContext) -> Result<(), StepFailure> {
    match context.spec().rules.asleep {
        Some(longest) => sleep(longest).await,
        None => std::future::pending().await,
    }
    Ok(())
}

async fn backoff(context: &EngineContext) -> Result<(), StepFailure> {
    let rules = context.spec().restart_rules();
    let wait = Duration::from_millis(context.state.lock().lifecycle.backoff_ms(&rules));
    context.set_detail(format!("next attempt after {:.1} s", wait.as_secs_f64()));
    sleep(wait).await;
    Ok(())
}
