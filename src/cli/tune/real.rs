//! `sluice tune --real`: the tuning on real engines, until it ends or a signal arrives.
//!
//! The tuner's gateway (in this process) and engines are stopped before the command returns. A
//! second signal does not cut this short, because an engine without a parent would hold the device.

use std::path::Path;
use std::time::Duration;

use super::super::bench::signals::StopSignals;
use super::super::serve::raise_file_limit;
use super::progress::Shown;
use sluice_config::Config;
use sluice_gateway::pool::Phase;
use sluice_gateway::telemetry::log;
use sluice_lab::Scenario;
use sluice_serve::{Running, Source, start};
use sluice_tune::{Journal, OwnGateway, Plan, RealEngines, Report, Trial, TuneError, tune};
use tokio::time::{Instant, sleep};

/// Longest wait until the backends are ready in the gateway. Their engines serve already.
const READY_LIMIT: Duration = Duration::from_secs(30);
const READY_POLL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    /// The tuning cannot begin or go on.
    #[error(transparent)]
    Failed(#[from] TuneError),
    /// The operating system refuses a resource.
    #[error("{0}")]
    System(#[from] std::io::Error),
    #[error(
        "interrupted; the engines are as they were before, and what was tried is in the journal: continue with --resume"
    )]
    Interrupted,
}

/// Tunes the engines of a scenario. The engines' logs and journal are in `folder`.
pub(super) fn tuned(
    plan: &Plan,
    scenario: Scenario,
    folder: &Path,
    journal: &mut Journal,
    done: Vec<Trial>,
    shown: &mut Shown,
) -> Result<Report, Ended> {
    raise_file_limit();
    // Warnings about engines are shown, such as about a program that does not answer.
    if let Err(error) = log::init_warnings("sluice_fleet") {
        eprintln!("warnings of engines are not shown: {error}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let mut stop = StopSignals::listen()?;
        let measures = plan.goal.measures();
        let mut engines = RealEngines::open(scenario, &plan.space, measures, folder, PrivateGateway::default())?;
        let outcome = tokio::select! {
            report = search(plan, &mut engines, journal, done, shown) => report.map_err(Ended::from),
            () = stop.received() => Err(Ended::Interrupted),
        };
        eprintln!("stopping the engines");
        let stopped = engines.stop().await;
        let report = outcome?;
        stopped?;
        Ok(report)
    });
    super::super::runtime::end(runtime);
    outcome
}

async fn search(
    plan: &Plan,
    engines: &mut RealEngines<PrivateGateway>,
    journal: &mut Journal,
    done: Vec<Trial>,
    shown: &mut Shown,
) -> Result<Report, TuneError> {
    engines.adopt_leftovers().await?.iter().for_each(|line| eprintln!("{line}"));
    tune(plan, engines, journal, done, |progress| shown.show(&progress)).await
}

#[derive(Debug, Default)]
struct PrivateGateway(Option<Running>);

impl OwnGateway for PrivateGateway {
    async fn serve(&mut self, config: Config) -> Result<String, String> {
        let running = match self.0.take() {
            None => start(config, Source::Fixed).await.map_err(|error| format!("the tuner's gateway: {error}"))?,
            Some(running) => {
                let applied = running.app().reloader.apply(config);
                let running = self.0.insert(running);
                applied.map_err(|error| format!("the tuner's gateway: {error}"))?;
                return ready(running).await;
            }
        };
        ready(self.0.insert(running)).await
    }

    async fn stop(&mut self) {
        if let Some(running) = self.0.take() {
            running.app().core.fleet.shut_down_fast();
            running.stop().await;
        }
    }
}

/// The address of a gateway, once every backend is ready.
async fn ready(gateway: &Running) -> Result<String, String> {
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        let view = gateway.app().admission().view();
        let backends = view.iter().flat_map(|pool| &pool.backends);
        let waiting = backends.clone().find(|backend| !backend.removed && backend.phase != Phase::Ready);
        match waiting {
            None => return Ok(format!("http://{}", gateway.client_address())),
            Some(backend) if Instant::now() > deadline => {
                return Err(format!("the tuner's gateway does not find {} ready: {:?}", backend.name, backend.phase));
            }
            Some(_) => sleep(READY_POLL).await,
        }
    }
}
