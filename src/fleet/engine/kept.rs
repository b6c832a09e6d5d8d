//! Keeps the old engine of a change asleep next to the new one (`fleet.rollback = "wake"`).
//!
//! The old engine is kept only if that does not change the trial of the new settings. Next to it,
//! the new engine must get the full `gpu-memory-utilization`, measured after the old one fell
//! asleep. Otherwise the old engine is stopped, as without the setting. The host must have memory
//! for the weights and [`HOST_RESERVE`] more; if less than half of the reserve is left later, the
//! old engine is stopped.
//!
//! The new engine listens on another port, to which the [`Connector`] sends connections. The
//! journal has the identity of both engines. Bounds: one kept engine for each engine, for
//! [`KEPT_MAX`].

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::context::EngineContext;
use super::lifecycle::StepFailure;
use super::sleep_mode;
use crate::driver::{EngineFailure, EngineIdentity, EngineStatus, SharedDriver, StopRules};
use crate::ports::is_free;
use sluice_config::{Rollback, available_memory};
use sluice_gateway::connect::Connector;

/// Bytes of the memory of the host that must stay free when an old engine falls asleep.
const HOST_RESERVE: u64 = 4 << 30;
/// How long an old engine is kept, even if the tuner has not ended the change.
const KEPT_MAX: Duration = Duration::from_secs(24 * 3_600);
/// Pause between two looks at a kept engine.
const LOOK: Duration = Duration::from_millis(500);

/// Whether the old engine may be kept in a change of this engine. Logs why not, if the
/// configuration asks for it.
pub(crate) fn may_keep(context: &EngineContext) -> bool {
    let (spec, driver) = (context.spec(), context.driver());
    if spec.rules.rollback != Rollback::Wake {
        return false;
    }
    let why = if driver.port().is_none() {
        "the gateway does not start its process"
    } else if !driver.sleeps(&context.settings()) {
        "it cannot sleep; set enable-sleep-mode = true in launch.args"
    } else if spec.share().is_some() {
        "it takes turns on its device (launch.share)"
    } else if spec.address.rank.is_some() {
        "it has several ranks"
    } else if context.others.exist() {
        "other gateways connect to its port"
    } else {
        return true;
    };
    tracing::info!(backend = %spec.name, "the old engine is stopped in spite of fleet.rollback: {why}");
    false
}

/// Puts the old engine to sleep, and makes room for another one next to it.
pub(super) async fn put_aside(context: &EngineContext) -> Result<(), StepFailure> {
    let refused = |why: String| StepFailure::temporary(format!("the old engine is not kept asleep: {why}"));
    let (driver, settings) = (context.driver(), context.settings());
    let next = context.state.lock().lifecycle.heads_for().settings.clone();
    // Stops an engine that an earlier gateway kept and no longer needed.
    stop_aside(context, context.spec().stop_rules()).await?;
    check_host(driver.asleep_bytes(&settings), available_memory()).map_err(refused)?;
    sleep_mode::fall_asleep(context).await?;
    driver.check_room(&next).await.map_err(refused)?;
    let home = context.spec().address.endpoint.port;
    let port = if driver.port() == Some(home) { free_port(context) } else { Some(home) };
    let port = port.ok_or_else(|| refused("no port of fleet.ports is free".to_owned()))?;
    let beside = driver.beside(port).ok_or_else(|| refused("its driver runs one engine only".to_owned()))?;
    // There is no await from here on, so that all of the following happens, or nothing.
    driver.set_aside(true);
    {
        let mut state = context.state.lock();
        state.aside = state.trace.take().map(|engine| (engine, Instant::now()));
    }
    context.place(beside, Some(driver));
    Ok(())
}

/// Checks that the host has memory for the weights of a sleeping engine.
fn check_host(needed: Option<u64>, available: Option<u64>) -> Result<(), String> {
    let needed = needed.ok_or("the log does not show how much memory the weights take")?;
    let available = available.ok_or("the memory of the host cannot be read")?;
    if available < needed.saturating_add(HOST_RESERVE) {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        return Err(format!(
            "its weights take {:.1} GiB of the host, of which {:.1} GiB are available, and {:.0} GiB must stay free",
            gib(needed),
            gib(available),
            gib(HOST_RESERVE)
        ));
    }
    Ok(())
}

/// The highest port of `fleet.ports` that is free and not configured. New engines of the
/// configuration get the lowest.
fn free_port(context: &EngineContext) -> Option<u16> {
    let view = context.admission.view();
    let backends = || view.iter().flat_map(|pool| &pool.backends);
    let is_configured = |port: u16| backends().any(|backend| backend.address.endpoint.port == port);
    let mut ports = context.spec().rules.ports.clone().rev();
    ports.find(|port| !is_configured(*port) && is_free(*port))
}

/// Chooses the port before a start. The engine listens on the configured port, unless a kept engine
/// does.
pub(super) fn choose_port(context: &EngineContext) {
    let home = context.spec().address.endpoint.port;
    let (driver, aside) = {
        let drivers = context.drivers.lock();
        (Arc::clone(&drivers.present), drivers.aside.clone())
    };
    if aside.is_none()
        && driver.port().is_some_and(|port| port != home)
        && let Some(beside) = driver.beside(home)
    {
        context.place(beside, None);
    }
}

/// Wakes the engine, or instead a kept one, which takes the place of the stopped present one.
pub(super) async fn wake_up(context: &EngineContext) -> Result<(), StepFailure> {
    let is_kept = context.state.lock().lifecycle.kept.is_some();
    let kept = context.drivers.lock().aside.clone().filter(|_| is_kept);
    if let Some(driver) = kept {
        driver.set_aside(false);
        {
            let mut state = context.state.lock();
            (state.trace, state.started) = (state.aside.take().map(|(engine, _)| engine), None);
            let state = &mut *state;
            state.trace.as_ref().into_iter().for_each(|engine| state.history.running(engine));
        }
        context.place(driver, None);
    }
    sleep_mode::wake_up(context).await
}

/// Stops the engine that sleeps next to the present one, if there is one.
pub(super) async fn stop_aside(context: &EngineContext, rules: StopRules) -> Result<(), EngineFailure> {
    let Some(driver) = context.drivers.lock().aside.clone() else { return Ok(()) };
    // The present engine uses the same devices, so no reading can show that the stopped one's
    // memory is free.
    driver.set_aside(false);
    driver.stop(rules).await?;
    context.drivers.lock().aside = None;
    context.state.lock().aside = None;
    Ok(())
}

/// While the present engine serves, stops a kept one that is not needed, was kept for too long, or
/// takes memory of which the host is short.
pub(super) async fn watch(context: &Arc<EngineContext>) -> Infallible {
    loop {
        let why = why_not_kept(context).await;
        if let Some(why) = why {
            let name = context.spec().name.clone();
            context.state.lock().lifecycle.forget_kept();
            match stop_aside(context, context.spec().stop_rules()).await {
                Ok(()) => tracing::info!(backend = %name, "the old engine, kept asleep, is stopped: {why}"),
                Err(failure) => {
                    tracing::error!(backend = %name, "the old engine, kept asleep, does not stop: {failure}")
                }
            }
            if let Err(error) = context.write_journal().await {
                tracing::error!(backend = %name, %error, "the journal cannot be written");
            }
        }
        sleep(LOOK).await;
    }
}

/// Why the kept engine must be stopped now; `None`: it need not, or there is none.
async fn why_not_kept(context: &EngineContext) -> Option<&'static str> {
    let driver = context.drivers.lock().aside.clone()?;
    let (runs, available) = (driver.status().await == EngineStatus::Running, available_memory());
    let state = context.state.lock();
    let kept_for = state.aside.as_ref().map(|(_, since)| since.elapsed());
    why_stop(runs, state.lifecycle.is_done_with_kept(), kept_for, available)
}

fn why_stop(
    runs: bool,
    is_done_with: bool,
    kept_for: Option<Duration>,
    available: Option<u64>,
) -> Option<&'static str> {
    if !runs {
        Some("it has ended")
    } else if is_done_with {
        Some("the new settings have settled")
    } else if available.is_some_and(|available| available < HOST_RESERVE / 2) {
        Some("the memory of the host is short")
    } else if kept_for.is_none_or(|kept_for| kept_for > KEPT_MAX) {
        Some("it was kept for too long")
    } else {
        None
    }
}

/// Takes over the engines of an earlier gateway: the port of the `present` engine, and the engine
/// that sleeps next to it. Returns whether one sleeps.
pub(super) async fn recover(
    context: &EngineContext,
    present: Option<&EngineIdentity>,
    aside: Option<&EngineIdentity>,
) -> bool {
    let home = context.driver();
    let driver_of = |engine: Option<&EngineIdentity>| match engine {
        Some(EngineIdentity::Process { port: Some(port), .. }) if home.port() != Some(*port) => home.beside(*port),
        _ => None,
    };
    let present = driver_of(present).unwrap_or_else(|| Arc::clone(&home));
    let sleeper = driver_of(aside).unwrap_or(home);
    if !adopt_aside(context, &sleeper, aside).await {
        context.place(present, None);
        return false;
    }
    // If the sleeping engine has the port, the next engine has not started yet, and gets another
    // port.
    let is_taken = present.port() == sleeper.port();
    let next = free_port(context).filter(|_| is_taken).and_then(|port| sleeper.beside(port));
    context.place(next.unwrap_or(present), Some(sleeper));
    true
}

async fn adopt_aside(context: &EngineContext, sleeper: &SharedDriver, aside: Option<&EngineIdentity>) -> bool {
    let Some(engine) = aside else { return false };
    match sleeper.adopt(engine).await {
        Ok(true) => {
            sleeper.set_aside(true);
            context.state.lock().aside = Some((engine.clone(), Instant::now()));
            true
        }
        Ok(false) => false,
        Err(failure) => {
            let name = context.spec().name.clone();
            tracing::error!(backend = %name, "it is not known whether an old engine sleeps: {failure}");
            false
        }
    }
}

impl EngineContext {
    /// Sets the drivers, and sends connections to the present engine.
    fn place(&self, present: SharedDriver, aside: Option<SharedDriver>) {
        let port = present.port();
        {
            let mut drivers = self.drivers.lock();
            (drivers.present, drivers.aside) = (present, aside);
        }
        self.connect_to(port);
    }

    /// Sends connections to this port, or to the configured one.
    pub(super) fn connect_to(&self, port: Option<u16>) {
        let address = &self.spec().address;
        if address.ip.is_some() {
            Connector::shared().redirect(address, port.unwrap_or(address.endpoint.port));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_needs_memory_for_the_weights_and_a_reserve() {
        let gib = |count: u64| Some(count << 30);
        assert_eq!(check_host(gib(16), gib(20)), Ok(()));
        let short = check_host(gib(16), gib(19)).unwrap_err();
        assert!(short.contains("take 16.0 GiB") && short.contains("19.0 GiB are available"), "{short}");
        assert!(check_host(None, gib(19)).unwrap_err().contains("log"));
        assert!(check_host(gib(1), None).unwrap_err().contains("cannot be read"));
        assert!(check_host(Some(u64::MAX), gib(1)).is_err());
    }

    #[test]
    fn an_old_engine_is_kept_while_it_runs_is_needed_and_leaves_memory_to_others() {
        let (short, long) = (Some(Duration::from_secs(60)), Some(KEPT_MAX + Duration::from_secs(1)));
        let plenty = Some(HOST_RESERVE);
        assert_eq!(why_stop(true, false, short, plenty), None);
        assert_eq!(why_stop(true, false, short, None), None, "the memory cannot be read");
        for (why, part) in [
            (why_stop(false, false, short, plenty), "ended"),
            (why_stop(true, true, short, plenty), "settled"),
            (why_stop(true, false, short, Some(HOST_RESERVE / 2 - 1)), "memory"),
            (why_stop(true, false, long, plenty), "too long"),
        ] {
            assert!(why.is_some_and(|why| why.contains(part)), "{part}: {why:?}");
        }
    }
}
