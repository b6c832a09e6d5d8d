//! `sluice check --probe`: asks every backend of a configuration whether `serve` can use it.
//!
//! `/health` must respond with 200, `/v1/models` must list the models of the pool, and `/version`,
//! if it exists, must not be older than the gateway supports. Engines that the gateway runs are not
//! asked, because they need not run yet. A server of another kind than its pool is a failure,
//! unless the pool has `engine = "auto"`. An alias counts as the aliased model. Different models or
//! context limits within a pool are named below the table. They are no failure, because the gateway
//! sends each backend only requests that the backend serves.
//!
//! Bounds: [`AT_ONCE`] backends at once, `health.probe_timeout` for each request, [`BYTES`] of each
//! response, and the bounds of [`sluice_fleet::read_models`] and [`sluice_fleet::identify`].

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::task::JoinSet;

use sluice_config::{Address, Config, Model, Pool, Target};
use sluice_core::base::ModelId;
use sluice_core::vllm::version::Version;
use sluice_fleet::{ModelCard, Unhealthy, Unreadable, fetch};
use sluice_gateway::pool::RefusedGateway;

const AT_ONCE: usize = 32;
/// Largest response of `/health` and `/version` that is read, bytes.
const BYTES: usize = 1 << 20;
const NAMES_SHOWN: usize = 8;

struct Question {
    pool: usize,
    backend: String,
    name: String,
    url: String,
    address: Arc<Address>,
    /// Whether the configuration leaves the kind of engine to probes.
    is_open: bool,
    models: Vec<String>,
}

/// The text of a line, or as an error the difference from the configuration. The list has the
/// models that the backend reports.
type Answer = (Result<String, String>, Vec<ModelCard>);

/// Asks all backends, and prints a line for each (with `quiet` only for failed ones) and notes.
/// Returns the exit code.
pub(super) fn run(config: &Config, quiet: bool, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let (questions, own) = questions(config);
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(err, "cannot start: {error}");
            return 1;
        }
    };
    let answers = runtime.block_on(ask_all(questions, config.health.probe_timeout));
    let width = answers.iter().map(|(question, _)| question.name.len()).max().unwrap_or(0);
    for (Question { name, url, .. }, (answer, _)) in &answers {
        let (word, text) = match answer {
            Ok(text) => ("ok", text),
            Err(text) => ("failed", text),
        };
        if answer.is_err() || !quiet {
            let _ = writeln!(out, "{word:<6}  {name:<width$}  {url}  {text}");
        }
    }
    for name in own.iter().filter(|_| !quiet) {
        let _ = writeln!(out, "{:<6}  {name:<width$}  not asked: the gateway starts it", "-");
    }
    for (index, pool) in config.pools.iter().enumerate().filter(|_| !quiet) {
        let members = answers.iter().filter(|(question, (_, cards))| question.pool == index && !cards.is_empty());
        if let Some(text) =
            sluice_fleet::differences(members.map(|(question, (_, cards))| (&*question.backend, &**cards)))
        {
            let _ = writeln!(out, "note    pool {}: its engines serve different requests: {text}", pool.name);
        }
    }
    u8::from(answers.iter().any(|(_, (answer, _))| answer.is_err()))
}

/// The questions, and the names of the backends that the gateway runs.
fn questions(config: &Config) -> (Vec<Question>, Vec<String>) {
    let (mut questions, mut own) = (Vec::new(), Vec::new());
    for (index, pool) in config.pools.iter().enumerate() {
        for backend in &pool.backends {
            let name = format!("{}/{}", pool.name, backend.name);
            let Target::Url(endpoint) = &backend.target else {
                own.push(name);
                continue;
            };
            let (url, address) = (endpoint.to_string(), Arc::new(Address::of(backend)));
            let (models, backend) = (models(config, pool), backend.name.clone());
            let is_open = pool.engine_is_open();
            questions.push(Question { pool: index, backend, name, url, address, is_open, models });
        }
    }
    (questions, own)
}

/// The declared models, which every backend of a pool must serve. Adapters of arms are left out,
/// because the gateway loads them later.
fn models(config: &Config, pool: &Pool) -> Vec<String> {
    let arms = || config.experiments.iter().flat_map(|experiment| &experiment.arms);
    let loaded_later =
        |model: &Model| model.adapter.is_some() && arms().any(|arm| arm.model.as_deref() == Some(&*model.name));
    let all = config.models.iter().enumerate();
    let own = all.filter(|(index, model)| pool.models.includes(ModelId::new(*index)) && !loaded_later(model));
    own.map(|(_, model)| model.name.clone()).collect()
}

async fn ask_all(questions: Vec<Question>, limit: Duration) -> Vec<(Question, Answer)> {
    let mut waiting = questions.into_iter().enumerate();
    let (mut asked, mut answers) = (JoinSet::new(), Vec::new());
    loop {
        while asked.len() < AT_ONCE
            && let Some((place, question)) = waiting.next()
        {
            asked.spawn(async move {
                let answer = ask(&question, limit).await;
                (place, question, answer)
            });
        }
        match asked.join_next().await {
            Some(Ok(answered)) => answers.push(answered),
            // A task that panicked has reported the panic on stderr.
            Some(Err(_)) => {}
            None => break,
        }
    }
    answers.sort_by_key(|(place, ..)| *place);
    answers.into_iter().map(|(_, question, answer)| (question, answer)).collect()
}

async fn ask(question: &Question, limit: Duration) -> Answer {
    let mut cards = Vec::new();
    let answer = judge(question, limit, &mut cards).await;
    (answer, cards)
}

async fn judge(question: &Question, limit: Duration, cards: &mut Vec<ModelCard>) -> Result<String, String> {
    let get = async |path: &str| match fetch(&question.address, path, limit, BYTES).await {
        Ok((status, body)) if status.is_success() => Ok(body),
        Ok((status, _)) => Err(refusal(path, status.as_u16(), question.address.api_key.is_some())),
        Err(error) => Err(error.to_string()),
    };
    let address = recognised(question, limit).await?;
    let engine = address.engine;
    if !engine.rules().lists_models {
        return Ok(format!("{}, healthy", engine.label()));
    }
    let has_key = question.address.api_key.is_some();
    *cards = match sluice_fleet::read_models(&address, limit).await {
        Ok(list) => list.cards,
        Err(Unreadable::Status(status)) => return Err(refusal("/v1/models", status, has_key)),
        Err(why) => return Err(why.to_string()),
    };
    let served: Vec<&str> = cards.iter().map(|card| card.id.as_str()).collect();
    let missing: Vec<&str> =
        question.models.iter().map(String::as_str).filter(|model| !served.contains(model)).collect();
    if !missing.is_empty() {
        return Err(format!("does not serve {}; it serves {}", names(&missing), names(&served)));
    }
    let Some(page) = engine.rules().version else {
        return Ok(format!("{}, serves {}", engine.label(), names(&served)));
    };
    let version = get(page).await.ok().and_then(|body| version_of(&body));
    match version {
        Some(version) if version < Version::OLDEST => {
            Err(format!("runs vLLM {version}; the gateway supports {} and later", Version::OLDEST))
        }
        Some(version) => Ok(format!("vLLM {version}, serves {}", names(&served))),
        None => Ok(format!("version unknown, serves {}", names(&served))),
    }
}

/// The address with the kind of the server that was found. The health pages of that kind must be
/// healthy.
async fn recognised(question: &Question, limit: Duration) -> Result<Arc<Address>, String> {
    let address = &question.address;
    let health = sluice_fleet::read_health(address, limit).await;
    if let Err(why @ (Unhealthy::Loading | Unhealthy::Down(_))) = &health {
        return Err(why.to_string());
    }
    let kind = sluice_fleet::identify(address, None, limit).await.ok().flatten().unwrap_or(address.engine);
    match sluice_fleet::mismatch(address.engine, kind) {
        Some(_) if question.is_open => {
            let address = Arc::new(Address { engine: kind, ..Address::clone(address) });
            sluice_fleet::read_health(&address, limit).await.map_err(|why| why.to_string())?;
            Ok(address)
        }
        Some(advice) => Err(advice),
        None => health.map(|()| Arc::clone(address)).map_err(|why| why.to_string()),
    }
}

fn refusal(path: &str, status: u16, has_key: bool) -> String {
    match status {
        401 | 403 => format!("{path}: {}", RefusedGateway { status, by_probe: true }.text(has_key)),
        _ => format!("{path} responds with status {status}"),
    }
}

fn version_of(body: &[u8]) -> Option<Version> {
    #[derive(Deserialize)]
    struct Answer {
        version: String,
    }
    serde_json::from_slice::<Answer>(body).ok()?.version.parse().ok()
}

fn names(all: &[&str]) -> String {
    match all {
        [] => "no model".to_owned(),
        _ if all.len() > NAMES_SHOWN => {
            format!("{} and {} more", all[..NAMES_SHOWN].join(", "), all.len() - NAMES_SHOWN)
        }
        _ => all.join(", "),
    }
}
