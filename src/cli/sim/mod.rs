//! `sluice sim MODEL [flags of vllm serve] [--sim-*]`: a process that behaves like `vllm serve`.
//!
//! Flags of the simulator:
//!
//! | flag | default | meaning |
//! |---|---|---|
//! | `--sim-engine NAME` | vllm | `vllm`, or `sglang`: flags, pages, errors and log of SGLang |
//! | `--sim-gpu NAME` | h200 | a built-in GPU or a TOML file |
//! | `--sim-model NAME` | by name, else llama-3.1-8b | a built-in model or a TOML file |
//! | `--sim-host NAME` | busy | `busy`, `pair`, `quiet`, `trio`, or a file of `sluice sim fit` |
//! | `--sim-vllm-version X.Y` | 0.32.0 | version of flags and metrics |
//! | `--sim-speed X` | 1 | simulated seconds per real second |
//! | `--sim-seed N` | 0 | output lengths, words, jitter |
//! | `--sim-startup SECONDS` | 1 | real time of a cold start; `real`: as on the GPU |
//! | `--sim-device FILE` | none | the GPU; the process that holds the lock uses the memory |
//! | `--sim-orphan SECONDS` | 300 | the engine's process outlives a killed parent this long |
//! | `--sim-wake SECONDS` | 0 | real time to fall asleep or to wake (`/sleep`, `/wake_up`) |
//! | `--sim-acceptance A,B..` | 0.7 a position | share of drafts accepted up to each position |
//! | `--sim-fault SPEC` | none | a fault from the start, as in `POST /sim/fault` |
//!
//! A model that is a folder is read from the folder. A `real` start-up runs by the simulated clock.
//! Exit codes as in vLLM: 2 for unknown flags, 1 for a refused start, 0 after SIGTERM or SIGINT
//! (requests in flight are cut, or drained with `--shutdown-timeout`), and 0 within five seconds
//! after the engine died.

mod cache;
mod core;
mod fit_server;
mod fit;
mod flags;
mod sglang_args;
mod start;

use std::process::ExitCode;

use self::flags::split;
use self::sglang_args::SglangArgs;
use sluice_core::engines::EngineKind;
use sluice_core::vllm::args::{self, ArgsError, ServeArgs};
use sluice_core::vllm::version::Version;
use sluice_sim::process::config::without_effect;
use sluice_sim::{Constants, Gpu, Model, Refusal, Sglang, SimConfig};

pub use self::core::run_child;

const HELP: &str = "\
a process that behaves like `vllm serve` on a GPU that is not there

usage: sluice sim MODEL [flags of vllm serve] [--sim-*]
       sluice sim fit DATA           fits the constants to measured rows (see sluice sim fit --help)
       sluice sim fit --server URL   measures the host's constants on a running vLLM, in a minute

  --host ADDRESS          (default 0.0.0.0)
  --port PORT             (default 8000; 0 picks a free one)
  --max-num-seqs N, --max-num-batched-tokens N, --max-model-len N,
  --long-prefill-token-threshold N, --served-model-name NAME..., and so on: as vllm serve
                          (--help=all lists them, --help=WORD those with WORD in their names)
  --sim-engine NAME       vllm, or sglang: then the flags are those of sglang.launch_server
                          (--sim-engine sglang --help lists them; port 30000)
  --sim-gpu NAME          GPU: GPUS, or a TOML file (default h200)
  --sim-model NAME        MODELS, or a TOML file
                          (default: by the model's name, else llama-3.1-8b)
  --sim-host NAME         HOSTS, or a TOML file of `sluice sim fit` (default busy; pair:
                          also two engines beside a gateway, other machines; quiet: one engine)
  --sim-vllm-version X.Y  whose flags and metrics (default 0.32.0; 0.6.0 or later)
  --sim-speed X           simulated seconds per real second (default 1)
  --sim-seed N            output lengths, words, jitter (default 0)
  --sim-startup SECONDS   real time of a cold start (default 1), or `real`
  --sim-device FILE       the GPU: a second engine on it finds it taken
  --sim-orphan SECONDS    how long the engine's process outlives a killed parent (default 300)
  --sim-wake SECONDS      real time to fall asleep or to wake: POST /sleep, /wake_up (default 0)
  --sim-acceptance A,B..  share of drafts accepted up to each position, with --speculative-config
                          (default: 0.7 for each after the one before it, a guess)
  --sim-fault SPEC        hang, die, stall=MS, reset-midstream[=TOKENS], garbage, oom[=SEQUENCES],
                          slow-start[=SECONDS]; also later: POST /sim/fault
";

/// Arguments of `sluice sim`. The flags of `vllm serve` are parsed by [`ServeArgs`], not by clap.
#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    /// The model's name, then flags of `vllm serve` and `--sim-*` flags (see `sluice sim --help`)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<String>,
}

/// Runs `sluice sim` with the arguments after the subcommand.
pub fn run(args: Vec<String>) -> ExitCode {
    if args.first().is_some_and(|arg| arg == "fit") {
        return fit::run(&args[1..]);
    }
    let plays_sglang = args.windows(2).any(|pair| pair[0] == "--sim-engine" && pair[1] == "sglang")
        || args.iter().any(|arg| arg == "--sim-engine=sglang");
    if let Some(asked) = args.iter().find(|arg| *arg == "--help" || *arg == "-h" || arg.starts_with("--help=")) {
        print!("{}", if plays_sglang { sglang_args::help() } else { help(asked) });
        return ExitCode::SUCCESS;
    }
    let (flags, argv) = match split(args) {
        Ok(split) => split,
        Err(error) => return usage("vllm serve", &error.to_string()),
    };
    let (argv, sglang) = match flags.engine {
        EngineKind::Sglang => match sglang_args::read(&argv) {
            Ok(SglangArgs { argv, metrics }) => (argv, Some(Sglang { metrics })),
            Err(error) => {
                eprintln!("usage: launch_server.py [-h] --model-path MODEL_PATH ...\nlaunch_server.py: error: {error}");
                return ExitCode::from(2);
            }
        },
        _ => (argv, None),
    };
    let args = match ServeArgs::parse_as(flags.version, &argv) {
        Ok(args) => args,
        Err(error) => return refused_arguments(&error),
    };
    let profile = match flags.profile(args.model().unwrap_or_default()) {
        Ok(profile) => profile,
        Err(error) => return usage("vllm serve", &error.to_string()),
    };
    let occupied = match flags.device.as_deref().map(self::core::occupied).transpose() {
        Ok(occupied) => occupied.unwrap_or(0.0),
        Err(error) => return usage("vllm serve", &format!("{error:#}")),
    };
    let settled = |config: SimConfig| SimConfig {
        speed: flags.speed,
        seed: flags.seed,
        wake: flags.wake,
        fault: flags.fault,
        sglang,
        // A server of SGLang that generates has no embeddings.
        embeddings: config.embeddings && sglang.is_none(),
        ..config.imitating(flags.version)
    };
    match SimConfig::with_occupied(&args, profile.clone(), occupied).map(settled) {
        Err(refusal @ (Refusal::NoModel | Refusal::Argument(_))) => usage("vllm serve", &refusal.to_string()),
        Err(refusal) => {
            // The nearest valid settings give the log lines up to the failure.
            let nearest = SimConfig::sketch(&args, profile);
            start::run(settled(nearest), &args, &flags, Some(refusal))
        }
        Ok(mut config) => {
            if let Err(why) = config.set_acceptance(&flags.acceptance) {
                return usage("vllm serve", &format!("argument --sim-acceptance: {why}"));
            }
            if config.acceptance_is_assumed() {
                eprintln!("the acceptance of drafts is a guess, 0.7 a position: measure it and give --sim-acceptance");
            }
            let idle = without_effect(&args, flags.version);
            if !idle.is_empty() {
                eprintln!("accepted without effect on the simulation: --{}", idle.join(" --"));
            }
            start::run(config, &args, &flags, None)
        }
    }
}

/// The help about the simulator's flags; with `--help=all` also vLLM's flags; with `--help=WORD`
/// vLLM's flags that contain the word.
fn help(asked: &str) -> String {
    let names = |names: Vec<&str>| names.join(", ");
    let own = HELP
        .replace("GPUS", &names(Gpu::names().collect()))
        .replace("MODELS", &names(Model::names().collect()))
        .replace("HOSTS", &names(Constants::hosts().collect()));
    let word = match asked.split_once('=') {
        None => return own,
        Some((_, "all")) => "",
        Some((_, word)) => word,
    };
    match args::help(Version::COMPARED, word) {
        found if word.is_empty() => format!("{own}\nflags of vllm serve {}:\n{found}", Version::COMPARED),
        found if found.is_empty() => {
            format!("No group or arguments matching '{word}'.\nUse '--help=all' to see all available parameters.\n")
        }
        found => format!("Arguments matching '{word}':\n{found}"),
    }
}

fn usage(prog: &str, message: &str) -> ExitCode {
    eprintln!("usage: vllm serve [model_tag] [options]\n{prog}: error: {message}");
    ExitCode::from(2)
}

/// Reports an error as argparse does, in which the top-level parser reports unknown flags.
fn refused_arguments(error: &ArgsError) -> ExitCode {
    if !error.is_from_main_parser() {
        return usage("vllm serve", &error.to_string());
    }
    let hint = if error.to_string().contains("--task") {
        "\n\nHint: --task is not a vllm serve option. For embedding, reranking, or reward models, use --runner pooling. To \
         adapt a generative model for pooling, also use --convert embed, --convert classify, or --convert reward."
    } else {
        ""
    };
    eprintln!(
        "usage: vllm [-h] [-v]\n            \
         {{chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}}\n            ...\n\
         vllm: error: {error}{hint}"
    );
    ExitCode::from(2)
}
