//! Waits until a started engine is ready, with any driver.
//!
//! Ready means: the engine is healthy by the rule of its kind, `/v1/models` lists every expected
//! model and adapter (if engines of the kind list models), and the server is the one that was
//! started. vLLM binds its port with SO_REUSEPORT, so an older server on the same port may respond
//! instead, even with the right models.
//!
//! Each phase of the start that the log shows may be without progress for
//! [`StartPhase::stall_limit`] at most. Without a log, [`ReadyRules::blind`] limits the start;
//! [`ReadyRules::total`] always does. The end of the engine, with a diagnosis, and a wrong API key
//! are reported at once.

use std::collections::HashSet;
use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::driver::{Driver, DriverKind, EngineFailure, EngineStatus, PortOwner};
use super::driver::{ENDED_READINGS, STATUS_INTERVAL};
use super::engine_health::{Unhealthy, read_health};
use super::http::fetch;
use sluice_config::Address;
use sluice_core::vllm::failure::{Diagnosis, Exit, FailureClass};
use sluice_core::vllm::logs::StartPhase;

const BODY_MAX: usize = 1 << 20;

/// Time limits of a start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadyRules {
    /// Pause between two polls.
    pub poll: Duration,
    /// Limit for one response.
    pub answer: Duration,
    /// Factor for the limits of phases and for `blind`, but not for `total`.
    pub start_timeout_scale: f64,
    /// Limit of the start without a log.
    pub blind: Duration,
    /// Limit of any start.
    pub total: Duration,
}

impl Default for ReadyRules {
    /// `poll` is 200 ms, `answer` 2 s, `start_timeout_scale` 1, `blind` 15 min, `total` 4 h. The
    /// longest start on record took 3 h 10 min.
    fn default() -> Self {
        Self {
            poll: Duration::from_millis(200),
            answer: Duration::from_secs(2),
            start_timeout_scale: 1.0,
            blind: Duration::from_secs(900),
            total: Duration::from_secs(4 * 3600),
        }
    }
}

/// An engine that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Duration of the wait.
    pub took: Duration,
    /// The served models.
    pub models: Vec<String>,
    /// The longest served context, tokens, if known.
    pub max_model_len: Option<u64>,
}

/// Waits until the engine is ready and serves at least the models and adapters in `expected`.
///
/// # Errors
/// The engine ended, made no progress, serves other models or requires another API key, or another
/// server has the port. The engine is not stopped.
pub async fn wait_until_ready(
    driver: &dyn Driver,
    address: &Address,
    expected: &[String],
    rules: ReadyRules,
) -> Result<Ready, EngineFailure> {
    let started = Instant::now();
    let mut said = started;
    let mut serving_since: Option<Instant> = None;
    let mut exit_watch = ExitWatch::default();
    loop {
        if let Some(exit) = exit_watch.poll(driver).await {
            return Err(driver.diagnose(Some(exit)));
        }
        let owner = driver.port_owner().await;
        if let PortOwner::Other(process) = owner {
            return Err(at_phase(
                driver,
                FailureClass::WrongEngine,
                format!("another process listens on {}: {process}", address.authority),
            ));
        }
        let mut missing = None;
        let served = match owner {
            PortOwner::Free => Readiness::NotReady,
            _ => check_readiness(address, rules.answer).await,
        };
        // A server that says that it loads the model makes progress, even without a log.
        if matches!(served, Readiness::Loading) {
            said = Instant::now();
        }
        if let Readiness::Unauthorized(status) = served {
            let cause = format!(
                "{} responds to /v1/models with {status}: set api_key of this backend to the engine's --api-key (or \
                 VLLM_API_KEY)",
                address.authority
            );
            return Err(at_phase(driver, FailureClass::BadArguments, cause));
        }
        if let Readiness::Serves(list) = served {
            let absent = list.missing(expected);
            if absent.is_empty() {
                let (models, max_model_len) = list.into_parts();
                return Ok(Ready { took: started.elapsed(), models, max_model_len });
            }
            let since = *serving_since.get_or_insert_with(Instant::now);
            missing = Some((since, absent));
        }
        if let Some((since, absent)) = &missing
            && since.elapsed() > StartPhase::Serving.stall_limit().mul_f64(rules.start_timeout_scale)
        {
            return Err(at_phase(
                driver,
                FailureClass::WrongModels,
                format!("it does not serve {}", absent.join(", ")),
            ));
        }
        if missing.is_none()
            && let Some(why) = overdue(driver, (started, said), rules)
        {
            return Err(at_phase(driver, FailureClass::Timeout, why));
        }
        sleep(rules.poll).await;
    }
}

/// Detects the end of a starting engine. Status commands run at intervals, and must report it
/// several times in a row.
#[derive(Debug, Default)]
struct ExitWatch {
    polled_at: Option<Instant>,
    ended_readings: u32,
}

impl ExitWatch {
    async fn poll(&mut self, driver: &dyn Driver) -> Option<Exit> {
        let (interval, readings) = match driver.kind() {
            DriverKind::Command => (STATUS_INTERVAL, ENDED_READINGS),
            DriverKind::Kubernetes => (STATUS_INTERVAL, 1),
            DriverKind::Process | DriverKind::External => (Duration::ZERO, 1),
        };
        if self.polled_at.is_some_and(|at| at.elapsed() < interval) {
            return None;
        }
        let status = driver.status().await;
        self.polled_at = Some(Instant::now());
        let EngineStatus::Ended(exit) = status else {
            self.ended_readings = 0;
            return None;
        };
        self.ended_readings += 1;
        (self.ended_readings >= readings).then_some(exit)
    }
}

/// Why the start takes too long, if it does. `said`: when the server last said that it loads.
fn overdue(driver: &dyn Driver, (started, said): (Instant, Instant), rules: ReadyRules) -> Option<String> {
    let all = started.elapsed();
    if all > rules.total {
        return Some(format!("not ready after {} s", all.as_secs()));
    }
    let Some(progress) = driver.progress() else {
        return (said.elapsed() > rules.blind.mul_f64(rules.start_timeout_scale))
            .then(|| format!("not ready after {} s, and there is no log to follow", all.as_secs()));
    };
    let progress = progress.borrow();
    // In an adopted engine's log the last progress may be older than this wait.
    let stalled = progress.moved.max(said).elapsed();
    if stalled <= progress.phase.stall_limit().mul_f64(rules.start_timeout_scale) {
        return None;
    }
    let last = if progress.line.is_empty() { "none" } else { &progress.line };
    Some(format!("no progress for {} s while {}; the last line of its log: {last}", stalled.as_secs(), progress.phase))
}

fn at_phase(driver: &dyn Driver, class: FailureClass, cause: String) -> EngineFailure {
    let phase = driver.progress().map_or(StartPhase::Launching, |progress| progress.borrow().phase);
    EngineFailure::of(Diagnosis::plain(class, Some(cause)), None, phase)
}

#[derive(Debug, Deserialize)]
struct ModelList {
    data: Vec<Model>,
    /// Whether engines of this kind list models.
    #[serde(default = "listed")]
    is_known: bool,
}

fn listed() -> bool {
    true
}

#[derive(Debug, Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<u64>,
}

impl ModelList {
    fn missing(&self, expected: &[String]) -> Vec<String> {
        let served: HashSet<&str> = self.data.iter().map(|model| model.id.as_str()).collect();
        expected.iter().filter(|name| self.is_known && !served.contains(name.as_str())).cloned().collect()
    }

    fn into_parts(self) -> (Vec<String>, Option<u64>) {
        let longest = self.data.iter().filter_map(|model| model.max_model_len).max();
        (self.data.into_iter().map(|model| model.id).collect(), longest)
    }
}

#[derive(Debug)]
enum Readiness {
    /// Not healthy, or the list cannot be read.
    NotReady,
    /// The server listens, and says that it loads the model.
    Loading,
    /// Healthy, but requires another API key.
    Unauthorized(StatusCode),
    /// Healthy, with this list.
    Serves(ModelList),
}

/// Reads health and models. vLLM requires an API key on `/v1` only, so the health page does not
/// show a wrong one.
async fn check_readiness(address: &Address, limit: Duration) -> Readiness {
    match read_health(address, limit).await {
        Ok(()) => {}
        Err(Unhealthy::Loading) => return Readiness::Loading,
        Err(Unhealthy::Unlike(_) | Unhealthy::Down(_)) => return Readiness::NotReady,
    }
    if !address.engine.rules().lists_models {
        return Readiness::Serves(ModelList { data: Vec::new(), is_known: false });
    }
    match fetch(address, "/v1/models", limit, BODY_MAX).await {
        Ok((status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN), _)) => Readiness::Unauthorized(status),
        Ok((status, body)) if status.is_success() => {
            serde_json::from_slice(&body).map_or(Readiness::NotReady, Readiness::Serves)
        }
        _ => Readiness::NotReady,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::driver::ExternalDriver;
    use sluice_config::Endpoint;

    /// A server that is healthy and responds to all other paths with this head and body.
    async fn server(response: &'static str) -> Address {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut peer, _)) = listener.accept().await {
                let mut head = vec![0; 4096];
                let read = peer.read(&mut head).await.unwrap_or_default();
                let healthy = head[..read].starts_with(b"GET /health ");
                let response = if healthy { "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" } else { response };
                let _ = peer.write_all(response.as_bytes()).await;
            }
        });
        let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port, prefix: String::new() };
        Address::new(endpoint, None, None)
    }

    #[tokio::test]
    async fn a_wrong_api_key_is_reported_at_once() {
        let address = server("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n").await;
        let driver = ExternalDriver::new("a/b");
        let failure = wait_until_ready(&driver, &address, &["m".to_owned()], ReadyRules::default()).await.unwrap_err();
        assert!(failure.to_string().contains("set api_key of this backend"), "{failure}");
        assert_eq!(failure.class, FailureClass::BadArguments);
    }

    #[tokio::test]
    async fn an_engine_that_lists_its_models_is_ready() {
        let list =
            "HTTP/1.1 200 OK\r\ncontent-length: 46\r\n\r\n{\"data\": [{\"id\": \"m\", \"max_model_len\": 4096}]}";
        let address = server(list).await;
        let driver = ExternalDriver::new("a/b");
        let ready = wait_until_ready(&driver, &address, &["m".to_owned()], ReadyRules::default()).await.unwrap();
        assert_eq!((ready.models, ready.max_model_len), (vec!["m".to_owned()], Some(4096)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_of_a_start_without_a_log_is_scaled() {
        let (driver, started) = (ExternalDriver::new("a/b"), Instant::now());
        let rules = ReadyRules { blind: Duration::from_secs(10), start_timeout_scale: 3.0, ..ReadyRules::default() };
        tokio::time::advance(Duration::from_secs(29)).await;
        assert_eq!(overdue(&driver, (started, started), rules), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(overdue(&driver, (started, started), rules).is_some_and(|why| why.contains("not ready after 31 s")));
        assert_eq!(overdue(&driver, (started, Instant::now()), rules), None, "the server said that it loads");
    }
}
