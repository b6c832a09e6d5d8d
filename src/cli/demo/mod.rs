//! `sluice demo`: compares three ways of routing without a GPU, in simulated time, then live until
//! Ctrl-C.
//!
//! Two simulated engines (profile `h200-llama-8b`) and the gateway, all in this process, get the
//! same mixed load in each arrangement. The load was measured on two real H200 GPUs: per second 30
//! short requests of 200 prompt and 128 output tokens and 2 long requests of 16,000 and 64 tokens,
//! both Poisson.
//!
//! Live engines run in real time, so the latencies include the gateway's own time. The gateway runs
//! throughout. Each arrangement is a new configuration with new engines, which are measured after a
//! few warm-up requests.
//!
//! | file | content |
//! |---|---|
//! | `arrangement` | engine flags and gateway configuration of each |
//! | `load` | flags and requests |
//! | `stage` | gateway and engines, and the change from one arrangement to another |
//! | `simulated` | the comparison in virtual time |
//! | `live` | the arrangements in turn, in real time |
//! | `compare` | the table, the verdict, the JSON |

mod arrangement;
mod compare;
mod load;
mod stage;
mod simulated;
mod live;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};

use super::serve::raise_file_limit;
use super::terminal::wrapped;
use arrangement::MODEL;
use compare::{Comparison, Row, TEXT};
pub use load::DemoArgs;
use load::{RATES, plan};
use stage::Stage;

/// Runs the demo until it is over or interrupted.
pub fn run(args: &DemoArgs) -> ExitCode {
    // Clients, gateway and engines share this process, so each request takes four descriptors.
    raise_file_limit();
    run_on_threads(args).unwrap_or_else(|error| {
        eprintln!("demo: {error:#}");
        ExitCode::FAILURE
    })
}

fn run_on_threads(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let addresses = stage::Addresses { listen: args.listen, admin: args.admin }.chosen()?;
    print_opening();
    let begun = Instant::now();
    let simulated = simulated::compare(&plan(args.seed, simulated::SECONDS), args.seed)?;
    print_simulated(args, &simulated, begun.elapsed())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let stopped = async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        let stage = Stage::raise(addresses).await?;
        print_invitation(args, &stage);
        let out = live::Out {
            row: &|row, first| print_row(args, row, first),
            end: &|all| print_result(args, all, &simulated),
        };
        let code =
            live::show(args, &stage.url(), async |arrangement| stage.put(arrangement).await, &out, stopped).await;
        stage.stop().await;
        code
    });
    super::runtime::end(runtime);
    code
}

fn print_opening() {
    let text = format!(
        "Two simulated H200s with an 8B model get, per second, {} short requests (200 tokens in, 128 out) and {} long ones \
         (16,000 in, 64 out). While an engine reads a long prompt, its short requests wait. How long they wait depends on the \
         arrangement of gateway and engines: here are three, under the same requests. Two of them also set flags of \
         the engines: the split --long-prefill-token-threshold 512 (short side) and --max-num-batched-tokens 2048 (long side), \
         one pool --long-prefill-token-threshold 256.",
        RATES[0], RATES[1]
    );
    eprintln!("{}\n", wrapped(&text, TEXT));
}

fn print_simulated(args: &DemoArgs, comparison: &Comparison, took: Duration) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        if !args.once {
            writeln!(out, "{:#}", serde_json::json!({ "simulated": comparison.json() }))?;
        }
        return Ok(out.flush()?);
    }
    let took = took.as_secs_f64();
    writeln!(out, "SIMULATED TIME: {} s of traffic for each arrangement, computed in {took:.1} s", comparison.seconds)?;
    for (at, row) in comparison.rows.iter().enumerate() {
        if at == 0 {
            writeln!(out, "{}", compare::head(row, comparison.seconds, comparison.seed))?;
        }
        writeln!(out, "{row}")?;
    }
    writeln!(out, "\n{}\n", comparison.ending())?;
    Ok(out.flush()?)
}

fn print_invitation(args: &DemoArgs, stage: &Stage) {
    let (url, admin, seconds) = (stage.url(), stage.admin(), args.seconds());
    let until = if args.once { "once each" } else { "in turn until Ctrl-C" };
    eprintln!("LIVE: the same traffic in real time, {seconds} s for each arrangement, {until}.\n");
    eprintln!("  Open     {admin}/");
    eprintln!("  Look at  \"Time to first token by class\": the P99 line of the short requests");
    eprintln!("           falls when 'round robin' ends; the label says which arrangement runs.");
    eprintln!("  Ask      curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\");
    eprintln!(
        "             -d '{{\"model\":\"{MODEL}\",\"stream\":true,\"max_tokens\":64,\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}]}}'\n"
    );
}

fn print_row(args: &DemoArgs, row: &Row, first: bool) -> anyhow::Result<()> {
    if args.json {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    if first {
        writeln!(out, "LIVE\n{}", compare::head(row, args.seconds(), args.seed))?;
    }
    writeln!(out, "{row}")?;
    Ok(out.flush()?)
}

fn print_result(args: &DemoArgs, comparison: &Comparison, simulated: &Comparison) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut json = comparison.json();
        if args.once {
            json["simulated"] = simulated.json();
        }
        writeln!(out, "{json:#}")?;
    } else {
        writeln!(out, "\n{}\n", comparison.ending())?;
    }
    Ok(out.flush()?)
}
