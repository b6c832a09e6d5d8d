//! `sluice demo`: compares three ways of routing, in a minute and a half and without a GPU.
//!
//! Two simulated engines (profile `h200-llama-8b`) and the gateway, all in this process, get the same mixed load three
//! times: same seed, prompts and send times. Only the configuration of gateway and engines differs (`arrangement`). It begins
//! with what it shows and where to watch it; the tail latencies of each arrangement are printed as they are measured. The last arrangement keeps serving until Ctrl-C, or ends with `--once`.
//!
//! The load is the one that was measured on two real H200 GPUs: short requests of 200 prompt and 128
//! output tokens at 30 per second, long ones of 16,000 and 64 at 2 per second, both Poisson. Prompts
//! are token ids, so that their lengths are exact.
//!
//! Engines run in real time (speed 1), so the latencies include those of the gateway itself. Each arrangement gets new
//! engines, a new gateway and a few warm-up requests that are not counted.
//!
//! | file | what |
//! |---|---|
//! | `arrangement` | engine flags and gateway configuration of each |
//! | `stage` | starts and stops engines and gateway |
//! | `compare` | the table, the verdict, the JSON |

mod arrangement;
mod compare;
mod stage;

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::line::Line;
use super::serve::raise_file_limit;
use super::terminal::wrapped;
use crate::bench::{
    self, Arrival, Class, Extent, Length, LoadClient, Prefix, PromptTokens, RunPlan, RunResult, Slo, Workload,
};
use arrangement::{ALL, Arrangement, MODEL};
use compare::{Comparison, LATE_MS, Row, TEXT};
use stage::Up;

/// Short and long requests per second.
const RATES: [f64; 2] = [30.0, 2.0];
/// Longest load for each arrangement.
const MAX_SECONDS: f64 = 600.0;
/// A request that takes longer than this has failed; the slowest measured one took 14 s.
const REQUEST_LIMIT: Duration = Duration::from_secs(120);
/// Warm-up requests of each class, so that every engine and connection has been used.
const WARM_UP: u64 = 4;
/// How often an arrangement is measured while the machine is too busy. The last measurement counts.
const ATTEMPTS: u32 = 2;
/// First number of the warm-up requests, far from those that are counted.
const WARM_UP_FROM: u64 = 1 << 40;

/// A seed whose load is nearly the nominal one: 580 short requests in 20 s (600 are expected), 39 long
/// ones (40 are). Results differ between seeds, the long side's most: some have 30 long requests, some 50.
const TYPICAL_SEED: u64 = 11;

/// Compare three ways of routing on simulated engines.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Exit after the table instead of serving until Ctrl-C
    #[arg(long)]
    pub once: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Seconds of load for each of the three arrangements
    #[arg(long, default_value_t = 20.0, value_parser = seconds)]
    pub seconds: f64,
    /// Seed of the load: prompts and arrival times follow from it
    #[arg(long, default_value_t = TYPICAL_SEED)]
    pub seed: u64,
    /// Address for clients [default: 127.0.0.1:8080, or a free port when that is taken]
    #[arg(long)]
    pub listen: Option<std::net::SocketAddr>,
    /// Address for metrics and the dashboard [default: 127.0.0.1:8081, or a free port when that is taken]
    #[arg(long)]
    pub admin: Option<std::net::SocketAddr>,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (1.0..=MAX_SECONDS).contains(&value) => Ok(value),
        _ => Err(format!("give a number of seconds from 1 to {MAX_SECONDS}")),
    }
}

/// Runs the demo until it is over or interrupted.
pub fn run(args: &DemoArgs) -> ExitCode {
    // Clients, gateway and engines are all in this process: each request takes four descriptors.
    raise_file_limit();
    run_on_threads(args).unwrap_or_else(|error| {
        eprintln!("demo: {error:#}");
        ExitCode::FAILURE
    })
}

fn run_on_threads(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let addresses = stage::Addresses { listen: args.listen, admin: args.admin }.chosen()?;
    print_opening(args, &addresses);
    let code = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let stopped = async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        show(args, async |arrangement| stage::raise(arrangement, addresses).await, stopped).await
    });
    super::runtime::end(runtime);
    code
}

/// The demo itself: `raise` starts an arrangement, `stopped` ends when the user stops the demo.
async fn show(
    args: &DemoArgs,
    raise: impl AsyncFn(Arrangement) -> anyhow::Result<Up>,
    stopped: impl Future<Output = ()>,
) -> anyhow::Result<ExitCode> {
    let mut stopped = std::pin::pin!(stopped);
    let (comparison, up) = tokio::select! {
        outcome = compare_all(args, raise, |row, first| print_row(args, row, first)) => outcome?,
        () = &mut stopped => {
            eprintln!("interrupted before all three arrangements were measured, so there is no result");
            return Ok(ExitCode::FAILURE);
        }
    };
    print_result(args, &comparison)?;
    if !args.once {
        print_invitation(&up);
        stopped.await;
    }
    up.stop().await;
    Ok(if comparison.failures() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Measures every arrangement in turn and leaves the last one running. An arrangement is measured again, with new engines
/// and gateway, when the machine was too busy. `show` gets each row when it is final, and whether it is the first.
async fn compare_all(
    args: &DemoArgs,
    raise: impl AsyncFn(Arrangement) -> anyhow::Result<Up>,
    show: impl Fn(&Row, bool) -> anyhow::Result<()>,
) -> anyhow::Result<(Comparison, Up)> {
    let plan = plan(args);
    let mut rows = Vec::new();
    let mut running: Option<Up> = None;
    for (index, arrangement) in ALL.into_iter().enumerate() {
        let title = format!("{} of {}: {}", index + 1, ALL.len(), arrangement.label());
        for attempt in 1..=ATTEMPTS {
            if let Some(previous) = running.take() {
                previous.stop().await;
            }
            let up = raise(arrangement).await.with_context(|| format!("cannot start '{}'", arrangement.label()))?;
            let row = Row::of(arrangement, &measure(&plan, &up, &title).await?);
            running = Some(up);
            let late = row.late_ms();
            if attempt == ATTEMPTS || late <= LATE_MS {
                show(&row, rows.is_empty())?;
                rows.push(row);
                break;
            }
            // Decided by the send times alone, never by the result.
            eprintln!(
                "{}: this machine was busy (requests were sent {late:.0} ms late), measuring again",
                arrangement.label()
            );
        }
    }
    let up = running.context("there are no arrangements")?;
    Ok((Comparison { rows, seconds: args.seconds, seed: args.seed }, up))
}

async fn measure(plan: &RunPlan, up: &Up, title: &str) -> anyhow::Result<RunResult> {
    let client = Arc::new(LoadClient::new(&up.urls, plan.workload.api, REQUEST_LIMIT)?);
    for ordinal in WARM_UP_FROM..WARM_UP_FROM + WARM_UP {
        for class in 0..RATES.len() {
            let question = plan.workload.request_in_class(class as u32, ordinal);
            client
                .send(&question, Instant::now())
                .await
                .map_err(|failure| anyhow::anyhow!("the first requests failed ({failure})"))?;
        }
    }
    let progress = Arc::new(bench::Progress::default());
    let shown = Line::start(title, plan.extent, progress.clone());
    let run = bench::run(plan, &client, &progress).await?;
    shown.end();
    Ok(run)
}

fn plan(args: &DemoArgs) -> RunPlan {
    let class = |name: &str, prompt, output, weight| Class {
        name: name.to_owned(),
        prompt: Length::Exactly(prompt),
        output: Length::Exactly(output),
        weight,
        prefix: Prefix::default(),
        slo: Slo::default(),
    };
    let classes = vec![class("short", 200, 128, RATES[0]), class("long", 16_000, 64, RATES[1])];
    // Ids that every vocabulary of a Llama 3 has, without the special ones at its end.
    let workload =
        Workload { tokens: PromptTokens::Ids(1_000..100_000), ..Workload::of_classes(MODEL, classes, args.seed) };
    let extent = Extent::Lasting(Duration::from_secs_f64(args.seconds));
    RunPlan::new(workload, Arrival::Poisson { rate: RATES.iter().sum() }, extent)
}

/// What the demo shows and where to watch it. On stderr, since it is not a result.
fn print_opening(args: &DemoArgs, addresses: &stage::Addresses) {
    let text = format!(
        "Two simulated H200s behind the gateway get the same traffic in three arrangements, one after the other: per second \
         {} short requests (200 tokens in, 128 out) and {} long ones (16,000 in, 64 out), for {} s each. A long prompt delays \
         the short requests on its engine; the arrangements differ in how much.",
        RATES[0], RATES[1], args.seconds
    );
    eprintln!("{}", wrapped(&text, TEXT));
    if let Some(admin) = addresses.admin {
        eprintln!("Watch it live: http://{admin}/\n");
    }
}

/// A row of the table as soon as it is measured.
fn print_row(args: &DemoArgs, row: &Row, first: bool) -> anyhow::Result<()> {
    if args.json {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    if first {
        writeln!(out, "{}", compare::head(row, args.seconds, args.seed))?;
    }
    writeln!(out, "{row}")?;
    Ok(out.flush()?)
}

fn print_result(args: &DemoArgs, comparison: &Comparison) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", comparison.json())?;
    } else {
        writeln!(out, "\n{}", comparison.ending())?;
    }
    out.flush()?;
    Ok(())
}

/// How to use the running gateway. On stderr, since it is not a result.
fn print_invitation(up: &Up) {
    let url = up.urls.first().map_or("", String::as_str);
    eprintln!("\nStill serving '{}'. Try it:", ALL[ALL.len() - 1].label());
    eprintln!(
        "  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\":\"{MODEL}\",\"stream\":true,\"max_tokens\":64,\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}]}}'"
    );
    if let Some(admin) = &up.admin {
        eprintln!("  dashboard {admin}/   metrics {admin}/metrics");
    }
    eprintln!("Ctrl-C stops it.");
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::bench::mock::{MockEngine, MockResponse, completion_stream};

    fn args() -> DemoArgs {
        DemoArgs { once: true, json: true, seconds: 1.0, seed: TYPICAL_SEED, listen: None, admin: None }
    }

    /// How many arrangements were started and stopped.
    #[derive(Default)]
    struct Counts {
        ups: AtomicUsize,
        downs: AtomicUsize,
    }

    impl Counts {
        fn running(&self) -> usize {
            self.ups.load(Ordering::SeqCst) - self.downs.load(Ordering::SeqCst)
        }
    }

    async fn raise_mock(status: u16, counts: Arc<Counts>) -> anyhow::Result<Up> {
        let engine = MockEngine::start(move |number| MockResponse {
            // Warm-up requests succeed, later ones as the test says.
            status: if number < 2 * WARM_UP { 200 } else { status },
            ..MockResponse::stream(completion_stream(2), Duration::ZERO)
        })
        .await;
        counts.ups.fetch_add(1, Ordering::SeqCst);
        let url = engine.url();
        let stop = async move {
            drop(engine);
            counts.downs.fetch_add(1, Ordering::SeqCst);
        };
        Ok(Up::new(vec![url], None, stop))
    }

    #[tokio::test]
    async fn three_arrangements_get_the_same_requests_and_all_are_stopped() {
        let counts = Arc::new(Counts::default());
        let shown = std::cell::RefCell::new(Vec::new());
        let (comparison, up) = compare_all(
            &args(),
            async |_| {
                assert_eq!(counts.running(), 0, "one at a time");
                raise_mock(200, counts.clone()).await
            },
            |row, first| {
                shown.borrow_mut().push((row.arrangement, first));
                Ok(())
            },
        )
        .await
        .unwrap();
        let order = [(ALL[0], true), (ALL[1], false), (ALL[2], false)];
        assert_eq!(*shown.borrow(), order, "each is shown once, when it is final");
        assert_eq!(counts.running(), 1, "the last keeps running");
        up.stop().await;
        assert_eq!(counts.running(), 0);
        // More when the machine that runs this test was busy and an arrangement was measured again.
        assert!(counts.ups.load(Ordering::SeqCst) >= 3);
        let sent: Vec<u64> = comparison.rows.iter().map(|row| row.all.sent).collect();
        assert!(sent.len() == 3 && sent[0] > 0 && sent.iter().all(|count| *count == sent[0]), "{sent:?}");
        assert_eq!(comparison.failures(), 0);
    }

    #[tokio::test]
    async fn failed_requests_make_the_demo_fail() {
        let counts = Arc::new(Counts::default());
        let code =
            show(&args(), async |_| raise_mock(503, counts.clone()).await, std::future::pending()).await.unwrap();
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::FAILURE));
        assert_eq!(counts.running(), 0);
    }

    #[tokio::test]
    async fn an_interrupt_ends_it_at_once() {
        let raise = async |_: Arrangement| std::future::pending::<anyhow::Result<Up>>().await;
        let code = show(&args(), raise, std::future::ready(())).await.unwrap();
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::FAILURE));
    }

    #[test]
    fn seconds_out_of_range_are_wrong_usage() {
        assert_eq!(seconds("20"), Ok(20.0));
        assert!(seconds("0").is_err());
        assert!(seconds("soon").is_err());
        assert!(seconds("NaN").is_err());
    }
}
