//! `sluice sim MODEL [flags of vllm serve] [--sim-*]`: a process that behaves like `vllm serve`.
//!
//! Flags of the simulator itself:
//!
//! | flag | default | what |
//! |---|---|---|
//! | `--sim-profile NAME` | h200-llama-8b | GPU and model |
//! | `--sim-speed X` | 1 | simulated seconds per real second |
//! | `--sim-seed N` | 0 | output lengths, words, jitter |
//! | `--sim-startup SECONDS` | 0 | how long the port stays closed |
//! | `--sim-fault SPEC` | none | a fault from the start, as `POST /sim/fault` takes it |
//!
//! Exit codes as vLLM's: 2 for flags it does not know, 1 for a start it refuses, 0 after SIGTERM or SIGINT (what is in
//! flight is cut) and 0 when the engine died, five seconds later.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::sim::config::{ConfigError, without_effect};
use crate::sim::cost::PROFILES;
use crate::sim::{Profile, SimConfig, server};
use crate::vllm::args::ServeArgs;

/// vLLM's watchdog looks at the engine this often, and ends the server when it is dead.
const WATCHDOG: Duration = Duration::from_secs(5);

const HELP: &str = "\
a process that behaves like `vllm serve` on a GPU that is not there

usage: sluice sim MODEL [flags of vllm serve] [--sim-*]
       sluice sim fit DATA   fits the constants to measured rows (see sluice sim fit --help)

  --host ADDRESS          (default 0.0.0.0)
  --port PORT             (default 8000; 0 picks a free one)
  --max-num-seqs N, --max-num-batched-tokens N, --max-model-len N,
  --long-prefill-token-threshold N, --served-model-name NAME..., and so on: as vllm serve
  --sim-profile NAME      GPU and model (default h200-llama-8b)
  --sim-speed X           simulated seconds per real second (default 1)
  --sim-seed N            output lengths, words, jitter (default 0)
  --sim-startup SECONDS   how long the port stays closed (default 0)
  --sim-fault SPEC        hang, die, stall=MS, reset-midstream[=TOKENS], garbage;
                          also later: POST /sim/fault
";

/// Flags of the simulator, taken out of the argv before vLLM's are read.
#[derive(Debug)]
struct SimFlags {
    profile: String,
    speed: f64,
    seed: u64,
    startup: Duration,
    fault: Option<crate::sim::Fault>,
}

/// `sluice sim MODEL [flags of vllm serve] [--sim-*]`: the flags are `vllm serve`'s own and read by ours.
#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    /// The model's name, then flags of `vllm serve` and `--sim-*` flags (see `sluice sim --help`)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<String>,
}

/// Runs `sluice sim` with what follows the subcommand.
pub fn run(args: Vec<String>) -> ExitCode {
    if args.first().is_some_and(|arg| arg == "fit") {
        return super::sim_fit::run(&args[1..]);
    }
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let (flags, argv) = match split(args) {
        Ok(split) => split,
        Err(error) => return usage(&error.to_string()),
    };
    let parsed = match ServeArgs::parse(&argv) {
        Ok(parsed) => parsed,
        Err(error) => return usage(&error.to_string()),
    };
    let Some(profile) = Profile::named(&flags.profile) else {
        return usage(&format!("argument --sim-profile: unknown '{}'; one of {}", flags.profile, PROFILES.join(", ")));
    };
    let config = match SimConfig::from_args(&parsed, profile) {
        Ok(config) => {
            SimConfig { speed: flags.speed, seed: flags.seed, startup: flags.startup, fault: flags.fault, ..config }
        }
        Err(error @ ConfigError::NoModel) => return usage(&error.to_string()),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let idle = without_effect(&parsed);
    if !idle.is_empty() {
        eprintln!("accepted without effect on the simulation: --{}", idle.join(" --"));
    }
    let host = parsed.text("host").unwrap_or("0.0.0.0").to_owned();
    let port = parsed.int("port").unwrap_or(8000);
    match serve(config, &host, port) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage(message: &str) -> ExitCode {
    eprintln!("usage: sluice sim MODEL [flags of vllm serve] [--sim-*]\nvllm serve: error: {message}");
    ExitCode::from(2)
}

fn split(args: Vec<String>) -> anyhow::Result<(SimFlags, Vec<String>)> {
    let mut flags =
        SimFlags { profile: PROFILES[0].to_owned(), speed: 1.0, seed: 0, startup: Duration::ZERO, fault: None };
    let mut rest = Vec::new();
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if !arg.starts_with("--sim-") {
            rest.push(arg);
            continue;
        }
        let (name, attached) = match arg.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (arg, None),
        };
        let value =
            attached.or_else(|| args.next()).ok_or_else(|| anyhow!("argument {name}: expected one argument"))?;
        let invalid = || anyhow!("argument {name}: invalid value: '{value}'");
        let positive = |least: f64| {
            value.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= least && *x <= 1e6).ok_or_else(invalid)
        };
        match name.as_str() {
            "--sim-profile" => flags.profile = value.clone(),
            "--sim-speed" => flags.speed = positive(1e-3)?,
            "--sim-seed" => flags.seed = value.parse().map_err(|_| invalid())?,
            "--sim-startup" => flags.startup = Duration::from_secs_f64(positive(0.0)?),
            "--sim-fault" => flags.fault = Some(value.parse().map_err(|error| anyhow!("argument {name}: {error}"))?),
            _ => return Err(anyhow!("unrecognized arguments: {name}")),
        }
    }
    Ok((flags, rest))
}

fn serve(config: SimConfig, host: &str, port: i64) -> anyhow::Result<()> {
    let port = u16::try_from(port).context("--port must be between 0 and 65535")?;
    let host = host.to_owned();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async move {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let startup = config.startup;
        let model = config.root.clone();
        let start = async {
            tokio::time::sleep(startup).await;
            let listener = TcpListener::bind((host.as_str(), port))
                .await
                .with_context(|| format!("OSError: cannot listen on {host}:{port}"))?;
            anyhow::Ok(server::spawn(config, listener)?)
        };
        let handle = tokio::select! {
            handle = start => handle?,
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        };
        println!("vLLM API server version 0.33.0 (simulated), model {model}");
        println!("Starting vLLM server on http://{}", handle.addr());
        println!("Application startup complete.");
        tokio::select! {
            _ = terminate.recv() => println!("[shutdown] API server: shutdown triggered"),
            _ = interrupt.recv() => println!("[shutdown] API server: shutdown triggered"),
            () = async { handle.died().await; tokio::time::sleep(WATCHDOG).await } => {
                eprintln!("EngineDeadError: EngineCore encountered an issue.");
            }
        }
        handle.shutdown().await;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_of(args: &[&str]) -> anyhow::Result<(SimFlags, Vec<String>)> {
        split(args.iter().map(|arg| (*arg).to_owned()).collect())
    }

    #[test]
    fn flags_of_the_simulator_are_taken_out() {
        let (flags, rest) = split_of(&["m", "--sim-speed", "2.5", "--port", "1", "--sim-seed=7"]).unwrap();
        assert_eq!((flags.speed, flags.seed, rest), (2.5, 7, vec!["m".into(), "--port".into(), "1".into()]));
    }

    #[test]
    fn wrong_flags_of_the_simulator_are_named() {
        for wrong in [&["--sim-speed", "0"][..], &["--sim-what", "1"], &["--sim-seed"], &["--sim-fault", "x"]] {
            assert!(split_of(wrong).unwrap_err().to_string().contains(wrong[0]), "{wrong:?}");
        }
    }
}
