//! Waits until a started engine is ready, whoever runs it.
//!
//! Ready means three things at once: `/health` answers 200, `/v1/models` lists every expected model and adapter, and the
//! server that answers is the one that was started. vLLM binds its port with SO_REUSEPORT, so a server that was left over
//! may hold the same port and answer in its place; it would even list the right models.
//!
//! There is no fixed limit. The log is followed through its phases, and each may stand still for as long as
//! [`StartPhase::patience`](crate::vllm::logs::StartPhase::patience) says; where there is no log, [`ReadyRules::blind`] holds.
//! An engine that ends is told at once, with its diagnosis.

use std::collections::HashSet;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::driver::{Driver, Failure, Owner, Status};
use super::http::fetch;
use crate::pool::Address;
use crate::vllm::failure::{Class, Diagnosis};
use crate::vllm::logs::StartPhase;

/// The most that is read of `/health` and `/v1/models`.
const BODY_MAX: usize = 1 << 20;

/// How long to wait for what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadyRules {
    /// Pause between two looks.
    pub poll: Duration,
    /// One answer of the engine.
    pub answer: Duration,
    /// Multiplies the patience of every phase.
    pub patience: f64,
    /// The whole start where no log can be followed.
    pub blind: Duration,
    /// The whole start in any case.
    pub total: Duration,
}

impl Default for ReadyRules {
    /// 200 ms, 2 s, 1, 15 min, 4 h: the longest start on record took 3 h 10 min.
    fn default() -> Self {
        Self {
            poll: Duration::from_millis(200),
            answer: Duration::from_secs(2),
            patience: 1.0,
            blind: Duration::from_secs(900),
            total: Duration::from_secs(4 * 3600),
        }
    }
}

/// An engine that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// From the call until now.
    pub took: Duration,
    /// What it serves.
    pub models: Vec<String>,
    /// The longest context it serves, tokens, when it says so.
    pub max_model_len: Option<u64>,
}

/// Waits until the engine is ready and serves at least the models and adapters in `expected`.
///
/// # Errors
/// It ended, it stands still, somebody else answers in its place, or it serves other models. It is not stopped.
pub async fn until_ready(
    driver: &dyn Driver,
    address: &Address,
    expected: &[String],
    rules: ReadyRules,
) -> Result<Ready, Failure> {
    let started = Instant::now();
    let mut serving_since: Option<Instant> = None;
    loop {
        if let Status::Ended(exit) = driver.status().await {
            return Err(driver.diagnosis(Some(exit)));
        }
        let owner = driver.owner().await;
        if let Owner::Other(who) = owner {
            return Err(at_phase(driver, Class::WrongEngine, format!("{} is answered by {who}", address.authority)));
        }
        let mut missing = None;
        if owner != Owner::Nobody
            && let Some(list) = asked(address, rules.answer).await
        {
            let absent = list.absent(expected);
            if absent.is_empty() {
                let (models, max_model_len) = list.into_parts();
                return Ok(Ready { took: started.elapsed(), models, max_model_len });
            }
            let since = *serving_since.get_or_insert_with(Instant::now);
            missing = Some((since, absent));
        }
        if let Some((since, absent)) = &missing
            && since.elapsed() > StartPhase::Serving.patience().mul_f64(rules.patience)
        {
            return Err(at_phase(driver, Class::WrongModels, format!("it does not serve {}", absent.join(", "))));
        }
        if missing.is_none()
            && let Some(why) = overdue(driver, started, rules)
        {
            return Err(at_phase(driver, Class::Timeout, why));
        }
        sleep(rules.poll).await;
    }
}

/// Why the start has taken too long, if it has.
fn overdue(driver: &dyn Driver, started: Instant, rules: ReadyRules) -> Option<String> {
    let all = started.elapsed();
    if all > rules.total {
        return Some(format!("not ready after {} s", all.as_secs()));
    }
    let Some(progress) = driver.progress() else {
        return (all > rules.blind)
            .then(|| format!("not ready after {} s, and there is no log to follow", all.as_secs()));
    };
    let progress = progress.borrow();
    // An engine that was adopted, or that restarted behind our back, has a log that moved before we came.
    let still = progress.moved.max(started).elapsed();
    if still <= progress.phase.patience().mul_f64(rules.patience) {
        return None;
    }
    let last = if progress.line.is_empty() { "nothing" } else { &progress.line };
    Some(format!("no progress for {} s while {}; the log last said: {last}", still.as_secs(), progress.phase))
}

fn at_phase(driver: &dyn Driver, class: Class, cause: String) -> Failure {
    let phase = driver.progress().map_or(StartPhase::Launching, |progress| progress.borrow().phase);
    Failure::of(Diagnosis::plain(class, Some(cause)), None, phase)
}

/// `/v1/models`.
#[derive(Debug, Deserialize)]
struct List {
    data: Vec<Model>,
}

#[derive(Debug, Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<u64>,
}

impl List {
    fn absent(&self, expected: &[String]) -> Vec<String> {
        let served: HashSet<&str> = self.data.iter().map(|model| model.id.as_str()).collect();
        expected.iter().filter(|name| !served.contains(name.as_str())).cloned().collect()
    }

    fn into_parts(self) -> (Vec<String>, Option<u64>) {
        let longest = self.data.iter().filter_map(|model| model.max_model_len).max();
        (self.data.into_iter().map(|model| model.id).collect(), longest)
    }
}

/// What the engine serves, if it is healthy.
async fn asked(address: &Address, patience: Duration) -> Option<List> {
    let (status, _) = fetch(address, "/health", patience, BODY_MAX).await.ok()?;
    if !status.is_success() {
        return None;
    }
    let (status, body) = fetch(address, "/v1/models", patience, BODY_MAX).await.ok()?;
    status.is_success().then(|| serde_json::from_slice(&body).ok())?
}
