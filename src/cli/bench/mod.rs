//! `sluice bench`: puts load on a server and reports the measurements of the clients.
//!
//! Flags, table labels and JSON keys are as in `vllm bench serve` where one exists. The result goes
//! to stdout, the progress line and notes to stderr.
//!
//! Ctrl-C ends the run at once. The result so far is printed and saved, marked as partial. Exit
//! codes: 0 measured; 1 ended early, no server, or no request completed; 2 wrong usage.
//!
//! | file | content |
//! |---|---|
//! | `args`, `values` | the flags |
//! | `requests`, `plan` | from flags to a workload and a plan |
//! | `calibrate` | tokens that the server adds to a text |
//! | `classes` | the gateway's classes, by which results are shown |
//! | `show` | printed and saved results |
//! | `find_rate` | the search for the highest rate |
//! | `tools` | saved results: report, compare |
//! | `error`, `signals` | exit codes, Ctrl-C |

mod by_class;
mod args;
mod calibrate;
mod classes;
mod error;
pub(super) mod find_rate;
mod plan;
mod requests;
mod show;
pub(in crate::cli) mod signals;
mod tools;
mod values;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use args::BenchArgs;

use super::line::Line;
use super::serve::raise_file_limit;
use error::{CommandError, failed, usage};
use plan::Setup;
use signals::StopSignals;
use sluice_bench::run::profile;
use sluice_bench::{LoadClient, Progress, RequestFailure, RunPlan, RunResult};

const READY_EVERY: Duration = Duration::from_millis(500);
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a query for the server's version. It is short, because a result can do without the
/// version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_VERSION: usize = 4 << 10;
/// The name in the body that a dry run shows, if no model is named.
const UNKNOWN_MODEL: &str = "MODEL";
const MAX_MODEL_LIST: usize = 4 << 20;

/// Runs the command.
pub fn run(args: &BenchArgs) -> ExitCode {
    if let Some(tool) = &args.tool {
        return tools::run(tool);
    }
    raise_file_limit();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("bench: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(measure_all(args));
    super::runtime::end(runtime);
    match outcome {
        Ok(code) => code,
        Err(CommandError::Usage(error)) => {
            eprintln!("bench: {error:#}");
            ExitCode::from(2)
        }
        Err(CommandError::Failed(error)) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn measure_all(args: &BenchArgs) -> Result<ExitCode, CommandError> {
    let mut setup = set_up(args).await?;
    if !args.output.dry_run {
        setup.server_versions = server_versions(&setup.client).await;
        setup.classes = classes::find(args).await.map_err(usage)?;
        calibrate::calibrate(&mut setup).await;
    }
    setup.notes.iter().for_each(|note| eprintln!("note: {note}"));
    if args.search.find_rate && !args.output.dry_run {
        let mut stop = StopSignals::listen().map_err(failed)?;
        return find_rate::run(args, &setup, &mut stop).await;
    }
    let runs = setup.runs();
    if args.output.dry_run {
        return show::dry_run(&setup, &runs).map(|()| ExitCode::SUCCESS).map_err(usage);
    }
    let mut out = show::Output::new(args, &setup, runs.len() > 1).map_err(usage)?;
    let mut stop = StopSignals::listen().map_err(failed)?;
    let outcome = measure_runs(args, &setup, &runs, &mut out, &mut stop).await;
    if let Err(CommandError::Usage(error)) = outcome {
        return Err(CommandError::Usage(error));
    }
    // After a failure the complete runs are still shown and written.
    let code = out.finish().map_err(failed)?;
    outcome.map(|()| code)
}

async fn measure_runs(
    args: &BenchArgs,
    setup: &Setup,
    runs: &[(String, RunPlan)],
    out: &mut show::Output<'_>,
    stop: &mut StopSignals,
) -> Result<(), CommandError> {
    for (number, (name, plan)) in runs.iter().enumerate() {
        tokio::select! {
            prepared = prepare(args, &setup.client, plan) => prepared.map_err(failed)?,
            () = stop.received() => return Err(failed(anyhow::anyhow!("stopped before the run had begun"))),
        }
        let title = match runs.len() {
            1 => "bench".to_owned(),
            all => format!("{} of {all}, {} {name}", number + 1, setup.varied()),
        };
        if args.load.profile {
            profile::start(&setup.client).await.map_err(failed)?;
        }
        let measured = measure(args, &title, plan, &setup.client, stop).await;
        let mut traced = Ok(());
        if args.load.profile {
            eprintln!("waiting for the profiler, which writes its trace where the server's --profiler-config says");
            traced = profile::stop(&setup.client).await;
        }
        let mut result = measured.map_err(usage)?;
        if let Err(error) = traced {
            result.warnings.push(format!("the trace may be missing: {error}"));
        }
        setup.annotate(&mut result);
        for (status, reason) in setup.client.reasons() {
            result.warnings.push(format!("the first response with status {status} said: {reason}"));
        }
        let partial = result.partial;
        out.add_run(name, result).map_err(failed)?;
        if partial {
            break;
        }
    }
    Ok(())
}

async fn prepare(args: &BenchArgs, client: &Arc<LoadClient>, plan: &RunPlan) -> anyhow::Result<()> {
    if args.load.reset_prefix_cache {
        reset_prefix_cache(client).await?;
    }
    warm_up(args, client, plan).await
}

async fn set_up(args: &BenchArgs) -> Result<Setup, CommandError> {
    let client = plan::client(args).map_err(usage)?;
    if args.output.dry_run {
        let recorded = || requests::recorded_model(args).unwrap_or_else(|| UNKNOWN_MODEL.to_owned());
        let model = args.server.model.clone().unwrap_or_else(recorded);
        return Setup::of(args, client, &model).map_err(usage);
    }
    // Wrong flags are reported even when no server runs.
    if let Some(model) = &args.server.model {
        Setup::of(args, plan::client(args).map_err(usage)?, model).map_err(usage)?;
    }
    let (status, models) = ready(args, &client).await.map_err(failed)?;
    let model = match (&args.server.model, models.first()) {
        (Some(model), _) => model.clone(),
        (None, Some(model)) => model.clone(),
        (None, None) if status == 404 => {
            return Err(failed(anyhow::anyhow!(
                "{}/v1/models returned status 404; --base-url is the address without the path of requests, and of a sluice \
                 that of its client port (server.listen), not of its admin port; or give --model",
                client.urls().first().cloned().unwrap_or_default()
            )));
        }
        (None, None) => {
            return Err(failed(anyhow::anyhow!(
                "the server lists no model; give --model, and OPENAI_API_KEY or --header if it requires a key"
            )));
        }
    };
    let sent = args.server.served_model_name.as_ref().unwrap_or(&model);
    if !models.is_empty() && !models.contains(sent) {
        eprintln!("note: the server does not list '{sent}' (it lists {})", models.join(", "));
    }
    Setup::of(args, client, &model).map_err(usage)
}

/// Waits until every server responds. Returns the first server's list of models, with its status.
async fn ready(args: &BenchArgs, client: &LoadClient) -> anyhow::Result<(u16, Vec<String>)> {
    let wait = args.server.ready_check_timeout_sec;
    let deadline = Instant::now() + Duration::try_from_secs_f64(wait.max(0.0)).unwrap_or_default();
    loop {
        let responses = client.get_each("/v1/models", MAX_MODEL_LIST, READY_TIMEOUT).await;
        let unready = client.urls().into_iter().zip(&responses).find_map(|(url, response)| match response {
            Err(RequestFailure::Tls) => Some(format!(
                "the TLS handshake with {url} failed: if its certificate is not one that this machine trusts, name its CA in \
                 SSL_CERT_FILE, or give --insecure; if it speaks no TLS, write http://"
            )),
            Err(RequestFailure::Connect) => Some(format!(
                "nothing listens at {url}; is the server running? (--base-url, --ready-check-timeout-sec)"
            )),
            Err(failure) => Some(format!("no response from {url}/v1/models: {failure}")),
            Ok((status @ 500.., _)) => Some(format!(
                "{url} is not ready: /v1/models returned status {status}; wait for it with --ready-check-timeout-sec"
            )),
            Ok(_) => None,
        });
        let Some(unready) = unready else {
            let (status, body) = responses.into_iter().next().and_then(Result::ok).unwrap_or_default();
            return Ok((status, names(&body)));
        };
        anyhow::ensure!(Instant::now() < deadline, unready);
        tokio::time::sleep(READY_EVERY).await;
    }
}

/// The versions that the servers report, without repetitions. A server without `/version`, such as
/// a gateway, adds none.
async fn server_versions(client: &LoadClient) -> Vec<String> {
    let mut versions = Vec::new();
    for (_, body) in client.get_each("/version", MAX_VERSION, VERSION_TIMEOUT).await.into_iter().flatten() {
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        if let Some(version) = body["version"].as_str()
            && !versions.iter().any(|known| known == version)
        {
            versions.push(version.to_owned());
        }
    }
    versions
}

fn names(body: &[u8]) -> Vec<String> {
    let list: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let models = list.get("data").and_then(serde_json::Value::as_array);
    let name = |model: &serde_json::Value| model.get("id")?.as_str().map(str::to_owned);
    models.into_iter().flatten().filter_map(name).collect()
}

/// Sends the warm-up requests, and stops at the first failure.
async fn warm_up(args: &BenchArgs, client: &Arc<LoadClient>, plan: &RunPlan) -> anyhow::Result<()> {
    let at_once = args.load.max_concurrency.unwrap_or(args.load.num_warmups).max(1) as usize;
    let room = Arc::new(tokio::sync::Semaphore::new(at_once));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..args.load.num_warmups {
        let (client, room) = (client.clone(), room.clone());
        let mut request = plan.workload.request(0);
        request.leave_after = None;
        tasks.spawn(async move {
            let _room = room.acquire().await;
            client.send(&request, Instant::now()).await
        });
    }
    while let Some(response) = tasks.join_next().await {
        if let Err(failure) = response? {
            let said = client.reasons().into_values().next().map(|said| format!(": {said}")).unwrap_or_default();
            anyhow::bail!("a warm-up request failed ({failure}){said}");
        }
    }
    Ok(())
}

async fn reset_prefix_cache(client: &LoadClient) -> anyhow::Result<()> {
    for (url, response) in client.urls().into_iter().zip(client.post_each("/reset_prefix_cache").await) {
        match response {
            Ok(200) => {}
            Ok(404) => anyhow::bail!("{url} has no /reset_prefix_cache; start vLLM with VLLM_SERVER_DEV_MODE=1"),
            Ok(status) => anyhow::bail!("{url}/reset_prefix_cache returned status {status}"),
            Err(failure) => anyhow::bail!("{url}/reset_prefix_cache: {failure}"),
        }
    }
    Ok(())
}

async fn measure(
    args: &BenchArgs,
    title: &str,
    plan: &RunPlan,
    client: &Arc<LoadClient>,
    stop: &mut StopSignals,
) -> Result<RunResult, sluice_bench::BenchError> {
    let progress = Arc::new(Progress::default());
    let line = (!args.output.disable_tqdm).then(|| Line::start(title, plan.extent, progress.clone()));
    let mut running = sluice_bench::run(plan, client, &progress);
    let result = tokio::select! {
        result = &mut running => result,
        () = stop.received() => {
            progress.stop();
            running.await
        }
    };
    drop(line);
    result
}

#[cfg(test)]
mod tests;
