//! `sluice bench`: puts load on a server and says what its clients saw.
//!
//! The flags are those of `vllm bench serve` where one exists (`args`); the table and the JSON have its labels and keys. A
//! sweep is several runs, one after the other. The result goes to stdout, the line of progress and notes to stderr.
//!
//! Ctrl-C ends the run at once and prints, and saves, what there is, marked as partial; in a sweep the runs that were complete
//! are saved already. Exit codes: 0 measured; 1 ended early, no server, or not one request answered; 2 wrong usage.
//!
//! | file | what |
//! |---|---|
//! | `args`, `values` | the flags |
//! | `requests`, `plan` | from flags to a workload and a plan |
//! | `show` | tables, files, names of files |
//! | `find_rate` | the search for the highest rate |
//! | `tools` | what to do with saved results: report, compare |

mod args;
mod find_rate;
mod plan;
mod requests;
mod show;
mod tools;
mod values;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

pub use args::BenchArgs;

use super::line::Line;
use super::serve::raise_file_limit;
use crate::bench::{self, Client, Failure, Plan, Progress, RunResult};
use plan::Setup;

/// Between two looks whether the server answers.
const READY_EVERY: Duration = Duration::from_millis(500);
/// The longest that one of them may take.
const READY_LOOK: Duration = Duration::from_secs(10);
/// Of a list of models.
const MAX_LIST: usize = 4 << 20;

/// What ended a command before its time.
enum Trouble {
    /// The flags or the dataset: exit code 2.
    Usage(anyhow::Error),
    /// Server or system: exit code 1.
    Failed(anyhow::Error),
}

fn usage(error: impl Into<anyhow::Error>) -> Trouble {
    Trouble::Usage(error.into())
}

fn failed(error: impl Into<anyhow::Error>) -> Trouble {
    Trouble::Failed(error.into())
}

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
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(Trouble::Usage(error)) => {
            eprintln!("bench: {error:#}");
            ExitCode::from(2)
        }
        Err(Trouble::Failed(error)) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn measure_all(args: &BenchArgs) -> Result<ExitCode, Trouble> {
    let setup = set_up(args).await?;
    setup.notes.iter().for_each(|note| eprintln!("note: {note}"));
    if args.search.find_rate && !args.output.dry_run {
        let mut stop = Stop::listen().map_err(failed)?;
        return find_rate::run(args, &setup, &mut stop).await;
    }
    let runs = setup.runs();
    if args.output.dry_run {
        return show::dry_run(&setup, &runs).map(|()| ExitCode::SUCCESS).map_err(usage);
    }
    let mut out = show::Output::new(args, &setup, runs.len() > 1).map_err(usage)?;
    // What ends a sweep early; what was measured until then is shown and written first.
    let mut trouble = None;
    let mut stop = Stop::listen().map_err(failed)?;
    for (number, (name, plan)) in runs.iter().enumerate() {
        let prepared = async {
            if args.load.reset_prefix_cache {
                reset_prefix_cache(&setup.client).await?;
            }
            warm_up(args, &setup.client, plan).await
        };
        tokio::select! {
            prepared = prepared => if let Err(error) = prepared {
                trouble = Some(error);
                break;
            },
            () = stop.wanted() => {
                trouble = Some(anyhow::anyhow!("stopped before the run had begun"));
                break;
            }
        }
        let title = match runs.len() {
            1 => "bench".to_owned(),
            all => format!("{} of {all}, {} {name}", number + 1, setup.varied()),
        };
        let mut result = measure(args, &title, plan, &setup.client, &mut stop).await.map_err(usage)?;
        setup.dress(&mut result);
        for (status, reason) in setup.client.reasons() {
            result.warnings.push(format!("the first answer with status {status} said: {reason}"));
        }
        let partial = result.partial;
        if let Err(error) = out.take(name, result) {
            trouble = Some(error);
            break;
        }
        if partial {
            break;
        }
    }
    let code = out.finish().map_err(failed)?;
    trouble.map_or(Ok(code), |error| Err(failed(error)))
}

/// Everything before the first request.
async fn set_up(args: &BenchArgs) -> Result<Setup, Trouble> {
    let client = plan::client(args).map_err(usage)?;
    // A dry run needs no server when the model is named.
    if let Some(model) = args.server.model.clone().filter(|_| args.output.dry_run) {
        return Setup::of(args, client, &model).map_err(usage);
    }
    // What is wrong in the flags is said without a server, too.
    if let Some(model) = &args.server.model {
        Setup::of(args, plan::client(args).map_err(usage)?, model).map_err(usage)?;
    }
    let models = ready(args, &client).await.map_err(failed)?;
    let model = match (&args.server.model, models.first()) {
        (Some(model), _) => model.clone(),
        (None, Some(model)) => model.clone(),
        (None, None) => {
            return Err(failed(anyhow::anyhow!(
                "the server names no model; give --model, and OPENAI_API_KEY or --header where it wants a key"
            )));
        }
    };
    let sent = args.server.served_model_name.as_ref().unwrap_or(&model);
    if !models.is_empty() && !models.contains(sent) {
        eprintln!("note: the server does not list '{sent}' (it lists {})", models.join(", "));
    }
    Setup::of(args, client, &model).map_err(usage)
}

/// Waits until every server answers; the models that the first one names.
async fn ready(args: &BenchArgs, client: &Client) -> anyhow::Result<Vec<String>> {
    let wait = args.server.ready_check_timeout_sec;
    let deadline = Instant::now() + Duration::try_from_secs_f64(wait.max(0.0)).unwrap_or_default();
    loop {
        let answers = client.get_each("/v1/models", MAX_LIST, READY_LOOK).await;
        let unready = client.urls().into_iter().zip(&answers).find_map(|(url, answer)| match answer {
            Err(Failure::Connect) => Some(format!(
                "nothing listens at {url}; is the server running? (--base-url, --ready-check-timeout-sec)"
            )),
            Err(failure) => Some(format!("{url} does not answer /v1/models: {failure}")),
            Ok((status @ 500.., _)) => {
                Some(format!("{url} is not ready: /v1/models answers {status} (--ready-check-timeout-sec waits)"))
            }
            Ok(_) => None,
        });
        let Some(unready) = unready else {
            let (_, body) = answers.into_iter().next().and_then(Result::ok).unwrap_or_default();
            return Ok(names(&body));
        };
        anyhow::ensure!(Instant::now() < deadline, unready);
        tokio::time::sleep(READY_EVERY).await;
    }
}

/// The names in a list of models.
fn names(body: &[u8]) -> Vec<String> {
    let list: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let models = list.get("data").and_then(serde_json::Value::as_array);
    let name = |model: &serde_json::Value| model.get("id")?.as_str().map(str::to_owned);
    models.into_iter().flatten().filter_map(name).collect()
}

/// Requests before the clock runs. The first that fails ends it: nothing better would follow.
async fn warm_up(args: &BenchArgs, client: &Arc<Client>, plan: &Plan) -> anyhow::Result<()> {
    let at_once = args.load.max_concurrency.unwrap_or(args.load.num_warmups).max(1) as usize;
    let room = Arc::new(tokio::sync::Semaphore::new(at_once));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..args.load.num_warmups {
        let (client, room) = (client.clone(), room.clone());
        let mut question = plan.workload.question(0);
        question.leave_after = None;
        tasks.spawn(async move {
            let _room = room.acquire().await;
            client.ask(&question, Instant::now()).await
        });
    }
    while let Some(answer) = tasks.join_next().await {
        if let Err(failure) = answer? {
            let said = client.reasons().into_values().next().map(|said| format!(": {said}")).unwrap_or_default();
            anyhow::bail!("a request that warms up failed ({failure}){said}");
        }
    }
    Ok(())
}

async fn reset_prefix_cache(client: &Client) -> anyhow::Result<()> {
    for (url, answer) in client.urls().into_iter().zip(client.post_each("/reset_prefix_cache").await) {
        match answer {
            Ok(200) => {}
            Ok(404) => anyhow::bail!("{url} has no /reset_prefix_cache; start vLLM with VLLM_SERVER_DEV_MODE=1"),
            Ok(status) => anyhow::bail!("{url}/reset_prefix_cache answered {status}"),
            Err(failure) => anyhow::bail!("{url}/reset_prefix_cache: {failure}"),
        }
    }
    Ok(())
}

/// One run, with a line of progress, until it ends or somebody wants it to.
async fn measure(
    args: &BenchArgs,
    title: &str,
    plan: &Plan,
    client: &Arc<Client>,
    stop: &mut Stop,
) -> Result<RunResult, bench::BenchError> {
    let progress = Arc::new(Progress::default());
    let line = (!args.output.disable_tqdm).then(|| Line::start(title, plan.extent, progress.clone()));
    let mut running = std::pin::pin!(bench::run(plan, client, &progress));
    let result = tokio::select! {
        result = &mut running => result,
        () = stop.wanted() => {
            progress.stop();
            running.await
        }
    };
    drop(line);
    result
}

/// Ctrl-C and SIGTERM.
struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    fn listen() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn wanted(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests;
