//! `sluice tune --gateway URL --backend NAME`: tunes one engine of a running gateway in place.
//!
//! Through the admin API, the backend is taken out of rotation, and running requests finish. Then
//! the gateway restarts the engine with each setting, and the tuner sends the load directly to it.
//! At the end, also after a failure, the engine gets the original flags and is put back into
//! rotation.
//!
//! After a tuner was killed, `sluice backend restart NAME --reset` and `sluice backend enable NAME`
//! do the same. Until then the tuner refuses the backend, because it would take the flags of the
//! interrupted trial for the original flags.

use std::collections::BTreeMap;
use std::time::Duration;

use http::StatusCode;
use tokio::time::{Instant, sleep};

use super::super::backend::{Path, outcome, path, post};
use super::super::bench::signals::StopSignals;
use super::progress::Shown;
use super::real::Ended;
use sluice_admin::status::{BackendStatus, Status};
use sluice_admin::{AdminClient, AdminClientError, RestartOptions, flag};
use sluice_config::ArgValue;
use sluice_lab::Scenario;
use sluice_tune::{BenchEngine, Flags, InPlace, Journal, Plan, Report, Trial, TuneError, Watch, tune};

const POLL: Duration = Duration::from_millis(250);
/// Longest time for requests in flight to finish after the backend left the rotation.
const DRAIN_LIMIT: Duration = Duration::from_secs(900);
/// Time without a response of the gateway after which the tuning ends with an error.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub(super) struct Bench {
    pub(super) admin: AdminClient,
    pub(super) backend: String,
}

#[derive(Clone, Debug)]
struct AdminEngine {
    client: AdminClient,
    path: Path,
    url: String,
    /// The flags of the engine when the tuning began.
    own: Flags,
    /// The gateway's count of unplanned restarts after the last planned restart. If it grows, the
    /// engine has ended.
    restarts: usize,
}

pub(super) fn tuned(
    plan: &Plan,
    scenario: Scenario,
    bench: Bench,
    journal: &mut Journal,
    done: Vec<Trial>,
    shown: &mut Shown,
) -> Result<Report, Ended> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut stop = StopSignals::listen()?;
        let mut engine = AdminEngine::find(bench).await?;
        let mut backend = InPlace::new(scenario, &plan.space, plan.goal.measures(), engine.clone())?;
        let outcome = tokio::select! {
            report = async {
                engine.take().await?;
                tune(plan, &mut backend, journal, done, |progress| shown.show(&progress)).await
            } => report.map_err(Ended::from),
            () = stop.received() => Err(Ended::Interrupted),
        };
        eprintln!("giving {} back", engine.path);
        let given = engine.give_back().await;
        let report = outcome?;
        given?;
        Ok(report)
    })
}

fn failed(error: impl std::fmt::Display) -> TuneError {
    TuneError::Engine(error.to_string())
}

impl AdminEngine {
    /// Finds the backend, and checks that another backend of the pool is ready to serve during the
    /// tuning. Changes nothing.
    async fn find(bench: Bench) -> Result<Self, TuneError> {
        let client = bench.admin;
        let (status, path) = loop {
            let status: Status = client.get("/admin/status").await.map_err(failed)?;
            let path = path(&status, &bench.backend).map_err(failed)?;
            let all = status.pools.iter().filter(|pool| pool.name == path.pool).flat_map(|pool| &pool.backends);
            let engine = all.filter(|own| own.name == path.backend).find_map(|own| own.engine.as_ref());
            // An engine in the step "ramp" serves with a growing share of its slots.
            if engine.is_none_or(|engine| engine.step != "ramp") {
                break (status, path);
            }
            sleep(POLL).await;
        };
        let pool = status.pools.iter().find(|pool| pool.name == path.pool);
        let backends = || pool.into_iter().flat_map(|pool| &pool.backends);
        let backend = backends()
            .find(|backend| backend.name == path.backend)
            .ok_or_else(|| failed(format!("{path} is no longer configured")))?;
        let Some(engine) = &backend.engine else {
            let text =
                "another program runs its engine, so the gateway cannot restart it; tune a backend that has launch";
            return Err(failed(format!("{path}: {text}")));
        };
        if engine.step != "serve" || engine.change.is_some() {
            return Err(failed(format!("{path}: its engine is in the step '{}'; wait until it serves", engine.step)));
        }
        if backend.state == "draining" {
            let name = &path.backend;
            let text = "it is out of rotation. If a tuning of it was killed, its engine still has the flags of a trial: give it back with";
            let commands = format!("`sluice backend restart {name} --reset` and `sluice backend enable {name}`");
            return Err(failed(format!("{path}: {text} {commands}, then tune it")));
        }
        let is_ready = |other: &&BackendStatus| other.name != path.backend && other.state == "ready";
        if backends().find(is_ready).is_none() {
            let text = "no other backend of its pool is ready, so requests would wait for the whole tuning";
            return Err(failed(format!("{path}: {text}; add one, or tune with --real")));
        }
        let own = own_flags(&engine.settings);
        Ok(Self { url: backend.url.trim_end_matches('/').to_owned(), restarts: engine.restarts, own, client, path })
    }

    async fn take(&self) -> Result<(), TuneError> {
        post(&self.client, &self.path, "/drain").await.map_err(failed)?;
        eprintln!("{} is out of rotation until the tuning ends", self.path);
        let deadline = Instant::now() + DRAIN_LIMIT;
        while self.status().await?.in_flight > 0 {
            if Instant::now() > deadline {
                return Err(failed(format!("{}: requests are still in flight after {DRAIN_LIMIT:?}", self.path)));
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Restarts the engine with the original flags, unless it has them, and puts the backend back
    /// into rotation.
    async fn give_back(&mut self) -> Result<(), TuneError> {
        while self.engine().await?.change.is_some() {
            sleep(POLL).await;
        }
        let refused = match own_flags(&self.engine().await?.settings) == self.own {
            true => None,
            false => self.restart(&Flags::new()).await?,
        };
        post(&self.client, &self.path, "/enable").await.map_err(failed)?;
        match refused {
            None => Ok(()),
            Some(why) => Err(failed(format!("{}: it does not start with its own flags: {why}", self.path))),
        }
    }

    async fn status(&self) -> Result<BackendStatus, TuneError> {
        let deadline = Instant::now() + SILENCE_LIMIT;
        let status: Status = loop {
            match self.client.get("/admin/status").await {
                Ok(status) => break status,
                Err(AdminClientError::Unreachable { .. }) if Instant::now() < deadline => sleep(POLL).await,
                Err(error) => return Err(failed(error)),
            }
        };
        let pool = status.pools.into_iter().find(|pool| pool.name == self.path.pool);
        let backend = pool.into_iter().flat_map(|pool| pool.backends).find(|own| own.name == self.path.backend);
        backend.ok_or_else(|| failed(format!("{} is no longer configured", self.path)))
    }

    async fn engine(&self) -> Result<sluice_fleet::EngineView, TuneError> {
        let engine = self.status().await?.engine;
        engine.ok_or_else(|| failed(format!("{}: the gateway no longer runs its engine", self.path)))
    }
}

/// Parses `name=value` texts with spaces between. Leaves out lists and tables, for which the engine
/// uses the configuration.
fn own_flags(line: &str) -> Flags {
    let flags = line.split(' ').filter_map(|text| flag(text).ok());
    let is_plain =
        |(_, value): &(String, ArgValue)| !matches!(value, ArgValue::Text(text) if text.starts_with(['[', '{']));
    flags.filter(is_plain).collect()
}

impl BenchEngine for AdminEngine {
    fn name(&self) -> &str {
        &self.path.backend
    }

    fn url(&self) -> &str {
        &self.url
    }

    async fn restart(&mut self, flags: &Flags) -> Result<Option<String>, TuneError> {
        let all: BTreeMap<&String, &ArgValue> = self.own.iter().chain(flags).collect();
        // `hold`: `find` has checked that another backend can serve the models.
        let options = RestartOptions { reset: true, hold: true, ..RestartOptions::of_flags(all) };
        let id = match self.client.restart(&self.path.pool, &self.path.backend, &options).await {
            Ok(begun) => begun.change,
            Err(AdminClientError::Refused { status, message, .. }) if status != StatusCode::CONFLICT => {
                return Ok(Some(message));
            }
            Err(error) => return Err(failed(error)),
        };
        let ended = loop {
            let status = self.status().await?;
            if let Some(ended) = outcome(&status, id) {
                break ended;
            }
            sleep(POLL).await;
        };
        self.restarts = self.engine().await?.restarts;
        Ok(ended.err())
    }
}

impl Watch for AdminEngine {
    async fn unless_lost<T>(&self, load: impl Future<Output = T>) -> Result<T, TuneError> {
        let lost = async || -> Result<Option<String>, TuneError> {
            let engine = self.engine().await?;
            let is_lost = engine.step != "serve" || engine.restarts > self.restarts;
            let why = engine.why.unwrap_or_else(|| format!("its engine is in the step '{}'", engine.step));
            Ok(is_lost.then(|| format!("{}: {why}", self.path)))
        };
        let watched = async {
            loop {
                sleep(POLL).await;
                match lost().await {
                    Ok(None) => {}
                    Ok(Some(why)) => return TuneError::Died(why),
                    Err(error) => return error,
                }
            }
        };
        let done = tokio::select! {
            done = load => done,
            error = watched => return Err(error),
        };
        match lost().await? {
            None => Ok(done),
            Some(why) => Err(TuneError::Died(why)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_of_an_engine_are_read_as_the_gateway_writes_them() {
        let flags = own_flags("enforce-eager=true max-num-seqs=8 served-model-name=m x=[\"a\",\"b\"] watermark=0.5");
        let shown: Vec<String> = flags.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(shown, ["enforce-eager=true", "max-num-seqs=8", "served-model-name=m", "watermark=0.5"]);
        assert!(own_flags("").is_empty());
    }
}
